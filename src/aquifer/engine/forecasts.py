"""Forecasts of the running sequences of a model, by slot, and the memory that they lead to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import IntArray
from aquifer.cache.footprint import Footprint
from aquifer.predict.lengths import EDGES, LEAST_LEFT, NUM_BINS, Forecast

FloatArray = npt.NDArray[np.float64]

_WIDTHS = np.diff(EDGES)
_BIN_OF = np.repeat(np.arange(NUM_BINS, dtype=np.uint8), _WIDTHS)[np.r_[0, : EDGES[-1]]]
"""The bin of each length; that of no tokens is the first."""

HORIZONS: IntArray = np.unique(np.round(1.5 ** np.arange(23)).astype(np.int64))
"""Steps from now at which the expected memory is computed: each step in the beginning, then ever
rarer, up to 7 500."""

_STALE_TOKENS = 16
"""Tokens after which what is expected of a sequence is computed anew; and for others at the same
time that have got half as many, since the cost is by the call."""

_NEVER = -_STALE_TOKENS


class Change(NamedTuple):
    """How the pages of sequences will have changed at each horizon.

    Attributes:
        mean: [HORIZONS], pages expected more than now; negative when sequences have ended.
        variance: [HORIZONS], the variance of that.
    """

    mean: FloatArray
    variance: FloatArray

    @classmethod
    def none(cls) -> Change:
        """No sequences."""
        return cls(np.zeros(len(HORIZONS)), np.zeros(len(HORIZONS)))

    def __add__(self, other: object) -> Change:
        """Both changes; what sequences do is independent."""
        assert isinstance(other, Change)
        return Change(self.mean + other.mean, self.variance + other.variance)

    def peak(self, deviations: float) -> int:
        """Pages more than now at the worst horizon, so many standard deviations above the mean."""
        return int(np.ceil((self.mean + deviations * np.sqrt(self.variance)).max()))


class SlotForecasts:
    """Forecasts of outputs in columns, indexed by slot.

    Args:
        num_slots: number of slots, slot 0 included.
    """

    def __init__(self, num_slots: int) -> None:
        # Probability that an output is longer than each edge of the bins.
        self._longer = np.ones((num_slots, NUM_BINS + 1), np.float32)
        self._exact = np.zeros(num_slots, np.int64)  # 0 where it is not known
        self.is_known = np.zeros(num_slots, np.bool_)
        # What is expected of each sequence at each horizon, and how long it was at that time.
        self._mean = np.zeros((num_slots, len(HORIZONS)))
        self._variance = np.zeros((num_slots, len(HORIZONS)))
        self._at_tokens = np.full(num_slots, _NEVER)

    def set(self, slot: int, forecast: Forecast | None) -> None:
        """Enter the forecast of the sequence that gets a slot."""
        self.is_known[slot] = forecast is not None
        self._exact[slot] = 0
        self._at_tokens[slot] = _NEVER
        if forecast is not None:
            self._exact[slot] = forecast.exact or 0
            self._longer[slot, 1:] = np.maximum(1.0 - np.cumsum(forecast.masses), 0.0)

    def survival(self, slots: IntArray, num_outputs: IntArray, more: IntArray) -> FloatArray:
        """Probability that outputs go on for some tokens more, given that they have not ended yet.

        Args:
            slots: [n], with known forecasts.
            num_outputs: [n], tokens of each output so far.
            more: [m], numbers of tokens.

        Returns: [n, m].
        """
        then = num_outputs[:, None] + np.concatenate((np.zeros(1, np.int64), more))
        longer = self._longer_than(slots, then)
        now = longer[:, :1]
        # What has outlived its forecast goes on as long as it has run: of such tails half end
        # until they are twice as long.
        tail = (num_outputs + 1)[:, None] / (num_outputs[:, None] + 1 + more)
        with np.errstate(divide="ignore", invalid="ignore"):
            given = np.where(now > LEAST_LEFT, np.minimum(longer[:, 1:] / now, 1.0), tail)
        exact = self._exact[slots]
        if exact.any():
            given = np.where(exact[:, None] > 0, then[:, 1:] < exact[:, None], given)
        return np.asarray(given, np.float64)

    def expected_left(self, slots: IntArray, num_outputs: IntArray) -> FloatArray:
        """Tokens that each output is expected to have more than now, [n]."""
        survival = self.survival(slots, num_outputs, HORIZONS)
        before = np.concatenate((np.ones((len(slots), 1)), survival[:, :-1]), axis=1)
        steps = np.diff(HORIZONS, prepend=0).astype(np.float64)
        return np.asarray(((before + survival) / 2) @ steps)

    def change(
        self,
        footprint: Footprint,
        slots: IntArray,
        lengths: IntArray,
        num_prompt: IntArray,
        most: IntArray,
    ) -> Change:
        """How the memory of running sequences will change, of those with forecasts.

        What is expected of a sequence is kept for some tokens.

        Args:
            footprint: footprint of the model's sequences.
            slots: [n], their slots.
            lengths: [n], tokens of each sequence now.
            num_prompt: [n], those of them that are the prompt.
            most: [n], tokens that each can have at most.
        """
        known = self.is_known[slots]
        if not known.any():
            return Change.none()
        if not known.all():
            slots, lengths, num_prompt, most = (
                part[known] for part in (slots, lengths, num_prompt, most)
            )
        ages = lengths - self._at_tokens[slots]
        if ages.max() >= _STALE_TOKENS:
            stale = (ages >= _STALE_TOKENS // 2).nonzero()[0]
            self._refresh(footprint, slots[stale], lengths[stale], num_prompt[stale], most[stale])
        return Change(self._mean[slots].sum(0), self._variance[slots].sum(0))

    def _refresh(
        self,
        footprint: Footprint,
        slots: IntArray,
        lengths: IntArray,
        num_prompt: IntArray,
        most: IntArray,
    ) -> None:
        """Compute what is expected of some sequences; the arguments are those of `change`."""
        survival = self.survival(slots, np.maximum(lengths - num_prompt, 0), HORIZONS)
        then = np.minimum(lengths[:, None] + HORIZONS, most[:, None])
        pages = np.asarray(footprint.pages(then))
        expected = survival * pages
        self._mean[slots] = expected - np.asarray(footprint.pages(lengths))[:, None]
        self._variance[slots] = expected * (1.0 - survival) * pages
        self._at_tokens[slots] = lengths

    def _longer_than(self, slots: IntArray, num_tokens: IntArray) -> npt.NDArray[np.float32]:
        """Probability that each output is longer than some numbers of tokens, [n, m]."""
        bins = _BIN_OF[np.minimum(num_tokens, EDGES[-1])]
        part = (num_tokens - EDGES[bins]) / _WIDTHS[bins]
        rows = slots[:, None]
        begin, end = self._longer[rows, bins], self._longer[rows, bins + 1]
        return np.asarray(begin + (end - begin) * np.minimum(part, 1.0), np.float32)
