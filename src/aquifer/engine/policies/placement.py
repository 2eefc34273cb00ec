"""Placement: the device that gets a request, where several could serve its model.

Tangram's section 3.4: a device that holds tensors of the model already loads the rest only, so
requests go where the expected time until the model is there is shortest (Algorithm 2). What is
known of the devices may come from the same process or from other machines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from aquifer.engine.policies.least_run import least_run_s

_EQUAL_S = 0.01
"""Expected delays that differ by less than this count as equal: about a step."""

_FAILED_S = 10.0
"""Expected delay where the model could not be loaded a moment ago."""


class ModelReport(NamedTuple):
    """A model on a device, as the device reports it. Times are of the device's clock."""

    num_bytes: int  # of its weights
    missing_bytes: int = 0  # of those that are not there
    missing_s: float = 0.0  # to load these: equation 3, (S - S') / B with measured B
    borrowed_s: float | None = None  # likewise, from another device; None if that is not possible
    is_resident: bool = False
    is_loading: bool = False
    has_failed: bool = False  # loading it has failed
    can_run: bool = True  # whether it leaves any room for KV
    oldest_s: float | None = None  # arrival of the first request that waits for memory or a slot
    token_s: float = 0.0  # to compute a token of a prompt
    # Where KV is in buckets: bound of the largest one of which a region is free; else None.
    free_bucket_tokens: int | None = None
    output_tokens: int = 0  # mean of recent outputs


class DeviceReport(NamedTuple):
    """A device, as it reports itself when something has changed.

    Where models run alone (`is_exclusive`), all other weights go for one that is loaded.
    """

    models: Mapping[str, ModelReport]
    budget_bytes: int
    free_bytes: int
    loaded_s: float | None = None  # when the load that is under way is expected to end
    backlog_s: float = 0.0  # to compute what is left of the prompts that are being read
    is_exclusive: bool = False
    is_short: bool = False  # whether there is a model that would not fit into what is free


class DeviceState(NamedTuple):
    """A device at the moment of the decision, as the model of the request sees it."""

    can_run: bool  # whether the model fits into its memory, and the device serves
    load_s: float  # expected seconds to load the weights of the model that are missing
    num_requests: int  # of all models: those that run and those that wait
    evicted_bytes: int = 0  # weights and prefixes that would make room for those that are missing
    wait_s: float = 0.0  # expected, until the load could begin, or until the prompt could be read
    queued_s: float | None = None  # how long the model's requests have waited there, if it is there
    compute_s: float = 0.0  # expected, to read the part of the prompt of which it has no KV
    lacks_memory: bool = False  # requests wait for it, or the request's bucket has no free region
    is_spare: bool = False  # has a replica that the model has not needed for some time


class PlacementSnapshot(NamedTuple):
    """The devices, and how many requests were placed before."""

    devices: Sequence[DeviceState]
    num_placed: int


Placement = Callable[[PlacementSnapshot], int | None]
"""Gives the index of a device, or None if none can run the model."""


def device_state(
    report: DeviceReport,
    name: str,
    num_requests: Mapping[str, int],
    now_s: float,
    num_tokens: int = 0,
    num_prompt: int = 0,
    *,
    is_elsewhere: bool = False,
) -> DeviceState:
    """The state of a device for a request.

    Args:
        report: the latest one.
        name: the model of the request.
        num_requests: requests of each model that were placed there and have not ended.
        now_s: the time on the device's clock.
        num_tokens: tokens of the prompt of which the device has no KV.
        num_prompt: tokens of the prompt.
        is_elsewhere: whether another device of the server has all weights of the model.
    """
    model = report.models.get(name, ModelReport(0))  # one that it has yet to report
    others = [
        report.models[each]
        for each, count in num_requests.items()
        if count and each != name and each in report.models
    ]
    load_s = model.missing_s
    if is_elsewhere and model.borrowed_s is not None:
        load_s = model.borrowed_s
    if report.is_exclusive and model.missing_bytes:
        evicted_bytes = sum(
            other.num_bytes - other.missing_bytes
            for each, other in report.models.items()
            if each != name
        )
    else:
        evicted_bytes = max(model.missing_bytes - report.free_bytes, 0)
    return DeviceState(
        can_run=model.can_run,
        load_s=0.0 if model.is_loading else load_s,
        num_requests=sum(num_requests.values()),
        evicted_bytes=evicted_bytes,
        wait_s=_wait_s(report, model, others, now_s),
        queued_s=_queued_s(model, now_s) if model.is_resident else None,
        compute_s=num_tokens * model.token_s,
        lacks_memory=model.oldest_s is not None
        or (
            model.free_bucket_tokens is not None
            and num_prompt + model.output_tokens > model.free_bucket_tokens
        ),
    )


def _queued_s(model: ModelReport, now_s: float) -> float:
    """Seconds that the first request has waited for memory or a slot; 0 if none waits."""
    return 0.0 if model.oldest_s is None else now_s - model.oldest_s


def _wait_s(
    report: DeviceReport, model: ModelReport, others: Sequence[ModelReport], now_s: float
) -> float:
    """Expected seconds until a model could be loaded, or until its load that is under way ends.

    Models for which requests wait are loaded before it, one after the other. If it does not fit
    beside those that run, one of these runs for its least time first. One that is there waits for
    the prompts that are being read.

    Args:
        report: the device.
        model: the model.
        others: the other models that have requests.
        now_s: the time.
    """
    if model.is_resident:
        return report.backlog_s
    wait_s = 0.0 if report.loaded_s is None else max(report.loaded_s - now_s, 0.0)
    if model.is_loading:
        return wait_s
    if model.has_failed:
        return wait_s + _FAILED_S
    wait_s += sum(
        other.missing_s for other in others if not (other.is_resident or other.is_loading)
    )
    if not others:
        return wait_s
    busy_bytes = sum(other.num_bytes for other in others)
    fits = busy_bytes + model.num_bytes <= report.budget_bytes
    if report.is_exclusive or not fits:
        wait_s += least_run_s(model.missing_s)
    return wait_s


def affinity(snapshot: PlacementSnapshot) -> int | None:
    """The device on which the first token is expected first: Algorithm 2, one request.

    The paper's devices run one model at a time, and only idle ones are asked; the time to load the
    model decides. Here devices that are busy take part with the time that they are expected to need
    before, and with the time to read what they have not retained of the prompt. Among equal ones,
    it is one that has memory for the request (ODMA, section 3.5), then one with a replica that is
    needed, then the one that evicts least, and then the one with the fewest requests.

    Requests that have waited for memory tell how busy the model is, and that it may pay to load it
    elsewhere. They tell little about how long the next one will wait: a queue is not short because
    its first request is new. So of the devices that have the model, the one where they have waited
    least counts for all.
    """
    states = [device for device in snapshot.devices if device.can_run]
    queues_s = [device.queued_s for device in states if device.queued_s is not None]
    queued_s = min(queues_s, default=0.0)

    def delay_s(device: DeviceState) -> float:
        """Expected seconds until the first token."""
        waited_s = 0.0 if device.queued_s is None else queued_s
        return max(device.wait_s, waited_s) + device.load_s + device.compute_s

    least_s = min(map(delay_s, states), default=0.0)
    return _least(
        snapshot,
        lambda device: (
            int((delay_s(device) - least_s) / _EQUAL_S),
            device.lacks_memory,
            device.is_spare,
            device.evicted_bytes,
            device.num_requests,
        ),
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


PLACEMENTS: dict[str, Placement] = {
    "affinity": affinity,
    "least-loaded": least_loaded,
    "round-robin": round_robin_devices,
    "random": random_device(0),
}
"""The placements that a server can be told to use, by name."""


def _able(snapshot: PlacementSnapshot) -> list[int]:
    return [index for index, device in enumerate(snapshot.devices) if device.can_run]


def _least(
    snapshot: PlacementSnapshot, cost: Callable[[DeviceState], tuple[float, ...]]
) -> int | None:
    return min(_able(snapshot), key=lambda index: cost(snapshot.devices[index]), default=None)
