"""Where the time of a server's start goes, for one line of its log."""

from __future__ import annotations

import time
from collections.abc import Callable

from aquifer.engine.reports import LoadProgress, Stage

_FIRST = "processes and devices"
_LAST = "first steps and web side"
_NAMES: dict[Stage, str] = {"weights": "weights", "kernels": "kernels", "steps": "captured steps"}


class StartTimes:
    """Seconds of a start, by what was done.

    The time from one report of progress to the next counts for the stage of the latter, and that
    before the first report for the processes and devices. Several devices are loaded at once, and
    so the parts are those of all together.

    Args:
        clock_s: returns the time in seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._begun_s = self._noted_s = clock_s()
        self._parts_s: dict[str, float] = {}

    def update(self, progress: LoadProgress) -> None:
        """Note a report of progress."""
        self._note(_NAMES[progress.stage] if self._parts_s else _FIRST)

    def summary(self) -> str:
        """The line: the whole time until now, and each part. Called once, when all is ready."""
        self._note(_LAST if self._parts_s else _FIRST)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts_s.items())
        return f"Started in {self._noted_s - self._begun_s:.1f} s: {parts}"

    def _note(self, part: str) -> None:
        now_s = self._clock_s()
        self._parts_s[part] = self._parts_s.get(part, 0.0) + now_s - self._noted_s
        self._noted_s = now_s
