"""Batches for the tests of sampling, with parameters of every kind, and what they must draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aquifer.engine.params import SamplingParams
from aquifer.kernels.sampling.columns import SamplingColumns, write_counts
from aquifer.kernels.sampling.reference import sample_reference
from aquifer.kernels.sampling.sample import sample


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0

    @property
    def floats(self) -> tuple[float, ...]:
        penalties = self.repetition, self.presence, self.frequency
        return (self.temperature, self.top_p, self.min_p, *penalties)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


GREEDY = Params(temperature=0)
PLAIN = [
    Params(),
    Params(temperature=0.3),
    Params(temperature=3.0),
    GREEDY,
    Params(temperature=1e-6, top_k=3),
]
CUT = [
    Params(top_k=1),
    Params(top_k=5),
    Params(top_k=10_000_000),
    Params(top_p=0.5),
    Params(top_p=0.999),
    Params(top_p=1e-6),
    Params(min_p=0.2),
    Params(min_p=1.0),
    Params(temperature=0.7, top_k=8, top_p=0.8),
    Params(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    Params(temperature=0.8, top_p=0.9, min_p=0.001),
]
PENALISED = [
    Params(temperature=0, repetition=1.3),
    Params(temperature=0, frequency=0.7, presence=-0.3),
    Params(repetition=0.6, presence=1.5),
    Params(top_k=7, repetition=1.5, frequency=-0.5),
]


class Batch:
    """Rows with these parameters, in slots of any order, each somewhere in its text."""

    def __init__(self, params: Sequence[Params], vocab_size: int, device: Any) -> None:
        generator = np.random.default_rng(len(params) + vocab_size)
        count, num_slots = len(params), len(params) + 3
        slots = generator.permutation(num_slots)[:count]
        self.num_tokens = torch.from_numpy(generator.integers(2**40, size=count)).to(device)
        counts_rows = [i if one.has_penalties else -1 for i, one in enumerate(params)]
        seeds = generator.integers(-(2**63), 2**63, size=count).tolist()
        self.columns = SamplingColumns.empty(num_slots, count, vocab_size, device)
        self.slots = torch.from_numpy(slots).to(device)
        self.columns.write(
            self.slots,
            torch.tensor([one.floats for one in params], device=device).T,
            torch.tensor([[one.top_k for one in params], seeds, counts_rows], device=device),
        )
        for row in counts_rows:
            if row >= 0:
                prompt = generator.integers(vocab_size, size=9)
                output = generator.integers(vocab_size, size=generator.integers(20))
                output = np.concatenate((output, output[:3], prompt[:2]))
                known = (torch.from_numpy(part).to(device) for part in (prompt, output))
                write_counts(self.columns.counts[row], *known)

    def draw(self, logits: torch.Tensor, **variant: Any) -> list[int]:
        """Tokens that `sample` draws; it updates the counts."""
        out = torch.full_like(self.slots, -7)
        sample(logits, self.slots, self.num_tokens, self.columns, out, **variant)
        return out.tolist()

    def expect(self, logits: torch.Tensor) -> list[int]:
        """Tokens that the reference draws, from the same state as the next `draw`."""
        out = torch.full_like(self.slots, -7)
        counts = self.columns.counts.clone()
        sample_reference(logits, self.slots, self.num_tokens, self.columns, out)
        self.columns.counts.copy_(counts)
        return out.tolist()

    def check(self, logits: torch.Tensor, **variant: Any) -> None:
        """Check that tokens equal the reference's and are counted, and nothing else changes."""
        before, counts = logits.clone(), self.columns.counts.clone()
        floats, ints = self.columns.floats.clone(), self.columns.ints.clone()
        expected = self.expect(logits)
        assert self.draw(logits, **variant) == expected
        assert torch.equal(logits, before)
        for slot, token in zip(self.slots.tolist(), expected, strict=True):
            row = int(self.columns.counts_row[slot])
            if slot >= 0 and row >= 0:
                counts[row, token] += 1
        assert torch.equal(self.columns.counts, counts)
        assert torch.equal(self.columns.floats, floats)
        assert torch.equal(self.columns.ints, ints)


def random_logits(device: torch.device, *shape: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return (torch.randn(shape, generator=generator) * spread).to(device)


def check_padding(params: Sequence[Params], device: torch.device) -> None:
    """Check that rows that only pad a batch get no token, and that rows may lie apart."""
    batch = Batch(params, 300, device)
    wide = random_logits(device, len(params), 400)
    wide[:, 300:] = torch.nan
    for row in (0, 2, 6):
        batch.slots[row] = -1
        wide[row] = torch.inf
    logits = wide[:, :300]
    expected = batch.expect(logits)
    assert batch.draw(logits) == expected
    assert [row for row, token in enumerate(expected) if token == -7] == [0, 2, 6]
    batch.slots.fill_(-1)
    assert set(batch.draw(logits)) == {-7}


def expected_probabilities(logits: Any, params: Params | SamplingParams) -> Any:
    """Apply temperature, min-p, top-k and top-p in this order, token by token; [vocab]."""
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
    """Check the support, and the counts by chi-square; tokens that expect few draws are pooled."""
    assert not counts[probabilities == 0].any()
    order = np.argsort(-probabilities, kind="stable")[: np.count_nonzero(probabilities)]
    expected = probabilities[order] * counts.sum()
    _, pool = np.unique((np.cumsum(expected) - expected) // 10, return_inverse=True)
    expected = np.bincount(pool, expected)
    observed = np.bincount(pool, counts[order])
    freedom = max(len(expected) - 1, 1)
    excess = ((observed - expected) ** 2 / expected).sum() - freedom
    assert excess / (2 * freedom) ** 0.5 < 4
