"""Sampling on a GPU gives the tokens of the host, whichever requests share a captured step.

All is in float32, in which logits of both differ by far less than what changes a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.architectures import OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.gpu.test_engine import SEED, Tokens, generate, greedy, open_llm, random_prompts

from aquifer.engine import captured
from aquifer.engine.params import SamplingParams
from aquifer.llm import LLM

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 0.9},
    "full": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"logit_bias": {3: 3.0, 60: 3.0, 61: -100.0}},
    {"allowed_token_ids": list(range(5, VOCAB_SIZE, 3))},
    {"min_tokens": 9, "stop_token_ids": list(range(VOCAB_SIZE // 2)), "ignore_eos": False},
    {"top_p": 0.8, "logprobs": 1},
]
"""Changes of logits, and none, so that rows that the host changes are beside others."""
ALL = [f"{name}-{number}" for name in METHODS for number in range(len(CHANGES))]
MIXTURES = {
    **{name: [each for each in ALL if each.startswith(name)] for name in METHODS},
    "all": ALL,
}
"""Requests that run together: the captured sampling of a step is that of its other rows."""
OPTIONS: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 256}


def params_of(name: str, seed: int) -> SamplingParams:
    method, change = name.split("-")
    options = {**METHODS[method], **CHANGES[int(change)]}
    return SamplingParams(**{"seed": seed, "max_tokens": 20, "ignore_eos": True, **options})


def sampled(llm: LLM, names: list[str]) -> Tokens:
    """Tokens of a request of each name, which all run together."""
    prompts = random_prompts([1 + i * 7 % 40 for i in range(len(names))])
    return generate(llm, prompts, [params_of(name, i) for i, name in enumerate(names)])


def on_host(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", memory="64MiB", dtype="float32", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(OUR_DECODER["llama"](), folder, SEED)
    return folder


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[LLM]:
    with on_host(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def gpu(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, dtype="float32", **OPTIONS) as llm:
        (lane,) = llm.engine.lanes.values()
        assert lane.captured_sizes
        yield llm


@pytest.mark.parametrize("mixture", MIXTURES)
def test_changed_logits_beside_others(host: LLM, gpu: LLM, mixture: str) -> None:
    """Biases, allowed tokens and forbidden stop tokens in some rows of captured steps."""
    names = MIXTURES[mixture]
    expected = sampled(host, names)
    by_change: dict[str, list[int]] = {}
    for name, tokens in zip(names, expected, strict=True):
        by_change.setdefault(name.split("-")[1], []).extend(tokens)
    assert {token % 3 for token in by_change["2"]} == {2}
    assert {len(tokens) for tokens in expected} > {20}  # some have stopped
    assert sampled(gpu, names) == expected
    assert gpu.engine.stats().num_late_compilations == 0


def test_captured_sampling_after_counts_have_moved(host: LLM, folder: Path) -> None:
    """Each number of requests with penalties is more than the counts of tokens had rows for."""
    full, counted, changed = "full-0", "penalties-0", "penalties-1"
    batches = [[full] * 5, [counted], [full] * 5, [counted] * 5 + [full], [full] * 5]
    batches += [[counted] * 20, [full] * 9, [changed] * 20 + [full] * 4, [full] * 24]
    with open_llm(folder, dtype="float32", **OPTIONS) as llm:
        for names in batches:
            assert sampled(llm, names) == sampled(host, names)


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "kernel by kernel"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_chunks_beside_sampled_rows(
    architecture: str, is_captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which some or all spans end before their prompts: the last layer computes only the
    rows that are sampled, if any."""
    save_tiny(OUR_DECODER[architecture](), tmp_path, SEED)
    if not is_captured:
        monkeypatch.setattr(captured, "LONG_STEP_S", 0.0)
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    lengths = (100, 1, 33, 70, 5, 90, 64, 31, 97)  # the first step samples nothing
    prompts = random_prompts(lengths)
    params = [
        greedy(8 + i) if i % 2 else SamplingParams(seed=i, top_k=20, max_tokens=25, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with on_host(tmp_path, **options) as llm:
        expected = generate(llm, prompts, params)
    with open_llm(tmp_path, dtype="float32", **options) as llm:
        (lane,) = llm.engine.lanes.values()
        assert bool(lane.captured_sizes) == is_captured
        # One prompt alone, then all.
        assert generate(llm, prompts[:1], params[0]) == expected[:1]
        assert generate(llm, prompts, params) == expected
