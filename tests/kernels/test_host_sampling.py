"""Sampling on the CPU, and the columns: against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.sampling_batches import (
    CUT,
    GREEDY,
    PENALISED,
    PLAIN,
    Batch,
    Params,
    check_padding,
)

from aquifer.kernels.sampling.columns import SamplingColumns
from aquifer.kernels.sampling.sample import sample

HOST = torch.device("cpu")
FLAT = [  # more tokens than are sorted at first
    Params(temperature=4.0, top_p=0.97),
    Params(temperature=4.0, top_k=1500),
    Params(temperature=4.0, top_k=1500, top_p=0.9),
    Params(temperature=4.0, top_p=0.99, min_p=0.1),
    Params(temperature=4.0, min_p=0.1),
]


def random_logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 40, 700, 5000])
def test_tokens_are_those_of_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    """More rows than go at once, all kinds mixed; in bfloat16 many tokens are equal."""
    params = [*PLAIN, *CUT, *PENALISED, *FLAT] * 4
    batch = Batch(params, vocab_size, HOST)
    logits = random_logits(len(params), vocab_size).to(dtype)
    for _ in range(3):
        batch.check(logits)
        batch.num_tokens += 1
        batch.draw(logits)


@pytest.mark.parametrize("params", [[GREEDY], [Params()], [CUT[3]]], ids=str)
def test_batches_of_one_kind(params: list[Params]) -> None:
    Batch(params * 40, 300, HOST).check(random_logits(40, 300))


def test_equal_tokens_are_cut_in_the_order_of_ids() -> None:
    batch = Batch([Params(top_k=3), Params(top_k=1100), Params(top_p=0.8)] * 8, 2000, HOST)
    logits = torch.zeros(24, 2000)
    logits[:, 1000:] = 0.5
    batch.check(logits)
    assert max(batch.expect(logits)[::3]) < 1003


def test_padding_is_left_alone_and_rows_may_lie_apart() -> None:
    check_padding([*PENALISED, *PLAIN, *CUT], HOST)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_impossible_logits_give_some_token(value: float) -> None:
    params = [*PLAIN, *CUT, *FLAT]
    logits = torch.full((len(params), 2000), value)
    assert all(0 <= token < 2000 for token in Batch(params, 2000, HOST).draw(logits))


def test_no_rows_at_all() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    sample(torch.zeros(0, 30), none, none, SamplingColumns.empty(1, 0, 30, HOST), none)


def test_columns_are_written_many_slots_at_once() -> None:
    columns = SamplingColumns.empty(4, 2, 10, HOST)
    assert columns.temperature.tolist() == [0] * 4
    assert columns.top_p.tolist() == columns.repetition.tolist() == [1] * 4
    assert columns.counts_row.tolist() == [-1] * 4
    floats = torch.arange(12.0).reshape(6, 2)
    ints = torch.tensor([[5, 6], [-1, 2**62], [-1, 0]])
    columns.write(torch.tensor([3, 1]), floats, ints)
    named = [columns.temperature, columns.top_p, columns.min_p]
    named += [columns.repetition, columns.presence, columns.frequency]
    for column, values in zip(named, floats, strict=True):
        assert column.is_contiguous()
        assert column[[3, 1]].tolist() == values.tolist()
    for column, values in zip((columns.top_k, columns.seed, columns.counts_row), ints, strict=True):
        assert column[[3, 1]].tolist() == values.tolist()
    assert columns.temperature[[0, 2]].tolist() == [0, 0]
    assert columns.top_p[[0, 2]].tolist() == [1, 1]
