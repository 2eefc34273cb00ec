"""Buckets of ODMA: how large a sequence's region is, and which piece of an arena it gets.

    sizes      `Granularity`: regions have few different sizes
    bounds     `BucketBounds`: upper bounds of the buckets, learned from lengths (section 3.3)
    routing    `Routing`: the bucket of a request, from the forecast of its length (3.3 and 3.4)
    pieces     `BucketPool`: the arena, with a list of free pieces for each size (3.5)

Lengths are those of whole sequences, prompt and output together, since a region holds both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.regions import RegionList
from aquifer.predict.lengths import Forecast

Widths = Literal["equal", "doubling"]
"""How far apart bounds are that no lengths were seen for: equally, or each twice the one before."""

Rule = Literal["least waste", "equal shares"]
"""How the levels of bounds are chosen that follow the lengths."""

IntArray = npt.NDArray[np.int64]

_TOP_LEVEL = 0.99
"""Share of the sequences in the window that regular buckets have room for. Bounds that reach up to
the very longest would make the last regular bucket as large as an outlier."""

_CANDIDATES = _TOP_LEVEL * np.arange(1, 65) / 64
"""Levels among which those with the least waste are looked for."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """The sizes that regions are rounded up to, in tokens.

    Attributes:
        min_tokens: sizes up to `mid_tokens` are multiples of this.
        mid_tokens: larger ones are multiples of this; itself a multiple of `min_tokens`.
        max_tokens: the largest size, which may be any: the longest sequence.

    Raises:
        ConfigError: `mid_tokens` is no multiple of `min_tokens`.
    """

    min_tokens: int
    mid_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.min_tokens < 1 or self.mid_tokens % self.min_tokens:
            raise ConfigError(
                f"buckets of {self.min_tokens} and {self.mid_tokens} tokens do not fit together; "
                "the larger size must be a multiple of the smaller one"
            )

    def align(self, num_tokens: int) -> int:
        """The least size that holds so many tokens; the number itself if no size does."""
        unit = self.min_tokens if num_tokens <= self.mid_tokens else self.mid_tokens
        return max(min(-(-num_tokens // unit) * unit, self.max_tokens), num_tokens)


def least_waste(lengths: IntArray, candidates: IntArray, num_bounds: int) -> list[int]:
    """The bounds with which the least is given beyond what is needed.

    Each length gets the smallest bound that holds it. Found by dynamic programming: the best bounds
    up to a candidate are the best ones up to an earlier candidate, and itself.

    Args:
        lengths: [n], none above the last candidate.
        candidates: [m], ascending.
        num_bounds: the most bounds.

    Returns: the chosen candidates, ascending, with the last one.
    """
    below = np.searchsorted(np.sort(lengths), candidates, side="right")
    # [i, j]: what lengths above candidate i - 1 get, and up to candidate j, if that is a bound.
    begins = np.concatenate((np.zeros(1, np.int64), below[:-1]))
    given = (below[None, :] - begins[:, None]) * candidates[None, :].astype(np.float64)
    given[np.tril_indices(len(candidates), -1)] = np.inf
    best = given[0]  # with one bound, at each candidate
    chosen: list[IntArray] = []
    for _ in range(num_bounds - 1):
        sums = np.concatenate(([0.0], best[:-1]))[:, None] + given
        chosen.append(sums.argmin(0))
        best = sums.min(0)
    found, last = [], len(candidates) - 1
    for begins_at in reversed(chosen):
        found.append(int(candidates[last]))
        if begins_at[last] == 0:
            return sorted(found)
        last = int(begins_at[last]) - 1
    return sorted([*found, int(candidates[last])])


class BucketBounds:
    """Upper bounds of the buckets, which follow the lengths of finished sequences.

    The bounds of the regular buckets are quantiles of the latest lengths. The paper chooses levels
    that give each bucket an equal share of the sequences ("equal shares"). Of heavy-tailed lengths,
    the last bucket then is so wide that most of what is given to its sequences is waste. So by
    default the levels are those with the least waste over the window (`least_waste`); benchmarks/
    odma has both. Bounds are aligned, and equal ones are merged. The last
    bound, that of the large bucket, is the longest sequence. Before there are lengths enough, and
    for good if `is_static`, the bounds are those of S3: fixed, `widths` apart.

    New bounds are for later requests: regions keep the size that they have. The paper computes them
    in a background thread. Here that is done when the last of `every` lengths comes, between two
    steps, since it takes a quarter of a millisecond.

    Args:
        sizes: what bounds are aligned to.
        num_buckets: most buckets, the large one included.
        window: how many of the latest lengths count.
        every: after how many lengths the bounds are computed anew.
        widths: of the buckets before that.
        is_static: whether the bounds stay as they are.
        rule: see above.

    Raises:
        ConfigError: a number is too small, or there are no such widths.
    """

    def __init__(
        self,
        sizes: Granularity,
        num_buckets: int = 8,
        window: int = 1000,
        every: int = 100,
        widths: Widths = "doubling",
        *,
        is_static: bool = False,
        rule: Rule = "least waste",
    ) -> None:
        if num_buckets < 2 or window < 1 or every < 1:
            raise ConfigError(
                f"{num_buckets} buckets from {window} lengths, every {every} of them; give at "
                "least 2 buckets and 1 length"
            )
        if widths not in get_args(Widths):
            raise ConfigError(f"unknown widths {widths!r}; choose {', '.join(get_args(Widths))}")
        self.sizes = sizes
        self._is_static = is_static
        self._rule: Rule = rule
        self._every = every
        num_regular = num_buckets - 1
        self._levels = _TOP_LEVEL * np.arange(1, num_buckets) / num_regular
        self._lengths = np.zeros(window, np.int64)  # a ring
        self._num_seen = 0
        if widths == "equal":
            parts = [number / num_buckets for number in range(1, num_buckets)]
        else:
            parts = [0.5**number for number in range(1, num_buckets)]
        self._bounds = self._aligned([int(part * sizes.max_tokens) for part in parts])

    @property
    def bounds(self) -> tuple[int, ...]:
        """The bounds, ascending, in tokens. The last one is the large bucket's."""
        return self._bounds

    def observe(self, num_tokens: int) -> None:
        """Count the length of a finished sequence, in tokens."""
        if self._is_static:
            return
        self._lengths[self._num_seen % len(self._lengths)] = num_tokens
        self._num_seen += 1
        if self._num_seen % self._every == 0:
            lengths = self._lengths[: self._num_seen]
            levels = self._levels if self._rule == "equal shares" else _CANDIDATES
            # A quantile that is itself a length: nothing between two of them is worth a bucket.
            found = np.quantile(lengths, levels, method="higher")
            if self._rule == "least waste":
                sizes = np.unique([self.sizes.align(length) for length in found.tolist()])
                fitting = lengths[lengths <= sizes[-1]]
                found = np.array(least_waste(fitting, sizes, len(self._levels)))
            self._bounds = self._aligned(found.tolist())

    def of(self, total: int | None, num_tokens: int = 0) -> int | None:
        """The bound of a sequence's regular bucket, in tokens; None for the large bucket.

        Args:
            total: the length that it is expected to have; None if no regular bucket is to be had.
            num_tokens: tokens that it has already. With as many as were expected, what was expected
                is wrong, and the large bucket is right.
        """
        if total is None or num_tokens >= total:
            return None
        number = bisect_left(self._bounds, total)
        return self._bounds[number] if number < len(self._bounds) - 1 else None

    def _aligned(self, bounds: list[int]) -> tuple[int, ...]:
        """Aligned bounds, each once, and that of the large bucket."""
        most = self.sizes.max_tokens
        regular = {self.sizes.align(bound) for bound in bounds if bound > 0}
        return (*sorted(bound for bound in regular if bound < most), most)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a forecast is turned into the length that a bucket must hold.

    A bucket is chosen for the length that the output does not exceed with a probability of `level`.
    The mean says less: how often a length exceeds it depends on the distribution, and of a heavy
    tail it is far above most lengths. A forecast that is calibrated then lets a share of
    `1 - level` of the sequences outgrow their regions, each of which costs a copy and a place in
    the large bucket. A calibrated quantile is a hedge already, so the inflation is small: it stands
    for what the forecast does not know of its own errors.

    The uncertainty is an entropy. For a log-normal forecast, it is about 0.40 with a spread by a
    factor of 1.25, 0.58 by 1.65 and 0.74 by 2.7 (one standard deviation). The default threshold
    lets those pass that know a length to about a factor of 2.7.

    Attributes:
        threshold: uncertainty above which a request goes to the large bucket (tau, section 3.4).
        inflation: the estimate grows by this times the uncertainty (alpha, section 3.3).
        level: quantile of the forecast to take as its estimate; None for its mean.

    Raises:
        ConfigError: a number is out of its range.
    """

    threshold: float = 0.75
    inflation: float = 0.1
    level: float | None = 0.9

    def __post_init__(self) -> None:
        if not (0 <= self.threshold <= 1 and self.inflation >= 0):
            raise ConfigError(
                f"the routing threshold is {self.threshold} and the inflation {self.inflation}; "
                "they must be from 0 to 1, and at least 0"
            )
        if self.level is not None and not 0 < self.level <= 1:
            raise ConfigError(f"the level of a forecast is {self.level}; it must be in (0, 1]")

    def total(self, num_prompt: int, forecast: Forecast | None, most_total: int) -> int | None:
        """The length to choose a bucket for, in tokens; None if that must be the large bucket.

        Args:
            num_prompt: tokens of the prompt.
            forecast: forecast of the output; None if there is none.
            most_total: tokens at which the sequence is ended, prompt included.
        """
        if forecast is None:
            return None
        forecast = forecast.limited(max(most_total - num_prompt, 1))
        uncertainty = forecast.uncertainty
        if uncertainty > self.threshold:
            return None
        estimate = forecast.mean if self.level is None else forecast.quantile(self.level)
        # Rounded, so that 100 * (1 + 0.1 * 0.0) does not become 101.
        output = int(np.ceil(round(estimate * (1 + self.inflation * uncertainty), 6)))
        return min(num_prompt + max(output, 1), most_total)


class BucketPool:
    """Pieces of an arena of blocks, with a list of free pieces for each size.

    A piece is taken from the list of its size, which is one step. If that is empty it is carved out
    of free space; and if no space is large enough, all free pieces of other sizes are merged back
    into space first. A piece that is given back goes to the list of its size.

    The last `reserve_blocks` are for the large bucket alone, which by default takes pieces there if
    it finds none elsewhere.

    Invariants, in each of the two parts: pieces in use, free pieces and space tile the part; each
    free piece is in the list of its size, once.

    Args:
        num_blocks: size of the arena.
        reserve_blocks: the part of it that regular buckets may not have.
    """

    def __init__(self, num_blocks: int, reserve_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.reserve_blocks = reserve_blocks
        first = num_blocks - reserve_blocks
        self._parts = (_Pieces(0, first), _Pieces(first, reserve_blocks))
        self._is_large: dict[int, bool] = {}  # of each piece in use, by its first block

    def take(
        self, num_blocks: int, *, is_large: bool = False, reserve_first: bool = False
    ) -> range | None:
        """Take neighbouring blocks; None, and nothing is taken, if there are not so many.

        Args:
            num_blocks: how many; at least 1.
            is_large: whether they are for the large bucket.
            reserve_first: whether the large bucket takes them from the reserve if it can.
        """
        parts = self._parts if is_large else self._parts[:1]
        for part in reversed(parts) if reserve_first else parts:
            start = part.take(num_blocks)
            if start is not None:
                self._is_large[start] = is_large
                return range(start, start + num_blocks)
        return None

    def give(self, start: int) -> None:
        """Give back the piece that begins at a block.

        Raises:
            InvariantError: none in use begins there.
        """
        if self._is_large.pop(start, None) is None:
            raise InvariantError(f"no piece in use begins at block {start}")
        self._part_of(start).give(start)

    def has(self, num_blocks: int, *, is_large: bool = False) -> bool:
        """Whether a bucket could take so many blocks without merging pieces."""
        parts = self._parts if is_large else self._parts[:1]
        return any(part.largest_free >= num_blocks for part in parts)

    @property
    def num_used(self) -> int:
        """Number of pieces in use."""
        return len(self._is_large)

    @property
    def free_blocks(self) -> int:
        """Blocks that are in no piece in use, those of the reserve included."""
        return self.num_blocks - sum(sum(part.used.values()) for part in self._parts)

    @property
    def largest_free_blocks(self) -> int:
        """Blocks of the largest piece that a regular bucket could take without merging others."""
        return self._parts[0].largest_free if self._is_large else self._parts[0].num_blocks

    @property
    def occupancy(self) -> dict[tuple[int, bool], int]:
        """Number of pieces in use, by their size in blocks and whether they are of the large
        bucket."""
        return dict(
            Counter(
                (self._part_of(start).used[start], is_large)
                for start, is_large in self._is_large.items()
            )
        )

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            InvariantError: one does not hold.
        """
        for part in self._parts:
            part.check()
        used = self._parts[0].used.keys() | self._parts[1].used.keys()
        if used != self._is_large.keys():
            raise InvariantError("the parts disagree with the pool about what is in use")
        if not all(self._is_large[start] for start in self._parts[1].used):
            raise InvariantError("a regular bucket has a piece of the reserve")

    def check_empty(self) -> None:
        """Verify that no piece is in use, and that the free ones merge into one space in each part.

        Raises:
            InvariantError: a piece is in use, or a fragment is lost.
        """
        self.check()
        if self.num_used or not all(part.merges_into_one() for part in self._parts):
            raise InvariantError("pieces are in use, or fragments do not merge into one space")

    def _part_of(self, start: int) -> _Pieces:
        return self._parts[start >= self.num_blocks - self.reserve_blocks]


class _Pieces:
    """The pieces of [first, first + num_blocks).

    Attributes:
        num_blocks: as given.
        used: number of blocks of each piece in use, by its first block.
    """

    def __init__(self, first: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.used: dict[int, int] = {}
        self._first = first
        # Pieces, in use or free, are its allocated regions; in units of a block.
        self._space = RegionList(num_blocks, align_bytes=1)
        self._free: dict[int, list[int]] = {}  # by size, the latest given back last

    def take(self, num_blocks: int) -> int | None:
        """The first block of a piece; None if there is no room."""
        pieces = self._free.get(num_blocks)
        if pieces:
            start = pieces.pop()
        else:
            found = self._space.acquire(num_blocks)
            if found is None and self._merge():
                found = self._space.acquire(num_blocks)
            if found is None:
                return None
            start = self._first + found
        self.used[start] = num_blocks
        return start

    def give(self, start: int) -> None:
        """The opposite of `take`."""
        self._free.setdefault(self.used.pop(start), []).append(start)

    @property
    def largest_free(self) -> int:
        """Blocks of the largest free piece, or of the largest space."""
        pieces = max((size for size, starts in self._free.items() if starts), default=0)
        return max(pieces, self._space.largest_gap_bytes)

    def merges_into_one(self) -> bool:
        """Merge the free pieces; returns whether all of the part is one space then."""
        self._merge()
        return self._space.largest_gap_bytes == self._space.num_bytes

    def check(self) -> None:
        """See `BucketPool.check`."""
        self._space.check()
        free = [(start, size) for size, starts in self._free.items() for start in starts]
        pieces = sorted([*free, *self.used.items()])
        found = [
            (self._first + region.start, region.num_bytes)
            for region in self._space
            if not region.is_free
        ]
        if pieces != found:
            raise InvariantError("pieces are lost, or in two places at once")

    def _merge(self) -> bool:
        """Give all free pieces back to space; returns whether there were any."""
        starts = [start for pieces in self._free.values() for start in pieces]
        for start in starts:
            self._space.release(start - self._first)
        self._free.clear()
        return bool(starts)
