"""Callers that wait for answers from another process, which come in the order of the questions."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Waiters:
    """The callers that wait for answers of one process.

    For one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[Any]] = deque()

    def add(self) -> asyncio.Future[Any]:
        """One more waits; returns the future of its answer."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return waiter

    def answer(self, answer: object) -> None:
        """Give the first one its answer, or raise the answer there if it is an exception."""
        waiter = self._waiting.popleft()
        if waiter.done():
            return  # the caller was cancelled
        if isinstance(answer, BaseException):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)

    def answer_all(self, answer: object) -> None:
        """Give all of them the same answer: there will be no others."""
        while self._waiting:
            self.answer(answer)
