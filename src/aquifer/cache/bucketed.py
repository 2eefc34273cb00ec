"""KV in contiguous regions of predicted size (ODMA, sections 3.3 to 3.5).

When a sequence begins, it gets a region of the smallest bucket that holds the length forecast for
it. The buckets follow the lengths of the sequences that have finished. With no forecast, or an
uncertain one, the region is of the large bucket: it holds all tokens that the sequence may ever
have. A sequence that outgrows its region moves to one of the large bucket, with one copy of its KV.
In the paper that region holds the longest context. Here it is of twice the sequence's tokens, since
few are much longer than was forecast, and places of the longest context are rare in a full arena.
If even that is not to be had, the sequence itself waits (`stuck_slot`): that others give up their
regions, which are smaller and lie anywhere, would seldom help it.

pages       come with a region and go with it. With `kept_bytes`, for devices without virtual
            memory, those of the whole arena are taken when the first sequence begins, and stay.
reserve     room for sequences that outgrow their regions: regular buckets cannot have it. Its pages
            are held while any sequence runs, if the pool has room for two such pieces.
no deadlock a sequence that is preempted goes on in the large bucket once it has as many tokens as
            were forecast. When no region is in use, the arena is one free space again. So a request
            that fits alone is always served at last.

Tokens behind windows are kept. Recurrent state is not supported, and nothing is shared.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np

from aquifer.cache.base import IntArray, KVLayout, StateLayout
from aquifer.cache.buckets import BucketBounds, BucketPool, Granularity, Routing
from aquifer.cache.contiguous import ContiguousCache
from aquifer.cache.footprint import Count, Footprint
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.predict.lengths import Forecast
from aquifer.sizes import format_size

_MIN_BLOCKS, _MID_BLOCKS = 4, 8
"""Sizes of regions are multiples of these: 64 tokens up to 128, then 128, with blocks of 16."""

_SINGLE_TOKENS = Granularity(1, 1, 1)

_NUM_EQUAL = 10
"""Buckets of equal widths, as many as S3 has."""

_GROWTH = 2
"""Tokens of the region that an outgrown one is exchanged for, in tokens of its sequence."""


def sizes_of(block_size: int, max_tokens: int) -> Granularity:
    """The sizes of regions, for blocks and sequences of so many tokens."""
    return Granularity(_MIN_BLOCKS * block_size, _MID_BLOCKS * block_size, max_tokens)


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """Options of a bucketed cache; see `BucketedCache`."""

    routing: Routing = field(default_factory=Routing)
    has_equal_widths: bool = False
    kept_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BucketFootprint(Footprint):
    """Footprint of sequences whose regions hold all tokens that they may ever have.

    Those of regular buckets are smaller.

    Attributes:
        sizes: sizes of regions.
        reserve_pages: pages that regular buckets cannot have.
    """

    sizes: Granularity = _SINGLE_TOKENS
    reserve_pages: int = 0

    def pages(self, num_tokens: Count) -> Count:
        """Pages under the region of a sequence that may have so many tokens."""
        if isinstance(num_tokens, np.ndarray):
            return np.array([self.pages(count) for count in num_tokens.tolist()], np.int64)
        return Footprint.pages(self, self.sizes.align(num_tokens))

    def most(self, num_prompt: int, num_total: int, num_sequences: int = 1) -> int:
        """See `Footprint.most`; for several sequences the reserve counts too.

        If there is a reserve, one sequence fits beside it. Several may have to do without it.
        """
        reserve_pages = self.reserve_pages if num_sequences > 1 else 0
        return Footprint.most(self, num_prompt, num_total, num_sequences) + reserve_pages

    def growth(self, more_tokens: IntArray, num_tokens: IntArray) -> int:
        """No pages: a region has room to grow, and few sequences outgrow theirs."""
        return 0


class BucketedCache(ContiguousCache):
    """The `SequenceCache` of bucketed regions.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token's KV. Tokens behind windows are kept.
        max_seqs: number of slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
        state: must be None: there is no room for recurrent state.
        block_size: tokens of a block.
        routing: how a forecast chooses a bucket.
        bounds: bounds of the buckets; None for ones of this cache alone.
        has_equal_widths: whether those are ten of equal widths for ever, as in S3; else they follow
            the lengths.
        num_reserved: regions of the largest size that regular buckets cannot have.
        kept_bytes: size of an arena of which all pages stay mapped once the first sequence has
            begun; None for pages that come and go with regions.

    Attributes:
        bounds: bounds of the buckets.
        routing: as given.
        num_overflows: sequences that have outgrown their region, since the start.
        migrated_bytes: bytes that were copied for them.

    Raises:
        ConfigError: the model has recurrent state, or no KV; or the kept bytes hold no region.
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
        routing: Routing | None = None,
        bounds: BucketBounds | None = None,
        has_equal_widths: bool = False,
        num_reserved: int = 1,
        kept_bytes: int | None = None,
    ) -> None:
        if state is not None or not layout.token_bytes:
            raise ConfigError(
                f"kv_cache bucketed has no room for recurrent state, which {owner.model} has; "
                "choose virtual, paged or avmp"
            )
        layers = tuple(replace(layer, window_tokens=None) for layer in layout.layers)
        layout = KVLayout(layers, layout.dtype)
        sizes = sizes_of(block_size, max_tokens)
        block_bytes = block_size * layout.token_bytes
        largest = -(-max_tokens // block_size)
        # Whole pages, so that the reserve shares none with other regions.
        whole = lcm(block_bytes, pool.page_bytes) // block_bytes
        self._reserve_blocks = -(-num_reserved * largest // whole) * whole
        if kept_bytes is None:
            # As many as the pool could ever have pages for, and addresses of the reserve.
            num_blocks = min(pool.budget_bytes // block_bytes + 1, max_seqs * largest)
            num_blocks = -(-num_blocks // whole) * whole + self._reserve_blocks
        else:
            num_blocks = kept_bytes // block_bytes
            if num_blocks < self._reserve_blocks + largest:
                self._reserve_blocks = 0
        footprint = BucketFootprint(
            layout.token_bytes,
            block_bytes,
            pool.page_bytes,
            shares=False,
            limit_pages=None if kept_bytes is None else num_blocks * block_bytes // pool.page_bytes,
            sizes=sizes,
            reserve_pages=self._reserve_blocks * block_bytes // pool.page_bytes,
        )
        if footprint.limit_pages is not None and footprint.limit_pages < footprint.pages(1):
            raise ConfigError(
                f"the memory for buckets is {format_size(kept_bytes or 0)}, and the smallest "
                f"region takes {format_size(footprint.pages(1) * pool.page_bytes)}; raise "
                "--bucket-memory"
            )
        super().__init__(
            pool, owner, layout, max_seqs, max_tokens, block_size, num_blocks, footprint
        )
        if bounds is None and has_equal_widths:
            bounds = BucketBounds(sizes, _NUM_EQUAL, widths="equal", is_static=True)
        self.bounds = bounds or BucketBounds(sizes)
        self.routing = routing or Routing()
        self.num_overflows = 0
        self.migrated_bytes = 0
        self._memory = pool
        self._sizes = sizes
        self._largest = largest
        self._keeps_mapped = kept_bytes is not None
        self._arena = BucketPool(num_blocks, self._reserve_blocks)
        self._held = range(0)  # pages of the reserve, or of all of the arena, if they are held
        # What `expect` said: the length to choose a bucket for, 0 for the large one; and tokens
        # that there will be KV of at most.
        self._totals = np.zeros(max_seqs + 1, np.int64)
        self._most_tokens = np.zeros(max_seqs + 1, np.int64)

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Note the length that is forecast, until the slot is released.

        Without any call, a region holds what is asked for.
        """
        self._totals[slot] = self.routing.total(num_prompt, forecast, num_total) or 0
        self._most_tokens[slot] = num_total - 1  # the last one is never run

    def has_region(self, num_prompt: int, num_total: int, forecast: Forecast | None = None) -> bool:
        """Whether a sequence could begin in a free region of its bucket; see `expect`."""
        if not self._arena.num_used:
            return True  # the arena begins in one piece
        total = self.routing.total(num_prompt, forecast, num_total)
        num_blocks, is_large = self._size(total, num_total - 1, num_prompt)
        is_covered = self._keeps_mapped or (is_large and bool(self._held))
        has_pages = is_covered or self._memory.free_bytes >= num_blocks * self.block_bytes
        return has_pages and self._arena.has(num_blocks, is_large=is_large)

    def learn(self, num_total: int) -> None:
        """Let the bounds of later sequences follow this length."""
        self.bounds.observe(num_total)

    def release(self, slot: int) -> None:
        """Give back the slot's region, and forget what was expected."""
        super().release(slot)
        self._totals[slot] = self._most_tokens[slot] = 0

    @property
    def occupancy(self) -> dict[tuple[int, bool], int]:
        """Number of regions in use, by their size in tokens and whether they are of the large
        bucket."""
        return {
            (num_blocks * self._block_size, is_large): count
            for (num_blocks, is_large), count in self._arena.occupancy.items()
        }

    @property
    def lacks_pages(self) -> bool:
        """Whether the arena is to be kept, and the pool has had no pages for it so far."""
        return self._keeps_mapped and not self._held

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pages that are mapped whether or not a sequence runs."""
        return len(self._held) * self._page_bytes if self._keeps_mapped else 0

    @property
    def free_blocks(self) -> int:
        """Blocks of the arena in no region."""
        return self._arena.free_blocks

    @property
    def free_bucket_tokens(self) -> int:
        """Bound of the largest bucket of which a region could be had now, in tokens; 0 if none."""
        num_blocks = self._arena.largest_free_blocks
        if not self._keeps_mapped:
            num_blocks = min(num_blocks, self._memory.free_bytes // self.block_bytes)
        bounds = self.bounds.bounds
        number = bisect_right(bounds, num_blocks * self._block_size)
        return bounds[number - 1] if number else 0

    def check(self) -> None:
        """Verify the pieces of the arena (`BucketPool.check`), and that pages are counted rightly.

        Raises:
            InvariantError: they are not.
        """
        self._arena.check()
        users = np.zeros_like(self._page_users)
        users[self._held.start : self._held.stop] += 1
        slots = np.flatnonzero(self._num_blocks).tolist()
        for pages in (self._pages_of(self._region(slot)) for slot in slots):
            users[pages.start : pages.stop] += 1
        if len(slots) != self._arena.num_used or (users != self._page_users).any():
            raise InvariantError("regions and the pages under them disagree")

    def check_empty(self) -> None:
        """Verify what `check` does, and that the arena is free in one piece beside its reserve.

        Raises:
            InvariantError: it is not, or a region is in use.
        """
        self.check()
        self._arena.check_empty()

    def close(self) -> None:
        """Release all slots and the pages that are kept, then the addresses."""
        for slot in np.flatnonzero(self._num_blocks):
            self.release(int(slot))
        self._let_go()
        super().close()

    def _place(self, slot: int, num_tokens: int) -> range | None:
        """A piece of the slot's bucket."""
        if not self._arena.num_used and not self._begin_arena():
            return None
        total, most_tokens = int(self._totals[slot]) or None, int(self._most_tokens[slot])
        num_blocks, is_large = self._size(total, most_tokens, num_tokens)
        # The reserve has pages, which other places may not get.
        needed_bytes = num_blocks * self.block_bytes + self._page_bytes
        is_tight = not self._keeps_mapped and self._memory.free_bytes < needed_bytes
        return self._arena.take(
            num_blocks, is_large=is_large, reserve_first=is_tight and bool(self._held)
        )

    def _size(self, total: int | None, most_tokens: int, num_tokens: int) -> tuple[int, bool]:
        """Blocks of a region, and whether it is of the large bucket.

        Args:
            total: the length to choose a bucket for; None for the large one.
            most_tokens: tokens that there will be KV of at most.
            num_tokens: tokens that the region has to hold at least.
        """
        wanted = most = self._sizes.align(max(most_tokens, num_tokens))
        bound = self.bounds.of(total, num_tokens)
        if bound is not None:
            wanted = bound
        elif total is not None:
            wanted = self._sizes.align(max(total, _GROWTH * num_tokens))
        return self._blocks_for(min(wanted, most)), bound is None

    def _unplace(self, blocks: range) -> None:
        self._arena.give(blocks.start)
        if not self._arena.num_used and not self._keeps_mapped:
            self._let_go()

    def _move(self, taken: list[tuple[int, range]]) -> None:
        """Count the sequences that move."""
        outgrown = [int(self._num_blocks[slot]) for slot, _ in taken if self._num_blocks[slot]]
        self.num_overflows += len(outgrown)
        self.migrated_bytes += sum(outgrown) * self.block_bytes
        super()._move(taken)

    def _begin_arena(self) -> bool:
        """Begin with an arena in one piece, and hold pages for the reserve or for all of it; False
        if the pool is short. Pre-condition: no region is in use."""
        self._arena = arena = BucketPool(self._arena.num_blocks, self._reserve_blocks)
        first = self.tensors.shape.first_row
        end = first + arena.num_blocks
        if self._keeps_mapped:
            return bool(self._held) or self._hold(range(first, end))
        needed_bytes = (self._reserve_blocks + self._largest) * self.block_bytes
        if self._reserve_blocks and self._memory.free_bytes >= needed_bytes:
            self._hold(range(end - arena.reserve_blocks, end))
        return True

    def _hold(self, blocks: range) -> bool:
        """Keep pages under these blocks, whatever regions are there; False if the pool is short."""
        if not (self.tensors.open() and self._occupy(blocks)):
            return False
        self._held = self._pages_of(blocks)
        return True

    def _let_go(self) -> None:
        """The opposite of `_hold`."""
        if self._held:
            held, self._held = self._held, range(0)
            self._vacate_pages(held)
