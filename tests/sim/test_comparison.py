"""Comparison of replays: which runs are within bounds, waste, and queues that grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.tiny_replay import config_of

from aquifer.bench.replay import (
    Bounds,
    Run,
    Workload,
    find_rate,
    is_within,
    kv_waste,
    queue_waits_s,
    sustained_rate,
)
from aquifer.sim.results import ReplayResult, RequestRecord
from aquifer.sim.trace import TraceRequest

RECORD = RequestRecord("m", 10.0, 5, 11, scheduled_s=10.5, first_token_s=11.0, finished_s=13.0)
"""TTFT 1 s, TPOT 0.2 s, latency 3 s for 11 tokens."""


def _run(*records: RequestRecord, rate: float | None = 1.0, **averages: float) -> Run:
    return Run("paged", rate, ReplayResult(list(records), averages=averages))


@pytest.mark.parametrize(
    ("bounds", "within"),
    [
        (Bounds(), True),
        (Bounds(latency_s=3 / 11, ttft_s=1.0, tpot_s=0.2 + 1e-9), True),
        (Bounds(latency_s=0.27), False),
        (Bounds(ttft_s=0.99), False),
        (Bounds(tpot_s=0.199), False),
    ],
)
def test_bounds(bounds, within):
    run = _run(RECORD)
    assert is_within(run, bounds) == within
    assert sustained_rate([run], bounds) == (1.0 if within else None)


def test_bounds_are_of_means_and_of_99th_percentiles():
    slow = replace(RECORD, first_token_s=20.0, finished_s=30.0)  # TTFT 10 s, TPOT 1 s, latency 20 s
    run = _run(*[RECORD] * 99, slow)
    mean_s = (99 * 3 + 20) / 100 / 11
    assert is_within(run, Bounds(latency_s=mean_s + 1e-9))
    assert not is_within(run, Bounds(latency_s=mean_s - 1e-9))
    # numpy's 99th percentile of these is a hundredth of the way from the 99th to the 100th.
    assert is_within(run, Bounds(ttft_s=1.091))
    assert not is_within(run, Bounds(ttft_s=1.089))
    assert is_within(run, Bounds(tpot_s=0.2081))
    assert not is_within(run, Bounds(tpot_s=0.2079))


def test_a_run_with_a_request_that_was_not_served_is_within_no_bounds():
    """However fast the others are: a rate counts only if everything is served."""
    refused = replace(RECORD, scheduled_s=None, first_token_s=None, finished_s=None)
    assert not is_within(_run(RECORD, refused), Bounds())
    assert not is_within(_run(refused), Bounds())
    runs = [_run(RECORD), _run(RECORD, refused, rate=2.0)]
    assert sustained_rate(runs, Bounds()) == 1.0


def test_a_search_stops_where_requests_can_never_be_served():
    requests = [TraceRequest(None, 5, 5), TraceRequest(None, 100, 50)]
    config = config_of("paged", kv_pages=12)
    runs = find_rate(config, Workload(requests, 4, 0), Bounds(), lambda *_: None)
    assert [run.rate for run in runs] == [1.0]
    assert sustained_rate(runs, Bounds()) is None


def test_waste_is_what_is_used_and_holds_no_token():
    run = _run(RECORD, written=60.0, future=5.0, internal=20.0, external=15.0, free=500.0)
    run.result.averages["retained"] = 300.0
    assert kv_waste(run) == pytest.approx((5 + 20 + 15) / (5 + 20 + 15 + 60))
    unused = _run(RECORD, written=0.0, future=0.0, internal=0.0, external=0.0)
    assert kv_waste(unused) == 0.0


def _waiting(waits_s: list[float]) -> Run:
    """A run of requests, one a second, that waited so long; each took 3 s from its first step."""
    return _run(
        *(
            RequestRecord("m", float(i), 5, 11, i + wait_s, i + wait_s + 1.0, i + wait_s + 3.0)
            for i, wait_s in enumerate(waits_s)
        )
    )


def test_a_queue_that_grows():
    """As at 1.25 times the capacity: each request waits 0.25 s longer than the one before it."""
    found = queue_waits_s(_waiting([0.25 * i for i in range(100)]))
    assert found is not None
    assert list(found) == pytest.approx([0.25 * 37, 0.25 * 87])
    assert queue_waits_s(_waiting([0.25 * i for i in range(19)])) is None, "too few to tell"


@pytest.mark.parametrize(
    "waits_s",
    [
        [0.0] * 100,
        [5.0] * 100,  # long, but no longer at the end
        [0.1 * i for i in range(25)] + [2.5] * 75,  # an empty device fills
        [0.002 * i for i in range(100)],  # it grows, but is too short to matter
    ],
)
def test_queues_that_do_not_grow(waits_s):
    assert queue_waits_s(_waiting(waits_s)) is None
