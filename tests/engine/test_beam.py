"""Beam search against Transformers' own: the same tokens, in the same order, with the same scores.

Transformers' models run every step from scratch here, and the log probabilities they see on the way
are kept by prefix. The search under test then gets the same numbers, so any difference is caused by
the search; if it looks at a prefix that Transformers did not, there is no number for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import covering

from aquifer.engine.beam import BeamSearch, EarlyStopping, Hypothesis

VOCAB_SIZE = 32
NUM_PROMPTS = 6
MAX_NEW_TOKENS = 7
WIDTHS = range(1, 7)
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY_STOPPING: tuple[EarlyStopping, ...] = (True, False, "never")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "intermediate_size": 24,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, num_key_value_heads=1),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
}

NextLogprobs = Callable[[tuple[int, ...]], torch.Tensor]
"""Maps all tokens so far to the log probabilities of the next one, [vocab_size]."""


def search(
    next_logprobs: NextLogprobs, prompt: list[int], num_returned: int, *, width: int, **options: Any
) -> list[Hypothesis]:
    """Beam search as an engine would drive it."""
    beams = BeamSearch(width=width, num_returned=num_returned, **options)
    outputs: list[list[int]] = [[]]
    while not beams.finished:
        logprobs = torch.stack([next_logprobs((*prompt, *output)) for output in outputs])
        best = logprobs.topk(min(beams.num_candidates, logprobs.shape[1]))
        chosen = beams.advance(best.indices.numpy(), best.values.numpy())
        outputs = [[*outputs[parent], token] for parent, token in chosen]
    assert beams.num_live == 0
    return beams.results()


class Recorded:
    """Log probabilities by prefix, from the calls of a model that keeps no cache.

    Some tokens are made more probable than the model would have them.
    """

    def __init__(self, model: Any, favoured: frozenset[int]) -> None:
        self.logprobs: dict[tuple[int, ...], torch.Tensor] = {}
        self._favoured = sorted(favoured)
        model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        output.logits[..., self._favoured] += 1.5
        rows = torch.nn.functional.log_softmax(output.logits[:, -1], dim=-1)
        for prefix, row in zip(kwargs["input_ids"].tolist(), rows, strict=True):
            self.logprobs.setdefault(tuple(prefix), row)


def tiny_model(config: Any, seed: int) -> Any:
    """A model with weights so large that some continuations are far more probable than others."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for tensor in model.parameters():
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=2.0 * tensor.shape[-1] ** -0.5)
    return model


@torch.inference_mode()
def generate(
    model: Any,
    prompts: torch.Tensor,
    num_returned: int,
    *,
    width: int,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> tuple[list[list[int]], list[float] | None]:
    """Transformers' outputs for all prompts, best first for each; and scores, if it has any."""
    beams_only: dict[str, Any] = {}
    if width > 1:
        beams_only = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    result = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        num_beams=width,
        num_return_sequences=num_returned,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos_ids) or None,
        pad_token_id=0,
        use_cache=False,
        output_scores=True,
        return_dict_in_generate=True,
        **beams_only,
    )
    outputs = result.sequences[:, prompts.shape[1] :].tolist()
    for output in outputs:
        # After the first of these there is only padding.
        ends = [i for i, token in enumerate(output) if token in eos_ids]
        del output[min(ends, default=len(output)) + 1 :]
    return outputs, result.sequences_scores.tolist() if width > 1 else None


@pytest.mark.parametrize("eos_ids", [frozenset(), frozenset({5}), frozenset({2, 7, 30})], ids=len)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_order_and_scores_are_those_of_transformers(
    architecture: str, eos_ids: frozenset[int]
) -> None:
    model = tiny_model(CONFIGS[architecture](), seed=len(eos_ids))
    recorded = Recorded(model, favoured=eos_ids)
    generator = torch.Generator().manual_seed(1)
    ended: Counter[str | None] = Counter()
    num_tokens: Counter[int] = Counter()
    for width, penalty, stopping in covering(WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING, strength=2):
        prompts = torch.randint(VOCAB_SIZE, (NUM_PROMPTS, 4), generator=generator)
        num_returned = int(torch.randint(1, width + 1, (), generator=generator))
        options: dict[str, Any] = {
            "width": width,
            "max_new_tokens": int(torch.randint(1, MAX_NEW_TOKENS + 1, (), generator=generator)),
            "eos_ids": eos_ids,
            "length_penalty": penalty,
            "early_stopping": stopping,
        }
        recorded.logprobs.clear()
        outputs, scores = generate(model, prompts, num_returned, **options)
        found = [
            hypothesis
            for prompt in prompts.tolist()
            for hypothesis in search(recorded.logprobs.__getitem__, prompt, num_returned, **options)
        ]
        assert [one.token_ids for one in found] == outputs, options
        if scores is not None:
            assert [one.score for one in found] == scores, options
        for one in found:
            assert one.finish_reason == ("stop" if one.token_ids[-1] in eos_ids else "length")
            ended[one.finish_reason] += 1
            num_tokens[len(one.token_ids)] += 1
    assert ended["length"] > 50
    assert not eos_ids or ended["stop"] > 50
    assert len(num_tokens) >= MAX_NEW_TOKENS - 1, "they end at all lengths, or nearly"


def random_model(seed: int, vocab_size: int) -> NextLogprobs:
    """Log probabilities that depend on all tokens alone."""

    def next_logprobs(prefix: tuple[int, ...]) -> torch.Tensor:
        rng = np.random.default_rng([seed, *prefix])
        logits = torch.from_numpy(rng.normal(scale=2, size=vocab_size).astype(np.float32))
        return torch.log_softmax(logits, dim=-1)

    return next_logprobs


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(2, 4),
    max_new_tokens=st.integers(1, 3),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
)
def test_a_search_as_wide_as_there_are_sequences_finds_the_best(
    seed: int, vocab_size: int, max_new_tokens: int, length_penalty: float
) -> None:
    model = random_model(seed, vocab_size)
    eos = 0
    by_score: list[tuple[float, list[int]]] = []

    def visit(tokens: tuple[int, ...], logprob: float) -> None:
        if tokens and (tokens[-1] == eos or len(tokens) == max_new_tokens):
            by_score.append((logprob / len(tokens) ** length_penalty, list(tokens)))
            return
        for token, more in enumerate(model(tokens).tolist()):
            visit((*tokens, token), logprob + more)

    visit((), 0.0)
    by_score.sort(reverse=True)
    found = search(
        model,
        [],
        len(by_score),
        width=vocab_size**max_new_tokens,
        max_new_tokens=max_new_tokens,
        eos_ids=frozenset({eos}),
        length_penalty=length_penalty,
        early_stopping="never",
    )
    assert [one.token_ids for one in found] == [tokens for _, tokens in by_score]
    assert [one.score for one in found] == pytest.approx([s for s, _ in by_score], rel=1e-5)


def make_search(**changes: Any) -> BeamSearch:
    options: dict[str, Any] = {
        "width": 2,
        "num_returned": 2,
        "max_new_tokens": 3,
        "eos_ids": frozenset({0}),
        "length_penalty": 1.0,
        "early_stopping": False,
    }
    return BeamSearch(**(options | changes))


def advance(beams: BeamSearch, *candidates: list[tuple[int, float]]) -> list[tuple[int, int]]:
    """A step, given (token id, log probability) of each live beam."""
    table = np.array(candidates)
    return beams.advance(table[..., 0].astype(np.int64), table[..., 1].astype(np.float32))


def test_equal_continuations_keep_the_order_they_came_in() -> None:
    beams = make_search(width=8, eos_ids=frozenset())
    tokens = [7, 3, 5, 9, 1, 8, 2, 4]
    equal = [(token, -1.0) for token in tokens]
    assert advance(beams, equal) == [(0, token) for token in tokens]
    assert advance(beams, *[equal] * 8) == [(0, token) for token in tokens]


def test_an_end_that_is_not_among_the_best_is_lost() -> None:
    beams = make_search()
    assert advance(beams, [(4, -1.0), (5, -2.0), (0, -3.0)]) == [(0, 4), (0, 5)]
    # The sums of (4, 6), (5, 6) and (4, 0) are -2, -3 and -3.5.
    more = [(6, -1.0), (0, -2.5), (8, -9.0)]
    assert advance(beams, more, more) == [(0, 6), (1, 6)]
    assert advance(beams, more, more) == []
    assert [one.token_ids for one in beams.results()] == [[4, 6, 6], [5, 6, 6]]


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "logprob", "goes_on"),
    [
        # The finished ones have scores of -1 and -2.
        (0.0, False, -0.5, False),
        (0.0, False, -0.25, True),
        (0.0, "never", -0.5, False),
        (0.0, "never", -0.25, True),
        (0.0, True, -0.25, False),
        # Both have a score of -1; the live one has -2 now, and -2 / 3 at the end.
        (1.0, False, -0.5, False),
        (1.0, "never", -0.5, True),
        # The scores are -1 and -4; the shortest is the best.
        (-1.0, "never", -0.75, False),
        (-1.0, "never", -0.25, True),
    ],
)
def test_it_goes_on_only_for_what_is_better(
    length_penalty: float, early_stopping: EarlyStopping, logprob: float, goes_on: bool
) -> None:
    beams = make_search(length_penalty=length_penalty, early_stopping=early_stopping)
    assert advance(beams, [(0, -1.0), (4, -1.5), (5, -3.0)]) == [(0, 4), (0, 5)]
    chosen = advance(beams, sorted([(0, -0.5), (6, logprob)], key=lambda c: -c[1]), [(0, -9.0)] * 2)
    assert (chosen != []) is goes_on
    assert beams.finished is not goes_on


def test_fewer_beams_where_the_vocabulary_has_no_more() -> None:
    beams = make_search(width=4, num_returned=4)
    assert advance(beams, [(0, -1.0), (1, -2.0), (2, -3.0)]) == [(0, 1), (0, 2)]
    more = [(0, -1.0), (1, -2.0), (2, -3.0)]
    assert len(advance(beams, more, more)) == 4
    assert advance(beams, *[more] * 4) == []
    assert len(beams.results()) == 4
    only_ends = make_search(eos_ids=frozenset({0, 1}))
    assert advance(only_ends, [(0, -1.0), (1, -2.0)]) == []
    assert [one.token_ids for one in only_ends.results()] == [[0], [1]]


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_scores_are_numbers_whatever_the_penalty(length_penalty: float) -> None:
    limit = 3000  # to the power of 100 is more than a float holds
    beams = make_search(max_new_tokens=limit, length_penalty=length_penalty, eos_ids=frozenset())
    for _ in range(limit):
        live = [[(4, -1e-5), (5, -2.0)]] * beams.num_live
        advance(beams, *live)
    assert beams.finished
    scores = [one.score for one in beams.results()]
    assert scores == sorted(scores, reverse=True)
    assert np.isfinite(scores).all()
    assert beams.results()[0].token_ids == [4] * limit
