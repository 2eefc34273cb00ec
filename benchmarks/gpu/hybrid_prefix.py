"""The first token of a long prompt of a hybrid model: computed, found first, and found again.

    python benchmarks/gpu/hybrid_prefix.py --output results

Falcon-H1-7B's shape with random weights, in a budget of 60 GiB. A found prompt needs KV and a
checkpoint of the recurrent state; what is behind the last checkpoint is computed. Every prompt is
found for the first time once, and then again; longer ones begin with a prompt that is retained.
Then 400 requests run at once, and the driver is asked for the memory that is in use on the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import save
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

MODEL = "falcon-h1-7b"
MEMORY = "60GiB"
PROMPT_TOKENS = 8192
MORE_TOKENS = 100  # of a longer prompt
NUM_PROMPTS = 6
NUM_FOUND = 8  # times that each is found again
NUM_REQUESTS, REQUEST_TOKENS = 400, 400
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def main() -> None:
    """Measure, and print medians and extremes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of hybrid-prefix.json")
    output: Path = parser.parse_args().output
    model = Path(__file__).parent / "models" / MODEL
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"computed": [], "first found": [], "found": [], "longer": []}
    with LLM(model, device="cuda:0", load_format="dummy", memory=MEMORY, seed=0) as llm:
        (info,) = llm.engine.models.values()

        def tokens(count: int) -> list[int]:
            return [int(token) for token in random.integers(info.vocab_size, size=count)]

        def first_token_s(prompts: list[list[int]], params: SamplingParams = ONE_TOKEN) -> float:
            begun_s = time.perf_counter()
            ids = [{"prompt_token_ids": prompt} for prompt in prompts]
            llm.generate(ids, params, use_tqdm=False)
            return time.perf_counter() - begun_s

        first_token_s([tokens(PROMPT_TOKENS)])
        for _ in range(NUM_PROMPTS):
            prompt = tokens(PROMPT_TOKENS)
            seconds["computed"].append(first_token_s([prompt]))
            seconds["first found"].append(first_token_s([prompt]))
            seconds["found"] += [first_token_s([prompt]) for _ in range(NUM_FOUND)]
            seconds["longer"].append(first_token_s([prompt + tokens(MORE_TOKENS)]))
        requests = [tokens(REQUEST_TOKENS) for _ in range(NUM_REQUESTS)]
        first_token_s(requests, SamplingParams(max_tokens=REQUEST_TOKENS, ignore_eos=True))
        budget_bytes = llm.engine.memory().budget_bytes
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    share = statistics.median(seconds["found"]) / statistics.median(seconds["computed"])
    figures = {
        "model": MODEL,
        "prompt_tokens": PROMPT_TOKENS,
        "seconds": seconds,
        "found_share": share,
        "requests_at_once": NUM_REQUESTS,
        "budget_bytes": budget_bytes,
        "device_used_bytes": total_bytes - free_bytes,
    }
    save(output / "hybrid-prefix.json", figures)
    table = Table("prompt", "median, ms", "least", "most")
    for name, times in seconds.items():
        row = statistics.median(times), min(times), max(times)
        table.add_row(name, *(f"{1e3 * each:.1f}" for each in row))
    Console().print(table, f"a found one takes {share:.1%} of one that is computed")


if __name__ == "__main__":
    main()
