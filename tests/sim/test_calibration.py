"""Calibration: the device that gave the measured times is found, and other results are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aquifer.errors import ConfigError
from aquifer.sim.calibration import calibrate
from aquifer.sim.device import DEVICES, MODELS, StepModel, StepWork, find_device

LLAMA = MODELS["llama-3-8b"]
H200 = DEVICES["h200"]
STEPS = StepModel(LLAMA, H200)


def _latency_file(
    folder: Path, steps: StepModel, sizes: tuple[int, ...], **changes: object
) -> Path:
    """A result of `aquifer bench latency` with these step times; `changes` replace its entries."""
    batches = []
    for size in sizes:
        kv_tokens = size * (512 + 64)
        work = StepWork(size * 512, 0, 0, size * 512, size * 512 * 512 // 2)
        batches.append(
            {
                "num_prompts": size,
                "total_input_tokens": size * 512,
                "total_output_tokens": size * 128,
                "aquifer": {
                    "step_ms": {
                        "median": 1e3 * float(steps.decode_seconds(size, np.array([kv_tokens]))[0])
                    },
                    "first_tokens_seconds": [steps.seconds(work)] * 2,
                },
            }
        )
    content = {
        "environment": {"gpu": {"name": "NVIDIA H200"}},
        "model": "llama",
        "num_parameters": LLAMA.weight_bytes // 2,
        "dtype": "bfloat16",
        "read_bandwidth": 4e12,
        "matmul_rate": 7e14,
        "batches": batches,
    }
    file = folder / "latency.json"
    file.write_text(json.dumps(content | changes))
    return file


def test_calibration_finds_the_device_that_gave_the_times(tmp_path):
    truth = replace(
        H200,
        bandwidth=4e12,
        operations_per_s=7e14,
        overhead_s=5e-4,
        memory_efficiency=0.8,
        compute_efficiency=0.7,
    )
    file = _latency_file(tmp_path, StepModel(LLAMA, truth), (1, 32, 64, 128))
    found = calibrate(H200, LLAMA, file)
    assert (found.bandwidth, found.operations_per_s) == (4e12, 7e14)
    assert found.memory_efficiency == pytest.approx(0.8, abs=0.01)
    assert found.compute_efficiency == pytest.approx(0.7, rel=0.01)
    assert found.overhead_s == pytest.approx(5e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "device", "changes", "message"),
    [
        ("opt-13b", "h200", {}, "with llama in bfloat16, .* those of opt-13b are 23.92 GiB"),
        ("llama-3-8b", "h200", {"dtype": "float32"}, "with llama in float32, weights of 29.9"),
        ("llama-3-8b", "a100-80g", {}, "was measured on NVIDIA H200, .*; --device is a100-80g"),
        ("llama-3-8b", "4xh200", {}, "was measured on NVIDIA H200, one of it; .* 4xh200"),
        ("llama-3-8b", "h200", {"environment": {"gpu": None}}, "was measured on a CPU"),
        ("llama-3-8b", "h200", {"dtype": "float15"}, "is not a result of aquifer bench latency"),
        ("llama-3-8b", "h200", {"batches": []}, "has 0 batches"),
    ],
)
def test_another_model_or_device_is_refused(tmp_path, model, device, changes, message):
    file = _latency_file(tmp_path, STEPS, (1, 32), **changes)
    with pytest.raises(ConfigError, match=message):
        calibrate(find_device(device), MODELS[model], file)


def test_the_kind_of_a_device_is_in_the_name_of_the_gpu(tmp_path):
    gpu = {"environment": {"gpu": {"name": "NVIDIA A100-SXM4-40GB"}}}
    file = _latency_file(tmp_path, STEPS, (1, 32), **gpu)
    assert calibrate(DEVICES["a100-40g"], LLAMA, file).memory_bytes == 40 << 30
    with pytest.raises(ConfigError, match="--device is a100-80g"):
        calibrate(DEVICES["a100-80g"], LLAMA, file)


def test_calibration_needs_a_latency_result(tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"benchmark": "load"}')
    with pytest.raises(ConfigError, match="is not a result of aquifer bench latency"):
        calibrate(H200, LLAMA, file)
    with pytest.raises(ConfigError, match="is not a result"):
        calibrate(H200, LLAMA, tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="has 1 batches"):
        calibrate(H200, LLAMA, _latency_file(tmp_path, STEPS, (4,)))
