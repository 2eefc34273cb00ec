"""Keys of the paths to blocks, by which the log of evictions knows a block that comes back.

A key is a sum modulo 2^64 over all tokens of the path, each times a random number of its position.
So the keys of all blocks of a node are one cumulative sum: 0.5 ms for 131 000 tokens, where a hash
of each block's bytes takes 7. Two paths may have the same key, with the probability of any two
numbers of 64 bits; what depends on keys is what the log says was paid for an eviction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_BLOCK = 0x9E3779B97F4A7C15  # of each block: some have no token of their own

_Numbers = npt.NDArray[np.uint64]


def path_keys(
    token_ids: npt.NDArray[np.int32], first: int, ends: Sequence[int], above: int
) -> list[int]:
    """A key for each of some blocks that follow each other.

    Args:
        token_ids: [n], the tokens of the blocks.
        first: position of the first of them in its sequence.
        ends: [num_blocks], the position behind the last token of each block, ascending.
        above: the key of the block before; for first blocks, any number.
    """
    count = len(token_ids)
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum((token_ids.astype(np.uint64) + 1) * _factors(first + count)[first:], out=sums[1:])
    blocks = np.arange(1, len(ends) + 1, dtype=np.uint64) * np.uint64(_BLOCK)
    keys: list[int] = (sums[np.asarray(ends) - first] + blocks + np.uint64(above & _MASK)).tolist()
    return keys


class _Factors:
    """The random numbers of the first positions, which are made when they are needed."""

    numbers: _Numbers = np.zeros(0, np.uint64)


def _factors(count: int) -> _Numbers:
    """Odd random numbers for so many positions, by SplitMix64 (Steele et al., 2014)."""
    if count > len(_Factors.numbers):
        numbers = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(_BLOCK)
        numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        _Factors.numbers = (numbers ^ numbers >> np.uint64(31)) | np.uint64(1)
    return _Factors.numbers[:count]
