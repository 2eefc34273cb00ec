"""The one eviction rule: what goes first when memory is short, whoever it belongs to.

Whatever is kept though nobody uses it right now is a bet that it will be needed again. Losing the
bet costs the time to restore it. So the victim is the one whose loss costs the least expected
delay for each byte that it gives back:

    regret per byte = p(needed again) x seconds to restore x sensitivity / bytes

A tenant knows its victims, what restoring them takes, and when they were last used. This module
knows how to compare: `ReuseModel` says how probable it is that something is needed again,
`regret_per_byte` is the rule, and `Reclaimer` applies it across tenants. It knows bytes and
seconds only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aquifer.errors import InvariantError

_BATCH_PAGES = 32
"""Victims that go at once."""


@dataclass(frozen=True, slots=True)
class ReuseModel:
    """How probable it is that something is needed again soon, given its past.

    Each thing is reused at random moments at a rate of its own, which nobody knows. If rates are
    spread like a gamma distribution, the time to the next use has a Lomax (Pareto II) tail:

        p(not needed for t seconds) = (scale / (scale + t)) ** shape

    Much is needed again at once or never. What has not been needed for `age_s` since its last use
    is needed within the horizon with

        p = 1 - ((age + scale) / (age + scale + horizon)) ** shape(reuses)
        shape(reuses) = first_shape + reuse_shape * sqrt(min(reuses, max_reuses))

    It falls with age, and rises with the number of times that it was needed again before. Time
    counts from the last use, not from the first, so that what has gone out of use is forgotten,
    however popular it was.

    Once the age is well beyond the scale, p is about shape x horizon / age: what has been idle for
    twice as long is half as likely to be needed.

    The constants are those that saved most prefill time when Mooncake's synthetic trace (FAST '25;
    122 000 uses of 44 000 prefix blocks) was replayed with room for 7 to 68 % of the blocks: 7 %
    more than least recently used on the average of five sizes, and more at each of them. They are
    not sensitive: a scale from 3 s to 30 s and a reuse shape from 0.1 to 0.3 cost less than 1 % of
    that. But a fit to the times between uses, which gives a scale of 120 s, is worse than least
    recently used in a small cache: it keeps what was reused once for minutes, and what is new goes
    before it has had a chance.

    Args:
        horizon_s: how far ahead a use counts: about as long as a thing stays in a busy cache.
        scale_s: the age at which the rate of reuse has fallen to half of the initial one.
        first_shape: shape of what was never needed again so far.
        reuse_shape: what the first reuse adds to the shape.
        max_reuses: more reuses than that say nothing more.
    """

    horizon_s: float = 60.0
    scale_s: float = 10.0
    first_shape: float = 0.3
    reuse_shape: float = 0.2
    max_reuses: int = 8

    def probability(self, age_s: float, reuses: int) -> float:
        """p(needed again within the horizon), in (0, 1).

        Args:
            age_s: since the last use; a negative age is none.
            reuses: how often it was used after the first time.
        """
        shape = self.first_shape + self.reuse_shape * math.sqrt(min(reuses, self.max_reuses))
        # The formula above, written so that small probabilities keep their digits.
        return -math.expm1(-shape * math.log1p(self.horizon_s / (max(age_s, 0.0) + self.scale_s)))


def regret_per_byte(
    probability: float, restore_s: float, num_bytes: int, sensitivity: float = 1.0
) -> float:
    """Expected seconds of delay for each byte, if a victim goes. The least one goes first.

    Args:
        probability: that it is needed again, from `ReuseModel`.
        restore_s: seconds until it is there again, once it is needed.
        num_bytes: what evicting it gives back.
        sensitivity: how much a second of delay matters to whoever would wait for it, compared with
            others.
    """
    return probability * restore_s * sensitivity / num_bytes


class Victims(Protocol):
    """A tenant that keeps what nobody uses right now, and can give it up."""

    @property
    def evictable_bytes(self) -> int:
        """What `evict` could give back in all."""

    def cheapest(self, now_s: float) -> float | None:
        """The regret per byte of the next victim, None if there is none."""

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Give up victims in order of regret, until `num_bytes` are dropped.

        Args:
            num_bytes: how much is wanted; the last victim may bring more.
            now_s: the time.
            limit: stop before a victim of a larger regret per byte. The first one goes in any case.

        Returns:
            The bytes dropped; 0 if there was no victim.
        """


def batch_bytes(budget_bytes: int, page_bytes: int) -> int:
    """How much to drop at a time: some pages, but little of a small pool."""
    return min(_BATCH_PAGES * page_bytes, budget_bytes // 64)


class Reclaimer:
    """Takes memory from whichever tenant loses the least by it.

    Its `reclaim` is the pool's hook (`PagePool.on_short`).

    Args:
        clock_s: tells the time in seconds; the same clock that the tenants' uses are marked with.
        batch_bytes: drop that much at a time, even if less is missing. Memory that has run short
            once is about to do so again, and victims are cheaper by the dozen.
    """

    def __init__(self, clock_s: Callable[[], float], batch_bytes: int = 0) -> None:
        self._clock_s = clock_s
        self._batch_bytes = batch_bytes
        self._sources: list[Victims] = []

    def register(self, source: Victims) -> None:
        """Take from this tenant too from now on."""
        self._sources.append(source)

    def unregister(self, source: Victims) -> None:
        """The opposite of `register`.

        Raises:
            InvariantError: it is not registered.
        """
        if source not in self._sources:
            raise InvariantError("a source of victims is unregistered that never was registered")
        self._sources.remove(source)

    @property
    def evictable_bytes(self) -> int:
        """What all tenants together could give up."""
        return sum(source.evictable_bytes for source in self._sources)

    def reclaim(self, num_bytes: int) -> bool:
        """Drop victims, least regret first, until enough is dropped or there are no more.

        What is dropped is bytes of victims. Where several share a page, the pool gets the page when
        the last of them has gone; it then asks again.

        Returns:
            Whether anything was dropped.
        """
        now_s = self._clock_s()
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
            # It may go on for as long as its next victim is cheaper than all that others offer.
            limit = min(offers.values(), default=math.inf)
            got_bytes = source.evict(num_bytes - dropped_bytes, now_s, limit)
            dropped_bytes += got_bytes
            offer = source.cheapest(now_s) if got_bytes else None
            if offer is not None:
                offers[index] = offer
        return dropped_bytes > 0
