"""Relief: the model that gives its memory to requests of another one that wait for KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aquifer.engine.policies.least_run import least_run_s, short_run_s


class Holder(NamedTuple):
    """A model that runs."""

    ran_s: float  # seconds since it was loaded
    load_s: float  # seconds to load its weights
    num_bytes: int  # of its weights
    num_running: int  # requests
    has_streamed: bool = False  # whether all of its requests have had their first token


class ReliefSnapshot(NamedTuple):
    """A request that waits for KV though its model is there, and the other models that run."""

    waited_s: float  # how long it has waited since its model is there
    holders: Sequence[Holder]
    is_new: bool = False  # whether the request has had no token yet


Relief = Callable[[ReliefSnapshot], int | None]
"""Gives the index of the model that gives way, or None if the request is to wait."""


def fewest_running(snapshot: ReliefSnapshot) -> int | None:
    """The model with the fewest running requests for its bytes gives way, after a least time.

    Without it, models that fit together with little left for KV would keep each other waiting. Both
    the time that it has run and the time that the request has waited have to be that of a turn, so
    that the time for which it is loaded again is small beside them. That is a short turn if the
    request waits for its first token, and those of the model have had theirs (`residents`).
    """
    able = [
        index
        for index, holder in enumerate(snapshot.holders)
        if min(snapshot.waited_s, holder.ran_s) >= _run_s(snapshot, holder)
    ]
    return min(
        able,
        key=lambda index: snapshot.holders[index].num_running / snapshot.holders[index].num_bytes,
        default=None,
    )


def _run_s(snapshot: ReliefSnapshot, holder: Holder) -> float:
    """Seconds that a model runs, and that the request waits, before it gives way."""
    if snapshot.is_new and holder.has_streamed:
        return short_run_s(holder.load_s)
    return least_run_s(holder.load_s)
