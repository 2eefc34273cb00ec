"""The engine processes of a server, one for each device, and the placement of requests on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.params import Request
from aquifer.engine.policies.placement import (
    PLACEMENTS,
    DeviceState,
    PlacementSnapshot,
    device_state,
)
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import AquiferError, EngineError, RequestError, UnavailableError
from aquifer.serve.engine_configs import device_names
from aquifer.serve.keeper import RETRY_S, EngineKeeper
from aquifer.serve.messages import (
    Abort,
    AbortAll,
    Add,
    Availability,
    ModelVerb,
    Outputs,
    Step,
)
from aquifer.serve.open_completions import OpenCompletions
from aquifer.serve.prefix_places import PrefixPlaces
from aquifer.serve.process import OpenEngine
from aquifer.serve.supervisor import out_of_service
from aquifer.serve.totals import total_memory, total_stats

_T = TypeVar("_T")


class EnginesListener(Protocol):
    """Hears what the engine processes do."""

    def launched(self, model: str, num_tokens: int) -> None:
        """A step of a model with so many tokens was launched."""

    def deliver(self, outputs: Outputs) -> None:
        """Completions have outputs, or have ended."""

    def changed(self) -> None:
        """The availability may have changed."""


class Engines:
    """Keeps the engine processes of a server running, places requests, and asks questions.

    Each device has a process, and all models are registered on each. A process that dies takes its
    own requests with it, and others go on.

    For one event loop.

    Args:
        configs: the options of each engine; their devices differ, and the order of their models.
        placement: name of the placement of requests.
        open_it: opens an engine, in its process.
        log_level: least level of messages that the engine processes log.
        listener: hears what they do.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        placement: str,
        open_it: OpenEngine,
        log_level: str,
        listener: EnginesListener,
    ) -> None:
        self._listener = listener
        self._placement = PLACEMENTS[placement]
        self._places = PrefixPlaces(len(configs))
        self._engines = [
            _Engine(config, name, open_it, log_level, listener, partial(self._lost_kv, index))
            for index, (config, name) in enumerate(zip(configs, device_names(configs), strict=True))
        ]
        self._num_placed = 0

    @property
    def availability(self) -> Availability:
        """Whether requests are accepted by any engine, and which models all of them refuse."""
        each = [engine.keeper.availability for engine in self._engines]
        serving = [availability for availability in each if availability.reason is None]
        if not serving:
            return each[0]
        refused = {
            model: reason
            for model, reason in serving[0].out_of_service.items()
            if all(model in availability.out_of_service for availability in serving)
        }
        return Availability(None, refused)

    @property
    def num_restarts(self) -> int:
        """How often an engine process was started again."""
        return sum(engine.keeper.num_restarts for engine in self._engines)

    @property
    def stats(self) -> EngineStats | None:
        """The latest counters of all engines together; None until all were ready once."""
        stats = [engine.keeper.stats for engine in self._engines]
        known = [each for each in stats if each is not None]
        return total_stats(known) if len(known) == len(stats) else None

    # ---- life

    def start(self) -> None:
        """Start the engine processes; `ready` then waits for their models."""
        for engine in self._engines:
            engine.keeper.start()

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until all engines have loaded what they load first; return all models by name.

        Raises:
            ConfigError: an option or a checkpoint cannot be used.
            EngineError: the driver refused a call, or a process died.
        """
        models = await asyncio.gather(*(engine.ready(on_progress) for engine in self._engines))
        return models[0]

    def refuse(self) -> None:
        """Accept no more requests: the server is shutting down."""
        for engine in self._engines:
            engine.keeper.refuse()

    async def stop(self) -> None:
        """End the engine processes. Pre-condition: `refuse`.

        When this returns, they have exited and their memory is free.
        """
        await _all(engine.keeper.stop() for engine in self._engines)

    def kill(self) -> None:
        """Kill the engine processes at once."""
        for engine in self._engines:
            engine.keeper.kill()

    # ---- requests

    def send(self, message: Add | Abort | AbortAll) -> None:
        """Place a request, or abort requests. One that cannot be placed ends with an error."""
        match message:
            case Add(request, number):
                try:
                    engine = self._engines[self._place(request)]
                except (RequestError, UnavailableError) as error:
                    self._listener.deliver(Outputs(refused={number: error}))
                    return
                self._num_placed += 1
                engine.completions.add(request, number)
                engine.keeper.send(message)
            case Abort(request_id, index):
                for engine in self._engines:
                    if request_id in engine.completions:
                        engine.completions.end(request_id, index)
                        engine.keeper.send(message)
            case AbortAll(process):
                for engine in self._engines:
                    for request_id in engine.completions.of_process(process):
                        engine.completions.end(request_id, None)
                    engine.keeper.send(message)

    def _place(self, request: Request) -> int:
        """The index of the engine that gets a request.

        Raises:
            RequestError: a request with its id runs already.
            UnavailableError: no engine accepts requests, or none for its model.
        """
        if any(request.request_id in engine.completions for engine in self._engines):
            raise RequestError(f"a request {request.request_id!r} is running already")
        return self._choose(request.model, request.cache_salt, request.prompt_token_ids)

    def _choose(self, model: str, salt: str | None = None, token_ids: Sequence[int] = ()) -> int:
        """The index of the engine for a prompt, which it is expected to retain then.

        Raises:
            UnavailableError: no engine accepts requests, or none for its model.
        """
        accepting = [index for index, engine in enumerate(self._engines) if engine.accepts(model)]
        if not accepting:
            availability = self.availability
            reason = availability.out_of_service.get(model, "no device serves it")
            raise availability.reason or out_of_service(model, reason)
        if len(self._engines) == 1:
            return 0
        found = self._places.num_found(model, salt, token_ids)
        states = [
            engine.state(model, len(token_ids) - found[index], len(token_ids))
            for index, engine in enumerate(self._engines)
        ]
        chosen = self._placement(PlacementSnapshot(states, self._num_placed))
        # Where none has room for the model, its engine says why.
        index = accepting[0] if chosen is None else chosen
        self._places.note(index, model, salt, token_ids)
        return index

    def _lost_kv(self, index: int) -> None:
        """Remember that a device has lost all KV. What is pinned there will be computed again."""
        self._places.forget(index)
        for pin in self._engines[index].keeper.pins:
            self._places.note(index, pin.model, pin.salt, pin.token_ids)

    # ---- questions

    async def memory(self) -> MemoryReport:
        """Ask the engines that serve for their memory reports; these include the effect of all
        earlier aborts.

        Raises:
            EngineError: none serves, or none answers in time.
        """
        asked = [engine for engine in self._engines if engine.serves] or self._engines[:1]
        answers = await asyncio.gather(
            *(engine.keeper.memory() for engine in asked), return_exceptions=True
        )
        reports = [
            replace(report, device=engine.name or report.device)
            for report, engine in zip(answers, asked, strict=True)
            if isinstance(report, MemoryReport)
        ]
        if not reports:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return reports[0] if len(self._engines) == 1 else total_memory(reports)

    async def pin(self, model: str, token_ids: list[int], salt: str | None, client: str) -> int:
        """Pin the KV of a prefix on one device; return how many of its tokens are pinned.

        Raises:
            RequestError: it cannot be pinned.
            EngineError: the engine has stopped.
        """
        engine = self._engines[self._choose(model, salt, token_ids)]
        return await engine.keeper.pin(model, token_ids, salt, client)

    async def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """Unpin the KV of a prefix.

        Raises:
            EngineError: the engine that has it has stopped.
        """
        for engine in self._engines:
            if any(
                (pin.model, pin.token_ids, pin.salt) == (model, token_ids, salt)
                for pin in engine.keeper.pins
            ):
                await engine.keeper.unpin(model, token_ids, salt)

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model; a load has only begun when this returns.

        A model is loaded or pinned on one device, and unloaded or unpinned on all.

        Raises:
            RequestError: it cannot be done.
            EngineError: an engine has stopped.
        """
        engines = [engine for engine in self._engines if engine.accepts(model)]
        if verb == "pin" and any(model in engine.keeper.pinned_models for engine in engines):
            return
        if verb in ("load", "pin") or not engines:
            engines = [self._engines[self._choose(model)]]
        await _all(engine.keeper.manage(verb, model) for engine in engines)

    async def register(self, spec: ModelSpec) -> ModelInfo:
        """Register a model on all devices; it is loaded when a request for it arrives.

        Raises:
            RequestError: its checkpoint cannot be used, or the name is taken.
            EngineError: an engine has stopped.
        """
        self._check_all_serve()
        infos = await asyncio.gather(
            *(engine.keeper.register(spec) for engine in self._engines), return_exceptions=True
        )
        error = next((info for info in infos if isinstance(info, BaseException)), None)
        if error is not None:
            await self.take_back(spec.name)
            raise error
        return next(info for info in infos if isinstance(info, ModelInfo))

    async def take_back(self, model: str) -> None:
        """Undo the registration of a model, also where an engine has stopped."""
        for engine in self._engines:
            try:
                await engine.keeper.remove(model)
            except AquiferError:
                engine.keeper.forget(model)

    async def remove(self, model: str) -> None:
        """Remove a model from all devices; its requests end with an error.

        Raises:
            EngineError: an engine has stopped.
        """
        self._check_all_serve()
        await _all(engine.keeper.remove(model) for engine in self._engines)

    def _check_all_serve(self) -> None:
        """Refuse a change of the models that an engine would not hear of.

        Raises:
            UnavailableError: an engine does not serve.
        """
        for engine in self._engines:
            if (reason := engine.keeper.availability.reason) is not None:
                raise UnavailableError(
                    f"models cannot be changed now: {engine.name}: {reason}"
                    if engine.name
                    else str(reason),
                    RETRY_S,
                )


class _Engine:
    """The engine of one device, and the requests that were placed on it.

    Args:
        config: its options.
        name: of its device, in logs and reports; empty where there is no other.
        open_it: opens it, in its process.
        log_level: least level of messages that its process logs.
        listener: hears what it does.
        on_lost: called when its process has died.

    Attributes:
        name: as given.
        keeper: keeps its process running.
        completions: those that were placed on it and have not ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        open_it: OpenEngine,
        log_level: str,
        listener: EnginesListener,
        on_lost: Callable[[], None],
    ) -> None:
        self.name = name
        self.completions = OpenCompletions()
        self.keeper = EngineKeeper(config, open_it, log_level, self, name)
        self._listener = listener
        self._on_lost = on_lost

    @property
    def serves(self) -> bool:
        """Whether it accepts requests."""
        return self.keeper.availability.reason is None

    def accepts(self, model: str) -> bool:
        """Whether it accepts requests for a model."""
        availability = self.keeper.availability
        return availability.reason is None and model not in availability.out_of_service

    def state(self, model: str, num_tokens: int, num_prompt: int) -> DeviceState:
        """The device as a request sees it.

        Args:
            model: the request's model.
            num_tokens: tokens of its prompt that it has not read before.
            num_prompt: all tokens of its prompt.
        """
        report = self.keeper.report
        num_requests = self.completions.num_requests
        if report is None or not self.accepts(model):
            return DeviceState(False, 0.0, num_requests.total())
        return device_state(report, model, num_requests, time.monotonic(), num_tokens, num_prompt)

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until it has loaded what it loads first; see `EngineKeeper.ready`."""

        def on_own_progress(progress: LoadProgress) -> None:
            model = f"{progress.model} on {self.name}" if self.name else progress.model
            on_progress(replace(progress, model=model))

        return await self.keeper.ready(on_own_progress)

    # ---- what its process does

    def stepped(self, step: Step) -> None:
        """Hand on what a step has done."""
        self.completions.end_with(step.outputs)
        if step.launched is not None:
            self._listener.launched(*step.launched)
        self._listener.deliver(step.outputs)

    def lost(self, error: EngineError) -> None:
        """End its requests with an error: its process died."""
        self._on_lost()
        if numbers := self.completions.take_all():
            self._listener.deliver(Outputs(refused=dict.fromkeys(numbers, error)))

    def changed(self) -> None:
        """Hand on that the availability may have changed."""
        self._listener.changed()


async def _all(answers: Iterable[Awaitable[_T]]) -> list[_T]:
    """Wait for all answers; raises the first error once there are no more."""
    values: list[_T] = []
    errors: list[BaseException] = []
    for answer in await asyncio.gather(*answers, return_exceptions=True):
        if isinstance(answer, BaseException):
            errors.append(answer)
        else:
            values.append(answer)
    if errors:
        raise errors[0]
    return values
