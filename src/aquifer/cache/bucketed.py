"""KV in contiguous regions as large as sequences are expected to become (ODMA).

For devices on which a table's scattered blocks are slow to read and memory is not virtual. Each
sequence has one stretch of memory (`aquifer.cache.contiguous`), of the bucket that its forecast
says (`aquifer.cache.buckets`). One that outgrows its region is moved: its KV is copied to a larger
region, in one stretch, behind the steps that were launched so far.

The arena is what the pool has free when the first sequence begins, and is made anew whenever none
is left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aquifer.cache.base import KVLayout, StateLayout
from aquifer.cache.buckets import BucketBounds, BucketPool, Router
from aquifer.cache.contiguous import ContiguousCache
from aquifer.cache.footprint import Footprint
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.predict.lengths import Forecast

_THRESHOLD = 0.9
"""Uncertainty above which a request gets the large bucket (tau): lengths over all of the bins."""

_INFLATION = 0.1
"""Factor of uncertainty by which estimates are raised (alpha)."""


class BucketedCache(ContiguousCache):
    """The `SequenceCache` of regions by buckets.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token. Tokens behind windows are kept.
        max_seqs: number of slots.
        max_tokens: longest sequence.
        state: must be None: there is no room for recurrent state.
        block_size: tokens of a block.
        keeps_mapped: whether the arena's pages stay, as on a device without virtual memory.
        is_static: whether buckets have equal widths for ever (S3).
        threshold: see `aquifer.cache.buckets.Router`.
        inflation: see there.

    Attributes:
        bounds: the buckets.
        num_overflows: sequences that were moved because they had outgrown their regions.

    Raises:
        ConfigError: the model has recurrent state.
    """

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        state: StateLayout | None = None,
        *,
        block_size: int = 16,
        keeps_mapped: bool = False,
        is_static: bool = False,
        threshold: float = _THRESHOLD,
        inflation: float = _INFLATION,
    ) -> None:
        if state is not None or not layout.token_bytes:
            raise ConfigError(
                "kv_cache bucketed keeps KV in regions and nothing else; for models with recurrent "
                "state choose virtual or paged"
            )
        block_bytes = block_size * layout.token_bytes
        footprint = Footprint(layout.token_bytes, block_bytes, pool.page_bytes, shares=False)
        layers = tuple(replace(layer, window_tokens=None) for layer in layout.layers)
        super().__init__(
            pool,
            owner,
            KVLayout(layers, layout.dtype),
            max_seqs,
            max_tokens,
            block_size,
            pool.budget_bytes // block_bytes + 1,
            footprint,
            keeps_mapped=keeps_mapped,
        )
        self.bounds = BucketBounds(max_tokens, block_size, is_static=is_static)
        self.num_overflows = 0
        self._router = Router(self.bounds, threshold, inflation)
        self._most_tokens = np.full(max_seqs + 1, max_tokens, np.int64)
        self._pool = pool
        self._regions: BucketPool | None = None

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Choose the bucket; the very last token needs no KV."""
        most = min(num_total - 1, self._max_tokens)
        self._most_tokens[slot] = most
        self._expected_tokens[slot] = self._router.tokens(num_prompt, most, forecast)

    def note_end(self, num_tokens: int) -> None:
        """Learn the bounds of the buckets from the length of a sequence."""
        self.bounds.observe(num_tokens)

    def check(self) -> None:
        """Verify that regions, free ones and free space are the whole arena."""
        if self._regions is not None:
            self._regions.check()

    @property
    def free_blocks(self) -> int:
        """Blocks of the arena in no region."""
        return 0 if self._regions is None else self._regions.num_units - self._regions.used_units

    def _place(self, slot: int, num_tokens: int) -> range | None:
        """A region of the slot's bucket."""
        if (self._regions is None or self._regions.is_empty) and not self._make_arena():
            return None
        assert self._regions is not None
        may_have_reserve = self._num_blocks[slot] > 0 or num_tokens >= self._most_tokens[slot]
        return self._regions.take(self._blocks_for(num_tokens), may_have_reserve=may_have_reserve)

    def _vacate(self, region: range) -> None:
        """Put the region into the free list of its size."""
        assert self._regions is not None
        self._regions.give(region)

    def _outgrow(self, slot: int, num_tokens: int) -> bool:
        """Move the sequence to a larger region (ODMA, section 3.4).

        The paper moves it to the largest there is. Where outputs are short beside the context, one
        such region takes the room of dozens of others; so it is that of the next bucket with half
        as many tokens again, and copies of one sequence are few even so.
        """
        most = int(self._most_tokens[slot])
        if num_tokens > most:
            raise InvariantError(f"slot {slot} has {num_tokens} tokens, and may have {most}")
        old_first, old_count = int(self._first[slot]), int(self._num_blocks[slot])
        wanted = min(self.bounds.bound(num_tokens + num_tokens // 2), most)
        region = self._place(slot, wanted)
        if region is None or not self._occupy(slot, region, wanted):
            return False
        size = self.block_bytes
        self.tensors.copy(old_first * size, int(self._first[slot]) * size, old_count * size)
        # After the steps launched so far, which write to the old region, and before any other.
        self.tensors.make_copies()
        self.copied_bytes += old_count * size
        self.num_overflows += 1
        self._leave(old_first, old_count)
        return True

    def _make_arena(self) -> bool:
        """Make the arena of what the pool has free; False if it is short after all."""
        self._release_kept()
        free_bytes = self._pool.free_bytes
        num_blocks = max(free_bytes // self.block_bytes, 1)
        most_blocks = self.tensors.shape.num_rows - self.tensors.shape.first_row
        self._regions = BucketPool(min(num_blocks, most_blocks), self._blocks_for(self._max_tokens))
        return self._keep(self._regions.num_units)
