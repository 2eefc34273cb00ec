"""Loaded parameters as the parts of a layer use them: matrices and the weights of norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aquifer.kernels.linear import linear
from aquifer.kernels.norm import NormWeights
from aquifer.models.parts import Norm

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Parameters of `DecoderPlan`, by name."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix and its bias."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    @classmethod
    def of(cls, tensors: Tensors, name: str, *, is_transposed: bool = False) -> Linear:
        """The matrix of that name.

        Args:
            tensors: the parameters.
            name: without `.weight` and `.bias`.
            is_transposed: whether it is kept as [in, out].
        """
        weight = tensors[f"{name}.weight"]
        return cls(weight.T if is_transposed else weight, tensors.get(f"{name}.bias"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out]."""
        return linear(x, self.weight, self.bias)


def norm_weights(tensors: Tensors, name: str, norm: Norm | None) -> NormWeights | None:
    """The weights of a norm; None for none."""
    if norm is None:
        return None
    bias = tensors.get(f"{name}.bias")
    return NormWeights(tensors[f"{name}.weight"], bias, norm.eps, norm.centred, norm.plus_one)
