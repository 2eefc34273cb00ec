"""Reports of several devices as one."""

from __future__ import annotations

from dataclasses import fields

import pytest

from aquifer.engine.reports import (
    EngineStats,
    KVCapacity,
    MemoryReport,
    ModelMemory,
    ModelState,
    ModelStatus,
)
from aquifer.memory.eviction_log import Eviction, EvictionTotals
from aquifer.memory.owners import Kind, Owner
from aquifer.serve.totals import total_memory, total_stats

WEIGHTS = Owner("m", Kind.WEIGHTS)


def _status(state: ModelState, resident_bytes: int, **values: object) -> ModelStatus:
    return ModelStatus(state, resident_bytes, 100, **values)  # type: ignore[arg-type]


def _report(device: str, status: ModelStatus, factor: int) -> MemoryReport:
    """A report in which each number is another one, times a factor."""
    model = ModelMemory(
        status,
        {Kind.KV: factor, Kind.WEIGHTS: 2 * factor},
        3 * factor,
        4 * factor,
        5 * factor,
        6 * factor,
        7 * factor,
        8 * factor,
        KVCapacity(9 * factor, 1.5 * factor),
    )
    eviction = Eviction(10.0 / factor, 0.0, WEIGHTS, WEIGHTS, 1, 50, 0.1)
    return MemoryReport(
        device=device,
        page_bytes=4096,
        budget_bytes=10 * factor,
        overhead_bytes=11 * factor,
        free_bytes=12 * factor,
        idle_bytes=13 * factor,
        retired_bytes=14 * factor,
        mapped_pages=15 * factor,
        free_pages=16 * factor,
        loop_page_calls=17 * factor,
        background_page_calls=18 * factor,
        models={"m": model},
        process_resident_bytes=20 * factor,
        host_cache_bytes=21 * factor,
        host_cache_budget_bytes=22 * factor,
        neighbour_bytes=25 * factor,
        loaded_bytes={("m", "disk"): 23 * factor, ("m", device): 24},
        evictions=(eviction,),
        eviction_totals={WEIGHTS: EvictionTotals(factor, 2 * factor, 0.5 * factor, 0.25 * factor)},
    )


def test_sizes_are_sums() -> None:
    first = _report("cuda:0", _status(ModelState.RESIDENT, 100), 1)
    second = _report("cuda:1", _status(ModelState.PARTIAL, 40), 2)
    total = total_memory([first, second])
    assert total.device == "cuda:0, cuda:1"
    assert total.devices == (first, second)
    assert total.page_bytes == 4096
    summed = {"budget_bytes", "overhead_bytes", "free_bytes", "idle_bytes", "retired_bytes"}
    summed |= {
        "mapped_pages",
        "free_pages",
        "loop_page_calls",
        "background_page_calls",
        "process_resident_bytes",
    }
    summed |= {"host_cache_bytes", "host_cache_budget_bytes", "neighbour_bytes"}
    for name in summed:
        assert getattr(total, name) == 3 * getattr(first, name), name
    assert total.loaded_bytes == {("m", "disk"): 69, ("m", "cuda:0"): 24, ("m", "cuda:1"): 24}
    others = {"device", "page_bytes", "models", "evictions", "eviction_totals", "devices"}
    others |= {"loaded_bytes"}
    assert summed | others == {field.name for field in fields(MemoryReport)}
    assert [entry.time_s for entry in total.evictions] == [5.0, 10.0]
    assert total.eviction_totals == {WEIGHTS: EvictionTotals(3, 6, 1.5, 0.75)}
    model, of_first = total.models["m"], first.models["m"]
    assert model.bytes_by_kind == {Kind.KV: 3, Kind.WEIGHTS: 6}
    numbers = {field.name for field in fields(ModelMemory)}
    for name in numbers - {"status", "bytes_by_kind", "kv_capacity"}:
        assert getattr(model, name) == 3 * getattr(of_first, name), name
    assert model.kv_capacity == KVCapacity(18, 4.5)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((ModelState.PARTIAL, ModelState.RESIDENT), ModelState.RESIDENT),
        ((ModelState.LOADING, ModelState.PARTIAL), ModelState.LOADING),
        ((ModelState.FAILED, ModelState.REGISTERED), ModelState.REGISTERED),
        ((ModelState.FAILED, ModelState.FAILED), ModelState.FAILED),
    ],
)
def test_the_state_of_a_model_is_the_best_one(states, expected) -> None:
    reports = [
        _report(
            f"cpu:{index}",
            _status(
                state,
                10 * (index + 1),
                num_loads=1,
                loading_s=0.5,
                error="why" if state is ModelState.FAILED else None,
                is_pinned=index == 1,
                left_s=None if index else 3.0,
                host_bytes=5,
            ),
            1,
        )
        for index, state in enumerate(states)
    ]
    status = total_memory(reports).models["m"].status
    assert status.state is expected
    assert (status.resident_bytes, status.weight_bytes, status.host_bytes) == (20, 100, 5)
    assert (status.num_loads, status.loading_s) == (2, 1.0)
    assert (status.is_pinned, status.left_s) == (True, 3.0)
    assert (status.error is None) == (expected is not ModelState.FAILED)


def test_counters_are_sums() -> None:
    first = EngineStats({"m": 1}, {"m": 2}, {"m": 3}, 0.5, {"m": 4}, {"m": 5}, 6)
    second = EngineStats({"m": 10}, {"n": 1}, {"m": 30}, 0.25, {}, {"m": 50}, 60)
    assert total_stats([first, second]) == EngineStats(
        {"m": 11}, {"m": 2, "n": 1}, {"m": 33}, 0.375, {"m": 4}, {"m": 55}, 66
    )
