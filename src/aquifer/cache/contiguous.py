"""KV in contiguous regions of whole blocks: what managers of such regions have in common.

Devices on which scattered access is slow want a sequence's KV in one stretch of physical memory
(ODMA, section 2.2), and servers before PagedAttention kept it so (section 3.1). A region is taken
when a sequence begins. How large it is and where it lies is the subclass's business, and so is what
happens when the sequence outgrows it.

Kernels find a region through a table with an entry for each block, as they do paged KV, although
the entries are consecutive numbers. A region's pages are taken from the pool when it begins and
given back when it ends: nothing is mapped in between. With `keeps_mapped`, as for a device without
virtual memory, all pages of the arena are taken before the first region and stay.

Nothing is shared. `fork` and `adopt` copy all of a sequence, whatever it could have had in common
with another one, and there can be no prefix cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, KVLayout
from aquifer.cache.footprint import Footprint
from aquifer.cache.keeps_all import KeepsAll
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.errors import InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.runs import runs
from aquifer.predict.lengths import Forecast


@dataclass(frozen=True, slots=True)
class Waste:
    """What a manager has taken without a token in it, by the kinds of section 3.1, in bytes."""

    future_bytes: int  # "reserved": for tokens that will come
    internal_bytes: int  # set aside for tokens that will never come
    external_bytes: int  # taken by rounding, to a region and to pages: no token could come there


class ContiguousCache(KeepsAll):
    """A `SequenceCache` of contiguous regions; subclasses place them.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: of one token.
        max_seqs: number of slots.
        max_tokens: longest sequence.
        block_size: tokens of a block.
        num_blocks: blocks of the arena at most.
        footprint: pages and bytes that tokens take.
        keeps_mapped: see the module.

    Attributes:
        footprint: as given.
        tensors: the device's half.
        can_share: there is no sharing of blocks, so nothing can be held.
        copied_bytes: copied on the device since the start: by `fork` and `adopt`, and by sequences
            that were moved.
    """

    can_share = False
    ahead_tokens = 0

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        block_size: int,
        num_blocks: int,
        footprint: Footprint,
        *,
        keeps_mapped: bool = False,
    ) -> None:
        self.layout = layout
        self.block_bytes = block_size * layout.token_bytes
        self.footprint = footprint
        self.copied_bytes = 0
        self._block_size = block_size
        self._max_tokens = max_tokens
        shape = KVShape.blocks(pool, layout, max_seqs, max_tokens, block_size, num_blocks)
        self.tensors = KVTensors(pool, owner, shape)
        self._page_bytes = pool.page_bytes
        # Regions on each page; with `keeps_mapped`, the arena is one more.
        self._page_users = np.zeros(self.tensors.range.num_pages, np.int64)
        self._keeps_mapped = keeps_mapped
        self._kept = range(0)  # pages of the arena that stay
        # What `expect` said, and what was taken.
        self._expected_tokens = np.full(max_seqs + 1, max_tokens, np.int64)
        self._wanted_tokens = np.zeros(max_seqs + 1, np.int64)
        self._first = np.zeros(max_seqs + 1, np.int64)  # block of each slot's region
        self._num_blocks = np.zeros(max_seqs + 1, np.int64)  # of each slot's region, 0 for none

    @abstractmethod
    def _place(self, slot: int, num_tokens: int) -> range | None:
        """Take a region for a slot: the blocks of the arena, from 0 on; None if there is none."""

    @abstractmethod
    def _vacate(self, region: range) -> None:
        """Give a region of the arena back."""

    @abstractmethod
    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Decide how much to set aside for the sequences that come to a slot, until the next call.

        Without any, it is the longest sequence.
        """

    def _keep(self, num_blocks: int) -> bool:
        """Map all pages of an arena, where they are to stay; False if the pool is short."""
        if not self._keeps_mapped:
            return True
        pages = self._pages_of(self.tensors.shape.first_row, num_blocks)
        if not self.tensors.residency.populate([self._unused(pages)]):
            return False
        self._page_users[pages.start : pages.stop] += 1
        self._kept = pages
        return True

    def _release_kept(self) -> None:
        """Give back the pages of the arena. Pre-condition: no region is in use."""
        pages, self._kept = self._kept, range(0)
        self._page_users[pages.start : pages.stop] -= 1
        self.tensors.residency.give_up(self._unused(pages))

    def _outgrow(self, slot: int, num_tokens: int) -> bool:
        """Give a sequence room that has outgrown its region; False if there is none.

        Raises:
            InvariantError: always, unless the subclass can do that.
        """
        raise InvariantError(f"slot {slot} has outgrown what it reserved")

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Give a region to each sequence that has none, or has outgrown its own.

        A sequence that was given a larger region keeps it where another one finds no room.
        """
        held = self._num_blocks[slots]
        short = (held * self._block_size < num_tokens).nonzero()[0]
        if not len(short):
            return True
        with ExitStack() as undo:
            for slot, count, has in zip(
                slots[short].tolist(), num_tokens[short].tolist(), held[short].tolist(), strict=True
            ):
                if has:
                    if not self._outgrow(slot, count):
                        return False
                    continue
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
        self.tensors.guard_entries(np.minimum(self._num_blocks, self.tensors.table.shape[1]))
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
        wanted = self._wanted_tokens
        used = np.minimum(final_tokens, wanted)[self._num_blocks > 0]
        wanted_tokens, used_tokens = int(wanted.sum()), int(used.sum())
        return Waste(
            future_bytes=(used_tokens - written_tokens) * token_bytes,
            internal_bytes=(wanted_tokens - used_tokens) * token_bytes,
            external_bytes=self._mapped_bytes - wanted_tokens * token_bytes,
        )

    def close(self) -> None:
        """Release all slots, then the addresses."""
        for slot in np.flatnonzero(self._num_blocks):
            self.release(int(slot))
        self._release_kept()
        self.tensors.close()

    @property
    def _mapped_bytes(self) -> int:
        return int(np.count_nonzero(self._page_users)) * self._page_bytes

    def _begin(self, slot: int, num_tokens: int) -> bool:
        """Take a region for one slot, pages and all; False, and nothing has changed, if short."""
        if not self.tensors.open():
            return False
        # If too little was said, it gets what it asks for at least.
        wanted = max(int(self._expected_tokens[slot]), num_tokens)
        region = self._place(slot, wanted)
        if region is None:
            return False
        return self._occupy(slot, region, wanted)

    def _occupy(self, slot: int, region: range, wanted: int) -> bool:
        """Put pages under a region and enter it in the slot's table; if False, it is vacated."""
        with ExitStack() as undo:
            undo.callback(self._vacate, region)
            first = self.tensors.shape.first_row + region.start
            pages = self._unused(self._pages_of(first, len(region)))
            if not self.tensors.residency.populate([pages]):
                return False
            undo.pop_all()
        touched = self._pages_of(first, len(region))
        self._page_users[touched.start : touched.stop] += 1
        self.tensors.poison_rows(np.arange(first, first + len(region)))
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
        self._leave(first, count)

    def _leave(self, first: int, count: int) -> None:
        """Give back the region of these blocks, and the pages that no other region is on."""
        start = first - self.tensors.shape.first_row
        self._vacate(range(start, start + count))
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
