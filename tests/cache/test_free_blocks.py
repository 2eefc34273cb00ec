"""The free blocks of a paged cache against a sorted list."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from aquifer.cache.free_blocks import FreeBlocks


@pytest.mark.parametrize("seed", range(4))
def test_the_lowest_is_taken_first(seed):
    """K5, also where the next free block is far away."""
    random = Random(seed)
    end = 40_000
    free = FreeBlocks(3, end)
    expected = list(range(3, end))
    taken: list[int] = []
    for _ in range(200):
        count = random.choice([0, 1, 1, 5, 300, 3000])
        if random.random() < 0.5 and count <= len(expected):
            blocks = free.take(count).tolist()
            assert blocks == expected[:count]
            del expected[:count]
            taken += blocks
        else:
            random.shuffle(taken)
            put, taken = taken[:count], taken[count:]
            free.put(np.array(put, np.int64))
            expected = sorted(expected + put)
