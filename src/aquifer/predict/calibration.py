"""Calibration of a predictor by the lengths that came: no predictor is believed without them.

Three things are learned from a sliding window of outputs that have ended:

1. By what factor the predictor is too short or too long: the median over the window. Forecasts are
   moved by as many bins.
2. How far off its probabilities are. Where half of the outputs should have ended, it is
   looked up how many had: its cumulative distribution is mapped to the one observed (quantile
   recalibration: Kuleshov et al., Accurate Uncertainties for Deep Learning Using Calibrated
   Regression, ICML 2018; the same ranks that conformal prediction uses). So a predictor that
   is too sure, or not sure enough, is set right.
3. How much it knows that recent lengths alone do not. The forecast is a mixture of both, weighted
   by how likely each had held the lengths that came. So one that is wrong in any other way is
   ignored after some dozens of outputs.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from aquifer.predict.lengths import NUM_BINS, FloatArray, Forecast, bin_of

_WINDOW = 500
"""Outputs that are remembered."""

_WARM_UP = 50.0
"""Outputs that a perfectly calibrated predictor is taken to have had before the first one."""

_FEWEST_ERRORS = 20
"""Outputs before forecasts are moved."""

_LEVELS = np.linspace(0.0, 1.0, 41)
"""Levels of the cumulative distribution at which it is mapped."""

_TAIL = 0.02
"""Part of a prediction that goes to where recent lengths are, so that no length is impossible."""

_LEAST_MASS = 1e-6


class Calibration:
    """What a window of outputs says about a predictor.

    It is used by one thread.
    """

    def __init__(self) -> None:
        self._levels: deque[float] = deque(maxlen=_WINDOW)
        # By how much more likely the predictor held each length than recent lengths did, in logs.
        self._gains: deque[float] = deque(maxlen=_WINDOW)
        # Bins by which each length was beyond the middle of what was predicted.
        self._errors: deque[int] = deque(maxlen=_WINDOW)
        self._shift = 0
        self._random = np.random.default_rng(0)
        self._map: FloatArray = _LEVELS.copy()
        self._gain = 0.0

    @property
    def weight(self) -> float:
        """Weight of the predictor in the mixture, from 0 to 1."""
        return float(1.0 / (1.0 + np.exp(-np.clip(self._gain, -50, 50))))

    def combine(self, predicted: Forecast, prior: Forecast) -> Forecast:
        """The forecast of a request.

        Args:
            predicted: what the predictor says.
            prior: what recent lengths say.
        """
        weight = self.weight
        calibrated = self._calibrate(self._raw(predicted, prior))
        return Forecast(weight * calibrated.masses + (1.0 - weight) * prior.masses)

    def observe(self, predicted: Forecast, prior: Forecast, num_tokens: int) -> None:
        """Record an output that has ended.

        Args:
            predicted: what the predictor said of it.
            prior: what recent lengths said of it, at the same time.
            num_tokens: its length.
        """
        raw = self._raw(predicted, prior)
        number = int(bin_of(num_tokens))
        calibrated = self._calibrate(raw)
        gain = np.log(max(calibrated.masses[number], _LEAST_MASS))
        gain -= np.log(max(prior.masses[number], _LEAST_MASS))
        self._gains.append(float(gain))
        self._gain = sum(self._gains)
        # Any level of the bin may be that of the length.
        below = float(raw.masses[:number].sum())
        self._levels.append(below + float(self._random.random()) * float(raw.masses[number]))
        self._errors.append(number - int(bin_of(predicted.quantile(0.5))))
        if len(self._errors) >= _FEWEST_ERRORS:
            self._shift = int(np.median(self._errors))
        counts, _ = np.histogram(self._levels, _LEVELS)
        counts = counts + _WARM_UP / len(counts)
        self._map = np.concatenate((np.zeros(1), np.cumsum(counts) / counts.sum()))

    def _raw(self, predicted: Forecast, prior: Forecast) -> Forecast:
        """A prediction, moved by the usual error, and with a tail."""
        masses = predicted.masses
        if self._shift:
            masses = np.zeros(NUM_BINS)
            bins = np.clip(np.arange(NUM_BINS) + self._shift, 0, NUM_BINS - 1)
            np.add.at(masses, bins, predicted.masses)
        return Forecast((1.0 - _TAIL) * masses + _TAIL * prior.masses)

    def _calibrate(self, forecast: Forecast) -> Forecast:
        """Map a forecast's cumulative distribution to the one that was observed."""
        ends = np.interp(np.cumsum(forecast.masses), _LEVELS, self._map)
        ends[-1] = 1.0
        return Forecast(np.diff(ends, prepend=0.0))
