"""Offline throughput: many requests at once in the engine, and in Transformers' `generate`.

Both run in this process on the same device, alternating, so that other load on the machine
hits both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aquifer.bench.floor import Cost, Rates
from aquifer.bench.result import summarize
from aquifer.bench.workload import Workload
from aquifer.engine.outputs import RequestOutput
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

Completed = list[list[int]]
"""Generated token ids, for each prompt."""


@dataclass(slots=True)
class Series:
    """Repeats of one measurement, in seconds."""

    seconds: list[float] = field(default_factory=list)
    completed: Completed = field(default_factory=list)

    def measure(self, run: Callable[[], Completed]) -> None:
        """Time one run."""
        start = time.perf_counter()
        self.completed = run()
        self.seconds.append(time.perf_counter() - start)

    def figures(self, workload: Workload) -> dict[str, Any]:
        """The figures for the result's file; rates are those of the median run."""
        seconds = summarize(self.seconds)["median"]
        num_tokens = workload.num_input_tokens + workload.num_output_tokens
        return {
            "output_throughput": workload.num_output_tokens / seconds,
            "prompt_throughput": workload.num_input_tokens / seconds,
            "total_token_throughput": num_tokens / seconds,
            "duration": seconds,
            "seconds": self.seconds,
        }


def sampling_params(workload: Workload, temperature: float = 0.0) -> list[SamplingParams]:
    """Sampling parameters that give exactly the workload's output lengths."""
    return [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True)
        for n in workload.output_lengths
    ]


def run_aquifer(llm: LLM, workload: Workload, temperature: float) -> Completed:
    """Run all prompts at once through the engine."""
    outputs: list[RequestOutput] = llm.generate(
        workload.prompts, sampling_params(workload, temperature), use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


def load_transformers(llm: LLM) -> Any:
    """The same checkpoint in Transformers, without its end-of-sequence tokens."""
    from transformers import AutoModelForCausalLM

    (info,) = llm.engine.models.values()
    model = AutoModelForCausalLM.from_pretrained(info.path, dtype=getattr(torch, info.dtype))
    model.generation_config.eos_token_id = None
    return model.eval().to(llm.engine.pool.driver.device)


def run_transformers(model: Any, workload: Workload) -> Completed:
    """Run all prompts as one batch, padded on the left, up to the longest output."""
    longest = max(map(len, workload.prompts))
    ids = torch.zeros(len(workload.prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(workload.prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        tokens = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(workload.output_lengths),
            do_sample=False,
            pad_token_id=0,
        )
    return [
        row[longest : longest + length].tolist()
        for row, length in zip(tokens, workload.output_lengths, strict=True)
    ]


def compare(
    llm: LLM, workload: Workload, repeats: int, transformers: Any = None, temperature: float = 0.0
) -> tuple[Series, Series | None]:
    """Time the engine, alternating with Transformers if given.

    Each first runs the whole workload once as a warm-up: that run compiles kernels, captures CUDA
    graphs and creates pages.
    """
    ours, theirs = Series(), None if transformers is None else Series()
    run_aquifer(llm, workload, temperature)
    if theirs is not None:
        run_transformers(transformers, workload)
    for _ in range(repeats):
        ours.measure(lambda: run_aquifer(llm, workload, temperature))
        if theirs is not None:
            theirs.measure(lambda: run_transformers(transformers, workload))
    return ours, theirs


def figures(
    workload: Workload, ours: Series, theirs: Series | None, cost: Cost, rates: Rates
) -> dict[str, Any]:
    """Results of `compare`, and the floor, for the result's file."""
    floor_s = cost.total_s(workload, rates)
    result: dict[str, Any] = {
        **sizes(workload),
        "aquifer": ours.figures(workload),
        "floor_seconds": floor_s,
        "floor_output_throughput": workload.num_output_tokens / floor_s,
    }
    if theirs is not None:
        result["transformers"] = theirs.figures(workload)
        result |= ratios(workload, ours, theirs)
    return result


def prefill_figures(workload: Workload, ours: Series, cost: Cost, rates: Rates) -> dict[str, Any]:
    """Like `figures`, for requests that end at their first token."""
    floor_s = cost.prefill_s([len(prompt) for prompt in workload.prompts], rates)
    return {
        **sizes(workload),
        "aquifer": ours.figures(workload),
        "floor_seconds": floor_s,
        "floor_prompt_throughput": workload.num_input_tokens / floor_s,
    }


def sizes(workload: Workload) -> dict[str, int]:
    """Sizes of a workload, for the result's file."""
    return {
        "num_prompts": len(workload.prompts),
        "total_input_tokens": workload.num_input_tokens,
        "total_output_tokens": workload.num_output_tokens,
    }


def ratios(workload: Workload, ours: Series, theirs: Series) -> dict[str, Any]:
    """Ratio of two series of one workload, and number of equal outputs."""
    ours_s, theirs_s = (summarize(series.seconds)["median"] for series in (ours, theirs))
    equal = [a == b for a, b in zip(ours.completed, theirs.completed, strict=True)]
    return {"ratio": theirs_s / ours_s, "equal_outputs": sum(equal)}
