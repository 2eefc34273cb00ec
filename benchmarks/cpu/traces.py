"""Made-up traces that `measure.py` replays; the same arguments give the same trace."""

from __future__ import annotations

import numpy as np

from aquifer.sim.trace import TraceRequest, poisson_arrivals


def conversations(count: int, rate: float) -> list[TraceRequest]:
    """Lengths distributed as those of Azure's conversation trace, roughly: skewed, to 4096."""
    rng = np.random.default_rng(1)
    prompts = rng.lognormal(6.6, 1.0, count).clip(8, 3000).astype(int).tolist()
    outputs = rng.lognormal(5.2, 0.7, count).clip(4, 1000).astype(int).tolist()
    pairs = zip(prompts, outputs, strict=True)
    return poisson_arrivals([TraceRequest(None, *pair) for pair in pairs], rate, count, 1)


def lengths(
    seed: int, count: int, prompt: tuple[int, int], output: tuple[int, int], rate: float
) -> list[TraceRequest]:
    """Lengths drawn evenly from ranges of prompts and outputs."""
    rng = np.random.default_rng(seed)
    requests = [
        TraceRequest(None, int(rng.integers(*prompt)), int(rng.integers(*output)))
        for _ in range(count)
    ]
    return poisson_arrivals(requests, rate, count, seed)


def shared_prefixes(count: int, rate: float) -> list[TraceRequest]:
    """Prompts that begin with one of 60 prefixes of 512 to 3072 tokens."""
    rng = np.random.default_rng(4)
    requests = []
    for _ in range(count):
        prefix = int(rng.zipf(1.3)) % 60
        num_blocks = 1 + prefix % 6
        ids = tuple(range(10 * prefix, 10 * prefix + num_blocks))
        num_prompt = 512 * num_blocks + int(rng.integers(1, 400))
        requests.append(TraceRequest(None, num_prompt, int(rng.integers(20, 300)), None, ids))
    requests = [
        TraceRequest(
            None, r.prompt_tokens, r.output_tokens, None, r.prefix_ids, 512 * len(r.prefix_ids)
        )
        for r in requests
    ]
    return poisson_arrivals(requests, rate, count, 4)
