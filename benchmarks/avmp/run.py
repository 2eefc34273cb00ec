"""AVMP's benchmark: its tables, what their counts hide, and one pool without a split.

    python benchmarks/avmp/run.py --data FOLDER [--processes 2] [--output FOLDER]

FOLDER has the prompt lengths of ShareGPT. It writes `avmp.json` and `avmp.png`; README.md has the
tables beside the paper's figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib as mpl
import numpy as np
from benchmarks.avmp.cells import MODELS, POOLS, Cell, MakeAllocator, play
from benchmarks.avmp.served import SERVICES, Served, serve
from benchmarks.avmp.statistics import Bootstrap
from benchmarks.avmp.workloads import (
    FIRST_SEEDS,
    NUM_SEEDS,
    PAGE_TOKENS,
    REPLAY,
    SYNTHETIC,
    make_stream,
)
from rich.progress import track

from aquifer.bench.result import save
from aquifer.cache.avmp import (
    DynamicPools,
    FixedDual,
    PaddedUnified,
    SharedPages,
    SlotSizes,
    StaticPools,
)

mpl.use("Agg")

from matplotlib import pyplot as plt

_HERE = Path(__file__).resolve().parent

PAPER = (
    "padded_unified",
    "fixed_dual_mr05",
    "fixed_dual_mr09",
    "avmp_static_mr05",
    "avmp_dynamic_b128",
)
"""The variants of the paper."""

BASELINE, DYNAMIC = "fixed_dual_mr05", "avmp_dynamic_b128"
ORDERED = ("in order of arrival", "shortest prompt first")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
THRESHOLDS = ((0.05, 0.30), (0.05, 0.10), (0.05, 0.20), (0.02, 0.30), (0.10, 0.30))
SPLITS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RULES = ("once", "until it fits", "never")


class Variant(NamedTuple):
    """An allocator, and how many tokens a page of it has."""

    make: MakeAllocator
    fills_pages: bool = False

    def page_tokens(self, sizes: SlotSizes) -> int:
        """Tokens of a page: 16, or as many as a slot of the state's size holds."""
        return PAGE_TOKENS * (sizes.state_bytes // sizes.kv_page_bytes if self.fills_pages else 1)


def variants() -> dict[str, Variant]:
    """All allocators that are compared, by name."""
    found = {
        "padded_unified": Variant(PaddedUnified),
        "avmp_static_mr05": Variant(StaticPools),
        "padded, unique ids": Variant(partial(PaddedUnified, has_unique_ids=True)),
        "padded, filled": Variant(PaddedUnified, fills_pages=True),
        "padded, filled, unique ids": Variant(
            partial(PaddedUnified, has_unique_ids=True), fills_pages=True
        ),
    }
    for split in SPLITS:
        found[
            f"fixed_dual_mr{round(10 * split):02}" if split in (0.5, 0.9) else f"split {split:g}"
        ] = Variant(partial(FixedDual, state_share=split))
    for batch in BATCHES:
        found[f"avmp_dynamic_b{batch}"] = Variant(partial(DynamicPools, batch=batch))
    for low, high in THRESHOLDS:
        found[f"thresholds {low:g}, {high:g}"] = Variant(
            partial(DynamicPools, uses_thresholds=True, threshold_low=low, threshold_high=high)
        )
    makers: dict[str, Callable[..., Any]] = {
        "padded": partial(PaddedUnified, has_unique_ids=True),
        "dual": FixedDual,
        "dynamic": DynamicPools,
        "shared pages": SharedPages,
    }
    for name, maker in makers.items():
        for rule in RULES:
            found[f"{name}: {rule}"] = Variant(partial(maker, rule=rule))
    return found


def play_stream(data: Path, task: tuple[str, str, int]) -> dict[str, Cell]:
    """Play the cells of one variant, workload and seed, by model and pool."""
    name, workload, number = task
    variant = variants()[name]
    stream = make_stream(workload, FIRST_SEEDS[workload] + number, data)
    return {
        f"{model}, {pool}": play(stream, variant.make(sizes, num_bytes), variant.page_tokens(sizes))
        for model, sizes in MODELS.items()
        for pool, num_bytes in POOLS.items()
    }


Cells = dict[str, dict[str, dict[str, list[Cell]]]]
"""Cells by variant, workload, and model with pool: one for each seed."""


def play_all(data: Path, num_processes: int) -> tuple[Cells, float]:
    """Play all cells; returns them, and the seconds that those of the paper took."""
    names = list(variants())
    of_paper = [(name, w, i) for name in PAPER for w in FIRST_SEEDS for i in range(NUM_SEEDS)]
    others = [
        (name, w, i)
        for name in names
        if name not in PAPER
        for w in SYNTHETIC
        for i in range(NUM_SEEDS)
    ]
    cells: Cells = {}
    seconds: list[float] = []
    with ProcessPoolExecutor(num_processes) as pool:
        for tasks, what in ((of_paper, "the paper's cells"), (others, "all others")):
            begin_s = time.perf_counter()
            results = pool.map(partial(play_stream, data), tasks)
            for (name, workload, _), found in zip(
                tasks, track(results, what, total=len(tasks)), strict=True
            ):
                row = cells.setdefault(name, {}).setdefault(workload, {})
                for key, cell in found.items():
                    row.setdefault(key, []).append(cell)
            seconds.append(time.perf_counter() - begin_s)
    return cells, seconds[0]


ServedCells = dict[str, dict[str, list[Served]]]
"""Cells by service and workload: two models and two pools, of each seed."""


def serve_stream(data: Path, task: tuple[str, str, int]) -> list[Served]:
    """Serve the cells of one service, workload and seed: two models and two pools."""
    name, workload, number = task
    stream = make_stream(workload, FIRST_SEEDS[workload] + number, data)
    service = SERVICES[name]
    return [
        serve(stream, sizes, num_bytes, service)
        for sizes in MODELS.values()
        for num_bytes in POOLS.values()
    ]


def serve_all(data: Path, num_processes: int) -> tuple[ServedCells, dict[str, float]]:
    """Serve all cells; returns them, and the seconds that each service took."""
    tasks = [(w, i) for w in FIRST_SEEDS for i in range(NUM_SEEDS)]
    cells: ServedCells = {}
    seconds: dict[str, float] = {}
    with ProcessPoolExecutor(num_processes) as pool:
        for name in SERVICES:
            begin_s = time.perf_counter()
            results = pool.map(partial(serve_stream, data), [(name, w, i) for w, i in tasks])
            row = cells.setdefault(name, {})
            for (workload, _), found in zip(
                tasks, track(results, name, total=len(tasks)), strict=True
            ):
                row.setdefault(workload, []).extend(found)
            seconds[name] = time.perf_counter() - begin_s
    return cells, seconds


def served_summary(cells: Sequence[Served]) -> dict[str, Any]:
    """Figures of cells together: sums, and the ticks that their requests waited."""
    waits = np.concatenate([cell.waits for cell in cells])
    return {
        **{
            field: sum(getattr(cell, field) for cell in cells)
            for field in (
                "submitted",
                "never_fit",
                "in_time",
                "at_most",
                "completed",
                "preemptions",
            )
        },
        "wait_ticks": {
            "mean": float(waits.mean()),
            "p50": float(np.percentile(waits, 50)),
            "p99": float(np.percentile(waits, 99)),
        },
    }


def all_served(cells: Mapping[str, Sequence[Served]]) -> dict[str, Any]:
    """`served_summary` of each workload, and of the synthetic ones in total."""
    synthetic = [cell for workload in SYNTHETIC for cell in cells[workload]]
    return {w: served_summary(found) for w, found in cells.items()} | {
        "total": served_summary(synthetic)
    }


def ooms(of: Mapping[str, Sequence[Cell]]) -> dict[str, float]:
    """Out-of-memory calls of a workload: the sum of its cells' means over seeds, and sigma."""
    counts = np.array([[cell.ooms for cell in seeds] for seeds in of.values()], np.float64)
    return {
        "mean": float(counts.mean(axis=1).sum()),
        "sigma": float(np.sqrt((counts.std(axis=1) ** 2).sum())),
    }


def summary(of: Mapping[str, Mapping[str, Sequence[Cell]]]) -> dict[str, Any]:
    """Figures of a variant, over all its synthetic workloads."""
    by_workload = {workload: ooms(of[workload]) for workload in SYNTHETIC}
    cells = [cell for w in SYNTHETIC for seeds in of[w].values() for cell in seeds]
    return {
        "ooms": by_workload
        | {
            "total": {
                "mean": sum(each["mean"] for each in by_workload.values()),
                "sigma": float(np.sqrt(sum(each["sigma"] ** 2 for each in by_workload.values()))),
            }
        },
        **{
            field: sum(getattr(cell, field) for cell in cells)
            for field in (
                "submitted",
                "completed",
                "clean",
                "evictions",
                "rebalances",
                "refused",
                "migrated_bytes",
                "stale",
            )
        },
        "rebalances_of_medians": float(np.sum(_medians(of, "rebalances"))),
        "migrated_mib": float(np.mean(_medians(of, "migrated_bytes"))) / 2**20,
        "goodput": {
            workload: float(
                np.mean(
                    [np.median([c.completed / c.seconds for c in s]) for s in of[workload].values()]
                )
            )
            for workload in SYNTHETIC
        },
        "active_p50": {
            workload: float(np.median([c.active_p50 for s in of[workload].values() for c in s]))
            for workload in SYNTHETIC
        },
    }


def _medians(of: Mapping[str, Mapping[str, Sequence[Cell]]], field: str) -> list[float]:
    """The median over seeds of a figure, for each workload, model and pool."""
    return [
        float(np.median([getattr(cell, field) for cell in seeds]))
        for workload in SYNTHETIC
        for seeds in of[workload].values()
    ]


def replay_summary(of: Mapping[str, Sequence[Cell]]) -> dict[str, float]:
    """Figures of a variant in the replay of ShareGPT: means over its twelve cells (Table 4)."""
    cells = [cell for seeds in of.values() for cell in seeds]
    return {
        "ooms": float(np.mean([cell.ooms for cell in cells])),
        "goodput": float(np.mean([cell.completed / cell.seconds for cell in cells])),
        "active_p50": float(np.mean([cell.active_p50 for cell in cells])),
        "completed": sum(cell.completed for cell in cells),
        "clean": sum(cell.clean for cell in cells),
    }


def table_2(cells: Cells) -> list[dict[str, Any]]:
    """The comparisons of Table 2, in its order."""
    bootstrap = Bootstrap()

    def values(name: str, workload: str, field: str) -> list[float]:
        workloads = sorted(SYNTHETIC) if workload == "cross_workload" else [workload]
        found = [cell for w in workloads for seeds in cells[name][w].values() for cell in seeds]
        if field == "goodput":
            return [cell.completed / cell.seconds for cell in found]
        return [float(getattr(cell, field)) for cell in found]

    rows = [
        *((DYNAMIC, "ooms", w) for w in (*SYNTHETIC, "cross_workload")),
        *((DYNAMIC, "goodput", w) for w in SYNTHETIC),
        *(
            (n, "ooms", "cross_workload")
            for n in ("avmp_static_mr05", "fixed_dual_mr09", "padded_unified")
        ),
        *((DYNAMIC, "active_p50", w) for w in SYNTHETIC),
    ]
    compared = []
    for name, field, workload in rows:
        compare = bootstrap.ratio if field == "goodput" else bootstrap.difference
        found = compare(values(name, workload, field), values(BASELINE, workload, field))
        compared.append({"variant": name, "figure": field, "workload": workload, **asdict(found)})
    return compared


def draw(content: Mapping[str, Any], file: Path) -> None:
    """Draw totals by variant, by split, and requests that keep their memory."""
    found = content["variants"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    names = [*PAPER, "padded, filled, unique ids", "shared pages: once"]
    bottom = np.zeros(len(names))
    for workload in SYNTHETIC:
        heights = [found[name]["ooms"][workload]["mean"] for name in names]
        left.bar(range(len(names)), heights, bottom=bottom, label=workload)
        bottom += heights
    left.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    left.set_ylabel("calls out of memory")
    left.set_title("As the paper counts")
    left.legend(fontsize=8)
    keys = [
        f"fixed_dual_mr{round(10 * s):02}" if s in (0.5, 0.9) else f"split {s:g}" for s in SPLITS
    ]
    middle.plot(
        SPLITS, [found[key]["ooms"]["total"]["mean"] for key in keys], "o-", label="fixed split"
    )
    for name, style in ((DYNAMIC, "--"), ("shared pages: once", ":")):
        total = found[name]["ooms"]["total"]["mean"]
        middle.axhline(total, linestyle=style, color="black", label=f"{name}, {total:.0f}")
    middle.set_xlabel("part of the memory for states")
    middle.set_ylabel("calls out of memory")
    middle.set_ylim(bottom=0)
    middle.set_title("By split")
    middle.legend(fontsize=8)
    width = 0.4
    served = [content["served"][name]["total"] for name in ORDERED]
    completed = [found[name]["completed"] for name in names]
    completed += [each["in_time"] for each in served]
    clean = [found[name]["clean"] for name in names] + completed[len(names) :]
    places = np.arange(len(completed))
    right.bar(places - width / 2, completed, width, label="completed, as the paper counts")
    right.bar(places + width / 2, clean, width, label="and lost no memory")
    labels = [*names, *(f"scheduler, {name}" for name in ORDERED)]
    right.set_xticks(places, labels, rotation=35, ha="right", fontsize=8)
    right.set_ylabel(f"requests of {found[DYNAMIC]['submitted']}")
    right.set_ylim(top=1.25 * max(completed))
    right.set_title("What the count hides")
    right.legend(fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    """Play all cells, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the prompt lengths")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that play cells")
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    arguments = parser.parse_args()
    cells, seconds = play_all(arguments.data, arguments.processes)
    served, served_seconds = serve_all(arguments.data, arguments.processes)
    content = {
        "seconds_of_240_cells": seconds,
        "seconds_of_served_cells": served_seconds,
        "served": {name: all_served(found) for name, found in served.items()},
        "variants": {name: summary(found) for name, found in cells.items()},
        "replay": {name: replay_summary(cells[name][REPLAY]) for name in PAPER},
        "table_2": table_2(cells),
        "cells": {
            name: {
                workload: {key: [asdict(cell) for cell in seeds] for key, seeds in found.items()}
                for workload, found in cells[name].items()
            }
            for name in PAPER
        },
    }
    save(arguments.output / "avmp.json", content, command="benchmarks/avmp/run.py --data DATA")
    draw(content, arguments.output / "avmp.png")


if __name__ == "__main__":
    main()
