"""Whether admitting a request leaves the running sequences room to grow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aquifer.cache.prefix import Match
from aquifer.engine.lane import Lane
from aquifer.engine.sequence import SequenceGroup
from aquifer.memory.room import Room
from aquifer.memory.runs import num_equal

_RUN_TOKENS = 64
"""How far all sequences must be able to go on after a preempted request has come back.

Coming back costs a prefill or two copies, about as much as some dozen steps of a batch. A request
that is preempted again before it has run for that long has cost more than it has brought, and so
would the next one: the batch thrashes. A sequence that ends sooner counts with what is left."""


class Headroom:
    """Estimates what an admission takes, and asks whether there is room for it.

    Without that, a request just admitted would be preempted a few steps later, and its prompt
    computed for nothing.

    Args:
        room: of the pool of all lanes.
        lanes: all models' lanes.
    """

    def __init__(self, room: Room, lanes: Mapping[str, Lane]) -> None:
        self._room = room
        self._lanes = lanes

    def has_room(self, lane: Lane, group: SequenceGroup, match: Match | None) -> bool:
        """Whether there is room for a request's tokens, and for running sequences to grow.

        Args:
            lane: the request's model's.
            group: a waiting request.
            match: what is retained of it; None if it is not looked for. That takes no room, but
                counts as evictable no longer.
        """
        num_running = sum(other.slots.num_taken for other in self._lanes.values())
        if not num_running or not lane.cache.can_share:  # what is reserved at once does not grow
            return True
        first, *others = group.live
        footprint = lane.cache.footprint
        needed_pages = footprint.needed(
            len(first.token_ids) + 1, 0 if match is None else match.num_tokens
        )
        if lane.prefixes is not None and match is not None:
            needed_pages += lane.prefixes.evictable_pages(match)
        for sequence in others:
            shared = num_equal(first.token_ids, sequence.token_ids)
            needed_pages += footprint.pages(len(sequence.token_ids) + 1 - shared)
        run_tokens = _RUN_TOKENS if group.num_preemptions else 1
        for other in self._lanes.values():
            table = other.slots
            slots = table.in_order
            left = table.max_total[slots] - table.num_tokens[slots]
            left = np.minimum(np.maximum(left, 0), run_tokens)
            if other is lane and group.num_preemptions:
                left = np.append(left, np.full(len(group.live), run_tokens))
            needed_pages += other.cache.footprint.growth(left)
        return self._room.has(needed_pages)
