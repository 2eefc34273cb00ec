"""Moves the KV of preempted requests to host memory and back (PagedAttention, section 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aquifer.cache.base import SequenceCache
from aquifer.cache.swap import SwappedKV, SwapSpace
from aquifer.engine.policies.restore import RestoreMode, restore_by_copy


class Preemption:
    """Moves the KV of preempted requests, where that is cheaper than computing it again.

    Args:
        space: where it goes. When that is full, KV is computed again whatever the mode.
        mode: "swap", "recompute", or "auto" for the cheaper one each time.

    Attributes:
        moved_bytes: copied so far, in either direction.
    """

    def __init__(self, space: SwapSpace, mode: RestoreMode) -> None:
        self.moved_bytes = 0
        self._space = space
        self._mode = mode

    def swap_out(
        self,
        cache: SequenceCache,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        recompute_s: Callable[[float, float], float],
    ) -> list[SwappedKV] | None:
        """Copy a request's KV to the host, if that is the way to go; None if it is not.

        Args:
            cache: where it is.
            slots: of the request's sequences.
            num_tokens: of each, how many have their KV written.
            recompute_s: seconds to compute a stretch of KV, given its first position and length.
        """
        if not any(num_tokens) or not self._space.prepare(wait=self._mode == "swap"):
            return None
        footprint = cache.footprint
        blocks = {
            block
            for slot, count in zip(slots, num_tokens, strict=True)
            for block in cache.blocks(slot, count)
        }
        num_bytes = footprint.blocks_bytes(len(blocks))
        # What sequences share is computed once and moved once: as long as the longest, and the
        # others' own parts.
        longest = max(num_tokens)
        others = max(len(blocks) * footprint.block_tokens - longest, 0)
        compute_s = recompute_s(0, longest) + recompute_s(longest / 2, others)
        if not restore_by_copy(self._mode, 2 * num_bytes / self._space.bytes_per_s, compute_s):
            return None
        swapped = self._space.swap_out(cache, slots, num_tokens)
        if swapped is not None:
            self.moved_bytes += footprint.kv_bytes(sum(kv.num_copied for kv in swapped))
        return swapped

    def swap_in(
        self, cache: SequenceCache, slots: Sequence[int], swapped: Sequence[SwappedKV]
    ) -> bool:
        """Bring a request's KV back to empty slots; False if the pool is short."""
        if not self._space.swap_in(cache, slots, swapped):
            return False
        self.moved_bytes += cache.footprint.kv_bytes(sum(kv.num_copied for kv in swapped))
        return True

    def discard(self, swapped: Sequence[SwappedKV]) -> None:
        """Forget the KV of a request that ended while it was on the host."""
        self._space.discard(swapped)
