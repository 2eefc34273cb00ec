"""Normalisation of hidden states and heads: RMSNorm and LayerNorm, with the sums before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a norm over the last dimension, and how it is computed.

    Args:
        weight: [n], or [heads, n] in `norm_heads`.
        bias: [n] or None.
        eps: added to the mean square, or to the variance.
        centred: whether the mean is subtracted first (LayerNorm); else RMSNorm.
        plus_one: whether the weight is one more than what is stored.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool = False
    plus_one: bool = False

    @property
    def is_plain_rms(self) -> bool:
        """Whether `rms_norm` computes it, which rounds before it multiplies by the weight."""
        return not self.centred and not self.plus_one and self.bias is None


def norm_reference(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    """A norm in plain torch."""
    if norm.is_plain_rms and norm.weight.dim() == 1:
        return rms_norm_reference(x, norm.weight, norm.eps)
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    wide = wide * (norm.weight.float() + 1.0 if norm.plus_one else norm.weight.float())
    if norm.bias is not None:
        wide = wide + norm.bias.float()
    return wide.to(x.dtype)


def add_norm_reference(
    residual: torch.Tensor,
    deltas: Sequence[torch.Tensor],
    after: NormWeights | None,
    before: NormWeights | None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_norm` in plain torch."""
    for delta in deltas:
        added = delta if after is None else norm_reference(delta, after)
        residual += added if scale == 1.0 else added * scale
    return residual if before is None else norm_reference(residual, before), residual


def add_norm(
    residual: torch.Tensor,
    deltas: Sequence[torch.Tensor],
    after: NormWeights | None,
    before: NormWeights | None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream, and normalise the sum.

    Args:
        residual: [tokens, n], contiguous; overwritten with the sum if anything is added.
        deltas: up to two of [tokens, n], contiguous: what is added.
        after: norm of the first delta before it is added; None for none.
        before: norm of the sum; None for none.
        scale: factor on what is added.

    Returns:
        (the norm of the stored (rounded) sum, [tokens, n], or the sum itself; the sum).
    """
    if not deltas and before is None:
        return residual, residual
    if before is not None and before.is_plain_rms and after is None and scale == 1.0:
        if not deltas:
            return rms_norm(residual, before.weight, before.eps), residual
        if len(deltas) == 1:
            return add_rms_norm(deltas[0], residual, before.weight, before.eps), residual
    if not runs_triton(residual):
        return add_norm_reference(residual, deltas, after, before, scale)
    assert len(deltas) <= 2
    assert after is None or len(deltas) == 1
    assert all(delta.shape == residual.shape for delta in deltas)
    assert all(t.is_contiguous() for t in (residual, *deltas))
    out = residual if before is None else torch.empty_like(residual)
    first, second = (*deltas, None, None)[:2]
    num_rows, n = residual.shape
    if num_rows:
        n_pow2 = max(1 << (n - 1).bit_length(), 16)
        _add_norm_kernel[(num_rows,)](
            residual,
            first,
            second,
            *_operands(after),
            *_operands(before),
            out,
            scale,
            n,
            n_pow2=n_pow2,
            num_deltas=len(deltas),
            after_kind=_kind(after),
            after_has_bias=after is not None and after.bias is not None,
            before_kind=_kind(before),
            before_has_bias=before is not None and before.bias is not None,
            num_warps=min(max(n_pow2 // 512, 4), 16),
            **launch_options(residual.device),
        )
    return out, residual


def norm_heads(x: torch.Tensor, norm: NormWeights) -> None:
    """Normalise each head of each token, in place.

    Args:
        x: [tokens, heads, n]; last stride 1, others any.
        norm: its weight is [n] for all heads, or [heads, n].
    """
    if not runs_triton(x):
        x.copy_(norm_reference(x, norm))
        return
    num_tokens, num_heads, n = x.shape
    assert x.stride(2) == 1
    assert norm.weight.is_contiguous()
    assert norm.weight.shape in ((n,), (num_heads, n))
    if num_tokens:
        n_pow2 = max(1 << (n - 1).bit_length(), 16)
        _norm_heads_kernel[(num_tokens, num_heads)](
            x,
            *_operands(norm),
            x.stride(0),
            x.stride(1),
            n,
            n_pow2=n_pow2,
            kind=_kind(norm),
            has_bias=norm.bias is not None,
            is_per_head=norm.weight.dim() == 2,
            num_warps=min(max(n_pow2 // 512, 1), 16),
            **launch_options(x.device),
        )


_NONE, _RMS, _WIDE_RMS, _PLUS_ONE_RMS, _LAYER, _PLUS_ONE_LAYER = 0, 1, 2, 3, 4, 5


def _kind(norm: NormWeights | None) -> int:
    """How a kernel computes a norm: one of the constants above."""
    if norm is None:
        return _NONE
    if norm.centred:
        return _PLUS_ONE_LAYER if norm.plus_one else _LAYER
    if norm.plus_one:
        return _PLUS_ONE_RMS
    return _RMS if norm.is_plain_rms else _WIDE_RMS


def _operands(norm: NormWeights | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    return (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)


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


@jit
def _norm_row(
    row: tensor,
    inside: tensor,
    weight: tensor,
    bias: tensor,
    columns: tensor,
    n: tensor,
    eps: tensor,
    kind: constexpr,
    has_bias: constexpr,
) -> tensor:
    """Normalise one row, padded with zeros after n elements, as `norm_reference` does."""
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wide = row.to(tl.float32)
    if kind >= 4:
        wide = tl.where(inside, wide - tl.sum(wide, axis=0) / n, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / n + eps)
    if kind == 1:
        wide = wide.to(row.dtype).to(tl.float32)
    if kind == 3 or kind == 5:
        scales += 1.0
    wide = wide * scales
    if has_bias:
        wide += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return wide.to(row.dtype)


@jit
def _add_norm_kernel(
    residual: tensor,
    first: tensor,
    second: tensor,
    after_weight: tensor,
    after_bias: tensor,
    after_eps: tensor,
    before_weight: tensor,
    before_bias: tensor,
    before_eps: tensor,
    out: tensor,
    scale: tensor,
    n: tensor,
    n_pow2: constexpr,
    num_deltas: constexpr,
    after_kind: constexpr,
    after_has_bias: constexpr,
    before_kind: constexpr,
    before_has_bias: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles one row, in registers."""
    columns = tl.arange(0, n_pow2)
    inside = columns < n
    place = tl.program_id(0).to(tl.int64) * n + columns
    await_predecessor(overlaps)
    release_successor(overlaps)
    total = tl.load(residual + place, mask=inside, other=0.0)
    if num_deltas > 0:
        dtype = total.dtype
        delta = tl.load(first + place, mask=inside, other=0.0)
        if after_kind > 0:
            delta = _norm_row(
                delta, inside, after_weight, after_bias, columns, n, after_eps, after_kind,
                after_has_bias,
            )  # fmt: skip
        total = (total.to(tl.float32) + _scaled(delta, scale)).to(dtype)
        if num_deltas > 1:
            delta = tl.load(second + place, mask=inside, other=0.0)
            total = (total.to(tl.float32) + _scaled(delta, scale)).to(dtype)
        tl.store(residual + place, total, mask=inside)
    if before_kind > 0:
        normed = _norm_row(
            total, inside, before_weight, before_bias, columns, n, before_eps, before_kind,
            before_has_bias,
        )  # fmt: skip
        tl.store(out + place, normed, mask=inside)


@jit
def _scaled(delta: tensor, scale: tensor) -> tensor:
    """A delta times the factor, rounded to its dtype as in torch; in float32."""
    return (delta.to(tl.float32) * scale).to(delta.dtype).to(tl.float32)


@jit
def _norm_heads_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    eps: tensor,
    token_stride: tensor,
    head_stride: tensor,
    n: tensor,
    n_pow2: constexpr,
    kind: constexpr,
    has_bias: constexpr,
    is_per_head: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles one head of one token."""
    head = tl.program_id(1)
    columns = tl.arange(0, n_pow2)
    inside = columns < n
    place = x + tl.program_id(0).to(tl.int64) * token_stride + head * head_stride + columns
    await_predecessor(overlaps)
    release_successor(overlaps)
    own_weight = weight
    if is_per_head:
        own_weight += head * n
    row = tl.load(place, mask=inside, other=0.0)
    normed = _norm_row(row, inside, own_weight, bias, columns, n, eps, kind, has_bias)
    tl.store(place, normed, mask=inside)
