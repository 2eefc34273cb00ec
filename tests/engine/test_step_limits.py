"""The limits of a step: options, or the defaults of the device."""

from __future__ import annotations

import pytest

from aquifer.config import EngineConfig
from aquifer.engine.step_limits import StepLimits


@pytest.mark.parametrize(
    ("device_type", "limits"),
    [("cpu", StepLimits(256, 2048, None)), ("cuda", StepLimits(512, 8192, 0.04))],
)
def test_defaults_are_those_of_the_device(device_type: str, limits: StepLimits) -> None:
    assert StepLimits.of(EngineConfig(()), device_type) == limits


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_options_come_first(device_type: str) -> None:
    config = EngineConfig((), max_num_seqs=9, max_num_batched_tokens=77, max_prefill_ms=25)
    assert StepLimits.of(config, device_type) == StepLimits(9, 77, 0.025)
    unlimited = EngineConfig((), max_prefill_ms=0)
    assert StepLimits.of(unlimited, device_type).max_prefill_s is None
