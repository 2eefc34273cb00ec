"""The eviction rule: what is evicted first when memory is short, across all tenants.

Data that is kept while it is not in use may be needed again, and then it takes time to restore.
So the victim is the data with the least expected delay for each byte that evicting it gives back:

    regret per byte = p(needed again) x seconds to restore x sensitivity / bytes

A tenant knows its victims, the time to restore each, and when each was last used. This module
compares them: `ReuseModel` gives the probability that a victim is needed again, `regret_per_byte`
is the rule, and `Reclaimer` applies it across tenants. It knows bytes and seconds only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aquifer.errors import InvariantError
from aquifer.memory.eviction_log import EvictionLog
from aquifer.memory.owners import Owner

_BATCH_PAGES = 32
"""Size of a batch of victims that are evicted together."""


@dataclass(frozen=True, slots=True)
class ReuseModel:
    """Probability that a victim is needed again soon, given its past uses.

    Each victim is reused at random moments at an unknown rate of its own. If rates follow a gamma
    distribution, the time to the next use has a Lomax (Pareto II) tail:

        p(not needed for t seconds) = (scale / (scale + t)) ** shape

    Most data is needed again at once or never. A victim that was last used `age_s` ago is needed
    within the horizon with

        p = 1 - ((age + scale) / (age + scale + horizon)) ** shape(reuses)
        shape(reuses) = first_shape + reuse_shape * sqrt(min(reuses, max_reuses))

    p falls with age and rises with the number of reuses. Age counts from the last use, not from the
    first, so data that has gone out of use is forgotten, however popular it was.

    Once the age is well beyond the scale, p is about shape x horizon / age: a victim that has been
    idle for twice as long is half as likely to be needed.

    The constants are those that saved most prefill time when Mooncake's synthetic trace (FAST '25;
    122 000 uses of 44 000 prefix blocks) was replayed with room for 7 to 68 % of the blocks: 7 %
    more than least recently used on the average of five sizes, and more at each of them. They are
    not sensitive: a scale from 3 s to 30 s and a reuse shape from 0.1 to 0.3 cost less than 1 % of
    that. But a fit to the times between uses, which gives a scale of 120 s, is worse than least
    recently used in a small cache: it keeps blocks that were reused once for minutes, and evicts
    new blocks before they can be reused.

    Args:
        horizon_s: how far ahead a use counts: about as long as data stays in a busy cache.
        scale_s: the age at which the rate of reuse has fallen to half of the initial one.
        first_shape: shape before the first reuse.
        reuse_shape: increase of the shape at the first reuse.
        max_reuses: number of reuses beyond which the shape stays the same.
    """

    horizon_s: float = 60.0
    scale_s: float = 10.0
    first_shape: float = 0.3
    reuse_shape: float = 0.2
    max_reuses: int = 8

    def probability(self, age_s: float, reuses: int) -> float:
        """p(needed again within the horizon), in (0, 1).

        Args:
            age_s: time since the last use; a negative age counts as 0.
            reuses: number of uses after the first one.
        """
        shape = self.first_shape + self.reuse_shape * math.sqrt(min(reuses, self.max_reuses))
        # The formula above, written so that small probabilities keep their digits.
        return -math.expm1(-shape * math.log1p(self.horizon_s / (max(age_s, 0.0) + self.scale_s)))


def regret_per_byte(
    probability: float, restore_s: float, num_bytes: int, sensitivity: float = 1.0
) -> float:
    """Expected delay in seconds for each byte that evicting a victim gives back.

    Args:
        probability: probability that the victim is needed again, from `ReuseModel`.
        restore_s: seconds to restore it, once it is needed.
        num_bytes: bytes that evicting it gives back.
        sensitivity: weight of a second of delay of this tenant's model, compared with others.
    """
    return probability * restore_s * sensitivity / num_bytes


class Victims(Protocol):
    """A tenant that keeps data which is not in use, and can give it up: a source of victims."""

    @property
    def evictable_bytes(self) -> int:
        """Bytes that `evict` could give back in all. A counter: it is read at every step."""

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        """Bytes that `evict` could give back at a regret per byte below `limit`, without doing so.

        It may take time in proportion to the victims counted.

        Args:
            num_bytes: how much is asked for; there is no need to count further.
            now_s: the time.
            limit: victims of this regret or a larger one do not count.
        """

    def cheapest(self, now_s: float) -> float | None:
        """The regret per byte of the next victim; None if there is no victim."""

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Give up victims in order of regret, until `num_bytes` are dropped.

        Args:
            num_bytes: how much is wanted; the last victim may give back more.
            now_s: the time.
            limit: stop before a victim of a larger regret per byte. The first one goes in any case.

        Returns:
            The bytes dropped; 0 if there was no victim.
        """


def batch_bytes(budget_bytes: int, page_bytes: int) -> int:
    """Bytes to drop at a time: some pages, but a small part of a small pool."""
    return min(_BATCH_PAGES * page_bytes, budget_bytes // 64)


class Reclaimer:
    """Evicts victims of all tenants in order of regret.

    Its `reclaim` is the pool's hook (`PagePool.on_short`).

    Args:
        clock_s: tells the time in seconds; the same clock that the tenants' uses are marked with.
        batch_bytes: drop that much at a time, even if less is missing. A pool that is short once
            will soon be short again, and a batch of victims costs less than one at a time.

    Attributes:
        log: what was evicted. Each tenant reports there what it loses.
    """

    def __init__(self, clock_s: Callable[[], float], batch_bytes: int = 0) -> None:
        self.log = EvictionLog()
        self._clock_s = clock_s
        self._batch_bytes = batch_bytes
        self._sources: list[Victims] = []

    def register(self, source: Victims) -> None:
        """Add a tenant."""
        self._sources.append(source)

    def unregister(self, source: Victims) -> None:
        """The opposite of `register`.

        Raises:
            InvariantError: the tenant is not registered.
        """
        if source not in self._sources:
            raise InvariantError("a source of victims is unregistered that never was registered")
        self._sources.remove(source)

    @property
    def evictable_bytes(self) -> int:
        """Bytes that all tenants together could give up."""
        return sum(source.evictable_bytes for source in self._sources)

    def evictable_below(self, num_bytes: int, limit: float = math.inf) -> int:
        """Bytes that all tenants together could give up at a regret per byte below `limit`.

        Args:
            num_bytes: how much is asked for; with a finite limit there may be more than is counted.
            limit: infinite by default, and then this is `evictable_bytes`.
        """
        if limit == math.inf:
            return self.evictable_bytes
        now_s = self._clock_s()
        found_bytes = 0
        for source in self._sources:
            if found_bytes >= num_bytes:
                break
            found_bytes += source.evictable_below(num_bytes - found_bytes, now_s, limit)
        return found_bytes

    def reclaim(self, num_bytes: int, asker: Owner) -> bool:
        """Drop victims, least regret first, until enough is dropped or there are no more.

        The bytes dropped are those of victims. Where several share a page, the pool gets the page
        when the last of them has gone; it then asks again.

        Args:
            num_bytes: how much is missing.
            asker: the owner that they are for, which the log names.

        Returns:
            Whether anything was dropped.
        """
        now_s = self._clock_s()
        self.log.begin(asker, now_s)
        num_bytes = max(num_bytes, self._batch_bytes)
        offers: dict[int, float] = {}  # index of a source: its least regret per byte
        for index, source in enumerate(self._sources):
            offer = source.cheapest(now_s)
            if offer is not None:
                offers[index] = offer
        dropped_bytes = 0
        while dropped_bytes < num_bytes and offers:
            # The first registered wins a tie, so the same state always leads to the same victims.
            index = min(offers, key=lambda i: offers[i])
            del offers[index]
            source = self._sources[index]
            # It may continue while its next victim is cheaper than what the others offer.
            limit = min(offers.values(), default=math.inf)
            got_bytes = source.evict(num_bytes - dropped_bytes, now_s, limit)
            dropped_bytes += got_bytes
            offer = source.cheapest(now_s) if got_bytes else None
            if offer is not None:
                offers[index] = offer
        return dropped_bytes > 0
