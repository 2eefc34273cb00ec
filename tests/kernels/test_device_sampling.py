"""Sampling on the device: against its reference, and the distribution."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.kernels.sampling_batches import (
    CUT,
    GREEDY,
    PENALISED,
    PLAIN,
    Batch,
    Params,
    check_distribution,
    check_padding,
    expected_probabilities,
    random_logits,
)

from aquifer.kernels.sampling import sample as sampling
from aquifer.kernels.sampling.columns import SamplingColumns
from aquifer.kernels.sampling.reference import sample_reference
from aquifer.kernels.sampling.sample import Variant, sample

FLAT = [
    Params(temperature=2.0, top_p=0.97),
    Params(top_k=6000),
    Params(top_k=5000, top_p=0.95),
    Params(top_p=0.75, min_p=0.01),
    Params(min_p=0.01),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [40, 700, 9001])
def test_tokens_are_those_of_the_reference(
    device: torch.device, vocab_size: int, dtype: torch.dtype
) -> None:
    """One batch of all kinds; in bfloat16 many tokens are equal."""
    params = [*PLAIN, *CUT, *PENALISED]
    Batch(params, vocab_size, device).check(
        random_logits(device, len(params), vocab_size).to(dtype)
    )


@pytest.mark.parametrize("variant", get_args(Variant))
def test_variants_give_the_same_tokens(device: torch.device, variant: Variant) -> None:
    params = [GREEDY] * 3 if variant == "greedy" else [*PLAIN, Params(temperature=0.9)]
    batch = Batch(params, 5000, device)
    batch.check(random_logits(device, len(params), 5000), variant=variant)


@pytest.mark.parametrize("kind", ["flat", "equal", "peak", "few", "one"])
def test_rows_that_candidates_do_not_settle(device: torch.device, kind: str) -> None:
    """Rows that need many tokens, have more equal ones than fit, or allow next to none."""
    params = [*FLAT, Params(top_k=2), Params(), GREEDY]
    vocab_size = 8200
    batch = Batch(params, vocab_size, device)
    logits = random_logits(device, len(params), vocab_size, spread=0.5)
    if kind == "equal":
        logits.zero_()
    elif kind == "peak":
        logits[:, 4000] = 8.5
    elif kind in ("few", "one"):
        allowed = torch.tensor([4100, 7, 8199] if kind == "few" else [8199], device=device)
        forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
        forbidden[allowed] = False
        logits[:, forbidden] = -torch.inf
    batch.check(logits)


@pytest.mark.parametrize("num_allowed", [1, 3, 400])
def test_candidates_settle_rows_with_few_allowed_tokens(
    device: torch.device, num_allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of such a row may have no token that is allowed, and says nothing then."""
    left: list[int] = []

    class Brackets:
        """In place of the kernel."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: left.extend(args[9].tolist())

    vocab_size = 8200
    batch = Batch(CUT, vocab_size, device)
    logits = random_logits(device, len(CUT), vocab_size)
    logits[:, torch.arange(vocab_size, device=device) % 20 > 0] = -torch.inf
    logits[:, 20 * num_allowed :] = -torch.inf
    monkeypatch.setattr(sampling, "bracket_kernel", Brackets())
    batch.check(logits)
    assert left == [0] * len(CUT)


@pytest.mark.parametrize("kind", ["missed", "full"])
def test_brackets_that_do_not_settle_a_row_either(
    device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "missed":
        monkeypatch.setattr(sampling, "DEVIATIONS", -5.0)
    else:
        monkeypatch.setattr(sampling, "LIST_SHARE", 1000)
        monkeypatch.setattr(sampling, "CANDIDATES", 300)
    batch = Batch(FLAT[1:4], 8200, device)
    batch.check(random_logits(device, 3, 8200, spread=0.5))


@pytest.mark.gpu  # for it takes too long in the interpreter
def test_rows_of_a_large_vocabulary(device: torch.device) -> None:
    """The kernels' float32 exponentials may move a draw to the next of 150 000 flat tokens."""
    kinds = [*FLAT, Params(temperature=0.5, top_p=0.99), Params(top_p=0.999), Params(top_p=0.5)]
    kinds.remove(Params(min_p=0.01))  # drawn in another order
    vocab_size, count = 151_936, 8 * len(kinds)
    for spread in (0.01, 0.6, 1.5, 2.5, 4.0):
        batch = Batch(kinds * 8, vocab_size, device)
        for dtype in (torch.float32, torch.bfloat16):
            logits = random_logits(device, count, vocab_size, spread=spread).to(dtype)
            rank = logits.sort(stable=True, descending=True).indices.argsort()
            pairs = zip(rank.tolist(), batch.draw(logits), batch.expect(logits), strict=True)
            moved = [abs(ranks[token] - ranks[expected]) for ranks, token, expected in pairs]
            assert max(moved) <= 1
            assert sum(moved) <= count // 10


def test_ties_are_cut_in_the_order_of_ids(device: torch.device) -> None:
    """Among equal tokens top-k keeps the first, and every token of the support can be drawn."""
    batch = Batch([Params(top_k=3)] * 24, 64, device)
    logits = torch.zeros(24, 64, device=device)
    logits[:, 20] = 1.0
    logits[:, [5, 50]] = 0.5
    logits[:, [9, 33]] = 0.5
    assert set(batch.expect(logits)) == {20, 5, 9}
    batch.check(logits)


def test_padding_is_left_alone_and_rows_may_lie_apart(device: torch.device) -> None:
    check_padding([*PENALISED, *PLAIN, *CUT[:4]], device)


@pytest.mark.filterwarnings("ignore:.*(NaN|invalid value).*:RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("vocab_size", [300, 5000])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_impossible_logits_give_some_token(
    device: torch.device, vocab_size: int, value: float
) -> None:
    params = [PLAIN[0], GREEDY, CUT[1], CUT[3], CUT[6]]
    logits = torch.full((len(params), vocab_size), value, device=device)
    assert all(0 <= token < vocab_size for token in Batch(params, vocab_size, device).draw(logits))


@pytest.mark.parametrize("params", [*PLAIN[:3], *CUT])
def test_the_reference_draws_from_the_cut_softmax(params: Params) -> None:
    """With the kernels equal to the reference, this is their distribution."""
    vocab_size, draws = 40, 1000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    columns = SamplingColumns.empty(1, 0, vocab_size, torch.device("cpu"))
    columns.write(
        torch.tensor([0]),
        torch.tensor([params.floats]).T,
        torch.tensor([[params.top_k], [0], [-1]]),
    )
    out = torch.zeros(draws, dtype=torch.int64)
    slots = torch.zeros_like(out)
    sample_reference(logits.expand(draws, -1), slots, torch.arange(draws), columns, out)
    counts = np.bincount(out.numpy(), minlength=vocab_size)
    check_distribution(counts, expected_probabilities(logits.double().numpy(), params))


def test_plain_draws_follow_the_softmax(device: torch.device) -> None:
    vocab_size, draws = 30, 20_000 if device.type == "cuda" else 250
    logits = random_logits(device, vocab_size, spread=1.5)
    columns = SamplingColumns.empty(draws, 0, vocab_size, device)
    rows = torch.arange(draws, device=device)
    columns.temperature[:] = 0.8
    columns.seed[:] = rows // 7
    out = torch.empty_like(rows)
    sample(logits.expand(draws, -1), rows, rows % 7, columns, out, variant="plain")
    probabilities = expected_probabilities(logits.double().cpu().numpy(), Params(temperature=0.8))
    check_distribution(np.bincount(out.cpu().numpy(), minlength=vocab_size), probabilities)


@pytest.mark.gpu  # for graphs are CUDA's
def test_a_graph_follows_the_columns(device: torch.device) -> None:
    params = [*PLAIN, *CUT, *PENALISED, *FLAT]
    batch = Batch(params, 20_000, device)
    logits = random_logits(device, len(params), 20_000, spread=1.0)
    out = torch.empty_like(batch.slots)
    arguments = logits, batch.slots, batch.num_tokens, batch.columns, out
    sample(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(*arguments)
    for _ in range(5):
        batch.num_tokens.add_(1)
        logits.copy_(logits.roll(37, dims=1))
        counts = batch.columns.counts.clone()
        expected = batch.draw(logits)
        batch.columns.counts.copy_(counts)
        out.fill_(-7)
        graph.replay()
        assert out.tolist() == expected
