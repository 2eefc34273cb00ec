"""Bursts of prompts that nothing is known of, in a new process: what memory under them costs.

    python benchmarks/gpu/bursts.py --output results

Qwen3-0.6B's shape with random weights, for each cache manager, with prefix caching (the default)
and without: 256 prompts of 512 tokens and one token of output at once, and that a number of times.
Retained prefixes fill the pool with the first bursts, and give way to the later ones. Without
them, each burst has the pages that the one before left mapped. Each engine has its own process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import save
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

MODEL = "qwen3-0.6b"
NUM_PROMPTS = 256
PROMPT_TOKENS = 512
NUM_BURSTS = 12
WARM_UP_TOKENS = 32
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def measure(kv_cache: str, retains: bool) -> dict[str, Any]:
    """The seconds of each burst, and the driver's calls in it."""
    model = Path(__file__).parent / "models" / MODEL
    random = np.random.default_rng(0)
    with LLM(
        model,
        device="cuda:0",
        load_format="dummy",
        kv_cache=kv_cache,
        enable_prefix_caching=retains,
        seed=0,
    ) as llm:
        (info,) = llm.engine.models.values()
        pages = llm.engine.pool.pages

        def burst(count: int, num_tokens: int) -> dict[str, Any]:
            prompts = [
                {"prompt_token_ids": random.integers(info.vocab_size, size=num_tokens).tolist()}
                for _ in range(count)
            ]
            calls = pages.num_foreground_calls, pages.num_background_calls
            begun_s = time.perf_counter()
            llm.generate(prompts, ONE_TOKEN, use_tqdm=False)
            return {
                "seconds": time.perf_counter() - begun_s,
                "calls": pages.num_foreground_calls - calls[0],
                "background_calls": pages.num_background_calls - calls[1],
                "idle_bytes": llm.engine.pool.usage().idle_bytes,
                "uncreated_bytes": llm.engine.pool.usage().uncreated_bytes,
            }

        burst(1, WARM_UP_TOKENS)
        return {
            "kv_cache": kv_cache,
            "retains": retains,
            "bursts": [burst(NUM_PROMPTS, PROMPT_TOKENS) for _ in range(NUM_BURSTS)],
        }


def main() -> None:
    """Measure all engines, and print the seconds of their bursts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of bursts.json")
    output: Path = parser.parse_args().output
    found = []
    for kv_cache in ("virtual", "paged"):
        for retains in (True, False):
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found.append(process.apply(measure, (kv_cache, retains)))
    figures = {"model": MODEL, "prompts": NUM_PROMPTS, "prompt_tokens": PROMPT_TOKENS}
    save(output / "bursts.json", {**figures, "engines": found})
    table = Table("cache", "prefixes", *(f"{number + 1}" for number in range(NUM_BURSTS)))
    for engine in found:
        seconds = [f"{1e3 * burst['seconds']:.0f}" for burst in engine["bursts"]]
        table.add_row(engine["kv_cache"], "retained" if engine["retains"] else "-", *seconds)
    Console().print("Milliseconds of each burst:", table)


if __name__ == "__main__":
    main()
