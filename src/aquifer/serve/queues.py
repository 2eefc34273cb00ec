"""Requests that wait on one engine, handed over to another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from aquifer.engine.policies.hand_over import HandOver, to_idle
from aquifer.serve.placed_engine import PlacedEngine
from aquifer.serve.unstreamed import Placed

_LOOK_S = 0.1
"""Interval of looks whether requests should go elsewhere, while there are any without output."""


class Queues:
    """Hands over requests that wait, while the engines run.

    An engine is asked to give up requests that have never run. Only when it says which ones they
    are do they go elsewhere, so that none runs twice. For one event loop.

    Args:
        engines: the engines that there are, a list that changes.
        place: places a request on an engine; with None, on the one that placement chooses.
        policy: decides what goes where.
    """

    def __init__(
        self,
        engines: Sequence[PlacedEngine],
        place: Callable[[Placed, PlacedEngine | None], None],
        policy: HandOver = to_idle,
    ) -> None:
        self._engines = engines
        self._place = place
        self._policy = policy
        self._asked: dict[tuple[PlacedEngine, str], PlacedEngine | None] = {}  # who gets them
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """A request was placed, or an engine has come: look from time to time until all requests
        have output something."""
        if self._timer is None and len(self._engines) > 1:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def empty(self, engine: PlacedEngine) -> None:
        """Hand over all requests of an engine that have never run, if others accept them."""
        for model in _models(engine):
            if any(other is not engine and other.accepts(model) for other in self._engines):
                self._ask(engine, model, engine.completions.num_requests[model], None)

    def given_up(self, engine: PlacedEngine, model: str, given_up: Iterable[Placed]) -> None:
        """An engine says which requests of a model it has given up."""
        target = self._asked.pop((engine, model), None)
        for placed in given_up:
            has_target = target is not None and target.accepts(model)
            self._place(placed, target if has_target else None)

    def forget(self, engine: PlacedEngine) -> None:
        """The process of an engine is gone, and will not answer."""
        self._asked = {key: target for key, target in self._asked.items() if key[0] is not engine}

    def _look(self) -> None:
        self._timer = None
        for model in {model for engine in self._engines for model in _models(engine)}:
            if any(asked == model for _, asked in self._asked):
                continue
            transfer = self._policy([engine.holder(model) for engine in self._engines])
            if transfer is not None:
                source, target = self._engines[transfer.source], self._engines[transfer.target]
                self._ask(source, model, transfer.most, target)
        if any(len(engine.unstreamed) for engine in self._engines):
            self.watch()

    def _ask(
        self, engine: PlacedEngine, model: str, most: int, target: PlacedEngine | None
    ) -> None:
        self._asked[engine, model] = target
        engine.withdraw(model, most)


def _models(engine: PlacedEngine) -> set[str]:
    """Models of which an engine has requests without output."""
    return {placed.add.request.model for placed in engine.unstreamed.requests}
