"""Merge copies, planning times and distance to the optimum: regions as in Tangram, and pages.

    python benchmarks/tangram/regions.py [--requests 1000] [--instances 300] [--output FOLDER]

It writes `regions.json` and `regions.png`; README.md compares them with the paper's figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from benchmarks.tangram import listing
from benchmarks.tangram.optimum import (
    Instance,
    best_partition,
    equation_1,
    random_instance,
    with_placement,
)
from benchmarks.tangram.replay import MEMORY_BYTES, planning_times, replay, strategies
from benchmarks.tangram.stores import COPY_BYTES_PER_S, LOAD_BYTES_PER_S
from benchmarks.tangram.workload import MODELS, Workload

from aquifer.bench.result import save
from aquifer.memory.merging import Plan, Weighing, plan
from aquifer.memory.packing import FreeSpace, global_merge, partitioned_gain_packing

mpl.use("Agg")

from matplotlib import pyplot as plt

_HERE = Path(__file__).resolve().parent
_OVERLAPPING = ("MCE+GM", "MCE+PGP", "MCE+PGP, weighed", "regret+PGP, weighed", "regret, pages")


def merge_costs(instance: Instance) -> dict[str, float]:
    """Bytes moved by each way of packing, once minimal-cost eviction has made room."""
    victims = instance.victims()
    layout = instance.regions().layout()
    starts = [instance.starts[j] for j in victims]
    pgp = plan(layout, instance.new_sizes, starts)
    merged = plan(layout, instance.new_sizes, starts, global_merge)
    assert pgp is not None
    assert merged is not None
    evicted = [instance.starts.index(start) for start in pgp.evictions]
    space = free_space(instance, evicted)
    if pgp.moves:
        printed = listing.merged_bytes(
            space, listing.algorithm_1(space, instance.new_sizes, is_printed=True)
        )
    else:
        printed = 0
    return {
        "GlobalMerge": merged.merged_bytes,
        "PGP, line 21 as printed": printed,
        "PGP": pgp.merged_bytes,
        "best partition": best_partition(space, instance.new_sizes),
        "optimum with placement": with_placement(instance, evicted),
    }


def total_costs(instance: Instance) -> dict[str, float]:
    """Objective of equation 1, evictions and moves, for whole plans."""
    layout = instance.regions().layout()
    found: dict[str, float] = {}
    for order, per_byte in (("MCE", False), ("regret", True)):
        victims = instance.victims(per_byte=per_byte)
        starts = [instance.starts[j] for j in victims]
        costs = np.array([instance.eviction_costs[j] for j in victims])
        weighing = Weighing(costs, copy_bytes_per_s=1.0)
        for name, made in (
            (f"{order}+GM", plan(layout, instance.new_sizes, starts, global_merge)),
            (f"{order}+PGP", plan(layout, instance.new_sizes, starts)),
            (
                f"{order}+PGP, weighed",
                plan(layout, instance.new_sizes, starts, partitioned_gain_packing, weighing),
            ),
        ):
            assert made is not None
            found[name] = _objective(made, costs)
    found["optimum with placement"] = with_placement(instance)
    found["equation 1"] = equation_1(instance)
    return found


def free_space(instance: Instance, evicted: Sequence[int]) -> FreeSpace:
    """Free regions of an instance and what lies between them, after an eviction."""
    kept = [j for j in range(len(instance.sizes)) if j not in evicted]
    starts, sizes, walls = list[int](), list[int](), list[int]()
    end = wall = 0
    for j in [*kept, None]:
        begin = instance.num_bytes if j is None else instance.starts[j]
        if begin > end:
            if starts:
                walls.append(wall)
            starts.append(end)
            sizes.append(begin - end)
            wall = 0
        if j is not None:
            wall += instance.sizes[j]
            end = instance.starts[j] + instance.sizes[j]
    return FreeSpace(starts, sizes, walls, [False] * len(walls))


def distances(num_instances: int, seed: int) -> dict[str, Any]:
    """Distance to the optimum: of the moves alone, and of evictions and moves together.

    Instances in which the optimum is 0 count in the means, and not in the ratios.
    """
    random = np.random.default_rng(seed)
    instances = [random_instance(random) for _ in range(num_instances)]
    merges = [merge_costs(instance) for instance in instances]
    totals = [total_costs(instance) for instance in instances]
    return {
        "instances": num_instances,
        "merge_bytes": _compared(merges, "optimum with placement"),
        "equation_1_objective": _compared(totals, "optimum with placement"),
    }


def _objective(made: Plan, costs: npt.NDArray[np.float64]) -> float:
    return float(costs[: len(made.evictions)].sum()) + made.merged_bytes


def _compared(costs: Sequence[Mapping[str, float]], optimum: str) -> dict[str, Any]:
    best = np.array([of[optimum] for of in costs])
    is_positive = best > 0
    compared: dict[str, Any] = {}
    for name in costs[0]:
        values = np.array([of[name] for of in costs])
        ratios = values[is_positive] / best[is_positive]
        compared[name] = {
            "mean": float(values.mean()),
            "mean_ratio": float(ratios.mean()),
            "worst_ratio": float(ratios.max()),
            "ratio_of_means": float(values.mean() / best.mean()),
            "equal_to_optimum": float(np.isclose(values, best).mean()),
        }
    compared["instances_with_optimum_0"] = int((~is_positive).sum())
    return compared


def draw(content: Mapping[str, Any], file: Path) -> None:
    """Draw bytes merged and bytes loaded in the replay."""
    rows = content["replay"]
    names = list(rows)[::-1]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, field, title, colour in (
        (axes[0], "merged_gb", "copied within the memory, GB", "#d62728"),
        (axes[1], "loaded_gb", "loaded, GB", "#1f77b4"),
    ):
        values = [rows[name][field] for name in names]
        bars = axis.barh(names, values, color=colour)
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.18)
        axis.tick_params(labelsize=8)
    axes[0].set_xscale("symlog", linthresh=10)
    figure.tight_layout()
    figure.savefig(file, dpi=90)
    plt.close(figure)


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests of the replay")
    parser.add_argument("--instances", type=int, default=300, help="random small instances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    arguments = parser.parse_args()
    begin_s = time.process_time()
    workload = Workload(num_runs=arguments.requests, seed=arguments.seed)
    compared = strategies(arguments.seed)
    content = {
        "memory_bytes": MEMORY_BYTES,
        "load_bytes_per_s": LOAD_BYTES_PER_S,
        "copy_bytes_per_s": COPY_BYTES_PER_S,
        "workload": {
            "requests": workload.num_runs,
            "batch_size": workload.batch_size,
            "interval_s": workload.interval_s,
            "phase_requests": workload.phase_runs,
            "seed": workload.seed,
        },
        "models": {
            shape.name: {
                "gb": sum(shape.tensor_bytes()) / 1e9,
                "tensors": len(shape.tensor_bytes()),
                "kv_block_kib": shape.block_bytes / 1024,
            }
            for shape in MODELS
        },
        "replay": {name: replay(workload, of) for name, of in compared.items()},
        "replay_beside_another_instance": {
            name: replay(workload, compared[name], overlaps=True) for name in _OVERLAPPING
        },
        "planning": planning_times(workload, compared),
        "distances": distances(arguments.instances, arguments.seed),
    }
    content["cpu_s"] = time.process_time() - begin_s
    save(arguments.output / "regions.json", content)
    draw(content, arguments.output / "regions.png")
    print(f"{content['cpu_s']:.0f} s of CPU time")


if __name__ == "__main__":
    main()
