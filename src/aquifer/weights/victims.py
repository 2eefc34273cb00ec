"""Weights of models that are not in use, as victims of the eviction rule.

A model that has no requests may have some soon, and then what was evicted of it is loaded again. So
the regret of a group of parameters is that of Tangram's equation 2 for each byte:

    p(the model is needed again) x seconds to load the group x sensitivity / bytes

It is the same for all groups of a model, up to how fast each is loaded. Of these the last ones go
first: a model of which the first layers are resident can begin to compute while the others load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from aquifer.memory.eviction_log import Losses
from aquifer.memory.reclaim import ReuseModel, regret_per_byte
from aquifer.weights.store import ParameterGroup, WeightStore


class IdleWeights:
    """The weights of one model: a source of victims while the model is idle.

    Args:
        store: the weights.
        load_s: seconds to load so many bytes of them.
        is_idle: tells whether they are neither in use nor being loaded, and may go.
        is_wanted: tells whether requests wait for them: then they are needed again for certain.
        on_evict: called when some have been evicted.
        reuse: probability that the model is needed again.
        sensitivity: weight of a second of delay of this model, compared with others (Tangram's
            alpha).
        losses: where it reports what it has evicted, by group; None for nowhere.

    Attributes:
        last_used_s: when the model was loaded, or a request of it arrived or ran last, on the
            reclaimer's clock.
        num_uses: how many times a request came while it had none.
    """

    def __init__(
        self,
        store: WeightStore,
        load_s: Callable[[int], float],
        is_idle: Callable[[], bool],
        is_wanted: Callable[[], bool],
        on_evict: Callable[[], None],
        reuse: ReuseModel | None = None,
        sensitivity: float = 1.0,
        losses: Losses | None = None,
    ) -> None:
        self.last_used_s = -math.inf
        self.num_uses = 0
        self._store = store
        self._load_s = load_s
        self._is_idle = is_idle
        self._is_wanted = is_wanted
        self._on_evict = on_evict
        self._reuse = reuse or ReuseModel()
        self._sensitivity = sensitivity
        self._losses = losses

    @property
    def evictable_bytes(self) -> int:
        """Bytes that `evict` could give back in all."""
        return self._store.resident_bytes if self._is_idle() else 0

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        """Bytes that `evict` could give back at a regret per byte below `limit`."""
        if not self._is_idle():
            return 0
        found_bytes = 0
        for group in self._by_regret():
            if found_bytes >= num_bytes or self._regret(group, now_s) >= limit:
                break
            found_bytes += self._bytes(group)
        return found_bytes

    def cheapest(self, now_s: float) -> float | None:
        """The regret per byte of the next group to go; None if there is none."""
        groups = self._by_regret() if self._is_idle() else []
        return self._regret(groups[0], now_s) if groups else None

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Evict groups in order of regret until `num_bytes` are dropped; returns the bytes dropped.

        The first one goes in any case; it stops before another one of a regret above `limit`.
        """
        evicted: list[ParameterGroup] = []
        evicted_bytes = 0
        for group in self._by_regret() if self._is_idle() else []:
            if evicted_bytes >= num_bytes or (evicted and self._regret(group, now_s) > limit):
                break
            evicted.append(group)
            evicted_bytes += self._bytes(group)
        if evicted:
            self._store.evict(evicted)
            if self._losses is not None:
                regrets_s = (self._regret(each, now_s) * self._bytes(each) for each in evicted)
                self._losses.evicted(evicted, evicted_bytes, sum(regrets_s))
            self._on_evict()
        return evicted_bytes

    def restored(self, groups: Iterable[ParameterGroup]) -> None:
        """Report groups that have been loaded, as fast as `load_s` says."""
        if self._losses is not None:
            self._losses.restored((group, self._load_s(self._bytes(group))) for group in groups)

    def _by_regret(self) -> list[ParameterGroup]:
        """The groups that are resident, the next one to go first: the last one to be used."""
        resident = self._store.resident
        return [group for group in reversed(self._store.by_use) if group in resident]

    def _bytes(self, group: ParameterGroup) -> int:
        return group.num_pages * self._store.placement.page_bytes

    def _regret(self, group: ParameterGroup, now_s: float) -> float:
        probability = 1.0
        if not self._is_wanted():
            probability = self._reuse.probability(now_s - self.last_used_s, self.num_uses)
        num_bytes = self._bytes(group)
        return regret_per_byte(probability, self._load_s(num_bytes), num_bytes, self._sensitivity)
