"""Link to the engine process: the process and the pipe to it."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
from collections.abc import Callable

from aquifer.config import EngineConfig
from aquifer.serve.messages import FromEngine, Register, ToEngine
from aquifer.serve.pipe import Pipe, stop_signals_blocked
from aquifer.serve.process import CurrentModel, OpenEngine, run_engine_process

_EXIT_S = 4.0  # the engine process is killed if it takes longer to release its pages


class EngineLink:
    """Starts the engine process, and sends and receives its messages.

    Args:
        config: the engine's options.
        open_it: opens the engine, in the engine process.
        log_level: least level of messages that the engine process logs.
        reports: whether it reports the device, for placement among several.
    """

    def __init__(
        self, config: EngineConfig, open_it: OpenEngine, log_level: str, *, reports: bool
    ) -> None:
        context = multiprocessing.get_context("spawn")
        ours, self._theirs = context.Pipe()
        self._pipe = Pipe(ours, "aquifer-engine")
        names = [model.name for model in config.models]
        self._current = CurrentModel(names, context.RawValue(ctypes.c_int))
        self._process = context.Process(
            target=run_engine_process,
            args=(self._theirs, config, open_it, self._current, log_level),
            kwargs={"reports": reports},
            name="aquifer-engine",
            daemon=config.tensor_parallel_size == 1,  # one with ranks has processes of its own
        )

    def start(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[FromEngine | None], None]
    ) -> None:
        """Start the process.

        Args:
            loop: the event loop that calls `handle`.
            handle: called with each message, in order; with None when the pipe has ended.
        """
        with stop_signals_blocked():
            self._process.start()
        self._theirs.close()
        self._pipe.start(loop, handle)

    def send(self, message: ToEngine) -> None:
        """Send a message; it is lost if the process is gone."""
        if isinstance(message, Register):
            self._current.add(message.spec.name)
        self._pipe.send(message)

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
        self._pipe.close()
