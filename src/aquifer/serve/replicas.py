"""How many replicas each model has needed lately, and which ones are spare for that."""

from __future__ import annotations

from collections.abc import Sequence

from aquifer.engine.policies.replicas import Replica, num_needed, spare

_WINDOW_S = 30.0
"""A replica is spare after one to two windows in which it was not needed."""


class Replicas:
    """The replicas that models have needed, by the times at which requests were placed."""

    def __init__(self) -> None:
        self._peaks: dict[str, _Peak] = {}

    def spare(self, model: str, devices: Sequence[Replica | None], now_s: float) -> list[int]:
        """The indices of the devices with a replica that the model has not needed for some time.

        Args:
            model: of which a request is to be placed.
            devices: all of them; None for one that does not have the model.
            now_s: the time.
        """
        places = [index for index, replica in enumerate(devices) if replica is not None]
        replicas = [replica for replica in devices if replica is not None]
        peak = self._peaks.setdefault(model, _Peak(now_s))
        needed = peak.note(num_needed(replicas), now_s)
        return [places[index] for index in spare(replicas, needed)]

    def forget(self, model: str) -> None:
        """A model is removed."""
        self._peaks.pop(model, None)


class _Peak:
    """The highest of numbers in the present window of time and in the one before.

    It is unbounded in the first window, of which the beginning was not seen.
    """

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._before = self._present = 10**9

    def note(self, number: int, now_s: float) -> int:
        """A number at a time, which is not earlier than the last one; returns the highest."""
        windows = (now_s - self._begun_s) // _WINDOW_S
        if windows:
            self._before = self._present if windows == 1 else 0
            self._present = 0
            self._begun_s += windows * _WINDOW_S
        self._present = max(self._present, number)
        return max(self._before, self._present)
