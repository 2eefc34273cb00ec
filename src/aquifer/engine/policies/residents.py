"""Residents: the model that gives its memory to one that waits to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aquifer.engine.policies.least_run import least_run_s


class Resident(NamedTuple):
    """A model that runs."""

    ran_s: float  # seconds since it was loaded
    save_s: float = 0.0  # seconds to copy the KV of its requests to the host


class ResidentsSnapshot(NamedTuple):
    """Models that run, and one that waits for the memory that they hold."""

    load_s: float  # seconds to load the one that waits, and the KV of its requests from the host
    residents: Sequence[Resident]


Residents = Callable[[ResidentsSnapshot], int | None]
"""Gives the index of the model that gives way, or None if the other is to wait."""


def longest_resident(snapshot: ResidentsSnapshot) -> int | None:
    """The model that has been resident for longest gives way, after a least time.

    That depends on what the change costs. Where requests have much KV, copies of it take longer
    than weights; by these alone, models would do little else than give way to each other.
    """
    load_s, residents = snapshot
    able = [
        index
        for index, resident in enumerate(residents)
        if resident.ran_s >= least_run_s(load_s + resident.save_s)
    ]
    return max(able, key=lambda index: residents[index].ran_s, default=None)
