"""Simulated time, and the arrivals of a trace in it."""

from __future__ import annotations

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
    """The requests of a device in order of arrival, of which the first `num_taken` are past."""

    def __init__(self) -> None:
        self._requests: list[TraceRequest] = []
        self._times_s: npt.NDArray[np.float64] = np.zeros(0)  # with room for more
        self.num_taken = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, number: int) -> TraceRequest:
        return self._requests[number]

    def add(self, request: TraceRequest) -> None:
        """Add a request after all others.

        Raises:
            ConfigError: it has no time.
        """
        if request.arrival_s is None:
            raise ConfigError("the trace has no times; give a --rate of arrivals")
        count = len(self._requests)
        if count == len(self._times_s):
            self._times_s = np.resize(self._times_s, max(2 * count, 16))
        self._times_s[count] = request.arrival_s
        self._requests.append(request)

    @property
    def next_s(self) -> float | None:
        """Time of the next arrival; None if all requests have arrived."""
        if self.num_taken == len(self._requests):
            return None
        return float(self._times_s[self.num_taken])

    def time_s(self, number: int) -> float:
        """Return the arrival time of one request."""
        return float(self._times_s[number])

    def take(self, now_s: float) -> range:
        """Take the requests that have arrived by `now_s`; return their numbers."""
        end = int(self._known_s.searchsorted(now_s, side="right"))
        taken = range(self.num_taken, end)
        self.num_taken = end
        return taken

    def num_untaken(self, times_s: npt.NDArray[np.float64]) -> IntArray:
        """Return how many requests have arrived by each time and are not taken yet: [n]."""
        return self._known_s.searchsorted(times_s, side="right") - self.num_taken

    @property
    def _known_s(self) -> npt.NDArray[np.float64]:
        return self._times_s[: len(self._requests)]
