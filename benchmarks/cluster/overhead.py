"""What the cluster adds to a request: `serve` beside `serve --workers 1`, on one machine.

    python benchmarks/cluster/overhead.py [--repeats N] [--output FILE]

Each turn starts a server, measures it and stops it, so that Ray's processes run only beside their
own server. Turns alternate, so that other load on the machine hits both alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from aquifer.bench.report import new_table
from aquifer.bench.result import save
from aquifer.bench.serving.figures import latency_figures
from aquifer.bench.serving.load import Load, Run, send
from aquifer.bench.serving.options import COMPLETIONS
from aquifer.bench.serving.prompts import RequestMaker, vocab_size_of
from aquifer.bench.serving.server import serving
from aquifer.bench.serving.target import Target
from aquifer.bench.workload import LengthRange, Workload
from aquifer.config import ModelSpec
from aquifer.errors import EngineError

_MODEL = "demo"
_OPTIONS = ["--memory", "1GiB", "--threads", "1"]
_WAYS: dict[str, list[str]] = {"serve": [], "serve --workers 1": ["--workers", "1"]}
_INPUTS, _OUTPUTS = LengthRange.parse("32"), LengthRange.parse("128")
_RUNS = {1: 15, 16: 3}
"""Runs of each turn, by streams at once."""
_COLUMNS = ("streams", "tok/s", "lowest", "highest", "TTFT", "p99", "TPOT", "p99")


def load_of(concurrency: int, seed: int, vocab_size: int) -> Load:
    """Streams that begin at once; with another seed they have other prompts."""
    workload = Workload.random(concurrency, _INPUTS, _OUTPUTS, vocab_size, seed)
    maker = RequestMaker(workload, vocab_size, COMPLETIONS, {"ignore_eos": True})
    return Load(COMPLETIONS, maker.bodies(0), [0.0] * concurrency)


def turn(arguments: Sequence[str], first_seed: int) -> dict[int, list[Run]]:
    """Start a server, measure it, and stop it; returns the runs by streams at once.

    Raises:
        EngineError: the server refused a request, or ended a stream early.
    """
    vocab_size = vocab_size_of(ModelSpec.parse(_MODEL).path)
    runs: dict[int, list[Run]] = {}
    with serving(_MODEL, [*_OPTIONS, *arguments]) as url:
        target = Target.reach(url)
        for concurrency, num_runs in _RUNS.items():
            for number in range(num_runs + 1):  # the first one does not count
                run = send(target, load_of(concurrency, first_seed + number, vocab_size))
                if run.failures:
                    raise EngineError(run.failures[0].message)
                if number:
                    runs.setdefault(concurrency, []).append(run)
    return runs


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Rates of each run, and latencies over the streams of all runs."""
    streams = [stream for run in runs for stream in run.streams]
    rates = [sum(stream.num_tokens for stream in run.streams) / run.seconds for run in runs]
    return {
        "completed": len(streams),
        "output_throughput": float(np.median(rates)),
        **latency_figures(streams),
        "output_throughputs": rates,
    }


def measure(repeats: int) -> list[dict[str, Any]]:
    """Measure both in turns: for each number of streams and server, its `figures`."""
    runs: dict[tuple[int, str], list[Run]] = {}
    for repeat in range(repeats):
        for name in list(_WAYS) if repeat % 2 else list(_WAYS)[::-1]:
            for concurrency, of_turn in turn(_WAYS[name], 1000 * repeat).items():
                runs.setdefault((concurrency, name), []).extend(of_turn)
    return [
        {"server": name, "concurrency": concurrency, **figures(runs[concurrency, name])}
        for concurrency in _RUNS
        for name in _WAYS
    ]


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each measurement."""
    table = new_table("What the cluster adds")
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for result in results:
        rates = result["output_throughputs"]
        latencies_ms = [
            result[f"{statistic}_{name}_ms"]
            for name in ("ttft", "tpot")
            for statistic in ("median", "p99")
        ]
        table.add_row(
            result["server"],
            str(result["concurrency"]),
            *(f"{rate:.0f}" for rate in (result["output_throughput"], min(rates), max(rates))),
            *(f"{milliseconds:.2f}" for milliseconds in latencies_ms),
        )
    table.caption = "tok/s: output tokens of all streams, the median run; TTFT and TPOT in ms"
    return table


def main() -> None:
    """Measure, write the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="turns of each server")
    parser.add_argument("--output", type=Path, help="folder of the JSON file to write")
    options = parser.parse_args()
    results = measure(options.repeats)
    if options.output is not None:
        content = {
            "benchmark": "cluster overhead",
            "model": _MODEL,
            "options": _OPTIONS,
            "input_len": _INPUTS.lowest,
            "output_len": _OUTPUTS.lowest,
            "repeats": options.repeats,
            "results": results,
        }
        save(options.output / "overhead.json", content)
    Console(width=110).print(table_of(results))


if __name__ == "__main__":
    main()
