"""Contiguous regions of memory that is not virtual, such as page-locked host memory."""

from __future__ import annotations

from bisect import bisect_left, insort

from aquifer.errors import InvariantError


class RegionList:
    """Allocates regions of [0, num_bytes), each where it leaves the smallest gap (best fit).

    Neighbouring gaps are always one gap: `sum of gaps + sum of regions == num_bytes`, and no gap
    touches another.

    Args:
        num_bytes: size of the memory.
        align_bytes: every region begins and ends at a multiple of it.
    """

    def __init__(self, num_bytes: int, align_bytes: int = 4096) -> None:
        self.num_bytes = num_bytes // align_bytes * align_bytes
        self._align_bytes = align_bytes
        self._gaps = [(self.num_bytes, 0)] if self.num_bytes else []  # (size, start), sorted
        self._gap_starts: dict[int, int] = {start: size for size, start in self._gaps}
        self._gap_ends: dict[int, int] = {start + size: start for size, start in self._gaps}
        self._regions: dict[int, int] = {}  # start -> size

    @property
    def used_bytes(self) -> int:
        """Bytes of all regions, alignment included."""
        return sum(self._regions.values())

    def acquire(self, num_bytes: int) -> int | None:
        """Allocate a region of at least `num_bytes`; returns its start, None if no gap suffices."""
        size = max(-(-num_bytes // self._align_bytes), 1) * self._align_bytes
        index = bisect_left(self._gaps, (size, 0))
        if index == len(self._gaps):
            return None
        gap_size, start = self._gaps[index]
        self._remove_gap(start, gap_size)
        if gap_size > size:
            self._add_gap(start + size, gap_size - size)
        self._regions[start] = size
        return start

    def release(self, start: int) -> None:
        """Give a region back.

        Raises:
            InvariantError: there is none at `start`.
        """
        size = self._regions.pop(start, None)
        if size is None:
            raise InvariantError(f"no region begins at {start}")
        end = start + size
        if end in self._gap_starts:
            next_size = self._gap_starts[end]
            self._remove_gap(end, next_size)
            size += next_size
        if start in self._gap_ends:
            previous = self._gap_ends[start]
            previous_size = self._gap_starts[previous]
            self._remove_gap(previous, previous_size)
            start, size = previous, size + previous_size
        self._add_gap(start, size)

    def _add_gap(self, start: int, size: int) -> None:
        insort(self._gaps, (size, start))
        self._gap_starts[start] = size
        self._gap_ends[start + size] = start

    def _remove_gap(self, start: int, size: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, start))]
        del self._gap_starts[start]
        del self._gap_ends[start + size]
