"""Contiguous virtual KV (vAttention, sections 4 and 5), token-major.

Each slot owns a stretch of addresses as long as the longest sequence; pages come under it as the
sequence grows. A kernel sees a plain strided tensor and knows nothing of pages.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from aquifer.cache.base import CacheStats, IntArray, KVLayout, Rows
from aquifer.cache.view import StepView
from aquifer.kernels.decode_attention import DecodeWorkspaces
from aquifer.memory.driver.base import Handle
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.virtual import VirtualRange

_AHEAD_TOKENS = 16
"""How far to map beyond what is asked, where the pool has room: mapping costs by the call, so a
sequence whose tokens are larger than a page is grown by several tokens at a time. The waste is
what a block of PagedAttention's size wastes."""

_SPREAD_SEQS = 24
"""How many sequences to map for in one call, as long as nobody has to wait for more. Sequences that
started together need their next page in the same step: 256 of them, at 27 us a page on an H200, are
a stall of 7 ms. Spread out, that is one of 16 in each step, where a page is 16 tokens, or fewer;
half as many again are allowed for those that come in clusters."""

_MANY_TOKENS = 1 << 40  # more than any sequence will have


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
        self._workspaces = DecodeWorkspaces()
        self._num_pages = np.zeros(max_seqs, np.int64)  # in use under each slot
        # How many tokens fit on them; without limit where the slot is mapped to its end.
        self._room_tokens = np.zeros(max_seqs, np.int64)
        # No page of an earlier sequence is left at this place in the slot or further on.
        self._left_pages = np.zeros(max_seqs, np.int64)
        # Ranks from 1 on, less what the next call will map for. See `_choose`.
        self._ranks = np.arange(1, max_seqs + 1) - _SPREAD_SEQS

    def bytes_needed(self, num_tokens: int) -> int:
        """Whole pages under the sequence's tokens."""
        return int(self._pages_for(np.int64(num_tokens))) * self._page_bytes

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Map what is missing, somewhat ahead if the pool has it at hand, else to the byte.

        Where more sequences will be short in some later call than should be mapped for in one, a
        part of them is mapped for now, those that are short first.
        """
        chosen = self._choose(self._room_tokens[slots] - num_tokens)
        if not len(chosen):
            return True
        slots, num_tokens = slots[chosen], num_tokens[chosen]
        held = self._num_pages[slots]
        ahead = np.minimum(self._pages_for(num_tokens + _AHEAD_TOKENS - 1), self._slot_pages)
        ahead = np.maximum(ahead, held)
        with ExitStack() as undo:
            taken = self._take_back(slots, held, ahead - held)
            undo.callback(self._retire, slots, held, taken)
            held = held + taken
            now = np.maximum(self._pages_for(num_tokens), held)
            for needed, may_reclaim in ((ahead, False), (now, True)):
                count = int((needed - held).sum())
                pages = self._pool.acquire(self._owner, count, may_reclaim=may_reclaim)
                if pages is not None:
                    self._map(slots, held, needed - held, pages)
                    self._set_pages(slots, needed)
                    undo.pop_all()
                    return True
        return False

    def release(self, slot: int) -> None:
        """Give up the slot's pages; its addresses stay."""
        count = int(self._num_pages[slot])
        self._set_pages(np.array([slot]), np.zeros(1, np.int64))
        self._left_pages[slot] = max(self._left_pages[slot], count)
        first = slot * self._slot_pages
        self._pool.retired.retire(self._range, range(first, first + count))

    def upload(self) -> None:
        """Nothing: slot and position are the address."""

    def view(self, rows: Rows) -> StepView:
        """Slots and positions of the step's tokens: all that a kernel needs."""
        return StepView(self._layers, rows, None, self._workspaces)

    def stats(self, written_tokens: int) -> CacheStats:
        """Mapped bytes are exact, retired pages left out; waste is the tail of each sequence."""
        return CacheStats(
            written_tokens,
            written_tokens * self.layout.token_bytes,
            int(self._num_pages.sum()) * self._page_bytes,
        )

    def close(self) -> None:
        """Release all slots, then the addresses."""
        for slot in np.flatnonzero(self._num_pages):
            self.release(int(slot))
        self._pool.retired.settle()
        self._range.close()

    def _pages_for(self, num_tokens: IntArray | np.int64) -> IntArray:
        return np.asarray(-(-num_tokens * self.layout.token_bytes // self._page_bytes))

    def _choose(self, left: IntArray) -> IntArray:
        """Which sequences to map for in this call, by index: who is short, and who will be soon.

        A sequence for which `left` is negative is short now. One with d tokens left can wait for
        d + 1 calls, if each brings it a token. Each of these maps for _SPREAD_SEQS, so all goes
        well as long as among the non-short, in order of `left` and counted from 1,

            rank <= _SPREAD_SEQS * (left + 1)

        holds for each. By how much it does not, so many have to be mapped for ahead of need. Only
        those count that an extension by _AHEAD_TOKENS would give a page to.

        Args:
            left: [num_seqs], tokens that fit on the mapped pages beyond those asked for.
        """
        ordered = np.sort(left)
        num_short = int(ordered.searchsorted(0))
        waiting = ordered[num_short : ordered.searchsorted(_AHEAD_TOKENS - 1)]
        num_ahead = 0
        if len(waiting) > _SPREAD_SEQS:
            surplus = (self._ranks[: len(waiting)] - _SPREAD_SEQS * waiting).max()
            num_ahead = max(min(int(surplus), _SPREAD_SEQS - num_short), 0)
        if not num_short + num_ahead:
            return np.zeros(0, np.int64)
        # In the order of the call, in which pages are handed out.
        return np.sort(np.argsort(left, kind="stable")[: num_short + num_ahead])

    def _set_pages(self, slots: IntArray, num_pages: IntArray) -> None:
        self._num_pages[slots] = num_pages
        self._room_tokens[slots] = np.where(
            num_pages < self._slot_pages,
            num_pages * self._page_bytes // self.layout.token_bytes,
            _MANY_TOKENS,
        )

    def _take_back(self, slots: IntArray, held: IntArray, missing: IntArray) -> IntArray:
        """How many of the missing pages are there still from a slot's earlier sequences."""
        taken = np.zeros_like(held)
        retired = self._pool.retired
        if not len(retired):
            return taken
        for i in np.flatnonzero(held < self._left_pages[slots]).tolist():
            first = int(slots[i] * self._slot_pages + held[i])
            taken[i] = retired.take_back(self._range, first, int(missing[i]))
        return taken

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
                if count:
                    index += slot * self._slot_pages
                    self._range.map(index, pages[first : first + count])
                    undo.callback(self._range.unmap, index, count)
                    first += count
            undo.pop_all()
