"""Replays of clusters: each part with a few requests, and the README beside its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.cluster.run import (
    ONE_POOL,
    RateSearch,
    draw,
    highest,
    measure_failure,
    measure_large,
    measure_mixed,
)
from benchmarks.cluster.tables import all_tables

from aquifer.engine.policies.placement import PLACEMENTS
from aquifer.errors import ConfigError
from aquifer.sim.trace import TraceRequest

LENGTHS = [TraceRequest(None, 20 + 5 * i, 3 + i) for i in range(5)]


def test_the_search_for_a_rate() -> None:
    for first in range(-3, 9):
        assert highest(lambda power: power <= 3, first) == 3
    with pytest.raises(ConfigError, match="is best"):
        highest(lambda _: True, 0)
    with pytest.raises(ConfigError, match="is best"):
        highest(lambda _: False, 0)


def test_runs_at_a_rate() -> None:
    search = RateSearch(LENGTHS, seconds=1.0, fewest=8)
    for name in (*PLACEMENTS, ONE_POOL):
        found = search.run(name, 2, 10.0)
        assert (found["rate"], found["requests"], found["not_served"]) == (10.0, 10, 0)


def test_a_failure() -> None:
    found = measure_failure(LENGTHS, count=2, num_requests=24)
    assert found["at_s"] < found["back_s"]
    for name in ("affinity", "least-loaded", "random"):
        assert not found[name]["no failure"]["failed"]
        assert sum(found[name]["failure"][part]["requests"] for part in ("before", "after")) > 0


def test_different_workers_and_many_models() -> None:
    mixed = measure_mixed(LENGTHS, num_requests=12)
    assert all(0 <= mixed[name]["on_h200"] <= 1 for name in PLACEMENTS)
    large = measure_large(LENGTHS, count=3, num_models=200, num_requests=20)
    assert (large["workers"], large["models"], large["not_served"]) == (3, 200, 0)


def test_the_readme_has_the_tables_and_the_plot_can_be_drawn(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "cluster"
    readme = (folder / "README.md").read_text()
    for table in all_tables():
        assert table in readme
    draw(json.loads((folder / "rates.json").read_text())["results"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
