"""KV in contiguous regions that are reserved whole when a sequence begins: three baselines.

Servers before PagedAttention keep a sequence's KV in one stretch, and so set aside room for all
that it may ever have (sections 3.1 and 6.1). How much that is, is the policy:

- "max": the longest sequence there may be (Orca (Max), FasterTransformer);
- "pow2": the prompt, and the output's length rounded up to a power of two (Orca (Pow2));
- "oracle": its true final length, known in a replay only (Orca (Oracle)).

In an engine the final length is taken to be the prompt and `max_tokens`, so there "oracle" is what
a server does that believes its clients.

A buddy allocator places the regions, in blocks of `block_size` tokens, so a region is a power of
two of blocks, one after the other. Kernels find it through a table with an entry for each block, as
they do paged KV, although the entries are consecutive numbers. All of a region's pages are taken
from the pool when it begins and given back when it ends: nothing is mapped in between.

Nothing is shared. `fork` and `adopt` copy all of a sequence, whatever it could have had in common
with another one, and there can be no prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, KeepsAll, KVLayout, StateLayout
from aquifer.cache.footprint import Count, Footprint
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.runs import runs
from aquifer.predict.lengths import Forecast
from aquifer.sim.baselines.buddy import BuddyAllocator

Policy = Literal["max", "pow2", "oracle"]


def tokens_to_reserve(policy: Policy, num_prompt: int, num_total: int, max_tokens: int) -> int:
    """How many tokens to set aside for a sequence.

    Args:
        policy: see the module.
        num_prompt: tokens of the prompt.
        num_total: tokens of prompt and output.
        max_tokens: of the longest sequence; never more than that is set aside.
    """
    if policy == "max":
        return max_tokens
    if policy == "oracle":
        return min(num_total, max_tokens)
    num_outputs = BuddyAllocator.rounded(max(num_total - num_prompt, 1))
    return min(num_prompt + num_outputs, max_tokens)


@dataclass(frozen=True, slots=True)
class RegionFootprint(Footprint):
    """Footprint of sequences in regions of a power of two of blocks.

    Attributes:
        least_tokens: length that every sequence is given a region for, if it is not longer.
    """

    least_tokens: int = 0

    def pages(self, num_tokens: Count) -> Count:
        """Whole pages under the region of a sequence that ends with that many tokens."""
        if isinstance(num_tokens, np.ndarray):
            return np.array([self.pages(count) for count in num_tokens.tolist()], np.int64)
        if not self.token_bytes:
            return 0
        block_tokens = self.block_bytes // self.token_bytes
        num_blocks = -(-max(num_tokens, self.least_tokens) // block_tokens)
        return self.blocks_pages(BuddyAllocator.rounded(num_blocks)) if num_blocks else 0


@dataclass(frozen=True, slots=True)
class Waste:
    """What a manager has taken without a token in it, by the kinds of section 3.1, in bytes."""

    future_bytes: int  # "reserved": for tokens that will come
    internal_bytes: int  # set aside for tokens that will never come
    external_bytes: int  # taken by rounding, to a region and to pages: no token could come there


class ReservedCache(KeepsAll):
    """The `SequenceCache` of regions reserved whole.

    The arena is what the pool has free when the cache is made. It may be had by others meanwhile:
    then a region can be refused although there is room in the arena.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: of one token.
        max_seqs: number of slots.
        max_tokens: longest sequence.
        state: must be None: there is no room for recurrent state.
        policy: how much to reserve.
        block_size: tokens of a block, a power of two.

    Attributes:
        tensors: the device's half.
        can_share: there is no sharing of blocks, so nothing can be held.
        copied_bytes: copied by `fork` and `adopt` since the start.

    Raises:
        ConfigError: there is no such policy, or the model has recurrent state.
    """

    can_share = False

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        state: StateLayout | None = None,
        *,
        policy: Policy = "max",
        block_size: int = 16,
    ) -> None:
        if state is not None:
            raise ConfigError(
                "regions reserved whole have no room for recurrent state; replay with virtual "
                "or paged"
            )
        if policy not in get_args(Policy):
            raise ConfigError(f"unknown policy {policy!r}; choose {', '.join(get_args(Policy))}")
        self.layout = layout
        self.block_bytes = block_size * layout.token_bytes
        self.footprint = RegionFootprint(
            layout.token_bytes,
            self.block_bytes,
            pool.page_bytes,
            shares=False,
            least_tokens=max_tokens if policy == "max" else 0,
        )
        self.copied_bytes = 0
        self._policy: Policy = policy
        self._block_size = block_size
        self._max_tokens = max_tokens
        largest = BuddyAllocator.rounded(self._blocks_for(max_tokens))
        num_blocks = max(min(pool.free_bytes // self.block_bytes, max_seqs * largest), 1)
        self._buddies = BuddyAllocator(num_blocks)
        shape = KVShape.blocks(pool, layout, max_seqs, max_tokens, block_size, num_blocks)
        self.tensors = KVTensors(pool, owner, shape)
        self._page_bytes = pool.page_bytes
        # Regions on each page.
        self._page_users = np.zeros(self.tensors.range.num_pages, np.int64)
        # What `expect` said, and what was taken.
        self._expected_tokens = np.full(max_seqs + 1, max_tokens, np.int64)
        self._wanted_tokens = np.zeros(max_seqs + 1, np.int64)
        self._first = np.zeros(max_seqs + 1, np.int64)  # block of each slot's region
        self._num_blocks = np.zeros(max_seqs + 1, np.int64)  # of each slot's region, 0 for none

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Decide how much to set aside for the sequences that come to a slot, until the next call.

        Without any, it is the longest sequence.
        """
        self._expected_tokens[slot] = tokens_to_reserve(
            self._policy, num_prompt, num_total, self._max_tokens
        )

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Give a region to each sequence that has none.

        Raises:
            InvariantError: a sequence has outgrown its region, so it was not expected rightly.
        """
        held = self._num_blocks[slots]
        if (held * self._block_size >= num_tokens).all():
            return True
        is_new = held == 0
        outgrown = ~is_new & (held * self._block_size < num_tokens)
        if outgrown.any():
            raise InvariantError(f"slots {slots[outgrown]} have outgrown what they reserved")
        with ExitStack() as undo:
            for slot, count in zip(
                slots[is_new].tolist(), num_tokens[is_new].tolist(), strict=True
            ):
                if not self._begin(slot, count):
                    return False
                undo.callback(self._end, slot)
            undo.pop_all()
        return True

    def release(self, slot: int) -> None:
        """Give back the slot's region, and the pages that no other region is on."""
        if self._num_blocks[slot]:
            self._end(slot)

    def tokens_in(self, num_blocks: int) -> int:
        """Whole blocks."""
        return num_blocks * self._block_size

    def tokens_touching(self, num_blocks: int) -> int:
        """The same: a block begins and ends with a token."""
        return num_blocks * self._block_size

    def blocks(self, slot: int, num_tokens: int) -> list[int]:
        """The first blocks of the region."""
        first = int(self._first[slot])
        return list(range(first, first + self._blocks_for(num_tokens)))

    def slot_blocks(self, slot: int) -> list[int]:
        """All blocks of the region."""
        return list(range(int(self._first[slot]), int(self._first[slot] + self._num_blocks[slot])))

    def forget(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Do nothing: a region is given back as a whole."""

    def num_forgotten(self, slot: int) -> int:
        """0."""
        return 0

    def ends(self, slots: IntArray) -> IntArray:
        """Blocks of the regions."""
        return self._num_blocks[slots]

    def shrink(self, slots: IntArray, ends: IntArray) -> None:
        """Give back the regions that were reserved since."""
        for slot in slots[ends == 0].tolist():
            self.release(slot)

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int, first: int = 0) -> bool:
        """Reserve a region of its own, and copy all of the tokens there, at once."""
        if not self.reserve(np.array([slot]), np.array([num_tokens])):
            return False
        size, target = self.block_bytes, int(self._first[slot])
        for start, end in runs(blocks):
            self.tensors.copy(blocks[start] * size, (target + start) * size, (end - start) * size)
        self.tensors.make_copies()
        self.copied_bytes += len(blocks) * self.block_bytes
        return True

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Copy the parent's first tokens."""
        return self.adopt(child, self.blocks(parent, num_tokens), num_tokens)

    def retain(self, blocks: Sequence[int]) -> None:
        """Not possible: a region has one user.

        Raises:
            InvariantError: always; see `can_share`.
        """
        raise InvariantError(f"{len(blocks)} blocks of a reserved region cannot be held")

    def unretain(self, blocks: Sequence[int]) -> None:
        """Not possible either.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(f"{len(blocks)} blocks of a reserved region were never held")

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """None: all is copied, whatever the slot."""
        return None

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """One copy: a region is contiguous."""
        self.tensors.copy_out(self._byte_of(slot, tokens.start), target)

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """Likewise."""
        self.tensors.copy_in(self._byte_of(slot, tokens.start), source)

    def upload(self) -> None:
        """Send the tables of the slots that have got a region."""
        self.tensors.flush()

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Mapped is all that is reserved."""
        written_tokens = int(np.sum(written_tokens))
        return CacheStats(
            written_tokens, written_tokens * self.layout.token_bytes, self._mapped_bytes
        )

    def waste(self, written_tokens: int, final_tokens: IntArray) -> Waste:
        """What is reserved and not written, by kind: the bars of Fig. 2.

        Args:
            written_tokens: of all sequences.
            final_tokens: [max_seqs + 1], for each slot what its sequence will have when it ends; of
                slots that have reserved nothing it does not matter.
        """
        token_bytes = self.layout.token_bytes
        wanted_tokens = int(self._wanted_tokens.sum())
        all_final_tokens = int(final_tokens[self._num_blocks > 0].sum())
        return Waste(
            future_bytes=(all_final_tokens - written_tokens) * token_bytes,
            internal_bytes=(wanted_tokens - all_final_tokens) * token_bytes,
            external_bytes=self._mapped_bytes - wanted_tokens * token_bytes,
        )

    def close(self) -> None:
        """Release all slots, then the addresses."""
        for slot in np.flatnonzero(self._num_blocks):
            self.release(int(slot))
        self.tensors.close()

    @property
    def free_blocks(self) -> int:
        """Blocks of the arena in no region."""
        return self._buddies.free_units

    def check(self) -> None:
        """Verify the placement of the regions (`BuddyAllocator.check`)."""
        self._buddies.check()

    @property
    def _mapped_bytes(self) -> int:
        return int(np.count_nonzero(self._page_users)) * self._page_bytes

    def _begin(self, slot: int, num_tokens: int) -> bool:
        """Take a region for one slot, pages and all; False, and nothing has changed, if short."""
        # If too little was said, it gets what it asks for at least.
        wanted = max(int(self._expected_tokens[slot]), num_tokens)
        with ExitStack() as undo:
            region = self._buddies.allocate(self._blocks_for(wanted))
            if region is None:
                return False
            undo.callback(self._buddies.release, region.start)
            first = self.tensors.shape.first_row + region.start
            pages = self._unused(self._pages_of(first, len(region)))
            if not (self.tensors.open() and self.tensors.residency.populate([pages])):
                return False
            undo.pop_all()
        touched = self._pages_of(first, len(region))
        self._page_users[touched.start : touched.stop] += 1
        self._wanted_tokens[slot] = wanted
        self._first[slot] = first
        self._num_blocks[slot] = len(region)
        # Kernels find a region as they do paged KV. Beyond its end they read no entry.
        count = min(len(region), self.tensors.table.shape[1])
        blocks = np.arange(count)
        self.tensors.enter(np.full(count, slot), blocks, first + blocks)
        return True

    def _end(self, slot: int) -> None:
        """The opposite of `_begin`."""
        first, count = int(self._first[slot]), int(self._num_blocks[slot])
        self._num_blocks[slot] = self._wanted_tokens[slot] = 0
        self._buddies.release(first - self.tensors.shape.first_row)
        touched = self._pages_of(first, count)
        self._page_users[touched.start : touched.stop] -= 1
        self.tensors.residency.give_up(self._unused(touched))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _pages_of(self, first: int, count: int) -> range:
        """Indices of the pages that these blocks touch."""
        page_bytes = self._page_bytes
        end_bytes = (first + count) * self.block_bytes
        return range(first * self.block_bytes // page_bytes, -(-end_bytes // page_bytes))

    def _unused(self, pages: range) -> range:
        """The part of a region's pages that no region is on: only its ends may be shared."""
        users = self._page_users
        start, stop = pages.start, pages.stop
        while start < stop and users[start]:
            start += 1
        while stop > start and users[stop - 1]:
            stop -= 1
        return range(start, stop)

    def _byte_of(self, slot: int, position: int) -> int:
        """Where a token begins in the range."""
        return int(self._first[slot]) * self.block_bytes + position * self.layout.token_bytes
