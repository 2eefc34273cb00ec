"""Batches for the tests of sampling, with parameters of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aquifer.kernels.sampling import sample, sample_reference
from aquifer.kernels.sampling_columns import SamplingColumns, write_counts


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
