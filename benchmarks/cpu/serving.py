"""Streams from servers that differ in their threads, in turns: `make bench-serving`.

    python benchmarks/cpu/serving.py [--model PATH] [--before PATH] [--output FILE]

Each way of running the server is a process of its own. All are idle but the one that is measured,
and they take turns in each repeat, so that other load on the machine hits all alike. `--before` is
another checkout, whose server takes part.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from aquifer.bench.report import new_table
from aquifer.bench.result import environment, save
from aquifer.bench.serving.figures import latency_figures
from aquifer.bench.serving.load import Load, Run, send
from aquifer.bench.serving.options import COMPLETIONS
from aquifer.bench.serving.prompts import RequestMaker, vocab_size_of
from aquifer.bench.serving.server import serving
from aquifer.bench.serving.target import Target
from aquifer.bench.workload import LengthRange, Workload
from aquifer.config import ModelSpec
from aquifer.errors import EngineError

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
_BUSY = "while True: pass"
_STATISTICS = ("median", "p99")
_COLUMNS = ("streams", "busy", "tok/s", "lowest", "highest", "TTFT", "p99", "TPOT", "p99")


@dataclass(frozen=True, slots=True)
class Streams:
    """What is measured: streams at once, of which lengths, beside how many busy processes."""

    concurrencies: Sequence[int]
    busy: Sequence[int]
    inputs: LengthRange
    outputs: LengthRange
    vocab_size: int
    seed: int

    def load(self, concurrency: int, repeat: int) -> Load:
        """The requests of one run. Each repeat has other prompts, so that none is cached."""
        seed = self.seed + repeat
        workload = Workload.random(concurrency, self.inputs, self.outputs, self.vocab_size, seed)
        maker = RequestMaker(workload, self.vocab_size, COMPLETIONS, {"ignore_eos": True})
        return Load(COMPLETIONS, maker.bodies(0), [0.0] * concurrency)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that each keep a core busy."""
    with ExitStack() as processes:
        for _ in range(count):
            process = processes.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            processes.callback(process.kill)
        yield


def measure(urls: Mapping[str, str], streams: Streams, repeats: int) -> list[dict[str, Any]]:
    """Measure servers in turns, so that other load on the machine hits all alike.

    Args:
        urls: the servers, by name.
        streams: what to measure.
        repeats: runs of each kind, after one that does not count.

    Returns: for each number of busy processes, number of streams, and server: its `figures`.

    Raises:
        EngineError: a server refused a request, or ended a stream early.
    """
    targets = {name: Target.reach(url) for name, url in urls.items()}
    results = []
    for num_busy in streams.busy:
        runs: dict[tuple[int, str], list[Run]] = {}
        with busy(num_busy):
            for repeat in range(repeats + 1):
                order = list(urls) if repeat % 2 else list(urls)[::-1]
                for concurrency, name in itertools.product(streams.concurrencies, order):
                    run = send(targets[name], streams.load(concurrency, repeat))
                    if run.failures:
                        raise EngineError(f"{name}: {run.failures[0].message}")
                    if repeat:
                        runs.setdefault((concurrency, name), []).append(run)
        results += [
            {
                "server": name,
                "busy": num_busy,
                "concurrency": concurrency,
                **figures(runs[concurrency, name]),
            }
            for concurrency, name in itertools.product(streams.concurrencies, urls)
        ]
    return results


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Results of repeats of one measurement, by the names of `vllm bench serve`.

    Rates are those of the median run; latencies are taken over the streams of all runs.
    """
    streams = [stream for run in runs for stream in run.streams]
    rates = [sum(stream.num_tokens for stream in run.streams) / run.seconds for run in runs]
    seconds = float(np.median([run.seconds for run in runs]))
    return {
        "completed": len(streams),
        "total_output_tokens": sum(stream.num_tokens for stream in streams),
        "request_throughput": len(runs[0].streams) / seconds,
        "output_throughput": float(np.median(rates)),
        **latency_figures(streams),
        "output_throughputs": rates,
    }


def table_of(title: str, runs: Sequence[dict[str, Any]]) -> Table:
    """A row for each measurement that `measure` returned."""
    table = new_table(title)
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for run in runs:
        rates = run["output_throughputs"]
        latencies_ms = [
            run[f"{statistic}_{name}_ms"] for name in ("ttft", "tpot") for statistic in _STATISTICS
        ]
        table.add_row(
            run["server"],
            str(run["concurrency"]),
            str(run["busy"]),
            *(f"{rate:.0f}" for rate in (run["output_throughput"], min(rates), max(rates))),
            *(f"{milliseconds:.1f}" for milliseconds in latencies_ms),
        )
    table.caption = "tok/s: output tokens of all streams, the median run; TTFT and TPOT in ms"
    return table


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
    streams = Streams(
        [1, 8],
        [0, 1],
        LengthRange.parse(options.input_len),
        LengthRange.parse(options.output_len),
        vocab_size_of(ModelSpec.parse(options.model).path),
        seed=0,
    )
    with ExitStack() as servers:
        urls = {
            name: servers.enter_context(
                serving(options.model, ["--memory", "1GiB", *arguments], environment)
            )
            for name, (environment, arguments) in ways.items()
        }
        runs = measure(urls, streams, options.repeats)
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
    Console(width=100).print(table_of(f"aquifer serve {options.model}", runs))


if __name__ == "__main__":
    main()
