"""Placement on the devices of a server: what is sent, and what is made of the answers."""

from __future__ import annotations

import json

import pytest
from benchmarks.tangram.placed import figures, load_of

from aquifer.bench.serving.load import Run
from aquifer.bench.serving.stream import Stream
from aquifer.sim.trace import TraceRequest


def test_requests_as_they_are_sent() -> None:
    requests = [TraceRequest(0.5, 3, 7, "a"), TraceRequest(1.5, 2, 1, "b")]
    load = load_of(requests)
    assert list(load.arrivals_s) == [0.5, 1.5]
    first, second = map(json.loads, load.bodies)
    assert (first["model"], len(first["prompt"]), first["max_tokens"]) == ("a", 3, 7)
    assert (second["model"], len(second["prompt"]), second["max_tokens"]) == ("b", 2, 1)
    assert first["ignore_eos"]
    assert first["stream"]


def test_figures_of_a_run() -> None:
    run = Run(streams=[Stream(3, 7, 10.0, [10.0 + seconds]) for seconds in (0.1, 0.2, 0.6)])
    of_devices = {"x": {"loads": 2}, "y": {"loads": 1}}
    states = {"models": [{"devices": of_devices}, {"devices": of_devices}]}
    found = figures(run, states)
    assert (found["requests"], found["failures"]) == (3, 0)
    assert found["ttft_mean_ms"] == pytest.approx(300)
    assert found["ttft_p50_ms"] == pytest.approx(200)
    assert found["loads"] == {"x": 4, "y": 2}
