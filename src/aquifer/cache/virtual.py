"""Contiguous virtual KV (vAttention, sections 4 and 5), token-major.

Each slot owns a stretch of addresses as long as the longest sequence; pages come under it as the
sequence grows. A kernel sees a plain strided tensor and knows nothing of pages.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, KVLayout, Spans
from aquifer.kernels.attention import attention_contiguous
from aquifer.memory.driver.base import Handle
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.virtual import VirtualRange

_AHEAD_TOKENS = 16
"""How far to map beyond what is asked, where the pool has room: mapping costs by the call, so a
sequence whose tokens are larger than a page is grown by several tokens at a time. The waste is
what a block of PagedAttention's size wastes."""


class VirtualCache:
    """The `SequenceCache` of contiguous addresses.

    Args:
        pool: where pages come from.
        owner: who they are accounted to.
        layout: of one token.
        max_seqs: number of slots.
        max_tokens: longest sequence.
    """

    def __init__(
        self, pool: PagePool, owner: Owner, layout: KVLayout, max_seqs: int, max_tokens: int
    ) -> None:
        self.layout = layout
        self._pool = pool
        self._owner = owner
        self._page_bytes = pool.page_bytes
        self._slot_pages = -(-max_tokens * layout.token_bytes // pool.page_bytes)
        self._range = VirtualRange(
            pool.driver, max_seqs * self._slot_pages * pool.page_bytes, pool.page_bytes
        )
        # [slots, max_tokens, token_elements]
        tokens = self._range.tensor(
            (max_seqs, max_tokens, layout.token_elements),
            layout.dtype,
            stride=(
                self._slot_pages * pool.page_bytes // layout.dtype.itemsize,
                layout.token_elements,
                1,
            ),
        )
        self._layers = layout.split(tokens)
        self._num_pages = np.zeros(max_seqs, np.int64)  # mapped under each slot

    def bytes_needed(self, num_tokens: int) -> int:
        """Whole pages under the sequence's tokens."""
        return int(self._pages_for(np.int64(num_tokens))) * self._page_bytes

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Map what is missing, somewhat ahead if the pool has it, else to the byte."""
        held = self._num_pages[slots]
        is_short = self._pages_for(num_tokens) > held
        if not is_short.any():
            return True
        slots, held, num_tokens = slots[is_short], held[is_short], num_tokens[is_short]
        ahead = np.minimum(self._pages_for(num_tokens + _AHEAD_TOKENS - 1), self._slot_pages)
        with ExitStack() as undo:
            taken = self._take_back(slots, held, ahead - held)
            undo.callback(self._retire, slots, held, taken)
            held = held + taken
            for needed in (ahead, np.maximum(self._pages_for(num_tokens), held)):
                pages = self._pool.acquire(self._owner, int((needed - held).sum()))
                if pages is not None:
                    self._map(slots, held, needed - held, pages)
                    self._num_pages[slots] = needed
                    undo.pop_all()
                    return True
        return False

    def release(self, slot: int) -> None:
        """Give up the slot's pages; its addresses stay."""
        count = int(self._num_pages[slot])
        self._num_pages[slot] = 0
        first = slot * self._slot_pages
        self._pool.retired.retire(self._range, range(first, first + count))

    def view(self, spans: Spans) -> VirtualView:
        """Slots and positions of the step's tokens: all that a kernel needs."""
        return VirtualView(self._layers, spans)

    def stats(self, written_tokens: int) -> CacheStats:
        """Mapped bytes are exact; waste is the tail of each sequence's last page."""
        return CacheStats(
            written_tokens, written_tokens * self.layout.token_bytes, self._range.mapped_bytes
        )

    def close(self) -> None:
        """Release all slots, then the addresses."""
        for slot in np.flatnonzero(self._num_pages):
            self.release(int(slot))
        self._pool.retired.settle()
        self._range.close()

    def _pages_for(self, num_tokens: IntArray | np.int64) -> IntArray:
        return np.asarray(-(-num_tokens * self.layout.token_bytes // self._page_bytes))

    def _take_back(self, slots: IntArray, held: IntArray, missing: IntArray) -> IntArray:
        """How many of the missing pages are there still from a slot's last sequence."""
        retired = self._pool.retired
        if not len(retired):
            return np.zeros_like(held)
        firsts = slots * self._slot_pages + held
        return np.array(
            [
                retired.take_back(self._range, first, count)
                for first, count in zip(firsts.tolist(), missing.tolist(), strict=True)
            ],
            np.int64,
        )

    def _retire(self, slots: IntArray, held: IntArray, count: IntArray) -> None:
        """Give up `count[i]` pages of slot i beyond the first `held[i]`."""
        firsts = slots * self._slot_pages + held
        for first, end in zip(firsts.tolist(), (firsts + count).tolist(), strict=True):
            self._pool.retired.retire(self._range, range(first, end))

    def _map(self, slots: IntArray, held: IntArray, missing: IntArray, pages: list[Handle]) -> None:
        """Map `pages`, `missing[i]` of them at the end of slot i; if the driver refuses, none."""
        with ExitStack() as undo:
            undo.callback(self._pool.release, pages)
            first = 0
            for slot, index, count in zip(
                slots.tolist(), held.tolist(), missing.tolist(), strict=True
            ):
                index += slot * self._slot_pages
                self._range.map(index, pages[first : first + count])
                undo.callback(self._range.unmap, index, count)
                first += count
            undo.pop_all()


class VirtualView:
    """The `KVView` of contiguous addresses."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]], spans: Spans) -> None:
        self._layers = layers
        slots, positions = spans.rows()
        self._row_slots = torch.from_numpy(slots)
        self._row_positions = torch.from_numpy(positions)
        self._slots = spans.slots.tolist()
        self._starts = spans.starts.tolist()
        self._offsets = spans.offsets.tolist()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `KVView.attend`."""
        keys, values = self._layers[layer]
        keys[self._row_slots, self._row_positions] = key
        values[self._row_slots, self._row_positions] = value
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        attention_contiguous(
            query,
            keys,
            values,
            self._slots,
            self._starts,
            self._offsets,
            out,
            scale=scale,
            window_tokens=window_tokens,
            softcap=softcap,
        )
        return out
