"""Streams whose first tokens take long: comments keep the connection, and errors are events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from aquifer.errors import RequestError
from aquifer.serve.answers import Piece
from aquifer.serve.endpoints import openai

COMMENT = b": the model is not ready yet\n\n"
PIECE = cast(Piece, "piece")


class Stream:
    """A stream that waits until it is told to go on, and what the client gets of it."""

    def __init__(self, error: RequestError | None = None) -> None:
        self.go_on = asyncio.Event()
        self.is_closed = False
        self.disconnected = asyncio.Event()
        self.sent: list[bytes] = []
        self._error = error

    async def batches(self, *_: object) -> AsyncGenerator[Any, None]:
        try:
            await self.go_on.wait()
            if self._error is not None:
                raise self._error
            yield [(0, 0, PIECE)]
            yield [(0, 0, PIECE), (0, 0, PIECE)]
        finally:
            self.is_closed = True

    async def receive(self) -> dict[str, str]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            if len(self.sent) == 2:
                self.go_on.set()

    async def respond(self) -> None:
        request = cast(Request, SimpleNamespace(receive=self.receive))
        response = await openai.stream(
            request, self.batches, lambda *piece: f"[{piece[2]}]".encode(), None
        )
        await response({"type": "http"}, self.receive, self.send)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_SILENT_S", 0.001)


@pytest.mark.usefixtures("patience")
def test_comments_until_the_first_tokens_come():
    async def run() -> Stream:
        stream = Stream()
        await stream.respond()
        return stream

    stream = asyncio.run(run())
    num_comments = stream.sent.count(COMMENT)
    assert num_comments >= 2
    assert stream.sent[:num_comments] == [COMMENT] * num_comments
    assert stream.sent[num_comments:] == [b"[piece]", b"[piece][piece]", b"data: [DONE]\n\n", b""]
    assert stream.is_closed


@pytest.mark.usefixtures("patience")
def test_an_error_after_comments_is_an_event():
    async def run() -> Stream:
        stream = Stream(RequestError("the model is gone"))
        await stream.respond()
        return stream

    stream = asyncio.run(run())
    *comments, error, end = stream.sent
    assert set(comments) == {COMMENT}
    assert error.startswith(b"event: error\ndata: ")
    assert b"the model is gone" in error
    assert (end, stream.is_closed) == (b"", True)


def test_a_stream_in_time_has_no_comments():
    async def run() -> Stream:
        stream = Stream()
        stream.go_on.set()
        await stream.respond()
        return stream

    assert asyncio.run(run()).sent == [b"[piece]", b"[piece][piece]", b"data: [DONE]\n\n", b""]


def test_an_error_in_time_is_no_stream():
    async def run() -> None:
        stream = Stream(RequestError("no such thing"))
        stream.go_on.set()
        with pytest.raises(RequestError, match="no such thing"):
            await stream.respond()
        assert stream.is_closed

    asyncio.run(run())


def test_a_client_that_leaves_before_the_first_tokens():
    async def run() -> Stream:
        stream = Stream()
        responding = asyncio.create_task(stream.respond())
        await asyncio.sleep(0)
        stream.disconnected.set()
        with pytest.raises(ClientDisconnect):
            await responding
        return stream

    stream = asyncio.run(run())
    assert (stream.sent, stream.is_closed) == ([], True)
