"""Models with windows: tokens of sequences many windows long, with prefixes, beams and preemption.

The expected tokens are those of Transformers' `generate`, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import OUR_DECODER, VOCAB_SIZE, WINDOW_TOKENS, save_tiny
from tests.cases import EVERY_CASE, covering
from tests.engine.test_tokens import CLEAR_GAP

from aquifer.bench.soak import check_idle
from aquifer.cache import KV_CACHES
from aquifer.engine.params import BeamSearchParams, SamplingParams
from aquifer.llm import LLM
from aquifer.memory.pool import Kind

FAMILIES = (
    # Some layers slide, all layers do, some do by another pattern.
    *("gemma3_text", "mistral", "cohere2"),
    *(("gemma2", "olmo3", "exaone4", "phi3", "mixtral", "gpt_oss") if EVERY_CASE else ()),
)

OUTPUT_TOKENS = 3 * WINDOW_TOKENS + 1
OPTIONS: dict[str, Any] = {"page_size": "4KiB", "block_size": 4, "seed": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Reference:
    """A model of Transformers, its checkpoint, and prompts with what it generates after each."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    outputs: list[list[int]]


def make_prompts() -> list[list[int]]:
    """Prompts that begin alike: at every part of a window, and where others end."""
    generator = torch.Generator().manual_seed(4)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    long = tokens(81)
    prompts = [long, long]
    prompts += [[*long[:common], *tokens(5)] for common in (13, 40, 42, 80)]
    return [*prompts, tokens(1), long[:64], tokens(33)]


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """The references so far, by family."""
    return {}


@pytest.fixture
def reference(
    request: pytest.FixtureRequest,
    references: dict[str, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    """A model of this family; made once for all tests."""
    found = references.get(request.param)
    if found is None:
        found = references[request.param] = make_reference(request.param, tmp_path_factory)
    return found


def make_reference(family: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The first model of this family that is never undecided between two tokens."""
    prompts = make_prompts()
    for seed in count(3):
        folder = tmp_path_factory.mktemp("windows")
        model = save_tiny(OUR_DECODER[family](), folder, seed)
        outputs = [output for prompt in prompts if (output := greedy(model, prompt))]
        if len(outputs) == len(prompts):
            return Reference(folder, model, prompts, outputs)
    raise AssertionError("no end")


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int]) -> list[int] | None:
    """The most probable tokens after a prompt; None if rounding could change one of them."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    first, second = torch.stack(result.scores).float().topk(2).values.unbind(-1)
    output: list[int] = result.sequences[0, len(prompt) :].tolist()
    return output if (first - second).min() > CLEAR_GAP else None


def check(llm: LLM, reference: Reference, indices: Sequence[int]) -> list[int]:
    """Serve some of the prompts; returns how many tokens of each were cached."""
    outputs = llm.generate([reference.prompts[i] for i in indices], GREEDY, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [reference.outputs[i] for i in indices]
    llm.engine.pool.check()
    (memory,) = llm.memory().models.values()
    assert memory.bytes_by_kind[Kind.KV] == 0
    return [out.num_cached_tokens or 0 for out in outputs]


@pytest.mark.parametrize(
    ("reference", "kv_cache", "steps"),
    covering(FAMILIES, KV_CACHES, [(7, 1), (256, 1), (16, 0)], strength=2),
    indirect=["reference"],
    ids=str,
)
def test_prefixes_are_found_again(
    reference: Reference, kv_cache: str, steps: tuple[int, int]
) -> None:
    """The same tokens after a prefix that was cached as without."""
    max_num_batched_tokens, num_ahead = steps
    with LLM(
        reference.folder,
        memory="16MiB",
        kv_cache=kv_cache,
        max_num_batched_tokens=max_num_batched_tokens,
        **OPTIONS,
    ) as llm:
        llm.engine.num_ahead = num_ahead
        (lane,) = llm.engine.lanes.values()
        assert lane.has_windows
        assert lane.prefixes is not None
        # A page of the virtual cache may have more tokens than these sequences.
        grain = max(lane.cache.footprint.block_tokens, WINDOW_TOKENS / 4)
        for index in range(len(reference.prompts)):
            (num_cached,) = check(llm, reference, [index])
            expected = {1: 80, 2: 13, 3: 40, 4: 42, 5: 80, 7: 63}.get(index, 0)
            assert expected - 2 * grain - 1 < num_cached <= expected
        again = check(llm, reference, range(len(reference.prompts)))
        assert grain > 40 or min(again[:6]) > 0
        check_idle(llm)


@pytest.mark.parametrize(
    ("reference", "kv_cache", "preemption_mode"),
    covering(["gemma2", "cohere2", "phi3"], KV_CACHES, ["swap", "recompute"], strength=2),
    indirect=["reference"],
)
def test_preempted_sequences_lose_nothing(
    monkeypatch: pytest.MonkeyPatch, reference: Reference, kv_cache: str, preemption_mode: Any
) -> None:
    """In a pool that holds the longest of them, all are admitted, whether or not they have room."""
    monkeypatch.setattr("aquifer.engine.headroom.Headroom.has_room", lambda *_: True)
    options = {
        **OPTIONS,
        "kv_cache": kv_cache,
        "max_num_batched_tokens": 12,
        "preemption_mode": preemption_mode,
    }
    longest = max(map(len, reference.prompts))
    with LLM(reference.folder, memory="16MiB", **options) as llm:
        (info,), (lane,) = llm.engine.models.values(), llm.engine.lanes.values()
        num_pages = lane.cache.footprint.most(longest, longest + OUTPUT_TOKENS)
    memory_bytes = info.weight_bytes + num_pages * 4096
    with LLM(reference.folder, memory=memory_bytes, **options) as llm:
        llm.engine.num_ahead = 1
        (lane,) = llm.engine.lanes.values()
        check(llm, reference, [8, 8, 2, 6, 0, 3, 8, 4, 1])
        assert lane.num_preemptions > 0
        assert (lane.num_swaps > 0) == (preemption_mode == "swap")
        check_idle(llm)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("reference", ["gemma3_text", "mistral"], indirect=True)
def test_beams_and_samples(reference: Reference, kv_cache: str) -> None:
    """Beams are Transformers', and samples without any randomness are all alike."""
    prompt = reference.prompts[0]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = reference.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=OUTPUT_TOKENS,
        )
    expected = [row[len(prompt) :] for row in found.tolist()]
    beams = BeamSearchParams(beam_width=3, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    samples = SamplingParams(n=3, temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with LLM(
        reference.folder, memory="16MiB", kv_cache=kv_cache, max_num_batched_tokens=24, **OPTIONS
    ) as llm:
        llm.engine.num_ahead = 1
        for _ in range(2):  # then with a prefix that is cached
            searched, sampled = llm.generate(
                [prompt, prompt], [beams.sampling_params(), samples], use_tqdm=False
            )
            assert [c.token_ids for c in searched.outputs] == expected
            assert [c.token_ids for c in sampled.outputs] == [reference.outputs[0]] * 3
        check_idle(llm)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("reference", ["gemma2"], indirect=True)
def test_a_pinned_prefix_stays_of_use(reference: Reference, kv_cache: str) -> None:
    """However much is evicted, the window before its end is there."""
    with LLM(reference.folder, memory="16MiB", kv_cache=kv_cache, **OPTIONS) as llm:
        (lane,) = llm.engine.lanes.values()
        assert lane.prefixes is not None
        llm.pin_prefix(reference.prompts[7])
        grain = lane.cache.footprint.block_tokens
        check(llm, reference, [8, 2])
        evictable_bytes = lane.prefixes.evictable_bytes
        assert lane.prefixes.evict(1 << 40, 1e9) == evictable_bytes > 0
        assert lane.prefixes.stats.held_bytes == lane.prefixes.stats.pinned_bytes or grain > 1
        (num_cached,) = check(llm, reference, [1])
        assert 64 - grain - 1 < num_cached <= 64
        llm.unpin_prefix(reference.prompts[7])
        assert lane.prefixes.pinned_bytes == 0


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("reference", ["gemma2", "mistral"], indirect=True)
def test_windows_that_are_computed_again_are_logged(reference: Reference, kv_cache: str) -> None:
    """Of all layers, or of some."""
    with LLM(reference.folder, memory="16MiB", kv_cache=kv_cache, **OPTIONS) as llm:
        (lane,) = llm.engine.lanes.values()
        assert lane.prefixes is not None
        check(llm, reference, [8])
        freed_bytes = lane.prefixes.evict(1 << 40, 1e9)
        (before,) = llm.engine.memory().eviction_totals.values()
        assert (before.num_bytes, before.paid_s) == (freed_bytes, 0.0)
        check(llm, reference, [8])
        report = llm.engine.memory()
        (entry,), (after,) = report.evictions, report.eviction_totals.values()
        assert 0 < entry.num_restored <= entry.num_items
        assert after.paid_s == entry.paid_s > 0


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("reference", ["gemma3_text"], indirect=True)
def test_a_request_needs_room_for_its_windows_alone(reference: Reference, kv_cache: str) -> None:
    """A pool that could not hold all KV of a prompt serves it, and knows that before."""
    options = {**OPTIONS, "kv_cache": kv_cache, "max_num_batched_tokens": 8}
    options["enable_prefix_caching"] = False
    with LLM(reference.folder, memory="16MiB", **options) as llm:
        (info,), (lane,) = llm.engine.models.values(), llm.engine.lanes.values()
        num_pages = lane.cache.footprint.most(81, 81 + OUTPUT_TOKENS)
        assert num_pages * 4096 < 0.6 * 81 * info.kv_bytes_per_token
    with LLM(reference.folder, memory=info.weight_bytes + num_pages * 4096, **options) as llm:
        check(llm, reference, [0])
        check_idle(llm)
