"""Residents: the model that gives its memory to one that waits to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aquifer.engine.policies.least_run import least_run_s


class ResidentsSnapshot(NamedTuple):
    """Models that run, and one that waits for the memory that they hold."""

    load_s: float  # seconds to load the one that waits
    ran_s: Sequence[float]  # of each that runs: seconds since it was loaded


Residents = Callable[[ResidentsSnapshot], int | None]
"""Gives the index of the model that gives way, or None if the other is to wait."""


def longest_resident(snapshot: ResidentsSnapshot) -> int | None:
    """The model that has been resident for longest gives way, after a least time."""
    load_s, ran_s = snapshot
    index = max(range(len(ran_s)), key=lambda i: ran_s[i])
    return index if ran_s[index] >= least_run_s(load_s) else None
