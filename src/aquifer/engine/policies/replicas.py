"""Replicas: the devices that have a model, and those of them that it does not need any more.

A model that many ask for is loaded on a second device (`placement`). Here it gives that up again:
a replica that is not needed gets no requests as long as another one serves them as soon, so its
weights are idle, and go for those of other models or once they have been kept for long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_FEW_REQUESTS = 8
"""Steps with so many requests take little longer than with one, on a GPU."""


class Replica(NamedTuple):
    """A device that has a model."""

    num_requests: int  # of the model, placed there and not ended
    waits: bool  # whether any of them waits for memory or a slot
    is_short: bool  # whether other models lack memory there


def num_needed(replicas: Sequence[Replica]) -> int:
    """How many of its replicas a model needs at a moment: all of them while requests wait."""
    if any(replica.waits for replica in replicas):
        return len(replicas)
    num_requests = sum(replica.num_requests for replica in replicas)
    return max(-(-num_requests // _FEW_REQUESTS), 1)


def spare(replicas: Sequence[Replica], num_needed: int) -> list[int]:
    """The indices of the replicas that a model does not need.

    Those with the most requests stay. None is spare where no other model lacks memory.

    Args:
        replicas: of one model.
        num_needed: the most that it has needed for some time.
    """
    by_requests = sorted(range(len(replicas)), key=lambda index: -replicas[index].num_requests)
    return [index for index in by_requests[num_needed:] if replicas[index].is_short]
