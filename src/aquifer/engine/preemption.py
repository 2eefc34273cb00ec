"""Preemption: KV of preempted requests in host memory (PagedAttention, section 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aquifer.cache.base import SequenceCache
from aquifer.cache.swap import SwappedKV, SwapSpace
from aquifer.engine.policies.restore import RestoreMode, restore_by_copy


class Preemption:
    """Moves KV of preempted requests to the host, where that is cheaper than computing it again.

    Args:
        space: host memory. When it is full, KV is computed again in any mode.
        mode: "swap", "recompute", or "auto" for the cheaper one each time. "swap" waits for host
            memory that is still being taken.

    Attributes:
        moved_bytes: bytes copied so far, in both directions.
    """

    def __init__(self, space: SwapSpace, mode: RestoreMode) -> None:
        self.moved_bytes = 0
        self._space = space
        self._mode = mode

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes of KV to the host or back; 0 if none is ever copied."""
        if self._mode == "recompute" or not self._space.num_bytes:
            return 0.0
        return num_bytes / self._space.bytes_per_s

    def swap_out(
        self,
        cache: SequenceCache,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        recompute_s: Callable[[float, float], float],
    ) -> list[SwappedKV] | None:
        """Copy a request's KV to the host; None if it is to be computed again instead.

        Args:
            cache: manager of the KV.
            slots: slots of the request's sequences.
            num_tokens: tokens of each sequence with written KV.
            recompute_s: seconds to compute a stretch of KV, given its first position and length.
        """
        waits = self._mode == "swap"
        if not any(num_tokens) or not (self._space.prepare() or waits):
            return None
        # Shared KV is computed once and moved once: the longest sequence, and the parts that the
        # others do not share with it.
        longest = max(num_tokens)
        num_bytes, others = 0, 0.0
        for part in cache.parts:
            footprint = part.cache.footprint
            num_blocks = len(
                {
                    block
                    for slot, count in zip(slots, num_tokens, strict=True)
                    for block in part.cache.blocks(slot, count)
                }
            )
            num_bytes += footprint.blocks_bytes(num_blocks)
            others = max(num_blocks * footprint.block_tokens - longest, others)
        compute_s = recompute_s(0, longest) + recompute_s(longest / 2, others)
        if not restore_by_copy(self._mode, 2 * num_bytes / self._space.bytes_per_s, compute_s):
            return None
        swapped = self._space.swap_out(cache, slots, num_tokens)
        while swapped is None and waits and self._space.wait_for_more():
            swapped = self._space.swap_out(cache, slots, num_tokens)
        if swapped is not None:
            self.moved_bytes += sum(kv.num_bytes for kv in swapped)
        return swapped

    def swap_in(
        self, cache: SequenceCache, slots: Sequence[int], swapped: Sequence[SwappedKV]
    ) -> bool:
        """Bring a request's KV back to empty slots; False if the pool is short."""
        if not self._space.swap_in(cache, slots, swapped):
            return False
        self.moved_bytes += sum(kv.num_bytes for kv in swapped)
        return True

    def discard(self, swapped: Sequence[SwappedKV]) -> None:
        """Release the KV of a request that ended while it was on the host."""
        self._space.discard(swapped)
