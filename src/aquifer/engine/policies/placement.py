"""Placement: the device that gets a request, where several could serve its model.

Tangram's section 3.4: a device that holds tensors of the model already loads the rest only, so
requests go where the expected time until the model is there is shortest (Algorithm 2). What is
known of the devices may come from the same process or from other machines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple


class DeviceState(NamedTuple):
    """A device at the moment of the decision, as the model of the request sees it."""

    can_run: bool  # whether the model fits into its memory
    missing_bytes: int  # weights of the model that are not there
    bytes_per_s: float  # measured: how fast weights are loaded, from where they are stored
    num_requests: int  # of all models: those that run and those that wait
    evicted_bytes: int = 0  # weights and prefixes that would make room for those that are missing
    wait_s: float = 0.0  # expected, until the load could begin, or until one under way ends


class PlacementSnapshot(NamedTuple):
    """The devices, and how many requests were placed before."""

    devices: Sequence[DeviceState]
    num_placed: int


Placement = Callable[[PlacementSnapshot], int | None]
"""Gives the index of a device, or None if none can run the model."""


def load_s(device: DeviceState) -> float:
    """Expected seconds to load what is missing: equation 3, t = (S - S') / B.

    B is the bandwidth of the slower medium where weights pass through two of them.
    """
    return device.missing_bytes / device.bytes_per_s


def affinity(snapshot: PlacementSnapshot) -> int | None:
    """The device on which the model is expected to be there first: Algorithm 2, one request.

    The paper's devices run one model at a time, and only idle ones are asked. Here devices that are
    busy take part with the time that they are expected to need before. Among equal ones, it is the
    one that evicts least for it, and then the one with the fewest requests.
    """
    return _least(
        snapshot,
        lambda device: (device.wait_s + load_s(device), device.evicted_bytes, device.num_requests),
    )


def least_loaded(snapshot: PlacementSnapshot) -> int | None:
    """The device with the fewest requests."""
    return _least(snapshot, lambda device: (device.num_requests,))


def round_robin_devices(snapshot: PlacementSnapshot) -> int | None:
    """The devices in turn."""
    able = _able(snapshot)
    return able[snapshot.num_placed % len(able)] if able else None


def random_device(seed: int, *, prefers_idle: bool = False) -> Placement:
    """A device at random.

    Args:
        seed: of the choices; each is a function of it and of the number of placed requests.
        prefers_idle: choose among devices without requests where there are any.
    """

    def choose(snapshot: PlacementSnapshot) -> int | None:
        able = _able(snapshot)
        if prefers_idle:
            idle = [index for index in able if not snapshot.devices[index].num_requests]
            able = idle or able
        return random.Random(f"{seed} {snapshot.num_placed}").choice(able) if able else None

    return choose


def _able(snapshot: PlacementSnapshot) -> list[int]:
    return [index for index, device in enumerate(snapshot.devices) if device.can_run]


def _least(
    snapshot: PlacementSnapshot, cost: Callable[[DeviceState], tuple[float, ...]]
) -> int | None:
    return min(_able(snapshot), key=lambda index: cost(snapshot.devices[index]), default=None)
