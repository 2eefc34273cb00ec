"""Link to the engine process: the process, the pipe, and the threads that move messages."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from aquifer.config import EngineConfig
from aquifer.serve.messages import FromEngine, ToEngine
from aquifer.serve.process import STOP_SIGNALS, CurrentModel, OpenEngine, run_engine_process

_EXIT_S = 4.0  # the engine process is killed if it takes longer to release its pages


class EngineLink:
    """Starts the engine process, and sends and receives its messages.

    Two threads move messages, so that neither a full pipe nor a long message blocks the event loop:
    "aquifer-engine-reader" ends with the pipe, "aquifer-engine-writer" with a None in its queue.

    Args:
        config: the engine's options.
        open_it: opens the engine, in the engine process.
        log_level: least level of messages that the engine process logs.
    """

    def __init__(self, config: EngineConfig, open_it: OpenEngine, log_level: str) -> None:
        self._config = config
        self._open_it = open_it
        self._log_level = log_level
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()

    def start(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[FromEngine | None], None]
    ) -> None:
        """Start the process and the threads.

        Args:
            loop: the event loop that calls `handle`.
            handle: called with each message, in order; with None when the pipe has ended.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        names = [model.name for model in self._config.models]
        self._current = CurrentModel(names, context.RawValue(ctypes.c_int))
        self._process = context.Process(
            target=run_engine_process,
            args=(theirs, self._config, self._open_it, self._current, self._log_level),
            name="aquifer-engine",
            daemon=True,
        )
        with _stop_signals_blocked():
            self._process.start()
        theirs.close()
        self._reader = threading.Thread(
            target=_read,
            args=(self._connection, loop, handle),
            name="aquifer-engine-reader",
            daemon=True,
        )
        self._writer = threading.Thread(
            target=_write,
            args=(self._connection, self._outbox),
            name="aquifer-engine-writer",
            daemon=True,
        )
        self._reader.start()
        self._writer.start()

    def send(self, message: ToEngine) -> None:
        """Send a message; it is lost if the process is gone."""
        self._outbox.put(message)

    @property
    def current_model(self) -> str | None:
        """The model that the process loads or computes, or did when it died."""
        return self._current.name

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, negative for a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def join(self) -> None:
        """Wait until the process has exited, and end the threads; it is killed if it takes long."""
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._outbox.put(None)
        self._writer.join()
        self._reader.join()
        self._connection.close()


def _read(
    connection: Connection,
    loop: asyncio.AbstractEventLoop,
    handle: Callable[[FromEngine | None], None],
) -> None:
    while True:
        try:
            message: FromEngine | None = connection.recv()
        except (EOFError, OSError):
            message = None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(handle, message)
        if message is None:
            return


def _write(connection: Connection, outbox: queue.SimpleQueue[ToEngine | None]) -> None:
    while (message := outbox.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            continue  # the process is gone, which the reader reports


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM for processes started within this context.

    Otherwise Ctrl-C, which a terminal sends to all its processes, could end the engine process
    before it has arranged to ignore the signal.
    """
    resource_tracker.ensure_running()  # started within this context, it would unblock them
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
