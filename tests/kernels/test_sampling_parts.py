"""Sampling from parts of the logits gives the tokens of whole rows, on every rank."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.sampling_batches import GREEDY, Batch, Params, random_logits

from aquifer.kernels.sampling.columns import SamplingColumns
from aquifer.kernels.sampling.parts import (
    VocabularyPart,
    choose,
    choose_reference,
    summarise,
    summarise_reference,
)

KINDS = [GREEDY, Params(), Params(temperature=0.4), Params(temperature=3.0)]


def choose_in_parts(
    logits: torch.Tensor,
    size: int,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    columns: SamplingColumns,
    *,
    is_greedy: bool,
    by_reference: bool,
) -> list[list[int]]:
    """What each rank, one after the other, knows in the end: a token for each row."""
    batch, vocab_size = logits.shape
    num_columns = -(-vocab_size // size)
    padded = torch.nn.functional.pad(logits, (0, size * num_columns - vocab_size), value=99.0)
    parts = [VocabularyPart(rank, size, num_columns, vocab_size) for rank in range(size)]
    own = padded.split(num_columns, 1)  # rows lie apart
    total = parts[0].table(batch, logits.device, is_greedy=is_greedy)
    for part, scores in zip(parts, own, strict=True):
        table = torch.zeros_like(total)
        write = summarise_reference if by_reference else summarise
        write(scores, part, slots, columns, table)
        total += table
    dtype = torch.int64 if is_greedy else torch.float32
    found = []
    for part, scores in zip(parts, own, strict=True):
        out = torch.full((batch,), -7, dtype=dtype, device=logits.device)
        pick = choose_reference if by_reference else choose
        pick(scores, part, total, slots, num_tokens, columns, out)
        assert (out[slots < 0] == -7).all()
        found.append(out)
    if not is_greedy:  # what all have written adds up to the token
        tokens = torch.stack(found).sum(0)
        assert all(((out == 0) | (tokens == out))[slots >= 0].all() for out in found)
        return [[int(token) for token in tokens[slots >= 0].tolist()]] * size
    return [out[slots >= 0].tolist() for out in found]


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab_size", "size"), [(41, 2), (41, 4), (9001, 2), (12_290, 3)])
def test_tokens_are_those_of_whole_rows(
    device: torch.device,
    vocab_size: int,
    size: int,
    dtype: torch.dtype,
    is_greedy: bool,
    by_reference: bool,
) -> None:
    """Where the last rank has padding, several chunks or one; in bfloat16 many tokens are equal."""
    kinds = [GREEDY] * 4 if is_greedy else KINDS * 3
    batch = Batch(kinds, vocab_size, device)
    logits = random_logits(device, len(kinds), vocab_size).to(dtype)
    logits[1] = logits[1, 0]  # all equal
    logits[2, : vocab_size // 2] = -torch.inf  # a rank has no token that may be chosen
    expected = batch.expect(logits)
    found = choose_in_parts(
        logits, size, batch.slots, batch.num_tokens, batch.columns,
        is_greedy=is_greedy, by_reference=by_reference,
    )  # fmt: skip
    assert found == [expected] * size


def test_padding_is_left_alone(device: torch.device) -> None:
    batch = Batch(KINDS, 700, device)
    logits = random_logits(device, len(KINDS), 700)
    expected = batch.expect(logits)
    slots = batch.slots.clone()
    slots[1] = -1
    found = choose_in_parts(
        logits, 2, slots, batch.num_tokens, batch.columns, is_greedy=False, by_reference=False
    )
    assert found == [[expected[0], *expected[2:]]] * 2


@pytest.mark.filterwarnings("ignore:.*(NaN|invalid value).*:RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("is_greedy", [False, True])
def test_rows_that_are_no_numbers_give_some_token(device: torch.device, is_greedy: bool) -> None:
    kinds = [GREEDY] * 2 if is_greedy else [GREEDY, Params()]
    batch = Batch(kinds, 5000, device)
    for value in (torch.nan, -torch.inf, torch.inf):
        logits = torch.full((2, 5000), value, device=device)
        tokens = choose_in_parts(
            logits, 2, batch.slots, batch.num_tokens, batch.columns,
            is_greedy=is_greedy, by_reference=False,
        )  # fmt: skip
        assert all(0 <= token < 5000 for row in tokens for token in row)
