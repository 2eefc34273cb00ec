"""Speeds of the sources of weights: measured, expected, and tried again."""

from __future__ import annotations

import pytest

from aquifer.weights.sources import SourceSpeeds, WeightSource

MAPPED, NEIGHBOUR, HOST, DISK = WeightSource
MODEL_BYTES = 16 * 10**9


def bytes_per_s(speeds: SourceSpeeds, source: WeightSource) -> float:
    return 1 / speeds.byte_s(source)


def test_before_anything_is_measured():
    """Pages that are to be mapped first come after host memory."""
    speeds = SourceSpeeds()
    assert sorted(WeightSource, key=speeds.byte_s) == [MAPPED, HOST, NEIGHBOUR, DISK]
    assert speeds.fastest([DISK, NEIGHBOUR]) is NEIGHBOUR
    speeds.measured({}, 1.0, MODEL_BYTES)
    assert speeds.fastest([DISK]) is DISK


def test_what_is_measured_decides():
    speeds = SourceSpeeds()
    speeds.measured({HOST: MODEL_BYTES}, 0.8, MODEL_BYTES)  # 20 GB/s
    assert bytes_per_s(speeds, HOST) == pytest.approx(20e9)
    speeds.measured({NEIGHBOUR: MODEL_BYTES}, 0.5, MODEL_BYTES)
    assert speeds.fastest([HOST, NEIGHBOUR, DISK]) is NEIGHBOUR
    assert speeds.fastest([HOST, NEIGHBOUR, MAPPED]) is MAPPED
    speeds.measured({MAPPED: MODEL_BYTES}, 0.04, MODEL_BYTES)
    assert bytes_per_s(speeds, MAPPED) == pytest.approx(400e9)


def test_a_load_from_several_sources_measures_the_one_that_takes_longest():
    speeds = SourceSpeeds()
    before_s = speeds.byte_s(MAPPED)
    speeds.measured({MAPPED: MODEL_BYTES // 2, DISK: MODEL_BYTES // 2}, 8.0, MODEL_BYTES)
    assert speeds.byte_s(DISK) == pytest.approx((2e9 * 1e9) ** -0.5)  # it was half of the model
    assert speeds.byte_s(MAPPED) >= before_s
    few_bytes = MODEL_BYTES // 10**6
    known_s = speeds.byte_s(DISK)
    speeds.measured({MAPPED: MODEL_BYTES - few_bytes, DISK: few_bytes}, 0.05, MODEL_BYTES)
    assert speeds.byte_s(DISK) == known_s
    assert bytes_per_s(speeds, MAPPED) == pytest.approx(320e9, rel=1e-3)


def test_a_load_of_a_small_part_says_little():
    speeds = SourceSpeeds()
    speeds.measured({MAPPED: 10**6}, 0.01, MODEL_BYTES)
    assert bytes_per_s(speeds, MAPPED) == pytest.approx(300e9, rel=1e-2)


def test_loads_that_are_short_but_not_fast_leave_the_order():
    """As those of a small model are, from anywhere."""
    for first in WeightSource:
        speeds = SourceSpeeds()
        order = sorted(WeightSource, key=speeds.byte_s)
        speeds.measured({first: 10**6}, 0.01, 10**6)
        assert sorted(WeightSource, key=speeds.byte_s) == order
    for first, second in ((HOST, MAPPED), (MAPPED, HOST), (DISK, HOST)):
        speeds = SourceSpeeds()
        speeds.measured({first: MODEL_BYTES}, 0.5, MODEL_BYTES)
        speeds.measured({second: MODEL_BYTES}, 500.0, MODEL_BYTES)
        slowest = max((first, second), key=order.index)
        below = order[order.index(slowest) + 1 :]
        assert all(speeds.fastest([slowest, each]) is slowest for each in below)


def test_a_fast_disk_makes_no_other_source_faster():
    speeds = SourceSpeeds()
    speeds.measured({DISK: MODEL_BYTES}, 1.0, MODEL_BYTES)  # the system has the files in memory
    assert bytes_per_s(speeds, HOST) == pytest.approx(50e9)
    assert speeds.fastest([HOST, DISK]) is HOST


def test_a_source_that_was_slow_once_is_tried_again():
    """And one that is slow each time is passed over most of the time."""
    speeds = SourceSpeeds()
    speeds.measured({HOST: MODEL_BYTES}, 0.3, MODEL_BYTES)
    num_tries = 0
    for _ in range(100):
        source = speeds.fastest([MAPPED, HOST])
        num_tries += source is MAPPED
        speeds.measured({source: MODEL_BYTES}, 2.0 if source is MAPPED else 0.3, MODEL_BYTES)
    assert 2 <= num_tries <= 20
    while speeds.fastest([MAPPED, HOST]) is HOST:
        speeds.measured({HOST: MODEL_BYTES}, 0.3, MODEL_BYTES)
    speeds.measured({MAPPED: MODEL_BYTES}, 0.04, MODEL_BYTES)
    assert speeds.fastest([MAPPED, HOST]) is MAPPED
