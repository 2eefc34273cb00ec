"""Server-sent events, without a server."""

from __future__ import annotations

import asyncio
import sys
from asyncio import constants
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aquifer.serve.chunked import CHUNKS
from aquifer.serve.http import EventShortcut, EventStream, begin_now


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


class Writer:
    """A connection whose chunks can be written at some times."""

    def __init__(self) -> None:
        self.can_write_chunk = True
        self.written: list[bytes] = []

    def write_chunk(self, data: bytes) -> None:
        self.written.append(data)


@pytest.mark.parametrize("has_writer", [True, False])
def test_a_shortcut_is_open_while_the_stream_runs_and_can_be_written(has_writer: bool):
    writer, shortcut = Writer(), EventShortcut()
    scope = {"type": "http", "extensions": {CHUNKS: {"protocol": writer}} if has_writer else {}}
    was_open = [shortcut.is_open]
    with shortcut.of(scope):
        was_open.append(shortcut.is_open)
        if has_writer:
            shortcut.write(b"data")
        writer.can_write_chunk = False
        was_open.append(shortcut.is_open)
        writer.can_write_chunk = True
    was_open.append(shortcut.is_open)
    assert was_open == [False, has_writer, False, False]
    assert writer.written == [b"data"] * has_writer


def test_work_begins_before_its_task_waits_for_its_turn() -> None:
    """On Python 3.12 and later. In any case an error is the task's own."""
    happened: list[str] = []

    async def work(error: Exception | None = None) -> int:
        happened.append("begun")
        if error is not None:
            raise error
        await asyncio.sleep(0)
        return 7

    async def main() -> None:
        task = begin_now(work())
        happened.append("returned")
        assert await task == 7
        with pytest.raises(ValueError, match="wrong"):
            await begin_now(work(ValueError("wrong")))

    asyncio.run(main())
    assert happened[:2] == sorted(happened[:2], reverse=sys.version_info < (3, 12))
