"""Loaded parameters as the parts of a layer use them: matrices and the weights of norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aquifer.kernels.linear import linear, sum_linear
from aquifer.kernels.norm import NormWeights
from aquifer.models.collectives import Collectives
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


def added_products(
    first: tuple[Linear, torch.Tensor], second: tuple[Linear, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What two products of one token add up to: one tensor, or those of both to be added."""
    (one, x), (other, y) = first, second
    are_plain = all(each.weight.is_contiguous() and each.bias is None for each in (one, other))
    return (sum_linear(x, one.weight, y, other.weight),) if are_plain else (one(x), other(y))


def norm_weights(tensors: Tensors, name: str, norm: Norm | None) -> NormWeights | None:
    """The weights of a norm; None for none."""
    if norm is None:
        return None
    bias = tensors.get(f"{name}.bias")
    return NormWeights(tensors[f"{name}.weight"], bias, norm.eps, norm.centred, norm.plus_one)


def norm_rows(parts: Sequence[tuple[torch.Tensor, NormWeights]], collectives: Collectives) -> None:
    """Normalise rows of which each rank has as many columns, in place.

    Columns that several ranks have count for each of them. That changes no mean, as all columns are
    had by equally many.

    Args:
        parts: [tokens, columns] and the norm of each, by the root mean square.
        collectives: the ranks.
    """
    squares = torch.stack([rows.float().square().mean(1) for rows, _ in parts])
    (sums,) = collectives.total(squares)
    for (rows, norm), total in zip(parts, sums, strict=True):
        assert not norm.centred
        mean = total.unsqueeze(1) / collectives.size
        wide = rows.float() * torch.rsqrt(mean + norm.eps)
        weight = norm.weight.float() + 1 if norm.plus_one else norm.weight.float()
        rows.copy_(wide * weight if norm.bias is None else wide * weight + norm.bias.float())
