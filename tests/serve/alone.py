"""Answers of engines without a server, which take seconds less to start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aquifer import LLM, SamplingParams


def answers_of_one_engine(
    models: Sequence[str], asked: Sequence[tuple[str, str]], **options: Any
) -> list[str]:
    """The texts of greedy completions, by an engine with room for its one model after the other.

    Args:
        models: each as NAME=PATH.
        asked: names and prompts.
        options: of `SamplingParams`.
    """
    paths = dict(model.split("=", 1) for model in models)
    params = SamplingParams(temperature=0, **options)
    texts = {}
    for name in {name for name, _ in asked}:
        prompts = list({prompt for other, prompt in asked if other == name})
        with LLM(paths[name], page_size="4K", max_model_len=512, memory="64M") as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            texts[name, prompt] = output.outputs[0].text
    return [texts[each] for each in asked]
