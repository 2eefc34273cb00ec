"""The residual stream of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aquifer.kernels.linear import linear, norm_linear
from aquifer.kernels.norm import NormWeights, add_norm
from aquifer.models.base import Wanted
from aquifer.models.tensors import Linear


@dataclass(slots=True)
class Stream:
    """The residual stream, and what is still to be added to it.

    Adding is left to the next norm, which does both in one pass.
    """

    residual: torch.Tensor  # [tokens, hidden]
    context_lengths: torch.Tensor  # [tokens], see `ModelInput`
    scale: float  # factor on what is added
    embedding: torch.Tensor | None = None  # what it began as, kept for shared blocks
    deltas: tuple[torch.Tensor, ...] = ()  # up to two of [tokens, hidden]: what is to be added
    after: NormWeights | None = None  # norm of the only delta
    wanted: Wanted | None = None  # in the last layer: the rows that go on after attention

    def add(self, after: NormWeights | None, *deltas: torch.Tensor) -> None:
        """Note what the next norm adds to the stream."""
        self.deltas, self.after = deltas, after

    def narrow(self) -> None:
        """Drop all rows that are not wanted. Pre-condition: nothing is to be added."""
        if self.wanted is not None:
            assert not self.deltas
            self.residual = self.residual[self.wanted.rows]
            self.context_lengths = self.context_lengths[self.wanted.rows]

    def normed(self, norm: NormWeights | None) -> torch.Tensor:
        """Add what is to be added; the norm of the stream, or without a norm the stream itself."""
        normed, self.residual = add_norm(self.residual, self.deltas, self.after, norm, self.scale)
        self.deltas, self.after = (), None
        return normed

    def norm_linear(
        self, norm: NormWeights | None, matrix: Linear, *, gated: bool = False
    ) -> torch.Tensor:
        """The product of the normed stream and a matrix; with a gate, `silu_mul` of that."""
        is_plain = norm is not None and norm.is_plain_rms and len(self.deltas) <= 1
        is_scaled = bool(self.deltas) and self.scale != 1.0
        if not is_plain or self.after is not None or is_scaled:
            return linear(self.normed(norm), matrix.weight, matrix.bias, gated=gated)
        assert norm is not None
        delta = self.deltas[0] if self.deltas else None
        product, self.residual = norm_linear(
            delta, self.residual, norm.weight, norm.eps, matrix.weight, matrix.bias, gated=gated
        )
        self.deltas = ()
        return product
