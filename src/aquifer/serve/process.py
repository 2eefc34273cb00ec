"""The engine process: owns the device, reads the pipe, steps the engine.

The server's first process decides when to abort and when to close; if it ends, this process exits.
An exception in the loop is a broken device or a bug in Aquifer: it ends this process with a
traceback and a non-zero exit code. The first process sees the end of the pipe, and starts another
one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.policies.placement import DeviceReport
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import AquiferError, ConfigError, DriverError, RequestError
from aquifer.garbage import PacedCollections, collect_less, collect_nothing
from aquifer.hub import here
from aquifer.predict.ended import EndedOutput
from aquifer.process_name import name_process
from aquifer.serve.logs import configure_logging
from aquifer.serve.messages import (
    Abort,
    AbortAll,
    Add,
    Close,
    FromEngine,
    GetMemory,
    KeepAlive,
    Learn,
    Manage,
    Managed,
    Memory,
    OpenFailed,
    Pin,
    Ping,
    Pinned,
    Pong,
    Ready,
    Register,
    Registered,
    Remove,
    Step,
    ToEngine,
    Unpin,
    Withdraw,
)
from aquifer.serve.open_completions import OpenCompletions
from aquifer.serve.pipe import ignore_stop_signals

_MOST_IDLE_S = 3600.0
"""Time after which an idle engine looks again; a pipe cannot be waited for longer than 24 days."""


class EngineLike(Protocol):
    """Interface of the engine to this loop; `aquifer.engine.engine.Engine` implements it.

    Attributes:
        on_launch: called with the model of each step, and its number of tokens, before it is
            launched.
        on_wait: called before a step waits for the device, which works.
    """

    on_launch: Callable[[str, int], None]
    on_wait: Callable[[], None]

    @property
    def models(self) -> dict[str, ModelInfo]:
        """Served models, by name."""

    def add(self, request: Request) -> None:
        """Accept a request, or raise a `RequestError`."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request, or one completion of it; its pages are free when this returns."""

    def withdraw(self, model: str, most: int) -> list[str]:
        """Give up requests of a model that have never run, those that came first; return ids."""

    def keep_alive(self, model: str, seconds: float) -> None:
        """Keep the weights of a model for so long without a request, from now on."""

    def step(self) -> list[TokenOutput]:
        """Run one batch."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def should_step(self) -> bool:
        """Whether a step should be launched before more requests are added."""

    def stats(self) -> EngineStats:
        """Return counters; cheap enough for every step."""

    def memory(self) -> MemoryReport:
        """Return the breakdown of the pool's budget."""

    def device_report(self) -> DeviceReport:
        """Return what placement needs to know; cheap enough for every step."""

    def share_lengths(self) -> None:
        """Learn from outputs that have ended only what `learn_lengths` says."""

    def take_ended(self) -> dict[str, list[EndedOutput]]:
        """Return the outputs that have ended since the last call, by model, where they matter."""

    def learn_lengths(self, model: str, ended: list[EndedOutput]) -> None:
        """Learn from outputs of a model that have ended."""

    def pin_prefix(self, model: str, token_ids: list[int], salt: str | None, client: str) -> int:
        """Pin the KV of a prefix; return the tokens pinned, or raise a `RequestError`."""

    def unpin_prefix(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """Unpin the KV of a prefix."""

    def ask_for_model(self, name: str) -> None:
        """Begin to load a model, or raise a `RequestError`."""

    def unload_model(self, name: str) -> None:
        """Take the weights of a model out of the pool, or raise a `RequestError`."""

    def pin_model(self, name: str) -> None:
        """Load a model and keep its weights, or raise a `RequestError`."""

    def unpin_model(self, name: str) -> None:
        """The opposite of `pin_model`."""

    def add_model(self, spec: ModelSpec, *, load: bool) -> ModelInfo:
        """Register a model, or raise a `ConfigError` or a `DriverError`."""

    def remove_model(self, name: str) -> None:
        """Remove a model, or raise a `RequestError`."""

    def prepare(self) -> bool:
        """Do a little, of 1 or 2 ms, for requests to come; False if there is nothing to do."""

    @property
    def idle_s(self) -> float | None:
        """Time until a step has something to do, if no message comes; None for any time."""

    def close(self) -> None:
        """Release all memory and close the device."""


OpenEngine = Callable[[EngineConfig, Callable[[LoadProgress], None]], EngineLike]


def open_engine(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> EngineLike:
    """Open the engine; imported here, so that only this process imports torch."""
    from aquifer.engine.engine import Engine

    return Engine.open(config, on_progress)


class CurrentModel:
    """The model that the engine process loads or computes, in memory shared with its parent.

    It can still be read when the process has died.

    Args:
        buffer: shared memory for the name.
    """

    MOST_BYTES = 4096
    """Size of the buffer; a longer name is cut, and then no model is known to have it."""

    def __init__(self, buffer: ctypes.Array[ctypes.c_char]) -> None:
        self._buffer = buffer
        self._set: str | None = None  # by this process

    def set(self, name: str) -> None:
        """The process begins to load or to compute this model."""
        if name != self._set:
            self._set = name
            self._buffer.value = name.encode()[: self.MOST_BYTES - 1]

    def clear(self) -> None:
        """The process waits."""
        if self._set is not None:
            self._set = None
            self._buffer.value = b""

    @property
    def name(self) -> str | None:
        """The model, or None if the process waits."""
        return self._buffer.value.decode(errors="replace") or None


def run_engine_process(
    connection: Connection,
    config: EngineConfig,
    open_it: OpenEngine,
    current: CurrentModel,
    log_level: str,
    *,
    reports: bool,
) -> None:
    """Run the engine process: open the engine, serve the pipe, close, end the process.

    Args:
        connection: this process's end of the pipe; reads fail when the first process ends.
        config: the engine's options.
        open_it: opens the engine.
        current: is told which model is loaded or computed.
        log_level: least level of messages to log.
        reports: whether to report the device, for placement among several.
    """
    name_process("aquifer-engine")
    collect_nothing()
    configure_logging(log_level)
    ignore_stop_signals()
    _end_with_parent()

    def on_progress(progress: LoadProgress) -> None:
        current.set(progress.model)
        connection.send(progress)

    # If the connection raises one of these, the first process has ended or cannot be reached.
    with suppress(EOFError, ConnectionError, TimeoutError):
        try:
            models = tuple(map(here, config.models))
            engine = open_it(replace(config, models=models), on_progress)
        except (ConfigError, DriverError) as error:
            is_config = isinstance(error, ConfigError)
            model = error.model if isinstance(error, ConfigError) else None
            _send(connection, OpenFailed(str(error), is_config, model))
        else:
            _send(connection, Ready(engine.models, engine.stats(), engine.device_report()))
            collect_less()  # a tenth of the start, for which the server need not wait
            engine.on_wait = PacedCollections().collect_some
            _run(engine, connection, current, reports=reports)
            engine.close()
    _end()


def _end_with_parent() -> None:
    """End this process, whatever it does, when the process that started it is gone.

    On another node than the server, that is not the one at the other end of the connection.
    """
    parent = parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, name="aquifer-parent", daemon=True).start()


def _end() -> NoReturn:
    """End this process, without the time that Python takes to free what torch has imported.

    A server that stops waits for the process, and that takes the better part of a second.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(
    engine: EngineLike, connection: Connection, current: CurrentModel, *, reports: bool
) -> None:
    """Handle messages and step the engine until a `Close` arrives.

    Args:
        engine: the engine.
        connection: this process's end of the pipe.
        current: is told which model is computed.
        reports: whether to report the device.
    """
    launched: tuple[str, int] | None = None

    def on_launch(model: str, num_tokens: int) -> None:
        nonlocal launched
        current.set(model)
        launched = model, num_tokens

    engine.on_launch = on_launch
    engine.share_lengths()
    running = OpenCompletions()
    reported: DeviceReport | None = None
    while True:
        launched = None
        refused: dict[int, AquiferError] = {}
        withdrawn: dict[str, list[str]] = {}
        timeout_s: float | None = 0.0
        if not engine.has_work:
            current.clear()
            while not connection.poll(0.0) and engine.prepare():
                pass
            timeout_s = engine.idle_s
            if timeout_s is not None:
                timeout_s = min(timeout_s, _MOST_IDLE_S)
        while not engine.should_step and connection.poll(timeout_s):
            timeout_s = 0.0
            message: ToEngine = connection.recv()
            match message:
                case Add(request, number):
                    try:
                        engine.add(request)
                    except RequestError as error:
                        refused[number] = error
                    else:
                        running.add(request, number)
                case Abort(request_id, index):
                    engine.abort(request_id, index)
                    running.end(request_id, index)
                case AbortAll(process):
                    for request_id in running.of_process(process):
                        engine.abort(request_id)
                        running.end(request_id, None)
                case Withdraw(model, most):
                    withdrawn.setdefault(model, []).extend(engine.withdraw(model, most))
                    for request_id in withdrawn[model]:
                        running.end(request_id, None)
                case KeepAlive(model, seconds):
                    engine.keep_alive(model, seconds)
                case GetMemory():
                    _send(connection, Memory(engine.memory()))
                case Pin() | Unpin():
                    _send(connection, Pinned(_pin(engine, message)))
                case Manage():
                    _send(connection, Managed(_manage(engine, message)))
                case Register(spec):
                    current.set(spec.name)
                    _send(connection, Registered(_register(engine, spec)))
                case Remove(model):
                    _send(connection, Managed(_refused(partial(engine.remove_model, model))))
                case Learn(model, ended):
                    engine.learn_lengths(model, ended)
                case Ping():
                    _send(connection, Pong())
                case Close():
                    return
        outputs, completed = running.pack(engine.step() if engine.has_work else ())
        outputs.refused.update(refused)
        report = engine.device_report() if reports else None
        news = None if report == reported else report
        step = Step(
            outputs, engine.stats(), launched, completed, news, engine.take_ended(), withdrawn
        )
        _send(connection, step)
        reported = report


def _pin(engine: EngineLike, message: Pin | Unpin) -> int | RequestError:
    """Pin or unpin; return the number of tokens pinned, or the error."""
    try:
        if isinstance(message, Pin):
            return engine.pin_prefix(message.model, message.token_ids, message.salt, message.client)
        engine.unpin_prefix(message.model, message.token_ids, message.salt)
    except RequestError as error:
        return error
    return 0


def _manage(engine: EngineLike, message: Manage) -> AquiferError | None:
    """Do something with a model; return the error, if it is refused."""
    operations = {
        "load": engine.ask_for_model,
        "unload": engine.unload_model,
        "pin": engine.pin_model,
        "unpin": engine.unpin_model,
    }
    return _refused(partial(operations[message.verb], message.model))


def _refused(operation: Callable[[], None]) -> AquiferError | None:
    """Do something; return the error, if it is refused."""
    try:
        operation()
    except RequestError as error:
        return error
    return None


def _register(engine: EngineLike, spec: ModelSpec) -> ModelInfo | AquiferError:
    """Register a model; return its description, or the error."""
    try:
        return engine.add_model(here(spec), load=False)
    except (ConfigError, DriverError) as error:
        return RequestError(str(error), param="model")


def _send(connection: Connection, message: FromEngine) -> None:
    connection.send(message)
