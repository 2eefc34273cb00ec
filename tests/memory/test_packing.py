"""Packing of tensors into free regions: best fit, Algorithm 1 and GlobalMerge."""

from __future__ import annotations

from bisect import bisect_left, insort

import pytest
from benchmarks.tangram.listing import algorithm_1, merged_bytes
from hypothesis import given
from hypothesis import strategies as st

from aquifer.memory.packing import (
    FreeSpace,
    Subspace,
    best_fit,
    global_merge,
    groups_of,
    partitioned_gain_packing,
    total_bytes,
)


def space_of(sizes: list[int], walls: list[int], fixed: tuple[int, ...] = ()) -> FreeSpace:
    """Free regions with walls between them, from address 0."""
    starts = [sum(sizes[:i]) + sum(walls[:i]) for i in range(len(sizes))]
    return FreeSpace(starts, sizes, walls, [i in fixed for i in range(len(walls))])


def packed(space: FreeSpace, tensors: list[int]) -> list[Subspace]:
    found = partitioned_gain_packing(space, groups_of(tensors))
    assert found is not None
    return found


def cost(space: FreeSpace, subspaces: list[Subspace] | None) -> int:
    assert subspaces is not None
    return sum(subspace.merged_bytes(space) for subspace in subspaces)


@st.composite
def fragmented(draw: st.DrawFn, most_regions: int = 14) -> tuple[FreeSpace, list[int]]:
    """Free regions, and tensors of a few sizes that need no more than what is free."""
    small = st.integers(1, 12)
    sizes = draw(st.lists(small, min_size=1, max_size=most_regions))
    walls = draw(st.lists(small, min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    kinds = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    tensors: list[int] = []
    for size in draw(st.lists(st.sampled_from(kinds), max_size=40)):
        if sum(tensors) + size <= sum(sizes):
            tensors.append(size)
    return space_of(sizes, walls), tensors


def test_the_example_of_figure_6() -> None:
    """M = 4 and C = 12 with partition points of gains 1 and 3; the text has no other sizes.

    The point of gain 3 is chosen first, and M falls to 1. Then the left subspace cannot be split,
    since its tensor needs both of its free regions, and the right one has no partition point.
    """
    space = space_of([2, 2, 4], [1, 3])
    assert sum(space.walls) == 4
    assert sum(space.walls) + sum(space.sizes) == 12
    assert cost(space, global_merge(space, ((4, 2),))) == 4
    found = packed(space, [4, 4])
    assert found == [Subspace(0, 1, ((4, 1),)), Subspace(2, 2, ((4, 1),))]
    assert cost(space, found) == 1


def test_a_point_of_less_gain_is_chosen_where_the_first_one_fails() -> None:
    space = space_of([6, 1, 3], [1, 3])
    # Split at gain 3 leaves 7 and 3: the second 4 does not fit. At gain 1 it is 6 and 4.
    assert packed(space, [4, 4]) == [Subspace(0, 0, ((4, 1),)), Subspace(1, 2, ((4, 1),))]


def test_an_exact_fit_and_a_subspace_without_tensors() -> None:
    space = space_of([5, 2, 2], [7, 3])
    assert packed(space, [5]) == [Subspace(0, 0, ((5, 1),)), Subspace(1, 2, ())]
    assert cost(space, packed(space, [5])) == 0


@given(fragmented())
def test_the_same_as_the_listing(case: tuple[FreeSpace, list[int]]) -> None:
    space, tensors = case
    expected = algorithm_1(space, tensors)
    found = packed(space, tensors)
    assert [(s.first, s.last, s.groups) for s in found] == [
        (first, last, groups_of(sizes)) for first, last, sizes in expected
    ]
    assert cost(space, found) == merged_bytes(space, expected)


def test_the_same_as_the_listing_with_many_regions() -> None:
    """So many that partition points are tried as arrays."""
    sizes = [1 + (i * 7919) % 31 for i in range(300)]
    walls = [1 + (i * 104729) % 53 for i in range(299)]
    tensors = [40] * 30 + [17] * 60 + [9] * 100
    tensors += [3] * ((sum(sizes) - sum(tensors)) // 3)
    space = space_of(sizes, walls)
    found = packed(space, tensors)
    assert [(s.first, s.last, s.groups) for s in found] == [
        (first, last, groups_of(of)) for first, last, of in algorithm_1(space, tensors)
    ]
    assert 0 < cost(space, found) < sum(walls)


@given(fragmented(), st.sets(st.integers(0, 12), max_size=4))
def test_subspaces_hold_their_tensors_and_no_pinned_wall(
    case: tuple[FreeSpace, list[int]], fixed: set[int]
) -> None:
    plain, tensors = case
    space = space_of(list(plain.sizes), list(plain.walls), tuple(fixed))
    groups = groups_of(tensors)
    found, merged = partitioned_gain_packing(space, groups), global_merge(space, groups)
    assert (found is None) == (merged is None)
    if found is None:
        # Only pinned walls can be the reason, as there is enough in all.
        assert any(space.is_fixed)
        return
    assert cost(space, found) <= cost(space, merged)
    assert [s.first for s in found] == [0, *(s.last + 1 for s in found[:-1])]
    assert found[-1].last == len(space.sizes) - 1
    placed = []
    for subspace in found:
        assert total_bytes(subspace.groups) <= sum(space.sizes[subspace.first : subspace.last + 1])
        assert not any(space.is_fixed[subspace.first : subspace.last])
        placed += [size for size, count in subspace.groups for _ in range(count)]
    assert sorted(placed) == sorted(tensors)


def test_tensors_are_divided_between_pinned_walls() -> None:
    """Where most is left; and where the least is left, if that leaves a tensor out."""
    space = space_of([3, 3, 6], [1, 1], fixed=(0, 1))
    assert [s.groups for s in packed(space, [4, 3])] == [((3, 1),), (), ((4, 1),)]
    space = space_of([6, 5], [1], fixed=(0,))
    assert [s.groups for s in packed(space, [5, 3, 3])] == [((3, 2),), ((5, 1),)]
    assert partitioned_gain_packing(space, ((4, 1), (7, 1))) is None
    assert global_merge(space, ((7, 1),)) is None


@given(fragmented())
def test_best_fit_of_groups_is_that_of_tensors_one_by_one(
    case: tuple[FreeSpace, list[int]],
) -> None:
    space, tensors = case
    gaps = sorted(zip(space.sizes, space.starts, strict=True))
    expected: list[tuple[int, int]] = []
    has_room = True
    for size in sorted(tensors, reverse=True):
        index = bisect_left(gaps, (size, -1))
        if index == len(gaps):
            has_room = False
            break
        length, start = gaps.pop(index)
        expected.append((start, size))
        if length > size:
            insort(gaps, (length - size, start + size))
    rows = best_fit(space.starts, space.sizes, groups_of(tensors))
    if not has_room:
        assert rows is None
        return
    assert rows is not None
    found = [(start + i * size, size) for start, size, count in rows for i in range(count)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("tensors", [[], [1]])
def test_no_free_region(tensors: list[int]) -> None:
    rows = best_fit([], [], groups_of(tensors))
    assert rows == ([] if not tensors else None)
