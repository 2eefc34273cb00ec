"""Work of prefill attention: which queries and which keys each program of a launch takes.

The host makes lists of it for a step, as it alone knows the lengths before the launch:

    programs  [n, 4]  span, first token within it, split, number of splits
    merges    [m]     of queries with several splits, the program that has the first one

A program takes `Tiling.block_tokens` tokens of a span. Where that makes fewer programs than run at
the same time, the keys of those with the most are split over several programs, which have
neighbouring places in the list; a second kernel merges their results. The programs with the most
keys come first, so that the last to start are short.

A launch that is captured has lists of a fixed length (`most_programs`, `most_merges`), in which -1
stands for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

PROGRAM_COLUMNS = 4
NOTHING = -1

_MOST_LONGER = 1.01
"""Times as long as without bands, at most: they save more than that."""

MIN_SPLIT_KEYS = 256
"""Minimum number of keys of a split: with fewer, merging costs more than it saves."""


class Tiling(NamedTuple):
    """What a launch's lists depend on, apart from the chunks."""

    block_tokens: int  # of a program
    num_running: int  # programs that run at the same time
    num_groups: int  # of heads; each has all the programs of the list
    least_keys: int  # of a split
    window_tokens: int | None = None
    num_splits: int | None = None  # of all programs; None for as many as there is room for
    has_bands: bool = False  # whether programs are taken in bands, if that helps

    @property
    def room(self) -> int:
        """Programs of the list that run at the same time."""
        return self.num_running // self.num_groups

    def most_programs(self, num_tokens: int, num_spans: int) -> int:
        """Programs of so many chunks with so many tokens together, at most."""
        num_blocks = num_tokens // self.block_tokens + num_spans
        return max(num_blocks * (self.num_splits or 1), self.room)

    @property
    def most_merges(self) -> int:
        """Queries with several splits that there can be, unless `num_splits` is given."""
        return self.room // 2


class Work(NamedTuple):
    """The lists of a launch, on its device."""

    programs: torch.Tensor  # [n, 4] int64
    merges: torch.Tensor  # [m] int64
    num_partials: int  # programs, from the first, among which are all that have a split
    band: int = 1  # programs to take for one group of heads before the next; see `choose_band`


class WorkPlan(NamedTuple):
    """The lists of a launch, on the host."""

    programs: IntArray  # [n, 4]
    merges: IntArray  # [m]
    num_keys: IntArray  # [blocks of queries], the most first


def plan_work(starts: IntArray, counts: IntArray, tiling: Tiling) -> WorkPlan:
    """Make the lists of a launch.

    Args:
        starts: [spans], tokens before each chunk.
        counts: [spans], tokens of it, at least one.
        tiling: of the launch.
    """
    window_tokens, block_tokens = tiling.window_tokens, tiling.block_tokens
    num_blocks = -(-counts // block_tokens)
    spans = np.repeat(np.arange(len(counts)), num_blocks)
    block = np.arange(len(spans)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    tokens = block * block_tokens
    num_keys = starts[spans] + np.minimum(tokens + block_tokens, counts[spans])
    if window_tokens is not None:
        num_keys -= np.maximum(starts[spans] + tokens + 1 - window_tokens, 0)
    num_splits = choose_num_splits(num_keys, tiling)
    order = np.argsort(-num_keys, kind="stable")
    spans, tokens, num_splits = spans[order], tokens[order], num_splits[order]
    firsts = np.cumsum(num_splits) - num_splits
    programs = np.empty((int(num_splits.sum()), PROGRAM_COLUMNS), np.int64)
    programs[:, 0] = np.repeat(spans, num_splits)
    programs[:, 1] = np.repeat(tokens, num_splits)
    programs[:, 2] = np.arange(len(programs)) - np.repeat(firsts, num_splits)
    programs[:, 3] = np.repeat(num_splits, num_splits)
    return WorkPlan(programs, firsts[num_splits > 1], num_keys[order])


def choose_num_splits(num_keys: IntArray, tiling: Tiling) -> IntArray:
    """Over how many programs to split the keys of each block of queries.

    Args:
        num_keys: [blocks].
        tiling: of the launch.
    """
    if tiling.num_splits is not None:
        return np.full_like(num_keys, tiling.num_splits)
    room, num_blocks = tiling.room, len(num_keys)
    if num_blocks >= room or not num_blocks:
        return np.ones_like(num_keys)
    # Shares of the longest block are tried: a whole one, a half, a third, and so on. The shortest
    # is chosen with which all blocks, cut into shares, are no more than there is room for.
    longest = int(num_keys.max())
    shares = -(-longest // np.arange(1, room - num_blocks + 2))
    shares = shares[: max(np.count_nonzero(shares >= tiling.least_keys), 1)]
    tried = -(-num_keys // shares[:, None])  # [shares, blocks]
    chosen = np.count_nonzero(tried.sum(1) <= room) - 1
    num_splits: IntArray = np.minimum(tried[chosen], num_keys // tiling.least_keys)
    return np.maximum(num_splits, 1)


def choose_band(num_keys: IntArray, tiling: Tiling) -> int:
    """How many blocks of queries to take for one group of heads before the next group.

    Programs that run at the same time then read the same keys, out of a cache. Where each of them
    takes one of the list after another, in turn forth and back, they are done together if the
    list is sorted by length. So a band is only as long as all of them stay about as busy.

    Args:
        num_keys: [blocks], the most first.
        tiling: of the launch.
    """
    num_blocks, num_groups = len(num_keys), tiling.num_groups
    if not tiling.has_bands or tiling.num_splits is not None or num_blocks <= tiling.room:
        return 1
    most_keys = _MOST_LONGER * _longest(num_keys, 1, tiling)
    # All, and so many that those which run have 1, 2, 4, ... groups of heads.
    bands = num_blocks, *(tiling.num_running >> n for n in range(num_groups.bit_length() - 1))
    fitting = (band for band in bands if band and _longest(num_keys, band, tiling) <= most_keys)
    return next(fitting, 1)


def _longest(num_keys: IntArray, band: int, tiling: Tiling) -> int:
    """Keys of the program that has the most, for a list in bands."""
    num_running, num_groups = tiling.num_running, tiling.num_groups
    in_whole_bands = len(num_keys) // band * band
    bands, rest = num_keys[:in_whole_bands].reshape(-1, 1, band), num_keys[in_whole_bands:]
    items = np.concatenate(
        (np.broadcast_to(bands, (len(bands), num_groups, band)).ravel(), np.tile(rest, num_groups))
    )
    turns = np.zeros((-(-len(items) // num_running), num_running), np.int64)
    turns.ravel()[: len(items)] = items
    return int((turns[::2].sum(0) + turns[1::2].sum(0)[::-1]).max())
