"""How large the pool is: a table of devices and options, and what is proposed works."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from aquifer.config import EngineConfig, ModelSpec
from aquifer.errors import ConfigError
from aquifer.memory.budget import (
    DeviceMemory,
    choose_page_bytes,
    make_pool,
    pool_budget,
)
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.owners import GUARD
from aquifer.memory.pool import PROCESS, Kind, Owner
from aquifer.sizes import parse_size
from aquifer.weights.parameters import Parameter, placed_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MODELS = (ModelSpec("a", Path("a")),)
CPU = DeviceMemory(
    name="cpu",
    is_gpu=False,
    total_bytes=16 * GIB,
    available_bytes=8 * GIB,
    overhead_bytes=0,
    granularity_bytes=4 * KIB,
    default_page_bytes=64 * KIB,
    max_mappings=57338,
)
GPU = DeviceMemory(
    name="cuda:0",
    is_gpu=True,
    total_bytes=140 * GIB,
    available_bytes=139 * GIB,
    overhead_bytes=600 * MIB,
    granularity_bytes=2 * MIB,
    default_page_bytes=2 * MIB,
    max_mappings=None,
)


@pytest.mark.parametrize(
    ("device", "memory_bytes", "weight_bytes", "expected_bytes"),
    [
        (CPU, None, 3 * GIB, 5 * GIB),  # the weights and a quarter of what is free
        (CPU, None, 8 * GIB, 10 * GIB),
        (CPU, 3 * GIB, 3 * GIB, 3 * GIB),
        (CPU, 8 * GIB, 3 * GIB, 8 * GIB),
        # A share of the total, whatever other processes hold.
        (GPU, None, 15 * GIB, int(0.9 * 140 * GIB)),
        (GPU, None, 124 * GIB, int(0.9 * 140 * GIB)),
        (GPU, 20 * GIB, 15 * GIB, 20 * GIB),
        (GPU, 15 * GIB + 600 * MIB, 15 * GIB, 15 * GIB + 600 * MIB),
        (GPU, 139 * GIB + 600 * MIB, 15 * GIB, 139 * GIB + 600 * MIB),  # what we hold is ours
    ],
)
def test_budgets(device, memory_bytes, weight_bytes, expected_bytes):
    config = EngineConfig(MODELS, memory_bytes=memory_bytes)
    assert pool_budget(config, device, [weight_bytes]) == expected_bytes


@pytest.mark.parametrize(
    ("device", "options", "weight_bytes", "words"),
    [
        (CPU, {"memory_bytes": 2 * GIB}, 3 * GIB, "3.00 GiB, more than the 2.00 GiB of --memory"),
        (
            CPU,
            {"memory_bytes": 9 * GIB},
            3 * GIB,
            "8.00 GiB free; end other programs, or give less",
        ),
        (CPU, {}, 9 * GIB, "8.00 GiB free; end other programs, or serve a smaller model"),
        (GPU, {"memory_bytes": 15 * GIB}, 15 * GIB, "600.00 MiB, more than the 15.00 GiB of --mem"),
        (GPU, {"gpu_memory_utilization": 0.1}, 15 * GIB, "14.00 GiB of --gpu-memory-utilization 0"),
        (
            GPU,
            {"memory_bytes": 140 * GIB},
            15 * GIB,
            "--memory asks for 140.00 GiB, and cuda:0 has",
        ),
        (GPU, {"gpu_memory_utilization": 1.0}, 15 * GIB, "139.59 GiB of 140.00 GiB left for this"),
    ],
)
def test_what_is_proposed_works(device, options, weight_bytes, words):
    config = EngineConfig(MODELS, **options)
    with pytest.raises(ConfigError) as refusal:
        pool_budget(config, device, [weight_bytes])
    assert words in str(refusal.value)
    proposal = re.search(r"give at (?:least|most) ([\d.]+ ?\w*)$", str(refusal.value))
    if proposal is None:
        assert device is CPU  # where nothing was taken into account but the figures themselves
    elif "gpu_memory_utilization" in options:
        better = replace(config, gpu_memory_utilization=float(proposal[1]))
        assert pool_budget(better, device, [weight_bytes]) > 0
    else:
        better = replace(config, memory_bytes=parse_size(proposal[1]))
        assert pool_budget(better, device, [weight_bytes]) > 0


def test_a_gpu_that_is_full_is_said_to_be():
    """No option helps: the default asks for more than there is, and so would any other."""
    busy = replace(GPU, available_bytes=10 * GIB)
    with pytest.raises(ConfigError, match=r"10\.59 GiB of 140\.00 GiB left; free more of it"):
        pool_budget(EngineConfig(MODELS), busy, [15 * GIB])
    with pytest.raises(ConfigError, match=r"give at most 0\.0756$"):
        pool_budget(EngineConfig(MODELS), busy, [GIB])


def test_engines_that_start_together_get_the_same():
    """Each is told of its own overhead alone, and of what the other has taken so far."""
    config = EngineConfig(MODELS, gpu_memory_utilization=0.45)
    budgets = {
        pool_budget(config, replace(GPU, available_bytes=available_bytes), [15 * GIB])
        for available_bytes in (139 * GIB, 138 * GIB, 76 * GIB)
    }
    assert budgets == {int(0.45 * 140 * GIB)}


@pytest.mark.parametrize(
    ("device", "options", "weight_bytes", "page_bytes"),
    [
        (CPU, {}, GIB, 64 * KIB),
        (CPU, {"memory_bytes": 57338 * 64 * KIB}, GIB, 64 * KIB),
        (CPU, {"memory_bytes": 57339 * 64 * KIB}, GIB, 128 * KIB),
        (CPU, {"memory_bytes": 60 * GIB}, GIB, 2 * MIB),
        (CPU, {"page_bytes": 4 * KIB, "memory_bytes": 57338 * 4 * KIB}, MIB, 4 * KIB),
        (GPU, {}, 15 * GIB, 2 * MIB),
        (GPU, {"page_bytes": 32 * MIB}, 15 * GIB, 32 * MIB),
    ],
)
def test_page_sizes(device, options, weight_bytes, page_bytes):
    assert choose_page_bytes(EngineConfig(MODELS, **options), device, [weight_bytes]) == page_bytes


@pytest.mark.parametrize(
    ("device", "page_bytes", "words"),
    [
        (CPU, 6 * KIB, "page size 6144 is not a multiple of 4096"),
        (GPU, 64 * KIB, "page size 65536 is not a multiple of 2097152"),
        (CPU, 4 * KIB, "more than the 57338 pages .* give a larger --page-size"),
    ],
)
def test_page_sizes_that_cannot_be(device, page_bytes, words):
    with pytest.raises(ConfigError, match=words):
        choose_page_bytes(EngineConfig(MODELS, page_bytes=page_bytes), device, [GIB])


class HostWithOverhead(HostDriver):
    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        return 3 * MIB + 5


def test_the_pool_knows_of_the_overhead_from_the_start():
    driver = HostWithOverhead()
    config = EngineConfig(MODELS, memory_bytes=32 * MIB, guard_pages=False)
    parameters = [Parameter("w", (MIB,), torch.float32, ())]
    pool = make_pool(config, driver, [4 * MIB], partial(placed_bytes, [parameters]))
    assert (pool.budget_bytes, pool.page_bytes) == (32 * MIB, 64 * KIB)
    assert pool.usage().in_use_bytes == {PROCESS: 3 * MIB + 5}
    anchor = Owner("process", Kind.OVERHEAD)  # of a model with that name
    pages = pool.acquire(anchor, 2)
    assert pages is not None
    assert pool.usage().in_use_bytes == {PROCESS: 3 * MIB + 5, anchor: 2 * 64 * KIB}
    pool.release(pages)
    pool.close()
    # The guard page comes on top.
    guarded = make_pool(replace(config, guard_pages=True), driver)
    assert guarded.budget_bytes == 32 * MIB + 64 * KIB
    assert guarded.usage().in_use_bytes == {PROCESS: 3 * MIB + 5, GUARD: 64 * KIB}
    assert guarded.usage().overhead_bytes == 3 * MIB + 5 + 64 * KIB
    guarded.close()
    two = partial(placed_bytes, [parameters, parameters])
    with pytest.raises(ConfigError, match=r"4\.00 MiB, more than the 3\.00 MiB of --mem"):
        make_pool(replace(config, memory_bytes=3 * MIB), driver, [4 * MIB] * 2, two)
    pool = make_pool(replace(config, memory_bytes=5 * MIB), driver, [4 * MIB] * 2, two)
    assert pool.budget_bytes == 5 * MIB
    pool.close()
    driver.close()


def test_models_that_do_not_fit_together_take_turns():
    config = EngineConfig(MODELS)
    assert pool_budget(config, CPU, [3 * GIB, 2 * GIB]) == 7 * GIB
    assert pool_budget(config, CPU, [3 * GIB] * 5) == 6 * GIB
    assert pool_budget(config, CPU, [5 * GIB, 4 * GIB]) == 7 * GIB
    assert pool_budget(replace(config, memory_bytes=3 * GIB), CPU, [3 * GIB] * 5) == 3 * GIB
    gpu = pool_budget(config, GPU, [100 * GIB] * 3)
    assert gpu == int(0.9 * 140 * GIB)
