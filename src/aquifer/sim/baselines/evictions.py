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
from typing import Literal

from aquifer.memory.eviction_log import Losses
from aquifer.weights.parameters import ParameterGroup
from aquifer.weights.reuse import Member, ReuseStore
from aquifer.weights.victims import IdleWeights, Offer

Eviction = Literal["regret", "lru", "random", "model"]


class RandomWeights(IdleWeights):
    """Idle weights with random regrets, drawn anew after each eviction."""

    def __init__(
        self,
        reuse: ReuseStore,
        member: Member,
        byte_s: Callable[[ParameterGroup], float],
        losses: Losses,
    ) -> None:
        super().__init__(reuse, member, byte_s, losses)
        self._random = random.Random(member.store.owner.model)
        self._draw()

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """See `IdleWeights`."""
        evicted_bytes = super().evict(num_bytes, now_s, limit)
        self._draw()
        return evicted_bytes

    def _draw(self) -> None:
        self._regrets = {group: self._random.random() for group in self._member.store.groups}

    def _offers(self, now_s: float) -> list[Offer]:
        return sorted(
            (Offer(self._regrets[group], group) for group in self._groups()),
            key=lambda offer: offer.regret,
        )


class WholeWeights(IdleWeights):
    """Idle weights that are evicted all at once."""

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """See `IdleWeights`."""
        return super().evict(self.evictable_bytes, now_s)


VICTIMS: dict[Eviction, type[IdleWeights]] = {
    "regret": IdleWeights,
    "lru": IdleWeights,  # with another probability: see `recent_use`
    "random": RandomWeights,
    "model": WholeWeights,
}
"""The weights of one model as victims, by each of these choices."""


def recent_use(age_s: float) -> float:
    """In place of the probability, nothing but the age counts: a number that falls with it."""
    return 1 / (1 + max(age_s, 0.0))
