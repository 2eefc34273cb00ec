"""Placement of requests on devices: Algorithm 2 with equation 3, and the baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from aquifer.engine.policies.placement import (
    DeviceState,
    PlacementSnapshot,
    affinity,
    least_loaded,
    load_s,
    random_device,
    round_robin_devices,
)

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
        int(missing_gb * GB),
        gb_per_s * GB,
        num_requests,
        int(evicted_gb * GB),
        wait_s,
    )


def _seen(devices: Sequence[DeviceState], num_placed: int = 0) -> PlacementSnapshot:
    return PlacementSnapshot(devices, num_placed)


def test_equation_3() -> None:
    assert load_s(_device(missing_gb=10)) == pytest.approx(0.4)
    assert load_s(_device()) == 0


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
