"""Norm of a recurrence's results, with a gate: groups of columns are normalised (RMSNorm).

gate first   norm(x * silu(gate)) * weight
norm first   norm(x) * weight * silu(gate)
no norm      x * silu(gate)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.span_chunks import wide_dtype


def gated_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """`gated_norm` in plain torch."""
    wide = wide_dtype(x)
    factor = F.silu(gate.to(wide))
    found = x.to(wide)
    if not norm_before_gate or weight is None:
        found = found * factor
    if weight is not None:
        groups = found.unflatten(1, (-1, group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        found = groups.flatten(1) * weight.to(wide).repeat(x.shape[1] // len(weight))
        if norm_before_gate:
            found = found * factor
    return found.to(x.dtype)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Gate and normalise rows; everything in float32, rounded once.

    Args:
        x: [tokens, n]; any row stride.
        gate: [tokens, n]; any row stride.
        weight: [n], or [group_size] for all groups alike; None for no norm.
        eps: added to the mean square.
        group_size: columns that are normalised together, a divisor of n.
        norm_before_gate: whether the gate is applied after the norm.

    Returns:
        [tokens, n], contiguous.
    """
    num_tokens, width = x.shape
    assert width % group_size == 0
    assert weight is None or len(weight) in (width, group_size)
    if not runs_triton(x):
        return gated_norm_reference(
            x, gate, weight, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
        )
    assert gate.shape == x.shape
    assert x.stride(1) == gate.stride(1) == 1
    assert weight is None or weight.is_contiguous()
    out = x.new_empty(num_tokens, width)
    if num_tokens == 0:
        return out
    columns = group_size if weight is not None else min(width, 1024)
    block = pow2(columns)
    _gated_norm_kernel[(num_tokens, -(-width // columns))](
        x, gate, weight, out, x.stride(0), gate.stride(0), eps,
        width=width, columns=columns, block=block, has_norm=weight is not None,
        is_shared=weight is not None and len(weight) < width, is_gate_first=not norm_before_gate,
        num_warps=8 if block >= 4096 else 4, **launch_options(x.device),
    )  # fmt: skip
    return out


@jit
def _gated_norm_kernel(
    x: tensor,
    gate: tensor,
    weight: tensor,
    out: tensor,
    x_stride: tensor,
    gate_stride: tensor,
    eps: tensor,
    width: constexpr,
    columns: constexpr,
    block: constexpr,
    has_norm: constexpr,
    is_shared: constexpr,
    is_gate_first: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles one group of columns of one token."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, block)
    column = tl.program_id(1) * columns + own
    inside = (own < columns) & (column < width)
    if has_norm:
        place = own if is_shared else column
        factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    await_predecessor(overlaps)
    release_successor(overlaps)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    gates = gates * tl.sigmoid(gates)
    if is_gate_first or not has_norm:
        value = value * gates
    if has_norm:
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps) * factor
        if not is_gate_first:
            value = value * gates
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
