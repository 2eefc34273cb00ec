"""Questions to an engine process, and the callers that wait for its answers."""

from __future__ import annotations

import asyncio
from typing import Any

from aquifer.errors import EngineError, UnavailableError
from aquifer.serve.link import EngineLink
from aquifer.serve.messages import GetMemory, Manage, Pin, Register, Remove, Unpin
from aquifer.serve.waiters import Waiters

RETRY_S = 5
"""When clients may try again while the engine process is started."""
ANSWER_S = 5.0
"""How long an answer may take that a client waits for: the engine answers between two steps."""

Question = GetMemory | Pin | Unpin | Manage | Register | Remove
"""A message that is answered, after all that were sent before it."""


class Questions:
    """Questions to an engine process that are not answered yet.

    For one event loop.
    """

    def __init__(self) -> None:
        self._waiters = Waiters()

    async def ask(
        self,
        link: EngineLink,
        question: Question,
        timeout_s: float | None = ANSWER_S,
        undo: Question | None = None,
    ) -> Any:
        """Send a question and return the answer, or raise it.

        Args:
            link: to the engine process.
            question: the question.
            timeout_s: how long to wait; None for as long as the process lives.
            undo: sent when the caller gives up, as the process does what it was asked all the same.
        """
        waiter = self._waiters.add()
        link.send(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            if undo is not None:
                self._waiters.add().cancel()  # no caller waits for its answer
                link.send(undo)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise UnavailableError(
                f"the engine has not answered for {timeout_s:g} s", RETRY_S
            ) from None

    def answer(self, answer: object) -> None:
        """Give the caller that has waited longest its answer."""
        self._waiters.answer(answer)

    def fail(self, error: EngineError) -> None:
        """Raise an error in all callers: the process is gone."""
        self._waiters.answer_all(error)
