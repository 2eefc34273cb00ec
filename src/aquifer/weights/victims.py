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
from collections.abc import Callable
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


class _Key(NamedTuple):
    """What the offers of a model were made for."""

    now_s: float
    version: int  # of its store
    probability: float
    sensitivity: float


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
        # The last offers, and what they were made for: one eviction asks for them several times.
        self._offered_for: _Key | None = None
        self._offered: list[Offer] = []
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
        offers = self._offers(now_s)
        return offers[0].regret if offers else None

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Evict groups in order of regret until `num_bytes` are dropped; returns the bytes dropped.

        The first one goes in any case; it stops before another one of a regret above `limit`.
        """
        evicted: list[ParameterGroup] = []
        evicted_bytes, regret_s = 0, 0.0
        offers = self._offers(now_s)
        for offer in offers:
            if evicted_bytes >= num_bytes or (evicted and offer.regret > limit):
                break
            evicted.append(offer.group)
            group_bytes = self._member.bytes_of(offer.group)
            evicted_bytes += group_bytes
            regret_s += offer.regret * group_bytes
        if evicted:
            self._losses.evicted(evicted, evicted_bytes, regret_s)
        for loser in self._reuse.evict_from_all(self._member, evicted):
            loser.use.on_evict()
        if self._member.use.is_idle:  # the others stay as they are
            self._offered_for, self._offered = self._key(now_s), offers[len(evicted) :]
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

    def _offers(self, now_s: float) -> list[Offer]:
        """The groups that may go, in order of regret."""
        if not self._member.use.is_idle:
            return []
        key = self._key(now_s)
        if self._offered_for == key and not self._reuse.has_shared:
            return self._offered
        own = expected_uses(key.probability), key.sensitivity
        offers: list[Offer] = []
        for group in self._groups():
            uses, weight = self._shared(group, now_s) or own
            # By the byte, so that groups of any size are equal where nothing else differs.
            offers.append(Offer(regret_per_byte(uses, self._byte_s(group), 1, weight), group))
        offers.sort(key=lambda offer: offer.regret)  # stable
        self._offered_for, self._offered = key, offers
        return offers

    def _key(self, now_s: float) -> _Key:
        """What offers depend on, unless groups are shared."""
        use = self._member.use
        return _Key(now_s, self._member.store.version, use.probability(now_s), use.sensitivity)

    def _shared(self, group: ParameterGroup, now_s: float) -> tuple[float, float] | None:
        """Uses expected of a shared group, and its weight; None if it is not shared."""
        if not self._reuse.has_shared:
            return None
        uses = [holder.use for holder in self._reuse.holders(self._member, group)]
        if len(uses) == 1:
            return None
        none_needed = math.prod(1 - use.probability(now_s) for use in uses)
        return expected_uses(1 - none_needed), max(use.sensitivity for use in uses)
