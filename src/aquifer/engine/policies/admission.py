"""Admission: the waiting request of a model that is tried next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from aquifer.engine.policies.requests import Candidate, ClientState


class AdmissionSnapshot(NamedTuple):
    """A model's queues at the moment of the decision."""

    # By client; none of them empty, and each in order of arrival, preempted requests too.
    queues: Mapping[int, Sequence[Candidate]]
    clients: Mapping[int, ClientState]  # at least those that have requests
    # By client: whether its bucket has a free region for each request; true without buckets.
    regions: Mapping[int, Sequence[bool]]
    num_running: int  # requests of this model that run
    num_free_slots: int
    # The request, of any model, that was refused memory last, or preempted, and is still waiting.
    blocked: Candidate | None


Admission = Callable[[AdmissionSnapshot], Candidate | None]
"""Gives the request to try next, one of the queues', or None to admit no more in this step.

A request that is tried and finds no slots or no memory ends the step's admissions.
"""


_MOST_OVERTAKING = 32
"""Requests that may overtake another one."""


def first_come(snapshot: AdmissionSnapshot) -> Candidate | None:
    """First come, first served, over all models and clients.

    The first in the queue waits until it has slots and memory, and no later arrival is admitted
    before a request that waits for memory. So the earliest request is always served, of any size:
    no starvation. The cost: smaller requests wait behind a large one.
    """
    heads = [queue[0] for queue in snapshot.queues.values()]
    if not heads:
        return None
    first = min(heads, key=lambda candidate: candidate.arrival)
    blocked = snapshot.blocked
    return None if blocked is not None and first.arrival > blocked.arrival else first


def least_served(snapshot: AdmissionSnapshot) -> Candidate | None:
    """The first request of the client that was served the fewest tokens.

    It is the virtual token counter of Sheng et al. (Fairness in Serving Large Language Models,
    OSDI 2024, section 4): no client that has requests waiting falls behind another one by more than
    a bounded number of tokens, however many requests that one sends. The requests of one client are
    served in order of arrival, and if there is one client, as by `first_come`. Again, nothing
    overtakes a request that waits for memory, unless its client was served less.
    """
    if len(snapshot.clients) == 1:
        return first_come(snapshot)

    def rank(candidate: Candidate) -> tuple[float, int, int]:
        client = snapshot.clients[candidate.client]
        return client.served_tokens, client.num_running, candidate.arrival

    first = min([queue[0] for queue in snapshot.queues.values()], key=rank, default=None)
    blocked = snapshot.blocked
    if first is not None and blocked is not None and rank(first) > rank(blocked):
        return None
    return first


def first_with_region(snapshot: AdmissionSnapshot) -> Candidate | None:
    """As `least_served`, but a request whose bucket has a free region may overtake others (ODMA).

    The paper batches requests of one bucket, so that what one gives back fits the next. Where
    requests join a running batch at any step, that is a request for whose bucket there is a region
    already. It overtakes only what arrived at most 32 requests before it, so each request is
    overtaken by at most as many.
    """
    first = least_served(snapshot)
    if first is None:
        return None
    queue = snapshot.queues[first.client]
    for request, has_region in zip(queue, snapshot.regions[first.client], strict=True):
        if request.arrival >= first.arrival + _MOST_OVERTAKING:
            break
        if has_region:
            return request
    return first


def static_batches(snapshot: AdmissionSnapshot) -> Candidate | None:
    """First come, first served, in batches: none is admitted while the batch before it runs.

    The baseline of PagedAttention, section 6.1 (FasterTransformer with static batches). Requests of
    one batch are admitted in one step: `num_running` counts those that ran before it.
    """
    return None if snapshot.num_running else first_come(snapshot)
