"""The free blocks of a paged cache, of which the lowest is taken first."""

from __future__ import annotations

import numpy as np

from aquifer.cache.spans import IntArray

_WINDOW = 1024
"""Blocks to look at first for free ones; then four times as many, and so on."""


class FreeBlocks:
    """Which blocks are free: a flag for each, so that many are taken and put back at once.

    Args:
        first: the first block; all from there on are free.
        end: number of blocks; no more are ever taken.
    """

    def __init__(self, first: int, end: int) -> None:
        self._next = first  # this one and all later ones have never been taken
        self._is_free = np.zeros(end, np.bool_)  # of those before it
        self._num_free = 0
        self._lowest = first  # none of them is before this one

    def take(self, count: int) -> IntArray:
        """The lowest free blocks, in ascending order."""
        taken: list[IntArray] = []
        start, window = self._lowest, 4 * count + _WINDOW
        wanted = min(count, self._num_free)
        self._num_free -= wanted
        count -= wanted
        while wanted:
            found = self._is_free[start : start + window].nonzero()[0][:wanted] + start
            self._is_free[found] = False
            taken.append(found)
            wanted -= len(found)
            start, window = (start + window, 4 * window) if wanted else (int(found[-1]) + 1, 0)
        first = self._next
        self._next += count
        self._lowest = start if self._num_free else self._next
        return np.concatenate([*taken, np.arange(first, self._next)])

    def put(self, blocks: IntArray) -> None:
        """Let blocks be taken again, each of which was taken."""
        if len(blocks):
            self._is_free[blocks] = True
            self._num_free += len(blocks)
            self._lowest = min(self._lowest, int(blocks.min()))
