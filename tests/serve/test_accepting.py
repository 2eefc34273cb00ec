"""Connections that arrive together: the first are answered before the last are accepted."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aquifer.serve.config import BACKLOG
from aquifer.serve.limits import ACCEPTED_AT_ONCE, TimedProtocol
from aquifer.serve.web import http_server

_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_NUM_CLIENTS = 5 * ACCEPTED_AT_ONCE


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _serve(listener: socket.socket, num_requests: int) -> int:
    """Serve until so many requests are answered; the backlog meanwhile."""
    num_answered = 0

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_answered
        await _app(scope, receive, send)
        num_answered += 1
        if num_answered == num_requests:
            server.should_exit = True

    server = http_server(counting, shutdown_timeout_s=1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0)
    backlog = _backlog_of(listener)
    await serving
    return backlog


def _backlog_of(listener: socket.socket) -> int:
    """Read a listening socket's limit of waiting connections.

    Linux reports it in the field `tcpi_sacked` of TCP_INFO.
    """
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (backlog,) = struct.unpack_from("I", info, 28)
    return int(backlog)


def test_the_first_are_read_before_the_last_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    made, received = TimedProtocol.connection_made, TimedProtocol.data_received

    def connection_made(self: TimedProtocol, transport: Any) -> None:
        happened.append("accepted")
        made(self, transport)

    def data_received(self: TimedProtocol, data: bytes) -> None:
        happened.append("read")
        received(self, data)

    monkeypatch.setattr(TimedProtocol, "connection_made", connection_made)
    monkeypatch.setattr(TimedProtocol, "data_received", data_received)
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
        clients = []
        for _ in range(_NUM_CLIENTS):  # all wait in the kernel, with a request, when it begins
            client = closing.enter_context(socket.create_connection(listener.getsockname()))
            client.sendall(_REQUEST)
            clients.append(client)
        backlog = asyncio.run(_serve(listener, _NUM_CLIENTS))
        assert all(client.recv(64).startswith(b"HTTP/1.1 204") for client in clients)
    assert happened.count("read") == _NUM_CLIENTS
    # asyncio accepts one more than it is told, and reads in the pass after that.
    assert happened.index("read") <= 2 * (ACCEPTED_AT_ONCE + 1)
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert backlog == min(BACKLOG, most)
