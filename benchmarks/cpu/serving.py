"""Streams from servers that differ in their threads, in turns: `make bench-serving`.

    python benchmarks/cpu/serving.py [--model PATH] [--before PATH] [--output FILE]

Each way of running the server is a process of its own. All are idle but the one that is measured,
and they take turns in each repeat, so that other load on the machine hits all alike. `--before` is
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
from aquifer.bench.result import environment, save
from aquifer.bench.workload import LengthRange
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.model_host import read_model
from aquifer.models import plan_model

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_LONG_WAITS = {"GOMP_SPINCOUNT": "300000"}  # libgomp's own default
_ALL_THREADS = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
_WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "by size": ({}, []),
    "by size, long waits": (_LONG_WAITS, []),
    "by size, no waits": ({"OMP_WAIT_POLICY": "passive"}, []),
    "one": ({}, ["--threads", "1"]),
    "all, long waits": ({**_ALL_THREADS, **_LONG_WAITS}, []),
}
"""Variables and arguments of the server, by name."""


def _commit(tree: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Measure, write the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="what to serve")
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS), metavar="NAME")
    parser.add_argument("--input-len", default="32", help="tokens of each prompt")
    parser.add_argument("--output-len", default="128", help="tokens of each output")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each kind")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    for name in _VARIABLES:
        os.environ.pop(name, None)  # they would decide for every server
    ways = {name: _WAYS[name] for name in options.ways}
    if options.before is not None:
        ways["before"] = ({"PYTHONPATH": str(options.before.resolve() / "src")}, [])
    spec = ModelSpec.parse(options.model)
    load = serving.Load(
        [1, 8],
        [0, 1],
        LengthRange.parse(options.input_len),
        LengthRange.parse(options.output_len),
        read_model(spec, plan_model, EngineConfig((spec,)))[1].vocab_size,
        seed=0,
    )
    with ExitStack() as servers:
        urls = {
            name: servers.enter_context(
                serving.serving(options.model, ["--memory", "1GiB", *arguments], environment)
            )
            for name, (environment, arguments) in ways.items()
        }
        runs = serving.measure(urls, load, options.repeats)
    if options.output is not None:
        name = Path(options.model).name
        before = None if options.before is None else _commit(options.before)
        figures = {
            # Paths of this machine mean nothing elsewhere.
            "environment": {**environment(), "command": f"serving.py --model {name}"},
            "benchmark": "serving",
            "model": name,
            "before": before,
            "ways": {name: _WAYS[name] for name in options.ways},
            "input_len": options.input_len,
            "output_len": options.output_len,
            "repeats": options.repeats,
            "runs": runs,
        }
        save(options.output, figures)
    Console(width=100).print(serving_table(f"aquifer serve {options.model}", runs))


if __name__ == "__main__":
    main()
