"""The sampler against references in NumPy and Transformers, and parameters end to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.checkpoints import (
    EOS_TOKEN_ID,
    llama_config,
    llama_weights,
    save_checkpoint,
    tiny_llama,
)
from tests.kernels.sampling_batches import check_distribution, expected_probabilities

from aquifer.cache import KV_CACHES
from aquifer.engine.outputs import RequestOutput
from aquifer.engine.params import BeamSearchParams, SamplingParams
from aquifer.engine.sampler import Sampler, SamplingMode
from aquifer.engine.slots import STOP_IDS_PER_SLOT
from aquifer.engine.step_input import SlotAssignment
from aquifer.errors import RequestError
from aquifer.llm import LLM
from aquifer.memory.transfer import Uploads

# --- which tokens can be drawn, and how often ----------------------------------------------


def assign(rows: Sequence[dict[str, Any]]) -> tuple[list[SlotAssignment], Any]:
    """Sequences in slots, each given by `params` and maybe `prompt`, `output`, `seed`, `stops`.

    Returns: the assignments that a runner gets, and their slots.
    """
    assigned = []
    for i, row in enumerate(rows):
        prompt = row.get("prompt", [0])
        params = row["params"]
        assigned.append(
            SlotAssignment(
                slot=i + 1,
                seed=row.get("seed", i),
                num_prompt_tokens=len(prompt),
                least_context_tokens=len(prompt),
                min_total_tokens=len(prompt) + params.min_tokens,
                stop_ids=frozenset(row.get("stops", ())),
                params=params,
                num_logprobs=None,
                num_prompt_logprobs=None,
                token_ids=np.array([*prompt, *row.get("output", [])], np.int32),
            )
        )
    return assigned, np.arange(1, len(rows) + 1)


def take(sampler: Sampler, assigned: list[SlotAssignment]) -> None:
    """Have a sampler take the parameters of sequences."""
    uploads = Uploads(torch.device("cpu"))
    sampler.assign(assigned, uploads)
    uploads.send()


def make_sampler(
    assigned: list[SlotAssignment], vocab_size: int, num_more: int = 0
) -> tuple[Sampler, Any]:
    """A sampler, and the number of tokens of each sequence, `num_more` positions on."""
    sampler = Sampler(len(assigned), vocab_size, torch.device("cpu"))
    take(sampler, assigned)
    return sampler, np.array([len(one.token_ids) + num_more for one in assigned])


def sample(
    logits: torch.Tensor, assigned: list[SlotAssignment], slots: Any, num_more: int = 0
) -> Any:
    """The token of each row, `num_more` positions on."""
    sampler, known = make_sampler(assigned, logits.shape[1], num_more)
    logits = sampler.changed_logits(logits, slots, known)
    out = torch.full((len(slots),), -1)
    rows = torch.from_numpy(slots), torch.from_numpy(known)
    sampler.sample(logits, *rows, out, SamplingMode.FULL)
    return out.numpy()


SHAPES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=10_000),
    SamplingParams(top_k=-1, top_p=0.999),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
]
FLAT_SHAPES = [
    SamplingParams(temperature=4.0, top_p=0.97),  # more tokens than are sorted at first
    SamplingParams(temperature=4.0, top_k=1500, top_p=0.9),
    SamplingParams(temperature=4.0, top_k=20),
    SamplingParams(temperature=4.0, min_p=0.1),
]


@pytest.mark.parametrize(("vocab_size", "shapes"), [(40, SHAPES), (3000, FLAT_SHAPES)])
def test_draws_follow_the_cut_softmax(vocab_size: int, shapes: list[SamplingParams]) -> None:
    """All shapes are in one batch, so that mixed-up parameters of rows would show."""
    draws = 500
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, (len(shapes), vocab_size)).astype(np.float32)
    which = generator.permutation(np.repeat(np.arange(len(shapes)), draws))
    assigned, slots = assign([{"params": shapes[i]} for i in which])
    counts = np.zeros((len(shapes), vocab_size), np.int64)
    for position in range(8):
        tokens = sample(torch.from_numpy(logits[which]), assigned, slots, position)
        np.add.at(counts, (which, tokens), 1)
    for shape, row, seen in zip(shapes, logits, counts, strict=True):
        check_distribution(seen, expected_probabilities(row.astype(np.float64), shape))


def test_ties_do_not_widen_top_k() -> None:
    assigned, slots = assign([{"params": SamplingParams(top_k=3)}] * 200)
    assert len(set(sample(torch.zeros(200, 30), assigned, slots).tolist())) == 3


def test_low_temperature_is_greedy() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assigned, slots = assign([{"params": SamplingParams(temperature=t)} for t in (0, 1e-9)])
    expected = logits.argmax(-1).tolist()
    assert sample(logits, assigned, slots).tolist() == expected


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits = torch.randn(len(SHAPES), 50, generator=torch.Generator().manual_seed(0))
    rows = [{"params": shape, "seed": 77} for shape in SHAPES]
    together = sample(logits.clone(), *assign(rows)).tolist()
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1].clone(), *assign([row])).tolist() == [together[i]]


# --- what changes logits -------------------------------------------------------------------


def changed_logits(logits: torch.Tensor, **row: Any) -> torch.Tensor:
    """The logits, [vocab], that a greedy request chooses from."""
    assigned, slots = assign([row])
    before = logits.clone()
    sampler, known = make_sampler(assigned, len(logits))
    changed = sampler.changed_logits(logits[None], slots, known)[0]
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
    assert sample(logits[None], assigned, slots).tolist() == [int(changed.argmax())]
    return changed


LOGITS = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 3
PROMPT, OUTPUT = [4, 5, 4, 6], [7, 8, 7, 7, 5]


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **params)


def check_penalties(
    penalised: Callable[[torch.Tensor], torch.Tensor], params: SamplingParams
) -> None:
    """Each token in turn is the best by a small margin, so that a penalty on it shows."""
    num_changed = 0
    for token in range(len(LOGITS)):
        for lead in (-0.5, 0.1, 0.5, 1.0, 1.6, 3.0):
            for base in (LOGITS, -LOGITS.abs() - 1):  # the best score positive, and negative
                logits = base.clone()
                logits[token] = base.max() + lead
                expected = int(penalised(logits).argmax())
                row = {"params": params, "prompt": PROMPT, "output": OUTPUT}
                assert sample(logits[None].clone(), *assign([row])).tolist() == [expected]
                num_changed += expected != int(logits.argmax())
    assert num_changed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=1e-46),
        SamplingParams(top_p=5e-324, top_k=3),
        greedy(repetition_penalty=1e-46),
        SamplingParams(repetition_penalty=1e-39, temperature=1e-3),
    ],
)
def test_numbers_too_small_for_the_columns(params: SamplingParams) -> None:
    """They mean what the smallest ones mean that a column can have: the most probable token."""
    logits = LOGITS.abs() + 1.0
    assigned, slots = assign([{"params": params, "prompt": list(range(len(logits))), "seed": 1}])
    assert sample(logits[None], assigned, slots) == [int(logits.argmax())]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty(penalty: float) -> None:
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)

    def penalised(logits: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = processor(torch.tensor([PROMPT + OUTPUT]), logits[None].clone())
        return changed[0]

    check_penalties(penalised, greedy(repetition_penalty=penalty))


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-1.0, 0.3)])
def test_presence_and_frequency_penalties(presence: float, frequency: float) -> None:
    def penalised(logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for token in set(OUTPUT):  # the prompt does not count
            changed[token] -= presence + frequency * OUTPUT.count(token)
        return changed

    params = greedy(presence_penalty=presence, frequency_penalty=frequency)
    check_penalties(penalised, params)


def test_logit_bias() -> None:
    expected = LOGITS.clone()
    expected[3] += 100
    expected[9] -= 2.5
    params = greedy(logit_bias={3: 100.0, 9: -2.5})
    torch.testing.assert_close(changed_logits(LOGITS, params=params), expected)


def test_allowed_token_ids() -> None:
    params = greedy(allowed_token_ids=[2, 11, 2], logit_bias={11: 1.0, 20: 100.0})
    actual = changed_logits(LOGITS, params=params)
    assert actual.isfinite().nonzero().flatten().tolist() == [2, 11]
    torch.testing.assert_close(actual[[2, 11]], LOGITS[[2, 11]] + torch.tensor([0.0, 1.0]))


def test_min_tokens_forbids_all_that_would_stop() -> None:
    stops = list(range(20))  # more than a slot has room for
    for num_output, forbidden in ((0, True), (2, True), (3, False)):
        params = greedy(min_tokens=3)
        actual = changed_logits(LOGITS, params=params, output=[25] * num_output, stops=stops)
        assert (actual[:20] == -torch.inf).all() == forbidden
        torch.testing.assert_close(actual[20:], LOGITS[20:])


def test_min_tokens_yields_where_only_stops_are_allowed() -> None:
    params = greedy(min_tokens=3, allowed_token_ids=[1, 2])
    actual = changed_logits(LOGITS, params=params, stops=[1, 2])
    assert actual.isfinite().nonzero().flatten().tolist() == [1, 2]


def test_each_row_changes_as_if_alone() -> None:
    rows: list[dict[str, Any]] = [
        {"params": greedy()},
        {"params": greedy(logit_bias={3: 1.5, 9: -2.5}, min_tokens=2), "stops": [3, 4]},
        {"params": greedy(allowed_token_ids=[1, 2], min_tokens=2), "stops": [1, 2]},
        {"params": greedy(allowed_token_ids=[1, 2, 5], logit_bias={5: -1.0}), "stops": [1]},
        {"params": greedy(allowed_token_ids=[7, 2], min_tokens=2), "stops": [7]},
        {"params": greedy(min_tokens=2), "stops": list(range(len(LOGITS)))},
        {"params": greedy(min_tokens=2), "stops": []},
        {"params": greedy(logit_bias={0: 2.0}), "output": [1]},
        {"params": greedy(min_tokens=1), "output": [1], "stops": [2]},
    ]
    logits = torch.randn(len(rows), len(LOGITS), generator=torch.Generator().manual_seed(4))
    assigned, slots = assign(rows)
    sampler, known = make_sampler(assigned, len(LOGITS))
    together = sampler.changed_logits(logits, slots, known)
    alone = [changed_logits(line, **row) for line, row in zip(logits, rows, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=0)
    changed = (together != logits).any(1).tolist()
    assert changed == [False, True, True, True, True, False, False, True, False]


def test_rows_of_counts_are_shared_out() -> None:
    """Each sequence with penalties has one of its own, also after slots have changed hands."""
    random = np.random.default_rng(0)
    num_slots, vocab_size = 12, 20
    sampler = Sampler(num_slots, vocab_size, torch.device("cpu"))
    expected: dict[int, Any] = {}  # counts of the slots with penalties
    most_needed = 0
    for _ in range(200):
        slots = random.choice(num_slots, random.integers(1, 4), replace=False) + 1
        rows = [
            {
                "params": greedy(presence_penalty=float(random.random() < 0.4)),
                "prompt": [0],
                "output": random.integers(1, vocab_size, 5).tolist(),
            }
            for _ in slots
        ]
        assigned, _ = assign(rows)
        assigned = [replace(a, slot=slot) for a, slot in zip(assigned, slots.tolist(), strict=True)]
        take(sampler, assigned)
        for one, row in zip(assigned, rows, strict=True):
            expected.pop(one.slot, None)
            if one.params.has_penalties:
                expected[one.slot] = np.bincount(row["output"], minlength=vocab_size)
        most_needed = max(most_needed, len(expected))
        columns = sampler.columns
        counts_rows = columns.counts_row.tolist()
        assert {slot for slot in range(1, num_slots + 1) if counts_rows[slot] >= 0} == set(expected)
        for slot, counts in expected.items():
            assert columns.counts[counts_rows[slot], 1:].tolist() == counts[1:].tolist()
    assert 2 <= most_needed <= len(sampler.columns.counts) <= 2 * most_needed


# --- end to end ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("sampling") / "llama")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, memory="16MiB", max_num_batched_tokens=16) as llm:
        yield llm


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(6, 320, length).tolist() for length in lengths]


def complete(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_logprobs_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = random_prompts(1, 9, 40)
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=12, logprobs=n, prompt_logprobs=m)
        for t, n, m in ((0.0, 0, 3), (1.0, 5, 0), (2.0, 20, 20))
    ]
    for out, wanted in zip(complete(llm, prompts, params), params, strict=True):
        (completion,) = out.outputs
        ids = [*out.prompt_token_ids, *completion.token_ids]
        with torch.no_grad():
            reference = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        assert out.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert out.prompt_logprobs[0] is None
        entries = [*out.prompt_logprobs[1:], *completion.logprobs]
        assert len(entries) == len(ids) - 1
        for position, entry in enumerate(entries):
            row, chosen = reference[position], ids[position + 1]
            in_prompt = position + 1 < len(out.prompt_token_ids)
            count = wanted.prompt_logprobs if in_prompt else wanted.logprobs
            assert count is not None
            assert entry is not None
            assert entry.keys() == {chosen, *row.topk(count).indices.tolist()}
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-4)
                assert logprob.rank == int((row > row[token]).sum()) + 1
        assert completion.cumulative_logprob == pytest.approx(
            sum(completion.logprobs[i][t].logprob for i, t in enumerate(completion.token_ids))
        )


def test_penalties_end_to_end(llm: LLM, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    (prompt,) = random_prompts(9)
    expected = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=30,
        repetition_penalty=1.4,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :]
    params = greedy(max_tokens=30, repetition_penalty=1.4, ignore_eos=True)
    (out,) = complete(llm, prompt, params)
    assert out.outputs[0].token_ids == expected.tolist()
    (plain,) = complete(llm, prompt, greedy(max_tokens=30, ignore_eos=True))
    assert plain.outputs[0].token_ids != expected.tolist()


def test_more_logprobs_than_tokens(tmp_path: Path) -> None:
    config = llama_config(vocab_size=12)
    path = save_checkpoint(tmp_path / "few", config, llama_weights(config, 0))
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=20, prompt_logprobs=15)
    with LLM(path, memory="4MiB") as llm:
        (out,) = complete(llm, [[1, 2, 3]], params)
    assert out.prompt_logprobs is not None
    assert out.outputs[0].logprobs is not None
    for entry in (*out.prompt_logprobs[1:], *out.outputs[0].logprobs):
        assert entry is not None
        assert sorted(entry) == list(range(12))
        by_logprob = sorted(entry.values(), key=lambda one: -one.logprob)
        assert [one.rank for one in by_logprob] == list(range(1, 13))


def greedy_tokens(llm: LLM, prompt: list[int]) -> list[int]:
    (out,) = complete(llm, prompt, greedy(max_tokens=12, ignore_eos=True))
    return out.outputs[0].token_ids


@pytest.mark.parametrize("num_stops", [1, STOP_IDS_PER_SLOT, STOP_IDS_PER_SLOT + 8])
def test_stop_token_ids(llm: LLM, num_stops: int) -> None:
    (prompt,) = random_prompts(9)
    tokens = greedy_tokens(llm, prompt)
    stop = tokens[5]
    # Ids smaller than the one that counts, because the slot has room for the smallest only.
    others = [i for i in range(stop) if i not in tokens][: num_stops - 1]
    assert len(others) == num_stops - 1
    (out,) = complete(llm, prompt, greedy(max_tokens=12, stop_token_ids=[stop, *others]))
    (completion,) = out.outputs
    assert completion.token_ids == tokens[: tokens.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    params = greedy(max_tokens=12, min_tokens=10, stop_token_ids=[stop, *others])
    (out,) = complete(llm, prompt, params)
    assert stop not in out.outputs[0].token_ids[:10]
    assert len(out.outputs[0].token_ids) > 10 or out.outputs[0].finish_reason == "length"


def test_max_tokens_and_allowed_token_ids(llm: LLM) -> None:
    (prompt,) = random_prompts(9)
    params = SamplingParams(allowed_token_ids=[7, 8, 9], seed=0, max_tokens=40)
    (completion,) = complete(llm, prompt, params)[0].outputs
    assert set(completion.token_ids) == {7, 8, 9}
    assert (len(completion.token_ids), completion.finish_reason) == (40, "length")


def test_end_of_sequence_token(checkpoint: Path, tmp_path: Path) -> None:
    (prompt,) = random_prompts(9)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with LLM(checkpoint, memory="8MiB") as llm:
        tokens = greedy_tokens(llm, prompt)
    eos = next(token for token in tokens if token != tokens[0])
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [EOS_TOKEN_ID, eos]}))
    with LLM(folder, memory="8MiB") as llm:
        (out,) = complete(llm, prompt, greedy(max_tokens=12))
        assert out.outputs[0].token_ids == tokens[: tokens.index(eos) + 1]
        assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)
        assert greedy_tokens(llm, prompt) == tokens
        (out,) = complete(llm, prompt, greedy(max_tokens=12, min_tokens=12))
        assert not {EOS_TOKEN_ID, eos} & set(out.outputs[0].token_ids)
        assert len(out.outputs[0].token_ids) == 12


def test_a_seed_gives_the_same_tokens_in_any_company(checkpoint: Path) -> None:
    prompts = random_prompts(20, 5, 30, 12, 1)
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(seed=123, top_p=0.95, presence_penalty=0.5, logprobs=1, **common),
        SamplingParams(seed=-5, top_k=40, temperature=1.3, prompt_logprobs=1, **common),
        *[SamplingParams(seed=s, **common) for s in (2**64 - 1, 0, 123)],
    ]
    results = []
    for kv_cache in KV_CACHES:
        options: dict[str, Any] = {"kv_cache": kv_cache, "page_size": "4KiB"}
        with LLM(checkpoint, memory="16MiB", **options) as llm:
            (info,) = llm.engine.models.values()
            results.append([complete(llm, [p], q)[0] for p, q in zip(prompts, params, strict=True)])
            results.append(complete(llm, prompts, params))
        memory_bytes = info.weight_bytes + 72 * info.kv_bytes_per_token
        with LLM(checkpoint, memory=memory_bytes, max_num_batched_tokens=9, **options) as llm:
            results.append(complete(llm, prompts, params))
            assert sum(llm.engine.stats().num_preemptions.values()) > 0
    for result in results[1:]:
        for ours, first in zip(result, results[0], strict=True):
            assert ours.outputs[0].token_ids == first.outputs[0].token_ids
            assert (ours.prompt_logprobs is None) == (first.prompt_logprobs is None)
            for entry, other in zip(
                ours.prompt_logprobs or (), first.prompt_logprobs or (), strict=True
            ):
                assert (entry and entry.keys()) == (other and other.keys())
    assert results[0][0].outputs[0].token_ids != results[0][4].outputs[0].token_ids


def test_the_engines_seed_stands_in_for_a_missing_one(checkpoint: Path) -> None:
    prompts = random_prompts(8, 8)
    runs = []
    for seed in (-1, -1, 2):
        with LLM(checkpoint, memory="8MiB", seed=seed) as llm:
            outs = complete(llm, [prompts[0]] * 2, SamplingParams(max_tokens=16, ignore_eos=True))
            runs.append([out.outputs[0].token_ids for out in outs])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


# --- validation ----------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("n", value) for value in (0, 129, -1)],
        ("best_of", 0),
        *[("length_penalty", value) for value in (-101, NAN)],
        ("early_stopping", "soon"),
        *[("temperature", value) for value in (-0.1, NAN, INF)],
        *[("top_p", value) for value in (0, -0.5, 1.01, NAN)],
        ("top_k", -2),
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("repetition_penalty", value) for value in (0, -1, INF, NAN)],
        *[("seed", value) for value in (2**64, -(2**63) - 1)],
        *[("max_tokens", value) for value in (0, -1)],
        *[("min_tokens", value) for value in (-1, 17)],  # 16 is max_tokens' default
        *[("logprobs", value) for value in (-1, 21)],
        *[("prompt_logprobs", value) for value in (-1, 21)],
        *[("stop", value) for value in ("", ["a", ""])],
        *[("logit_bias", value) for value in ({3: NAN}, {3: 100.5}, {3: -INF})],
        ("allowed_token_ids", []),
    ],
)
def test_impossible_parameters_are_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


@pytest.mark.parametrize("width", [0, 129])
def test_impossible_beam_widths_are_refused_by_name(width: int) -> None:
    with pytest.raises(RequestError, match="beam_width") as caught:
        BeamSearchParams(beam_width=width, max_tokens=1).sampling_params()
    assert caught.value.param == "beam_width"


def test_edges_of_what_is_possible() -> None:
    SamplingParams(
        temperature=0,
        top_p=1e-9,
        top_k=-1,
        min_p=1,
        seed=2**64 - 1,
        stop=["a"],
        max_tokens=1,
        min_tokens=1,
        logprobs=0,
        prompt_logprobs=20,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=0.01,
        logit_bias={},
        allowed_token_ids=[0],
    )
    SamplingParams(max_tokens=None, min_tokens=5, logit_bias={0: -100, 1: 100})


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [320]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {320: 1.0}},
        {"allowed_token_ids": [5, 1000]},
    ],
)
def test_tokens_outside_of_the_vocabulary_are_refused(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="outside of the vocabulary"):
        complete(llm, [[7, 8]], SamplingParams(**params))
    assert not llm.engine.has_work
