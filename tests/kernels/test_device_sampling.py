"""Sampling on the device: against its reference, the CPU's sampler, and the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch

from aquifer.engine import slots as engine_slots
from aquifer.engine.request import Request, SamplingParams
from aquifer.engine.sampler import sample as sample_on_cpu
from aquifer.kernels.sampling import (
    SamplingColumns,
    Variant,
    sample,
    sample_reference,
    write_counts,
)

GREEDY = SamplingParams(temperature=0)
PLAIN = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=3.0),
    GREEDY,
    SamplingParams(temperature=1e-6, top_k=3),
]
CUT = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=10_000_000),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=-1, top_p=0.999),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.001),
]
PENALISED = [
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=-0.3),
    SamplingParams(repetition_penalty=0.6, presence_penalty=1.5),
    SamplingParams(top_k=7, repetition_penalty=1.5, frequency_penalty=-0.5),
]


class Batch:
    """Sequences with these parameters, known to the engine's table and to the device."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: Any) -> None:
        generator = np.random.default_rng(len(params) + vocab_size)
        num_slots = len(params) + 3
        self.table = engine_slots.SlotTable(num_slots, 40)
        columns = SamplingColumns.empty(num_slots, len(params), vocab_size, device)
        self.columns = columns
        self.slots = []
        for i, one in enumerate(params):
            prompt = generator.integers(vocab_size, size=9).tolist()
            output = generator.integers(vocab_size, size=generator.integers(30)).tolist()
            output = [*output, *output[:3], *prompt[:2]][:30]
            seed = int(generator.integers(2**64, dtype=np.uint64))
            sequence = engine_slots.Sequence(
                request=Request(str(i), "m", prompt, one, 0.0),
                arrival=i,
                seed=seed,
                max_total=40,
                stop_ids=frozenset(),
                eos_ids=frozenset(),
                token_ids=np.array([*prompt, *output], np.int32),
            )
            slot = self.table.seat(sequence)
            self.slots.append(slot)
            columns.penalties[slot] = torch.tensor(
                (one.repetition_penalty, one.presence_penalty, one.frequency_penalty)
            )
            if self.table.changes_logits[slot]:
                columns.counts_row[slot] = i
                known = (torch.tensor(part, device=device).long() for part in (prompt, output))
                write_counts(columns.counts[i], *known)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "num_tokens"):
            values = getattr(self.table, name)
            bits = values.view(np.int64) if name == "seed" else values
            getattr(columns, name).copy_(torch.from_numpy(bits))

    def on_cpu(self, logits: torch.Tensor) -> list[int]:
        copy = logits.float().cpu().clone()  # it is overwritten
        slots = np.array([slot for slot in self.slots if slot >= 0])
        kept = torch.tensor([slot >= 0 for slot in self.slots])
        tokens = torch.full((len(self.slots),), -7)
        tokens[kept] = torch.from_numpy(sample_on_cpu(copy[kept], self.table, slots))
        return tokens.tolist()

    def on_device(
        self, logits: torch.Tensor, variant: Variant = "full", operation: Any = sample
    ) -> list[int]:
        slots = torch.tensor(self.slots, device=logits.device)
        out = torch.full_like(slots, -7)
        if operation is sample:
            sample(logits, slots, self.columns, out, variant=variant)
        else:
            operation(logits, slots, self.columns, out)
        return out.tolist()


def random_logits(device: torch.device, *shape: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return (torch.randn(shape, generator=generator) * spread).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [40, 700, 9001])
def test_tokens_are_those_of_the_cpu(
    device: torch.device, vocab_size: int, dtype: torch.dtype
) -> None:
    """One batch of all kinds; in bfloat16 some scores are equal, which sorting need not respect."""
    if dtype == torch.bfloat16:
        params = [*PLAIN, SamplingParams(min_p=0.3), *PENALISED[:3]]
    else:
        params = [*PLAIN, *CUT, *PENALISED]
    batch = Batch(params, vocab_size, device)
    logits = random_logits(device, len(params), vocab_size).to(dtype)
    before = logits.clone()
    expected = batch.on_cpu(logits)
    counts = batch.columns.counts.clone()
    assert batch.on_device(logits) == expected
    assert torch.equal(logits, before)
    for row, token in enumerate(expected):
        if batch.table.changes_logits[batch.slots[row]]:
            counts[row, token] += 1
    assert torch.equal(batch.columns.counts, counts)


@pytest.mark.parametrize("variant", get_args(Variant))
def test_variants_give_the_same_tokens(device: torch.device, variant: Variant) -> None:
    params = [GREEDY] * 3 if variant == "greedy" else [*PLAIN, SamplingParams(temperature=0.9)]
    batch = Batch(params, 5000, device)
    logits = random_logits(device, len(params), 5000)
    assert batch.on_device(logits, variant) == batch.on_cpu(logits)


@pytest.mark.parametrize("kind", ["flat", "equal", "few", "one"])
def test_rows_that_candidates_do_not_settle(device: torch.device, kind: str) -> None:
    """Many tokens needed, more equal ones than there is room for, next to none allowed."""
    params = [
        SamplingParams(temperature=2.0, top_p=0.97),
        SamplingParams(top_k=6000),
        SamplingParams(top_k=6000, top_p=0.5),
        SamplingParams(top_p=0.75, min_p=0.01),
        SamplingParams(min_p=0.01),
        SamplingParams(top_k=2),
        SamplingParams(),
        GREEDY,
    ]
    vocab_size = 8200
    batch = Batch(params, vocab_size, device)
    logits = random_logits(device, len(params), vocab_size, spread=0.5)
    if kind == "equal":
        logits.zero_()
    elif kind in ("few", "one"):
        allowed = torch.tensor([4100, 7, 8199] if kind == "few" else [8199], device=device)
        forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
        forbidden[allowed] = False
        logits[:, forbidden] = -torch.inf
    assert batch.on_device(logits) == batch.on_device(logits, operation=sample_reference)


def test_ties_are_cut_in_the_order_of_ids(device: torch.device) -> None:
    """Of equal tokens top-k keeps the first, and every token of the support can be drawn."""
    params = [SamplingParams(top_k=3)] * 24
    batch = Batch(params, 64, device)
    logits = torch.zeros(len(params), 64, device=device)
    logits[:, 20] = 1.0
    logits[:, [5, 50]] = 0.5
    logits[:, [9, 33]] = 0.5
    drawn = batch.on_device(logits)
    assert set(drawn) == {20, 5, 9}
    assert drawn == batch.on_device(logits, operation=sample_reference)


def test_padding_is_left_alone_and_rows_may_lie_apart(device: torch.device) -> None:
    batch = Batch([*PLAIN, *CUT[:4]], 300, device)
    wide = random_logits(device, len(batch.slots), 400)
    wide[:, 300:] = torch.nan
    for row in (0, 6):
        batch.slots[row] = -1
        wide[row] = torch.inf
    assert batch.on_device(wide[:, :300]) == batch.on_cpu(wide[:, :300])


@pytest.mark.parametrize("params", [*PLAIN[:3], *CUT])
def test_the_reference_draws_from_the_cut_softmax(params: SamplingParams) -> None:
    """With the kernels equal to the reference, this is their distribution."""
    vocab_size, draws = 40, 2000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    columns = SamplingColumns.empty(1, 0, vocab_size, torch.device("cpu"))
    columns.temperature[:] = params.temperature
    columns.top_k[:] = max(params.top_k, 0)
    columns.top_p[:] = params.top_p
    columns.min_p[:] = params.min_p
    counts = np.zeros(vocab_size, np.int64)
    out = torch.zeros(1, dtype=torch.int64)
    for position in range(draws):
        columns.num_tokens[:] = position
        sample_reference(logits.unsqueeze(0), torch.zeros(1).long(), columns, out)
        counts[int(out[0])] += 1
    check_distribution(counts, expected_probabilities(logits.double().numpy(), params))


def test_plain_draws_follow_the_softmax(device: torch.device) -> None:
    vocab_size, draws = 30, 20_000 if device.type == "cuda" else 400
    logits = random_logits(device, vocab_size, spread=1.5)
    columns = SamplingColumns.empty(draws, 0, vocab_size, device)
    columns.temperature[:] = 0.8
    columns.seed[:] = torch.arange(draws, device=device) // 7
    columns.num_tokens[:] = torch.arange(draws, device=device) % 7
    out = torch.empty(draws, dtype=torch.int64, device=device)
    sample(
        logits.expand(draws, -1), torch.arange(draws, device=device), columns, out, variant="plain"
    )
    probabilities = expected_probabilities(
        logits.double().cpu().numpy(), SamplingParams(temperature=0.8)
    )
    check_distribution(np.bincount(out.cpu().numpy(), minlength=vocab_size), probabilities)


def test_a_graph_follows_the_columns(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    params = [*PLAIN, *CUT, *PENALISED]
    batch = Batch(params, 20_000, device)
    columns = batch.columns
    slots = torch.tensor(batch.slots, device=device)
    logits = random_logits(device, len(params), 20_000)
    out, expected = torch.empty_like(slots), torch.empty_like(slots)
    sample(logits, slots, columns, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, slots, columns, out)
    for _ in range(5):
        columns.num_tokens.add_(1)
        logits.copy_(logits.roll(37, dims=1))
        counts = columns.counts.clone()
        sample(logits, slots, columns, expected)
        columns.counts.copy_(counts)
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, expected)


def expected_probabilities(logits: Any, params: SamplingParams) -> Any:
    """Temperature, min-p, top-k, top-p, in this order and one token at a time; [vocab]."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    probabilities = weights / weights.sum()
    probabilities[probabilities < np.float32(params.min_p) * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    wanted = np.float32(params.top_p) * probabilities.sum()
    mass = 0.0
    for token in order:
        if mass >= wanted and params.top_p < 1:
            probabilities[token] = 0
        mass += probabilities[token]
    return probabilities / probabilities.sum()


def check_distribution(counts: Any, probabilities: Any) -> None:
    """Nothing outside of the support; and chi-square, tokens pooled that expect too few draws."""
    assert not counts[probabilities == 0].any()
    order = np.argsort(-probabilities, kind="stable")[: np.count_nonzero(probabilities)]
    expected = probabilities[order] * counts.sum()
    _, pool = np.unique((np.cumsum(expected) - expected) // 10, return_inverse=True)
    expected = np.bincount(pool, expected)
    observed = np.bincount(pool, counts[order])
    freedom = max(len(expected) - 1, 1)
    excess = ((observed - expected) ** 2 / expected).sum() - freedom
    assert excess / (2 * freedom) ** 0.5 < 4
