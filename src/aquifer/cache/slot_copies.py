"""How a sequence of a virtual cache begins with blocks that others wrote: share, or copy.

Whole pages that the sequence will not write to are shared: mapped at its places too. What is left
is copied, a part of one page each: the page in which its next token begins, and the rest of large
pages of which it has only a part. A copy reads its page where a parent has it, or through a window:
places behind the slots, where the page is mapped until the copy is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

from aquifer.cache.shared_pages import SharedPages
from aquifer.cache.slot_pages import SlotPages
from aquifer.cache.tensors import KVTensors
from aquifer.errors import InvariantError
from aquifer.memory.pages import Page
from aquifer.memory.range import VirtualRange
from aquifer.memory.runs import join


class SharedRun(NamedTuple):
    """Pages to share that follow each other, from a place of the slot on."""

    start: int
    pages: Sequence[Page]


class CopiedRun(NamedTuple):
    """Blocks [start, end) of a slot that are copied from a page."""

    start: int
    end: int
    page: Page
    offset: int  # of the first of them in the page, in blocks


class SlotCopies:
    """Begins slots with pages that are in use or held, and keeps the copies for the next launch.

    Args:
        tensors: the addresses.
        slots: the pages under the slots.
        shared: users and holds of pages.

    Attributes:
        pages: the page that each pending copy reads, which is a user of it.
    """

    def __init__(self, tensors: KVTensors, slots: SlotPages, shared: SharedPages) -> None:
        self.pages: list[Page] = []
        self._tensors = tensors
        self._residency = tensors.residency
        self._slots = slots
        self._shared = shared
        self._targets: set[Page] = set()  # where pending copies write
        # Behind the slots are the windows, one for each slot that may wait for its copy.
        self._num_windows = tensors.shape.num_rows
        self._first_window = tensors.shape.num_rows * slots.slot_pages
        self._next_window = 0
        self._open_windows: dict[Page, int] = {}  # where some of `pages` are mapped to be read

    @property
    def num_pages(self) -> int:
        """Pages that pending copies read, those of several units counted by unit."""
        return sum(self._tensors.range.sizes(self.pages))

    def begin(
        self, slot: int, blocks: Sequence[int], num_bytes: int, begin: int, parent: int | None
    ) -> bool:
        """Share and copy blocks into an empty slot; all or nothing.

        Args:
            slot: the slot.
            blocks: the blocks from place `begin` of the slot on.
            num_bytes: the bytes of them, and of those before `begin`, that hold tokens.
            begin: number of places before the first block.
            parent: a slot that has the blocks, from the same place on; None where none is known.

        Returns: False if the pool is short; then nothing has changed.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        residency = self._residency
        page_bytes = residency.place_bytes
        num_whole, rest_bytes = divmod(num_bytes, page_bytes)
        shared, copied = runs_of(self._tensors.range, blocks, begin, num_whole)
        # What is copied here may have to be copied there first. That closes all windows, so that it
        # comes before another one is opened where there are several.
        follows_copy = any(run.page in self._targets for run in copied)
        if len(self._open_windows) + len(copied) > self._num_windows or (
            follows_copy and len(copied) > 1
        ):
            self.launch()
        first = slot * self._slots.slot_pages
        targets = [range(first + run.start, first + run.end) for run in copied]
        sources: list[int] = []
        copied_pages = [run.page for run in copied]
        opened: dict[Page, int] = {}  # windows of this call
        pages = join([*(run.pages for run in shared), copied_pages])
        with ExitStack() as undo:
            # Users come first: to make room for an acquisition, held pages may be dropped.
            left = [run.pages for run in shared]  # those that have no place yet
            self._shared.begin_use(pages)
            undo.callback(lambda: residency.release(join([*left, copied_pages])))
            undo.callback(self._shared.end_use, pages)
            if copied:
                if not residency.populate(targets):
                    return False
                undo.callback(residency.give_up, [i for each in targets for i in each])
            for run in copied:
                if parent is None:
                    sources.append(self._open_window(run.page, opened, undo) + run.offset)
                else:
                    sources.append(parent * self._slots.slot_pages + run.start)
            for start, run_pages in shared:
                residency.alias(first + start, run_pages)
                undo.callback(self._give_up, first + start, run_pages)
                left.pop(0)
            undo.pop_all()
        if follows_copy:
            self.launch()
        end = num_whole + (rest_bytes > 0)
        for run, source, target in zip(copied, sources, targets, strict=True):
            length = len(target) * page_bytes
            if run.end == end and rest_bytes:
                length += rest_bytes - page_bytes
            self._tensors.copy(source * page_bytes, target.start * page_bytes, length)
            self.pages.append(run.page)
            self._targets.update(self._tensors.range.pages_at(target))
        self._open_windows.update(opened)
        self._slots.set(slot, end, begin)
        return True

    def launch(self) -> None:
        """Launch the pending copies, and close the windows."""
        if not self.pages:
            return
        self._tensors.make_copies()
        copied, windows = self.pages, sorted(self._open_windows.values())
        self.pages = []
        self._targets.clear()
        self._open_windows.clear()
        self._residency.give_up(windows)
        self._shared.end_use(copied)
        self._residency.release(copied)

    def _give_up(self, index: int, pages: Sequence[Page]) -> None:
        """Give up pages that follow each other from an index on."""
        self._residency.give_up(self._residency.places(index, pages))

    def _open_window(self, page: Page, opened: dict[Page, int], undo: ExitStack) -> int:
        """Map a page where a copy can read it until the next `launch`.

        Args:
            page: the page.
            opened: windows that were opened since `_open_windows` was changed; this one is added.
            undo: closes it.

        Returns: its index.
        """
        all_open = self._open_windows | opened
        if page in all_open:
            return all_open[page]
        taken = set(all_open.values())
        if len(taken) >= self._num_windows:
            raise InvariantError("more pages are copied at once than there are windows")
        # The window of its last copy, if it is mapped there still.
        left = (i for i in self._residency.left_with(page) if i >= self._first_window)
        index = next(left, -1)
        while index < 0 or index in taken:
            index = self._first_window + self._next_window * self._slots.units
            self._next_window = (self._next_window + 1) % self._num_windows
        with ExitStack() as undo_hold:
            self._residency.share([page])
            undo_hold.callback(self._residency.release, [page])
            self._residency.alias(index, [page])
            undo_hold.pop_all()
        undo.callback(self._residency.give_up, [index])
        opened[page] = index
        return index


def runs_of(
    range_: VirtualRange, blocks: Sequence[int], begin: int, num_whole: int
) -> tuple[list[SharedRun], list[CopiedRun]]:
    """How to begin a slot with blocks: which pages to share, and what to copy.

    Args:
        range_: the range of the slots.
        blocks: the blocks from place `begin` of the slot on.
        begin: see above.
        num_whole: the blocks from this place on are written to, and must be copied.
    """
    if not range_.has_large:
        pages = cast(Sequence[Page], blocks)
        rest = enumerate(pages[num_whole - begin :], num_whole)
        copied = [CopiedRun(place, place + 1, page, 0) for place, page in rest]
        return [SharedRun(begin, pages[: num_whole - begin])], copied
    shared: list[SharedRun] = []
    copied = []
    run: list[Page] = []
    for page, offset, start, end in range_.pieces(blocks):
        if end - start == range_.num_places(page) and end <= num_whole - begin:
            if not run:
                run = []
                shared.append(SharedRun(begin + start, run))
            run.append(page)
        else:
            run = []
            copied.append(CopiedRun(begin + start, begin + end, page, offset))
    return shared, copied
