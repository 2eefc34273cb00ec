"""Fit of a modelled device to a measured run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aquifer.errors import ConfigError
from aquifer.sim.device import DEVICES, DeviceModel, ModelShape, StepModel
from aquifer.sizes import format_size

_EFFICIENCIES = np.linspace(0.2, 1.0, 321)
"""Memory efficiencies that `calibrate` tries."""

_BYTES_TOLERANCE = 0.01
"""Relative difference of weights up to which two models count as the same: norms and biases are not
part of `ModelShape.dense`."""


def calibrate(device: DeviceModel, model: ModelShape, file: Path) -> DeviceModel:
    """Fit a device's efficiencies and overhead to a result of `aquifer bench latency`.

    Bandwidth and rate are those measured in the file. Then, from the time of a step and of the
    prompts of each batch:

    1. the compute efficiency is that of the batch with the most prompt tokens;
    2. the memory efficiency is the one whose steps, with the best non-negative overhead for it,
       have the least squared relative error.

    Args:
        device: a single device of the kind that was measured.
        model: the model that was measured.
        file: the result.

    Raises:
        ConfigError: the file is no such result; or it is that of another model or device; or it has
            fewer than two batches, which do not determine both efficiency and overhead.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        batches = content["batches"]
        sizes = np.array([batch["num_prompts"] for batch in batches], np.int64)
        inputs = np.array([batch["total_input_tokens"] for batch in batches], np.int64)
        outputs = np.array([batch["total_output_tokens"] for batch in batches], np.int64)
        ours = [batch["aquifer"] for batch in batches]
        steps_s = np.array([series["step_ms"]["median"] / 1e3 for series in ours])
        firsts_s = np.array([float(np.median(series["first_tokens_seconds"])) for series in ours])
        device = replace(
            device,
            bandwidth=float(content["read_bandwidth"]),
            operations_per_s=float(content["matmul_rate"]),
        )
        measured_model = f"{content['model']} in {content['dtype']}"
        measured_bytes = content["num_parameters"] * getattr(torch, content["dtype"]).itemsize
        gpu = content["environment"]["gpu"]
        measured_device = "a CPU" if gpu is None else str(gpu["name"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--calibrate: {file} is not a result of aquifer bench latency: {error!r}"
        ) from error
    if not _is_named(device, measured_device):
        raise ConfigError(
            f"--calibrate: {file} was measured on {measured_device}, one of it; --device is "
            f"{device.name}"
        )
    if abs(measured_bytes - model.weight_bytes) > _BYTES_TOLERANCE * model.weight_bytes:
        raise ConfigError(
            f"--calibrate: {file} was measured with {measured_model}, weights of "
            f"{format_size(measured_bytes)}; those of {model.name} are "
            f"{format_size(model.weight_bytes)}"
        )
    if len(batches) < 2:
        raise ConfigError(
            f"--calibrate: {file} has {len(batches)} batches; measure at least two, such as 1,32"
        )
    # On average, a token of a prompt attends to half of the prompt.
    longest = int(inputs.argmax())
    pairs = inputs[longest] ** 2 / sizes[longest] / 2
    operations = 2.0 * model.body_parameters * inputs[longest] + model.attention_operations * pairs
    reached = operations / firsts_s[longest] / device.operations_per_s
    device = replace(device, compute_efficiency=float(min(reached, 1.0)), overhead_s=0.0)
    kv_tokens = inputs + outputs // 2  # in the middle of the outputs
    best = (np.inf, device)
    for efficiency in _EFFICIENCIES.tolist():
        tried = replace(device, memory_efficiency=efficiency)
        steps = StepModel(model, tried)
        modelled = np.array(
            [
                steps.decode_seconds(int(n), np.array([kv]))[0]
                for n, kv in zip(sizes, kv_tokens, strict=True)
            ]
        )
        # The overhead o that minimises sum(((modelled + o - steps) / steps)**2).
        weights = steps_s**-2.0
        overhead_s = max(float((weights * (steps_s - modelled)).sum() / weights.sum()), 0.0)
        misfit = float(((modelled + overhead_s - steps_s) ** 2 * weights).sum())
        if misfit < best[0]:
            best = (misfit, replace(tried, overhead_s=overhead_s))
    return replace(best[1], name=f"{device.name} as in {file.name}")


def _is_named(device: DeviceModel, gpu: str) -> bool:
    """Whether a device is a single GPU of that name: a100-40g is NVIDIA A100-SXM4-40GB."""
    return device.name in DEVICES and all(part in gpu.lower() for part in device.name.split("-"))
