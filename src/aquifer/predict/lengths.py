"""Forecast of an output's length: a distribution over fixed bins.

The bins are the same everywhere, so that forecasts can be mixed, compared and kept in arrays. They
are geometric, each 19 % longer than the one before: 75 of them reach a million tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LEAST_LEFT = 1e-4
"""Probability below which a forecast no longer says anything about an output that goes on."""


def _edges() -> IntArray:
    geometric = np.floor(2 ** (np.arange(4 * 20 + 1) / 4)).astype(np.int64)
    return np.concatenate((np.zeros(1, np.int64), np.unique(geometric)))


EDGES: IntArray = _edges()
"""Bin k holds the lengths above EDGES[k] and up to EDGES[k + 1], in tokens; the first edge is 0."""

NUM_BINS = len(EDGES) - 1


def bin_of(num_tokens: npt.ArrayLike) -> IntArray:
    """The bin of each length; a length beyond the last edge is in the last bin.

    Args:
        num_tokens: at least 1 each.
    """
    bins = np.searchsorted(EDGES, num_tokens, side="left") - 1
    return np.minimum(bins, NUM_BINS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Distribution of the length of an output, in tokens. Within a bin, lengths are equally likely.

    Args:
        masses: [NUM_BINS] probabilities, which add up to 1.
        exact: the length itself, if it is known; the masses are those of its bin then.
    """

    masses: FloatArray
    exact: int | None = None

    @classmethod
    def of(cls, weights: npt.ArrayLike) -> Forecast:
        """Make a forecast of weights of the bins, [NUM_BINS], of which one is above 0."""
        masses = np.asarray(weights, np.float64)
        return cls(masses / masses.sum())

    @classmethod
    def certain(cls, num_tokens: int) -> Forecast:
        """Make the forecast of a length that is known."""
        masses = np.zeros(NUM_BINS)
        masses[bin_of(num_tokens)] = 1.0
        return cls(masses, num_tokens)

    @property
    def mean(self) -> float:
        """Expected length, tokens."""
        if self.exact is not None:
            return float(self.exact)
        return float(self.masses @ ((EDGES[:-1] + EDGES[1:] + 1) / 2))

    @property
    def uncertainty(self) -> float:
        """Entropy of the bins, divided by the largest one possible: from 0 to 1 (ODMA, 3.2)."""
        if self.exact is not None:
            return 0.0
        masses = self.masses[self.masses > 0]
        return float(-(masses @ np.log(masses)) / np.log(NUM_BINS))

    def cumulative(self, num_tokens: npt.ArrayLike) -> FloatArray:
        """Probability that the output is at most so long."""
        tokens = np.asarray(num_tokens)
        if self.exact is not None:
            return np.asarray(tokens >= self.exact, np.float64)
        ends = np.concatenate((np.zeros(1), np.cumsum(self.masses)))
        return np.asarray(np.interp(tokens, EDGES, ends))

    def quantile(self, share: float) -> int:
        """The least length that the output does not exceed with a probability of `share`, tokens.

        Args:
            share: above 0, at most 1.
        """
        if self.exact is not None:
            return self.exact
        ends = np.cumsum(self.masses)
        number = min(int(np.searchsorted(ends, share - 1e-12)), NUM_BINS - 1)
        begin = ends[number - 1] if number else 0.0
        part = (share - begin) / self.masses[number] if self.masses[number] else 1.0
        width = EDGES[number + 1] - EDGES[number]
        return max(int(np.ceil(EDGES[number] + part * width - 1e-9)), 1)

    def after(self, num_tokens: int) -> Forecast | None:
        """The forecast of what is still to come of an output that has `num_tokens` already.

        None if it is longer than it was ever expected to become.
        """
        if not num_tokens:
            return self
        if self.exact is not None:
            return Forecast.certain(self.exact - num_tokens) if self.exact > num_tokens else None
        ends = self.cumulative(EDGES + num_tokens)
        left = float(1.0 - ends[0])
        if left < LEAST_LEFT:
            return None
        masses = np.diff(ends) / left
        masses[-1] += 1.0 - masses.sum()
        return Forecast(np.maximum(masses, 0.0))

    def limited(self, most_tokens: int) -> Forecast:
        """The forecast of an output that is ended when it has `most_tokens`."""
        if self.exact is not None:
            return Forecast.certain(min(self.exact, most_tokens))
        last = int(bin_of(most_tokens))
        if not self.masses[last + 1 :].any():
            return self
        masses = self.masses.copy()
        masses[last] += masses[last + 1 :].sum()
        masses[last + 1 :] = 0.0
        return Forecast(masses)
