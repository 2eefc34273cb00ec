"""RMS normalisation (RMSNorm)."""

from __future__ import annotations

from typing import Any

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit,
    launch_options,
    release_successor,
    runs_triton,
    tensor,
    tl,
)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch."""
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension to root mean square 1, in float32, then scale.

    Args:
        x: [..., n].
        weight: [n], of x's dtype.
        eps: added to the mean square.

    Returns:
        [..., n] of x's dtype.
    """
    if not runs_triton(x):
        return rms_norm_reference(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    assert weight.dtype == x.dtype
    assert weight.shape == rows.shape[1:]
    out = rows.new_empty(rows.shape)
    if len(rows):
        _launch(_rms_norm_kernel, (rows, weight, out, rows.stride(0), eps))
    return out.view(x.shape)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`add_rms_norm` in plain torch."""
    residual += x
    return rms_norm_reference(residual, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add to the residual stream, and normalise the sum.

    Args:
        x: [tokens, n], a layer's output; any row stride.
        residual: [tokens, n] of x's dtype, overwritten with the sum; any row stride.
        weight: [n], of x's dtype.
        eps: added to the mean square.

    Returns:
        [tokens, n] of x's dtype, contiguous: the norm of the stored (rounded) sum.
    """
    if not runs_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype == weight.dtype
    assert x.stride(1) == residual.stride(1) == 1
    out = x.new_empty(x.shape)
    if len(x):
        arguments = (x, residual, weight, out, x.stride(0), residual.stride(0), eps)
        _launch(_add_rms_norm_kernel, arguments)
    return out


def _launch(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Launch one program per row of the first argument; it keeps the row in registers."""
    num_rows, n = arguments[0].shape
    n_pow2 = max(1 << (n - 1).bit_length(), 16)
    num_warps = min(max(n_pow2 // 512, 4), 16)
    options = launch_options(arguments[0].device)
    kernel[(num_rows,)](*arguments, n, n_pow2=n_pow2, num_warps=num_warps, **options)


@jit
def _rms_norm_kernel(
    x: tensor,
    weight: tensor,
    out: tensor,
    x_stride: tensor,
    eps: tensor,
    n: tensor,
    n_pow2: constexpr,
    overlaps: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, n_pow2)
    inside = columns < n
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    await_predecessor(overlaps)
    release_successor(overlaps)
    own = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    tl.store(out + row * n + columns, _normalised(own, scales, n, eps), mask=inside)


@jit
def _add_rms_norm_kernel(
    x: tensor,
    residual: tensor,
    weight: tensor,
    out: tensor,
    x_stride: tensor,
    residual_stride: tensor,
    eps: tensor,
    n: tensor,
    n_pow2: constexpr,
    overlaps: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, n_pow2)
    inside = columns < n
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    await_predecessor(overlaps)
    release_successor(overlaps)
    added = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    before = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    total = (added.to(tl.float32) + before.to(tl.float32)).to(added.dtype)
    tl.store(residual + row * residual_stride + columns, total, mask=inside)
    tl.store(out + row * n + columns, _normalised(total, scales, n, eps), mask=inside)


@jit
def _normalised(row: tensor, scales: tensor, n: tensor, eps: tensor) -> tensor:
    """Normalise one row, padded with zeros after n elements; round before and after the weight."""
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / n + eps)
    return (scales.to(tl.float32) * wide.to(row.dtype).to(tl.float32)).to(row.dtype)
