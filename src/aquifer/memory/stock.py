"""The thread that creates pages before they are needed, and gives back retired ones.

A new page costs many times what one from stock does, and a growing batch needs some at nearly
every step. While a step computes, this thread fills the stock up again (vAttention, section 6.2:
allocation ahead of need, off the critical path). Unmapping costs as much, and is done here too,
once nothing in flight can touch the page (`retire.py`).

But not at once: a retired page that stays where it is costs nothing to the next sequence at the
same place (vAttention, section 5.4.2). So retired pages are left alone as long as enough others are
ready, idle or not created, and those that were given up first go first.
"""

from __future__ import annotations

import logging
import threading

from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool

_log = logging.getLogger(__name__)

_POLL_S = 0.002
"""How often to ask whether retired pages have come out of use, as long as some are wanted."""

STOCK_PAGES = 256
"""Untouched pages to keep: as many as sequences run at once by default, so that even if all grow in
the same step, none has to be created in it."""

_MAX_STOCK_BYTES = 1 << 30
"""What the stock is at most, where large pages were chosen."""

_READY_PAGES, _READY_FRACTION = 256, 1 / 16
"""How much has to be ready for retired pages to be left alone: as many pages as a step may need at
worst, for the same reason. Not more than that part of the budget, or in a small pool no page would
ever be taken back."""


class PageStocker:
    """Keeps untouched idle pages in a pool, and unmaps retired ones when the pool gets short.

    Args:
        pool: the pool.
        target_pages: how many to keep in stock, of the pool's own size; the pool's budget and its
            watermark come first, and no stock is larger than 1 GiB.
    """

    def __init__(self, pool: PagePool, target_pages: int = STOCK_PAGES) -> None:
        self._pool = pool
        self._target_bytes = min(target_pages * pool.page_bytes, _MAX_STOCK_BYTES)
        self._ready_bytes = min(
            _READY_PAGES * pool.page_bytes, int(pool.budget_bytes * _READY_FRACTION)
        )
        self._wanted = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="aquifer-page-stocker", daemon=True)

    def start(self) -> None:
        """Begin; nothing is created before the first `wake`."""
        self._pool.retired.on_retire = self.wake
        self._thread.start()

    def wake(self) -> None:
        """Pages may have been taken: look, and fill up."""
        self._wanted.set()

    def close(self) -> None:
        """End the thread. What is in stock stays in the pool."""
        self._closing = True
        self._wanted.set()
        self._thread.join()
        self._pool.retired.on_retire = None

    def _run(self) -> None:
        while True:
            self._wanted.wait(_POLL_S if self.wants_retired else None)
            self._wanted.clear()
            if self._closing:
                return
            try:
                while self._pool.stock(self._target_bytes) and not self._closing:
                    pass
            except DriverError as error:
                # No harm done: a caller that needs a page asks for it, and gets the error.
                _log.warning("could not create pages ahead of need: %s", error)
            while self.wants_retired and self._pool.retired.collect() and not self._closing:
                pass

    @property
    def wants_retired(self) -> bool:
        """Whether retired pages are to be unmapped now: there are some, and too few others."""
        return len(self._pool.retired) > 0 and self._pool.ready_bytes < self._ready_bytes
