"""KV in contiguous regions: what managers have in common that give each sequence one stretch.

All KV lies in one arena of blocks of `block_size` tokens. A sequence has a region of it, blocks one
after the other. Kernels find it through a table with an entry for each block, as they do paged KV,
although the entries are consecutive numbers. A region's pages are taken from the pool when it
begins and given back when it ends: nothing is mapped in between.

A subclass decides how large a region is, and where it lies. If a sequence outgrows its region, it
gets another one, and its KV is copied there in one stretch.

Nothing is shared. `fork` and `adopt` copy all of a sequence, whatever it could have had in common
with another one, and there can be no prefix cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, KVLayout
from aquifer.cache.footprint import Footprint
from aquifer.cache.keeps_all import KeepsAll
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.errors import InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.runs import runs

_PIECE_BYTES = 64 << 20
"""Size of the pieces that a copy is cut into."""


class ContiguousCache(KeepsAll, ABC):
    """A `SequenceCache` of contiguous regions.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token; it has layers.
        max_seqs: number of slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
        block_size: tokens of a block.
        num_blocks: blocks of the arena.
        footprint: pages and bytes that tokens take.

    Attributes:
        layout: as given.
        block_bytes: size of a block.
        footprint: as given.
        tensors: the device's half.
        stuck_slot: see `SequenceVerbs.stuck_slot`.
        can_share: there is no sharing of blocks, so nothing can be held.
        ahead_tokens: no pages are mapped beside those of regions.
        copied_bytes: copied from region to region since the start.
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
    ) -> None:
        self.layout = layout
        self.block_bytes = block_size * layout.token_bytes
        self.footprint = footprint
        self.copied_bytes = 0
        self._block_size = block_size
        shape = KVShape.blocks(pool, layout, max_seqs, max_tokens, block_size, num_blocks)
        self.tensors = KVTensors(pool, owner, shape)
        self._page_bytes = pool.page_bytes
        # Regions on each page.
        self._page_users = np.zeros(self.tensors.range.num_pages, np.int64)
        self._first = np.zeros(max_seqs + 1, np.int64)  # block of each slot's region
        self._num_blocks = np.zeros(max_seqs + 1, np.int64)  # of each slot's region, 0 for none

    @abstractmethod
    def _place(self, slot: int, num_tokens: int) -> range | None:
        """Choose free blocks for the region of a slot's sequence, and take them.

        Args:
            slot: the slot. It may have a region already, which is too small.
            num_tokens: tokens that the region has to hold at least.

        Returns: neighbouring blocks of the arena, which are numbered from 0; None if there are no
            such blocks.
        """

    @abstractmethod
    def _unplace(self, blocks: range) -> None:
        """The opposite of `_place`: the blocks are free."""

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Give a region to each sequence that has none, and a larger one if it has outgrown it.

        A sequence keeps its KV when it moves: the copy runs after all work launched so far, and
        before anything that is launched later, so its old region can be given to others at once.
        """
        self.stuck_slot = None
        held = self._num_blocks[slots]
        is_short = held * self._block_size < num_tokens
        if not is_short.any():
            return True
        with ExitStack() as undo:
            taken: list[tuple[int, range]] = []
            for slot, count in zip(
                slots[is_short].tolist(), num_tokens[is_short].tolist(), strict=True
            ):
                region = self._take(slot, count)
                if region is None:
                    self.stuck_slot = slot if self._num_blocks[slot] else None
                    return False
                undo.callback(self._give, region)
                taken.append((slot, region))
            undo.pop_all()
        self._move(taken)
        return True

    def release(self, slot: int) -> None:
        """Give back the slot's region, and the pages that no other region is on."""
        self._leave(slot)

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
        return list(self._region(slot))

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
        """Reserve a region of its own, and copy all of the tokens there, at once.

        A slot without tokens may have a region. If that is too small it is given back first, also
        where there is no room for a larger one.
        """
        if self._num_blocks[slot] * self._block_size < num_tokens:
            self._leave(slot)
        if not self.reserve(np.array([slot]), np.array([num_tokens])):
            return False
        target = int(self._first[slot])
        for start, end in runs(blocks):
            self._copy(blocks[start], target + start, end - start)
        self.tensors.make_copies()
        return True

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Copy the parent's first tokens."""
        return self.adopt(child, self.blocks(parent, num_tokens), num_tokens)

    def retain(self, blocks: Sequence[int]) -> None:
        """Not possible: a region has one user.

        Raises:
            InvariantError: always; see `can_share`.
        """
        raise InvariantError(f"{len(blocks)} blocks of a region cannot be held")

    def unretain(self, blocks: Sequence[int]) -> None:
        """Not possible either.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(f"{len(blocks)} blocks of a region were never held")

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
        self.tensors.guard_entries(self._num_blocks)
        self.tensors.flush()

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Mapped is all that is reserved."""
        written_tokens = int(np.sum(written_tokens))
        return CacheStats(
            written_tokens, written_tokens * self.layout.token_bytes, self._mapped_bytes
        )

    def close(self) -> None:
        """Release all slots, then the addresses."""
        for slot in np.flatnonzero(self._num_blocks):
            self.release(int(slot))
        self.tensors.close()

    @property
    def _mapped_bytes(self) -> int:
        return int(np.count_nonzero(self._page_users)) * self._page_bytes

    def _region(self, slot: int) -> range:
        """Numbers of the slot's blocks, as the table has them."""
        first = int(self._first[slot])
        return range(first, first + int(self._num_blocks[slot]))

    def _leave(self, slot: int) -> None:
        """Give back the slot's region, if it has one."""
        if self._num_blocks[slot]:
            region = self._region(slot)
            self._num_blocks[slot] = 0
            self._give(region)

    def _take(self, slot: int, num_tokens: int) -> range | None:
        """Take a region, pages and all; None, and nothing has changed, if short."""
        with ExitStack() as undo:
            placed = self._place(slot, num_tokens)
            if placed is None:
                return None
            undo.callback(self._unplace, placed)
            first = self.tensors.shape.first_row
            region = range(first + placed.start, first + placed.stop)
            if not (self.tensors.open() and self._occupy(region)):
                return None
            undo.pop_all()
        self.tensors.poison_rows(np.array(region))
        return region

    def _give(self, region: range) -> None:
        """The opposite of `_take`."""
        first = self.tensors.shape.first_row
        self._vacate(region)
        self._unplace(range(region.start - first, region.stop - first))

    def _move(self, taken: list[tuple[int, range]]) -> None:
        """Let slots have these regions, with the KV of those that have one already.

        All copies are one launch. The old regions are given up after it: their pages are retired
        with a fence behind the copy.
        """
        old = [self._region(slot) for slot, _ in taken if self._num_blocks[slot]]
        for slot, region in taken:
            count = int(self._num_blocks[slot])
            if count:
                self._copy(int(self._first[slot]), region.start, count)
            self._first[slot], self._num_blocks[slot] = region.start, len(region)
            # Kernels read no entry beyond the end of a sequence.
            blocks = np.arange(min(len(region), self.tensors.table.shape[1]))
            self.tensors.enter(np.full(len(blocks), slot), blocks, region.start + blocks)
        if old:
            self.tensors.make_copies()
        for region in old:
            self._give(region)

    def _copy(self, source: int, target: int, count: int) -> None:
        """Request the copy of neighbouring blocks, in pieces, which one launch copies side by side.

        A launch has a bound on the size of a piece: that of CUDA on the second dimension of a grid.
        """
        size = self.block_bytes
        step = max(_PIECE_BYTES // size, 1)
        for start in range(0, count, step):
            num_bytes = min(step, count - start) * size
            self.tensors.copy((source + start) * size, (target + start) * size, num_bytes)
        self.copied_bytes += count * size

    def _occupy(self, region: range) -> bool:
        """Have pages under a region; False if the pool is short."""
        pages = self._pages_of(region)
        if not self.tensors.residency.populate([self._unused(pages)]):
            return False
        self._page_users[pages.start : pages.stop] += 1
        return True

    def _vacate(self, region: range) -> None:
        """The opposite of `_occupy`."""
        self._vacate_pages(self._pages_of(region))

    def _vacate_pages(self, pages: range) -> None:
        self._page_users[pages.start : pages.stop] -= 1
        self.tensors.residency.give_up(self._unused(pages))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _pages_of(self, region: range) -> range:
        """Indices of the pages that these blocks touch."""
        page_bytes = self._page_bytes
        end_bytes = region.stop * self.block_bytes
        return range(region.start * self.block_bytes // page_bytes, -(-end_bytes // page_bytes))

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
