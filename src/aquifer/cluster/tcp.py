"""Connections between nodes: TCP, opened by a token that both sides have.

A message is unpickled only after both sides have shown that they know the token (an HMAC of a
random challenge, as `multiprocessing.connection` does it). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from aquifer.errors import ConfigError

_OPEN_S = 3.0
"""How long each step of opening a connection may take."""
_DEAD_MS = 4000
"""A connection ends if the other side has acknowledged nothing for this long."""
_BACKLOG = 64


class RefusedError(ConnectionError):
    """The other side does not answer, or does not know the token."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process of the cluster listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(host: str) -> socket.socket:
    """Listen on a free port of one address of this machine.

    Raises:
        ConfigError: it is no address of this machine.
    """
    try:
        return socket.create_server(
            (host, 0), family=_family(host), backlog=_BACKLOG, reuse_port=False
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}: {error.strerror}; give an address of this machine"
        ) from error


def accept(accepted: socket.socket, token: str) -> Connection:
    """Open the connection of a socket that was accepted, if the other side knows the token.

    Raises:
        RefusedError: it does not, or is too slow.
    """
    steps = deliver_challenge, answer_challenge
    return _opened(accepted, token, steps, "the other side")


def connect(address: Address, token: str) -> Connection:
    """Open a connection to a process that knows the token.

    Raises:
        RefusedError: it is not there, is too slow, or does not know the token.
    """
    try:
        opened = socket.create_connection((address.host, address.port), _OPEN_S)
        opened.settimeout(None)
    except OSError as error:
        raise RefusedError(f"{address} does not answer: {error}") from error
    steps = answer_challenge, deliver_challenge
    return _opened(opened, token, steps, str(address))


def shut(connection: Connection) -> None:
    """End a connection, so that reads at both sides end; it is closed later."""
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=socket.dup(connection.fileno())) as ours,
    ):
        ours.shutdown(socket.SHUT_RDWR)


def _opened(
    opened: socket.socket,
    token: str,
    steps: Sequence[Callable[[Connection, bytes], None]],
    peer: str,
) -> Connection:
    """The connection of a socket, once both sides have shown that they know the token.

    Args:
        opened: the socket.
        token: of the cluster.
        steps: the challenges of both sides, in the order of this side.
        peer: the other side, for the error.

    Raises:
        RefusedError: one fails.
    """
    connection = _prepared(opened)
    try:
        for step in steps:
            step(connection, token.encode())
    except (OSError, EOFError, AuthenticationError, ValueError, AssertionError) as error:
        connection.close()
        is_wrong = isinstance(error, AuthenticationError)
        refusal = "has another token" if is_wrong else "does not answer"
        raise RefusedError(f"{peer} {refusal} ({error!r})") from error
    _wait_for_ever(connection)
    return connection


def _prepared(opened: socket.socket) -> Connection:
    """The connection of a socket, each operation of which takes a bounded time."""
    with opened:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        _set_timeout(opened, _OPEN_S)
        return Connection(opened.detach())


def _wait_for_ever(connection: Connection) -> None:
    with socket.socket(fileno=socket.dup(connection.fileno())) as ours:
        _set_timeout(ours, 0.0)


def _set_timeout(opened: socket.socket, seconds: float) -> None:
    """Bound each operation by the kernel, as a `Connection` knows no time-outs; 0 for no bound."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
