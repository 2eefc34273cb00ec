"""Steps that read a prompt beside sequences that decode: in one graph, and in pieces.

    python benchmarks/gpu/prompt_steps.py --model qwen3-0.6b --output results.json

In each step one new prompt is read whole, and gets its only token; some sequences decode all the
time. Both ways run in turns in one process: as one graph (`aquifer.engine.whole_graphs`), and in
pieces with attention between them (`aquifer.engine.chunk_graphs`), which take a step where it does
not fit into such a graph. Figures of each: the time from step to step, and what planning and
launching a step take the host, medians in ms.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aquifer import LLM, SamplingParams
from aquifer.bench.result import save
from aquifer.engine.params import Request
from aquifer.engine.runner import Runner
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.whole_graphs import WholeGraphs

MODELS = Path(__file__).resolve().parent / "models"
CASES = ((0, 20), (0, 400), (8, 100), (95, 400), (95, 1000), (240, 600))
"""Sequences that decode, and tokens of the prompts."""

ROUNDS, WARM_UP_STEPS, STEPS = 6, 4, 10
CONTEXT = (200, 600)
OUTPUT_TOKENS = 900
SEED = 0


@contextmanager
def in_pieces() -> Iterator[None]:
    """No step is one graph."""
    size_of = WholeGraphs.size_of
    WholeGraphs.size_of = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        WholeGraphs.size_of = size_of  # type: ignore[method-assign]


@contextmanager
def in_one_graph() -> Iterator[None]:
    """Steps that fit are one graph."""
    yield


WAYS = {"one graph": in_one_graph, "in pieces": in_pieces}


@contextmanager
def timed(times_s: dict[str, list[float]]) -> Iterator[None]:
    """Append how long each plan and each launch takes."""
    methods = {"plan_ms": (Scheduler, "plan"), "launch_ms": (Runner, "launch")}
    originals = {label: getattr(*place) for label, place in methods.items()}

    def replacement(label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = method(*arguments)
            times_s.setdefault(label, []).append(time.perf_counter() - start_s)
            return result

        return run

    for label, (owner, name) in methods.items():
        setattr(owner, name, replacement(label, originals[label]))
    try:
        yield
    finally:
        for label, (owner, name) in methods.items():
            setattr(owner, name, originals[label])


class Steps:
    """An engine with sequences that decode, and prompts for its steps.

    Args:
        llm: with one model, and nothing running.
        num_decodes: sequences that decode.
        prompt_tokens: of the prompt in each step.
    """

    def __init__(self, llm: LLM, num_decodes: int, prompt_tokens: int) -> None:
        self._engine = llm.engine
        ((self._model, self._info),) = llm.engine.models.items()
        self._random = np.random.default_rng(SEED)
        self._names = count()
        self._added: list[str] = []
        self._prompt_tokens = prompt_tokens
        for _ in range(num_decodes):
            self._add(int(self._random.integers(*CONTEXT)), OUTPUT_TOKENS)
        for _ in range(num_decodes // 8 + 20 if num_decodes else 0):
            self._engine.step()

    def run(self) -> dict[str, float]:
        """Run some steps; their figures."""
        for _ in range(WARM_UP_STEPS):
            self._step()
        times_s: dict[str, list[float]] = {}
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        with timed(times_s):
            for _ in range(STEPS):
                self._step()
        torch.cuda.synchronize()
        step_ms = 1e3 * (time.perf_counter() - start_s) / STEPS
        host = {label: 1e3 * statistics.median(times) for label, times in times_s.items()}
        return {"step_ms": step_ms, **host}

    def close(self) -> None:
        """End all requests."""
        for name in self._added:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        name = f"steps-{next(self._names)}"
        prompt = self._random.integers(self._info.vocab_size, size=num_tokens).tolist()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add(Request(name, self._model, prompt, params, time.monotonic()))
        self._added.append(name)

    def _step(self) -> None:
        self._add(self._prompt_tokens, 1)
        self._engine.step()


def measure(llm: LLM, num_decodes: int, prompt_tokens: int) -> dict[str, Any]:
    """Both ways, in turns."""
    steps = Steps(llm, num_decodes, prompt_tokens)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    gc.collect()
    try:
        for round_ in range(ROUNDS):
            for way in WAYS if round_ % 2 else reversed(WAYS):
                with WAYS[way]():
                    found[way].append(steps.run())
    finally:
        steps.close()
    result: dict[str, Any] = {"decodes": num_decodes, "prompt_tokens": prompt_tokens}
    for way, runs in found.items():
        result[way] = {
            name: statistics.median(figures[name] for figures in runs) for name in runs[0]
        }
        shown = ", ".join(f"{name} {value:.3f}" for name, value in result[way].items())
        print(f"{num_decodes} decode, {prompt_tokens} tokens, {way}: {shown}", flush=True)
    return result


def main() -> None:
    """Measure all cases, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/gpu/models")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args()
    with LLM(
        MODELS / arguments.model, load_format="dummy", enable_prefix_caching=False, seed=SEED
    ) as llm:
        cases = [measure(llm, *case) for case in CASES]
    save(arguments.output, {"benchmark": "prompt_steps", "model": arguments.model, "cases": cases})


if __name__ == "__main__":
    main()
