"""Server-sent events, without a server."""

from __future__ import annotations

import asyncio
from asyncio import constants
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aquifer.serve.http import EventStream


@pytest.mark.parametrize("num_events", [0, 3, 4, 5, 100])
def test_a_stream_with_a_backlog_lets_the_loop_run(num_events: int):
    """After a write to a broken connection, the event loop reports the loss in its next pass.
    asyncio logs a warning if more than a few writes follow before that pass."""
    assert asyncio.run(_most_writes_in_a_pass(num_events)) <= (
        constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES
    )


async def _most_writes_in_a_pass(num_events: int) -> int:
    """The most writes between two passes of the event loop, when all events are ready at once."""
    num_writes = most_writes = num_sent = 0

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(num_events):
            yield b"data: x\n\n"

    def next_pass() -> None:
        nonlocal num_writes
        num_writes = 0

    async def send(message: Any) -> None:
        nonlocal num_writes, most_writes, num_sent
        if num_writes == 0:
            asyncio.get_running_loop().call_soon(next_pass)
        num_writes += 1
        num_sent += message.get("body", b"") != b""
        most_writes = max(most_writes, num_writes)

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    await EventStream(events(), AsyncExitStack())({"type": "http"}, receive, send)
    assert num_sent == num_events
    return most_writes
