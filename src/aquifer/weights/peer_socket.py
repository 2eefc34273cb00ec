"""Messages between the engine processes of one machine: JSON, with file descriptors of pages.

They go over Unix sockets in a folder that only the server's user can open. A process listens at one
of them, under a name of its own.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_FILES = 64
"""Most file descriptors of one message; Linux allows 253."""

_HEADER_BYTES = 4  # the length of what follows
_MOST_BYTES = 64 << 20
_SUFFIX = ".weights"
_UNREADY = ".unready"  # the same before it listens
_ALIVE_S = 1.0
"""How long a process may take to accept a connection."""


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """Listen at a name of its own; returns the socket and its path.

    Args:
        folder: where to; it is made if there is none.

    Raises:
        OSError: it cannot be made, or other users can open the folder.
    """
    while True:
        folder.mkdir(0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has removed it while it was empty
            return _listen_in(folder)


def paths_in(folder: Path) -> Iterator[Path]:
    """The sockets in a folder; some may be of processes that are gone."""
    return folder.glob(f"*{_SUFFIX}")


def forget(folder: Path, pid: int) -> None:
    """Remove what a process that was killed has left, and the folder with its last socket."""
    for path in folder.glob(f"{pid}-*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it has others, or was never made
        folder.rmdir()


def forget_dead(folders: Iterable[Path]) -> None:
    """Remove what is left in folders where all processes were killed, and these folders."""
    for folder in folders:
        for path in (*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*{_UNREADY}")):
            with suppress(OSError):  # one that listens does not answer, or another user's
                try:
                    connect(path, _ALIVE_S).close()
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)
        with suppress(OSError):  # it has others
            folder.rmdir()


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a socket; each operation on the connection may take so long.

    Raises:
        OSError: nothing listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: Sequence[Any], files: Sequence[int] = ()) -> None:
    """Send a message, with at most `MOST_FILES` descriptors.

    Raises:
        OSError: the other process is gone, or does not read.
    """
    body = json.dumps(message).encode()
    data = len(body).to_bytes(_HEADER_BYTES, "big") + body
    sent = socket.send_fds(connection, [data], files) if files else 0
    if sent < len(data):  # the other process may have all, and close the connection
        connection.sendall(data[sent:])


def receive(connection: socket.socket) -> tuple[list[Any], list[int]]:
    """Receive a message, and its descriptors, which the caller closes.

    Raises:
        EOFError: the connection has ended.
        OSError: likewise, or the rest of a message does not come.
        ValueError: it is no message.
    """
    header, files, _, _ = socket.recv_fds(connection, _HEADER_BYTES, MOST_FILES)
    try:
        header += _exactly(connection, _HEADER_BYTES - len(header))
        num_bytes = int.from_bytes(header, "big")
        if num_bytes > _MOST_BYTES:
            raise ValueError(f"a message of {num_bytes} bytes")
        message = json.loads(_exactly(connection, num_bytes))
        if not isinstance(message, list):
            raise ValueError("a message that is no list")
    except RecursionError as error:
        close_files(files)
        raise ValueError("a message that is nested too deep") from error
    except BaseException:
        close_files(files)
        raise
    return message, list(files)


def close_files(files: Sequence[int]) -> None:
    """Close descriptors."""
    for file in files:
        os.close(file)


def _listen_in(folder: Path) -> tuple[socket.socket, Path]:
    """Listen in a folder that there is; see `listen`."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is no folder that only this user can open")
    path = folder / f"{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"
    unready = path.with_suffix(_UNREADY)  # one that is found but does not listen counts as left
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(unready))
        listener.listen()
        unready.rename(path)
    except BaseException:
        listener.close()
        unready.unlink(missing_ok=True)
        raise
    return listener, path


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
