"""Weights of models that are not in use, as victims of the eviction rule.

A model that has no requests may have some soon, and then what was evicted of it is loaded again. So
the regret of a group of parameters is that of Tangram's equation 2 for each byte, with the uses
expected in place of the probability of one:

    uses expected of the model x seconds to load the group x sensitivity / bytes

While memory is short, what is loaded for one use is evicted before the next. So a model that is
used more often costs more, and the probability, which is nearly 1 for all busy models, would not
tell. In a replay of eight models and shared prefixes it gave weights too little of the pool
(benchmarks/tangram).

The regret is the same for all groups of a model that are restored from the same place, the host or
the disk. Of these the last ones go first: a model of which the first layers are resident can begin
to compute while the others load.

A group that several models share goes from all of them at once, once all are idle, and the uses are
those of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aquifer.memory.eviction_log import Losses
from aquifer.memory.reclaim import regret_per_byte
from aquifer.memory.use_rate import expected_uses
from aquifer.weights.parameters import ParameterGroup
from aquifer.weights.reuse import Member, ReuseStore


class Offer(NamedTuple):
    """A group that may go."""

    regret: float  # in seconds per byte
    group: ParameterGroup


class _Cost(NamedTuple):
    """What a group that may go costs to load again."""

    byte_s: float
    group: ParameterGroup


class IdleWeights:
    """The weights of one model: a source of victims while the model is idle.

    Args:
        reuse: the weights of all models.
        member: those of this one.
        byte_s: seconds to load a byte of a group again.
        losses: where it is logged what was evicted.
    """

    def __init__(
        self,
        reuse: ReuseStore,
        member: Member,
        byte_s: Callable[[ParameterGroup], float],
        losses: Losses,
    ) -> None:
        self._reuse = reuse
        self._member = member
        self._byte_s = byte_s
        self._losses = losses
        # The groups that are there, the cheapest first, and what they were put in order for: while
        # memory is short, each eviction asks every model for them.
        self._ordered_for: tuple[int, object] | None = None
        self._ordered: list[_Cost] = []
        # Bytes that may go beside shared groups, and what they were counted for.
        self._counted: tuple[int, tuple[bool, ...], int] = (-1, (), 0)

    @property
    def evictable_bytes(self) -> int:
        """Bytes that `evict` could give back in all."""
        if not self._member.use.is_idle:
            return 0
        if not self._reuse.has_shared:
            return self._member.store.resident_bytes
        idle, resident_bytes = self._reuse.idle(), self._member.store.resident_bytes
        if self._counted[:2] != (self._reuse.version, idle):
            kept_bytes = resident_bytes - sum(
                self._member.bytes_of(group) for group in self._groups()
            )
            self._counted = (self._reuse.version, idle, kept_bytes)
        return resident_bytes - self._counted[2]

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        """Bytes that `evict` could give back at a regret per byte below `limit`."""
        found_bytes = 0
        for offer in self._offers(now_s):
            if found_bytes >= num_bytes or offer.regret >= limit:
                break
            found_bytes += self._member.bytes_of(offer.group)
        return found_bytes

    def cheapest(self, now_s: float) -> float | None:
        """The regret per byte of the next group to go; None if there is none."""
        first = next(iter(self._offers(now_s)), None)
        return None if first is None else first.regret

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Evict groups in order of regret until `num_bytes` are dropped; returns the bytes dropped.

        The first one goes in any case; it stops before another one of a regret above `limit`.
        """
        evicted: list[ParameterGroup] = []
        evicted_bytes, regret_s = 0, 0.0
        for offer in self._offers(now_s):
            if evicted_bytes >= num_bytes or (evicted and offer.regret > limit):
                break
            evicted.append(offer.group)
            group_bytes = self._member.bytes_of(offer.group)
            evicted_bytes += group_bytes
            regret_s += offer.regret * group_bytes
        key = self._order_key
        is_ordered = self._ordered_for == key and not self._reuse.has_shared
        if evicted:
            self._losses.evicted(evicted, evicted_bytes, regret_s)
        for loser in self._reuse.evict_from_all(self._member, evicted):
            loser.use.on_evict()
        if is_ordered:  # the others stay in their order
            self._ordered_for = self._member.store.version, key[1]
            self._ordered = self._ordered[len(evicted) :]
        return evicted_bytes

    def _groups(self) -> list[ParameterGroup]:
        """The groups that may go, those that a step uses last first.

        Shared ones are the business of the model that their pages are accounted to.
        """
        member = self._member
        if not member.use.is_idle:
            return []
        resident = member.store.resident
        groups = [group for group in reversed(member.store.by_use) if group in resident]
        if not self._reuse.has_shared:
            return groups
        return [group for group in groups if self._is_mine(group)]

    def _is_mine(self, group: ParameterGroup) -> bool:
        holders = self._reuse.holders(self._member, group)
        return holders[0] is self._member and all(holder.use.is_idle for holder in holders)

    def _offers(self, now_s: float) -> Iterable[Offer]:
        """The groups that may go, in order of regret."""
        use = self._member.use
        if not use.is_idle:
            return
        own = expected_uses(use.probability(now_s)), use.sensitivity
        if not self._reuse.has_shared:  # the regrets are in the order of the costs
            for cost in self._costs():
                yield _offer(cost, *own)
            return
        costs = (_Cost(self._byte_s(group), group) for group in self._groups())
        offers = [_offer(cost, *(self._shared(cost.group, now_s) or own)) for cost in costs]
        yield from sorted(offers, key=lambda offer: offer.regret)  # stable

    def _costs(self) -> list[_Cost]:
        """The groups that are there, the cheapest first; none is shared."""
        key = self._order_key
        if self._ordered_for != key:
            costs = [_Cost(self._byte_s(group), group) for group in self._groups()]
            costs.sort(key=lambda cost: cost.byte_s)  # stable
            self._ordered_for, self._ordered = key, costs
        return self._ordered

    @property
    def _order_key(self) -> tuple[int, object]:
        """What the order of the groups depends on."""
        return self._member.store.version, self._member.use.costs_version

    def _shared(self, group: ParameterGroup, now_s: float) -> tuple[float, float] | None:
        """Uses expected of a shared group, and its weight; None if it is not shared."""
        if not self._reuse.has_shared:
            return None
        uses = [holder.use for holder in self._reuse.holders(self._member, group)]
        if len(uses) == 1:
            return None
        none_needed = math.prod(1 - use.probability(now_s) for use in uses)
        return expected_uses(1 - none_needed), max(use.sensitivity for use in uses)


def _offer(cost: _Cost, uses: float, weight: float) -> Offer:
    # By the byte, so that groups of any size are equal where nothing else differs.
    return Offer(regret_per_byte(uses, cost.byte_s, 1, weight), cost.group)
