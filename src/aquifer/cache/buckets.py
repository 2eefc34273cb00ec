"""Buckets of lengths, and the free regions of each (ODMA, sections 3.3 to 3.5).

A bucket is an upper bound of the length of a sequence, prompt and output together, since both lie
in one region. A request gets a region of the smallest bucket that holds what it is expected to
become; one of which too little is known, and one that has outgrown its region, gets a region as
large as it can ever need: the paper's large bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from aquifer.errors import InvariantError
from aquifer.memory.regions import RegionList
from aquifer.predict.lengths import Forecast

_WINDOW = 1000
"""Sequences whose lengths determine the bounds."""

_REFRESH = 50
"""Sequences that end between two updates of the bounds."""

_MIN_PARTS, _MID_PARTS = 256, 32
"""Parts of the longest sequence that bounds are multiples of: small ones, and large ones."""

_ESTIMATE = 0.8
"""Quantile of a forecast that stands for the length: not the mean, which a heavy tail moves far
beyond most lengths, while a region that is too short costs a copy."""


class BucketBounds:
    """Upper bounds of the buckets, in tokens, from the lengths of sequences that have ended.

    They are quantiles at equal steps over a sliding window, so that each bucket gets about as many
    sequences, rounded up to one of two granularities: small ones for short buckets, and larger ones
    for long ones. The longest sequence is always a bound. New bounds are for later requests.

    Args:
        max_tokens: the longest sequence.
        block_tokens: granularities are multiples of it.
        num_buckets: the most buckets.
        is_static: keep equal widths for ever, as S3 does.

    Attributes:
        bounds: ascending; the last is the longest sequence.
    """

    def __init__(
        self, max_tokens: int, block_tokens: int, num_buckets: int = 8, *, is_static: bool = False
    ) -> None:
        self._max_tokens = max_tokens
        self._small = _round_up(-(-max_tokens // _MIN_PARTS), block_tokens)
        self._large = _round_up(-(-max_tokens // _MID_PARTS), self._small)
        self._num_buckets = num_buckets
        self._is_static = is_static
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._num_seen = 0
        # Before anything is known: equal widths.
        widths = np.arange(1, num_buckets + 1) * max_tokens / num_buckets
        self.bounds = self._aligned(widths)

    def observe(self, num_tokens: int) -> None:
        """Record the length of a sequence that has ended."""
        self._lengths.append(num_tokens)
        self._num_seen += 1
        if self._num_seen % _REFRESH == 0 and not self._is_static:
            levels = np.arange(1, self._num_buckets + 1) / self._num_buckets
            self.bounds = self._aligned(np.quantile(list(self._lengths), levels))

    def bound(self, num_tokens: int) -> int:
        """The smallest bound that is not below a length; the longest sequence if all are."""
        index = int(np.searchsorted(self.bounds, num_tokens))
        return self.bounds[min(index, len(self.bounds) - 1)]

    def _aligned(self, lengths: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[int]:
        """Lengths as bounds: rounded up, each once, with the longest sequence."""
        bounds = {self._max_tokens}
        for length in lengths.tolist():
            is_long = length > 4 * self._large
            bound = _round_up(int(np.ceil(length)), self._large if is_long else self._small)
            bounds.add(min(bound, self._max_tokens))
        return sorted(bounds)


class Router:
    """Chooses how many tokens to reserve for a request (ODMA, sections 3.3 and 3.4).

    Args:
        bounds: the buckets.
        threshold: uncertainty above which a request gets the large bucket (tau), from 0 to 1.
        inflation: how much the estimate is raised by uncertainty (alpha).
    """

    def __init__(self, bounds: BucketBounds, threshold: float, inflation: float) -> None:
        self._bounds = bounds
        self._threshold = threshold
        self._inflation = inflation

    def tokens(self, num_prompt: int, num_most: int, forecast: Forecast | None) -> int:
        """Tokens to reserve.

        Args:
            num_prompt: tokens that the sequence has.
            num_most: tokens that it can have at most.
            forecast: of the tokens that follow; None for the large bucket.
        """
        if forecast is None or forecast.uncertainty > self._threshold:
            return num_most
        output = forecast.quantile(_ESTIMATE) * (1.0 + self._inflation * forecast.uncertainty)
        wanted = num_prompt + int(np.ceil(output))
        return num_most if wanted > num_most else min(self._bounds.bound(wanted), num_most)


class BucketPool:
    """Regions of an arena, in units, with a free list for each size (ODMA, section 3.5).

    A region that is given back waits in the free list of its size, where the next of that size
    takes it in constant time. What no list has is carved from free space; where that does not
    suffice, all free regions are joined to it again.

    Where the arena has room for two of the largest, one is set aside for sequences that get the
    large bucket or have outgrown their regions.

    Args:
        num_units: size of the arena.
        largest: units of the largest region.
    """

    def __init__(self, num_units: int, largest: int) -> None:
        self.num_units = num_units
        self._space = RegionList(num_units, 1)
        self._free: dict[int, list[int]] = {}  # starts by size
        self._used: dict[int, int] = {}  # sizes by start
        self._largest = largest
        self._reserve: int | None = None
        self._fill_reserve()

    @property
    def is_empty(self) -> bool:
        """Whether no region is in use."""
        return not self._used

    @property
    def used_units(self) -> int:
        """Units of all regions in use."""
        return sum(self._used.values())

    def regions(self) -> Iterator[range]:
        """The regions in use."""
        for start, size in self._used.items():
            yield range(start, start + size)

    def take(self, size: int, *, may_have_reserve: bool = False) -> range | None:
        """Take a region.

        Args:
            size: its units.
            may_have_reserve: whether it may be cut from what is set aside.

        Returns: the region, or None if there is no room for it in one piece.
        """
        starts = self._free.get(size)
        start = starts.pop() if starts else self._space.acquire(size)
        if start is None:
            self._join()
            start = self._space.acquire(size)
        if start is None and may_have_reserve and self._reserve is not None:
            self._space.release(self._reserve)
            self._reserve = None
            start = self._space.acquire(size)
        if start is None:
            return None
        self._used[start] = size
        return range(start, start + size)

    def give(self, region: range) -> None:
        """Give a region back.

        Raises:
            InvariantError: it is not in use.
        """
        if self._used.pop(region.start, None) != len(region):
            raise InvariantError(f"no region {region} is in use")
        self._free.setdefault(len(region), []).append(region.start)
        if self._reserve is None:
            self._fill_reserve()

    def check(self) -> None:
        """Verify that regions in use, free ones, the reserve and free space are the whole arena.

        Raises:
            InvariantError: they are not.
        """
        self._space.check()
        pieces = {start: size for size, starts in self._free.items() for start in starts}
        pieces |= self._used
        if self._reserve is not None:
            pieces[self._reserve] = self._largest
        found = {each.start: each.num_bytes for each in self._space if not each.is_free}
        if pieces != found:
            raise InvariantError(f"the arena has {found}, and the books {pieces}")

    def _join(self) -> None:
        """Make free space of all free regions."""
        for starts in self._free.values():
            for start in starts:
                self._space.release(start)
        self._free.clear()

    def _fill_reserve(self) -> None:
        """Set the largest region aside, if the arena has room for two and one is free now."""
        if self.num_units < 2 * self._largest:
            return
        self._reserve = self._space.acquire(self._largest)
        if self._reserve is None and self._free:
            self._join()
            self._reserve = self._space.acquire(self._largest)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
