"""The same requests over HTTP and offline: what the way up to the client costs.

    python benchmarks/gpu/over_http.py --output results

For each model a server and then an engine in this process run these loads, all requests at once:

- mixed: 256 requests, 100 to 1024 tokens in and out;
- streams: 512 of them;
- prefill: 64 prompts of 2048 tokens, one token out;
- step: 256 prompts of 512 tokens; (time of 129 tokens - time of one) / 128. Once more by a server
  that does not bound the prompts of a step in which others decode, as offline.

Prefix caching is off, so that repeats do the same work. The client runs on the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from aquifer.bench.offline import run_aquifer
from aquifer.bench.report import new_table
from aquifer.bench.result import save
from aquifer.bench.serving.load import Load, send
from aquifer.bench.serving.options import COMPLETIONS
from aquifer.bench.serving.prompts import RequestMaker, vocab_size_of
from aquifer.bench.serving.server import serving
from aquifer.bench.serving.target import Target
from aquifer.bench.workload import LengthRange, Workload
from aquifer.errors import EngineError
from aquifer.llm import LLM

DEVICE = "cuda:0"
MODELS_FOLDER = Path(__file__).resolve().parent / "models"
MODELS = ("qwen3-0.6b", "llama-3-8b")
MIXED = LengthRange(100, 1024)
TEMPERATURE = 0.6
SEED = 0
STEPS = 128
UNBOUND = "step_ms_unbound"

RunLoad = Callable[[Workload], float]
"""Runs a workload; returns its seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A load, and what is measured of it.

    Args:
        name: name in the result.
        count: number of requests.
        inputs: tokens of each prompt.
        outputs: tokens of each output.
        counts_prompts: whether its rate is that of the prompts' tokens.
    """

    name: str
    count: int
    inputs: LengthRange
    outputs: LengthRange
    counts_prompts: bool = False

    def rate(self, run: RunLoad, vocab_size: int, repeats: int) -> float:
        """Tokens a second, the median of some repeats."""
        work = Workload.random(self.count, self.inputs, self.outputs, vocab_size, SEED)
        seconds = statistics.median(run(work) for _ in range(repeats))
        num_tokens = work.num_input_tokens if self.counts_prompts else work.num_output_tokens
        return num_tokens / seconds


LOADS = (
    Measured("mixed", 256, MIXED, MIXED),
    Measured("streams", 512, MIXED, MIXED),
    Measured("prefill", 64, LengthRange(2048, 2048), LengthRange(1, 1), counts_prompts=True),
)


def step_ms(run: RunLoad, vocab_size: int, repeats: int) -> float:
    """Milliseconds of a step at 256 sequences, of whole calls."""
    prompts = LengthRange(512, 512)
    short, long = (
        Workload.random(256, prompts, LengthRange(count, count), vocab_size, SEED)
        for count in (1, 1 + STEPS)
    )
    differences = [run(long) - run(short) for _ in range(repeats)]
    return 1e3 * statistics.median(differences) / STEPS


def figures(run: RunLoad, vocab_size: int, repeats: int) -> dict[str, float]:
    """All figures of one way of running the loads, after a run that does not count."""
    LOADS[0].rate(run, vocab_size, 1)
    found = {load.name: load.rate(run, vocab_size, repeats) for load in LOADS}
    return {**found, "step_ms": step_ms(run, vocab_size, repeats)}


def over_http(model: str, vocab_size: int, repeats: int, processes: int) -> dict[str, float]:
    """The figures of a server with that many processes for HTTP.

    It bounds the prompts of a step in which others decode to 40 ms, so that streams go on. Without
    that bound, as offline, the last figure is measured once more.
    """
    arguments = ["--load-format", "dummy", "--no-enable-prefix-caching", "--device", DEVICE]
    arguments += ["--api-server-count", str(processes)]
    with _running(model, vocab_size, arguments) as run:
        found = figures(run, vocab_size, repeats)
    with _running(model, vocab_size, [*arguments, "--max-prefill-ms", "0"]) as run:
        run(Workload.random(256, MIXED, MIXED, vocab_size, SEED))
        return {**found, UNBOUND: step_ms(run, vocab_size, repeats)}


@contextmanager
def _running(model: str, vocab_size: int, arguments: list[str]) -> Iterator[RunLoad]:
    """A server; gives what sends it a workload."""
    with serving(f"m={MODELS_FOLDER / model}", arguments) as url:
        target = Target.reach(url)

        def run(work: Workload) -> float:
            fields = {"model": "m", "temperature": TEMPERATURE, "ignore_eos": True}
            bodies = RequestMaker(work, vocab_size, COMPLETIONS, fields).bodies(0)
            done = send(target, Load(COMPLETIONS, bodies, [0.0] * len(bodies)))
            if done.failures:
                raise EngineError(done.failures[0].message)
            return done.seconds

        yield run


def offline(model: str, vocab_size: int, repeats: int) -> dict[str, float]:
    """The figures of an engine in this process."""
    llm = LLM(
        MODELS_FOLDER / model,
        device=DEVICE,
        load_format="dummy",
        enable_prefix_caching=False,
        seed=SEED,
    )

    def run(work: Workload) -> float:
        begun_s = time.perf_counter()
        run_aquifer(llm, work, TEMPERATURE)
        return time.perf_counter() - begun_s

    try:
        return figures(run, vocab_size, repeats)
    finally:
        llm.close()


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each load")
    parser.add_argument("--api-server-count", type=int, default=1, help="processes for HTTP")
    arguments = parser.parse_args()
    models: Sequence[str] = arguments.models
    arguments.output.mkdir(parents=True, exist_ok=True)
    table = new_table("tokens/s, or ms a step")
    for column in ("model", "load", "HTTP", "offline", "% of offline"):
        table.add_column(column, justify="left" if column in ("model", "load") else "right")
    for model in models:
        vocab_size = vocab_size_of(MODELS_FOLDER / model)
        http = over_http(model, vocab_size, arguments.repeats, arguments.api_server_count)
        direct = offline(model, vocab_size, arguments.repeats)
        results: dict[str, Any] = {
            "benchmark": "over_http",
            "model": model,
            "temperature": TEMPERATURE,
            "repeats": arguments.repeats,
            "api_server_count": arguments.api_server_count,
            "http": http,
            "offline": direct,
        }
        save(arguments.output / f"{model}-over-http.json", results)
        for name, value in http.items():
            other = direct["step_ms" if name == UNBOUND else name]
            cells = f"{value:,.6g}", f"{other:,.6g}", f"{100 * value / other:.1f}"
            table.add_row(model, name, *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
