"""Paired bootstrap as in AVMP's Table 2: intervals of differences and ratios over matched cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SEED = 20260520
NUM_RESAMPLES = 10_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the 95 % interval of its resamples."""

    point: float
    low: float
    high: float


class Bootstrap:
    """Resamples matched cells; one generator serves all comparisons, in their order."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(SEED)

    def difference(self, ours: Sequence[float], theirs: Sequence[float]) -> Interval:
        """The mean of the differences of matched cells."""
        deltas = np.array(ours, np.float64) - np.array(theirs, np.float64)
        return _interval(float(deltas.mean()), deltas[self._resamples(len(deltas))].mean(axis=1))

    def ratio(self, ours: Sequence[float], theirs: Sequence[float]) -> Interval:
        """The ratio of the means of matched cells."""
        above, below = np.array(ours, np.float64), np.array(theirs, np.float64)
        chosen = self._resamples(len(above))
        means = above[chosen].mean(axis=1) / below[chosen].mean(axis=1)
        return _interval(float(above.mean() / below.mean()), means)

    def _resamples(self, count: int) -> npt.NDArray[np.int64]:
        return self._random.integers(0, count, (NUM_RESAMPLES, count))


def _interval(point: float, means: Floats) -> Interval:
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(point, float(low), float(high))
