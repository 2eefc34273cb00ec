"""The engine processes of a server, one for each device, and the placement of requests on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Protocol, TypeVar

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.policies.placement import PLACEMENTS, PlacementSnapshot
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import EngineError, RequestError, UnavailableError
from aquifer.serve.held import Held
from aquifer.serve.lengths import SharedLengths
from aquifer.serve.link import NewLink
from aquifer.serve.messages import Abort, AbortAll, Add, Availability, KeepAlive, ModelVerb, Outputs
from aquifer.serve.placed_engine import Departed, PlacedEngine
from aquifer.serve.prefix_places import PrefixPlaces
from aquifer.serve.questions import RETRY_S
from aquifer.serve.queues import Queues
from aquifer.serve.replicas import Replicas
from aquifer.serve.supervisor import out_of_service
from aquifer.serve.totals import total_memory, total_stats
from aquifer.serve.unstreamed import Placed

MOST_LOST = 1
"""How often a request is run again because its engine process died: the request may be why."""
_DRAINED_S = 0.05
"""Interval of looks whether a device that leaves has requests."""

_NO_ENGINE = "no worker serves at the moment"
_LEFT = "the device left before the request finished"

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

    Each device has a process, and all models are registered on each. They come and go while the
    server runs. Of the requests of a process that dies, or of a device that leaves, those that have
    output nothing yet are placed again; the others end with an error.

    For one event loop.

    Args:
        placement: name of the placement of requests.
        listener: hears what the engine processes do.

    Attributes:
        is_stopping: whether the server is shutting down, so that no engine is to come.
    """

    def __init__(self, placement: str, listener: EnginesListener) -> None:
        self._listener = listener
        self._placement = PLACEMENTS[placement]
        self._places = PrefixPlaces()
        self._lengths = SharedLengths()
        self._replicas = Replicas()
        self._engines: list[PlacedEngine] = []
        self._num_placed = 0
        self.is_stopping = False
        self._queues = Queues(self._engines, self._hand_over)
        self._unheld = Held()  # what engines had to keep that have left
        self._before = Departed()

    @property
    def availability(self) -> Availability:
        """Whether requests are accepted by any engine, and which models all of them refuse."""
        serving = [engine.keeper.availability for engine in self._engines if engine.serves]
        if not serving:
            reasons = [engine.keeper.availability.reason for engine in self._engines]
            known = [reason for reason in reasons if reason is not None]
            return Availability(known[0] if known else UnavailableError(_NO_ENGINE, RETRY_S))
        refused = {
            model: reason
            for model, reason in serving[0].out_of_service.items()
            if all(model in availability.out_of_service for availability in serving)
        }
        return Availability(None, refused)

    @property
    def num_restarts(self) -> int:
        """How often an engine process was started again."""
        running = sum(engine.keeper.num_restarts for engine in self._engines)
        return self._before.num_restarts + running

    @property
    def stats(self) -> EngineStats | None:
        """The latest counters of all engines together; None until one was ready once."""
        stats = [engine.keeper.stats for engine in self._engines]
        known = [each for each in stats if each is not None]
        return total_stats(known) if known else self._before.stats

    @property
    def names(self) -> list[str]:
        """Names of the devices."""
        return [engine.name for engine in self._engines]

    @property
    def serving(self) -> list[str]:
        """Names of the devices that accept requests."""
        return [engine.name for engine in self._engines if engine.serves]

    # ---- life

    def add(
        self, name: str, config: EngineConfig, new_link: NewLink, *, insists: bool = False
    ) -> PlacedEngine:
        """Add the engine of a device, and start its process.

        Args:
            name: of its device; empty if there is and will be no other.
            config: its options.
            new_link: makes the link to its process.
            insists: as for `EngineKeeper.start`.
        """
        taken = {engine.number for engine in self._engines}
        number = next(number for number in count() if number not in taken)
        engine = PlacedEngine(
            name,
            number,
            config,
            new_link,
            self._lengths,
            self._stepped,
            self._queues.given_up,
            self._lost,
            self._listener.changed,
        )
        engine.keeper.held, self._unheld = self._unheld, Held()
        self._engines.append(engine)
        self._queues.watch()
        engine.keeper.start(insists=insists)
        return engine

    async def drain(self, name: str, timeout_s: float) -> None:
        """Have the engine of a device get no more requests, and wait until it has none.

        Its requests that have never run move to other engines that accept them.

        Args:
            name: of the device.
            timeout_s: how long to wait.
        """
        engine = next((engine for engine in self._engines if engine.name == name), None)
        if engine is None:
            return
        engine.leave()
        self._listener.changed()
        self._queues.empty(engine)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(engine.completions):
                    await asyncio.sleep(_DRAINED_S)

    async def remove(self, name: str) -> None:
        """Remove the engine of a device: it has left, or is to end."""
        engine = next((engine for engine in self._engines if engine.name == name), None)
        if engine is None:
            return
        engine.leave()
        engine.is_gone = True
        self._lengths.leave(engine.keeper)
        engine.keeper.refuse()
        self._engines.remove(engine)
        self._places.forget(engine.number)
        self._lost(engine, UnavailableError(_LEFT, RETRY_S))
        self._unheld.take(engine.keeper.held)
        self._before.add(engine.keeper)
        self._listener.changed()
        await engine.keeper.stop()

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
        self.is_stopping = True
        self._queues.close()
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
                if any(request.request_id in engine.completions for engine in self._engines):
                    error = RequestError(f"a request {request.request_id!r} is running already")
                    self._listener.deliver(Outputs(refused={number: error}))
                    return
                self._start(Placed(message))
                if request.keep_alive_s is not None:
                    for engine in filter(lambda engine: engine.serves, self._engines):
                        engine.keeper.send(KeepAlive(request.model, request.keep_alive_s))
            case Abort():
                for engine in self._engines:
                    engine.abort(message)
            case AbortAll():
                for engine in self._engines:
                    engine.abort_all(message)

    def _start(self, placed: Placed, lost: EngineError | None = None) -> None:
        """Place a request; it ends with an error if no engine accepts it.

        Args:
            placed: the request.
            lost: why it is placed again, which is the error then.
        """
        request = placed.add.request
        try:
            engine = self._choose(request.model, request.cache_salt, request.prompt_token_ids)
        except UnavailableError as error:
            self._listener.deliver(Outputs(refused={placed.add.number: lost or error}))
            return
        self._num_placed += 1
        engine.add(placed)
        self._queues.watch()

    def _hand_over(self, placed: Placed, engine: PlacedEngine | None) -> None:
        """Start a request that another engine has given up, on the one that is given."""
        if engine is None:
            self._start(placed)
            return
        request = placed.add.request
        self._places.note(
            engine.number, request.model, request.cache_salt, request.prompt_token_ids
        )
        engine.add(placed)

    def _choose(
        self, model: str, salt: str | None = None, token_ids: Sequence[int] = ()
    ) -> PlacedEngine:
        """The engine for a prompt, which it is expected to retain then.

        Raises:
            UnavailableError: no engine accepts requests, or none for its model.
        """
        accepting = [engine for engine in self._engines if engine.accepts(model)]
        if not accepting:
            availability = self.availability
            reason = availability.out_of_service.get(model, "no device serves it")
            raise availability.reason or out_of_service(model, reason)
        if len(self._engines) == 1:
            return accepting[0]
        numbers = [engine.number for engine in self._engines]
        found = self._places.num_found(model, salt, token_ids, numbers)
        holders = {engine.number for engine in self._engines if engine.has(model)}
        states = [
            engine.state(
                model,
                len(token_ids) - num_found,
                len(token_ids),
                is_elsewhere=bool(holders - {engine.number}),
            )
            for engine, num_found in zip(self._engines, found, strict=True)
        ]
        replicas = [engine.replica(model) for engine in self._engines]
        for index in self._replicas.spare(model, replicas, time.monotonic()):
            states[index] = states[index]._replace(is_spare=True)
        chosen = self._placement(PlacementSnapshot(states, self._num_placed))
        # Where none has room for the model, its engine says why.
        engine = accepting[0] if chosen is None else self._engines[chosen]
        self._places.note(engine.number, model, salt, token_ids)
        return engine

    # ---- what the engine processes do

    def _stepped(self, launched: tuple[str, int] | None, outputs: Outputs) -> None:
        """Hand on what a step has done."""
        if launched is not None:
            self._listener.launched(*launched)
        self._listener.deliver(outputs)

    def _lost(self, engine: PlacedEngine, error: EngineError) -> None:
        """Place requests of an engine again that its process has lost, or end them with an error.

        What it has pinned will be computed again.
        """
        self._queues.forget(engine)
        if not engine.is_gone:
            self._places.forget(engine.number)
            for pin in engine.keeper.held.pins:
                self._places.note(engine.number, pin.model, pin.salt, pin.token_ids)
        unstreamed = [] if self.is_stopping else engine.unstreamed.take_all()
        again = [placed for placed in unstreamed if placed.num_lost < MOST_LOST]
        for placed in again:
            engine.completions.end(placed.request_id, None)
        if numbers := engine.completions.take_all():
            self._listener.deliver(Outputs(refused=dict.fromkeys(numbers, error)))
        for placed in again:
            self._start(replace(placed, num_lost=placed.num_lost + 1), error)

    # ---- questions

    async def memory(self) -> MemoryReport:
        """Ask the engines that serve for their memory reports; these include the effect of all
        earlier aborts.

        Raises:
            EngineError: none serves, or none answers in time.
        """
        asked = [engine for engine in self._engines if engine.serves] or self._engines[:1]
        if not asked:
            raise UnavailableError(_NO_ENGINE, RETRY_S)
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
        return total_memory(reports) if asked[0].name else reports[0]

    async def pin(self, model: str, token_ids: list[int], salt: str | None, client: str) -> int:
        """Pin the KV of a prefix on one device; return how many of its tokens are pinned.

        Raises:
            RequestError: it cannot be pinned.
            EngineError: the engine has stopped.
        """
        engine = self._choose(model, salt, token_ids)
        return await engine.keeper.pin(model, token_ids, salt, client)

    async def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """Unpin the KV of a prefix.

        Raises:
            EngineError: the engine that has it has stopped.
        """
        self._unheld.unpin(model, token_ids, salt)
        for engine in self._engines:
            if engine.keeper.held.has(model, token_ids, salt):
                await engine.keeper.unpin(model, token_ids, salt)

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model; a load has only begun when this returns.

        A model is loaded or pinned on one device, and unloaded or unpinned on all.

        Raises:
            RequestError: it cannot be done.
            EngineError: an engine has stopped.
        """
        if verb == "unpin":  # those that do not serve now are not to pin it again either
            for held in (self._unheld, *(engine.keeper.held for engine in self._engines)):
                held.managed(verb, model)
        engines = [engine for engine in self._engines if engine.accepts(model)]
        if verb == "pin" and any(model in engine.keeper.held.models for engine in engines):
            return
        if verb in ("load", "pin") or not engines:
            engines = [self._choose(model)]
        await _all(engine.keeper.manage(verb, model) for engine in engines)

    async def register(self, spec: ModelSpec) -> ModelInfo:
        """Register a model on all devices; it is loaded when a request for it arrives.

        Devices that do not serve now get it when they do.

        Raises:
            RequestError: its checkpoint cannot be used, or the name is taken.
            EngineError: no engine serves.
        """
        if (reason := self.availability.reason) is not None:
            raise reason
        answers = await asyncio.gather(
            *(engine.keeper.register(spec) for engine in self._engines), return_exceptions=True
        )
        infos = [answer for answer in answers if isinstance(answer, ModelInfo)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if infos and not errors:
            return infos[0]
        reason = self.availability.reason or UnavailableError(_NO_ENGINE, RETRY_S)
        await self.remove_model(spec.name)
        raise errors[0] if errors else reason

    async def remove_model(self, model: str) -> None:
        """Remove a model from all devices, also from those that do not serve now.

        Its requests end with an error.
        """
        self._unheld.forget(model)
        self._lengths.forget(model)
        self._replicas.forget(model)
        for answer in await asyncio.gather(
            *(engine.keeper.remove(model) for engine in self._engines), return_exceptions=True
        ):
            if isinstance(answer, BaseException) and not isinstance(answer, RequestError):
                raise answer


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
