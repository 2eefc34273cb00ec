"""Residents: the model that gives its memory to one that waits to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aquifer.engine.policies.least_run import least_run_s, long_run_s, short_run_s


class Resident(NamedTuple):
    """A model that runs."""

    ran_s: float  # seconds since it was loaded
    save_s: float = 0.0  # seconds to copy the KV of its requests to the host
    has_streamed: bool = False  # whether it may give way soon: all its requests have had a token


class ResidentsSnapshot(NamedTuple):
    """Models that run, and one that waits for the memory that they hold."""

    load_s: float  # seconds to load the one that waits, and the KV of its requests from the host
    residents: Sequence[Resident]
    has_new: bool = False  # whether a request waits that has had no token
    can_wait: bool = False  # whether none does, and the model has not waited for long


Residents = Callable[[ResidentsSnapshot], int | None]
"""Gives the index of the model that gives way, or None if the other is to wait."""


def longest_resident(snapshot: ResidentsSnapshot) -> int | None:
    """The model that has been resident for longest gives way, after a least time.

    That depends on what the change costs. Where requests have much KV, copies of it take longer
    than weights; by these alone, models would do little else than give way to each other.

    It also depends on who waits. A request for its first token waits in vain, and tokens of others
    come a little later: so turns are long between models whose requests have all had one, and such
    a model gives way soon to one with a new request.
    """
    residents = snapshot.residents
    able = [
        index
        for index, resident in enumerate(residents)
        if resident.ran_s >= _run_s(snapshot, resident)
    ]
    return max(able, key=lambda index: residents[index].ran_s, default=None)


def _run_s(snapshot: ResidentsSnapshot, resident: Resident) -> float:
    """Seconds that a model runs before it gives way."""
    change_s = snapshot.load_s + resident.save_s
    if snapshot.can_wait:
        return long_run_s(change_s)
    if snapshot.has_new and resident.has_streamed:
        return short_run_s(change_s)
    return least_run_s(change_s)
