"""Replay of the workload over a memory, and the planning times of several strategies."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.tangram.stores import (
    COPY_BYTES_PER_S,
    LOAD_BYTES_PER_S,
    Catalogue,
    Load,
    PageStore,
    RegionStore,
    Strategy,
    at_random,
    by_cost,
    by_regret,
    by_use,
)
from benchmarks.tangram.workload import MODELS, Workload, block_demand

from aquifer.bench.result import summarize
from aquifer.memory.packing import global_merge, partitioned_gain_packing

MEMORY_BYTES = 45 << 30

MANY_REGIONS = (900, 1100)


def strategies(seed: int) -> dict[str, Strategy]:
    """What is compared, by name: eviction + how free regions are merged."""
    return {
        "Rand+GM": Strategy(at_random(seed), global_merge),
        "LRU+GM": Strategy(by_use, global_merge),
        "MCE+GM": Strategy(by_cost, global_merge),
        "MCE+PGP": Strategy(by_cost, partitioned_gain_packing),
        "MCE+PGP, weighed": Strategy(by_cost, partitioned_gain_packing, weighs=True),
        "regret+GM": Strategy(by_regret, global_merge),
        "regret+PGP": Strategy(by_regret, partitioned_gain_packing),
        "regret+PGP, weighed": Strategy(by_regret, partitioned_gain_packing, weighs=True),
        "MCE, pages": Strategy(by_cost, None),
        "regret, pages": Strategy(by_regret, None),
    }


def replay(workload: Workload, strategy: Strategy, *, overlaps: bool = False) -> dict[str, Any]:
    """Run all requests one after the other.

    Args:
        workload: the requests.
        strategy: how room is made.
        overlaps: whether an instance ends only after the next one's model is loaded, so that its
            tensors and KV blocks cannot move. It ends before if there is no room for both.
    """
    catalogue = Catalogue(MODELS)
    make = RegionStore if strategy.pack else PageStore
    store = make(MEMORY_BYTES, catalogue, strategy)
    loads: list[Load] = []
    refused_blocks = num_waits = 0
    running: int | None = None
    resident_bytes = 0
    with _no_collections():
        for run in workload.runs:
            if running is not None and (not overlaps or running == run.model):
                store.finish(running)
                running = None
            load = store.load(run.model, run.arrival_s)
            if running is not None:
                store.finish(running)
                if load is None:
                    num_waits += 1
                    load = store.load(run.model, run.arrival_s)
            assert load is not None
            loads.append(load)
            running = run.model
            catalogue.use(run.model, run.arrival_s)
            for count in block_demand(run):
                refused_blocks += count - store.grow(run.model, count, run.arrival_s)
            resident_bytes += store.resident_bytes()
    if isinstance(store, RegionStore):
        store.regions.check()
    return {
        "requests": len(loads),
        "loads": sum(load.loaded_bytes > 0 for load in loads),
        "loads_with_moves": sum(load.num_moves > 0 for load in loads),
        "loaded_gb": sum(load.loaded_bytes for load in loads) / 1e9,
        "merged_gb": sum(load.merged_bytes for load in loads) / 1e9,
        "load_ms_per_request": _mean_ms([load.loaded_bytes for load in loads], LOAD_BYTES_PER_S),
        "merge_ms_per_request": _mean_ms([load.merged_bytes for load in loads], COPY_BYTES_PER_S),
        "mean_resident_gb": resident_bytes / len(loads) / 1e9,
        "most_regions": max(load.num_regions for load in loads),
        "refused_blocks": refused_blocks,
        "waits": num_waits,
        "plan_ms": summarize([1e3 * load.plan_s for load in loads if load.loaded_bytes]),
    }


def planning_times(workload: Workload, named: Mapping[str, Strategy]) -> dict[str, Any]:
    """CPU time of a load's plan where there are about 1 000 regions, for each strategy.

    All strategies plan the same loads, those of a replay by the weighed strategy with the rule of
    the pool. In one in which small tensors are evicted first there are never so many regions. Each
    plan is made three times, and the median counts.
    """
    catalogue = Catalogue(MODELS)
    store = RegionStore(MEMORY_BYTES, catalogue, named["regret+PGP, weighed"])
    plans_ms: dict[str, list[float]] = {name: [] for name, of in named.items() if of.pack}
    with_moves = dict.fromkeys(plans_ms, 0)
    num_tensors: list[float] = []
    with _no_collections():
        for run in workload.runs:
            if MANY_REGIONS[0] <= len(store.regions) <= MANY_REGIONS[1]:
                absent = store.num_absent(run.model)
                if absent:
                    num_tensors.append(absent)
                for name in plans_ms if absent else ():
                    plans = [store.planned(run.model, run.arrival_s, named[name]) for _ in range(3)]
                    plans_ms[name].append(1e3 * statistics.median(of_s for _, of_s in plans))
                    made = plans[0][0]
                    assert made is not None
                    with_moves[name] += bool(made.moves)
            store.load(run.model, run.arrival_s)
            catalogue.use(run.model, run.arrival_s)
            for count in block_demand(run):
                store.grow(run.model, count, run.arrival_s)
            store.finish(run.model)
    return {
        "regions": list(MANY_REGIONS),
        "loads": len(num_tensors),
        "new_tensors": summarize(num_tensors),
        "plan_ms": {
            name: {**summarize(times), "max": max(times), "loads_with_moves": with_moves[name]}
            for name, times in plans_ms.items()
        },
    }


def _mean_ms(num_bytes: Sequence[int], bytes_per_s: float) -> float:
    return 1e3 * sum(num_bytes) / bytes_per_s / len(num_bytes)


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection, as in the engine's steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
