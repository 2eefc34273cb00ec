"""A model whose KV changes at a length (longrope): beams, samples, prefixes and preemption."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.architectures import ORIGINAL_TOKENS, OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.cases import EVERY_CASE, covering
from tests.engine.books import KV_LIMITS, SchedulerWorld

from aquifer.bench.soak import check_idle
from aquifer.cache import KV_CACHES
from aquifer.engine.params import BeamSearchParams, SamplingParams
from aquifer.llm import LLM

OUTPUT_TOKENS = 20
OPTIONS: dict[str, Any] = {"memory": "16MiB", "page_size": "4KiB", "block_size": 4, "seed": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
LENGTHS = (1, ORIGINAL_TOKENS - OUTPUT_TOKENS + 2, 22, 31, 32, 33, 34, 60)
"""Lengths of prompts: some sequences outgrow the original length, with their last tokens or their
first, some never do, and some begin beyond it."""

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and Transformers' model of it."""
    folder = tmp_path_factory.mktemp("longrope")
    reference = save_tiny(OUR_DECODER["phi3-longrope"](), folder, 2)
    reference.generation_config.eos_token_id = None
    return folder, reference


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.inference_mode()
def expected(
    model: Any, prompt: list[int], max_tokens: int = OUTPUT_TOKENS, **options: Any
) -> Tokens:
    """What Transformers generates."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        **options,
    )
    output: Tokens = result[:, len(prompt) :].tolist()
    return output


def generate(llm: LLM, prompts: Tokens, params: Any) -> list[Tokens]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in out.outputs] for out in outputs]


@pytest.mark.parametrize(
    ("kv_cache", "num_ahead", "max_num_batched_tokens"),
    covering(KV_CACHES, [0, 1], [16, 512], strength=2),
)
def test_every_length(
    model: tuple[Path, Any],
    prompts: Tokens,
    kv_cache: str,
    num_ahead: int,
    max_num_batched_tokens: int,
) -> None:
    folder, reference = model
    options = {**OPTIONS, "kv_cache": kv_cache, "max_num_batched_tokens": max_num_batched_tokens}
    with LLM(folder, **options) as llm:
        llm.engine.num_ahead = num_ahead
        found = generate(llm, prompts, [GREEDY] * len(prompts))
        assert sum(llm.engine.stats().num_preemptions.values()) == 0
        check_idle(llm)
    assert found == [expected(reference, prompt) for prompt in prompts]


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_beams_equal_transformers(model: tuple[Path, Any], prompts: Tokens, kv_cache: str) -> None:
    folder, reference = model
    beams = BeamSearchParams(
        beam_width=3, max_tokens=OUTPUT_TOKENS, ignore_eos=True
    ).sampling_params()
    with LLM(folder, kv_cache=kv_cache, max_num_batched_tokens=48, **OPTIONS) as llm:
        found = generate(llm, prompts, [beams] * len(prompts))
        check_idle(llm)
    assert found == [
        expected(reference, prompt, num_beams=3, num_return_sequences=3) for prompt in prompts
    ]


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_samples_equal_those_of_single_requests(
    model: tuple[Path, Any], prompts: Tokens, kv_cache: str
) -> None:
    """Those of one request share the prompt; single ones share nothing."""
    folder, _ = model
    samples = SamplingParams(n=3, seed=5, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with LLM(folder, kv_cache=kv_cache, max_num_batched_tokens=20, **OPTIONS) as llm:
        together = generate(llm, prompts, [samples] * len(prompts))
        check_idle(llm)
    with LLM(folder, kv_cache=kv_cache, enable_prefix_caching=False, **OPTIONS) as llm:
        for number, (prompt, found) in enumerate(zip(prompts, together, strict=True)):
            first = SamplingParams(seed=5, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            assert generate(llm, [prompt], first) == [found[:1]]
            # A prompt with some of the output goes on with the same draws and the same KV.
            for output in found if EVERY_CASE else [found[number % 3]]:
                rest = generate(llm, [prompt + output[:7]], GREEDY)
                texts = [prompt + output[:7] + rest[0][0][:3]]
                assert generate(llm, texts, GREEDY)[0][0][:5] == rest[0][0][3:8]


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_prefixes_of_other_lengths_are_not_reused(
    model: tuple[Path, Any], prompts: Tokens, kv_cache: str
) -> None:
    """KV of a long prompt is of no use for a short one that it begins with, nor the reverse."""
    folder, reference = model
    long = prompts[-1]
    short, middle = long[:24], long[:50]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(folder, kv_cache=kv_cache, **OPTIONS) as llm:
        for prompt, shares in ((short, False), (long, False), (short, True), (middle, True)):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert [output.outputs[0].token_ids] == expected(reference, prompt, 6)
            assert ((output.num_cached_tokens or 0) > 0) == shares
        check_idle(llm)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_a_pinned_prefix_is_kept_for_every_length(
    model: tuple[Path, Any], prompts: Tokens, kv_cache: str
) -> None:
    folder, _ = model
    long = prompts[-1]
    with LLM(folder, kv_cache=kv_cache, **OPTIONS) as llm:
        (lane,) = llm.engine.lanes.values()
        num_kept = llm.pin_prefix({"prompt_token_ids": long[:24]})
        assert lane.prefixes is not None
        pinned_bytes = lane.prefixes.pinned_bytes
        assert pinned_bytes > 0
        llm.generate([long], GREEDY, use_tqdm=False)
        assert lane.prefixes.pinned_bytes == 2 * pinned_bytes == lane.prefixes.promised_bytes
        for prompt in (long[:30], long):
            lane.prefixes.evict(1 << 30, 0.0)  # all but what is pinned
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == num_kept
        llm.unpin_prefix({"prompt_token_ids": long[:24]})
        assert lane.prefixes.pinned_bytes == lane.prefixes.promised_bytes == 0
    assert num_kept > 0


@pytest.mark.parametrize("cache", KV_CACHES)
def test_kv_that_a_sequence_has_outgrown_is_not_moved_to_the_host(cache: str) -> None:
    """The world checks that a sequence reads KV of its own length only."""
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(1),
            cache,
            resources,
            names=("small",),
            budget_bytes=1 << 20,
            preemption_mode="swap",
            kv_limits=KV_LIMITS,
        )
        (lane,) = world.scheduler.lanes.values()
        limit = KV_LIMITS[0]
        tracked = world.add(lane, limit - 2, limit + 10, min_tokens=12)
        swaps = []
        for num_tokens in (limit - 1, limit, limit + 1, limit + 2):
            while len(tracked.given.get(0, ())) < num_tokens - limit + 2:
                world.step()
            world.scheduler.preempt_all(lane)
            swaps.append(lane.num_swaps)
        world.finish()
        assert swaps == [1, 2, 2, 3]
        world.check_empty()
