"""What the ranks of a tensor-parallel group do together within a step.

Each rank is a process with a device. It has a part of the weights and runs every step, over the
same tokens. Hidden states are whole and equal on all ranks; what lies between two products of a
layer is divided among them (Shoeybi et al., Megatron-LM, 2019, section 3).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """Operations that all ranks of a group call in the same order, with tensors of equal shapes.

    They are launched on the current stream and do not wait for the device, so that a CUDA graph can
    capture them.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def total(self, *partials: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What these tensors of all ranks add up to.

        Args:
            partials: tensors of one shape, which may be overwritten.

        Returns: tensors of which the sum is the sum of all given ones of all ranks; the same number
            of them, or a single one.
        """

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks, in the order of the ranks.

        Args:
            part: [n, columns].

        Returns: [n, size * columns].
        """

    def agree(self, values: torch.Tensor) -> None:
        """Overwrite values, of any shape, with those of rank 0."""


class Alone:
    """The `Collectives` of a process that has no others beside it."""

    rank = 0
    size = 1

    def total(self, *partials: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `Collectives.total`."""
        return partials

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """See `Collectives.joined`."""
        return part

    def agree(self, values: torch.Tensor) -> None:
        """See `Collectives.agree`."""


ALONE = Alone()
"""No other ranks."""
