"""The benchmark of models on a device: its models, and each experiment with small ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tangram import device
from benchmarks.tangram.checkpoints import CONFIGS, write_folders
from benchmarks.tangram.mixes import EIGHT

from aquifer.sim.device import MODELS
from aquifer.sim.locality import LOCALITIES
from aquifer.sim.trace import TraceRequest
from aquifer.weights.checkpoint import Checkpoint

LENGTHS = [TraceRequest(None, 20 + 5 * i, 3 + i) for i in range(5)]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


def small(name: str, num_layers: int) -> dict[str, Any]:
    config = CONFIGS[name] | SMALL | {"vocab_size": 512, "num_hidden_layers": num_layers}
    return config | {"num_key_value_heads": 2, "max_position_embeddings": 2048}


def test_models_have_the_shapes_of_the_replay(tmp_path: Path) -> None:
    assert tuple(CONFIGS) == EIGHT
    for name, folder in write_folders(tmp_path, CONFIGS).items():
        Checkpoint.without_tensors(folder)
        weight_bytes = device.weight_bytes_of(folder)
        assert weight_bytes == pytest.approx(MODELS[name].weight_bytes, rel=0.1)  # in whole pages


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("qwen-2.5-0.5b", "llama-3.2-3b", "llama-3-8b")
    folders = write_folders(tmp_path, {n: small(n, 4 + i) for i, n in enumerate(names)})
    monkeypatch.setattr(device, "BATCHES", (1, 3))
    monkeypatch.setattr(device, "LOCALITIES", {level: LOCALITIES[level] for level in ("L1", "L3")})
    for name, value in (("_DECODE_TOKENS", 6), ("_MOST_OUTPUT_TOKENS", 2), ("_REPEATS", 2)):
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device, "_DECODE_BATCH", 2)
    monkeypatch.setattr(device, "POOL_FACTOR", 1.1)
    monkeypatch.setattr(device, "_PAGE_BYTES", 64 << 10)
    content: dict[str, Any] = {}
    device.measure_locality(folders, LENGTHS, 5, "cpu", content)
    device.measure_alone(folders, "cpu", content)
    assert set(content["locality"]) == {"1", "3"}
    for size, found in content["locality"].items():
        assert set(found) == {"L1", "L3"}
        for row in found.values():
            for figures in row.values():
                assert len(figures["served"]) == 5
                for served in figures["served"]:
                    assert served["loading_s"] <= served["first_token_s"] <= served["seconds"]
                    missing = served["resident_bytes"] < content["weight_bytes"][served["model"]]
                    assert missing == (served["loading_s"] > 0)
            assert set(row) == {"tensor", "whole"} | ({"whole, not kept"} if size == "1" else set())
    row = content["locality"]["1"]["L1"]
    assert row["whole, not kept"]["loads"] == 5  # each one is a cold start
    assert row["whole"]["loads"] >= 4  # no model comes twice in a row; the first may be there
    assert 0 < row["tensor"]["moved_gb"] < row["whole"]["moved_gb"]
    assert set(content["alone"]) == set(content["resident_ms"]) == set(names)
    json.dumps(content)
    device.draw(content, tmp_path / "device.png")
    assert (tmp_path / "device.png").stat().st_size > 10_000
