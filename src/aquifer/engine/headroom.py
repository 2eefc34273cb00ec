"""Whether admitting a request leaves the running sequences room to grow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aquifer.cache.base import SequenceCache
from aquifer.engine.lane import Lane, num_equal
from aquifer.engine.sequence import SequenceGroup
from aquifer.memory.pool import PagePool

_RUN_TOKENS = 64
"""How far all sequences must be able to go on after a preempted request has come back.

Coming back costs a prefill or two copies, about as much as some dozen steps of a batch. A request
that is preempted again before it has run for that long has cost more than it has brought, and so
would the next one: the batch thrashes. A sequence that ends sooner counts with what is left."""


def group_bytes(cache: SequenceCache, num_prompt: int, num_total: int, num_sequences: int) -> int:
    """Pool bytes that a request takes at most, if its sequences share the prompt and no more.

    Args:
        cache: where it will be.
        num_prompt: tokens of its prompt.
        num_total: tokens of each sequence in the end, prompt included.
        num_sequences: that run for it.
    """
    # The last token is never run, so it needs no KV.
    needed_bytes = cache.bytes_needed(num_total - 1)
    shared_bytes = 0
    if cache.can_share:
        shared_bytes = (num_prompt - 1) * cache.layout.token_bytes
        shared_bytes -= shared_bytes % cache.block_bytes
    return needed_bytes + (num_sequences - 1) * (needed_bytes - shared_bytes)


class Headroom:
    """Estimates what an admission takes, and asks whether there is room for it.

    Without that, a request just admitted would be preempted a few steps later, and its prompt
    computed for nothing.

    Args:
        pool: the memory of all lanes.
        lanes: all models' lanes.
    """

    def __init__(self, pool: PagePool, lanes: Mapping[str, Lane]) -> None:
        self._pool = pool
        self._lanes = lanes

    def has_room(self, lane: Lane, group: SequenceGroup, num_cached: int) -> bool:
        """Whether there is room for a request's tokens, and for running sequences to grow.

        Args:
            lane: the request's model's.
            group: a waiting request.
            num_cached: tokens whose KV is retained, so that it takes no more room.
        """
        num_running = sum(other.slots.num_taken for other in self._lanes.values())
        if not num_running or not lane.cache.can_share:  # what is reserved at once does not grow
            return True
        needed_bytes = lane.cache.bytes_needed(len(group.live[0].token_ids) + 1)
        needed_bytes -= num_cached * lane.cache.layout.token_bytes
        for sequence in group.live[1:]:
            shared = num_equal(group.live[0].token_ids, sequence.token_ids)
            needed_bytes += lane.cache.bytes_needed(len(sequence.token_ids) + 1 - shared)
        run_tokens = _RUN_TOKENS if group.num_preemptions else 1
        for other in self._lanes.values():
            table, cache = other.slots, other.cache
            slots = table.in_order
            left = (table.max_total[slots] - table.num_tokens[slots]).clip(0, run_tokens)
            if other is lane and group.num_preemptions:
                left = np.append(left, np.full(len(group.live), run_tokens))
            page_bytes = max(self._pool.page_bytes, cache.layout.token_bytes)
            growth = np.maximum(left * cache.layout.token_bytes, (left > 0) * page_bytes)
            needed_bytes += int(growth.sum())
        free_bytes = self._pool.free_bytes
        if free_bytes >= needed_bytes:
            return True
        return free_bytes + self._evictable_bytes >= needed_bytes

    @property
    def _evictable_bytes(self) -> int:
        return sum(
            lane.prefixes.evictable_bytes
            for lane in self._lanes.values()
            if lane.prefixes is not None
        )
