"""Replays on several devices: one is the plain replay; requests run where they are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from tests.sim.tiny_replay import MODEL, PAGE_BYTES, config_of

from aquifer.cache.bucketed import sizes_of
from aquifer.cache.buckets import BucketBounds
from aquifer.engine.policies.placement import (
    Placement,
    PlacementSnapshot,
    affinity,
    random_device,
    round_robin_devices,
)
from aquifer.errors import ConfigError
from aquifer.sim.cluster import ClusterConfig, ClusterResult, Failure, replay_cluster
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


def test_a_placement_sees_which_device_has_a_region() -> None:
    """The first device has room for one of the requests at a time."""
    seen: list[PlacementSnapshot] = []

    def place(snapshot: PlacementSnapshot) -> int:
        seen.append(snapshot)
        return 0

    requests = [TraceRequest(at_s, 100, 30, "a") for at_s in (0.0, 100.0, 100.01, 200.0)]
    bounds = BucketBounds(sizes_of(4, 256), every=1)
    config = replace(
        CONFIG,
        models={"a": MODEL},
        manager="bucketed",
        memory_bytes=(WEIGHT_PAGES + 20) * PAGE_BYTES,
        bounds=bounds,
    )
    replay_devices(config, 1, requests, place)
    lack = [snapshot.devices[0].lacks_memory for snapshot in seen]
    assert lack == [False, False, True, False]
    assert bounds.bounds == (160, 256), "they follow the requests"


def test_bounds_to_share_need_buckets_that_follow() -> None:
    bounds = BucketBounds(sizes_of(4, 256))
    with pytest.raises(ConfigError, match="bounds to share"):
        replace(CONFIG, bounds=bounds)
    with pytest.raises(ConfigError, match="bounds to share"):
        replace(config_of("bucketed"), static_buckets=True, bounds=bounds)


def test_requests_without_a_model_are_for_the_first_one() -> None:
    """As in the replay of one device."""
    requests = [replace(request, model=None) for request in _requests(5)]
    result = replay_devices(CONFIG, 2, requests, affinity)
    assert [record.model for record in result.records] == ["a"] * 5


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


def test_workers_that_differ() -> None:
    """A model is too large for the first worker, which gets requests of the other ones only."""
    assert CONFIG.loading is not None
    large = replace(MODEL, tensor_bytes=MODEL.tensor_bytes * 4)
    models = {**CONFIG.models, "large": large}
    small = replace(CONFIG, models=models)
    roomy = replace(
        small,
        memory_bytes=8 * CONFIG.budget_bytes,
        loading=replace(CONFIG.loading, bytes_per_s=4e6),
    )
    requests = [TraceRequest(10.0 * i, 4, 2, ("large", "a", "a")[i % 3]) for i in range(6)]
    cluster = ClusterConfig((small, roomy), round_robin_devices)
    result = replay_cluster(cluster, requests)
    assert result.placed == [1, 1, 0, 1, 0, 1]
    assert all(record.finished_s is not None for record in result.records)
    rates = {round(load.loaded_bytes / load.seconds) for load in result.loads}
    assert rates == {1_000_000, 4_000_000}
    with pytest.raises(ConfigError, match="no device has room for large"):
        replay_cluster(replace(cluster, workers=(small, small)), requests)
    with pytest.raises(ConfigError, match="the same models"):
        replace(cluster, workers=(small, CONFIG))


FIRST = TraceRequest(0.0, 4, 60, "a")
LOAD_S = WEIGHT_PAGES * PAGE_BYTES / 1e6


def test_requests_of_a_worker_that_fails() -> None:
    """One has streamed when it fails; one still waits for its weights, and runs elsewhere."""
    requests = [FIRST, TraceRequest(LOAD_S + 0.01, 4, 2, "b"), TraceRequest(40.0, 4, 2, "a")]
    at_s = LOAD_S + 0.02
    cluster = ClusterConfig((CONFIG,) * 2, _first_able, (Failure(0, at_s, 30.0),), notice_s=2.0)
    result = replay_cluster(cluster, requests)
    assert result.placed == [0, 1, 0]
    assert result.failed == {0: "worker 0 failed while it streamed"}
    streamed, moved, later = result.records
    assert (streamed.finished_s, streamed.first_token_s) == (None, None)
    assert moved.arrival_s == LOAD_S + 0.01
    assert moved.first_token_s is not None
    assert moved.first_token_s > at_s + 2.0 + LOAD_S
    # It came back with nothing in its memory.
    assert later.first_token_s is not None
    assert later.first_token_s > 40.0 + LOAD_S
    assert len(result.devices) == 3
    assert [load.model for load in result.loads].count("a") == 2
    total = result.total
    assert (total.num_unserved, len(total.served), total.failed) == (1, 2, result.failed)
    assert total.figures()["failed_with_a_worker"] == 1
    # A worker that came back has the memory that it had before.
    assert total.kv_budget_bytes == 2 * result.devices[0].kv_budget_bytes
    with_prefixes = replace(cluster, workers=(replace(CONFIG, prefix_caching=True),) * 2)
    assert replay_cluster(with_prefixes, requests).failed == result.failed


def test_averages_while_requests_wait_are_of_the_workers_where_they_do() -> None:
    one_slot = replace(CONFIG, max_num_seqs=1)
    requests = [TraceRequest(0.0, 4, 60, "a"), TraceRequest(0.0, 4, 60, "a")]
    requests.append(TraceRequest(0.0, 4, 100, "b"))
    by_model = lambda snapshot: int(snapshot.num_placed == 2)  # noqa: E731
    result = replay_cluster(ClusterConfig((one_slot,) * 2, by_model), requests)
    assert [device.averages_waiting["waiting"] for device in result.devices] == [1.0, 0.0]
    assert result.total.averages_waiting["waiting"] == pytest.approx(1.0)
    assert result.total.averages["waiting"] < 1.0


def test_no_worker_is_left() -> None:
    requests = [TraceRequest(at_s, 4, 2, "a") for at_s in (0.0, 10.5, 12.0)]
    alone = ClusterConfig((CONFIG,), _first_able, (Failure(0, 10.0, 20.0),))
    waited = replay_cluster(alone, requests)
    assert not waited.failed
    assert all(
        record.first_token_s is not None and record.first_token_s > 20.0
        for record in waited.records[1:]
    )
    lost = replay_cluster(replace(alone, failures=(Failure(0, 10.0),)), requests)
    assert lost.failed == dict.fromkeys((1, 2), "no worker was left that could run it")
    assert [record.finished_s is None for record in lost.records] == [False, True, True]
    assert lost.placed == [0, 0, None]  # the second one before the failure was noticed


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([(2, 1.0)], "the workers are 0 to 1"),
        ([(0, 1.0), (0, 5.0)], "before it is back"),
        ([(0, 1.0, 6.0), (0, 5.0)], "before it is back"),
        ([(0, 1.0, 6.0), (0, 6.0)], "before it is back"),
    ],
)
def test_failures_that_cannot_be(failures, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig((CONFIG,) * 2, failures=tuple(Failure(*each) for each in failures))


def test_times_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="later than it fails"):
        Failure(0, 2.0, 2.0)
    with pytest.raises(ConfigError, match="from 0 on"):
        Failure(0, -1.0)
    with pytest.raises(ConfigError, match="at least one"):
        ClusterConfig(())
    with pytest.raises(ConfigError, match="0 or more"):
        ClusterConfig((CONFIG,), report_s=-1.0)


def test_reports_at_intervals_change_only_what_placements_know() -> None:
    """Where nothing depends on reports, the outcome is the same."""
    requests = _requests()
    exact = ClusterConfig((CONFIG,) * 3, round_robin_devices)
    at_intervals = replay_cluster(replace(exact, report_s=2.0), requests)
    assert at_intervals.records == replay_cluster(exact, requests).records
    by_affinity = replay_cluster(ClusterConfig((CONFIG,) * 3, report_s=2.0), requests)
    assert all(record.finished_s is not None for record in by_affinity.records)


def test_many_models_are_opened_when_asked_for() -> None:
    """None is open at first, and those that have nothing are closed again."""
    names = tuple(str(number) for number in range(2000))
    config = replace(CONFIG, models=dict.fromkeys(names, MODEL))
    requests = [TraceRequest(5.0 * i, 4, 2, names[i % 60]) for i in range(80)]
    result = replay(config, requests)
    assert all(record.finished_s is not None for record in result.records)
    assert [load.model for load in result.loads] == [request.model for request in requests]
    cluster = replay_cluster(ClusterConfig((config,) * 2), requests)
    assert all(record.finished_s is not None for record in cluster.records)


def _first_able(snapshot: PlacementSnapshot) -> int | None:
    able = [index for index, device in enumerate(snapshot.devices) if device.can_run]
    return able[0] if able else None
