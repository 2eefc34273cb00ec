"""ODMA's benchmark on small traces of made-up lengths."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.odma import device, replays
from benchmarks.odma.accuracy import chosen_models, static_bounds
from benchmarks.odma.run import run_part
from benchmarks.odma.workloads import (
    ALPACA,
    CODE,
    CONVERSATIONS,
    GSM8K,
    most_tokens,
    num_good,
    tokens_in_use,
)

from aquifer.errors import ConfigError
from aquifer.predict.data import Example
from aquifer.predict.forecaster import Asked
from aquifer.predict.train import Sample
from aquifer.sim.results import RequestRecord


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces with the names and formats of the real ones."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)

    def write(name: str, text: str) -> None:
        with gzip.open(folder / name, "wt") as file:
            file.write(text)

    for name, mean in ((CONVERSATIONS, 5.0), (CODE, 3.0)):
        rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        for second in range(200):
            prompt, output = np.ceil(random.lognormal((6, mean), 0.6)).astype(int)
            rows.append(f"2023-11-16 18:{second // 60:02}:{second % 60:02}.0,{prompt},{output}")
        write(name, "\n".join(rows) + "\n")
    questions = [f"question number {number} of many" for number in range(80)]
    lengths = np.ceil(random.lognormal(4.5, 0.5, (10, 80))).astype(int)
    names = ["Qwen1.5-7B-Chat", *"abcdefghi"]  # the first is the model of the replays
    lists = dict(zip(names, lengths.tolist(), strict=True))
    write(ALPACA, json.dumps({"instructions": questions, "output_tokens": lists}))
    lines = [
        {"question": question, "output_tokens": length}
        for question, length in zip(questions, lengths[0].tolist(), strict=True)
    ]
    write(GSM8K, "\n".join(map(json.dumps, lines)))
    return folder


def measured(part: str, data: Path, output: Path, number: int) -> list[dict[str, Any]]:
    run_part(part, data, output, number)
    content = json.loads((output / f"{part}.json").read_text())
    assert content["part"] == part
    rows: list[dict[str, Any]] = content["rows"]
    return rows


@pytest.mark.parametrize("part", ["pressure", "utilisation", "drift"])
def test_replays(part: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SHARES", (2.0,))
    monkeypatch.setattr(replays, "WAYS", {way: replays.WAYS[way] for way in ("off", "random")})
    rows = measured(part, data, tmp_path, 90)
    assert all(row["not_completed"] == 0 for row in rows)
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert (tmp_path / f"{part}.png").stat().st_size > 1000
    if part == "utilisation":
        used = {row["way"]: row["utilisation"] for row in rows if row["source"] == "conversations"}
        assert used["static, the longest context"] < used["ODMA: dynamic buckets"] <= 1
        assert used["ODMA: dynamic buckets"] < used["virtual"] <= 1


@pytest.mark.parametrize("part", ["demand", "steady", "grouping", "devices"])
def test_replays_without_plots(
    part: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DEMAND_SHARES", "STEADY_SHARES"):
        monkeypatch.setattr(replays, name, (2.0,))
    rows = measured(part, data, tmp_path, 30)
    assert all(row["not_completed"] == 0 for row in rows)
    if part == "devices":
        assert all(sum(row["placed"]) == 30 for row in rows)
    if part == "grouping":
        assert {row["groups_by_bucket"] for row in rows} == {False, True}


def test_the_demand_in_time() -> None:
    """Two requests of 10 tokens that get 10 more each, one after the other, and a gap."""
    records = [RequestRecord("m", at_s, 10, 10) for at_s in (0.0, 3.0)]
    for record in records:
        record.scheduled_s, record.finished_s = record.arrival_s, record.arrival_s + 2
    assert tokens_in_use(records, 6).tolist() == [10, 15, 0, 10, 15, 0]
    assert most_tokens(records, 6) == 15


def test_accuracy(data: Path, tmp_path: Path) -> None:
    rows = measured("accuracy", data, tmp_path, 60)
    for row in rows:
        if "accuracy" in row:
            assert 0 <= row["right_bucket"] <= row["accuracy"] <= 1
            assert 0 < row["given_over_needed"] <= row["given_over_needed_in_the_end"]
        else:
            assert row["mean_absolute_error"] > 0
            assert len(row["calibration"]) == 9
    # A forecast that is the same for all gives all the same bucket.
    alike = [row["num_used"] for row in rows if row["way"] == "S3, all outputs alike"]
    assert alike == [1] * 5
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_static_buckets_and_models() -> None:
    samples = [Sample(Asked([1], 100), length) for length in (5, 95, 40)]
    assert static_bounds(samples) == [10, 19, 29, 38, 48, 57, 67, 76, 86, 95]
    examples = [Example(number + 1, "x", model=f"m{number:02}") for number in range(16)]
    assert chosen_models(examples) == [f"m{number:02}" for number in range(1, 16, 2)]
    assert chosen_models(examples[:2]) == ["m00", "m01"]


def test_a_real_model_and_the_overhead(data: Path, tmp_path: Path) -> None:
    off, prior, oracle = measured("real", data, tmp_path, 15)
    assert oracle["preemptions"] <= off["preemptions"]
    assert min(off["tokens_per_s"], prior["tokens_per_s"]) > 0
    rows = measured("overhead", data, tmp_path, 15)
    assert [row["way"] for row in rows] == ["off", "prior"]


def test_an_engine_that_serves(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with the bundled model, of which a token takes 3 KiB."""
    static, *_, virtual = device.WAYS
    odma = "ODMA: dynamic buckets"
    monkeypatch.setattr(device, "_MOST_BEFORE_S", 0.2)
    settings = {
        "model": "demo",
        "device": "cpu",
        "kv_bytes": 6 << 20,
        "memory_bytes": 24 << 20,
        "context_tokens": 512,
        "max_seqs": 64,
        "seconds": 0.1,  # at least one step
    }
    content = run_part("device", data, tmp_path, 80, ways=[static, virtual], **settings)
    kept = [row for row in content["rows"] if row["way"] == virtual]
    content = run_part("device", data, tmp_path, 80, ways=[odma, static], **settings)
    assert content["failed"] == {}
    assert [row["way"] for row in content["rows"]] == [static] * 3 + [odma] * 3 + [virtual] * 3
    assert content["rows"][6:] == kept
    with pytest.raises(ConfigError, match="context_tokens"):
        device.with_earlier({**content, "context_tokens": 1}, content)
    for row in content["rows"]:
        assert 0 < row["utilisation"] <= 1
        assert row["measured_s"] >= 0.1
        assert 0 < row["running"] <= row["most_running"]
        if row["way"] == static:
            assert row["most_running"] == (6 << 20) // (512 * 3072)
        if row["way"] == virtual:
            assert row["most_running"] > (6 << 20) // (512 * 3072)
    assert (tmp_path / "device.png").stat().st_size > 1000


def test_a_trace_that_is_served_in_short_memory(data: Path, tmp_path: Path) -> None:
    """On the CPU, as above."""
    settings = {
        "model": "demo",
        "device": "cpu",
        "speed": 50.0,
        "kv_bytes": 16 << 20,
        "memory_bytes": 64 << 20,
        "context_tokens": 512,
        "max_seqs": 64,
    }
    content = run_part("served", data, tmp_path, 3, **settings)
    assert [row["way"] for row in content["rows"]] == ["plenty", "off", "prior", "oracle"]
    assert 0 < content["mean_bytes"] <= content["p95_bytes"] <= content["demand_bytes"]
    plenty, *others = content["rows"]
    assert plenty["preemptions"] == 0
    for row in others:
        assert row["kv_bytes"] == int(0.6 * content["p95_bytes"])
        assert row["mean_ttft"] <= row["mean_e2el"]
        assert 0 <= row["goodput"][0] <= row["goodput"][-1] <= row["tokens_per_s"]
    assert (tmp_path / "served.png").stat().st_size > 1000


def test_goodput_and_demand() -> None:
    def record(arrival: float, first: float, end: float) -> RequestRecord:
        return RequestRecord("m", arrival, 100, 11, arrival, first, end)

    records = [record(0, 1, 2), record(0, 3, 4), record(0, 1, 9), RequestRecord("m", 0, 5, 5)]
    assert num_good(records, ttft_s=2, tpot_s=0.1) == 1
    assert num_good(records, ttft_s=5, tpot_s=0.1) == 2
    assert num_good(records, ttft_s=5, tpot_s=0.8) == 3
    assert most_tokens(records[:1]) == pytest.approx(111, abs=1)
    assert 300 < most_tokens(records) < 333
