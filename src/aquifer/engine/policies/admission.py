"""Admission: the waiting request of a model that is tried next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A waiting request."""

    arrival: int  # number in the order of arrival, over all models
    num_prompt_tokens: int
    num_tokens: int  # known tokens of its longest sequence, prompt included
    num_sequences: int  # slots that it needs, all at once
    num_preemptions: int


class AdmissionSnapshot(NamedTuple):
    """A model's queue at the moment of the decision."""

    # Preempted requests first, the latest preempted one foremost, then in order of arrival.
    waiting: Sequence[Candidate]
    num_running: int  # requests of this model that run
    num_free_slots: int
    # Arrival of the request, of any model, that was refused memory last and is still waiting.
    blocked_arrival: int | None


Admission = Callable[[AdmissionSnapshot], int | None]
"""Gives the index of the request in `waiting` to try next, or None to admit no more in this step.

A request that is tried and finds no room ends the step's admissions.
"""


def first_come(snapshot: AdmissionSnapshot) -> int | None:
    """First come, first served, over all models.

    The first in the queue waits until it has slots and memory, and no later arrival is admitted
    before a request that waits for memory. So the earliest request is always served, of any size:
    no starvation. The cost: smaller requests wait behind a large one.
    """
    if not snapshot.waiting:
        return None
    first = snapshot.waiting[0]
    if snapshot.blocked_arrival is not None and first.arrival > snapshot.blocked_arrival:
        return None
    return 0 if first.num_sequences <= snapshot.num_free_slots else None


def static_batches(snapshot: AdmissionSnapshot) -> int | None:
    """First come, first served, in batches: none is admitted while the batch before it runs.

    The baseline of PagedAttention, section 6.1 (FasterTransformer with static batches). Requests of
    one batch are admitted in one step: `num_running` counts those that ran before it.
    """
    return None if snapshot.num_running else first_come(snapshot)
