"""Root-mean-square normalisation."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension to root mean square 1, in float32, then scale.

    Args:
        x: [..., n].
        weight: [n].
        eps: added to the mean square.

    Returns:
        [..., n] of x's dtype.
    """
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
