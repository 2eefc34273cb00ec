"""Link to an engine process: how it is started, and how messages go to it and come back."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol

from aquifer.config import EngineConfig
from aquifer.serve.messages import FromEngine, ToEngine
from aquifer.serve.pipe import Pipe, stop_signals_blocked
from aquifer.serve.process import CurrentModel, OpenEngine, run_engine_process

EXIT_S = 4.0
"""An engine process is killed if it takes longer to release its pages."""


class EngineLink(Protocol):
    """Starts one engine process, and sends and receives its messages.

    `ProcessLink` is one to a process of this machine, `aquifer.cluster.link.RemoteLink` one to a
    process that another machine starts.
    """

    def start(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[FromEngine | None], None]
    ) -> None:
        """Start the process.

        Args:
            loop: the event loop that calls `handle`.
            handle: called with each message, in order; with None at their end.
        """

    def send(self, message: ToEngine) -> None:
        """Send a message; it is lost if the process is gone."""

    def kill(self) -> None:
        """Kill the process at once."""

    def join(self) -> None:
        """Wait until the process has exited, and end the threads; it is killed if it takes long."""

    @property
    def current_model(self) -> str | None:
        """The model that the process computed when it died. Pre-condition: `join`."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, negative for a signal. Pre-condition: `join`."""


NewLink = Callable[[EngineConfig], EngineLink]
"""Makes the link to an engine process with these options, which is not started yet."""


class EngineProcess:
    """An engine process, as its parent sees it.

    Args:
        connection: the engine process's end of the connection to the server.
        config: the engine's options.
        open_it: opens the engine, in the engine process.
        log_level: least level of messages that the engine process logs.
        reports: whether it reports the device, for placement among several.
    """

    def __init__(
        self,
        connection: Connection,
        config: EngineConfig,
        open_it: OpenEngine,
        log_level: str,
        *,
        reports: bool,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection = connection
        self._current = CurrentModel(context.RawArray(ctypes.c_char, CurrentModel.MOST_BYTES))
        self._process: SpawnProcess = context.Process(
            target=run_engine_process,
            args=(connection, config, open_it, self._current, log_level),
            kwargs={"reports": reports},
            name="aquifer-engine",
            daemon=config.tensor_parallel_size == 1,  # one with ranks has processes of its own
        )

    def start(self) -> None:
        """Start the process."""
        with stop_signals_blocked():
            self._process.start()
        self._connection.close()  # the process has its own copy

    @property
    def pid(self) -> int:
        """The number of the process, which was started."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def current_model(self) -> str | None:
        """The model that the process loads or computes, or did when it died."""
        return self._current.name

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, negative for a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process at once, if it was started."""
        if self._process.pid is not None:
            self._process.kill()

    def join(self) -> None:
        """Wait until the process has exited; it is killed if it takes long."""
        self._process.join(EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class ProcessLink:
    """An `EngineLink` to a process of this machine, through a pipe.

    Args:
        config: the engine's options.
        open_it: opens the engine, in the engine process.
        log_level: least level of messages that the engine process logs.
        reports: whether it reports the device, for placement among several.
    """

    def __init__(
        self, config: EngineConfig, open_it: OpenEngine, log_level: str, *, reports: bool
    ) -> None:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self._pipe = Pipe(ours, "aquifer-engine")
        self._process = EngineProcess(theirs, config, open_it, log_level, reports=reports)

    def start(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[FromEngine | None], None]
    ) -> None:
        """Start the process; see `EngineLink.start`."""
        self._process.start()
        self._pipe.start(loop, handle)

    def send(self, message: ToEngine) -> None:
        """Send a message; it is lost if the process is gone."""
        self._pipe.send(message)

    @property
    def current_model(self) -> str | None:
        """The model that the process loads or computes, or did when it died."""
        return self._process.current_model

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, negative for a signal; None while it runs."""
        return self._process.exit_code

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def join(self) -> None:
        """Wait until the process has exited, and end the threads; it is killed if it takes long."""
        self._process.join()
        self._pipe.close()
