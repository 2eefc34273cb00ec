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


class Tiling(NamedTuple):
    """What a launch's lists depend on, apart from the chunks."""

    block_tokens: int  # of a program
    room: int  # programs that run at the same time, of each group of heads
    least_keys: int  # of a split
    window_tokens: int | None = None
    # Whether this kernel leaves the first `PrefillSpans.cudnn_keys` of each span to cuDNN.
    leaves_keys: bool = False
    num_splits: int | None = None  # of all programs; None for as many as there is room for

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


def plan_work(
    starts: IntArray, counts: IntArray, cudnn_keys: IntArray, tiling: Tiling
) -> tuple[IntArray, IntArray]:
    """Make the lists of a launch.

    Args:
        starts: [spans], tokens before each chunk.
        counts: [spans], tokens of it, at least one.
        cudnn_keys: [spans], its keys, from the first, that cuDNN takes if `tiling` leaves them.
        tiling: of the launch.

    Returns: programs [n, 4] and merges [m].
    """
    ends = starts + counts
    window_tokens, block_tokens = tiling.window_tokens, tiling.block_tokens
    first_keys = np.zeros_like(starts)
    if tiling.leaves_keys:
        first_keys = cudnn_keys
        if window_tokens is not None:
            first_keys = np.where(ends <= window_tokens, cudnn_keys, 0)
    num_blocks = np.where(first_keys < ends, -(-counts // block_tokens), 0)
    spans = np.repeat(np.arange(len(counts)), num_blocks)
    block = np.arange(len(spans)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    tokens = block * block_tokens
    begins = first_keys[spans]
    if window_tokens is not None:
        begins = np.maximum(begins, starts[spans] + tokens + 1 - window_tokens)
    num_keys = starts[spans] + np.minimum(tokens + block_tokens, counts[spans]) - begins
    num_splits = choose_num_splits(num_keys, tiling)
    order = np.argsort(-num_keys, kind="stable")
    spans, tokens, num_splits = spans[order], tokens[order], num_splits[order]
    firsts = np.cumsum(num_splits) - num_splits
    programs = np.empty((int(num_splits.sum()), PROGRAM_COLUMNS), np.int64)
    programs[:, 0] = np.repeat(spans, num_splits)
    programs[:, 1] = np.repeat(tokens, num_splits)
    programs[:, 2] = np.arange(len(programs)) - np.repeat(firsts, num_splits)
    programs[:, 3] = np.repeat(num_splits, num_splits)
    return programs, firsts[num_splits > 1]


def choose_num_splits(num_keys: IntArray, tiling: Tiling) -> IntArray:
    """Over how many programs to split the keys of each block of queries.

    Args:
        num_keys: [blocks].
        tiling: of the launch.
    """
    if tiling.num_splits is not None:
        return np.full_like(num_keys, tiling.num_splits)
    spare = tiling.room - len(num_keys)
    if spare <= 0 or not len(num_keys):
        return np.ones_like(num_keys)
    by_share = 1 + num_keys * spare // int(num_keys.sum())
    return np.maximum(np.minimum(by_share, num_keys // tiling.least_keys), 1)
