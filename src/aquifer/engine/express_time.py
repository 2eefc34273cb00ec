"""Express time: the time that a model's steps may take for some clients without the others."""

from __future__ import annotations

from collections.abc import Callable

_BURST_S = 0.5
"""Most seconds that express steps may take in a row, when there were none for long."""


class ExpressTime:
    """A token bucket of seconds: it fills at a share of the time, up to half a second.

    Express steps (`aquifer.engine.policies.express`) take at most that share of the time, for all
    clients together, so other steps are delayed by no more than that. If none ran for a while, the
    bucket is full, and a small client gets its first tokens nearly as fast as from an idle server.

    Args:
        share: of the time, from 0 (none) to 1.
        clock_s: returns the time in seconds.
    """

    def __init__(self, share: float, clock_s: Callable[[], float]) -> None:
        self._share = share
        self._clock_s = clock_s
        self._left_s = _BURST_S if share else 0.0
        self._filled_s = clock_s()

    def is_left(self) -> bool:
        """Whether another express step may begin."""
        now_s = self._clock_s()
        self._left_s = min(_BURST_S, self._left_s + self._share * (now_s - self._filled_s))
        self._filled_s = now_s
        return self._left_s > 0

    def take(self, seconds: float) -> None:
        """Account for an express step that took so long."""
        self._left_s -= seconds
