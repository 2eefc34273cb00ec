"""One end of a pipe between two processes of a server, with the threads that move its messages."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Pipe:
    """Sends and receives messages for an event loop.

    Two threads move them, so that neither a full pipe nor a long message blocks the loop: the
    reader ends with the pipe, the writer with `close`.

    Args:
        connection: this process's end.
        name: of the other process, for the names of the threads.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any], None]) -> None:
        """Start the threads.

        Args:
            loop: the event loop that calls `handle`.
            handle: called with each message, in order; with None when the pipe has ended.
        """
        self._threads = [
            threading.Thread(target=target, args=args, name=f"{self._name}-{role}", daemon=True)
            for role, target, args in (
                ("reader", self._read, (loop, handle)),
                ("writer", self._write, ()),
            )
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: object) -> None:
        """Send a message, which is not None; it is lost if the other process is gone."""
        self._outbox.put(message)

    def finish_sending(self) -> None:
        """Send what is left. Nothing can be sent after this."""
        self._outbox.put(None)
        self._threads[1].join()

    def close(self) -> None:
        """Send what is left, and end the threads. Pre-condition: the other process is gone."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _read(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any], None]) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(handle, message)
            if message is None:
                return

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                continue  # the process is gone, which the reader reports


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM for processes started within this context.

    Otherwise Ctrl-C, which a terminal sends to all its processes, could end such a process before
    it has called `ignore_stop_signals`.
    """
    resource_tracker.ensure_running()  # started within this context, it would unblock them
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM: the server's first process decides when this one stops."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
