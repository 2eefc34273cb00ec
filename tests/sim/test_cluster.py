"""Replays on several devices: one is the plain replay; requests run where they are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from tests.sim.tiny_replay import MODEL, PAGE_BYTES, config_of

from aquifer.engine.policies.placement import (
    Placement,
    PlacementSnapshot,
    affinity,
    random_device,
    round_robin_devices,
)
from aquifer.errors import ConfigError
from aquifer.sim.cluster import ClusterConfig, ClusterResult, replay_cluster
from aquifer.sim.config import LoadingConfig, ReplayConfig
from aquifer.sim.locality import LOCALITIES, LocalityWorkload
from aquifer.sim.replay import replay
from aquifer.sim.trace import TraceRequest

WEIGHT_PAGES = sum(-(-num_bytes // PAGE_BYTES) for num_bytes in MODEL.tensor_bytes)
CONFIG = replace(
    config_of(),
    models=dict.fromkeys("abc", MODEL),
    memory_bytes=(2 * WEIGHT_PAGES + 30) * PAGE_BYTES,
    loading=LoadingConfig(1e6),
)


def replay_devices(
    config: ReplayConfig, count: int, requests: Sequence[TraceRequest], placement: Placement
) -> ClusterResult:
    """Replay on equal workers."""
    return replay_cluster(ClusterConfig((config,) * count, placement), requests)


def _requests(count: int = 60, rate: float = 8.0) -> list[TraceRequest]:
    random = np.random.default_rng(1)
    lengths = [
        TraceRequest(None, int(random.integers(1, 90)), int(random.integers(1, 40)))
        for _ in range(count)
    ]
    return LocalityWorkload(tuple("abc"), lengths, rate, count).requests(LOCALITIES["L2"])


@pytest.mark.parametrize(
    "options",
    [{}, {"is_exclusive": True}, {"is_exclusive": True, "keep_alive_s": 0.05}],
    ids=["tensor", "whole", "keep alive"],
)
def test_one_device_is_the_plain_replay(options) -> None:
    assert CONFIG.loading is not None
    config = replace(CONFIG, loading=replace(CONFIG.loading, **options))
    requests = _requests()
    cluster = replay_devices(config, 1, requests, affinity)
    plain = replay(config, requests)
    assert [asdict(r) for r in cluster.records] == [asdict(r) for r in plain.records]
    assert cluster.loads == plain.loads
    assert cluster.placed == [0] * len(requests)


def test_requests_run_where_they_are_placed() -> None:
    requests = _requests()
    result = replay_devices(CONFIG, 3, requests, round_robin_devices)
    assert result.placed == [number % 3 for number in range(len(requests))]
    assert [len(device.records) for device in result.devices] == [20, 20, 20]
    for record, request in zip(result.records, requests, strict=True):
        assert (record.model, record.arrival_s) == (request.model, request.arrival_s)
        assert record.finished_s is not None


def test_affinity_gives_each_model_a_device() -> None:
    """Three models on three devices: each is loaded once, and found there by later requests."""
    requests = [TraceRequest(float(i), 4, 2, "abc"[i % 3]) for i in range(12)]
    result = replay_devices(CONFIG, 3, requests, affinity)
    assert len({(load.model) for load in result.loads}) == len(result.loads) == 3
    spread = replay_devices(CONFIG, 3, requests, random_device(0))
    assert len(spread.loads) > 3


def test_a_device_that_loads_the_model_is_waited_for() -> None:
    """A second request comes while the first one's model is loaded."""
    requests = [TraceRequest(at_s, 4, 2, "a") for at_s in (0.0, 0.1)]
    result = replay_devices(CONFIG, 2, requests, affinity)
    assert result.placed == [0, 0]
    assert len(result.loads) == 1


def test_what_a_placement_sees() -> None:
    """The first device has `a`, and loads `b` for a request that waits."""
    seen: list[PlacementSnapshot] = []

    def place(snapshot: PlacementSnapshot) -> int:
        seen.append(snapshot)
        return 0

    requests = [TraceRequest(at_s, 4, 2, name) for at_s, name in ((0, "a"), (1, "b"), (1.1, "c"))]
    assert CONFIG.loading is not None
    replay_devices(CONFIG, 2, requests, place)
    weight_bytes = WEIGHT_PAGES * PAGE_BYTES
    load_s = weight_bytes / 1e6
    busy, idle = seen[2].devices
    assert (seen[2].num_placed, busy.num_requests, idle.num_requests) == (2, 1, 0)
    assert busy.load_s == idle.load_s == pytest.approx(load_s)
    assert busy.wait_s == pytest.approx(load_s - 0.1)
    assert (idle.wait_s, idle.can_run) == (0.0, True)
    # Free memory is reported in steps of a 1024th of the budget.
    too_many_bytes = busy.evicted_bytes - (weight_bytes - 30 * PAGE_BYTES)
    assert 0 <= too_many_bytes < CONFIG.budget_bytes / 1024
    assert idle.evicted_bytes == 0
    exclusive = replace(CONFIG, loading=replace(CONFIG.loading, is_exclusive=True))
    replay_devices(exclusive, 1, requests, place)
    # It would have to wait for a while until the other one gives way.
    assert seen[-1].devices[0].wait_s == pytest.approx(load_s - 0.1 + max(0.5, 4 * load_s))


def test_what_cannot_be_placed() -> None:
    requests = _requests(3)
    with pytest.raises(ConfigError, match="give a loading"):
        replay_devices(replace(CONFIG, loading=None), 2, requests, affinity)
    with pytest.raises(ConfigError, match="asks for a model 'x'"):
        replay_devices(CONFIG, 2, [replace(requests[0], model="x")], affinity)
    with pytest.raises(ConfigError, match="no times"):
        replay_devices(CONFIG, 2, [replace(requests[0], arrival_s=None)], affinity)
    with pytest.raises(ConfigError, match="no device"):
        replay_devices(CONFIG, 2, requests, lambda snapshot: None)
