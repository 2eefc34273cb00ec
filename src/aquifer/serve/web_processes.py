"""The web processes of a server that has several: started, fed, started again, and stopped."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.reports import ModelInfo
from aquifer.errors import AquiferError, EngineError
from aquifer.serve.config import LAST_BYTES_S, ServerConfig
from aquifer.serve.engine_metrics import summed
from aquifer.serve.hub import Hub
from aquifer.serve.messages import (
    Abort,
    AbortAll,
    Add,
    AddModel,
    Answer,
    Availability,
    FromWeb,
    GetRequestMetrics,
    ModelsChanged,
    Open,
    Opened,
    Outputs,
    Prepared,
    Question,
    RemoveModel,
    RequestMetricFamilies,
    Stop,
    ToWeb,
)
from aquifer.serve.pipe import Pipe, stop_signals_blocked
from aquifer.serve.questions import ANSWER_S
from aquifer.serve.supervisor import pause_s
from aquifer.serve.waiters import Waiters
from aquifer.serve.web_process import run_web_process

_METHODS = frozenset(
    {"memory", "metrics", "pin", "unpin", "prefixes", "snapshot", "manage", "register", "remove"}
)
"""Methods of the hub that web processes call."""

_logger = logging.getLogger(__name__)


class WebProcesses:
    """The `WebSide` of several processes, which accept connections of one socket.

    The engine process sends one message a step, however many web processes there are; it is divided
    here. A web process that dies takes its own connections with it: its requests are aborted, and
    another one is started.

    For one event loop.

    Args:
        hub: what they share.
        engine: options of the engine, with the models to serve.
        config: options of the HTTP side.
        listener: the socket.
    """

    def __init__(
        self, hub: Hub, engine: EngineConfig, config: ServerConfig, listener: socket.socket
    ) -> None:
        self._hub = hub
        self._engine = engine
        self._config = config
        self._listener = listener
        self._running: dict[int, _Process] = {}  # by serial number
        self._num_started = 0
        self._num_failures = 0  # in a row: deaths without a process that was opened between
        self._models: Mapping[str, ModelInfo] | None = None
        self._measured: list[Metric] = []  # by processes that are gone
        self._is_stopping = False
        self._stopped = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._restarting: set[asyncio.Task[None]] = set()

    # ---- as the hub sees them

    async def prepare(self) -> None:
        """Start the processes, and wait until each has loaded the tokenizers.

        Raises:
            ConfigError: a tokenizer or a template cannot be used.
            EngineError: a process died.
        """
        started = [self._start() for _ in range(self._config.api_server_count)]
        await asyncio.gather(*(process.prepared for process in started))

    async def open(self, models: Mapping[str, ModelInfo]) -> None:
        """Answer requests for these models, by served name; return once all processes do.

        Raises:
            EngineError: a process died.
        """
        self._models = models
        running = [*self._running.values()]
        for process in running:
            process.send(Open(dict(models)))
        await asyncio.gather(*(process.opened for process in running))

    async def add(self, spec: ModelSpec, info: ModelInfo) -> None:
        """Answer requests for one more model; return once all processes do.

        Raises:
            ConfigError: its tokenizer or template cannot be used; nothing has changed.
        """
        assert self._models is not None
        # A process that is started from now on has it.
        self._engine = replace(self._engine, models=(*self._engine.models, spec))
        self._models = {**self._models, spec.name: info}
        running = [*self._running.values()]
        try:
            await asyncio.gather(*(process.change(AddModel(spec, info)) for process in running))
        except AquiferError:
            await self.remove(spec.name)
            raise

    async def remove(self, name: str) -> None:
        """Answer no more requests for a model; return once no process does."""
        assert self._models is not None
        left = tuple(spec for spec in self._engine.models if spec.name != name)
        self._engine = replace(self._engine, models=left)
        self._models = {each: info for each, info in self._models.items() if each != name}
        running = [*self._running.values()]
        await asyncio.gather(*(process.change(RemoveModel(name)) for process in running))

    def deliver(self, outputs: Outputs) -> None:
        """Deliver outputs of the engine, to each process those of its own requests."""
        for serial, share in outputs.by_process().items():
            if (process := self._running.get(serial)) is not None:
                process.send(share)

    def available(self, availability: Availability) -> None:
        """Tell the processes whether requests are accepted."""
        self._tell(availability)

    async def request_metrics(self) -> list[list[Metric]]:
        """Return what each process has measured, and all those that are gone."""
        running = [*self._running.values()]
        return [self._measured, *await asyncio.gather(*(process.measure() for process in running))]

    async def run(self) -> None:
        """Wait until `stop` has ended all processes."""
        await self._stopped.wait()

    async def stop(self, timeout_s: float) -> None:
        """Accept no more requests; end those that still run after `timeout_s` with an error."""
        self._is_stopping = True
        for task in self._restarting:
            task.cancel()
        self._listener.close()
        self._tell(Stop(timeout_s))
        until_s = time.monotonic() + timeout_s + LAST_BYTES_S
        running = [*self._running.values()]
        await asyncio.gather(*(asyncio.to_thread(process.join, until_s) for process in running))
        self._stopped.set()

    def kill(self) -> None:
        """Kill all processes at once."""
        for process in self._running.values():
            process.kill()

    # ---- the processes

    def _start(self) -> _Process:
        serial = self._num_started
        self._num_started += 1
        process = _Process(serial, self._engine, self._config, self._listener)
        self._running[serial] = process
        process.start(partial(self._handle, process))
        process.send(self._hub.availability)
        if self._models is not None:
            process.send(Open(dict(self._models)))
        return process

    def _tell(self, message: ToWeb) -> None:
        for process in self._running.values():
            process.send(message)

    def _handle(self, process: _Process, message: FromWeb | None) -> None:
        match message:
            case Add() | Abort():
                self._hub.send(message)
            case Question():
                _in_background(self._answering, self._answer(process, message))
            case Prepared(error):
                process.has_prepared(error)
            case Opened():
                self._num_failures = 0
                process.opened.set_result(None)
            case ModelsChanged(error):
                process.has_changed(error)
            case RequestMetricFamilies(families):
                process.has_measured(families)
            case None:
                self._handle_end(process)

    async def _answer(self, process: _Process, question: Question) -> None:
        """Call the method of the hub that a process asks for."""
        assert question.method in _METHODS
        try:
            value = await getattr(self._hub, question.method)(*question.args)
        except AquiferError as error:
            process.send(Answer(question.number, None, error))
        except Exception as error:  # the process waits for an answer
            _logger.exception("a question of a web process failed")
            reason = EngineError(f"internal error ({type(error).__name__}); see the server's log")
            process.send(Answer(question.number, None, reason))
        else:
            process.send(Answer(question.number, value))

    def _handle_end(self, process: _Process) -> None:
        """Handle the end of a process: a regular stop, or its death."""
        if self._is_stopping:
            return
        del self._running[process.serial]
        self._measured = summed([self._measured, process.families])
        self._hub.send(AbortAll(process.serial))
        process.fail(EngineError("a web process died while the server started"))
        if self._models is None:
            return  # the server does not start
        self._num_failures += 1
        _in_background(self._restarting, self._restart(process, pause_s(self._num_failures)))

    async def _restart(self, dead: _Process, after_s: float) -> None:
        await asyncio.to_thread(dead.join, time.monotonic() + LAST_BYTES_S)
        _logger.error(
            "a web process died (exit code %s), and its connections with it; another one is "
            "started%s",
            dead.exit_code,
            f" in {after_s:g} s" if after_s else "",
        )
        await asyncio.sleep(after_s)
        self._start()


def _in_background(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Run work as a task, which is one of `tasks` until it has ended."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class _Process:
    """One web process, as the first process sees it.

    Attributes:
        serial: its number; each process that is started has another one.
        prepared: done when it has loaded the tokenizers, or with the reason why it could not.
        opened: done when it answers requests.
        families: what it had measured when it was asked last.
    """

    def __init__(
        self, serial: int, engine: EngineConfig, config: ServerConfig, listener: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        self.serial = serial
        self.prepared: asyncio.Future[None] = loop.create_future()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.families: list[Metric] = []
        self._measuring = Waiters()
        self._changing = Waiters()
        context = multiprocessing.get_context("spawn")
        ours, self._theirs = context.Pipe()
        self._pipe = Pipe(ours, f"aquifer-web-{serial}")
        self._process = context.Process(  # not a daemon: it starts a process for large bodies
            target=run_web_process,
            args=(self._theirs, listener, engine, config, serial),
            name=f"aquifer-web-{serial}",
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def start(self, handle: Callable[[FromWeb | None], None]) -> None:
        """Start the process; `handle` is called with each message, and with None at its end."""
        with stop_signals_blocked():
            self._process.start()
        self._theirs.close()
        self._pipe.start(asyncio.get_running_loop(), handle)

    def send(self, message: ToWeb) -> None:
        """Send a message; it is lost if the process is gone."""
        self._pipe.send(message)

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def join(self, until_s: float) -> None:
        """Wait until the process has exited, and end the threads.

        Args:
            until_s: when it is killed, in seconds of time.monotonic().
        """
        self._process.join(max(until_s - time.monotonic(), 0.0))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    async def change(self, message: AddModel | RemoveModel) -> None:
        """Have it answer requests for one more model, or one less; return once it does, or is gone.

        Raises:
            ConfigError: the model's tokenizer or template cannot be used.
        """
        changed = self._changing.add()
        self.send(message)
        await changed

    def has_changed(self, error: AquiferError | None) -> None:
        """Take the answer to `change`."""
        self._changing.answer(error)

    async def measure(self) -> list[Metric]:
        """Return what it has measured; if it does not answer in time, what it said before."""
        measured = self._measuring.add()
        self.send(GetRequestMetrics())
        await asyncio.wait({measured}, timeout=ANSWER_S)
        return self.families

    def has_measured(self, families: list[Metric]) -> None:
        """Take the answer to `measure`."""
        self.families = families
        self._measuring.answer(None)

    def has_prepared(self, error: AquiferError | None) -> None:
        """Take the end of its preparation."""
        if error is None:
            self.prepared.set_result(None)
        else:
            self.prepared.set_exception(error)
            self.prepared.exception()  # nothing waits for a process that was started again
            _logger.error("a web process cannot serve: %s", error)

    def fail(self, error: EngineError) -> None:
        """End everything that waits for the process, which is gone."""
        for future in (self.prepared, self.opened):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nothing waits for it
        for waiters in (self._measuring, self._changing):
            waiters.answer_all(None)
