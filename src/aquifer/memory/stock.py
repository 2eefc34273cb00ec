"""The thread that creates pages before they are needed, and gives back retired ones.

A new page costs many times what one from stock does, and a growing batch needs some at nearly
every step. While a step computes, this thread fills the stock up again (vAttention, section 6.2:
allocation ahead of need, off the critical path). Unmapping costs as much, and is done here too,
once nothing in flight can touch the page (`retire.py`).
"""

from __future__ import annotations

import logging
import threading

from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool

_log = logging.getLogger(__name__)

_POLL_S = 0.002
"""How often to ask whether retired pages have come out of use, as long as there are any."""


class PageStocker:
    """Keeps untouched idle pages in a pool, and unmaps retired ones.

    Args:
        pool: the pool.
        target_bytes: how much to keep in stock; the pool's budget and its watermark come first.
    """

    def __init__(self, pool: PagePool, target_bytes: int) -> None:
        self._pool = pool
        self._target_bytes = target_bytes
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
            self._wanted.wait(_POLL_S if len(self._pool.retired) else None)
            self._wanted.clear()
            if self._closing:
                return
            try:
                while self._pool.stock(self._target_bytes) and not self._closing:
                    pass
            except DriverError as error:
                # No harm done: whoever needs a page will ask for it, and be told.
                _log.warning("could not create pages ahead of need: %s", error)
            while self._pool.retired.collect() and not self._closing:
                pass
