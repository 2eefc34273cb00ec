"""Benefit of retained KV on a GPU: prefix cache hits, and swapping compared with recomputation.

    python benchmarks/gpu/sharing.py --output results

Llama-3-8B's shape with random weights. For each cache manager:

- time to the first token of an 8192-token prompt: computed, found in the prefix cache, and found by
  eight requests at once, of which seven need the pages at other addresses;
- a sequence of each length swapped to the host and back (`aquifer.cache.swap`), compared with
  recomputation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import save
from aquifer.cache.swap import SwapSpace
from aquifer.engine.params import Request, SamplingParams
from aquifer.llm import LLM

DEVICE = "cuda:0"
MODEL = "llama-3-8b"
PROMPT_TOKENS = 8192
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
REPEATS = 5
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Bench:
    """One engine with one cache manager."""

    def __init__(self, kv_cache: str) -> None:
        with _longer_model() as folder:
            self._llm = LLM(folder, device=DEVICE, load_format="dummy", kv_cache=kv_cache, seed=0)
        (self._info,) = self._llm.engine.models.values()
        self._random = np.random.default_rng(0)
        self._num_requests = 0

    def close(self) -> None:
        """Close the engine."""
        self._llm.close()

    def cached_prompts(self) -> dict[str, Any]:
        """Measure the seconds to the first token, all repeats."""
        prompt = self._prompt(PROMPT_TOKENS)
        self._first_token_s([prompt])  # pages
        first_cached = [self._first_token_s([prompt]) for _ in range(2 * REPEATS)]
        computed = [self._first_token_s([self._prompt(PROMPT_TOKENS)]) for _ in range(REPEATS)]
        prompt = self._prompt(PROMPT_TOKENS)
        self._first_token_s([prompt])
        cached = [self._first_token_s([prompt]) for _ in range(REPEATS)]
        together = [self._first_token_s([prompt] * 8) for _ in range(REPEATS)]
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "first_cached_s": first_cached,  # the first that the process finds, and those after it
            "computed_s": computed,
            "cached_s": cached,
            "eight_cached_s": together,
            "ratio": statistics.median(cached) / statistics.median(computed),
        }

    def swaps(self) -> list[dict[str, Any]]:
        """Measure swap bandwidth in both directions, and recomputation, for each length."""
        (lane,) = self._llm.engine.lanes.values()
        assert lane.prefixes is not None
        cache, token_bytes = lane.cache, lane.cache.footprint.token_bytes
        space = SwapSpace(2 * max(LENGTHS) * token_bytes, torch.device(DEVICE))
        space.prepare()
        while space.wait_for_more():
            pass
        figures = []
        slot = lane.slots.free[-1]
        for length in LENGTHS:
            self._first_token_s([self._prompt(length)])
            recompute = [self._first_token_s([self._prompt(length)]) for _ in range(REPEATS)]
            lane.prefixes.clear()
            out_s, in_s = [], []
            for _ in range(REPEATS):
                assert cache.reserve(np.array([slot]), np.array([length]))
                cache.upload()
                seconds, swapped = _timed(space.swap_out, cache, [slot], [length])
                out_s.append(seconds)
                assert swapped is not None
                cache.release(slot)
                seconds, came_back = _timed(space.swap_in, cache, [slot], swapped)
                in_s.append(seconds)
                assert came_back
                cache.release(slot)
            num_bytes = length * token_bytes
            figures.append(
                {
                    "tokens": length,
                    "bytes": num_bytes,
                    "out_s": out_s,
                    "in_s": in_s,
                    "recompute_s": recompute,
                    "out_bytes_per_s": num_bytes / statistics.median(out_s),
                    "in_bytes_per_s": num_bytes / statistics.median(in_s),
                }
            )
        space.close()
        return figures

    def _prompt(self, length: int) -> list[int]:
        tokens: list[int] = self._random.integers(self._info.vocab_size, size=length).tolist()
        return tokens

    def _first_token_s(self, prompts: list[list[int]]) -> float:
        engine = self._llm.engine
        start = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            name = str(self._num_requests)
            engine.add(Request(name, self._info.name, prompt, ONE_TOKEN, time.monotonic()))
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start


@contextmanager
def _longer_model() -> Iterator[Path]:
    """Copy the model's configuration with a context longer than the longest prompt."""
    source = Path(__file__).resolve().parent / "models" / MODEL / "config.json"
    config = {**json.loads(source.read_text()), "max_position_embeddings": 2 * max(LENGTHS)}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / MODEL
        folder.mkdir()
        (folder / source.name).write_text(json.dumps(config))
        yield folder


def _timed(run: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"benchmark": "sharing", "model": MODEL}
    table = Table(title=f"{MODEL}: tokens, ms to compute, ms out and in, GB/s out and in")
    for column in ("cache", "tokens", "compute", "out", "in", "GB/s out", "GB/s in"):
        table.add_column(column, justify="right")
    for kv_cache in ("virtual", "paged"):
        bench = Bench(kv_cache)
        prompts, swaps = bench.cached_prompts(), bench.swaps()
        bench.close()
        results[kv_cache] = {"cached_prompts": prompts, "swaps": swaps}
        for row in swaps:
            times = [statistics.median(row[key]) for key in ("recompute_s", "out_s", "in_s")]
            rates = [row[key] / 1e9 for key in ("out_bytes_per_s", "in_bytes_per_s")]
            cells = [f"{1e3 * s:.1f}" for s in times] + [f"{rate:.1f}" for rate in rates]
            table.add_row(kv_cache, str(row["tokens"]), *cells)
        medians = {
            key: f"{1e3 * statistics.median(prompts[key]):.1f} ms"
            for key in ("computed_s", "cached_s", "eight_cached_s")
        }
        first, tenth = (1e3 * prompts["first_cached_s"][i] for i in (0, -1))
        print(kv_cache, medians, f"ratio {prompts['ratio']:.3f}", flush=True)
        print(f"  first found {first:.1f} ms, tenth {tenth:.1f}", flush=True)
    save(arguments.output / "sharing.json", results)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
