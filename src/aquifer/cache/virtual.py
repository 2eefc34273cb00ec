"""Contiguous virtual KV (vAttention, sections 4 and 5), token-major.

Each slot owns a stretch of addresses as long as the longest sequence; pages are mapped under it as
the sequence grows (`slot_pages.py`). A kernel sees a plain strided tensor and no pages.

Sequences share pages, each mapped at the addresses of every slot that has it. A block of
`SequenceCache` is a page here, or a unit of a large page, and has its number. Tokens need not end
where pages do: a page is shared if it lies wholly before the byte where the next token begins; the
page that contains this byte is copied (`slot_copies.py`).

Pages at the front of a slot are given up when their tokens are forgotten; the others stay at their
addresses.

A large page is shared as a whole, but its units are held and matched one by one. A sequence that
begins with a part of it copies this part: at most 32 MiB, in 16 us at 4 TB/s, where mapping as much
in pages of 2 MiB takes 430 us.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, KVLayout
from aquifer.cache.footprint import Footprint
from aquifer.cache.growth import AHEAD_TOKENS
from aquifer.cache.keeps_all import KeepsAll
from aquifer.cache.shared_pages import SharedPages
from aquifer.cache.slot_copies import SlotCopies
from aquifer.cache.slot_pages import MappingOptions, SlotPages
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.errors import InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.predict.lengths import Forecast

_CLEAN_SLOTS = 8
"""Free slots to keep without pages that are in use elsewhere, if there are as many. Sequences that
are admitted together take some of them, and each takes milliseconds to be vacated."""


class VirtualCache(KeepsAll):
    """The `SequenceCache` of contiguous addresses.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token.
        max_seqs: number of slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
        mapping: how pages are mapped. Layers with a window have no large ones, and layer-major KV
            has none: a page in each buffer is large enough.

    Attributes:
        footprint: pages and bytes that tokens take.
        tensors: the device's half.
        ahead_tokens: tokens beyond those asked for that `reserve` maps for at most.
    """

    can_share = True

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        mapping: MappingOptions | None = None,
    ) -> None:
        mapping = mapping or MappingOptions()
        units = 1
        has_window = any(layer.window_tokens for layer in layout.layers)
        if mapping.prompt_page_bytes and not has_window and not mapping.is_layer_major:
            units = mapping.prompt_page_bytes // pool.page_bytes
        ahead = mapping.ahead_tokens
        self.ahead_tokens = AHEAD_TOKENS - 1 if ahead is None else ahead
        shape = KVShape.slots(
            pool, layout, max_seqs, max_tokens, units, is_layer_major=mapping.is_layer_major
        )
        self.footprint = Footprint(
            layout.token_bytes,
            shape.page_bytes,
            pool.page_bytes,
            place_pages=shape.num_buffers,
        )
        self.tensors = KVTensors(pool, owner, shape)
        self._max_tokens = max_tokens
        self._page_bytes = shape.page_bytes
        self._token_bytes = layout.token_bytes
        self._residency = self.tensors.residency
        self._eager_pages = mapping.eager_pages
        self._following: int | None = None  # the free slot that is to be prepared
        self._slots = SlotPages(pool, self.tensors, self.footprint, units, self.ahead_tokens)
        self._shared = SharedPages(self._residency, owner)
        self._copies = SlotCopies(self.tensors, self._slots, self._shared)

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Bound how far to map ahead, and how far in large pages."""
        self._slots.expect(slot, num_prompt, num_total, forecast)

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Map missing pages: see `SlotPages.reserve`."""
        return self._slots.reserve(slots, num_tokens)

    def forget(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Give up the pages that lie wholly before the tokens to keep."""
        pages = self._slots
        first = num_tokens * self._token_bytes // self._page_bytes
        moved = (first > pages.first[slots]).nonzero()[0]
        if not len(moved):
            return
        given_up: list[int] = []
        for slot, begin in zip(slots[moved].tolist(), first[moved].tolist(), strict=True):
            pages.settle(slot)
            held, end = int(pages.first[slot]), int(pages.end[slot])
            given_up += pages.places(slot, held, min(begin, end))
            pages.set(slot, max(begin, end), begin)
        self._leave(given_up)

    def shrink(self, slots: IntArray, ends: IntArray) -> None:
        """Give up the pages that were mapped last."""
        given_up: list[int] = []
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self._slots.settle(slot)
            given_up += self._slots.places(slot, end, int(self._slots.end[slot]))
            self._slots.set(slot, end)
        self._residency.give_up(given_up)

    def ends(self, slots: IntArray) -> IntArray:
        """The pages up to which each slot has some."""
        return self._slots.end[slots]

    def num_forgotten(self, slot: int) -> int:
        """Number of tokens that begin before the first page, none of which is kept as a whole."""
        return self._tokens_before(int(self._slots.first[slot]))

    def release(self, slot: int) -> None:
        """Give up the slot's pages; its addresses stay."""
        self._launch_copies()  # the slot may be at either end of one
        pages = self._slots
        pages.settle(slot)
        begin, end = int(pages.first[slot]), int(pages.end[slot])
        indices = pages.places(slot, begin, end)
        is_shared = False
        if self._shared:
            given_up = self.tensors.range.pages_at(indices)
            self._shared.end_use(given_up)
            is_shared = bool(given_up) and given_up[0] in self._shared and self._residency.defers
        pages.set(slot, 0, 0)
        if not pages.num_used:
            pages.settle_prepared()  # nothing may come that would
        self._residency.give_up(indices)
        if is_shared and begin:  # a sequence in this slot begins before these pages
            self._residency.vacate_soon(indices)
        elif is_shared:
            self._slots.occupied[slot] = end

    def tokens_in(self, num_blocks: int) -> int:
        """Number of tokens that end on these pages, at most those of the longest sequence."""
        if not self._token_bytes:  # no token lies on any page
            return 0
        return min(num_blocks * self._page_bytes // self._token_bytes, self._max_tokens)

    def tokens_touching(self, num_blocks: int) -> int:
        """Number of tokens that begin on these pages, at most those of the longest sequence."""
        return self._tokens_before(num_blocks)

    def blocks(self, slot: int, num_tokens: int) -> Sequence[int]:
        """The pages under a slot's first tokens, but for those that were given up."""
        end = self.footprint.blocks(num_tokens)
        if end > self._slots.end[slot]:
            self._slots.settle(slot)
        return self._slots.blocks(slot, end)

    def slot_blocks(self, slot: int) -> Sequence[int]:
        """All pages of a slot, including those for tokens to come."""
        return self._slots.blocks(slot, int(self._slots.end[slot]))

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int, first: int = 0) -> bool:
        """Share the pages that end before the next token, and copy the one that it begins in.

        A page that is still mapped at its place in the slot is reused without mapping.
        """
        return self._begin(slot, blocks, num_tokens, first, None)

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """`adopt` pages of a slot that is in use, where a copy can read them directly."""
        first = int(self._slots.first[parent])
        return self._begin(child, self.blocks(parent, num_tokens), num_tokens, first, parent)

    def retain(self, blocks: Sequence[int]) -> None:
        """Keep a reference of each page."""
        self._shared.hold(blocks)

    def unretain(self, blocks: Sequence[int]) -> None:
        """Release the reference of a page at its last drop."""
        self._shared.drop(blocks)

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """A slot where the first of these pages, and if possible the last, are still mapped.

        It checks these two only: sequences give up all of their pages at once, and the next
        sequence of the slot takes the places from the first on.

        Without such a slot, it is the first that has no pages of others. So that there is one next
        time too, the slot that was left first is vacated in the background.
        """
        occupied, prepared = self._slots.occupied, self._slots.prepared
        chosen = self._slot_with(blocks, free_slots) if occupied else None
        if chosen is None and (occupied or prepared is not None):
            clean = [slot for slot in free_slots if slot not in occupied]
            # Pages are on their way there, or others would have to go there first.
            is_bad = bool(blocks) or self._slots.is_preparing
            if is_bad and prepared in clean and len(clean) > 1:
                clean.remove(prepared)
            chosen = min(clean, default=None)
            if len(free_slots) - len(occupied) <= _CLEAN_SLOTS and occupied:
                self._vacate_oldest()
        taken = min(free_slots, default=None) if chosen is None else chosen
        if self._eager_pages and not blocks:
            others = (each for each in free_slots if each != taken and each not in occupied)
            self._following = min(others, default=None)
        elif taken == self._following:
            self._following = None
        return chosen

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Make one copy, since the tokens are one stretch of addresses."""
        self.tensors.copy_out(self._byte_of(slot, tokens.start), target)

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """Make one copy, as `copy_out` does."""
        self.tensors.copy_in(self._byte_of(slot, tokens.start), source)

    def upload(self) -> None:
        """Launch the copies. There is nothing to send: slot and position give the address.

        Some pages are mapped in the slot that the next sequence gets (vAttention, section 5.4.2,
        eager allocation): once a step, since those that are admitted with others would wait for
        theirs.
        """
        self._launch_copies()
        following, self._following = self._following, None
        if following is not None:
            self._slots.prepare(following, self._eager_pages)

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Mapped bytes are exact, without retired pages; waste is the tail of each sequence."""
        num_used_pages = self._slots.num_used + self._slots.num_pending + self._copies.num_pages
        written_tokens = int(np.sum(written_tokens))
        return CacheStats(
            written_tokens,
            self.footprint.kv_bytes(written_tokens),
            (num_used_pages - self._shared.num_saved) * self._page_bytes,
            self._shared.num_saved * self._page_bytes,
        )

    def close(self) -> None:
        """Release all slots, then the addresses.

        Raises:
            InvariantError: pages are held; they have to be dropped first.
        """
        if num_held := self._shared.num_held:
            raise InvariantError(f"{num_held} pages of {self.tensors.owner} are still held")
        self._slots.close()
        for slot in np.flatnonzero(self._slots.end):
            self.release(int(slot))
        self.tensors.close()

    def _begin(
        self, slot: int, blocks: Sequence[int], num_tokens: int, first: int, parent: int | None
    ) -> bool:
        """`adopt`; for `fork`, with pages of a parent."""
        num_bytes = self.footprint.kv_bytes(num_tokens)
        if self._slots.end[slot] or first + len(blocks) != -(-num_bytes // self._page_bytes):
            raise InvariantError(
                f"{len(blocks)} pages for {num_tokens} tokens in a slot of {self._slots.end[slot]}"
            )
        if not self.tensors.open():
            return False
        self._slots.settle_prepared(slot)
        return self._copies.begin(slot, blocks, num_bytes, first, parent)

    def _launch_copies(self) -> None:
        """Launch the copies that wait, and have the guard pages behind the last pages of slots."""
        self._copies.launch()
        if self.tensors.guard is not None:
            self.tensors.move_guards(self._slots.places_behind())

    def _slot_with(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """A free slot where the first of these pages, and if possible the last, are mapped.

        A slot that a step in flight may use is one only if no others are to be unmapped there. This
        would have to wait for the step, and the device would idle until the next one is launched;
        to map these pages elsewhere takes no longer than the step.
        """
        range_, slot_pages = self.tensors.range, self._slots.slot_pages
        occupied = self._slots.occupied
        left: dict[int, list[bool]] = {}  # by slot: whether the first page is there, and the last
        idle: set[int] = set()  # slots that no step in flight uses
        for which, position in enumerate((0, len(blocks) - 1) if blocks else ()):
            page = range_.page_of(blocks[position])
            passed = set(self._residency.left_with(page, is_passed=True))
            for index in self._residency.left_with(page):
                slot, place = divmod(index, slot_pages)
                if place + blocks[position] - page == position and slot in free_slots:
                    left.setdefault(slot, [False, False])[which] = True
                    if index in passed:
                        idle.add(slot)
        num_own = len(blocks) + 1  # the last one may be half full, and no block of any other
        found = [
            slot
            for slot, (_, has_last) in left.items()
            if slot in idle or (has_last and occupied.get(slot, 0) <= num_own)
        ]
        # The fewer other pages it has, the less is lost.
        return max(found, key=lambda slot: (left[slot], -occupied.get(slot, 0)), default=None)

    def _vacate_oldest(self) -> None:
        """Have the slot that was left first vacated in the background."""
        oldest = next(iter(self._slots.occupied))
        first = oldest * self._slots.slot_pages
        indices = range(first, first + self._slots.occupied.pop(oldest))
        self._residency.vacate_soon(indices)

    def _tokens_before(self, page: int) -> int:
        """Number of tokens that begin before a page of a slot."""
        if not self._token_bytes:
            return 0
        return min(-(-page * self._page_bytes // self._token_bytes), self._max_tokens)

    def _leave(self, indices: list[int]) -> None:
        """Give up pages that their slots have no more use for."""
        if self._shared:
            pages = self.tensors.range.pages_at(indices)
            if not set(self._copies.pages).isdisjoint(pages):
                self._launch_copies()  # one reads its page at one of these places
            self._shared.end_use(pages)
        self._residency.give_up(indices)
        if self._shared:  # the next sequence of a slot has other pages there
            self._residency.vacate_soon(indices)

    def _byte_of(self, slot: int, position: int) -> int:
        """Offset in the range at which a token begins."""
        first_byte = slot * self._slots.slot_pages * self._page_bytes
        return first_byte + self.footprint.kv_bytes(position)
