"""Throughput of a batch, and latency of one stream, of the engine and of Transformers' `generate`.

Both run in this process on the same threads, turn by turn, so that whatever else the machine does
hits both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from aquifer.bench.workload import Workload
from aquifer.engine.llm import LLM
from aquifer.engine.request import RequestOutput, SamplingParams

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


def greedy_params(workload: Workload) -> list[SamplingParams]:
    """Exactly as many tokens as the workload says."""
    return [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        for n in workload.output_lengths
    ]


def run_aquifer(llm: LLM, workload: Workload) -> Completed:
    """All prompts at once through the engine."""
    outputs: list[RequestOutput] = llm.generate(
        workload.prompts, greedy_params(workload), use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


def load_transformers(path: str, dtype: str) -> Any:
    """The same checkpoint in Transformers, its end-of-sequence tokens switched off."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    return model.eval()


def run_transformers(model: Any, workload: Workload) -> Completed:
    """All prompts as one batch padded on the left, for as long as the longest output takes."""
    longest = max(map(len, workload.prompts))
    ids = torch.zeros(len(workload.prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(workload.prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        tokens = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(workload.output_lengths),
            do_sample=False,
            pad_token_id=0,
        )
    return [
        row[longest : longest + length].tolist()
        for row, length in zip(tokens, workload.output_lengths, strict=True)
    ]


def compare(
    llm: LLM, workload: Workload, repeats: int, transformers_path: str | None
) -> tuple[Series, Series | None]:
    """Measure the engine, and Transformers if a path is given, alternating, after one warm-up."""
    warm_up = Workload(workload.prompts[:1], [2])
    ours, theirs = Series(), None
    run_aquifer(llm, warm_up)
    model: Any = None
    if transformers_path is not None:
        (info,) = llm.engine.models.values()
        model, theirs = load_transformers(transformers_path, info.dtype), Series()
        run_transformers(model, warm_up)
    for _ in range(repeats):
        ours.measure(lambda: run_aquifer(llm, workload))
        if theirs is not None:
            theirs.measure(lambda: run_transformers(model, workload))
    return ours, theirs
