"""Victims: the running request that is preempted when the pool is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class RunningRequest(NamedTuple):
    """A running request."""

    model: str
    arrival: int  # number in the order of arrival, over all models
    num_tokens: int  # known tokens of all its sequences
    num_sequences: int
    num_preemptions: int


Victims = Callable[[Sequence[RunningRequest]], int]
"""Gives the index of the victim among all running requests of all models; there is at least one."""


def latest_arrival(running: Sequence[RunningRequest]) -> int:
    """The latest arrival, with all its sequences (PagedAttention, section 4.5).

    So the earliest is never preempted and always ends: no deadlock. It may be the very request that
    asked for memory.
    """
    return max(range(len(running)), key=lambda i: running[i].arrival)
