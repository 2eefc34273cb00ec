"""Keeper of the engine process: starts it, starts it again if it dies, and stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.policies.placement import DeviceReport
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import ConfigError, EngineError, RequestError, UnavailableError
from aquifer.serve.held import Held
from aquifer.serve.link import EngineLink, NewLink
from aquifer.serve.messages import (
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
    ToEngine,
    Unpin,
)
from aquifer.serve.questions import ANSWER_S, RETRY_S, Question, Questions
from aquifer.serve.supervisor import MAX_DEATHS, Supervisor

_BEAT_S = 1.0
"""Interval of the questions whether the engine's loop runs."""
_SILENT_S = 5.0
"""An engine that has not answered for this long counts as unavailable."""

SHUT_DOWN = "the server shut down before the request finished"
_NO_MODEL = "no model is left in service; restart the server"

_logger = logging.getLogger(__name__)


class _State(Enum):
    NEW = auto()
    LOADING = auto()  # for the first time; what fails then is reported by `ready`
    SERVING = auto()
    RESTARTING = auto()  # or it starts for the first time, and is started until it serves
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
        new_link: makes the link to an engine process.
        listener: hears what it does.
        device: name of its device; empty for the only one.

    Attributes:
        report: the latest report of the device; None until it was ready for the first time.
        held: what it was told to keep.
    """

    def __init__(
        self,
        config: EngineConfig,
        new_link: NewLink,
        listener: EngineListener,
        device: str = "",
    ) -> None:
        self._config = config
        self._listener = listener
        self._supervisor = Supervisor(config.models)
        self._new_link = new_link
        self._link = new_link(config)
        self._state = _State.NEW
        self._questions = Questions()
        self._which = f" of {device}" if device else ""
        self._stats: EngineStats | None = None
        self.report: DeviceReport | None = None
        self._progress: LoadProgress | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None  # a process, in another thread
        self._beating: asyncio.Task[None] | None = None
        self.held = Held()
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
                reason = f"the engine process{self._which} is being started"
                if self._stats is not None:
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

    def start(self, *, insists: bool = False) -> None:
        """Start the engine process; `ready` then waits for its models.

        Args:
            insists: whether to try again, without a model that cannot be loaded, if it cannot
                start; `ready` then tells of the first attempt that came to an end.
        """
        assert self._state is _State.NEW
        self._state = _State.RESTARTING if insists else _State.LOADING
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
        return await asyncio.shield(self._opened)

    def send(self, message: ToEngine) -> None:
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
        num_tokens = await self._questions.ask(self._link, pin, undo=Unpin(model, token_ids, salt))
        if any(spec.name == model for spec in self._config.models):  # or it was removed meanwhile
            self.held.pins.append(pin)
        assert isinstance(num_tokens, int)
        return num_tokens

    async def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """Unpin the KV of a prefix.

        Raises:
            EngineError: the engine has stopped.
        """
        self._check_serving()
        await self._ask(Unpin(model, token_ids, salt))
        self.held.unpin(model, token_ids, salt)

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model; a load has only begun when this returns.

        Raises:
            RequestError: it cannot be done.
            EngineError: the engine has stopped.
        """
        self._check_serving()
        await self._ask(Manage(verb, model))
        self.held.managed(verb, model)

    async def register(self, spec: ModelSpec) -> ModelInfo | None:
        """Register a model beside the others; it is loaded when a request for it arrives.

        An engine process that is started later has it too. One that is being started gets it before
        it serves.

        Returns: its description; None if no engine process could be asked.

        Raises:
            RequestError: its checkpoint cannot be used, or the name is taken.
        """
        info: ModelInfo | None = None
        if any(known.name == spec.name for known in self._config.models):
            return info  # this engine was added a moment ago, with the model
        if self._state is _State.SERVING:
            with suppress(EngineError):  # it died, and the next one gets the model as it starts
                info = await self._ask(Register(spec), timeout_s=None)  # a slow disk, perhaps
        self._supervisor.add(spec)
        self._config = replace(self._config, models=(*self._config.models, spec))
        return info

    async def remove(self, model: str) -> None:
        """Remove a model; its requests end with an error."""
        serves = self._state is _State.SERVING and model not in self._supervisor.out_of_service
        self._supervisor.remove(model)
        left = tuple(spec for spec in self._config.models if spec.name != model)
        self._config = replace(self._config, models=left)
        self.held.forget(model)
        self._listener.changed()
        if serves:
            with suppress(EngineError):  # it died, and the next one starts without the model
                await self._ask(Remove(model), timeout_s=None)

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
        if self._starting is not None:
            await self._starting  # what is not started yet cannot be killed
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

    async def _ask(self, question: Question, timeout_s: float | None = ANSWER_S) -> Any:
        """Send a question and return the engine's answer; see `Questions.ask`."""
        return await self._questions.ask(self._link, question, timeout_s)

    def _lose(self, error: EngineError) -> None:
        self._listener.lost(error)
        self._questions.fail(error)

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
                self._questions.answer(answer)
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
                    self._restarting = self._loop.create_task(self._restore(models))
                elif self._state is _State.LOADING:
                    self._serve()
                    self._opened.set_result(models)
            case OpenFailed(text, is_config, model):
                if not self._opened.done():
                    self._opened.set_exception(
                        ConfigError(text) if is_config else EngineError(text)
                    )
                    self._opened.exception()  # it may be that nothing waits for it
                if self._state is not _State.LOADING:
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

    async def _restore(self, infos: dict[str, ModelInfo]) -> None:
        """Have a process that was just started keep what the one before did, and accept requests.

        Args:
            infos: the models that it was started with.
        """
        task, without = asyncio.current_task(), self._supervisor.out_of_service
        await self.held.restore(self._ask, without, lambda: self._restarting is not task)
        with suppress(EngineError):  # it has died
            await self._update(infos)
        if self._restarting is not task:
            return  # it has died, and another one is started
        self._serve()
        level = logging.WARNING if self._supervisor.num_restarts else logging.INFO
        _logger.log(level, "the engine process%s serves", self._which)
        if not self._opened.done():
            self._opened.set_result(infos)

    async def _update(self, infos: dict[str, ModelInfo]) -> None:
        """Register and remove models until the process has those that are in service.

        Raises:
            EngineError: the process died.
        """
        while True:
            specs = {model.name: model for model in self._supervisor.models}
            try:
                if gone := infos.keys() - specs.keys():
                    del infos[name := gone.pop()]
                    await self._ask(Remove(name), timeout_s=None)
                elif new := specs.keys() - infos.keys():
                    name = new.pop()
                    infos[name] = await self._ask(Register(specs[name]), timeout_s=None)
                else:
                    return
            except RequestError as error:
                _logger.error("model %r cannot be served%s: %s", name, self._which, error)
                self._supervisor.refused(name, str(error))

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
        starting = asyncio.to_thread(link.start, self._loop, partial(self._handle, link))
        self._starting = self._loop.create_task(starting)
