"""Decode steps of a batch in which one request needs its logits on the host.

    python benchmarks/gpu/extras.py --output results.json

A request with log probabilities, or with `min_tokens` that it has not reached, has its logits
changed or reported one step at a time. How much does that cost all others? For batches of 32 and
128 sequences of Qwen3-0.6B's shape (random weights, 512 prompt tokens), the median time of a call
of `Engine.step` while all decode: without such a request, with one that reports log probabilities,
and with one that has had `min_tokens` tokens for most of its life.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from aquifer import LLM, SamplingParams
from aquifer.bench.result import save

MODEL = Path(__file__).resolve().parent / "models" / "qwen3-0.6b"
BATCH_SIZES = (32, 128)
PROMPT_TOKENS, OUTPUT_TOKENS, WARM_UP_STEPS = 512, 160, 24
EXTRAS: dict[str, dict[str, Any]] = {
    "none": {},
    "logprobs": {"logprobs": 1},
    "min_tokens, reached": {"min_tokens": 8, "stop_token_ids": [1]},
}


def step_times_ms(llm: LLM, num_seqs: int, extra: dict[str, Any]) -> list[float]:
    """Times of the steps in which all sequences decode, one of them with `extra`."""
    common: dict[str, Any] = {"temperature": 0.6, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    prompts = [[(7 * i + j) % 9999 for j in range(PROMPT_TOKENS)] for i in range(num_seqs)]
    params = [SamplingParams(**common, **(extra if i == 0 else {})) for i in range(num_seqs)]
    engine = llm.engine
    times_ms: list[float] = []
    step = engine.step

    def timed() -> Any:
        start = time.perf_counter()
        outputs = step()
        if sum(len(output.token_ids) for output in outputs) == num_seqs:
            times_ms.append(1e3 * (time.perf_counter() - start))
        return outputs

    engine.step = timed  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        del engine.step
    return times_ms[WARM_UP_STEPS:]


def main() -> None:
    """Measure all batches, print a line for each, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with LLM(MODEL, load_format="dummy", enable_prefix_caching=False, seed=0) as llm:
        for num_seqs in BATCH_SIZES:
            for name, extra in EXTRAS.items():
                for _ in range(2):  # the first run compiles and captures
                    times_ms = step_times_ms(llm, num_seqs, extra)
                results.setdefault(str(num_seqs), {})[name] = {
                    "median_step_ms": statistics.median(times_ms),
                    "step_ms": times_ms,
                }
                median_ms = statistics.median(times_ms)
                print(f"batch {num_seqs}, {name}: {median_ms:.3f} ms a step", flush=True)
    save(arguments.output, {"benchmark": "extras", "model": MODEL.name, "batches": results})


if __name__ == "__main__":
    main()
