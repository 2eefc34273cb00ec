"""Sampling parameters and token counts of all sequences, as tensors indexed by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them could overflow."""

IN_PROMPT = 1 << 30
"""The bit of a count that marks a token of the prompt; the bits below it count the output."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of each sequence, indexed by slot.

    The columns are rows of two matrices, so that many slots are written at once.
    """

    floats: torch.Tensor  # [6, slots] float32, in the order of the properties below
    ints: torch.Tensor  # [3, slots] int64, likewise
    counts: torch.Tensor  # [rows, vocab] int32, see `write_counts`; rows for penalties only

    @classmethod
    def empty(
        cls, num_slots: int, num_counts: int, vocab_size: int, device: torch.device
    ) -> SamplingColumns:
        """Create columns of greedy sequences without penalties."""
        columns = cls(
            floats=torch.zeros(6, num_slots, dtype=torch.float32, device=device),
            ints=torch.zeros(3, num_slots, dtype=torch.int64, device=device),
            counts=torch.zeros(num_counts, vocab_size, dtype=torch.int32, device=device),
        )
        columns.top_p.fill_(1.0)
        columns.repetition.fill_(1.0)
        columns.counts_row.fill_(-1)
        return columns

    def write(self, slots: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor) -> None:
        """Overwrite the columns of some slots, all on the columns' device.

        Args:
            slots: [n] int64, no slot twice.
            floats: [6, n] float32.
            ints: [3, n] int64.
        """
        self.floats.index_copy_(1, slots, floats)
        self.ints.index_copy_(1, slots, ints)

    @property
    def temperature(self) -> torch.Tensor:
        """[slots] float32; 0 is greedy."""
        return self.floats[0]

    @property
    def top_p(self) -> torch.Tensor:
        """[slots] float32; 1 is all."""
        return self.floats[1]

    @property
    def min_p(self) -> torch.Tensor:
        """[slots] float32; 0 is all."""
        return self.floats[2]

    @property
    def repetition(self) -> torch.Tensor:
        """[slots] float32, the repetition penalty; 1 is none. Penalties need a `counts_row`."""
        return self.floats[3]

    @property
    def presence(self) -> torch.Tensor:
        """[slots] float32, the presence penalty; 0 is none."""
        return self.floats[4]

    @property
    def frequency(self) -> torch.Tensor:
        """[slots] float32, the frequency penalty; 0 is none."""
        return self.floats[5]

    @property
    def top_k(self) -> torch.Tensor:
        """[slots] int64; 0 is all."""
        return self.ints[0]

    @property
    def seed(self) -> torch.Tensor:
        """[slots] int64, the bits of a uint64."""
        return self.ints[1]

    @property
    def counts_row(self) -> torch.Tensor:
        """[slots] int64, a row of `counts`; -1 for a slot without penalties."""
        return self.ints[2]


def write_counts(counts: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor) -> None:
    """Initialise the token counts of a sequence with penalties; sampling updates them.

    Args:
        counts: [vocab] int32, a row of `SamplingColumns.counts`, overwritten.
        prompt: [n] int64, the sequence's prompt.
        output: [m] int64, the tokens generated before a preemption.
    """
    counts.zero_()
    counts[prompt] = IN_PROMPT
    counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
