"""Contiguous regions of memory that is not virtual, such as page-locked host memory.

`RegionList` is the one book of such memory: a sequence of regions in address order, each free or
allocated (Tangram, section 3.2). Weights, KV blocks and copies of KV lie in one list (Fig. 7).
It allocates by best fit and never moves or evicts anything by itself: `aquifer.memory.merging`
plans that and carries it out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aquifer.errors import InvariantError


class Region(NamedTuple):
    """A stretch of the memory, [start, start + num_bytes).

    `owner` is whatever it was acquired for. A pinned region is in use by work in flight: it must
    keep its address.
    """

    start: int
    num_bytes: int
    is_free: bool
    owner: Hashable = None
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Snapshot of the allocated regions in address order. What lies between them is free.

    All arrays are [n]: `starts` and `sizes` in bytes, int64; `is_pinned`, bool.
    """

    num_bytes: int
    align_bytes: int
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    is_pinned: npt.NDArray[np.bool_]

    @property
    def free_bytes(self) -> int:
        """Bytes of all free regions."""
        return self.num_bytes - int(self.sizes.sum())


class RegionList:
    """Allocates regions of [0, num_bytes), each where it leaves the smallest gap (best fit).

    A gap is a free region. Neighbouring gaps are always one gap: `sum of gaps + sum of regions ==
    num_bytes`, and no gap touches another. All operations on one region find their place by
    bisection or by hash; what they insert into a sorted list moves at most as many pointers as
    there are gaps.

    Args:
        num_bytes: size of the memory.
        align_bytes: every region begins and ends at a multiple of it.
    """

    def __init__(self, num_bytes: int, align_bytes: int = 4096) -> None:
        self.num_bytes = num_bytes // align_bytes * align_bytes
        self.align_bytes = align_bytes
        self._used_bytes = 0
        self._gaps: list[tuple[int, int]] = []  # (size, start), sorted
        self._gap_starts: list[int] = []  # sorted
        self._gap_sizes: dict[int, int] = {}  # by start
        self._gap_ends: dict[int, int] = {}  # start by end
        # Of allocated regions by start; both have the same keys in the same order.
        self._sizes: dict[int, int] = {}
        self._owners: dict[int, Hashable] = {}
        self._pinned: set[int] = set()
        if self.num_bytes:
            self._add_gap(0, self.num_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated regions, alignment included."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of all gaps."""
        return self.num_bytes - self._used_bytes

    @property
    def largest_gap_bytes(self) -> int:
        """Bytes of the largest gap: the most that `acquire` can allocate."""
        return self._gaps[-1][0] if self._gaps else 0

    def __len__(self) -> int:
        """Number of regions, gaps included."""
        return len(self._sizes) + len(self._gaps)

    def __iter__(self) -> Iterator[Region]:
        """All regions in address order, gaps included."""
        start = 0
        while start < self.num_bytes:
            size = self._gap_sizes.get(start)
            region = self.region(start) if size is None else Region(start, size, is_free=True)
            yield region
            start += region.num_bytes

    def region(self, start: int) -> Region:
        """The allocated region that begins at `start`.

        Raises:
            InvariantError: there is none.
        """
        size = self._size(start)
        return Region(start, size, False, self._owners[start], start in self._pinned)

    def layout(self) -> Layout:
        """Snapshot of the allocated regions, for a plan."""
        count = len(self._sizes)
        starts = np.fromiter(self._sizes.keys(), np.int64, count)
        sizes = np.fromiter(self._sizes.values(), np.int64, count)
        order = np.argsort(starts)
        starts = starts[order]
        is_pinned = np.zeros(count, np.bool_)
        if self._pinned:
            pinned = np.fromiter(self._pinned, np.int64, len(self._pinned))
            is_pinned[np.searchsorted(starts, pinned)] = True
        return Layout(self.num_bytes, self.align_bytes, starts, sizes[order], is_pinned)

    def aligned_bytes(self, num_bytes: int) -> int:
        """Size of the region that `num_bytes` take: a positive multiple of the alignment."""
        return max(-(-num_bytes // self.align_bytes), 1) * self.align_bytes

    def acquire(
        self, num_bytes: int, owner: Hashable = None, *, is_pinned: bool = False
    ) -> int | None:
        """Allocate a region of at least `num_bytes`; returns its start, None if no gap suffices.

        Args:
            num_bytes: how much; it is rounded up to the alignment.
            owner: what the region is for; kept with it.
            is_pinned: whether it must keep its address, as with `pin`.
        """
        size = self.aligned_bytes(num_bytes)
        index = bisect_left(self._gaps, (size, 0))
        if index == len(self._gaps):
            return None
        start = self._gaps[index][1]
        self._take(start, start, size, owner, is_pinned)
        return start

    def acquire_at(
        self, start: int, num_bytes: int, owner: Hashable = None, *, is_pinned: bool = False
    ) -> None:
        """Allocate the region that begins at `start`, as a plan says.

        Raises:
            InvariantError: it is not aligned, or not all of it is free.
        """
        size = self.aligned_bytes(num_bytes)
        index = bisect_right(self._gap_starts, start) - 1
        gap = self._gap_starts[index] if index >= 0 else None
        if start % self.align_bytes or gap is None or start + size > gap + self._gap_sizes[gap]:
            raise InvariantError(f"{size} bytes at {start} are not an aligned part of a gap")
        self._take(gap, start, size, owner, is_pinned)

    def release(self, start: int) -> None:
        """Give a region back.

        Raises:
            InvariantError: there is none at `start`.
        """
        size = self._size(start)
        del self._sizes[start], self._owners[start]
        self._pinned.discard(start)
        self._used_bytes -= size
        end = start + size
        if end in self._gap_sizes:
            next_size = self._gap_sizes[end]
            self._remove_gap(end, next_size)
            size += next_size
        if start in self._gap_ends:
            previous = self._gap_ends[start]
            previous_size = self._gap_sizes[previous]
            self._remove_gap(previous, previous_size)
            start, size = previous, size + previous_size
        self._add_gap(start, size)

    def move(self, start: int, target: int) -> None:
        """Let the region that begins at `start` begin at `target`. The caller copies its bytes.

        The target may overlap the region itself; all else of it must be free.

        Raises:
            InvariantError: there is no region at `start`, it is pinned, or the target is not free.
                Nothing has changed.
        """
        region = self.region(start)
        if region.is_pinned:
            raise InvariantError(f"the region at {start} is pinned")
        self.release(start)
        try:
            self.acquire_at(target, region.num_bytes, region.owner)
        except InvariantError:
            self.acquire_at(start, region.num_bytes, region.owner)
            raise

    def pin(self, start: int) -> None:
        """Keep a region at its address, for work in flight, until `unpin` or `release`.

        Raises:
            InvariantError: there is none at `start`.
        """
        self._size(start)
        self._pinned.add(start)

    def unpin(self, start: int) -> None:
        """The opposite of `pin`.

        Raises:
            InvariantError: there is none at `start`.
        """
        self._size(start)
        self._pinned.discard(start)

    def check(self) -> None:
        """Verify the book.

        Raises:
            InvariantError: regions overlap or leave bytes out, two gaps touch, or sums are wrong.
        """
        spans = [(start, size, True) for start, size in self._gap_sizes.items()]
        spans += [(start, size, False) for start, size in self._sizes.items()]
        end, was_free = 0, False
        for start, size, is_free in sorted(spans):
            if start != end or size <= 0 or size % self.align_bytes or (is_free and was_free):
                raise InvariantError(f"the region at {start} does not follow the one before")
            end, was_free = start + size, is_free
        gaps = sorted((size, start) for start, size in self._gap_sizes.items())
        if (
            end != self.num_bytes
            or self._used_bytes != sum(self._sizes.values())
            or self._gaps != gaps
            or self._gap_starts != sorted(self._gap_sizes)
            or self._gap_ends != {start + size: start for size, start in gaps}
            or self._owners.keys() != self._sizes.keys()
            or not self._pinned <= self._sizes.keys()
        ):
            raise InvariantError("the lists of regions and gaps disagree")

    def _size(self, start: int) -> int:
        size = self._sizes.get(start)
        if size is None:
            raise InvariantError(f"no region begins at {start}")
        return size

    def _take(self, gap: int, start: int, size: int, owner: Hashable, is_pinned: bool) -> None:
        """Allocate [start, start + size) of the gap that begins at `gap`."""
        gap_end = gap + self._gap_sizes[gap]
        self._remove_gap(gap, gap_end - gap)
        if start > gap:
            self._add_gap(gap, start - gap)
        if start + size < gap_end:
            self._add_gap(start + size, gap_end - start - size)
        self._sizes[start] = size
        self._owners[start] = owner
        self._used_bytes += size
        if is_pinned:
            self._pinned.add(start)

    def _add_gap(self, start: int, size: int) -> None:
        insort(self._gaps, (size, start))
        insort(self._gap_starts, start)
        self._gap_sizes[start] = size
        self._gap_ends[start + size] = start

    def _remove_gap(self, start: int, size: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, start))]
        del self._gap_starts[bisect_left(self._gap_starts, start)]
        del self._gap_sizes[start]
        del self._gap_ends[start + size]
