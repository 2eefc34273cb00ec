"""Victims: the running request that is preempted when the pool is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from aquifer.engine.policies.requests import RunningRequest

Victims = Callable[[Sequence[RunningRequest]], int]
"""Gives the index of the victim among all running requests of all models; there is at least one."""


def latest_arrival(running: Sequence[RunningRequest]) -> int:
    """The latest arrival, with all its sequences (PagedAttention, section 4.5).

    So the earliest is never preempted and always ends: no deadlock. It may be the very request that
    asked for memory.
    """
    return max(range(len(running)), key=lambda i: running[i].arrival)


def latest_of_busiest(running: Sequence[RunningRequest]) -> int:
    """The latest arrival of the client with the most running requests.

    So a client's many requests do not cost another one its only request. If several clients have
    that many, it is the latest arrival of them all. Here, too, the earliest request is never the
    victim unless it runs alone: it is not the latest of a client that has several, and if each has
    one, the latest of all is another one.
    """
    num_running = Counter(request.client for request in running)
    return max(
        range(len(running)), key=lambda i: (num_running[running[i].client], running[i].arrival)
    )


def longest_left(running: Sequence[RunningRequest]) -> int:
    """The request of the busiest client that is expected to run for longest yet.

    It would hold its memory for longest, so the others get on with what it gives up. It is never
    the earliest of those requests, for the reason that `latest_of_busiest` gives, unless it runs
    alone. Without forecasts it is the latest arrival.
    """
    num_running = Counter(request.client for request in running)
    most = max(num_running.values())
    busiest = [i for i, request in enumerate(running) if num_running[request.client] == most]
    earliest = min(busiest, key=lambda i: running[i].arrival)
    others = [i for i in busiest if i != earliest] or busiest
    return max(others, key=lambda i: (running[i].expected_left or 0.0, running[i].arrival))
