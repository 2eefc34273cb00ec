"""Client of the engine process, for the web process's event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

from aquifer.config import EngineConfig
from aquifer.engine.params import Request
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import AquiferError, ConfigError, EngineError, UnavailableError
from aquifer.options import default_of
from aquifer.serve.link import EngineLink
from aquifer.serve.messages import (
    Abort,
    Add,
    Close,
    FromEngine,
    GetMemory,
    Memory,
    OpenFailed,
    Pin,
    Ping,
    Pinned,
    Pong,
    Ready,
    Step,
    Unpin,
)
from aquifer.serve.process import OpenEngine, open_engine
from aquifer.serve.routes import Routes
from aquifer.serve.streams import Pacer, TokenStream
from aquifer.serve.supervisor import MAX_DEATHS, Supervisor

_RETRY_S = 5
"""When clients may try again while the engine process is started."""
_BEAT_S = 1.0
"""Interval of the questions whether the engine's loop runs."""
_SILENT_S = 5.0
"""An engine that has not answered for this long counts as unavailable."""
_ANSWER_S = 5.0
"""How long an answer may take that a client waits for: the engine answers between two steps."""

_NO_MODEL = "no model is left in service; restart the server"

_logger = logging.getLogger(__name__)


def _ignore_launch(_: str, __: int) -> None:
    """Ignore that a step was launched."""


class _State(Enum):
    NEW = auto()
    LOADING = auto()  # for the first time
    SERVING = auto()
    RESTARTING = auto()
    STOPPING = auto()


class EngineClient:
    """Client of the engine process, which it starts, starts again if it dies, and stops.

    For one event loop.

    Args:
        config: the engine's options.
        open_it: opens the engine, in the engine process.
        log_level: least level of messages that the engine process logs.

    Attributes:
        on_launch: called with the model and the number of tokens of each step that was launched.
    """

    def __init__(
        self,
        config: EngineConfig,
        open_it: OpenEngine = open_engine,
        log_level: str = default_of("log_level"),
    ) -> None:
        self.on_launch: Callable[[str, int], None] = _ignore_launch
        self._config = config
        self._open_it = open_it
        self._supervisor = Supervisor(config.models)
        self._log_level = log_level
        self._link = EngineLink(config, open_it, log_level)
        self._state = _State.NEW
        self._routes = Routes(self._supervisor.completed)
        self._pacer = Pacer()
        self._waiters: deque[asyncio.Future[Any]] = deque()
        self._stats: EngineStats | None = None
        self._progress: LoadProgress | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._pins: list[Pin] = []  # what the engine process was told to pin
        self._has_refused = False  # the engine process could not start, and ends by itself
        self._asked_s: float | None = None  # when the question was sent that is not answered yet

    @property
    def max_prompts(self) -> int:
        """Maximum number of requests added at once: they all wait for the next step."""
        return self._config.max_num_waiting

    @property
    def unavailable(self) -> UnavailableError | None:
        """Why no requests are accepted, or None if they are."""
        match self._state:
            case _State.SERVING:
                if not self._supervisor.models:
                    return UnavailableError(_NO_MODEL)
                if self._asked_s is not None and self._loop.time() - self._asked_s > _SILENT_S:
                    return UnavailableError(
                        f"the engine has not answered for {_SILENT_S:g} s", _RETRY_S
                    )
                return None
            case _State.STOPPING:
                return UnavailableError("the server is shutting down")
            case _State.RESTARTING:
                reason = "the engine process died and is being started again"
            case _:
                reason = "the server is starting"
        if self._progress is not None:
            share = self._progress.done / max(self._progress.total, 1)
            reason += f"; {share:.0%} of {self._progress.model}'s {self._progress.stage} are ready"
        return UnavailableError(reason, _RETRY_S)

    @property
    def num_restarts(self) -> int:
        """How often the engine process was started again."""
        return self._supervisor.num_restarts

    @property
    def stats(self) -> EngineStats:
        """The engine's latest counters. Pre-condition: it became ready."""
        assert self._stats is not None
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

    def generate(self, requests: Sequence[Request]) -> TokenStream:
        """Run requests; return the stream of their outputs, which the caller must close.

        If one request is refused, the whole stream ends with that error.

        Raises:
            UnavailableError: no requests are accepted, or none for this model.
        """
        self._check_serving()
        for request in requests:
            if self._supervisor.is_out_of_service(request.model):
                raise UnavailableError(
                    f"model {request.model!r} is out of service: it ended the engine process "
                    f"{MAX_DEATHS} times in a row; restart the server to try it again"
                )
        stream = TokenStream(requests, self.abort, self._pacer)
        for request in requests:
            self._link.send(Add(request, self._routes.add(request, stream)))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request, or one completion of it; unknown ones are ignored."""
        if self._routes.end(request_id, index):
            self._link.send(Abort(request_id, index))

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
        self._pins.append(pin)
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
        self._pins = [pin for pin in self._pins if (pin.model, pin.token_ids, pin.salt) != prefix]

    def kill(self) -> None:
        """Kill the engine process at once."""
        self._link.kill()

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, give running ones `timeout_s` to finish, end the rest, exit.

        When this returns, the engine process has exited and its memory is free.
        """
        state, self._state = self._state, _State.STOPPING
        for task in (self._beating, self._restarting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if state is _State.SERVING:
            deadline = self._loop.time() + timeout_s
            while self._routes and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
            self._fail_everyone(EngineError("the server shut down before the request finished"))
            self._link.send(Close())
        elif state is not _State.NEW:
            self.kill()  # it reads no messages while it loads
        if state is not _State.NEW:
            await asyncio.to_thread(self._link.join)

    def _check_serving(self) -> None:
        if (reason := self.unavailable) is not None:
            raise reason

    async def _ask(self, question: GetMemory | Pin | Unpin) -> Any:
        """Send a question and return the engine's answer; answers come in order."""
        waiter: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(waiter)
        self._link.send(question)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await waiter
        except TimeoutError:
            raise UnavailableError(
                f"the engine has not answered for {_ANSWER_S:g} s", _RETRY_S
            ) from None

    def _answer(self, answer: object) -> None:
        waiter = self._waiters.popleft()
        if waiter.done():
            return  # the caller was cancelled
        if isinstance(answer, AquiferError):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)

    def _fail_everyone(self, error: EngineError) -> None:
        for request_id in self._routes.fail(error):
            self._link.send(Abort(request_id))
        while self._waiters:
            self._answer(error)

    def _handle(self, link: EngineLink, message: FromEngine | None) -> None:
        if link is not self._link:
            return  # of a process that is gone
        match message:
            case Step():
                self._stats = message.stats
                if message.launched is not None:
                    self.on_launch(*message.launched)
                self._routes.deliver(message, time.monotonic())
            case Memory(answer) | Pinned(answer):
                self._answer(answer)
            case Pong():
                self._asked_s = None
            case LoadProgress():
                self._progress = message
                if self._on_progress is not None:
                    self._on_progress(message)
            case Ready(models, stats):
                self._stats = stats
                self._progress = None
                if self._state is _State.RESTARTING:
                    self._restarting = self._loop.create_task(self._restore())
                elif self._state is _State.LOADING:
                    self._opened.set_result(models)
                    self._serve()
            case OpenFailed(text, is_config):
                if self._state is _State.LOADING:
                    self._opened.set_exception(
                        ConfigError(text) if is_config else EngineError(text)
                    )
                else:
                    self._has_refused = True
                    _logger.error("the engine process could not start: %s", text)
            case None:
                self._handle_end()

    def _serve(self) -> None:
        self._state = _State.SERVING
        self._asked_s = None
        self._beating = self._loop.create_task(self._beat())

    async def _restore(self) -> None:
        """Pin what the process before had pinned, and accept requests again."""
        for pin in self._pins:
            if not self._supervisor.is_out_of_service(pin.model):
                try:
                    await self._ask(pin)
                except AquiferError as error:
                    _logger.error("a prefix of %r could not be pinned again: %s", pin.model, error)
        self._serve()
        _logger.warning("the engine process serves again")

    async def _beat(self) -> None:
        """Ask again and again whether the engine's loop runs."""
        while True:
            if self._asked_s is None:
                self._asked_s = self._loop.time()
                self._link.send(Ping())
            await asyncio.sleep(_BEAT_S)

    def _handle_end(self) -> None:
        """Handle the end of the pipe: a regular stop, or the death of the process."""
        if self._state is _State.STOPPING:
            self._fail_everyone(EngineError("the server shut down before the request finished"))
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
        self._fail_everyone(
            UnavailableError("the engine process died before the request finished", _RETRY_S)
        )

    async def _restart(self, dead: EngineLink) -> None:
        """Start another engine process with the models that are in service."""
        await asyncio.to_thread(dead.join)
        model = None if self._has_refused else dead.current_model
        self._has_refused = False
        pause_s = self._supervisor.failed(model)
        _logger.error(
            "the engine process died (exit code %s)%s; it is started again%s",
            dead.exit_code,
            f" while it computed {model!r}" if model else "",
            f" in {pause_s:g} s" if pause_s else "",
        )
        if model is not None and self._supervisor.is_out_of_service(model):
            _logger.error(
                "model %r ended the engine process %d times in a row and is taken out of service",
                model,
                MAX_DEATHS,
            )
        await asyncio.sleep(pause_s)
        config = replace(self._config, models=self._supervisor.models)
        self._link = link = EngineLink(config, self._open_it, self._log_level)
        await asyncio.to_thread(link.start, self._loop, partial(self._handle, link))
