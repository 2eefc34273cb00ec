"""Placement of requests on devices: Algorithm 2 with equation 3, and the baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from aquifer.engine.policies.placement import (
    PLACEMENTS,
    DeviceReport,
    DeviceState,
    ModelReport,
    PlacementSnapshot,
    affinity,
    device_state,
    least_loaded,
    random_device,
    round_robin_devices,
)
from aquifer.engine.policies.replicas import Replica, num_needed, spare

GB = 10**9


def _device(
    missing_gb: float = 0.0,
    num_requests: int = 0,
    wait_s: float = 0.0,
    gb_per_s: float = 25.0,
    evicted_gb: float = 0.0,
    *,
    can_run: bool = True,
) -> DeviceState:
    return DeviceState(
        can_run,
        missing_gb / gb_per_s,
        num_requests,
        int(evicted_gb * GB),
        wait_s,
    )


def _seen(devices: Sequence[DeviceState], num_placed: int = 0) -> PlacementSnapshot:
    return PlacementSnapshot(devices, num_placed)


def test_affinity_takes_the_device_with_most_of_the_model() -> None:
    assert affinity(_seen([_device(16), _device(4), _device(10)])) == 1


def test_affinity_counts_time_and_not_bytes() -> None:
    # From disk on one device, from host memory on the other one.
    assert affinity(_seen([_device(4, gb_per_s=2), _device(16)])) == 1
    # The model is there, but it has to wait for longer than a load elsewhere.
    assert affinity(_seen([_device(0, wait_s=2.0), _device(16)])) == 1
    assert affinity(_seen([_device(0, wait_s=0.5), _device(16)])) == 0


def test_affinity_among_equals_evicts_least() -> None:
    assert affinity(_seen([_device(8, evicted_gb=3), _device(8, 2, evicted_gb=1)])) == 1


def test_affinity_counts_what_is_left_of_the_prompt() -> None:
    """8000 tokens at 100 us each take longer than a wait of 0.5 s."""
    here = _device(0, wait_s=0.5)
    elsewhere = _device(0)._replace(compute_s=0.8)
    assert affinity(_seen([elsewhere, here])) == 1
    # What differs by less than a step decides nothing: then it is the fewest requests.
    assert affinity(_seen([_device(0, 5), _device(0, 1, wait_s=0.008)])) == 1


def test_affinity_among_equals_takes_the_least_loaded() -> None:
    assert affinity(_seen([_device(8, 3), _device(8, 1), _device(8, 1)])) == 1


def test_the_fewest_requests() -> None:
    assert least_loaded(_seen([_device(0, 3), _device(16, 1), _device(8, 2)])) == 1


def test_in_turn() -> None:
    devices = [_device(), _device(can_run=False), _device()]
    chosen = [round_robin_devices(_seen(devices, number)) for number in range(4)]
    assert chosen == [0, 2, 0, 2]


def test_at_random() -> None:
    devices = [_device(), _device(), _device(), _device(can_run=False)]
    chosen = [random_device(1)(_seen(devices, number)) for number in range(600)]
    assert chosen == [random_device(1)(_seen(devices, number)) for number in range(600)]
    assert chosen != [random_device(2)(_seen(devices, number)) for number in range(600)]
    counts = Counter(chosen)
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 150


def test_at_random_among_idle_ones() -> None:
    choose = random_device(1, prefers_idle=True)
    devices = [_device(num_requests=1), _device(), _device(num_requests=2), _device()]
    assert {choose(_seen(devices, number)) for number in range(50)} == {1, 3}
    busy = [_device(num_requests=1), _device(num_requests=5)]
    assert {choose(_seen(busy, number)) for number in range(50)} == {0, 1}


@pytest.mark.parametrize("place", [affinity, least_loaded, round_robin_devices, random_device(0)])
def test_no_device_can_run_the_model(place) -> None:
    assert place(_seen([_device(can_run=False)] * 3)) is None
    assert place(_seen([_device(can_run=False), _device()])) == 1


MODELS = {
    "there": ModelReport(4 * GB, is_resident=True, token_s=1e-4),
    "half there": ModelReport(6 * GB, 3 * GB, 0.1),
    "loading": ModelReport(8 * GB, 8 * GB, 0.3, is_loading=True),
    "failed": ModelReport(2 * GB, 2 * GB, 0.1, has_failed=True),
    "too large": ModelReport(99 * GB, 99 * GB, 4.0, can_run=False),
}
REPORT = DeviceReport(MODELS, 20 * GB, 2 * GB)


def _state(name: str, report: DeviceReport = REPORT, **num_requests: int) -> DeviceState:
    return device_state(report, name, num_requests, now_s=100.0)


def test_what_is_missing_is_loaded() -> None:
    state = _state("half there")
    assert (state.load_s, state.wait_s, state.evicted_bytes) == (0.1, 0.0, 1 * GB)
    assert not _state("too large").can_run


def test_what_another_device_has_is_copied_from_there() -> None:
    """Where devices lend weights."""
    assert device_state(REPORT, "half there", {}, 100.0, is_elsewhere=True).load_s == 0.1
    lent = MODELS["half there"]._replace(borrowed_s=0.02)
    report = REPORT._replace(models={**MODELS, "half there": lent})
    assert device_state(report, "half there", {}, 100.0, is_elsewhere=True).load_s == 0.02
    assert device_state(report, "half there", {}, 100.0).load_s == 0.1


def test_a_load_under_way_is_waited_for() -> None:
    report = REPORT._replace(loaded_s=100.2)
    loading = _state("loading", report)
    assert loading.load_s == 0.0
    assert loading.wait_s == pytest.approx(0.2)
    other = _state("half there", report, there=1)
    assert other.load_s == 0.1
    assert other.wait_s == pytest.approx(0.2)
    late = _state("loading", report._replace(loaded_s=99.0))
    assert late.wait_s == 0.0


def test_models_that_wait_are_loaded_before_it() -> None:
    state = device_state(REPORT, "failed", {"half there": 2, "there": 1}, 100.0)
    assert state.num_requests == 3
    # A load that failed a moment ago is tried again later.
    assert state.wait_s == 10.0
    fresh = DeviceReport({**MODELS, "new": ModelReport(2 * GB, 2 * GB, 0.05)}, 20 * GB, 2 * GB)
    assert device_state(fresh, "new", {"half there": 2}, 100.0).wait_s == pytest.approx(0.1)


def test_one_that_does_not_fit_waits_until_another_gives_way() -> None:
    report = REPORT._replace(budget_bytes=9 * GB)
    assert _state("half there", report, there=1).wait_s == 0.5  # the least run
    assert _state("half there", report).wait_s == 0.0  # nothing runs
    alone = REPORT._replace(is_exclusive=True)
    assert _state("half there", alone, there=1).wait_s == 0.5
    assert _state("half there", alone).evicted_bytes == 4 * GB


def test_a_resident_model_waits_for_its_own() -> None:
    assert _state("there") == DeviceState(True, 0.0, 0, queued_s=0.0)
    busy = REPORT._replace(backlog_s=0.3)
    assert _state("there", busy).wait_s == 0.3
    model = MODELS["there"]._replace(oldest_s=98.0)
    waiting = busy._replace(models={**MODELS, "there": model})
    state = _state("there", waiting)
    assert (state.wait_s, state.queued_s, state.lacks_memory) == (0.3, 2.0, True)
    assert device_state(REPORT, "there", {}, 100.0, num_tokens=5000).compute_s == 0.5


def test_a_request_lacks_memory_without_a_region_of_its_bucket() -> None:
    model = MODELS["there"]._replace(free_bucket_tokens=512, output_tokens=100)
    report = REPORT._replace(models={**MODELS, "there": model})
    assert not device_state(report, "there", {}, 100.0, num_prompt=412).lacks_memory
    assert device_state(report, "there", {}, 100.0, num_prompt=413).lacks_memory
    assert not device_state(REPORT, "there", {}, 100.0, num_prompt=9999).lacks_memory


def test_affinity_among_equals_takes_one_with_memory() -> None:
    full = _device(0, 1)._replace(queued_s=0.0, lacks_memory=True)
    assert affinity(_seen([full, _device(0, 9)._replace(queued_s=0.0)])) == 1
    # Where all are full, the number of requests decides, not the age of the first that waits.
    old = _device(0, 8)._replace(queued_s=3.0, lacks_memory=True)
    new = _device(0, 9)._replace(queued_s=2.5, lacks_memory=True)
    assert affinity(_seen([new, old])) == 1


def test_affinity_loads_a_model_elsewhere_once_all_that_have_it_are_full() -> None:
    queues = [_device(0)._replace(queued_s=waited_s, lacks_memory=True) for waited_s in (2.0, 9.0)]
    assert affinity(_seen([*queues, _device(16, gb_per_s=5)])) == 0
    assert affinity(_seen([*queues, _device(16, gb_per_s=10)])) == 2


def test_affinity_among_equals_takes_no_spare_replica() -> None:
    """Unless the others have no memory, or take longer."""
    spare = _device()._replace(is_spare=True)
    assert affinity(_seen([spare, _device(num_requests=9)])) == 1
    assert affinity(_seen([spare, _device()._replace(lacks_memory=True)])) == 0
    assert affinity(_seen([spare, _device(wait_s=0.1)])) == 0
    assert affinity(_seen([_device(1.0), spare])) == 1


def test_replicas_that_a_model_needs() -> None:
    busy, quiet = Replica(8, False, True), Replica(1, False, True)
    assert num_needed([]) == num_needed([quiet]) == num_needed([quiet] * 8) == 1
    assert num_needed([busy, quiet]) == 2
    assert num_needed([quiet, quiet, quiet._replace(waits=True)]) == 3
    assert spare([quiet, busy, quiet], 1) == [0, 2]
    assert spare([quiet, busy, quiet], 2) == [2]
    assert spare([quiet, busy], 2) == spare([], 1) == []
    assert spare([quiet._replace(is_short=False), busy, quiet], 1) == [2]


def test_a_model_that_is_not_reported_yet() -> None:
    assert _state("new") == DeviceState(True, 0.0, 0)


def test_placements_by_name() -> None:
    devices = [_device(16, 0), _device(0, 3), _device(8, 1)]
    assert PLACEMENTS["affinity"](_seen(devices)) == 1
    assert PLACEMENTS["least-loaded"](_seen(devices)) == 0
    assert PLACEMENTS["round-robin"](_seen(devices, 2)) == 2
    assert PLACEMENTS["random"](_seen(devices)) in (0, 1, 2)
