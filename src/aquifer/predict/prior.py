"""Lengths of recent outputs, and the forecast that follows from them alone.

Requests that are alike have outputs of like lengths: those of the same client, with prompts of a
similar length, with the same beginning of the prompt, which is a template or a system prompt. Each
such class has a window of its latest lengths, and the classes of a request lie in each other. The
forecast begins with the lengths of all requests; each narrower class then moves it the further, the
more lengths it has seen: they count as they are, and the wider class as `_WIDER` lengths more (a
Dirichlet prior). So a class that was never seen costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np

from aquifer.predict.lengths import EDGES, NUM_BINS, FloatArray, Forecast, bin_of

_WINDOW = 1000
"""Lengths that a class remembers."""

_WIDER = 20.0
"""Lengths that the forecast of the wider class counts as."""

_FEWEST = 20
"""Lengths of all requests without which there is no forecast."""

NUM_LEVELS = 4
"""All requests, and the classes that lie in each other."""

_MOST_CLASSES = 4096
"""Classes that are remembered; the one that was used least recently is forgotten first."""


_LOGS: list[float] = np.log2(EDGES[1:]).tolist()
"""Binary logarithm of the longest length of each bin."""


class _Window:
    """The latest lengths of a class, by bins."""

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_BINS)
        self.sum_logs = 0.0  # of the bins' logarithms
        self.bins: deque[int] = deque()

    def add(self, number: int) -> None:
        self.bins.append(number)
        self.counts[number] += 1
        self.sum_logs += _LOGS[number]
        if len(self.bins) > _WINDOW:
            oldest = self.bins.popleft()
            self.counts[oldest] -= 1
            self.sum_logs -= _LOGS[oldest]

    @property
    def summary(self) -> tuple[float, float]:
        """Mean of the binary logarithms, and its weight, from 0 to 1."""
        count = len(self.bins)
        return (self.sum_logs / count, count / (count + _WIDER)) if count else (0.0, 0.0)


class RecentLengths:
    """The latest lengths of a model's outputs, by classes of requests.

    It is used by one thread.
    """

    def __init__(self) -> None:
        self._all = _Window()
        self._classes: OrderedDict[Hashable, _Window] = OrderedDict()

    def observe(self, classes: Sequence[Hashable], num_tokens: int) -> None:
        """Record the length of an output that has ended.

        Args:
            classes: the classes of its request, the widest first.
            num_tokens: the length, at least 1.
        """
        number = int(bin_of(num_tokens))
        self._all.add(number)
        key: tuple[Hashable, ...] = ()
        for name in classes:
            key = (*key, name)
            window = self._classes.get(key)
            if window is None:
                window = self._classes[key] = _Window()
            window.add(number)
            self._classes.move_to_end(key)
        while len(self._classes) > _MOST_CLASSES:
            self._classes.popitem(last=False)

    def summaries(self, classes: Sequence[Hashable]) -> tuple[tuple[float, float], ...]:
        """Summarize the lengths of all requests, and of each class, the widest first.

        Returns: [NUM_LEVELS] pairs: mean of the binary logarithms of the lengths in tokens, and its
            weight, from 0 to 1, which grows with the number of lengths.
        """
        found = [self._all.summary]
        for end in range(1, NUM_LEVELS):
            window = self._classes.get(tuple(classes[:end])) if end <= len(classes) else None
            found.append((0.0, 0.0) if window is None else window.summary)
        return tuple(found)

    def forecast(self, classes: Sequence[Hashable]) -> Forecast | None:
        """The forecast for a request of these classes, the widest first; None if too little is
        known yet."""
        if len(self._all.bins) < _FEWEST:
            return None
        weights: FloatArray = _spread(self._all.counts)
        key: tuple[Hashable, ...] = ()
        for name in classes:
            key = (*key, name)
            window = self._classes.get(key)
            if window is None:
                break
            weights = window.counts + weights * (_WIDER / weights.sum())
        return Forecast.of(weights)


def _spread(counts: FloatArray) -> FloatArray:
    """Counts of bins, spread a little: lengths that were not seen are possible, and those near the
    ones that were, more than others.

    A hundredth of all goes to the bins up to twice the longest length that was seen.
    """
    spread = 0.5 * counts
    spread[1:] += 0.25 * counts[:-1]
    spread[:-1] += 0.25 * counts[1:]
    longest = int(np.flatnonzero(counts)[-1])
    last = min(longest + 4, NUM_BINS - 1)
    spread[: last + 1] += 0.01 * counts.sum() / (last + 1)
    return spread
