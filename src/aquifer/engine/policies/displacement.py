"""Displacement: the running request that gives its place to a waiting one of another client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aquifer.engine.policies.requests import Candidate, RunningRequest


class DisplacementSnapshot(NamedTuple):
    """A waiting request that is next, and found no slots or no memory."""

    waiting: Candidate
    lacks_slots: bool  # else it lacks memory
    # Requests that hold what it lacks: of its own model if it lacks slots, else of all models.
    running: Sequence[RunningRequest]


Displacement = Callable[[DisplacementSnapshot], int | None]
"""Gives the index of the running request that is preempted for the waiting one, or None."""


def place_for_each_client(snapshot: DisplacementSnapshot) -> int | None:
    """A client that has nothing running takes a place from the client that holds the most.

    Of that client, the latest arrival gives way, as long as the client holds more than the waiting
    request asks for: more sequences if slots are short, more tokens if memory is. So each client
    gets at least one request of moderate size into the batch at once, and the earliest arrival of
    all is never displaced.
    """
    waiting, lacks_slots, running = snapshot
    if any(request.client == waiting.client for request in running):
        return None
    held: Counter[int] = Counter()
    for request in running:
        held[request.client] += request.num_sequences if lacks_slots else request.num_tokens
    if not held:
        return None
    client, most = max(held.items(), key=lambda item: item[1])
    if most <= (waiting.num_sequences if lacks_slots else waiting.num_tokens):
        return None
    of_client = [i for i, request in enumerate(running) if request.client == client]
    if len(of_client) < 2:
        return None
    return max(of_client, key=lambda i: running[i].arrival)
