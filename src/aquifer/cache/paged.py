"""KV in blocks found through tables (PagedAttention, sections 4.1 to 4.3).

All blocks lie one after the other in one range of addresses, each holding every layer of
`block_size` tokens; a page is mapped under them as long as any block that touches it is in use.
The free block with the lowest address is always taken first, so that blocks stay dense and whole
pages come free: memory goes back by the page, not by the block.
"""

from __future__ import annotations

import heapq
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.base import CacheStats, IntArray, KVLayout, Rows
from aquifer.cache.view import StepView
from aquifer.kernels.decode_attention import DecodeWorkspaces
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.transfer import upload
from aquifer.memory.virtual import VirtualRange


class PagedCache:
    """The `SequenceCache` of block tables.

    Args:
        pool: where pages come from.
        owner: who they are accounted to.
        layout: of one token.
        max_seqs: number of slots.
        max_tokens: longest sequence.
        block_size: tokens of a block.
    """

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        *,
        block_size: int = 16,
    ) -> None:
        self.layout = layout
        self._pool = pool
        self._owner = owner
        self._block_size = block_size
        self._block_bytes = block_size * layout.token_bytes
        blocks_per_seq = -(-max_tokens // block_size)
        num_blocks = min(pool.budget_bytes // self._block_bytes + 1, max_seqs * blocks_per_seq)
        self._range = VirtualRange(pool.driver, num_blocks * self._block_bytes, pool.page_bytes)
        # [blocks, block_size, token_elements]
        tokens = self._range.tensor((num_blocks, block_size, layout.token_elements), layout.dtype)
        self._layers = layout.split(tokens)
        self._workspaces = DecodeWorkspaces()
        self._free_blocks = list(range(num_blocks))  # a heap: the lowest comes first
        self._page_users = np.zeros(self._range.num_pages, np.int64)  # blocks in use on each page
        self._tables = np.zeros((max_seqs, blocks_per_seq), np.int32)
        device = pool.driver.device
        # What kernels read: the same memory on the host, else a copy that `upload` keeps up.
        self._device_tables = (
            torch.from_numpy(self._tables)
            if device.type == "cpu"
            else torch.zeros(self._tables.shape, dtype=torch.int32, device=device)
        )
        # [slot, index, block] of each entry that the device does not know yet
        self._appended: list[npt.NDArray[np.int64]] = []
        self._num_blocks = np.zeros(max_seqs, np.int64)

    def bytes_needed(self, num_tokens: int) -> int:
        """Whole pages under whole blocks."""
        block_bytes = -(-num_tokens // self._block_size) * self._block_bytes
        return -(-block_bytes // self._pool.page_bytes) * self._pool.page_bytes

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Append blocks to the tables, mapping pages where they have none yet."""
        missing = -(-num_tokens // self._block_size) - self._num_blocks[slots]
        if not (missing > 0).any():
            return True
        slots, missing = slots[missing > 0], missing[missing > 0]
        if missing.sum() > len(self._free_blocks):
            return False
        blocks = [heapq.heappop(self._free_blocks) for _ in range(missing.sum())]
        with ExitStack() as undo:
            undo.callback(self._put_back, blocks)
            new_pages = sorted(
                {page for b in blocks for page in self._pages_of(b) if not self._page_users[page]}
            )
            retired = self._pool.retired
            taken = [page for page in new_pages if retired.take_back(self._range, page, 1)]
            undo.callback(retired.retire, self._range, taken)
            new_pages = sorted(set(new_pages).difference(taken))
            handles = self._pool.acquire(self._owner, len(new_pages))
            if handles is None:
                return False
            undo.callback(self._pool.release, handles)
            for start, end in _runs(new_pages):
                self._range.map(new_pages[start], handles[start:end])
                undo.callback(self._range.unmap, new_pages[start], end - start)
            undo.pop_all()
        for block in blocks:
            self._page_users[self._pages_of(block)] += 1
        ends = np.cumsum(missing)
        indices = np.arange(ends[-1]) + np.repeat(self._num_blocks[slots] - ends + missing, missing)
        appended = np.stack((np.repeat(slots, missing), indices, blocks))
        self._tables[appended[0], appended[1]] = appended[2]
        self._appended.append(appended)
        self._num_blocks[slots] += missing
        return True

    def release(self, slot: int) -> None:
        """Free the slot's blocks, and the pages that no other block is on."""
        blocks = self._tables[slot, : self._num_blocks[slot]].tolist()
        self._num_blocks[slot] = 0
        empty: set[int] = set()
        for block in blocks:
            for page in self._pages_of(block):
                self._page_users[page] -= 1
                if not self._page_users[page]:
                    empty.add(page)
        self._put_back(blocks)
        self._pool.retired.retire(self._range, sorted(empty))

    def upload(self) -> None:
        """Copy what was appended to the tables: the price of tables (vAttention, section 3.3)."""
        if not self._appended:
            return
        appended = np.concatenate(self._appended, axis=1)
        self._appended.clear()
        device = self._device_tables.device
        if device.type != "cpu":
            slots, indices, blocks = upload(appended, device)
            self._device_tables[slots, indices] = blocks.int()

    def view(self, rows: Rows) -> StepView:
        """Slots and positions of the step's tokens, and the tables that lead to their blocks."""
        return StepView(self._layers, rows, self._device_tables, self._workspaces)

    def stats(self, written_tokens: int) -> CacheStats:
        """Waste is the empty tail of last blocks, and of pages that are partly in use."""
        return CacheStats(
            written_tokens,
            written_tokens * self.layout.token_bytes,
            int(np.count_nonzero(self._page_users)) * self._pool.page_bytes,
        )

    def close(self) -> None:
        """Release all slots, then the addresses."""
        for slot in np.flatnonzero(self._num_blocks):
            self.release(int(slot))
        self._pool.retired.settle()
        self._range.close()

    def _pages_of(self, block: int) -> range:
        """Indices of the pages that a block touches."""
        page_bytes = self._pool.page_bytes
        begin = block * self._block_bytes
        return range(begin // page_bytes, -(-(begin + self._block_bytes) // page_bytes))

    def _put_back(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free_blocks, block)


def _runs(sorted_pages: list[int]) -> list[tuple[int, int]]:
    """[start, end) positions of each stretch of consecutive numbers."""
    runs = []
    start = 0
    for end in range(1, len(sorted_pages) + 1):
        if end == len(sorted_pages) or sorted_pages[end] != sorted_pages[end - 1] + 1:
            runs.append((start, end))
            start = end
    return runs
