"""Regions against a list of taken bytes."""

from __future__ import annotations

from random import Random

import pytest

from aquifer.errors import InvariantError
from aquifer.memory.regions import Region, RegionList

ALIGN = 16


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int) -> None:
    random = Random(seed)
    regions = RegionList(40 * ALIGN + 5, ALIGN)
    taken: dict[int, int] = {}
    owners: dict[int, int] = {}
    pinned: set[int] = set()
    for i in range(600):
        action = random.random()
        if taken and action < 0.4:
            start = random.choice(list(taken))
            regions.release(start)
            del taken[start], owners[start]
            pinned.discard(start)
        elif taken and action < 0.5:
            start = random.choice(list(taken))
            if random.random() < 0.5:
                regions.pin(start)
                pinned.add(start)
            else:
                regions.unpin(start)
                pinned.discard(start)
        elif taken and action < 0.65:
            _move(regions, random, taken, owners, pinned)
        elif action < 0.75:
            _acquire_at(regions, random, taken, owners, i)
        else:
            num_bytes = random.randrange(1, 12 * ALIGN)
            size = -(-num_bytes // ALIGN) * ALIGN
            gaps = _gaps(taken, 40 * ALIGN)
            acquired = regions.acquire(num_bytes, i)
            fitting = [length for _, length in gaps if length >= size]
            if acquired is None:
                assert not fitting
                continue
            assert dict(gaps)[acquired] == min(fitting)  # best fit, from its beginning
            taken[acquired], owners[acquired] = size, i
        _compare(regions, taken, owners, pinned)
    for start in taken:
        regions.release(start)
    assert regions.acquire(40 * ALIGN) == 0  # one gap again


def _move(
    regions: RegionList,
    random: Random,
    taken: dict[int, int],
    owners: dict[int, int],
    pinned: set[int],
) -> None:
    start, target = random.choice(list(taken)), random.randrange(40) * ALIGN
    size = taken[start]
    others = {other: length for other, length in taken.items() if other != start}
    if start in pinned or not _is_free(others, target, size):
        with pytest.raises(InvariantError):
            regions.move(start, target)
        return
    regions.move(start, target)
    taken[target], owners[target] = taken.pop(start), owners.pop(start)


def _acquire_at(
    regions: RegionList, random: Random, taken: dict[int, int], owners: dict[int, int], owner: int
) -> None:
    start, size = random.randrange(42) * ALIGN, random.randrange(1, 6) * ALIGN
    if not _is_free(taken, start, size):
        with pytest.raises(InvariantError):
            regions.acquire_at(start, size, owner)
        return
    regions.acquire_at(start, size - 3, owner)
    taken[start], owners[start] = size, owner


def _is_free(taken: dict[int, int], start: int, size: int) -> bool:
    return any(
        begin <= start and start + size <= begin + length
        for begin, length in _gaps(taken, 40 * ALIGN)
    )


def _compare(
    regions: RegionList, taken: dict[int, int], owners: dict[int, int], pinned: set[int]
) -> None:
    regions.check()
    gaps = _gaps(taken, 40 * ALIGN)
    expected = [Region(start, size, True) for start, size in gaps]
    expected += [
        Region(start, size, False, owners[start], start in pinned) for start, size in taken.items()
    ]
    assert list(regions) == sorted(expected)
    assert len(regions) == len(expected)
    assert regions.used_bytes == sum(taken.values())
    assert regions.free_bytes == sum(length for _, length in gaps)
    assert regions.largest_gap_bytes == max((length for _, length in gaps), default=0)
    layout = regions.layout()
    assert layout.free_bytes == regions.free_bytes
    assert list(
        zip(layout.starts.tolist(), layout.sizes.tolist(), layout.is_pinned.tolist(), strict=True)
    ) == [(start, taken[start], start in pinned) for start in sorted(taken)]


def test_what_was_not_given_cannot_come_back() -> None:
    regions = RegionList(10 * ALIGN, ALIGN)
    start = regions.acquire(ALIGN)
    assert start == 0
    regions.release(0)
    for action in (regions.release, regions.pin, regions.unpin, regions.region):
        with pytest.raises(InvariantError):
            action(start)
    with pytest.raises(InvariantError):
        regions.acquire_at(ALIGN // 2, ALIGN)
    assert RegionList(0, ALIGN).acquire(1) is None


def test_a_pinned_region_stays_until_it_is_released() -> None:
    """A released region's pin does not stay behind for the next one at its address."""
    regions = RegionList(4 * ALIGN, ALIGN)
    assert regions.acquire(ALIGN, "kv", is_pinned=True) == 0
    with pytest.raises(InvariantError):
        regions.move(0, 2 * ALIGN)
    assert regions.region(0) == Region(0, ALIGN, False, "kv", True)
    regions.release(0)
    assert regions.acquire(ALIGN, "tensor") == 0
    regions.move(0, 2 * ALIGN)
    assert regions.region(2 * ALIGN).owner == "tensor"


def _gaps(taken: dict[int, int], end: int) -> list[tuple[int, int]]:
    """(start, length) of each free stretch."""
    gaps = []
    position = 0
    for start in sorted(taken):
        if start > position:
            gaps.append((position, start - position))
        position = start + taken[start]
    if position < end:
        gaps.append((position, end - position))
    return gaps
