"""Simulated time, and the arrivals of a trace in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import IntArray
from aquifer.errors import ConfigError
from aquifer.sim.trace import TraceRequest


@dataclass(slots=True)
class Clock:
    """The time, in seconds since the start of the trace."""

    now_s: float = 0.0


class Arrivals:
    """Arrival times of a trace's requests, of which the first `num_taken` are past.

    Args:
        requests: in order of arrival.

    Raises:
        ConfigError: a request has no time.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        times_s = [request.arrival_s for request in requests if request.arrival_s is not None]
        if len(times_s) < len(requests):
            raise ConfigError("the trace has no times; give a --rate of arrivals")
        self._times_s = np.array(times_s)
        self.num_taken = 0

    @property
    def next_s(self) -> float | None:
        """Time of the next arrival; None if all requests have arrived."""
        if self.num_taken == len(self._times_s):
            return None
        return float(self._times_s[self.num_taken])

    def time_s(self, number: int) -> float:
        """Return the arrival time of one request."""
        return float(self._times_s[number])

    def take(self, now_s: float) -> range:
        """Take the requests that have arrived by `now_s`; return their numbers."""
        end = int(self._times_s.searchsorted(now_s, side="right"))
        taken = range(self.num_taken, end)
        self.num_taken = end
        return taken

    def num_untaken(self, times_s: npt.NDArray[np.float64]) -> IntArray:
        """Return how many requests have arrived by each time and are not taken yet: [n]."""
        return self._times_s.searchsorted(times_s, side="right") - self.num_taken
