"""Packing of new tensors into the free regions of a fragmented memory (Tangram, section 3.2.2).

Three ways, from the least to the most copying: `best_fit` into free regions as they are,
`partitioned_gain_packing` (the paper's Algorithm 1), which merges free regions by moving what lies
between them, but only where it must, and `global_merge`, which moves everything. They are pure
functions of sizes. `aquifer.memory.merging` makes a plan of what they return.

A load has hundreds of tensors, but few different sizes, as layers are alike. So tensors are given
as groups, and a group of equal tensors is placed by arithmetic, not one by one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Groups = tuple[tuple[int, int], ...]
"""Tensors as (size in bytes, number of tensors of that size), larger sizes first."""

_FEW = 8
"""Partition points that are tried one by one, before all others are tried as arrays."""


def groups_of(sizes: Iterable[int]) -> Groups:
    """Group tensors by size."""
    return tuple(sorted(Counter(sizes).items(), reverse=True))


def total_bytes(groups: Groups) -> int:
    """Bytes of all tensors."""
    return sum(size * count for size, count in groups)


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The free regions of a memory in address order, and what lies between them.

    Allocated regions that are neighbours are one wall. What lies before the first free region or
    after the last one is left out: no merge has to move it.

    Args:
        starts: address of each free region, [n].
        sizes: bytes of each free region, [n].
        walls: bytes that are allocated between a free region and the next one, [n - 1].
        is_fixed: whether anything in that wall is pinned, so that the free regions on both sides
            cannot be merged, [n - 1].
    """

    starts: Sequence[int]
    sizes: Sequence[int]
    walls: Sequence[int]
    is_fixed: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Subspace:
    """Free regions `first` to `last`, all that lies between them, and the tensors to put there.

    If it has tensors and several free regions, these are merged: each wall in it is moved.
    """

    first: int
    last: int
    groups: Groups

    def merged_bytes(self, space: FreeSpace) -> int:
        """Bytes to move: the merge cost M of this subspace. Without tensors nothing is moved."""
        return sum(space.walls[self.first : self.last]) if self.groups else 0


def best_fit(
    starts: Sequence[int], sizes: Sequence[int], groups: Groups
) -> list[tuple[int, int, int]] | None:
    """Place each tensor in the smallest free region that holds it, larger tensors first.

    Args:
        starts: address of each free region.
        sizes: bytes of each free region.
        groups: the tensors.

    Returns:
        Rows of neighbouring equal tensors, (address of the first one, size, number), in the order
        of the groups; None if a tensor fits nowhere.
    """
    gaps = sorted(zip(sizes, starts, strict=True))
    rows = []
    for size, count in groups:
        left = count
        index = bisect_left(gaps, (size, -1))
        # The smallest free region that holds one of them remains the smallest until it is too
        # small. So it is filled before the next one.
        while left:
            if index == len(gaps):
                return None
            gap_bytes, start = gaps.pop(index)
            here = min(left, gap_bytes // size)
            rows.append((start, size, here))
            left -= here
            rest_bytes = gap_bytes - here * size
            if rest_bytes:
                insort(gaps, (rest_bytes, start + here * size))
                # What is left is too small for another one, unless there is none.
                index = bisect_left(gaps, (size, -1), index)
    return rows


def global_merge(space: FreeSpace, groups: Groups) -> list[Subspace] | None:
    """Merge everything that can be merged: the paper's GlobalMerge.

    Where walls are fixed, there is a subspace between any two of them, and this is also where
    Algorithm 1 begins: a fixed wall is a partition point at which the memory must be split, so
    tensors are divided among these subspaces before anything else. Each goes where most bytes are
    left, larger ones first, as in `TryPacking`; if that leaves one out, each goes where it leaves
    the fewest.

    Returns:
        Subspaces in address order; None if the tensors could not be divided.
    """
    bounds = [i for i, is_fixed in enumerate(space.is_fixed) if is_fixed]
    firsts = [0, *(bound + 1 for bound in bounds)]
    lasts = [*bounds, len(space.sizes) - 1]
    capacities = [
        sum(space.sizes[first : last + 1]) for first, last in zip(firsts, lasts, strict=True)
    ]
    if len(capacities) == 1:
        divided = [groups] if total_bytes(groups) <= capacities[0] else None
    else:
        divided = _most_left(capacities, groups) or _least_left(capacities, groups)
    if divided is None:
        return None
    return [Subspace(*of) for of in zip(firsts, lasts, divided, strict=True)]


def partitioned_gain_packing(space: FreeSpace, groups: Groups) -> list[Subspace] | None:
    """Divide the memory into subspaces such that little has to be moved: Algorithm 1.

    It begins with `global_merge` and splits subspaces at walls, which then need not be moved, as
    long as the tensors can be divided between both parts. What the paper leaves open or
    contradictory is decided as follows.

    - **Partition points** of a subspace are tried in order of their gain, the largest first, as
      in the text on Fig. 6; of equal ones the one at the lowest address. The paper's loop has no
      order.
    - **Boundaries.** A subspace begins and ends with a free region. So a partition point is a whole
      wall: if only one of several neighbouring tensors were chosen, the others would be at the end
      of a part, and would not be moved either. The gain is that of the whole wall.
    - **Capacity** is the free bytes of a subspace. The paper counts the allocated ones too, but
      these stay in the subspace, so more tensors would be put there than there is room for.
    - **TryPacking** fails when a tensor is larger than what is left in the part that has most left,
      as the text says. The listing (line 21) says `size >= min(C1, C2)`, so that no tensor could go
      to a part unless the other one could take it too, and no part could be filled.
    - **No tensors.** A subspace without tensors is finished, and nothing in it is moved. In the
      listing it would count with all its walls, as line 8 takes no tensors for a failure.
    - **Pinned regions** must not move: see `global_merge`.

    Dividing equal tensors between two parts takes one step (`_difference`), and all partition
    points of a subspace but the first few are tried at once. The result is the same as that of the
    loops of the listing.

    Returns:
        Subspaces in address order; None if tensors could not be divided between pinned regions.
    """
    merged = global_merge(space, groups)
    if merged is None:
        return None
    # free_before[i]: bytes of the free regions before region i.
    free_before = np.fromiter(accumulate(space.sizes, initial=0), np.int64, len(space.sizes) + 1)
    by_gain = np.argsort(-np.asarray(space.walls, np.int64), kind="stable")
    found = []
    pending = [(subspace, by_gain) for subspace in merged]
    while pending:
        subspace, points = pending.pop()
        first, last = subspace.first, subspace.last
        split = None
        if subspace.groups and first < last:
            points = points[(points >= first) & (points < last)]
            split = _first_split(subspace, points, free_before)
        if split is None:
            found.append(subspace)
            continue
        point, left, right = split
        pending.append((Subspace(first, point, left), points))
        pending.append((Subspace(point + 1, last, right), points))
    return sorted(found, key=lambda subspace: subspace.first)


def _first_split(
    subspace: Subspace, points: npt.NDArray[np.int64], free_before: npt.NDArray[np.int64]
) -> tuple[int, Groups, Groups] | None:
    """The first partition point at which the tensors can be divided, and the tensors of each part.

    Free regions up to `point` are the left part. Both parts can take what they get if, in the end,
    neither has less than nothing left. They have `spare` bytes left together, so that is the case
    if one has at most `spare` more left than the other.
    """
    groups = subspace.groups
    begin, end = int(free_before[subspace.first]), int(free_before[subspace.last + 1])
    spare = end - begin - total_bytes(groups)
    for point in points[:_FEW].tolist():
        difference = 2 * int(free_before[point + 1]) - begin - end
        if abs(_difference(difference, groups)) <= spare:
            return point, *_divide(difference, groups)
    rest = points[_FEW:]
    if not len(rest):
        return None
    differences = 2 * free_before[rest + 1] - (begin + end)
    fits = np.abs(_differences(differences, groups)) <= spare
    index = int(fits.argmax())
    if not fits[index]:
        return None
    return int(rest[index]), *_divide(int(differences[index]), groups)


def _difference(difference: int, groups: Groups) -> int:
    """Difference of the bytes left in two parts, once all tensors went where most was left.

    A tensor goes to the first part if the difference is at least 0. Then the difference falls by
    its size, and otherwise it rises by it. So equal tensors bring it below their size, if there are
    enough of them, and then go to either part in turns.

    Args:
        difference: bytes of the first part less those of the second.
        groups: the tensors.
    """
    for size, count in groups:
        quotient, remainder = divmod(difference, size)
        if quotient > count:
            difference -= count * size
        elif quotient < -count:
            difference += count * size
        else:
            difference = remainder - size if (quotient + count) & 1 else remainder
    return difference


def _differences(differences: npt.NDArray[np.int64], groups: Groups) -> npt.NDArray[np.int64]:
    """The same as `_difference`, for several divisions at once."""
    for size, count in groups:
        quotients = differences // size
        # Equal tensors take as many steps of 2 x size as come next to a multiple of it.
        turns = differences - (quotients + ((quotients + count) & 1)) * size
        bytes_all = count * size
        one_sided = differences - np.clip(differences, -bytes_all, bytes_all)
        differences = np.where(np.abs(quotients) > count, one_sided, turns)
    return differences


def _divide(difference: int, groups: Groups) -> tuple[Groups, Groups]:
    """The tensors of both parts, if each goes where most is left (see `_difference`)."""
    first, second = [], []
    for group in groups:
        size, count = group
        after = _difference(difference, (group,))
        # `num_first` tensors lowered it and the others raised it.
        num_first = (count - (after - difference) // size) // 2
        difference = after
        if num_first:
            first.append((size, num_first))
        if num_first < count:
            second.append((size, count - num_first))
    return tuple(first), tuple(second)


def _most_left(capacities: Sequence[int], groups: Groups) -> list[Groups] | None:
    """Tensors of each of several parts, if each goes where most is left; None if one fits nowhere.

    Of equal parts the first one is chosen.
    """
    left = [(-capacity, part) for part, capacity in enumerate(capacities)]
    heapify(left)
    found: list[list[int]] = [[] for _ in capacities]
    for size, count in groups:
        for _ in range(count):
            negative, part = left[0]
            if size > -negative:
                return None
            heapreplace(left, (negative + size, part))
            found[part].append(size)
    return [groups_of(sizes) for sizes in found]


def _least_left(capacities: Sequence[int], groups: Groups) -> list[Groups] | None:
    """Tensors of each of several parts by best fit; None if one fits nowhere."""
    starts = list(accumulate(capacities[:-1], initial=0))
    rows = best_fit(starts, capacities, groups)
    if rows is None:
        return None
    found: list[list[tuple[int, int]]] = [[] for _ in capacities]
    for start, size, count in rows:
        found[bisect_left(starts, start + 1) - 1].append((size, count))
    return [tuple(of) for of in found]
