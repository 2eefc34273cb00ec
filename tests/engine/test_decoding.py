"""Every decoding method through the whole engine, in both KV caches, preempted and not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.architectures import OUR_DECODER, VOCAB_SIZE, save_tiny
from tests.cases import covering

from aquifer.bench.soak import check_idle, soak
from aquifer.cache import KV_CACHES
from aquifer.engine.params import BeamSearchParams, Request, SamplingParams
from aquifer.errors import CapacityError, RequestError
from aquifer.llm import LLM

OUTPUT_TOKENS = 20
OPTIONS: dict[str, Any] = {"memory": "16MiB", "page_size": "4KiB", "block_size": 4, "seed": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Reference:
    """A model of Transformers, its checkpoint, and prompts."""

    folder: Path
    model: Any
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("llama")
    model = save_tiny(OUR_DECODER["llama"](), folder, 3)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 13, 40, 61)
    ]
    return Reference(folder, model, prompts)


@torch.inference_mode()
def search(reference: Reference, prompt: list[int], width: int, **options: Any) -> list[list[int]]:
    """The outputs of Transformers' beam search, best first."""
    ids = torch.tensor([prompt])
    result = reference.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=OUTPUT_TOKENS,
        pad_token_id=VOCAB_SIZE,  # not a token of the model
        **options,
    )
    return [
        [token for token in row if token != VOCAB_SIZE] for row in result[:, len(prompt) :].tolist()
    ]


def tight_memory(reference: Reference, num_tokens: int) -> int:
    """Bytes of a pool that holds `num_tokens` tokens of KV beside the weights."""
    with LLM(reference.folder, **OPTIONS) as llm:
        (info,) = llm.engine.models.values()
        return info.weight_bytes + num_tokens * info.kv_bytes_per_token + 4096


def model_name(llm: LLM) -> str:
    (name,) = llm.engine.models
    return name


# --- beams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(2, 1.0, False), (4, 0.0, True), (5, 2.0, "never")],
)
def test_beams_equal_transformers(
    reference: Reference, kv_cache: str, width: int, length_penalty: float, early_stopping: Any
) -> None:
    """Greedy requests in the same batch give the same tokens as alone."""
    eos = int(reference.model.generation_config.eos_token_id or 2)
    expected = [
        search(
            reference,
            prompt,
            width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos,
        )
        for prompt in reference.prompts
    ]
    beams = BeamSearchParams(
        beam_width=width,
        max_tokens=OUTPUT_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=True,
        stop_token_ids=[eos],
    ).sampling_params()
    with LLM(reference.folder, kv_cache=kv_cache, max_num_batched_tokens=48, **OPTIONS) as llm:
        alone = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        params = [beams, GREEDY] * len(reference.prompts)
        prompts = [prompt for prompt in reference.prompts for _ in range(2)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [[c.token_ids for c in out.outputs] for out in outputs[::2]]
        assert found == expected
        assert [o.outputs[0].token_ids for o in outputs[1::2]] == [
            o.outputs[0].token_ids for o in alone
        ]
        check_idle(llm)


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_preempted_groups_lose_nothing(
    reference: Reference, kv_cache: str, preemption_mode: Any
) -> None:
    """Beams and samples in a pool that holds the largest request and not much more."""
    options = {**OPTIONS, "kv_cache": kv_cache, "preemption_mode": preemption_mode}
    prompts = [reference.prompts[i] for i in (2, 1, 3, 0, 2)]
    beams = BeamSearchParams(beam_width=3, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    samples = SamplingParams(n=3, seed=5, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    params = [beams.sampling_params(), samples, GREEDY, samples, beams.sampling_params()]

    def run(memory: Any, expects_preemption: bool) -> list[list[list[int]]]:
        with LLM(reference.folder, **{**options, "memory": memory}) as llm:
            llm.engine.num_ahead = 1
            outputs = llm.generate(prompts, params, use_tqdm=False)
            (lane,) = llm.engine.lanes.values()
            assert (lane.num_preemptions > 0) == expects_preemption
            assert (lane.num_swaps > 0) == (expects_preemption and preemption_mode == "swap")
            check_idle(llm)
        return [[c.token_ids for c in out.outputs] for out in outputs]

    plenty = run("16MiB", expects_preemption=False)
    assert run(tight_memory(reference, 170), expects_preemption=True) == plenty


# --- samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_samples_share_the_prompt(reference: Reference, kv_cache: str) -> None:
    """The first completion equals that of a request with n=1, and the prompt is in memory once."""
    one, four = (
        SamplingParams(n=n, seed=7, max_tokens=OUTPUT_TOKENS, ignore_eos=True) for n in (1, 4)
    )
    prompt = reference.prompts[3]
    with LLM(reference.folder, kv_cache=kv_cache, **OPTIONS) as llm:
        (alone,) = llm.generate([prompt], one, use_tqdm=False)
        engine = llm.engine
        (lane,) = engine.lanes.values()
        engine.add(Request("four", model_name(llm), prompt, four, 0.0))
        tokens: dict[int, list[int]] = {}
        saved = []
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.index, []).extend(output.token_ids)
            stats = lane.cache.stats(lane.written_tokens)
            assert (
                stats.mapped_bytes + stats.shared_bytes == stats.written_bytes + stats.wasted_bytes
            )
            saved.append(stats.shared_bytes / stats.written_bytes if stats.written_bytes else 0)
        assert tokens[0] == alone.outputs[0].token_ids
        assert len({tuple(t) for t in tokens.values()}) == 4
        assert max(saved) > 0.5  # the prompt has 61 tokens, the outputs are short
        check_idle(llm)


def test_best_of_keeps_the_most_probable(reference: Reference) -> None:
    prompt = reference.prompts[1]
    every = SamplingParams(n=5, seed=3, max_tokens=6, logprobs=0, ignore_eos=True)
    best = SamplingParams(n=2, best_of=5, seed=3, max_tokens=6, ignore_eos=True)
    with LLM(reference.folder, **OPTIONS) as llm:
        (all_five,), (best_two,) = (
            llm.generate([prompt], params, use_tqdm=False) for params in (every, best)
        )
        ranked = sorted(all_five.outputs, key=lambda c: -(c.cumulative_logprob or 0))
        assert [c.token_ids for c in best_two.outputs] == [c.token_ids for c in ranked[:2]]


def test_a_sequence_that_forks_late_computes_its_prompt(reference: Reference) -> None:
    """The first sequence of a group is aborted while it computes the prompt that all wait for."""
    params = SamplingParams(n=3, seed=7, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompt = reference.prompts[3]
    with LLM(reference.folder, max_num_batched_tokens=16, **OPTIONS) as llm:
        engine = llm.engine
        expected = llm.generate([prompt], params, use_tqdm=False)[0].outputs
        (lane,) = engine.lanes.values()
        assert lane.prefixes is not None
        lane.prefixes.clear()
        engine.add(Request("r", model_name(llm), prompt, params, 0.0))
        engine.step()
        engine.abort("r", 0)
        tokens: dict[int, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.index, []).extend(output.token_ids)
        assert tokens == {c.index: c.token_ids for c in expected[1:]}
        check_idle(llm)


def test_more_sequences_than_slots_or_memory_are_refused(reference: Reference) -> None:
    options = {**OPTIONS, "memory": tight_memory(reference, 170)}
    with LLM(reference.folder, max_num_seqs=4, **options) as llm:
        with pytest.raises(RequestError, match="at most 4 sequences"):
            llm.generate([[1, 2]], SamplingParams(n=5), use_tqdm=False)
        with pytest.raises(CapacityError, match="4 times except for the prompt"):
            llm.generate([[1, 2]], SamplingParams(n=4, max_tokens=60), use_tqdm=False)
        # Without a limit of its own, a request gets as many tokens as there is room for.
        (output,) = llm.generate(
            [[1, 2]], SamplingParams(n=4, max_tokens=None, ignore_eos=True), use_tqdm=False
        )
        assert all(10 < len(c.token_ids) < 60 for c in output.outputs)


# --- retained prefixes -------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_cached_prefixes_change_no_token(reference: Reference, kv_cache: str) -> None:
    """Turns of a conversation: each prompt is the last one, its output and something new."""
    generator = Random(0)
    with (
        LLM(reference.folder, kv_cache=kv_cache, **OPTIONS) as cached,
        LLM(
            reference.folder, kv_cache=kv_cache, enable_prefix_caching=False, **OPTIONS
        ) as uncached,
    ):
        for prompt in reference.prompts[1:]:
            known = 0
            for _ in range(3):
                (expected,) = uncached.generate([prompt], GREEDY, use_tqdm=False)
                (output,) = cached.generate([prompt], GREEDY, use_tqdm=False)
                assert output.outputs[0].token_ids == expected.outputs[0].token_ids
                assert expected.num_cached_tokens == 0
                # All that was computed before, except that the last block may match in part.
                assert known - 16 <= output.num_cached_tokens <= known
                prompt = [*prompt, *output.outputs[0].token_ids]
                known = len(prompt) - 1
                prompt += [generator.randrange(VOCAB_SIZE) for _ in range(3)]
        stats = cached.engine.stats()
        (hits,) = stats.num_prefix_hit_tokens.values()
        (queries,) = stats.num_prefix_queried_tokens.values()
        assert 0 < hits < queries
        check_idle(cached)


def test_salts_keep_prefixes_apart(reference: Reference) -> None:
    prompt = reference.prompts[3]
    with LLM(reference.folder, **OPTIONS) as llm:

        def cached_tokens(salt: str | None) -> int:
            (output,) = llm.generate(
                [{"prompt_token_ids": prompt, "cache_salt": salt}], GREEDY, use_tqdm=False
            )
            return output.num_cached_tokens

        assert [cached_tokens(salt) > 0 for salt in (None, "a", "b", "a", None)] == [
            False,
            False,
            False,
            True,
            True,
        ]


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_pinned_prefixes_survive_a_crowd(reference: Reference, kv_cache: str) -> None:
    options = {**OPTIONS, "kv_cache": kv_cache, "memory": tight_memory(reference, 230)}
    system, generator = reference.prompts[3], Random(1)
    crowd = [[generator.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(8)]
    with LLM(reference.folder, **options) as llm:
        num_pinned = llm.pin_prefix({"prompt_token_ids": system})
        assert 0 < num_pinned <= len(system)
        llm.generate(crowd, GREEDY, use_tqdm=False)
        prompt = [*system, 1, 2]
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= num_pinned - 1
        llm.unpin_prefix({"prompt_token_ids": system})
        llm.generate(crowd, GREEDY, use_tqdm=False)
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens < num_pinned - 1
        check_idle(llm)


def test_what_cannot_be_pinned(reference: Reference) -> None:
    with LLM(reference.folder, **{**OPTIONS, "memory": tight_memory(reference, 100)}) as llm:
        with pytest.raises(RequestError, match="the prefix has 1 tokens"):
            llm.pin_prefix({"prompt_token_ids": [1]})
        with pytest.raises(CapacityError, match="more than half"):
            llm.pin_prefix({"prompt_token_ids": reference.prompts[3]})
        llm.generate([reference.prompts[2]], GREEDY, use_tqdm=False)
    with (
        LLM(reference.folder, enable_prefix_caching=False, **OPTIONS) as llm,
        pytest.raises(RequestError, match="--no-enable-prefix-caching"),
    ):
        llm.pin_prefix({"prompt_token_ids": reference.prompts[3]})


# --- all together ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_cache", "preemption_mode"), covering(KV_CACHES, ("swap", "recompute"), strength=1)
)
def test_a_crowd_of_all_kinds(reference: Reference, kv_cache: str, preemption_mode: Any) -> None:
    """Every request is answered or refused and all pages come back; `soak` checks that."""
    options = {**OPTIONS, "memory": tight_memory(reference, 200), "kv_cache": kv_cache}
    options |= {"max_num_seqs": 12, "max_num_batched_tokens": 64}
    with LLM(reference.folder, preemption_mode=preemption_mode, **options) as llm:
        llm.engine.num_ahead = 1
        result = soak(llm, num_requests=60, max_tokens=60, seed=4)
    assert result.num_answered > 30
    assert result.num_left > 0
    assert result.refused.get("CapacityError", 0) > 0
    assert result.num_preemptions > 0
    assert (result.num_swaps > 0) == (preemption_mode == "swap")
    assert result.num_cached_tokens > 0
