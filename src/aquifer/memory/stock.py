"""The thread that creates pages before they are needed, and gives back retired ones.

Creating a page takes many times as long as taking one from stock, and a growing batch needs some
at nearly every step. While a step computes, this thread fills the stock up again (vAttention,
section 6.2: allocation ahead of need, off the critical path). Unmapping takes as long, and is done
here too, once no work in flight can touch the page (`retire.py`).

Retired pages are not unmapped at once: one that stays mapped costs the next sequence at the same
place nothing (vAttention, section 5.4.2). So they are left alone as long as enough other pages are
ready, that is idle or not created. Those that were given up first are unmapped first.
"""

from __future__ import annotations

import logging
import threading

from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool

_log = logging.getLogger(__name__)

_POLL_S = 0.002
"""Interval at which the fences of retired pages are checked, while some of these are wanted."""

STOCK_PAGES = 256
"""Untouched pages to keep: enough for several prompts and a step in which all sequences grow."""

_MAX_STOCK_BYTES = 1 << 30
"""Largest stock in bytes, which matters where large pages were chosen."""


class PageStocker:
    """Keeps untouched idle pages in a pool, and unmaps retired ones when the pool gets short.

    Args:
        pool: the pool.
        target_pages: how many to keep in stock, of the pool's own size; the pool's budget and its
            watermark come first, and no stock is larger than 1 GiB.
        reclaim_below: share of the budget that has to be ready for retired pages to be left alone;
            1 to leave none alone.
    """

    def __init__(
        self, pool: PagePool, target_pages: int = STOCK_PAGES, reclaim_below: float = 0.1
    ) -> None:
        self._pool = pool
        self._target_bytes = min(target_pages * pool.page_bytes, _MAX_STOCK_BYTES)
        self._ready_bytes = int(pool.budget_bytes * reclaim_below)
        self._wanted = threading.Event()
        self._closing = False
        self._may_create = False  # since the last `wake`
        self._is_refused = False  # whether the last attempt to create pages was
        self._thread = threading.Thread(target=self._run, name="aquifer-page-stocker", daemon=True)

    def start(self) -> None:
        """Begin; nothing is created before the first `wake`."""
        self._pool.retired.on_retire = self._wake_to_collect
        self._thread.start()

    def wake(self) -> None:
        """Let the thread run if pages are missing in stock, or retired ones are wanted.

        To be called whenever pages may have been taken, and no step waits to be launched: the
        thread takes the interpreter's lock from the caller. So it is checked here whether there is
        anything to do.
        """
        if self._pool.num_to_stock(self._target_bytes):
            self._may_create = True
            self._wanted.set()
        elif self._has_to_collect:
            self._wanted.set()

    def close(self) -> None:
        """End the thread. What is in stock stays in the pool."""
        self._closing = True
        self._wanted.set()
        self._thread.join()
        self._pool.retired.on_retire = None

    def _run(self) -> None:
        self._pool.pages.enter_background()
        while True:
            self._wanted.wait(_POLL_S if self._has_to_collect else None)
            self._wanted.clear()
            if self._closing:
                return
            may_create, self._may_create = self._may_create, False
            try:
                while may_create and not self._closing and self._stock():
                    self._is_refused = False
            except DriverError as error:
                # No harm done: a caller that needs a page asks for it, and gets the error. It is
                # tried again at each step, so only the first refusal in a row is told.
                if not self._is_refused:
                    _log.warning("could not create pages ahead of need: %s", error)
                self._is_refused = True
            while not self._closing and self._collect():
                pass

    def _stock(self) -> bool:
        """Create some pages; whether there may be more to do."""
        self._pool.gate.wait()
        return self._pool.stock(self._target_bytes)

    def _collect(self) -> bool:
        """Unmap some retired pages; whether there may be more to do."""
        self._pool.gate.wait()
        return self._pool.retired.collect(frees_memory=self.wants_retired)

    def _wake_to_collect(self) -> None:
        """Let the thread run if retired pages are wanted, but not to create pages.

        What is evicted for a load is to be the load's: of pages that were made from it, others of
        another size would have to be made again.
        """
        if self._has_to_collect:
            self._wanted.set()

    @property
    def _has_to_collect(self) -> bool:
        return self._pool.retired.has_unwanted or self.wants_retired

    @property
    def wants_retired(self) -> bool:
        """Whether retired pages are to be unmapped now: there are some, and too few others."""
        return len(self._pool.retired) > 0 and self._pool.ready_bytes < self._ready_bytes
