"""Replays of clusters: each part with a few requests, and the README beside its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster.run import (
    ONE_POOL,
    RateSearch,
    Searches,
    draw,
    highest,
    measure_failure,
    measure_large,
    measure_mixed,
    measure_rates,
)
from benchmarks.cluster.tables import all_tables

from aquifer.engine.policies.placement import PLACEMENTS
from aquifer.errors import ConfigError
from aquifer.sim.trace import TraceRequest

LENGTHS = [TraceRequest(None, 20 + 5 * i, 3 + i) for i in range(5)]


def test_the_search_for_a_rate() -> None:
    for first in (0.01, 0.5, 0.69, 0.71, 3.0, 100.0):
        tried: list[float] = []

        def holds(rate: float, tried: list[float] = tried) -> bool:
            tried.append(rate)
            return rate <= 0.7

        assert 0.7 / 1.1 <= highest(holds, first) <= 0.7
        assert len(set(tried)) == len(tried)
    assert highest(lambda _: False, 1.0) == 0
    with pytest.raises(ConfigError, match="any rate"):
        highest(lambda _: True, 1.0)


def test_runs_at_a_rate() -> None:
    search = RateSearch(LENGTHS, seconds=2.0, fewest=8)
    for name in (*PLACEMENTS, ONE_POOL):
        found = search.run(name, 2, 10.0)
        assert (found["rate"], found["arrivals_s"], found["not_served"]) == (10.0, 2.0, 0)
        assert 10 <= found["requests"] < 20  # without those of the warm-up
    assert search.run("affinity", 2, 1.0)["arrivals_s"] == 8.0


def test_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: RateSearch, name: str, count: int, rate: float, seed: int = 0) -> dict[str, Any]:
        holds = rate <= count * (seed + 1) / 2 and name != ONE_POOL
        holds = holds or (name == ONE_POOL and rate <= count)
        return {"rate": rate, "ttft_p90_ms": 900.0 if holds else 1100.0, "not_served": 0}

    monkeypatch.setattr(RateSearch, "run", run)
    kept: list[int] = []
    searches = [Searches(["random"], (2, 4), (0, 1), 0.1), Searches([ONE_POOL], (2,), (0,), 5.0)]

    def keep(found: dict[str, Any]) -> None:
        kept.append(sum(map(len, found.values())))

    found = measure_rates(RateSearch(LENGTHS), searches, keep)
    assert kept == [1, 2, 3]
    del found["random"]["2"]
    found = measure_rates(RateSearch(LENGTHS), searches, keep, found)  # only what is missing
    assert kept == [1, 2, 3, 3]
    for name, count, rates in (("random", 2, [1, 2]), ("random", 4, [2, 4]), (ONE_POOL, 2, [2])):
        cell = found[name][str(count)]
        assert cell["rates"] == pytest.approx([rate / 1.05 for rate in rates], rel=0.05)
        assert len(cell["runs"]) == len(cell["seeds"]) == len(rates)


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
