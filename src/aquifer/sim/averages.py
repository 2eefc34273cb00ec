"""Averages over simulated time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aquifer.sim.occupancy import COLUMNS

STEPS_PER_SUM = 1024  # single steps per summation, because small arrays are slow


class Averages:
    """Means of `COLUMNS` over simulated time."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(COLUMNS))
        self._waiting_sums = np.zeros(len(COLUMNS))
        self._waiting_s = 0.0
        self._seconds = 0.0
        # Steps that are not in the sums yet.
        self._steps_s: list[float] = []
        self._steps: list[list[int]] = []

    def add_step(self, seconds: float, values: list[int]) -> None:
        """Add an interval with constant values, one for each of `COLUMNS`."""
        self._steps_s.append(seconds)
        self._steps.append(values)
        if len(self._steps) == STEPS_PER_SUM:
            self._sum_steps()

    def add(self, seconds: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> None:
        """Add several intervals.

        Args:
            seconds: [n].
            values: [n, len(COLUMNS)].
        """
        self._sums += seconds @ values
        self._seconds += float(seconds.sum())
        waits = values[:, COLUMNS.index("waiting")] > 0
        if waits.any():
            self._waiting_sums += seconds[waits] @ values[waits]
            self._waiting_s += float(seconds[waits].sum())

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the means over all time, and over the time in which requests were waiting."""
        self._sum_steps()
        return (
            dict(zip(COLUMNS, (self._sums / (self._seconds or 1)).tolist(), strict=True)),
            dict(zip(COLUMNS, (self._waiting_sums / (self._waiting_s or 1)).tolist(), strict=True)),
        )

    @property
    def seconds(self) -> float:
        """Sum of all intervals."""
        self._sum_steps()
        return self._seconds

    @property
    def waiting_seconds(self) -> float:
        """Sum of the intervals in which requests were waiting."""
        self._sum_steps()
        return self._waiting_s

    def _sum_steps(self) -> None:
        if self._steps:
            self.add(np.array(self._steps_s), np.array(self._steps, np.float64))
            self._steps_s.clear()
            self._steps.clear()
