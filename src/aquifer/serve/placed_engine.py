"""An engine process among several, and the requests that were placed on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from aquifer.config import EngineConfig
from aquifer.engine.policies.placement import DeviceState, device_state
from aquifer.engine.reports import LoadProgress, ModelInfo
from aquifer.errors import EngineError
from aquifer.serve.keeper import EngineKeeper
from aquifer.serve.lengths import SharedLengths
from aquifer.serve.link import NewLink
from aquifer.serve.messages import Abort, AbortAll, Outputs, Step
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
        self._on_lost = on_lost
        self._on_changed = on_changed
        self.is_gone = False
        self._is_leaving = False
        self._given_away: set[int] = set()  # numbers of completions

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

    def abort(self, message: Abort) -> None:
        """Abort a request that was placed here, or one of its completions."""
        if message.request_id in self.completions:
            self.completions.end(message.request_id, message.index)
            self.unstreamed.drop(message.request_id)
            self.keeper.send(message)

    def abort_all(self, message: AbortAll) -> None:
        """Abort the requests of a web process."""
        for request_id in self.completions.of_process(message.process):
            self.completions.end(request_id, None)
            self.unstreamed.drop(request_id)
        self.keeper.send(message)

    def give_away(self, placed: Placed) -> None:
        """Run a request no more, which another engine runs from its start.

        Outputs that are on their way are ignored. Pre-condition: it accepts no more requests, so
        that this one does not come back.
        """
        self._given_away.update(placed.numbers)
        self.abort(Abort(placed.request_id))

    # ---- what its process does

    def stepped(self, step: Step) -> None:
        """Hand on what a step has done."""
        if self.is_gone:
            return
        outputs = step.outputs.without(self._given_away) if self._given_away else step.outputs
        self.unstreamed.drop_with(outputs)
        self.completions.end_with(outputs)
        self._lengths.add(step.ended)
        self._on_step(step.launched, outputs)

    def lost(self, error: EngineError) -> None:
        """Hand on that its process died."""
        self._lengths.leave(self.keeper)
        self._given_away.clear()
        self._on_lost(self, error)

    def changed(self) -> None:
        """Hand on that the availability may have changed."""
        if self.serves:
            self._lengths.join(self.keeper)
        self._on_changed()
