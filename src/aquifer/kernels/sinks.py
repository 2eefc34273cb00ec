"""Attention sinks: one learned logit of each query head, in the softmax's denominator alone.

A query with scores s_j and the sink of its head attends with weights that sum to less than 1:

    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))

A sink is neither multiplied by the scale nor capped, and every window has it. It is that of
GPT-OSS. `sinks` is [heads], of any floating-point dtype.

Kernels add it once, when they normalise a complete result. Partial results, of some of the keys,
are without it.
"""

from __future__ import annotations

import torch

from aquifer.kernels._triton import constexpr, jit, tensor, tl


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension, with a sink for each head.

    Args:
        scores: [kv_heads, group, ..., keys]; query head h is at [h // group, h % group].
        sinks: [kv_heads * group]; None for the usual softmax.
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(*scores.shape[:2], *[1] * (scores.ndim - 2))
    column = column.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


@jit
def load_sinks(sinks: tensor, head: tensor, is_head: tensor) -> tensor:
    """Load the sinks of some heads as float32, in powers of two.

    With a sum `total` of exp2(score - top), the denominator is total + exp2(sink - top). That may
    be infinite; the result is then 0, as it should be.
    """
    log2_e: constexpr = 1.4426950408889634
    return tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * log2_e
