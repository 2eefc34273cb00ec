"""Other choices of the weights that are evicted, to compare with the pool's rule.

regret     the pool's rule: least expected delay for each byte, tensor by tensor
lru        tensors of the model that was used least recently
random     tensors at random
model      all weights of the model that the rule would take a tensor of
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aquifer.memory.reclaim import ReuseModel
from aquifer.weights.store import ParameterGroup, WeightStore
from aquifer.weights.victims import IdleWeights

Eviction = Literal["regret", "lru", "random", "model"]


@dataclass(frozen=True, slots=True)
class RecentUse(ReuseModel):
    """Least recently used: nothing counts but the age."""

    def probability(self, age_s: float, reuses: int) -> float:
        """A number in (0, 1] that falls with age."""
        return 1 / (1 + max(age_s, 0.0))


class RandomWeights(IdleWeights):
    """Idle weights with random regrets, drawn anew after each eviction."""

    def __init__(
        self,
        store: WeightStore,
        load_s: Callable[[int], float],
        is_idle: Callable[[], bool],
        is_wanted: Callable[[], bool],
        on_evict: Callable[[], None],
        seed: str,
    ) -> None:
        super().__init__(store, load_s, is_idle, is_wanted, on_evict)
        self._random = random.Random(seed)
        self._regrets: dict[ParameterGroup, float] = {}
        self._draw()

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """See `IdleWeights`."""
        evicted_bytes = super().evict(num_bytes, now_s, limit)
        self._draw()
        return evicted_bytes

    def _draw(self) -> None:
        self._regrets = {group: self._random.random() for group in self._store.groups}

    def _by_regret(self) -> list[ParameterGroup]:
        return sorted(self._store.resident, key=lambda group: self._regrets[group])

    def _regret(self, group: ParameterGroup, now_s: float) -> float:
        return self._regrets[group]


class WholeWeights(IdleWeights):
    """Idle weights that are evicted all at once."""

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """See `IdleWeights`."""
        return super().evict(self.evictable_bytes, now_s)


def victims_of(
    eviction: Eviction,
    store: WeightStore,
    load_s: Callable[[int], float],
    is_idle: Callable[[], bool],
    is_wanted: Callable[[], bool],
    on_evict: Callable[[], None],
    seed: str,
) -> IdleWeights:
    """The weights of one model as victims, by one of these choices.

    Args:
        eviction: the choice.
        store: see `IdleWeights`, as for the others.
        load_s: likewise.
        is_idle: likewise.
        is_wanted: likewise.
        on_evict: likewise.
        seed: of random choices.
    """
    arguments = (store, load_s, is_idle, is_wanted, on_evict)
    if eviction == "random":
        return RandomWeights(*arguments, seed)
    if eviction == "model":
        return WholeWeights(*arguments)
    return IdleWeights(*arguments, RecentUse() if eviction == "lru" else None)
