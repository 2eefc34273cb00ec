"""Pages under the slots of a virtual cache: which there are, and how more of them come.

A slot's pages are [first, end) of its places. They come in three ways:

- In large pages, of several units, as far as a prompt fills them: mapping costs by the page,
  whatever its size, and the length of a prompt is known when it begins. Their sizes are halves of
  each other, and a large page begins at a multiple of its size in the slot, so that what a prompt
  fills takes few pages, whatever its length: 29 units are pages of 16, 8, 4 and 1.
- Page by page ahead of the tokens, while the step before computes (vAttention, section 5.4.2): by
  the pool's background thread where it has one, else in the planning of that step.
- Page by page when they are needed, where those have not come.

Pages that an earlier sequence of the slot left there cost nothing, and are used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.cache.footprint import UNLIMITED_TOKENS, Footprint
from aquifer.cache.growth import GrowthTurns
from aquifer.cache.tensors import KVTensors
from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool
from aquifer.memory.residency import PendingPages
from aquifer.predict.lengths import Forecast

_LIKELY = 0.9
"""Probability with which an output ends before the tokens that nothing is mapped ahead for."""


_LEAD_TOKENS = 12
"""Tokens before the one that needs a page, at which the thread is told to map it. One would do, but
for calls of the driver that take 40 ms, since something else on the machine, such as a monitor of
its GPUs, keeps it busy."""


@dataclass(frozen=True, slots=True)
class MappingOptions:
    """How the pages of virtual caches are mapped.

    Attributes:
        prompt_page_bytes: size of the largest pages for what a prompt fills, a multiple of the
            pool's own; None for the pool's own.
        ahead_tokens: tokens to map for beyond those that are asked for; None for
            `AHEAD_TOKENS - 1`, 0 to map nothing before it is needed.
        eager_pages: pages to keep mapped in the slot that is given out next; 0 for none.
        is_layer_major: whether K and V of each layer have buffers of their own.
    """

    prompt_page_bytes: int | None = None
    ahead_tokens: int | None = None
    eager_pages: int = 0
    is_layer_major: bool = False


class SlotPages:
    """The pages under all slots of one cache.

    Args:
        pool: where pages come from.
        tensors: the addresses.
        footprint: pages that tokens take.
        units: size of the largest pages, in pages; 1 for none.
        ahead_tokens: tokens to map for beyond those that are asked for.

    Attributes:
        units: as given.
        first: [slots], number of each slot's places before its first page.
        end: [slots], places up to the end of its last page.
        num_used: pages under all slots.
        prepared: the slot in which the first pages of the next sequence are, or are on their way.
        occupied: free slots where pages are still mapped that are held, oldest first, and how many.
            Before others can be mapped there, these are unmapped, after the steps in flight.
    """

    def __init__(
        self,
        pool: PagePool,
        tensors: KVTensors,
        footprint: Footprint,
        units: int,
        ahead_tokens: int,
    ) -> None:
        shape = tensors.shape
        self.units = units
        self._page_bytes = tensors.residency.place_bytes
        self.slot_pages = shape.row_bytes // self._page_bytes
        self._tensors = tensors
        self._footprint = footprint
        self._residency = tensors.residency
        self._ahead_tokens = ahead_tokens
        self._guard = tensors.guard
        self._is_background = pool.mapper is not None and ahead_tokens > 0
        self._lead_tokens = min(_LEAD_TOKENS, ahead_tokens) if self._is_background else 0
        self.first = np.zeros(shape.num_rows, np.int64)
        self.end = np.zeros(shape.num_rows, np.int64)
        self.num_used = 0
        self.prepared: int | None = None
        self.occupied: dict[int, int] = {}
        # Tokens that fit on each slot's pages; without limit where it is mapped to its end.
        self._room_tokens = np.zeros(shape.num_rows, np.int64)
        # The most pages that the sequence of each slot may need.
        self._most = np.full(shape.num_rows, self.slot_pages)
        self._likely = self._most.copy()  # of the pages that a sequence will have
        self._large_sizes = _halves(units)
        # The end of what the prompt of each slot fills, if there are large pages for it.
        self._filled_end = np.zeros(shape.num_rows, np.int64)
        self._turns = GrowthTurns(shape.num_rows)
        # Pages on their way, with their places: by slot, and those under a free slot.
        self._pending: dict[int, tuple[range, PendingPages]] = {}
        self._eager: tuple[range, PendingPages] | None = None

    # --- which there are ---------------------------------------------------------------------

    def places(self, slot: int, begin: int, end: int) -> Sequence[int]:
        """The places of the pages that lie at [begin, end) of a slot, and not only in part."""
        first = slot * self.slot_pages
        return self._tensors.range.places(range(first + begin, first + end))

    def blocks(self, slot: int, end: int) -> Sequence[int]:
        """The blocks of a slot up to an end: its pages, or the units of large ones."""
        first = slot * self.slot_pages
        return self._tensors.range.pages_at(range(first + int(self.first[slot]), first + end))

    @property
    def num_pending(self) -> int:
        """Pages on their way, which no slot has yet."""
        num_eager = 0 if self._eager is None else len(self._eager[0])
        return num_eager + sum(len(stretch) for stretch, _ in self._pending.values())

    def places_behind(self) -> list[int]:
        """The place behind the last page of each slot, also of pages on their way, if it has any
        page and is not mapped to its end."""
        ends = self.end.copy()
        for slot, (stretch, _) in self._pending.items():
            ends[slot] += len(stretch)
        (slots,) = ((ends > 0) & (ends < self.slot_pages)).nonzero()
        places: list[int] = (slots * self.slot_pages + ends[slots]).tolist()
        return places

    def set(self, slot: int, end: int, first: int | None = None) -> None:
        """Note the pages of a slot, from place `first` on, which by default stays the same."""
        self.num_used += end - int(self.end[slot])
        self.end[slot] = end
        if first is not None:
            self.num_used -= first - int(self.first[slot])
            self.first[slot] = first
        if end:
            self.occupied.pop(slot, None)
            if slot == self.prepared:
                self.prepared = None
        footprint = self._footprint
        self._room_tokens[slot] = (
            end * self._page_bytes // footprint.token_bytes
            if end < self.slot_pages
            else UNLIMITED_TOKENS
        )

    # --- how they come -----------------------------------------------------------------------

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Bound how far to map ahead, and in large pages; the very last token needs no KV.

        Nothing is mapped ahead for tokens that an output will hardly have: what comes even so is
        mapped when it is needed.

        The prompt's last token is run by each sequence that shares the others, so that it must not
        be the end of a large page.
        """
        footprint = self._footprint
        self._most[slot] = self._likely[slot] = footprint.blocks(num_total - 1)
        if forecast is not None:
            self._likely[slot] = footprint.blocks(num_prompt + forecast.quantile(_LIKELY))
        if self.units > 1:
            filled_bytes = footprint.kv_bytes(max(num_prompt - 1, 0))
            self._filled_end[slot] = filled_bytes // self._page_bytes

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Map missing pages, some tokens ahead if pages are ready, else only those that are needed.

        Where more sequences will be short in some later call than should be mapped for in one call,
        a part of them is mapped for now, those that will be short first.
        """
        if self._pending or self._eager is not None:
            self._settle_some(slots, num_tokens)
        left = self._room_tokens[slots] - num_tokens
        if not self._ahead_tokens:
            chosen = (left < 0).nonzero()[0]
        else:  # what a step to come needs is the thread's business now
            chosen = self._turns.choose(left - self._lead_tokens)
        if not len(chosen):
            return True
        if not self._tensors.open():
            return False
        if self._guard is not None:
            growing_slots, num_places = set(slots[chosen].tolist()), self._residency.num_places
            self._guard.lift(
                [
                    place
                    for place in self._guard.guards
                    if place % num_places // self.slot_pages in growing_slots
                ]
            )
        if self._is_background:
            is_later = left[chosen] >= 0
            later, chosen = chosen[is_later], chosen[~is_later]
            self._map_later(slots[later].tolist(), num_tokens[later].tolist())
            if not len(chosen):
                return True
        # From here on there are few sequences, for which plain numbers are faster than arrays.
        growing, tokens = slots[chosen].tolist(), num_tokens[chosen].tolist()
        if self._ahead_tokens:
            ends = [self._end_ahead(*each) for each in zip(growing, tokens, strict=True)]
            with suppress(DriverError):  # nothing depends on mapping ahead
                if self._grow(growing, ends, may_reclaim=False):
                    return True
        ends = [
            max(self._footprint.blocks(count), int(self.end[slot]))
            for slot, count in zip(growing, tokens, strict=True)
        ]
        return self._grow(growing, ends, may_reclaim=True)

    def settle(self, slot: int) -> None:
        """Wait for the pages that are on their way to a slot."""
        stretch, pending = self._pending.pop(slot, (None, None))
        if stretch is not None and pending is not None and self._residency.settle(pending):
            self.set(slot, int(self.end[slot]) + len(stretch))

    def prepare(self, slot: int, num_pages: int) -> None:
        """Begin to map the first pages of a free slot, and leave them as if a sequence had ended.

        Nothing is done where anything is there already.
        """
        first = slot * self.slot_pages
        stretch = range(first, first + min(num_pages, self.slot_pages))
        is_used = bool(self.end[slot]) or slot in self._pending
        if self._eager is not None or not stretch or is_used or not self._residency.defers:
            return
        if self._tensors.open() and not self._residency.left_at(stretch):
            pending = self._residency.populate_later([stretch])
            if pending is not None:
                self._eager = stretch, pending
                self.prepared = slot

    @property
    def is_preparing(self) -> bool:
        """Whether the pages of the slot that is prepared are on their way still."""
        return self._eager is not None and not self._eager[1].future.done()

    def settle_prepared(self, slot: int | None = None) -> None:
        """Wait for what was prepared; if a slot is given, only for what was in this one."""
        if self._eager is not None and slot in (None, self.prepared):
            (stretch, pending), self._eager = self._eager, None
            if self._residency.settle(pending):
                self._residency.give_up(stretch, is_untouched=True)

    def close(self) -> None:
        """Wait for all that is on its way."""
        for slot in list(self._pending):
            self.settle(slot)
        self.settle_prepared()

    def _settle_some(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Take in the pages that have come, and wait for those that these sequences need now."""
        pending = self._pending
        done = [slot for slot, (_, each) in pending.items() if each.future.done()]
        short = slots[self._room_tokens[slots] < num_tokens].tolist() if pending else []
        for slot in chain(done, short):
            self.settle(slot)
        if not self.is_preparing or self.prepared in slots:
            self.settle_prepared()

    def _end_ahead(self, slot: int, num_tokens: int) -> int:
        """Places up to which to map for so many tokens, and for some more."""
        ahead = self._footprint.blocks(num_tokens + self._ahead_tokens)
        end = max(min(ahead, int(self._likely[slot])), self._footprint.blocks(num_tokens))
        return max(min(end, int(self._most[slot])), int(self.end[slot]))

    def _map_later(self, slots: list[int], num_tokens: list[int]) -> None:
        """Begin to map pages for the tokens after these, in the background as far as it can."""
        left: dict[int, int] = {}  # slots where pages were left that are used again, and their ends
        for slot, tokens in zip(slots, num_tokens, strict=True):
            if slot in self._pending:
                continue
            start, end = int(self.end[slot]), self._end_ahead(slot, tokens + 1)
            if start == end:
                continue
            place = slot * self.slot_pages
            stretch = range(place + start, place + end)
            if self._residency.left_at(stretch):
                left[slot] = end
                continue
            pending = self._residency.populate_later([stretch])
            if pending is None:
                break
            self._pending[slot] = stretch, pending
        if left:
            with suppress(DriverError):
                self._grow(list(left), list(left.values()), may_reclaim=False)

    def _grow(self, slots: list[int], ends: list[int], *, may_reclaim: bool) -> bool:
        """Map the pages of each slot up to these ends; all or nothing."""
        stretches = [
            range(slot * self.slot_pages + int(self.end[slot]), slot * self.slot_pages + end)
            for slot, end in zip(slots, ends, strict=True)
        ]
        has_large = self.units > 1 and (self._filled_end[slots] > self.end[slots]).any()
        large_ends = self._populate_large(slots, stretches, may_reclaim) if has_large else None
        if large_ends is not None:
            ends = large_ends
        elif not self._residency.populate(stretches, may_reclaim=may_reclaim):
            return False
        for slot, end in zip(slots, ends, strict=True):
            self.set(slot, end)
        return True

    def _populate_large(
        self, slots: list[int], stretches: Sequence[range], may_reclaim: bool
    ) -> list[int] | None:
        """Put pages under a stretch of each slot's places, large ones as far as prompts fill them.

        With `may_reclaim`, room for large ones is made as for small ones: in a pool that retained
        prefixes fill, many places are mapped for the price of one.

        Returns: the new end of each slot; None if there was no room, or the device refused.
        """
        pieces = list(map(self._pieces, slots, stretches))
        places = [part for of_slot in pieces for part, _ in of_slot]
        sizes = [size for of_slot in pieces for _, size in of_slot]
        try:
            if not self._residency.populate(places, units=sizes, may_reclaim=may_reclaim):
                return None
        except DriverError:
            return None
        stops = (of_slot[-1][0].stop if of_slot else 0 for of_slot in pieces)
        return [
            max(stop - slot * self.slot_pages, int(self.end[slot]))
            for slot, stop in zip(slots, stops, strict=True)
        ]

    def _pieces(self, slot: int, stretch: range) -> list[tuple[range, int]]:
        """A stretch of a slot's places in pieces, each with the size of the pages to map there.

        Pages that were left there cost nothing to use again, so they stay where the prompt fills
        them, and others are as large as fits between. The last one may end behind the stretch,
        since the prompt fills it.
        """
        first = slot * self.slot_pages
        start, filled_end = stretch.start, first + int(self._filled_end[slot])
        left: dict[int, int] = {}
        if start < filled_end:
            found = self._residency.left_at(range(start, filled_end))
            left = {i: size for i, size in found.items() if start <= i <= filled_end - size}
        following = iter([*sorted(left), filled_end])
        bound = start
        pieces: list[tuple[range, int]] = []
        while start < stretch.stop:
            stop, size = stretch.stop, 1
            if start < filled_end:
                while bound <= start:
                    bound = next(following)
                size = left.get(start) or self._size_that_fits(start - first, bound - start)
                stop = start + size
            if pieces and pieces[-1][1] == size:
                pieces[-1] = range(pieces[-1][0].start, stop), size
            else:
                pieces.append((range(start, stop), size))
            start = stop
        return pieces

    def _size_that_fits(self, place: int, room: int) -> int:
        """The size of the largest page at a place of a slot that needs no more than this room."""
        fitting = (size for size in self._large_sizes if size <= room and place % size == 0)
        return next(fitting, 1)


def _halves(units: int) -> list[int]:
    """A number, and its halves as long as they are whole and more than 1, in descending order."""
    found = []
    while units > 1:
        found.append(units)
        units = units // 2 if units % 2 == 0 else 1
    return found
