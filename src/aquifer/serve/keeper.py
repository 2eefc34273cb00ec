"""Keeper of the engine process: starts it, starts it again if it dies, and stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.policies.placement import DeviceReport
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import AquiferError, ConfigError, EngineError, UnavailableError
from aquifer.serve.link import EngineLink
from aquifer.serve.messages import (
    Abort,
    AbortAll,
    Add,
    Availability,
    Close,
    FromEngine,
    GetMemory,
    Manage,
    Managed,
    Memory,
    ModelVerb,
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
    Unpin,
)
from aquifer.serve.process import OpenEngine
from aquifer.serve.supervisor import MAX_DEATHS, Supervisor
from aquifer.serve.waiters import Waiters

RETRY_S = 5
"""When clients may try again while the engine process is started."""
ANSWER_S = 5.0
"""How long an answer may take that a client waits for: the engine answers between two steps."""
_BEAT_S = 1.0
"""Interval of the questions whether the engine's loop runs."""
_SILENT_S = 5.0
"""An engine that has not answered for this long counts as unavailable."""

SHUT_DOWN = "the server shut down before the request finished"
_NO_MODEL = "no model is left in service; restart the server"

_logger = logging.getLogger(__name__)


class _State(Enum):
    NEW = auto()
    LOADING = auto()  # for the first time
    SERVING = auto()
    RESTARTING = auto()
    STOPPING = auto()


class EngineListener(Protocol):
    """Hears what the engine process does."""

    def stepped(self, step: Step) -> None:
        """The engine has made a step."""

    def lost(self, error: EngineError) -> None:
        """The engine process died, and all requests with it."""

    def changed(self) -> None:
        """The availability may have changed."""


class EngineKeeper:
    """Keeps an engine process running, and asks it questions.

    For one event loop.

    Args:
        config: the engine's options.
        open_it: opens the engine, in the engine process.
        log_level: least level of messages that the engine process logs.
        listener: hears what it does.
        device: name of its device; empty for the only one.

    Attributes:
        report: the latest report of the device; None until it was ready for the first time.
        pins: the prefixes that it was told to pin.
        pinned_models: the models that it was told to pin.
    """

    def __init__(
        self,
        config: EngineConfig,
        open_it: OpenEngine,
        log_level: str,
        listener: EngineListener,
        device: str = "",
    ) -> None:
        self._config = config
        self._listener = listener
        self._supervisor = Supervisor(config.models)
        self._new_link = partial(
            EngineLink, open_it=open_it, log_level=log_level, reports=bool(device)
        )
        self._link = self._new_link(config)
        self._state = _State.NEW
        self._waiters = Waiters()
        self._which = f" of {device}" if device else ""
        self._stats: EngineStats | None = None
        self.report: DeviceReport | None = None
        self._progress: LoadProgress | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self.pins: list[Pin] = []
        self.pinned_models: set[str] = set()
        self._has_refused = False  # the engine process could not start, and ends by itself
        self._asked_s: float | None = None  # when the question was sent that is not answered yet

    @property
    def availability(self) -> Availability:
        """Whether requests are accepted, and for which models."""
        return Availability(self._unavailable, self._supervisor.out_of_service)

    @property
    def _unavailable(self) -> UnavailableError | None:
        """Why no requests are accepted, or None if they are."""
        match self._state:
            case _State.SERVING:
                if not self._supervisor.models:
                    return UnavailableError(_NO_MODEL)
                if self._asked_s is not None and self._loop.time() - self._asked_s > _SILENT_S:
                    return UnavailableError(
                        f"the engine has not answered for {_SILENT_S:g} s", RETRY_S
                    )
                return None
            case _State.STOPPING:
                return UnavailableError("the server is shutting down")
            case _State.RESTARTING:
                reason = f"the engine process{self._which} died and is being started again"
            case _:
                reason = "the server is starting"
        if self._progress is not None:
            share = self._progress.done / max(self._progress.total, 1)
            reason += f"; {share:.0%} of {self._progress.model}'s {self._progress.stage} are ready"
        return UnavailableError(reason, RETRY_S)

    @property
    def num_restarts(self) -> int:
        """How often the engine process was started again."""
        return self._supervisor.num_restarts

    @property
    def stats(self) -> EngineStats | None:
        """The engine's latest counters; None until it was ready for the first time."""
        return self._stats

    def start(self) -> None:
        """Start the engine process; `ready` then waits for its models."""
        assert self._state is _State.NEW
        self._state = _State.LOADING
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[dict[str, ModelInfo]] = self._loop.create_future()
        self._on_progress: Callable[[LoadProgress], None] | None = None
        self._link.start(self._loop, partial(self._handle, self._link))

    async def ready(
        self, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> dict[str, ModelInfo]:
        """Wait until all models are loaded; return their infos by served name.

        Raises:
            ConfigError: an option or a checkpoint cannot be used.
            EngineError: the driver refused a call, or the process died.
        """
        self._on_progress = on_progress
        if on_progress is not None and self._progress is not None:
            on_progress(self._progress)  # it came before
        return await self._opened

    def send(self, message: Add | Abort | AbortAll) -> None:
        """Send a message; it is lost if the engine process is gone."""
        self._link.send(message)

    async def memory(self) -> MemoryReport:
        """Ask the engine for its memory report, which includes the effect of all earlier aborts.

        Raises:
            EngineError: the engine has stopped.
        """
        self._check_serving()
        report = await self._ask(GetMemory())
        assert isinstance(report, MemoryReport)
        return report

    async def pin(self, model: str, token_ids: list[int], salt: str | None, client: str) -> int:
        """Pin the KV of a prefix; return how many of its tokens are pinned.

        Raises:
            RequestError: it cannot be pinned.
            EngineError: the engine has stopped.
        """
        self._check_serving()
        pin = Pin(model, token_ids, salt, client)
        num_tokens = await self._ask(pin)
        self.pins.append(pin)
        assert isinstance(num_tokens, int)
        return num_tokens

    async def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """Unpin the KV of a prefix.

        Raises:
            EngineError: the engine has stopped.
        """
        self._check_serving()
        await self._ask(Unpin(model, token_ids, salt))
        prefix = (model, token_ids, salt)
        self.pins = [pin for pin in self.pins if (pin.model, pin.token_ids, pin.salt) != prefix]

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model; a load has only begun when this returns.

        Raises:
            RequestError: it cannot be done.
            EngineError: the engine has stopped.
        """
        self._check_serving()
        await self._ask(Manage(verb, model))
        if verb == "pin":
            self.pinned_models.add(model)
        elif verb == "unpin":
            self.pinned_models.discard(model)

    async def register(self, spec: ModelSpec) -> ModelInfo:
        """Register a model beside the others; it is loaded when a request for it arrives.

        An engine process that is started later has it too.

        Raises:
            RequestError: its checkpoint cannot be used, or the name is taken.
            EngineError: the engine has stopped.
        """
        self._check_serving()
        info = await self._ask(Register(spec), timeout_s=None)  # it may read from a slow disk
        assert isinstance(info, ModelInfo)
        self._supervisor.add(spec)
        self._config = replace(self._config, models=(*self._config.models, spec))
        return info

    async def remove(self, model: str) -> None:
        """Remove a model; its requests end with an error.

        Raises:
            EngineError: the engine has stopped; nothing has changed.
        """
        self._check_serving()
        if model not in self._supervisor.out_of_service:  # else the engine does not have it
            await self._ask(Remove(model), timeout_s=None)
        self.forget(model)

    def forget(self, model: str) -> None:
        """Have an engine process that is started later do without a model."""
        self._supervisor.remove(model)
        left = tuple(spec for spec in self._config.models if spec.name != model)
        self._config = replace(self._config, models=left)
        self.pins = [pin for pin in self.pins if pin.model != model]
        self.pinned_models.discard(model)
        self._listener.changed()

    def kill(self) -> None:
        """Kill the engine process at once."""
        self._link.kill()

    def refuse(self) -> None:
        """Accept no more requests: the server is shutting down."""
        self._state_before, self._state = self._state, _State.STOPPING
        self._listener.changed()

    async def stop(self) -> None:
        """End the engine process. Pre-condition: `refuse`.

        When this returns, the engine process has exited and its memory is free.
        """
        for task in (self._beating, self._restarting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._state_before is _State.NEW:
            return
        if self._state_before is _State.SERVING:
            self._link.send(Close())
        else:
            self.kill()  # it reads no messages while it loads
        await asyncio.to_thread(self._link.join)

    def _check_serving(self) -> None:
        if (reason := self._unavailable) is not None:
            raise reason

    async def _ask(
        self,
        question: GetMemory | Pin | Unpin | Manage | Register | Remove,
        timeout_s: float | None = ANSWER_S,
    ) -> Any:
        """Send a question and return the engine's answer; answers come in order.

        Args:
            question: the question.
            timeout_s: how long to wait; None for as long as the process lives.
        """
        waiter = self._waiters.add()
        self._link.send(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise UnavailableError(
                f"the engine has not answered for {timeout_s:g} s", RETRY_S
            ) from None

    def _lose(self, error: EngineError) -> None:
        self._listener.lost(error)
        self._waiters.answer_all(error)

    def _handle(self, link: EngineLink, message: FromEngine | None) -> None:
        if link is not self._link:
            return  # of a process that is gone
        match message:
            case Step():
                self._stats = message.stats
                self.report = message.report or self.report
                for model in message.completed:
                    self._supervisor.completed(model)
                self._listener.stepped(message)
            case Memory(answer) | Pinned(answer) | Managed(answer) | Registered(answer):
                self._waiters.answer(answer)
            case Pong():
                self._asked_s = None
                self._listener.changed()
            case LoadProgress():
                self._progress = message
                if self._on_progress is not None:
                    self._on_progress(message)
                self._listener.changed()
            case Ready(models, stats, report):
                self._stats, self.report = stats, report
                self._progress = None
                if self._state is _State.RESTARTING:
                    self._restarting = self._loop.create_task(self._restore())
                elif self._state is _State.LOADING:
                    self._serve()
                    self._opened.set_result(models)
            case OpenFailed(text, is_config, model):
                if self._state is _State.LOADING:
                    self._opened.set_exception(
                        ConfigError(text) if is_config else EngineError(text)
                    )
                else:
                    self._has_refused = True
                    if model is not None:
                        self._supervisor.refused(model, text)
                    _logger.error("the engine process%s could not start: %s", self._which, text)
            case None:
                self._handle_end()

    def _serve(self) -> None:
        self._state = _State.SERVING
        self._asked_s = None
        self._beating = self._loop.create_task(self._beat())
        self._listener.changed()

    async def _restore(self) -> None:
        """Pin what the process before had pinned, and accept requests again."""
        for model in self.pinned_models:
            if model not in self._supervisor.out_of_service:
                try:
                    await self._ask(Manage("pin", model))
                except AquiferError as error:
                    _logger.error("%r could not be pinned again: %s", model, error)
        for pin in self.pins:
            if pin.model not in self._supervisor.out_of_service:
                try:
                    await self._ask(pin)
                except AquiferError as error:
                    _logger.error("a prefix of %r could not be pinned again: %s", pin.model, error)
        self._serve()
        _logger.warning("the engine process%s serves again", self._which)

    async def _beat(self) -> None:
        """Ask again and again whether the engine's loop runs."""
        while True:
            if self._asked_s is None:
                self._asked_s = self._loop.time()
                self._link.send(Ping())
            else:
                self._listener.changed()  # it may have been silent for too long
            await asyncio.sleep(_BEAT_S)

    def _handle_end(self) -> None:
        """Handle the end of the pipe: a regular stop, or the death of the process."""
        if self._state is _State.STOPPING:
            self._lose(EngineError(SHUT_DOWN))
            return
        if self._state is _State.LOADING:
            if not self._opened.done():
                self._opened.set_exception(EngineError("the engine process died while loading"))
            return
        if self._beating is not None:
            self._beating.cancel()
        self._state = _State.RESTARTING
        self._progress = None
        if self._stats is not None:
            self._stats = self._stats.without_requests()
        self._restarting = self._loop.create_task(self._restart(self._link))
        self._listener.changed()
        self._lose(UnavailableError("the engine process died before the request finished", RETRY_S))

    async def _restart(self, dead: EngineLink) -> None:
        """Start another engine process with the models that are in service."""
        await asyncio.to_thread(dead.join)
        model = None if self._has_refused else dead.current_model
        self._has_refused = False
        pause_s = self._supervisor.failed(model)
        _logger.error(
            "the engine process%s died (exit code %s)%s; it is started again%s",
            self._which,
            dead.exit_code,
            f" while it computed {model!r}" if model else "",
            f" in {pause_s:g} s" if pause_s else "",
        )
        if model in self._supervisor.out_of_service:
            _logger.error(
                "model %r ended the engine process %d times in a row and is taken out of service",
                model,
                MAX_DEATHS,
            )
        await asyncio.sleep(pause_s)
        config = replace(self._config, models=self._supervisor.models)
        self._link = link = self._new_link(config)
        await asyncio.to_thread(link.start, self._loop, partial(self._handle, link))
