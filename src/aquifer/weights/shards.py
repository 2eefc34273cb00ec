"""Shards: the parts of parameters that the ranks of a tensor-parallel group have.

A parameter is split along one dimension. A rank has some ranges of its indices, one after the
other: of a fused projection, for example, some query heads, then some heads of keys, then of
values. Ranks may have the same indices, such as heads of keys and values that are fewer than the
ranks. All ranks have shards of the same shape, so some end with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aquifer.weights.forms import RowFactors, RowOrder


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter that one rank has.

    Args:
        dim: the dimension that is split.
        whole_size: its size in the whole parameter.
        ranges: [start, stop) of the whole parameter's indices, in the order in which the shard has
            them. Without any, the shard is all padding: a bias that another rank adds.
        size: the shard's own size; what is left after the ranges is padding, which is zero.
    """

    dim: int
    whole_size: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    @property
    def padding(self) -> int:
        """Number of indices at the end that no range fills."""
        return self.size - sum(stop - start for start, stop in self.ranges)

    def overlaps(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The ranges within [begin, end) of the whole parameter: (start, stop, own index)."""
        own = 0
        for start, stop in self.ranges:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield first, last, own + first - start
            own += stop - start

    def own_indices(self, index: int) -> Iterator[int]:
        """The shard's own indices of one of the whole parameter."""
        return (own for _, _, own in self.overlaps(index, index + 1))


def rows_of(
    start: int, stop: int, factors: RowFactors, order: RowOrder | None
) -> Iterator[tuple[int, int, int, RowFactors]]:
    """Rows [start, stop) of what a stored tensor fills, in stretches that lie together in it.

    Args:
        start: first row.
        stop: end of the rows.
        factors: constant factors on all rows.
        order: order of the stored rows, if it is another one.

    Yields: [first, end) of the rows, the stored row of the first, and their factors.
    """
    if order is not None:
        for row, stored_row, count in order.stretches():
            first, end = max(row, start), min(row + count, stop)
            if first < end:
                yield first, end, stored_row + first - row, ()
        return
    own: list[tuple[int, float]] = []
    end = 0
    for num_rows, factor in factors:
        begin, end = end, end + num_rows
        count = min(end, stop) - max(begin, start)
        if count > 0:
            own.append((count, factor))
    yield start, stop, start, tuple(own)
