"""Replays of models in one pool: the mixed trace, and each experiment with a few requests."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.tangram import models as models_module
from benchmarks.tangram.mixes import EIGHT, MixedTrace, Setting, by_class, mixed_settings, settings
from benchmarks.tangram.models import (
    LOW_RATE,
    by_batch,
    by_devices,
    by_locality,
    by_split,
    compared_splits,
    draw,
    draw_batches,
    modes,
)
from benchmarks.tangram.tables import all_tables

from aquifer.sim.trace import PREFIX_BLOCK_TOKENS, TraceRequest

LENGTHS = [TraceRequest(None, 20 + 5 * i, 3 + i) for i in range(5)]


def test_settings() -> None:
    compared = settings()
    assert set(compared["h200"].models) == set(EIGHT)
    assert compared["h200"].weight_bytes / compared["h200"].memory_bytes == pytest.approx(1.3)
    sizes_gb = [model.weight_bytes / 1e9 for model in compared["h200"].models.values()]
    assert min(sizes_gb) == pytest.approx(1, abs=0.1)
    assert 18 < max(sizes_gb) < 20
    assert compared["l40"].weight_bytes / compared["l40"].memory_bytes > 2.5
    for setting in (*compared.values(), mixed_settings()["l40, 0.5/s"][0], by_class(20)):
        largest = max(model.weight_bytes for model in setting.models.values())
        assert largest < setting.memory_bytes < setting.device.memory_bytes


def test_a_mixed_trace() -> None:
    models = settings()["h200"].models
    trace = MixedTrace(models, LENGTHS, 1.0, 200, phase=50, num_documents=10)
    requests = trace.requests()
    assert requests == trace.requests()
    of_models = [*requests[:50], *requests[100:150]]
    assert not any(request.prefix_ids for request in of_models)
    assert all(left.model != right.model for left, right in pairwise(requests[:50]))
    models_of: dict[int, str | None] = {}
    for phase in (requests[50:100], requests[150:]):
        assert len({request.model for request in phase}) == 2
        for request in phase:
            assert request.model is not None
            assert len(request.prefix_ids) * PREFIX_BLOCK_TOKENS < request.prompt_tokens
            longest = request.prompt_tokens + request.output_tokens
            assert longest <= models[request.model].max_tokens
            for number in request.prefix_ids:
                assert models_of.setdefault(number, request.model) == request.model
    assert len({request.prefix_ids for request in requests[50:100]}) < 25  # shared ones


def test_loading_by_mode() -> None:
    """Fewer and fewer bytes, from a process for each model to tensors."""
    whole = settings()["h200"]
    names = EIGHT[:4]
    models = {name: whole.models[name] for name in names}
    setting = Setting(models, whole.device, 12 * 10**9)
    found = by_locality(setting, LENGTHS, LOW_RATE, 12, set(modes(1.0)))
    assert list(found) == ["L1", "L2", "L3", "L4"]
    for row in found.values():
        assert list(row) == list(modes(1.0))
        assert all(of["not_served"] == 0 for of in row.values())
        loading = [row[name]["loading_ms"] for name in ("tensor", "whole", "process")]
        assert loading == sorted(loading)
        assert row["process"]["loading_ms"] > 1000
    assert found["L1"]["tensor"]["loading_ms"] < found["L1"]["whole"]["loading_ms"]


def test_loading_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool with room for hardly more than the largest model, reserved KV costs loads."""
    whole = settings()["h200"]
    models = {name: whole.models[name] for name in EIGHT[:4]}
    setting = Setting(models, whole.device, 13 * 10**9)
    monkeypatch.setattr(models_module, "_BATCHES", (8,))
    row = by_batch(setting, LENGTHS, 6)["8"]
    most = max(model.kv_layout.token_bytes for model in models.values())
    assert row["reserved_gb"] == pytest.approx(8 * 2048 * most / 1e9)
    for level in ("L1", "L2", "L3", "L4"):
        for of in row[level].values():
            assert (of["requests"], of["not_served"]) == (6 * 8, 0)
        assert row[level]["tensor"]["loading_ms"] <= row[level]["reserved"]["loading_ms"]
    assert row["L1"]["tensor"]["loading_ms"] < row["L1"]["reserved"]["loading_ms"]


def test_placements() -> None:
    found = by_devices(LENGTHS, 6, counts=(1, 2))
    for rows in found.values():
        assert list(rows["1"]) == ["whole, random", "tensor, random"]
        assert len(rows["2"]) == 5
        assert all(row["not_served"] == 0 for of in rows.values() for row in of.values())


def test_ratios_of_splits() -> None:
    values = {
        "one rule": [100.0, 200.0],
        "0.5": [200.0, 400.0],
        "0.67": [100.0, 100.0],
        "0.75": [300.0, 600.0],
        "0.85": [90.0, 500.0],
    }
    found = {
        name: {"ttft_mean_ms_by_seed": by_seed, "ttft_p99_ms_by_seed": [1.0, 1.0]}
        for name, by_seed in values.items()
    }
    compared = compared_splits(found)["ttft_mean_ms"]
    assert compared["best_split"] == "0.67"
    best, worst = compared["best_by_rule"], compared["worst_reasonable_by_rule"]
    assert best["mean"] == pytest.approx(0.5**0.5)
    assert (best["least"], best["most"]) == (pytest.approx(0.5), pytest.approx(1))
    # Student's t with one degree of freedom is 12.7062 at 97.5 %.
    half = 12.7062 * 0.5 * math.log(2)
    assert best["high"] == pytest.approx(0.5**0.5 * math.exp(half), rel=1e-4)
    assert best["low"] == pytest.approx(0.5**0.5 * math.exp(-half), rel=1e-4)
    assert worst["low"] == pytest.approx(worst["high"]) == pytest.approx(3.0)


def test_splits() -> None:
    setting, rate = mixed_settings()["h200, 0.5/s"]
    found = by_split(setting, rate, LENGTHS, 8, num_traces=2)
    assert set(found) >= {"one rule", "0.5", "compared"}
    assert found["one rule"]["not_served"] == 0
    assert len(found["0.5"]["ttft_p99_ms_by_seed"]) == 2


def test_the_readme_has_the_tables_and_the_plot_can_be_drawn(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "tangram"
    models, batches, splits = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("models", "batches", "splits")
    )
    readme = (folder / "README.md").read_text()
    for table in all_tables():
        assert table in readme
    draw(models, splits["splits"], tmp_path / "plot.png")
    draw_batches(batches["batches"], tmp_path / "batches.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert (tmp_path / "batches.png").stat().st_size > 10_000
