"""Room in a pool: the one question that admission asks about memory.

    room = free pages + what tenants could give up at less regret than a limit

A tenant is any source of victims: retained prefixes, weights of idle models.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from aquifer.memory.pool import PagePool
from aquifer.memory.reclaim import Reclaimer, batch_bytes


class Room:
    """Answers in pages whether a pool has room.

    An answer is an estimate for a plan: what it counts is evicted only when pages are acquired. The
    acquisition may still fail, since victims may lie on pages that are in use otherwise.

    Args:
        pool: the memory.
        reclaimer: evicts for the tenants that can give up memory of this pool.

    Attributes:
        reclaimer: as given.
    """

    def __init__(self, pool: PagePool, reclaimer: Reclaimer) -> None:
        self.reclaimer = reclaimer
        self._pool = pool

    @classmethod
    def of(cls, pool: PagePool, clock_s: Callable[[], float]) -> Room:
        """Make the room of a pool, with a new reclaimer that the pool calls when it is short.

        Args:
            pool: a pool that has no reclaimer yet.
            clock_s: tells the time in seconds; the same clock that tenants' uses are marked with.
        """
        reclaimer = Reclaimer(clock_s, batch_bytes(pool.budget_bytes, pool.page_bytes))
        pool.on_short = reclaimer.reclaim
        return cls(pool, reclaimer)

    @property
    def free_pages(self) -> int:
        """Pages that can be acquired without evicting anything."""
        return self._pool.free_bytes // self._pool.page_bytes

    @property
    def reachable_pages(self) -> int:
        """Pages that are free or that tenants could give up, at any regret."""
        reachable_bytes = self._pool.free_bytes + self.reclaimer.evictable_bytes
        return reachable_bytes // self._pool.page_bytes

    def size(self, num_pages: int) -> int:
        """Size of `num_pages` pages in bytes."""
        return num_pages * self._pool.page_bytes

    def pages(self, num_bytes: int) -> int:
        """Number of pages that hold `num_bytes`."""
        return -(-num_bytes // self._pool.page_bytes)

    def budget_pages(self, other_bytes: int = 0) -> int:
        """Pages that the pool's budget leaves beside `other_bytes`; 0 if these exceed it."""
        return max(self._pool.budget_bytes - other_bytes, 0) // self._pool.page_bytes

    def has(self, num_pages: int, at_regret: float = math.inf) -> bool:
        """Whether there are `num_pages` pages that are free or can be evicted at less regret.

        With an infinite limit it takes time in proportion to the number of tenants, with a finite
        one also in proportion to the victims that have to be counted.

        Args:
            num_pages: how many are needed.
            at_regret: limit in seconds per byte: victims of this regret or more do not count.
        """
        missing_bytes = num_pages * self._pool.page_bytes - self._pool.free_bytes
        if missing_bytes <= 0:
            return True
        return self.reclaimer.evictable_below(missing_bytes, at_regret) >= missing_bytes
