"""Tangram's regions: exact optima, the listing of Algorithm 1, and the replay."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from benchmarks.tangram.listing import algorithm_1, merged_bytes
from benchmarks.tangram.optimum import (
    Instance,
    best_partition,
    equation_1,
    fits,
    random_instance,
    with_placement,
)
from benchmarks.tangram.regions import distances, free_space, merge_costs, total_costs
from benchmarks.tangram.replay import planning_times, replay, strategies
from benchmarks.tangram.workload import MODELS, Run, Workload, block_demand

from aquifer.memory.packing import FreeSpace

INSTANCE = Instance(
    num_bytes=20,
    starts=(2, 8, 14),
    sizes=(4, 3, 5),
    eviction_costs=(6.0, 2.0, 30.0),
    new_sizes=(5, 3),
)
"""Free: [0, 2), [6, 8), [11, 14), [19, 20)."""


def test_an_instance_by_hand() -> None:
    # 8 bytes are free, and 8 are wanted: nothing has to be evicted.
    assert equation_1(INSTANCE) == 0
    # Without the tensor of 3, both fit in [6, 14).
    assert with_placement(INSTANCE) == 2
    # By moves alone: those of 4 and 5 go to [11, 20), and the new ones to [0, 8).
    assert with_placement(INSTANCE, evicted=()) == 9
    space = free_space(INSTANCE, ())
    assert space == FreeSpace([0, 6, 11, 19], [2, 2, 3, 1], [4, 3, 5], [False] * 3)
    # Within subspaces tensors keep their order, and only one subspace has room for both.
    assert best_partition(space, INSTANCE.new_sizes) == 12
    assert free_space(INSTANCE, [1]) == FreeSpace([0, 6, 19], [2, 8, 1], [4, 5], [False] * 2)


def test_equation_1_is_the_best_of_all_evictions() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        instance = random_instance(random)
        free = instance.num_bytes - sum(instance.sizes)
        best = min(
            sum(c * y for c, y in zip(instance.eviction_costs, evicted, strict=True))
            for evicted in product((0, 1), repeat=len(instance.sizes))
            if free + sum(s * y for s, y in zip(instance.sizes, evicted, strict=True))
            >= sum(instance.new_sizes)
        )
        assert equation_1(instance) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_in_order(seed: int) -> None:
    """No heuristic is better than the optimum, and this is no better than equation 1's bound."""
    random = np.random.default_rng(seed)
    for _ in range(10):
        instance = random_instance(random)
        merges = merge_costs(instance)
        assert merges["optimum with placement"] <= merges["best partition"] <= merges["PGP"], (
            instance
        )
        assert merges["PGP"] <= merges["GlobalMerge"]
        totals = total_costs(instance)
        optimum = totals.pop("optimum with placement")
        assert totals.pop("equation 1") <= optimum + 1e-6
        assert all(cost >= optimum - 1e-9 for cost in totals.values())
        for order in ("MCE", "regret"):
            pgp = totals[f"{order}+PGP"]
            assert totals[f"{order}+PGP, weighed"] <= pgp + 1e-9 <= totals[f"{order}+GM"] + 2e-9


def test_bin_packing_is_exact() -> None:
    assert fits([10, 10], [6, 4, 5, 5])
    assert fits([7, 6], [3, 3, 3, 4])  # by best fit, 4 and 3 leave 3 and 3 in the other
    assert not fits([10, 10], [7, 7, 6])
    assert not fits([4, 4], [5])
    assert fits([], [])
    random = np.random.default_rng(0)
    for _ in range(200):
        bins, items = (random.integers(1, 9, random.integers(1, 5)).tolist() for _ in range(2))
        expected = any(
            all(
                sum(item for item, of in zip(items, chosen, strict=True) if of == i) <= capacity
                for i, capacity in enumerate(bins)
            )
            for chosen in product(range(len(bins)), repeat=len(items))
        )
        assert fits(bins, items) == expected


def test_the_printed_test_of_line_21_fails_in_figure_6() -> None:
    """`size >= min(C1, C2)`: with these sizes the split that the text describes would fail."""
    space = FreeSpace([0, 3, 8], [2, 2, 4], [1, 3], [False, False])
    assert merged_bytes(space, algorithm_1(space, [4, 4])) == 1
    assert merged_bytes(space, algorithm_1(space, [4, 4], is_printed=True)) == 4


def test_blocks_that_a_batch_takes() -> None:
    """The second sequence ends after 3 steps; its blocks are used again before new ones."""
    run = Run(0.0, 0, np.array([[16, 40], [31, 3]]))
    # 16 + 31 tokens are 3 blocks. Then 17 and 32 are 4, and 18 and 33 are 5. From step 4 on there
    # is one sequence, which needs at most 4.
    assert block_demand(run) == [3, 1, 1]


def test_models_are_of_the_sizes_in_their_names() -> None:
    for shape in MODELS:
        billions = float(shape.name.partition("-")[2].removesuffix("b"))
        assert sum(shape.tensor_bytes()) / 2e9 == pytest.approx(billions, rel=0.1)


def test_replay_of_all_strategies() -> None:
    """The books are right to the end, and weighing saves most of the moves."""
    workload = Workload(num_runs=40, seed=3)
    compared = strategies(seed=0)
    results = {name: replay(workload, of) for name, of in compared.items()}
    for name, result in results.items():
        assert result["requests"] == 40
        assert result["refused_blocks"] == 0
        assert (result["merged_gb"] == 0) == ("pages" in name)
    assert results["MCE+PGP"]["merged_gb"] < results["MCE+GM"]["merged_gb"]
    assert results["MCE+PGP, weighed"]["merged_gb"] < 0.5 * results["MCE+GM"]["merged_gb"]
    overlapping = replay(workload, compared["MCE+PGP"], overlaps=True)
    assert overlapping["waits"] > 0
    assert overlapping["mean_resident_gb"] < results["MCE+PGP"]["mean_resident_gb"] + 1


def test_figures_have_what_the_documents_name() -> None:
    found = distances(4, seed=0)
    assert found["merge_bytes"]["optimum with placement"]["mean_ratio"] == 1
    assert found["equation_1_objective"]["MCE+PGP"]["mean_ratio"] >= 1
    times = planning_times(Workload(num_runs=40), strategies(seed=0))
    assert set(times["plan_ms"]) == {n for n in strategies(0) if "pages" not in n}


def test_the_tables_are_those_of_the_results() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "tangram"
    readme = (folder / "README.md").read_text()
    results = json.loads((folder / "regions.json").read_text())
    rows = [
        f"| {name} | {_grouped(of['merged_gb'])} | {of['loads_with_moves']} of {of['loads']} |"
        f" {_grouped(of['loaded_gb'])} | {of['load_ms_per_request']:.0f} |"
        f" {of['merge_ms_per_request']:.1f} |"
        for part in ("replay", "replay_beside_another_instance")
        for name, of in results[part].items()
    ]
    rows += [
        f"| {name} | {of['median']:.2f} | {of['p99']:.2f} | {of['max']:.2f} |"
        f" {of['loads_with_moves']} |"
        for name, of in results["planning"]["plan_ms"].items()
    ]
    for part in ("merge_bytes", "equation_1_objective"):
        compared = results["distances"][part]
        rows += [
            f"| {name} | {of['mean']:.1f} | {of['mean_ratio']:.2f} | {of['worst_ratio']:.1f} |"
            f" {100 * of['equal_to_optimum']:.0f} % |"
            for name, of in compared.items()
            if name != "instances_with_optimum_0"
        ]
    assert not [row for row in rows if row not in readme]


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")
