"""Streams from `aquifer serve demo` with different threads, in turns: `make bench-serving`.

    python benchmarks/cpu/serving.py [--before PATH] [--output FILE]

Each way of running the server is a process of its own. All are idle but the one that is measured,
and they take turns in each repeat, so that other load on the machine hits all alike. PATH is
another checkout, whose server takes part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from aquifer.bench import serving
from aquifer.bench.report import serving_table
from aquifer.bench.result import save
from aquifer.bench.workload import LengthRange
from aquifer.config import BUNDLED_MODELS, EngineConfig, ModelSpec
from aquifer.engine.model_host import read_model
from aquifer.models import plan_model

_MODEL = "demo"
_INPUTS, _OUTPUTS = LengthRange(32, 32), LengthRange(128, 128)
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_ALL_THREADS = {
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "GOMP_SPINCOUNT": "300000",  # libgomp's own default
}


def _ways(before: Path | None) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Ways of running the server: variables and arguments, by name."""
    ways: dict[str, tuple[dict[str, str], list[str]]] = {
        "by size": ({}, []),
        "one": ({}, ["--threads", "1"]),
        "all": (_ALL_THREADS, []),
    }
    if before is not None:
        ways["before"] = ({"PYTHONPATH": str(before.resolve() / "src")}, [])
    return ways


def _commit(tree: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Measure, write the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each kind")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    for name in _VARIABLES:
        os.environ.pop(name, None)  # they would decide for every server
    spec = ModelSpec(_MODEL, BUNDLED_MODELS[_MODEL])
    plan = read_model(spec, plan_model, EngineConfig((spec,)))[1]
    load = serving.Load([1, 8], [0, 1], _INPUTS, _OUTPUTS, plan.vocab_size, seed=0)
    ways = _ways(options.before)
    with ExitStack() as servers:
        urls = {
            name: servers.enter_context(
                serving.serving(_MODEL, ["--memory", "64MiB", *arguments], environment)
            )
            for name, (environment, arguments) in ways.items()
        }
        runs = serving.measure(urls, load, options.repeats)
    if options.output is not None:
        figures = {
            "benchmark": "serving",
            "model": _MODEL,
            "before": options.before and _commit(options.before),
            "all": _ALL_THREADS,
            "input_len": _INPUTS.lowest,
            "output_len": _OUTPUTS.lowest,
            "runs": runs,
        }
        save(options.output, figures)
    Console(width=100).print(serving_table(f"aquifer serve {_MODEL}, by its threads", runs))


if __name__ == "__main__":
    main()
