"""The buddy system against an oracle that looks at every unit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aquifer.errors import InvariantError
from aquifer.sim.baselines.buddy import BuddyAllocator


def test_splits_and_merges():
    buddies = BuddyAllocator(16)
    first = buddies.allocate(3)
    assert first == range(4)  # rounded up; the rest is 4, then 8
    assert (buddies.free_units, buddies.largest_free_units) == (12, 8)
    assert buddies.allocate(8) == range(8, 16)
    assert buddies.allocate(1) == range(4, 5)
    assert buddies.allocate(4) is None  # three are free, and no four
    assert buddies.free_units == 3
    buddies.release(0)
    assert buddies.largest_free_units == 4  # the buddy of [0, 4) is still in use in part
    buddies.release(4)
    assert buddies.largest_free_units == 8
    buddies.release(8)
    assert buddies.allocate(16) == range(16)


def test_an_arena_that_is_no_power_of_two():
    buddies = BuddyAllocator(13)
    assert buddies.largest_free_units == 8
    assert buddies.allocate(9) is None
    assert [buddies.allocate(size) for size in (8, 4, 1)] == [
        range(8),
        range(8, 12),
        range(12, 13),
    ]
    assert (buddies.free_units, buddies.largest_free_units) == (0, 0)
    assert buddies.allocate(1) is None
    for first in (8, 12, 0):
        buddies.release(first)
    buddies.check()
    assert (buddies.free_units, buddies.largest_free_units) == (13, 8)


def test_wrong_calls():
    buddies = BuddyAllocator(8)
    assert buddies.allocate(4) == range(4)
    with pytest.raises(InvariantError, match="no stretch begins at unit 2"):
        buddies.release(2)
    buddies.release(0)
    with pytest.raises(InvariantError, match="no stretch begins at unit 0"):
        buddies.release(0)
    with pytest.raises(InvariantError, match="0 units"):
        buddies.allocate(0)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(num_units=st.integers(1, 70), data=st.data())
def test_random_lives(num_units, data):
    """A stretch is given if and only if one of that size, aligned, is wholly free."""
    buddies = BuddyAllocator(num_units)
    used = [False] * num_units
    held: list[range] = []
    for size in data.draw(st.lists(st.integers(-3, num_units + 1), max_size=40)):
        if size <= 0:
            if held:
                stretch = held.pop(data.draw(st.integers(0, len(held) - 1)))
                buddies.release(stretch.start)
                used[stretch.start : stretch.stop] = [False] * len(stretch)
        else:
            rounded = buddies.rounded(size)
            assert size <= rounded < 2 * size
            fits = [
                first
                for first in range(0, num_units - rounded + 1, rounded)
                if not any(used[first : first + rounded])
            ]
            given = buddies.allocate(size)
            assert (given is not None) == bool(fits)
            if given is not None:
                assert len(given) == rounded
                assert given.start in fits
                used[given.start : given.stop] = [True] * rounded
                held.append(given)
        buddies.check()
        assert buddies.free_units == used.count(False)
    for stretch in held:
        buddies.release(stretch.start)
    assert buddies.free_units == num_units
    assert buddies.largest_free_units == 1 << (num_units.bit_length() - 1)
