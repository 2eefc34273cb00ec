"""Hand-over: requests that wait on one device, for another one that has their model and is idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_LEAST_WAIT_S = 0.1
"""A request that waits less may only wait for the step in which it begins."""


class Holder(NamedTuple):
    """A device as the requests of one model see it."""

    num_of_model: int  # requests of the model that were placed there and have not ended
    num_requests: int  # of all models
    waited_s: float | None  # how long the first one that has never run has waited; None without any
    can_take: bool  # whether the model is there, and its requests are accepted


class Transfer(NamedTuple):
    """Requests that go from one device to another one, by the indices of these."""

    source: int
    target: int
    most: int  # as many as wait there, and no more than this


HandOver = Callable[[Sequence[Holder]], Transfer | None]
"""Decides about the requests of one model that wait; None if all stay where they are."""


def to_idle(devices: Sequence[Holder]) -> Transfer | None:
    """Half of the model's requests, where they have waited longest, to a device with none at all.

    What goes back and forth is not worth it: after a transfer, both have about as many.
    """
    waiting = [
        index
        for index, device in enumerate(devices)
        if device.waited_s is not None and device.waited_s >= _LEAST_WAIT_S
    ]
    idle = [
        index
        for index, device in enumerate(devices)
        if device.can_take and device.num_requests == 0
    ]
    if not waiting or not idle:
        return None
    source = max(waiting, key=lambda index: devices[index].waited_s or 0.0)
    return Transfer(source, idle[0], (devices[source].num_of_model + 1) // 2)
