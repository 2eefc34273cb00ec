"""Replay on several devices, each with its own pool and models. Requests are placed on arrival.

The devices advance together from arrival to arrival. A device is seen as it is at the end of the
step that runs when a request arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from aquifer.engine.policies.placement import DeviceState, Placement, PlacementSnapshot
from aquifer.engine.policies.residents import least_run_s
from aquifer.engine.reports import ModelState
from aquifer.errors import ConfigError
from aquifer.sim.clock import Arrivals
from aquifer.sim.config import ReplayConfig
from aquifer.sim.models import ReplayedModel, ReplayedModels
from aquifer.sim.replay import DeviceReplay
from aquifer.sim.results import LoadRecord, ReplayResult, RequestRecord
from aquifer.sim.trace import PromptMaker, TraceRequest


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Result of a replay on several devices.

    Args:
        devices: the result of each.
        placed: index of the device of each request, in order of arrival.
    """

    devices: list[ReplayResult]
    placed: list[int]

    @property
    def records(self) -> list[RequestRecord]:
        """Records of all requests, in order of arrival."""
        rest = [iter(result.records) for result in self.devices]
        return [next(rest[index]) for index in self.placed]

    @property
    def loads(self) -> list[LoadRecord]:
        """Loads on all devices, in order of time."""
        loads = [load for result in self.devices for load in result.loads]
        return sorted(loads, key=lambda load: load.begun_s)


def replay_devices(
    config: ReplayConfig,
    num_devices: int,
    requests: Sequence[TraceRequest],
    placement: Placement,
) -> ClusterResult:
    """Replay a trace on equal devices.

    Args:
        config: the configuration of each device; weights must come and go (`loading`).
        num_devices: number of devices.
        requests: in order of arrival, each with its time and model.
        placement: chooses the device of each request.

    Raises:
        ConfigError: weights stay in the pool, no device can run a model, or a request has no time
            or names an unknown model.
    """
    if config.loading is None:
        raise ConfigError("requests are placed by the weights that devices have; give a loading")
    with ExitStack() as resources:
        prompts = PromptMaker(requests)
        arrivals = [Arrivals() for _ in range(num_devices)]
        devices = [DeviceReplay(config, each, prompts, resources) for each in arrivals]
        placed: list[int] = []
        for request in requests:
            if request.model not in config.models:
                raise ConfigError(f"the trace asks for a model {request.model!r}")
            if request.arrival_s is None:
                raise ConfigError("the trace has no times; give a --rate of arrivals")
            for device in devices:
                device.run(until_s=request.arrival_s)
                assert device.models is not None
                device.models.expire(request.arrival_s)
            states = [_state(device, request.model) for device in devices]
            index = placement(PlacementSnapshot(states, len(placed)))
            if index is None:
                raise ConfigError(f"no device has room for {request.model}")
            arrivals[index].add(request)
            placed.append(index)
        for device in devices:
            device.run()
        return ClusterResult([device.finish() for device in devices], placed)


def _state(device: DeviceReplay, model: str) -> DeviceState:
    models = device.models
    assert models is not None
    host = models.set[model]
    missing_bytes = host.info.weight_bytes - host.resident_bytes
    if models.loading.is_exclusive and missing_bytes:
        evicted_bytes = sum(other.resident_bytes for other in models.set if other is not host)
    else:
        evicted_bytes = max(missing_bytes - device.free_bytes, 0)
    return DeviceState(
        can_run=models.set.kv_pages(host) > 0,
        missing_bytes=missing_bytes,
        evicted_bytes=evicted_bytes,
        bytes_per_s=models.loading.bytes_per_s,
        num_requests=device.num_requests,
        wait_s=_wait_s(device, models, host),
    )


def _wait_s(device: DeviceReplay, models: ReplayedModels, host: ReplayedModel) -> float:
    """Expected seconds until a model could be loaded, or until its load that is under way ends.

    Models for which requests wait are loaded before it, one after the other. If it does not fit
    beside those that run, one of these runs for its least time first.
    """
    if host.state == ModelState.RESIDENT:
        return 0.0
    filled_s = models.filled_s
    wait_s = 0.0 if filled_s is None else max(filled_s - device.now_s, 0.0)
    if host.state == ModelState.LOADING:
        return wait_s
    others = [other for other in models.set if other is not host and other.lane.has_work]
    waiting = (ModelState.REGISTERED, ModelState.PARTIAL)
    wait_s += sum(other.weights.missing_s for other in others if other.state in waiting)
    if not others:
        return wait_s
    busy_bytes = sum(other.info.weight_bytes for other in others)
    fits = busy_bytes + host.info.weight_bytes <= device.budget_bytes
    if models.loading.is_exclusive or not fits:
        wait_s += least_run_s(host.weights.missing_s)
    return wait_s
