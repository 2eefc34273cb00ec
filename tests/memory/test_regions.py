"""Regions against a list of taken bytes."""

from random import Random

import pytest

from aquifer.errors import InvariantError
from aquifer.memory.regions import RegionList

ALIGN = 16


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int) -> None:
    random = Random(seed)
    regions = RegionList(40 * ALIGN + 5, ALIGN)
    taken: dict[int, int] = {}
    for _ in range(400):
        if taken and random.random() < 0.5:
            start = random.choice(list(taken))
            regions.release(start)
            del taken[start]
        else:
            num_bytes = random.randrange(1, 12 * ALIGN)
            size = -(-num_bytes // ALIGN) * ALIGN
            gaps = _gaps(taken, 40 * ALIGN)
            acquired = regions.acquire(num_bytes)
            fitting = [length for _, length in gaps if length >= size]
            if acquired is None:
                assert not fitting
                continue
            assert dict(gaps)[acquired] == min(fitting)  # best fit, from its beginning
            taken[acquired] = size
        assert regions.used_bytes == sum(taken.values())
    for start in taken:
        regions.release(start)
    assert regions.acquire(40 * ALIGN) == 0  # one gap again


def test_what_was_not_given_cannot_come_back() -> None:
    regions = RegionList(10 * ALIGN, ALIGN)
    start = regions.acquire(ALIGN)
    assert start == 0
    regions.release(0)
    with pytest.raises(InvariantError):
        regions.release(start)
    assert RegionList(0, ALIGN).acquire(1) is None


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
