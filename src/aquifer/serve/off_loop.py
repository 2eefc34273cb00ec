"""Work on texts beside the event loop of a web process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

_INLINE_CHARS = 4096  # longer texts are tokenised in a thread
_SLOW_S = 0.1  # a usual tokenizer encodes that many characters in a few milliseconds
_MOST_THREADS = 8  # of one model

_T = TypeVar("_T")


class OffLoop:
    """Runs a model's work on texts; in threads if it may take long, so that other streams continue.

    How long a text takes is told by its length. Should a short one take long nevertheless, then the
    model is `slow`, and all its work is done in threads. They are few, so that slow models do not
    take those of others.

    For one event loop.

    Args:
        slow_s: time from which on a short text counts as slow.

    Attributes:
        is_slow: whether a short text was slow.
    """

    def __init__(self, slow_s: float = _SLOW_S) -> None:
        self.is_slow = False
        self._slow_s = slow_s
        self._threads = anyio.CapacityLimiter(_MOST_THREADS)

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return `work()`.

        Args:
            size: characters or tokens that it looks at.
            work: the work.
        """
        if size > _INLINE_CHARS or self.is_slow:
            return await anyio.to_thread.run_sync(work, limiter=self._threads)
        started_s = time.perf_counter()
        try:
            return work()
        finally:
            if time.perf_counter() - started_s >= self._slow_s:
                self.is_slow = True
