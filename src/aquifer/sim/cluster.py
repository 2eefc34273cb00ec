"""Replay on several devices, each with its own pool and models. Requests are placed on arrival.

The devices advance together from arrival to arrival. A device is seen as it is at the end of the
step that runs when a request arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from aquifer.engine.device_reports import DeviceReporter
from aquifer.engine.policies.placement import (
    DeviceState,
    Placement,
    PlacementSnapshot,
    device_state,
)
from aquifer.errors import ConfigError
from aquifer.sim.clock import Arrivals
from aquifer.sim.config import ReplayConfig
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
        devices = [_Device(config, prompts, resources) for _ in range(num_devices)]
        placed: list[int] = []
        for request in requests:
            model = request.model
            if model is None or model not in config.models:
                raise ConfigError(f"the trace asks for a model {model!r}")
            if request.arrival_s is None:
                raise ConfigError("the trace has no times; give a --rate of arrivals")
            states = [device.state(model, request) for device in devices]
            index = placement(PlacementSnapshot(states, len(placed)))
            if index is None:
                raise ConfigError(f"no device has room for {request.model}")
            devices[index].add(model, request)
            placed.append(index)
        for device in devices:
            device.replay.run()
        return ClusterResult([device.replay.finish() for device in devices], placed)


class _Device:
    """One of the devices, and the requests that were placed there.

    Args:
        config: its configuration.
        prompts: makes the tokens of prompts.
        resources: the stack that closes it.
    """

    def __init__(self, config: ReplayConfig, prompts: PromptMaker, resources: ExitStack) -> None:
        self._arrivals = Arrivals()
        self.replay = DeviceReplay(config, self._arrivals, prompts, resources)
        models = self.replay.models
        assert models is not None
        self._models = models
        self._reporter = DeviceReporter(
            models.set, self.replay.room, is_exclusive=models.loading.is_exclusive
        )
        self._num_placed: Counter[str] = Counter()

    def state(self, model: str, request: TraceRequest) -> DeviceState:
        """The device as a request sees it that arrives now."""
        assert request.arrival_s is not None
        self.replay.run(until_s=request.arrival_s)
        self._models.expire(request.arrival_s)
        num_requests = self._num_placed - self.replay.num_ended
        return device_state(
            self._reporter.report(),
            model,
            num_requests,
            self.replay.now_s,
            request.prompt_tokens,
            request.prompt_tokens,
        )

    def add(self, model: str, request: TraceRequest) -> None:
        """Place a request here."""
        self._arrivals.add(request)
        self._num_placed[model] += 1
