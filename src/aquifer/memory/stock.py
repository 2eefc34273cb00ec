"""The thread that creates pages before they are needed.

A new page costs many times what one from stock does, and a growing batch needs some at nearly
every step. While a step computes, this thread fills the stock up again (vAttention, section 6.2:
allocation ahead of need, off the critical path).
"""

from __future__ import annotations

import logging
import threading

from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool

_log = logging.getLogger(__name__)


class PageStocker:
    """Keeps untouched idle pages in a pool.

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
        self._thread.start()

    def wake(self) -> None:
        """Pages may have been taken: look, and fill up."""
        self._wanted.set()

    def close(self) -> None:
        """End the thread. What is in stock stays in the pool."""
        self._closing = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while self._wanted.wait() and not self._closing:
            self._wanted.clear()
            try:
                while self._pool.stock(self._target_bytes) and not self._closing:
                    pass
            except DriverError as error:
                # No harm done: whoever needs a page will ask for it, and be told.
                _log.warning("could not create pages ahead of need: %s", error)
