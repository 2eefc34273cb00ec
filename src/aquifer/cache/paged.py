"""KV in blocks found through tables (PagedAttention, sections 4.1 to 4.4).

All blocks lie one after the other in one range of addresses, each holding every layer of
`block_size` tokens; a page is mapped under them as long as any block that touches it is in use.
The free block with the lowest address is always taken first, so that blocks stay dense and whole
pages come free: memory goes back by the page, not by the block.

A block is used by the sequences that have it in their tables, and may be held too. It is free when
it is neither used nor held. A page is accounted to KV as long as any block on it is used, to the
retained prefixes if blocks on it are only held, and is given up when all of them are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.base import CacheStats, IntArray, KVLayout
from aquifer.cache.footprint import Footprint
from aquifer.cache.free_blocks import FreeBlocks
from aquifer.cache.keeps_all import KeepsAll
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.errors import InvariantError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.runs import add_at, as_array, as_numbers, runs, unique
from aquifer.predict.lengths import Forecast

_UNMAPPED, _KV, _PREFIX = range(3)  # state of the page at a place: unmapped, or its owner's kind


class PagedCache(KeepsAll):
    """The `SequenceCache` of block tables.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token; it has layers.
        max_seqs: number of slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
        block_size: tokens of a block.
        is_layer_major: whether K and V of each layer have buffers of their own.

    Attributes:
        footprint: pages and bytes that tokens take.
        tensors: the device's half.
    """

    can_share = True
    ahead_tokens = 0

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        *,
        block_size: int = 16,
        is_layer_major: bool = False,
    ) -> None:
        self._owner = owner
        self._prefix_owner = Owner(owner.model, Kind.PREFIX)
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._block_bytes = block_size * layout.token_bytes
        blocks_per_seq = -(-max_tokens // block_size)
        # Blocks for the whole budget, and those that may be requested when it is used up: block
        # numbers never run out before the pool refuses.
        num_blocks = pool.budget_bytes // self._block_bytes + 1 + max_seqs * blocks_per_seq
        shape = KVShape.blocks(
            pool,
            layout,
            max_seqs,
            max_tokens,
            block_size,
            num_blocks,
            is_layer_major=is_layer_major,
        )
        figures = layout.token_bytes, self._block_bytes, pool.page_bytes
        self.footprint = Footprint(*figures, place_pages=shape.num_buffers)
        self._page_bytes = shape.page_bytes
        self.tensors = KVTensors(pool, owner, shape)
        self._residency = self.tensors.residency
        self._table = self.tensors.table
        self._free = FreeBlocks(shape.first_row, shape.num_rows)
        # Sequences that have a block, and pending copies that read it.
        self._users = np.zeros(shape.num_rows, np.int32)
        self._holds = np.zeros(shape.num_rows, np.int32)
        num_pages = self._residency.num_places
        # From the first page of a block to any other that it may touch.
        self._page_steps = np.arange((self._block_bytes - 2) // self._page_bytes + 2)
        # Whether a block is whole pages, or a page whole blocks.
        sizes = sorted((self._block_bytes, self._page_bytes))
        self._is_aligned = sizes[1] % sizes[0] == 0
        self._page_users = np.zeros(num_pages, np.int32)  # blocks on each page that are used
        self._page_holds = np.zeros(num_pages, np.int32)  # blocks that are held, and not used
        self._page_owner = np.zeros(num_pages, np.int8)  # _UNMAPPED
        self._num_drops = 0  # calls of `unretain`
        self._num_used_blocks = 0
        self._num_used_pages = 0
        self._copied: list[int] = []  # blocks that pending copies read; each copy is a user
        self._copied_to: set[int] = set()
        # The blocks of each slot are entries [first, end) of its table.
        self._first_block = np.zeros(max_seqs + 1, np.int64)
        self._num_blocks = np.zeros(max_seqs + 1, np.int64)

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Do nothing: memory is taken as tokens come."""

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Append blocks to the tables, mapping pages where they have none yet."""
        short = (self._num_blocks[slots] * self._block_size < num_tokens).nonzero()[0]
        if not len(short):
            return True
        slots, num_tokens = slots[short], num_tokens[short]
        held = self._num_blocks[slots]
        needed = -(-num_tokens // self._block_size)
        missing = needed - held
        count = int(missing.sum())
        blocks = self._claim(count)
        if blocks is None:
            return False
        if count > len(slots):  # more than one for some of them
            ends = np.cumsum(missing)
            self.tensors.enter(
                np.repeat(slots, missing),
                np.arange(count) + np.repeat(needed - ends, missing),
                blocks,
            )
        else:
            self.tensors.enter(slots, held, blocks)
        self._num_blocks[slots] = needed
        return True

    def forget(self, slots: IntArray, num_tokens: IntArray) -> None:
        """End the use of the blocks before that of the first token to keep."""
        first = num_tokens // self._block_size
        moved = (first > self._first_block[slots]).nonzero()[0]
        if not len(moved):
            return
        slots, first = slots[moved], first[moved]
        ends = self._num_blocks[slots]
        self._end_use(self._entries(slots, self._first_block[slots], np.minimum(first, ends)))
        self._first_block[slots] = first
        self._num_blocks[slots] = np.maximum(first, ends)

    def shrink(self, slots: IntArray, ends: IntArray) -> None:
        """End the use of the blocks that were appended last."""
        self._end_use(self._entries(slots, ends, self._num_blocks[slots]))
        self._num_blocks[slots] = ends

    def ends(self, slots: IntArray) -> IntArray:
        """The blocks up to which each slot has some."""
        return self._num_blocks[slots]

    def num_forgotten(self, slot: int) -> int:
        """Number of tokens before the slot's first block."""
        return int(self._first_block[slot]) * self._block_size

    def release(self, slot: int) -> None:
        """Free the slot's blocks without other users, and the pages that no other block is on."""
        self._make_copies()  # the slot's last block may be waiting for one
        blocks = self._slot_table(slot).astype(np.int64)
        self._first_block[slot] = self._num_blocks[slot] = 0
        self._end_use(blocks)

    def tokens_in(self, num_blocks: int) -> int:
        """Number of tokens in whole blocks, at most those of the longest sequence."""
        return min(num_blocks * self._block_size, self._max_tokens)

    def tokens_touching(self, num_blocks: int) -> int:
        """The same as `tokens_in`, since no token lies in two blocks."""
        return self.tokens_in(num_blocks)

    def blocks(self, slot: int, num_tokens: int) -> Sequence[int]:
        """The beginning of the slot's table, but for blocks that were given up."""
        end = -(-num_tokens // self._block_size)
        if end > self._num_blocks[slot]:
            raise InvariantError(f"slot {slot} has no room for {num_tokens} tokens")
        return as_numbers(self._table[slot, self._first_block[slot] : end])

    def slot_blocks(self, slot: int) -> Sequence[int]:
        """All blocks of a slot, including those for tokens to come."""
        return as_numbers(self._slot_table(slot))

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int, first: int = 0) -> bool:
        """Enter whole blocks in the slot's table too; one that is partly filled is copied."""
        num_shared, num_rest = divmod(num_tokens, self._block_size)
        if self._num_blocks[slot] or first + len(blocks) != num_shared + (num_rest > 0):
            raise InvariantError(
                f"{len(blocks)} blocks for {num_tokens} tokens in a slot of "
                f"{self._num_blocks[slot]}"
            )
        used = as_array(blocks)
        entries = used.copy()
        self._require_contents(used)
        with ExitStack() as undo:
            # Users come first: to make room for an acquisition, held blocks may be dropped.
            self._begin_use(used)
            undo.callback(self._end_use, used)
            if num_rest:
                own = self._claim(1)
                if own is None:
                    return False
                entries[-1:] = own
            undo.pop_all()
        if num_rest:
            source, target = int(used[-1]), int(entries[-1])
            if source in self._copied_to:
                self._make_copies()
            size = self._block_bytes
            self.tensors.copy(source * size, target * size, self.footprint.kv_bytes(num_rest))
            self._copied.append(source)
            self._copied_to.add(target)
        self.tensors.enter(np.full(len(entries), slot), first + np.arange(len(entries)), entries)
        self._first_block[slot] = first
        self._num_blocks[slot] = first + len(entries)
        return True

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """`adopt` the first blocks of the parent's table."""
        first = int(self._first_block[parent])
        return self.adopt(child, self.blocks(parent, num_tokens), num_tokens, first)

    def retain(self, blocks: Sequence[int]) -> None:
        """Count one more hold of each block."""
        held = as_array(blocks)
        self._require_contents(held)
        add_at(self._holds, held, 1)

    def unretain(self, blocks: Sequence[int]) -> None:
        """Count one hold less for each block, and free those without holds and users."""
        if isinstance(blocks, range):
            dropped = as_array(blocks[:: blocks.step])  # in ascending order
            counts = np.ones(1, np.int64)
        else:
            dropped, counts = np.unique(as_array(blocks), return_counts=True)
        if (self._holds[dropped] < counts).any():
            raise InvariantError(f"blocks {blocks} are dropped, but not all of them are held")
        self._holds[dropped] -= counts
        self._num_drops += 1
        freed = dropped[(self._holds[dropped] == 0) & (self._users[dropped] == 0)]
        pages = self._pages_of(freed)
        add_at(self._page_holds, pages, -1)
        self._free.put(freed)
        self._settle(pages)

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> None:
        """None: an entry costs the same in every table."""

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Make one copy for each run of neighbouring blocks."""
        for offset_bytes, place in self._stretches(slot, tokens):
            self.tensors.copy_out(offset_bytes, target[place])

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """Make one copy for each run of neighbouring blocks."""
        for offset_bytes, place in self._stretches(slot, tokens):
            self.tensors.copy_in(offset_bytes, source[place])

    def upload(self) -> None:
        """Launch the copies, and send new table entries to the device."""
        self._make_copies()
        self.tensors.guard_entries(self._num_blocks)
        self.tensors.flush()

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Waste is the empty tail of last blocks, and parts of used pages that no sequence uses.

        The latter may be held blocks: they count as retained only once no block on their page is
        used.
        """
        written_tokens = int(np.sum(written_tokens))
        num_users = int((self._num_blocks - self._first_block).sum()) + len(self._copied)
        return CacheStats(
            written_tokens,
            self.footprint.kv_bytes(written_tokens),
            self._num_used_pages * self._page_bytes,
            (num_users - self._num_used_blocks) * self._block_bytes,
        )

    def close(self) -> None:
        """Release all slots, then the addresses.

        Raises:
            InvariantError: blocks are held; they have to be dropped first.
        """
        if num_held := np.count_nonzero(self._holds):
            raise InvariantError(f"{num_held} blocks of {self._owner} are still held")
        for slot in np.flatnonzero(self._num_blocks):
            self.release(int(slot))
        self.tensors.close()

    def _slot_table(self, slot: int) -> npt.NDArray[np.int32]:
        """The entries of a slot's table that are in use."""
        return self._table[slot, self._first_block[slot] : self._num_blocks[slot]]

    def _entries(self, slots: IntArray, begins: IntArray, ends: IntArray) -> IntArray:
        """The blocks at [begin, end) of the slots' tables, one slot after the other."""
        parts: list[npt.NDArray[np.int32]] = [
            self._table[slot, begin:end]
            for slot, begin, end in zip(slots.tolist(), begins.tolist(), ends.tolist(), strict=True)
        ]
        return np.concatenate([self._table[0, :0], *parts]).astype(np.int64)

    def _claim(self, count: int) -> IntArray | None:
        """Take the lowest free blocks, and map pages under them.

        When the pool is short, held blocks are dropped to make room. Those on pages that are in use
        give back no page, but are free themselves then, so another attempt may succeed.

        Returns: the blocks, with one user each, or None if the pool is short.
        """
        while True:
            num_drops = self._num_drops
            blocks = self._try_claim(count)
            if blocks is not None or self._num_drops == num_drops:
                return blocks

    def _try_claim(self, count: int) -> IntArray | None:
        """One attempt of `_claim`."""
        if not self.tensors.open():
            return None
        blocks = self._free.take(count)
        with ExitStack() as undo:
            # Users come first: to make room for an acquisition, held blocks may be dropped, and the
            # pages that these blocks need must stay.
            self._users[blocks] = 1
            pages = self._occupy(blocks)
            undo.callback(self._end_use, blocks)
            new = unique(pages[self._page_owner[pages] == _UNMAPPED])
            numbers = as_numbers(new)
            stretches = [range(numbers[i], numbers[end - 1] + 1) for i, end in runs(numbers)]
            if not self._residency.populate(stretches):
                return None
            undo.pop_all()
        self.tensors.poison_rows(blocks)
        self._page_owner[new] = _KV
        self._num_used_pages += len(new)
        return blocks

    def _require_contents(self, blocks: IntArray) -> None:
        if ((self._users[blocks] == 0) & (self._holds[blocks] == 0)).any():
            raise InvariantError(f"some of the blocks {blocks} are free")

    def _begin_use(self, blocks: IntArray) -> None:
        """Count one more user of each block; all of them are used or held."""
        unused = blocks[self._users[blocks] == 0]  # so they are held
        self._users[blocks] += 1
        add_at(self._page_holds, self._pages_of(unused), -1)
        self._occupy(unused)

    def _occupy(self, blocks: IntArray) -> IntArray:
        """Count blocks that have got their first user, and account their mapped pages to KV.

        Returns: the pages that these blocks are on, with repeats.
        """
        self._num_used_blocks += len(blocks)
        pages = self._pages_of(blocks)
        add_at(self._page_users, pages, 1)
        if (self._page_owner[pages] == _PREFIX).any():
            self._settle(pages)
        return pages

    def _end_use(self, blocks: IntArray) -> None:
        """Count one user less for each block, which may occur twice; free blocks without users."""
        add_at(self._users, blocks, -1)
        unused = unique(blocks[self._users[blocks] == 0])
        is_held = self._holds[unused] > 0
        self._num_used_blocks -= len(unused)
        pages = self._pages_of(unused)
        add_at(self._page_users, pages, -1)
        add_at(self._page_holds, self._pages_of(unused[is_held]), 1)
        self._free.put(unused[~is_held])
        self._settle(pages)

    def _settle(self, pages: IntArray) -> None:
        """Account mapped pages to their present owners, and give up pages without blocks."""
        moves = self._page_owner[pages] != self._wanted_owner(pages)
        moves &= self._page_owner[pages] != _UNMAPPED
        if not moves.any():
            return
        pages = unique(pages[moves])
        before, after = self._page_owner[pages], self._wanted_owner(pages)
        # Pages are given up as KV, so they need no zeroing for the next sequence.
        self._transfer(pages[before == _PREFIX], self._owner)
        self._transfer(pages[after == _PREFIX], self._prefix_owner)
        self._account(pages, after)
        self._residency.give_up(as_numbers(pages[after == _UNMAPPED]))

    def _wanted_owner(self, pages: IntArray) -> npt.NDArray[np.int8]:
        """The owner that each page should have, given the blocks on it."""
        wanted = np.where(self._page_holds[pages] > 0, np.int8(_PREFIX), np.int8(_UNMAPPED))
        wanted[self._page_users[pages] > 0] = _KV
        return wanted

    def _account(self, pages: IntArray, owner: npt.NDArray[np.int8] | int) -> None:
        """Record the owner of pages."""
        self._num_used_pages -= int(np.count_nonzero(self._page_owner[pages] == _KV))
        self._page_owner[pages] = owner
        self._num_used_pages += int(np.count_nonzero(self._page_owner[pages] == _KV))

    def _transfer(self, pages: IntArray, owner: Owner) -> None:
        self._residency.transfer(self.tensors.range.pages_at(as_numbers(pages)), owner)

    def _make_copies(self) -> None:
        """Launch the pending copies, and end their use of the blocks that they read."""
        if self._copied:
            self.tensors.make_copies()
            copied = np.array(self._copied, np.int64)
            self._copied.clear()
            self._copied_to.clear()
            self._end_use(copied)

    def _pages_of(self, blocks: IntArray) -> IntArray:
        """Indices of the pages that each block touches, one block after the other."""
        if self._is_aligned:
            num_pages = max(self._block_bytes // self._page_bytes, 1)
            pages = blocks * self._block_bytes // self._page_bytes
            if num_pages > 1:
                pages = (pages[:, None] + self._page_steps[:num_pages]).ravel()
            return pages
        begin = blocks * self._block_bytes
        last = (begin + self._block_bytes - 1) // self._page_bytes
        pages = (begin // self._page_bytes)[:, None] + self._page_steps
        return np.asarray(pages[pages <= last[:, None]])

    def _stretches(self, slot: int, tokens: range) -> Iterator[tuple[int, slice]]:
        """The bytes of a slot's tokens, by runs of neighbouring blocks.

        Yields: (offset of a run in the range, slice of its bytes among those of all tokens).
        """
        size, token_bytes = self._block_size, self.footprint.token_bytes
        first = tokens.start // size
        table = self._table[slot, first : -(-tokens.stop // size)].tolist()
        for start, end in runs(table):
            # Tokens [begin, stop) lie in this run, which is filled from position `origin` on.
            origin = (first + start) * size
            begin, stop = max(tokens.start, origin), min(tokens.stop, (first + end) * size)
            offset_bytes = table[start] * self._block_bytes + (begin - origin) * token_bytes
            place = slice((begin - tokens.start) * token_bytes, (stop - tokens.start) * token_bytes)
            yield offset_bytes, place
