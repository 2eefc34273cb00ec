"""Pages mapped while the engine idles, where the first sequences of a model will need them.

A sequence finds mapped what the one before it in its slot has left there (deferred reclamation,
vAttention, section 5.4.2), and only the first one of a slot finds nothing. So slots are given a
predecessor that never ran: pages are mapped as for a sequence of usual length, and given up at
once. Retired pages are free memory: a tenant that is short of pages gets them.

They are of the pool's own size, which suit any prompt. A larger one would have to be unmapped where
a prompt does not fill it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from aquifer.engine.lane import Lane
from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool
from aquifer.memory.room import Room

_TOKENS = 1024
"""Length of the sequences for which pages are mapped."""

_SHARE = 4
"""At most this part of the free memory is mapped: a quarter. The rest takes no unmapping to get."""


class IdlePages:
    """Maps pages in slots that no sequence has had.

    Args:
        pool: where pages come from.
        room: of the pool.
    """

    def __init__(self, pool: PagePool, room: Room) -> None:
        self._pool = pool
        self._room = room
        self._slots_left: dict[str, list[int]] = {}  # by model, the first one last

    def map_some(self, lanes: Iterable[Lane]) -> bool:
        """Map the pages of a slot, which takes 1 or 2 ms; False if there is nothing to do.

        Args:
            lanes: the lanes of all models.
        """
        if not self._pool.retired.defers:
            return False
        for lane in lanes:
            if not lane.is_resident or not lane.cache.can_share:
                continue
            left = self._slots_left.get(lane.name)
            if left is None:
                left = self._slots_left[lane.name] = lane.slots.free[::-1]
            while left:
                slot = left.pop()
                if slot in lane.slots.free:
                    if self._map(lane, slot):
                        return True
                    left.clear()
        return False

    def forget(self, model: str) -> None:
        """A model is removed: another one may come with its name."""
        self._slots_left.pop(model, None)

    def _map(self, lane: Lane, slot: int) -> bool:
        """Map pages in a free slot, and give them up; False if there is no room for them."""
        pool, cache = self._pool, lane.cache
        num_tokens = min(_TOKENS, lane.slots.token_ids.shape[1])
        num_bytes = self._room.size(int(cache.footprint.pages(num_tokens)))
        retired_bytes = pool.free_bytes - pool.ready_bytes
        if _SHARE * (retired_bytes + num_bytes) > pool.free_bytes:
            return False
        cache.expect(slot, 1, num_tokens + 1)
        try:
            return cache.reserve(np.array([slot]), np.array([num_tokens]))
        except DriverError:
            return False  # nothing depends on it
        finally:
            cache.release(slot)
