"""Two commits of the project on this machine, measured in turns: `make bench-compare`.

    python benchmarks/cpu/compare.py --before PATH [--after PATH] [--output FILE]

PATH is a checkout. For each measurement (`measure.py`) a process of either tree is set up, runs
once as a warm-up, and then both run in turns, so that other load hits both alike: before after,
after before, and so on. Ratios are those of pairs. The processes are started afresh in each round,
because addresses and hash tables of one process may be lucky.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import commit, save

_ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("steps", "add", "stats", "blocked", "mixed", "replays", "throughput")
_TREES = ("before", "after")
_FACTORS = {"ms": 1e3, "us": 1e6}

Costs = dict[str, dict[str, Any]]
"""Quantities of one run, by name, as `measure.py` writes them."""


class Child:
    """A process that runs one measurement of one tree."""

    def __init__(self, tree: Path, name: str) -> None:
        source = tree / "src"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu.measure", name],
            cwd=_ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(source),
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        imported = Path(self._read()["imported"])
        if source not in imported.parents:
            raise SystemExit(f"{imported} was imported, which is not in {source}")

    def run(self) -> Costs:
        """Run once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a measurement failed: see above")
        values: dict[str, Any] = json.loads(line)
        return values


@contextmanager
def _children(trees: dict[str, Path], name: str) -> Iterator[dict[str, Child]]:
    children: dict[str, Child] = {}
    try:
        for which, tree in trees.items():
            children[which] = Child(tree, name)
        yield children
    finally:
        for child in children.values():
            child.close()


def measure(
    trees: dict[str, Path], name: str, num_rounds: int, pairs_per_round: int, console: Console
) -> list[dict[str, Costs]]:
    """Run a measurement of both trees in turns; returns the pairs of runs."""
    pairs: list[dict[str, Costs]] = []
    for number in range(num_rounds):
        console.print(f"{name}: round {number + 1} of {num_rounds}", highlight=False)
        with _children(trees, name) as children:
            for child in children.values():
                child.run()
            for _ in range(pairs_per_round):
                order = _TREES if len(pairs) % 2 == 0 else _TREES[::-1]
                costs = {which: children[which].run() for which in order}
                pairs.append({which: costs[which] for which in _TREES})
    return pairs


def figures(pairs: list[dict[str, Costs]]) -> dict[str, dict[str, Any]]:
    """Medians, ratios of the pairs and all repeats of each quantity.

    `ratio` is that of CPU time, after by before: below 1 is faster.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, first in pairs[0]["before"].items():
        runs = {which: [pair[which][name] for pair in pairs] for which in _TREES}
        works = {run["work"] for which in _TREES for run in runs[which]}
        entry: dict[str, Any] = {"same_work": len(works) == 1, "work": sorted(works)}
        for clock in ("cpu_s", "wall_s"):
            seconds = {which: [run[clock] for run in runs[which]] for which in _TREES}
            ratios = np.array(seconds["after"]) / np.array(seconds["before"])
            low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
            entry[clock] = {
                "before": float(np.median(seconds["before"])),
                "after": float(np.median(seconds["after"])),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "ratios": ratios.tolist(),
                "before_seconds": seconds["before"],
                "after_seconds": seconds["after"],
            }
        if first["tokens"]:
            entry["tokens"] = first["tokens"]
            for which in _TREES:
                entry[f"{which}_tokens_per_second"] = first["tokens"] / entry["cpu_s"][which]
        result[name] = entry
    return result


def table_of(quantities: dict[str, dict[str, Any]]) -> Table:
    """One line for each quantity."""
    table = Table(title="Time of the CPU, before and after", box=None)
    for column in ("", "before", "after", "unit", "ratio", "quartiles", "by the clock"):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    for name, entry in quantities.items():
        cpu, wall = entry["cpu_s"], entry["wall_s"]
        if "tokens" in entry:
            unit = "tokens/s"
            values = [f"{entry[f'{which}_tokens_per_second']:,.0f}" for which in _TREES]
        else:
            unit = "ms" if cpu["before"] >= 1e-3 else "us"
            values = [_rounded(cpu[which] * _FACTORS[unit]) for which in _TREES]
        low, high = cpu["ratio_quartiles"]
        mark = "" if entry["same_work"] else " (other work)"
        table.add_row(
            name + mark,
            *values,
            unit,
            f"{cpu['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{wall['ratio']:.3f}",
        )
    return table


def _rounded(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def main() -> None:
    """Measure, write the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--after", type=Path, default=_ROOT, help="checkout; this one by default")
    parser.add_argument("--rounds", type=int, default=3, help="times that processes are started")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs in each round")
    parser.add_argument("--only", nargs="+", choices=_NAMES, default=_NAMES, metavar="NAME")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    commits = {which: commit(tree) for which, tree in trees.items()}
    for which, tree in trees.items():
        if commits[which] is None:
            parser.error(f"--{which}: {tree} is no git checkout; give one of the project")
    console = Console(stderr=True)
    quantities: dict[str, dict[str, Any]] = {}
    for name in options.only:
        quantities |= figures(measure(trees, name, options.rounds, options.pairs, console))
    Console(width=120).print(table_of(quantities))
    if options.output is not None:
        content = {
            "benchmark": "compare",
            "omp_num_threads": 1,
            "commits": commits,
            "num_pairs": options.rounds * options.pairs,
            "quantities": quantities,
        }
        # Paths of this machine mean nothing elsewhere; commits do.
        command = (
            f"compare.py --before {commits['before']} --after {commits['after']} "
            f"--rounds {options.rounds} --pairs {options.pairs}"
        )
        save(options.output, content, command=command)


if __name__ == "__main__":
    main()
