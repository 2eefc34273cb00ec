"""An engine process among several, and the requests that were placed on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from aquifer.config import EngineConfig
from aquifer.engine.policies.hand_over import Holder
from aquifer.engine.policies.placement import DeviceState, device_state
from aquifer.engine.policies.replicas import Replica
from aquifer.engine.reports import EngineStats, LoadProgress, ModelInfo
from aquifer.errors import EngineError
from aquifer.serve.keeper import EngineKeeper
from aquifer.serve.lengths import SharedLengths
from aquifer.serve.link import NewLink
from aquifer.serve.messages import Abort, AbortAll, Outputs, Step, Withdraw
from aquifer.serve.open_completions import OpenCompletions
from aquifer.serve.unstreamed import Placed, Unstreamed


class PlacedEngine:
    """The engine of one device, and the requests that were placed on it.

    Args:
        name: of its device, in logs and reports; empty where there is no other.
        number: of its device, among those that there are.
        config: its options.
        new_link: makes the link to its process.
        lengths: what all engines learn from.
        on_step: called with the launched step, if any, and the outputs.
        on_given_up: called with the engine, a model, and requests of it that were withdrawn.
        on_lost: called when its process has died, with the engine and the error.
        on_changed: called when its availability may have changed.

    Attributes:
        name: as given.
        number: as given.
        keeper: keeps its process running.
        completions: those that were placed on it and have not ended.
        unstreamed: requests that it could give to another engine.
        is_gone: whether outputs that still arrive are ignored.
    """

    def __init__(
        self,
        name: str,
        number: int,
        config: EngineConfig,
        new_link: NewLink,
        lengths: SharedLengths,
        on_step: Callable[[tuple[str, int] | None, Outputs], None],
        on_given_up: Callable[[PlacedEngine, str, list[Placed]], None],
        on_lost: Callable[[PlacedEngine, EngineError], None],
        on_changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.number = number
        self.completions = OpenCompletions()
        self.unstreamed = Unstreamed()
        self.keeper = EngineKeeper(config, new_link, self, name)
        self._lengths = lengths
        self._on_step = on_step
        self._on_given_up = on_given_up
        self._on_lost = on_lost
        self._on_changed = on_changed
        self.is_gone = False
        self._is_leaving = False

    @property
    def serves(self) -> bool:
        """Whether it accepts requests."""
        return not self._is_leaving and self.keeper.availability.reason is None

    def accepts(self, model: str) -> bool:
        """Whether it accepts requests for a model."""
        return self.serves and model not in self.keeper.availability.out_of_service

    def leave(self) -> None:
        """Accept no more requests; those that run go on."""
        self._is_leaving = True

    def has(self, model: str) -> bool:
        """Whether it has all weights of a model."""
        report = self.keeper.report
        return (
            self.serves
            and report is not None
            and model in report.models
            and report.models[model].is_resident
        )

    def state(
        self, model: str, num_tokens: int, num_prompt: int, *, is_elsewhere: bool
    ) -> DeviceState:
        """The device as a request sees it.

        Args:
            model: the request's model.
            num_tokens: tokens of its prompt that it has not read before.
            num_prompt: all tokens of its prompt.
            is_elsewhere: whether another device has all weights of the model.
        """
        report = self.keeper.report
        num_requests = self.completions.num_requests
        if report is None or not self.accepts(model):
            return DeviceState(False, 0.0, num_requests.total())
        return device_state(
            report,
            model,
            num_requests,
            time.monotonic(),
            num_tokens,
            num_prompt,
            is_elsewhere=is_elsewhere,
        )

    def holder(self, model: str) -> Holder:
        """It as the requests of a model see it that wait elsewhere, or here."""
        report = self.keeper.report
        of_model = None if report is None else report.models.get(model)
        oldest_s = None if of_model is None else of_model.oldest_s
        return Holder(
            self.completions.num_requests[model],
            len(self.completions),
            None if oldest_s is None else time.monotonic() - oldest_s,
            of_model is not None and of_model.is_resident and self.accepts(model),
        )

    def replica(self, model: str) -> Replica | None:
        """What it has of a model as one of its replicas; None if the model is not there."""
        report = self.keeper.report
        of_model = None if report is None else report.models.get(model)
        if report is None or of_model is None or not of_model.is_resident:
            return None
        num_requests = self.completions.num_requests[model]
        return Replica(num_requests, of_model.oldest_s is not None, report.is_short)

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until it has loaded what it loads first; see `EngineKeeper.ready`."""

        def on_own_progress(progress: LoadProgress) -> None:
            model = f"{progress.model} on {self.name}" if self.name else progress.model
            on_progress(replace(progress, model=model))

        return await self.keeper.ready(on_own_progress)

    # ---- its requests

    def add(self, placed: Placed) -> None:
        """Start a request here."""
        self.completions.add(placed.add.request, placed.add.number)
        self.unstreamed.add(placed)
        self.keeper.send(placed.add)
        for index in placed.aborted:
            self.completions.end(placed.request_id, index)
            self.keeper.send(Abort(placed.request_id, index))

    def abort(self, message: Abort) -> None:
        """Abort a request that was placed here, or one of its completions."""
        if message.request_id in self.completions:
            self.completions.end(message.request_id, message.index)
            self.unstreamed.abort(message)
            self.keeper.send(message)

    def abort_all(self, message: AbortAll) -> None:
        """Abort the requests of a web process."""
        for request_id in self.completions.of_process(message.process):
            self.completions.end(request_id, None)
            self.unstreamed.drop(request_id)
        self.keeper.send(message)

    def withdraw(self, model: str, most: int) -> None:
        """Ask it to give up requests of a model that have never run, so many at most."""
        self.keeper.send(Withdraw(model, most))

    # ---- what its process does

    def stepped(self, step: Step) -> None:
        """Hand on what a step has done."""
        if self.is_gone:
            return
        self.unstreamed.drop_with(step.outputs)
        self.completions.end_with(step.outputs)
        self._lengths.add(step.ended)
        self._on_step(step.launched, step.outputs)
        for model, request_ids in step.withdrawn.items():
            taken = map(self.unstreamed.take, request_ids)
            given_up = [placed for placed in taken if placed is not None]  # others were aborted
            for placed in given_up:
                self.completions.end(placed.request_id, None)
            self._on_given_up(self, model, given_up)

    def lost(self, error: EngineError) -> None:
        """Hand on that its process died."""
        self._lengths.leave(self.keeper)
        self._on_lost(self, error)

    def changed(self) -> None:
        """Hand on that the availability may have changed."""
        if self.serves:
            self._lengths.join(self.keeper)
        self._on_changed()


class Departed:
    """Counters of engines that have left.

    Attributes:
        num_restarts: how often their processes were started again.
        stats: of the last one that was ready.
    """

    def __init__(self) -> None:
        self.num_restarts = 0
        self.stats: EngineStats | None = None

    def add(self, keeper: EngineKeeper) -> None:
        """An engine leaves."""
        self.num_restarts += keeper.num_restarts
        if keeper.stats is not None:
            self.stats = keeper.stats.without_requests()
