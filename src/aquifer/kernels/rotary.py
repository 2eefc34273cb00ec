"""Rotary position embedding (RoFormer), with the halves of a head rotated against each other."""

from __future__ import annotations

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its token's angles.

    Args:
        x: [tokens, heads, head_dim].
        cos: [tokens, head_dim / 2], times the attention factor if the scaling has one.
        sin: [tokens, head_dim / 2], likewise.

    Returns:
        [tokens, heads, head_dim] of x's dtype.
    """
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
