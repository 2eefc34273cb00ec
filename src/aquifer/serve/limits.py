"""Limits of a connection: how long it may take, and how many bytes of bodies are held."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from aquifer.serve.chunked import CHUNKS, ChunkedConnection, framed
from aquifer.sizes import format_size

MAX_CONNECTIONS = 4096
"""Connections of a web process; more are answered with 503."""
ACCEPTED_AT_ONCE = 8
"""Connections that are accepted before those that are open are read again. asyncio would otherwise
accept all that wait: the first of 64 requests that arrive together would reach the engine after
some 50 ms, in which a GPU is idle."""
MAX_BODY_BYTES = 16 << 20
HEADERS_S = 15.0
"""How long a client may take for the headers of a request; then its connection is closed."""
MAX_HEADER_BYTES = 16 << 10
"""Bytes of the path and the headers of a request: uvicorn's own limit."""
_BODY_S = 120.0
_BODY_PAUSE_S = 15.0
_SMALL_BODY_BYTES = 64 << 10
_ALL_BODIES_BYTES = 256 << 20
"""The most bytes of bodies that a server holds, without small ones: these are always let in."""
# How much of a body that is too large is read and discarded, so that its sender reads the response
# instead of failing with a broken pipe.
_LINGER_BYTES = 64 << 20
_LINGER_S = 5.0


def allow_connections() -> None:
    """Raise this process's limit of open files, if it may, to what the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which frames streams cheaply and limits the time that headers take."""

    _headers_timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.conn: ChunkedConnection = ChunkedConnection(MAX_HEADER_BYTES)

    @property
    def can_write_chunk(self) -> bool:
        """Whether a chunk of the running response may be written without waiting."""
        return (
            self.conn.is_chunked and not self.flow.write_paused and not self.transport.is_closing()
        )

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk of the running response. Pre-condition: `can_write_chunk`."""
        self.transport.write(framed(data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first headers."""
        super().connection_made(transport)
        self._time_headers()

    def handle_events(self) -> None:
        """Handle what has arrived; wait for the rest of the headers if a part of them has."""
        super().handle_events()
        if self.scope is not None:
            self.scope.setdefault("extensions", {})[CHUNKS] = {"protocol": self}
        self._time_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and close the connection."""
        if self.conn.has_long_headers:
            limit = format_size(MAX_HEADER_BYTES)
            msg = f"The path and headers are larger than {limit}; send shorter ones."
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waiting, and let go of the request: it refers to this protocol, and what only a
        collection of garbage can free makes all streams wait for that."""
        super().connection_lost(exc)
        self._stop_timer()
        self.scope = self.cycle = None  # type: ignore[assignment]

    def _time_headers(self) -> None:
        is_first = self.cycle is None
        if is_first or (self.cycle.response_complete and self.conn.trailing_data[0]):
            if self._headers_timer is None:
                self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.close)
        else:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None


class BodyReader:
    """Reads bodies of requests, within limits of size, of time and of all bodies together.

    Args:
        num_processes: web processes of the server, which share what it may hold.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self._most_bytes = max(_ALL_BODIES_BYTES // num_processes, MAX_BODY_BYTES)
        self._held_bytes = 0  # of bodies that are not small

    @asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body of a request; it counts as held until the context ends.

        Raises:
            HTTPException: a limit is exceeded.
            ClientDisconnect: the client is gone.
        """
        held = _Held()
        try:
            try:
                async with asyncio.timeout(_BODY_S):
                    content = await self._read(request, held)
            except TimeoutError:
                raise _refusal(408, "the body took too long to arrive; send it faster") from None
            yield content
        finally:
            self._held_bytes -= held.num_bytes

    async def _read(self, request: Request, held: _Held) -> bytes:
        """Read the whole body; `held` tells at any time how much of it is held."""
        chunks: list[bytes] = []
        num_bytes = 0
        length = request.headers.get("content-length", "")
        is_too_large = length.isdecimal() and (len(length) > 20 or int(length) > MAX_BODY_BYTES)
        stream = request.stream()
        while not is_too_large:
            async with asyncio.timeout(_BODY_PAUSE_S):
                chunk = await anext(stream, None)
            if chunk is None:
                return b"".join(chunks)
            chunks.append(chunk)
            num_bytes += len(chunk)
            is_too_large = num_bytes > MAX_BODY_BYTES
            if num_bytes > _SMALL_BODY_BYTES:
                self._hold(num_bytes - held.num_bytes, held)
        chunks.clear()
        if "expect" not in request.headers:  # with it, the sender has not sent the body
            await _drop_rest(stream)
        raise _refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send less")

    def _hold(self, num_bytes: int, held: _Held) -> None:
        if self._held_bytes + num_bytes > self._most_bytes:
            raise _refusal(
                503,
                f"the server holds {format_size(self._most_bytes)} of other bodies; try again",
                {"Retry-After": "1"},
            )
        self._held_bytes += num_bytes
        held.num_bytes += num_bytes


@dataclass(slots=True)
class _Held:
    """How much of a body counts as held."""

    num_bytes: int = 0


async def _drop_rest(stream: AsyncGenerator[bytes, None]) -> None:
    """Read and discard what follows."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > _LINGER_BYTES:
                    return


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> HTTPException:
    """An answer after which the connection is closed, because more of the body may follow."""
    return HTTPException(status, message, {"Connection": "close", **(headers or {})})
