"""Contiguous virtual KV (vAttention, sections 4 and 5), token-major.

Each slot owns a stretch of addresses as long as the longest sequence; pages are mapped under it as
the sequence grows. A kernel sees a plain strided tensor and no pages.

Sequences share pages, each mapped at the addresses of every slot that has it. A block of
`SequenceCache` is a page here, and has its number. Tokens need not end where pages do: a page is
shared if it lies wholly before the byte where the next token begins; the page that contains this
byte is copied.

Pages at the front of a slot are given up when their tokens are forgotten; the others stay at their
addresses. So the pages of a slot are [first, end) of its places.

Mapping costs by the page, whatever its size, and the length of a prompt is known when it begins. So
what a prompt fills is mapped in large pages, of several units, where the pool has some: an 8k
prompt of Llama-3-8B takes 32 pages of 32 MiB in place of 512 of 2 MiB. What is generated grows page
by page. A large page begins at a multiple of its size in the slot. Its units are blocks, which are
held and matched one by one; but it is shared as a whole, so that a sequence which begins with a
part of it copies this part (as much as 16 us at 4 TB/s, and less than mapping it would take).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, cast

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, KeepsAll, KVLayout
from aquifer.cache.footprint import UNLIMITED_TOKENS, Footprint
from aquifer.cache.growth import AHEAD_TOKENS, GrowthTurns
from aquifer.cache.shared_pages import SharedPages
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.errors import DriverError, InvariantError
from aquifer.memory.pool import Owner, Page, PagePool
from aquifer.memory.runs import join

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
        prompt_page_bytes: size of the pages for what a prompt fills, a multiple of the pool's own;
            None for the pool's own. Layers with a window always have those.

    Attributes:
        footprint: pages and bytes that tokens take.
        tensors: the device's half.
    """

    can_share = True
    ahead_tokens = AHEAD_TOKENS - 1

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        prompt_page_bytes: int | None = None,
    ) -> None:
        self._units = 1  # of a large page
        if prompt_page_bytes and all(layer.window_tokens is None for layer in layout.layers):
            self._units = prompt_page_bytes // pool.page_bytes
        self.footprint = Footprint(layout.token_bytes, pool.page_bytes, pool.page_bytes)
        shape = KVShape.slots(pool, layout, max_seqs, max_tokens, self._units)
        self.tensors = KVTensors(pool, owner, shape)
        self._max_tokens = max_tokens
        self._page_bytes = pool.page_bytes
        self._token_bytes = layout.token_bytes
        self._slot_pages = self.tensors.shape.row_bytes // pool.page_bytes
        self._residency = self.tensors.residency
        self._retired = pool.retired
        num_slots = self.tensors.shape.num_rows
        # Behind the slots are the windows: places for pages that are copied and that no slot has,
        # one for each slot that may wait for its copy.
        self._first_window = num_slots * self._slot_pages
        # The most pages that the sequence of each slot may need.
        self._max_pages = np.full(num_slots, self._slot_pages)
        # The end of the pages that the prompt of each slot fills, in whole large ones.
        self._large_end = np.zeros(num_slots, np.int64)
        # The pages in use under each slot: those from its first one to the end of these.
        self._first_page = np.zeros(num_slots, np.int64)
        self._num_pages = np.zeros(num_slots, np.int64)
        self._num_used_pages = 0  # under all slots
        # Tokens that fit on each slot's pages; without limit where it is mapped to its end.
        self._room_tokens = np.zeros(num_slots, np.int64)
        self._shared = SharedPages(self._residency, owner)
        self._copied: list[Page] = []  # pages that pending copies read; each copy is a user
        self._copied_to: set[Page] = set()
        self._open_windows: dict[Page, int] = {}  # where some of `_copied` are mapped to be read
        self._next_window = 0
        # Free slots where pages are still mapped that are held, oldest first, and how many pages.
        # Before others can be mapped there, these are unmapped, after the steps in flight.
        self._occupied: dict[int, int] = {}
        self._turns = GrowthTurns(num_slots)

    def expect(self, slot: int, num_prompt: int, num_total: int) -> None:
        """Bound how far to map ahead, and in large pages; the very last token needs no KV.

        The prompt's last token is run by each sequence that shares the others, so that it must not
        be the end of a large page.
        """
        self._max_pages[slot] = self.footprint.pages(num_total - 1)
        filled_bytes = self.footprint.kv_bytes(max(num_prompt - 1, 0))
        large_bytes = self._units * self._page_bytes
        self._large_end[slot] = filled_bytes // large_bytes * self._units if self._units > 1 else 0

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Map missing pages, some tokens ahead if pages are ready, else only those that are needed.

        Where more sequences will be short in some later call than should be mapped for in one call,
        a part of them is mapped for now, those that will be short first.
        """
        chosen = self._turns.choose(self._room_tokens[slots] - num_tokens)
        if not len(chosen):
            return True
        if not self.tensors.open():
            return False
        slots = slots[chosen]
        # From here on there are few sequences, for which plain numbers are faster than arrays.
        growing, tokens = slots.tolist(), num_tokens[chosen].tolist()
        held, most = self._num_pages[slots].tolist(), self._max_pages[slots].tolist()
        ahead = [
            max(min(self.footprint.pages(count + self.ahead_tokens), limit), has)
            for count, limit, has in zip(tokens, most, held, strict=True)
        ]
        with suppress(DriverError):  # nothing depends on mapping ahead
            if self._grow(growing, held, ahead, may_reclaim=False):
                return True
        now = [
            max(self.footprint.pages(count), has) for count, has in zip(tokens, held, strict=True)
        ]
        return self._grow(growing, held, now, may_reclaim=True)

    def forget(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Give up the pages that lie wholly before the tokens to keep."""
        first = num_tokens * self._token_bytes // self._page_bytes
        moved = (first > self._first_page[slots]).nonzero()[0]
        if not len(moved):
            return
        given_up: list[int] = []
        for slot, begin in zip(slots[moved].tolist(), first[moved].tolist(), strict=True):
            held, end = int(self._first_page[slot]), int(self._num_pages[slot])
            given_up += self._places(slot, held, min(begin, end))
            self._set_pages(slot, max(begin, end), begin)
        self._leave(given_up)

    def shrink(self, slots: IntArray, ends: IntArray) -> None:
        """Give up the pages that were mapped last."""
        given_up: list[int] = []
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            given_up += self._places(slot, end, int(self._num_pages[slot]))
            self._set_pages(slot, end)
        self._residency.give_up(given_up)

    def ends(self, slots: IntArray) -> IntArray:
        """The pages up to which each slot has some."""
        return self._num_pages[slots]

    def num_forgotten(self, slot: int) -> int:
        """Number of tokens that begin before the first page, none of which is kept as a whole."""
        return self._tokens_before(int(self._first_page[slot]))

    def release(self, slot: int) -> None:
        """Give up the slot's pages; its addresses stay."""
        self.upload()  # the slot may be at either end of a copy
        begin, end = int(self._first_page[slot]), int(self._num_pages[slot])
        indices = self._places(slot, begin, end)
        is_shared = False
        if self._shared:
            pages = self.tensors.range.pages_at(indices)
            self._shared.end_use(pages)
            is_shared = bool(pages) and pages[0] in self._shared and self._retired.defers
        self._set_pages(slot, 0, 0)
        self._residency.give_up(indices)
        if is_shared and begin:  # a sequence in this slot begins before these pages
            self._retired.vacate_soon(self.tensors.range, indices)
        elif is_shared:
            self._occupied[slot] = end

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
        return self._pages_of(slot, self.footprint.pages(num_tokens))

    def slot_blocks(self, slot: int) -> Sequence[int]:
        """All pages of a slot, including those for tokens to come."""
        return self._pages_of(slot, int(self._num_pages[slot]))

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int, first: int = 0) -> bool:
        """Share the pages that end before the next token, and copy the one that it begins in.

        A page that is still mapped at its place in the slot is reused without mapping.
        """
        return self._adopt(slot, blocks, num_tokens, first, None)

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """`adopt` pages of a slot that is in use, where a copy can read them directly."""
        place, first = parent * self._slot_pages, int(self._first_page[parent])
        return self._adopt(child, self.blocks(parent, num_tokens), num_tokens, first, place)

    def retain(self, blocks: Sequence[int]) -> None:
        """Keep a reference of each page."""
        self._shared.hold(cast(Sequence[Page], blocks))

    def unretain(self, blocks: Sequence[int]) -> None:
        """Release the reference of a page at its last drop."""
        self._shared.drop(cast(Sequence[Page], blocks))

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """A slot where the first of these pages, and if possible the last, are still mapped.

        It checks these two only: sequences give up all of their pages at once, and the next
        sequence of the slot takes the places from the first on.

        Without such a slot, it is the first that has no pages of others. So that there is one next
        time too, the slot that was left first is vacated in the background.
        """
        occupied = self._occupied
        if not occupied:
            return None
        left: dict[int, list[bool]] = {}  # by slot: whether the first page is there, and the last
        for which, position in enumerate((0, len(blocks) - 1) if blocks else ()):
            page = self.tensors.range.page_of(blocks[position])
            for index in self._retired.indices_of(self.tensors.range, page):
                slot, place = divmod(index, self._slot_pages)
                if place + blocks[position] - page == position and slot in free_slots:
                    left.setdefault(slot, [False, False])[which] = True
        if left:
            # The fewer other pages it has, the less is lost.
            return max(left, key=lambda slot: (left[slot], -occupied.get(slot, 0)))
        chosen = min((slot for slot in free_slots if slot not in occupied), default=None)
        if len(free_slots) - len(occupied) <= _CLEAN_SLOTS:
            oldest = next(iter(occupied))
            first = oldest * self._slot_pages
            indices = range(first, first + occupied.pop(oldest))
            self._retired.vacate_soon(self.tensors.range, indices)
        return chosen

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Make one copy, since the tokens are one stretch of addresses."""
        self.tensors.copy_out(self._byte_of(slot, tokens.start), target)

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """Make one copy, as `copy_out` does."""
        self.tensors.copy_in(self._byte_of(slot, tokens.start), source)

    def upload(self) -> None:
        """Launch the copies. There is nothing to send: slot and position give the address."""
        if not self._copied:
            return
        self.tensors.make_copies()
        copied, windows = self._copied, sorted(self._open_windows.values())
        self._copied = []
        self._copied_to.clear()
        self._open_windows.clear()
        self._residency.give_up(windows)
        self._shared.end_use(copied)
        self._residency.release(copied)

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Mapped bytes are exact, without retired pages; waste is the tail of each sequence."""
        num_copied_pages = sum(map(self.tensors.range.num_places, self._copied))
        num_used_pages = self._num_used_pages + num_copied_pages
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
        for slot in np.flatnonzero(self._num_pages):
            self.release(int(slot))
        self.tensors.close()

    def _pages_of(self, slot: int, end: int) -> Sequence[int]:
        """The blocks of a slot up to an end: its pages, or the units of large ones."""
        first = slot * self._slot_pages
        begin = int(self._first_page[slot])
        return self.tensors.range.pages_at(range(first + begin, first + end))

    def _places(self, slot: int, begin: int, end: int) -> Sequence[int]:
        """The places of the pages that lie at [begin, end) of a slot, and not only in part."""
        first = slot * self._slot_pages
        return self.tensors.range.places(range(first + begin, first + end))

    def _tokens_before(self, page: int) -> int:
        """Number of tokens that begin before a page of a slot."""
        if not self._token_bytes:
            return 0
        return min(-(-page * self._page_bytes // self._token_bytes), self._max_tokens)

    def _leave(self, indices: list[int]) -> None:
        """Give up pages that their slots have no more use for."""
        if self._shared:
            pages = self.tensors.range.pages_at(indices)
            if not set(self._copied).isdisjoint(pages):
                self.upload()  # the copy reads its page at one of these places
            self._shared.end_use(pages)
        self._residency.give_up(indices)
        if self._shared:  # the next sequence of a slot has other pages there
            self._retired.vacate_soon(self.tensors.range, indices)

    def _byte_of(self, slot: int, position: int) -> int:
        """Offset in the range at which a token begins."""
        return slot * self._slot_pages * self._page_bytes + self.footprint.kv_bytes(position)

    def _grow(
        self, slots: list[int], held: list[int], needed: list[int], *, may_reclaim: bool
    ) -> bool:
        """Map so many pages under each slot in all, `held` of which it has; all or nothing."""
        stretches = [
            range(slot * self._slot_pages + start, slot * self._slot_pages + end)
            for slot, start, end in zip(slots, held, needed, strict=True)
        ]
        with ExitStack() as undo:
            if self._units > 1 and (self._large_end[slots] > held).any():
                large = list(map(self._large_part, slots, stretches))
                if any(large) and self._populate_large(large):
                    places = [place for part in large for place in part[:: self._units]]
                    undo.callback(self._residency.give_up, places)
                    needed = [
                        max(end, part.stop - slot * self._slot_pages)
                        for slot, end, part in zip(slots, needed, large, strict=True)
                    ]
                    stretches = _without(stretches, large)
            if not self._residency.populate(stretches, may_reclaim=may_reclaim):
                return False
            undo.pop_all()
        for slot, num_pages in zip(slots, needed, strict=True):
            self._set_pages(slot, num_pages)
        return True

    def _large_part(self, slot: int, stretch: range) -> range:
        """The part of a stretch of a slot's places to map in large pages; empty for none.

        It may end behind the stretch, since the prompt fills it. Pages that were given up there
        cost nothing to use again, and as much as a mapping if they are in the way.
        """
        units, place = self._units, slot * self._slot_pages
        first = -(-(stretch.start - place) // units) * units
        last = min(-(-(stretch.stop - place) // units) * units, int(self._large_end[slot]))
        part = range(place + first, place + last)
        if part:
            sizes = self._retired.sizes_at(self.tensors.range, part)
            num_large = sizes.count(units)
            num_small = len(sizes) - num_large
            if len(part) // units - num_large + num_small > len(part) - num_small + num_large:
                return range(0)
        return part

    def _populate_large(self, stretches: list[range]) -> bool:
        """Put large pages under these places, if they can be had without taking any from others."""
        try:
            return self._residency.populate(
                [part for part in stretches if part], units=self._units, may_reclaim=False
            )
        except DriverError:
            return False

    def _set_pages(self, slot: int, num_pages: int, first_page: int | None = None) -> None:
        """Note the pages of a slot, from `first_page` on, which by default stays the same."""
        self._num_used_pages += num_pages - int(self._num_pages[slot])
        self._num_pages[slot] = num_pages
        if first_page is not None:
            self._num_used_pages -= first_page - int(self._first_page[slot])
            self._first_page[slot] = first_page
        if num_pages:
            self._occupied.pop(slot, None)
        self._room_tokens[slot] = (
            num_pages * self._page_bytes // self._token_bytes
            if num_pages < self._slot_pages
            else UNLIMITED_TOKENS
        )

    def _adopt(
        self,
        slot: int,
        blocks: Sequence[int],
        num_tokens: int,
        begin: int,
        parent_place: int | None,
    ) -> bool:
        """`adopt`; for `fork`, the pages are mapped from the place `parent_place` on."""
        num_shared, num_bytes = divmod(self.footprint.kv_bytes(num_tokens), self._page_bytes)
        end = num_shared + (num_bytes > 0)
        if self._num_pages[slot] or begin + len(blocks) != end:
            raise InvariantError(
                f"{len(blocks)} pages for {num_tokens} tokens in a slot of {self._num_pages[slot]}"
            )
        shared, copied = self._runs_of(blocks, begin, num_shared)
        place, residency = slot * self._slot_pages, self._residency
        if not self.tensors.open():
            return False
        # What is copied here may have to be copied there first. That closes all windows, so that it
        # comes before another one is opened where there are several.
        follows_copy = any(run.page in self._copied_to for run in copied)
        if len(self._open_windows) + len(copied) > len(self._num_pages) or (
            follows_copy and len(copied) > 1
        ):
            self.upload()
        targets = [range(place + run.start, place + run.end) for run in copied]
        sources: list[int] = []
        with ExitStack() as undo:
            # Users come first: to make room for an acquisition, held pages may be dropped.
            pages = join([*(run for _, run in shared), [run.page for run in copied]])
            left = [run for _, run in shared]  # those that have no place yet
            self._shared.begin_use(pages)
            undo.callback(lambda: residency.release(join([*left, [run.page for run in copied]])))
            undo.callback(self._shared.end_use, pages)
            if copied:
                if not residency.populate(targets):
                    return False
                undo.callback(residency.give_up, [i for each in targets for i in each])
                for run in copied:
                    if parent_place is None:
                        sources.append(self._open_window(run.page, undo) + run.offset)
                    else:
                        sources.append(parent_place + run.start)
            for start, run_pages in shared:
                residency.alias(place + start, run_pages)
                undo.callback(residency.give_up, residency.places(place + start, run_pages))
                left.pop(0)
            undo.pop_all()
        if follows_copy:
            self.upload()
        size = self._page_bytes
        for run, source, target in zip(copied, sources, targets, strict=True):
            is_last = run.end == end and num_bytes > 0
            length = (len(target) - is_last) * size + is_last * num_bytes
            self.tensors.copy(source * size, target.start * size, length)
            self._copied.append(run.page)
            self._copied_to.update(self.tensors.range.pages_at(target))
            if parent_place is None:
                self._open_windows[run.page] = source - run.offset
        self._set_pages(slot, end, begin)
        return True

    def _runs_of(
        self, blocks: Sequence[int], begin: int, num_shared: int
    ) -> tuple[list[tuple[int, Sequence[Page]]], list[_Copied]]:
        """How to begin a slot with blocks: which pages to share, and what to copy.

        Args:
            blocks: the blocks at [begin, begin + len(blocks)) of the slot.
            begin: see above.
            num_shared: the blocks from here on are written to, and must be copied.

        Returns: (start, pages) of the pages to share that follow each other; and what to copy, each
            of one page.
        """
        range_ = self.tensors.range
        if not range_.has_large:
            pages = cast(Sequence[Page], blocks)
            copied = [
                _Copied(start, start + 1, page, 0)
                for start, page in enumerate(pages[num_shared - begin :], num_shared)
            ]
            return [(begin, pages[: num_shared - begin])], copied
        shared: list[tuple[int, Sequence[Page]]] = []
        copied = []
        run: list[Page] = []
        start = position = begin
        end = begin + len(blocks)
        while position < end:
            block = blocks[position - begin]
            page = range_.page_of(block)
            offset, size = block - page, range_.num_places(page)
            stop = position + 1
            while stop < min(end, position + size - offset) and (
                blocks[stop - begin] == block + stop - position
            ):
                stop += 1
            if stop - position == size and stop <= num_shared:
                if not run:
                    start = position
                run.append(page)
            else:
                if run:
                    shared.append((start, run))
                    run = []
                copied.append(_Copied(position, stop, page, offset))
            position = stop
        if run:
            shared.append((start, run))
        return shared, copied

    def _open_window(self, page: Page, undo: ExitStack) -> int:
        """Map a page where a copy can read it until the next `upload`; returns the index."""
        if page in self._open_windows:
            return self._open_windows[page]
        while True:
            index = self._first_window + self._next_window * self._units
            self._next_window = (self._next_window + 1) % len(self._num_pages)
            if index not in self._open_windows.values():
                break
        with ExitStack() as undo_hold:
            self._residency.share([page])
            undo_hold.callback(self._residency.release, [page])
            self._residency.alias(index, [page])
            undo_hold.pop_all()
        undo.callback(self._residency.give_up, [index])
        return index


class _Copied(NamedTuple):
    """Blocks [start, end) of a slot that are copied from a page."""

    start: int
    end: int
    page: Page
    offset: int  # of the first of them in the page, in blocks


def _without(stretches: Sequence[range], parts: Sequence[range]) -> list[range]:
    """The stretches without a part of each, which may be empty or end behind it."""
    left: list[range] = []
    for stretch, part in zip(stretches, parts, strict=True):
        if part:
            left.append(range(stretch.start, part.start))
            stretch = range(part.stop, max(part.stop, stretch.stop))
        left.append(stretch)
    return [each for each in left if each]
