"""Activations between the two matrix products of a feed-forward layer, gated (SwiGLU) or not; the
gate of attention; softplus for other kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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

_COLUMNS = 1024  # columns of one program


ACTIVATIONS: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
"""Activations by name, with their numbers in the kernel. "gelu" is exact, "gelu_tanh" its
approximation; "relu2" is the square of "relu"."""


def activated(x: torch.Tensor, name: str) -> torch.Tensor:
    """One of `ACTIVATIONS` in plain torch."""
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    if name == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def activate_reference(x: torch.Tensor, name: str, *, is_gated: bool) -> torch.Tensor:
    """`activate` in plain torch."""
    if not is_gated:
        return activated(x, name)
    gate, up = x.chunk(2, dim=1)
    return activated(gate, name) * up


def activate(x: torch.Tensor, name: str, *, is_gated: bool) -> torch.Tensor:
    """Apply an activation, with each operation rounded to the dtype as in torch.

    Args:
        x: [tokens, n], contiguous; gated: [tokens, 2n], the gate before what it multiplies.
        name: one of `ACTIVATIONS`.
        is_gated: whether to multiply by the second half.

    Returns:
        [tokens, n], contiguous.
    """
    if not runs_triton(x):
        return activate_reference(x, name, is_gated=is_gated)
    num_tokens, width = x.shape
    assert x.stride(1) == 1
    if is_gated:
        assert width % 2 == 0
        width //= 2
    out = x.new_empty(num_tokens, width)
    if num_tokens:
        _activation_kernel[(num_tokens, -(-width // _COLUMNS))](
            x, out, x.stride(0), width, block=_COLUMNS, kind=ACTIVATIONS[name], is_gated=is_gated,
            num_warps=4, **launch_options(x.device),
        )  # fmt: skip
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up, with each operation rounded to the dtype as in torch.

    Args:
        gate_up: [tokens, 2n], gate before up; any row stride.

    Returns:
        [tokens, n], contiguous.
    """
    if not runs_triton(gate_up):
        return silu_mul_reference(gate_up)
    num_tokens, width = gate_up.shape
    assert width % 2 == 0
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty(num_tokens, width // 2)
    if num_tokens == 0:
        return out
    _silu_mul_kernel[(num_tokens, -(-width // 2 // _COLUMNS))](
        gate_up, out, gate_up.stride(0), width // 2, block=_COLUMNS, num_warps=4,
        **launch_options(gate_up.device),
    )  # fmt: skip
    return out


def sigmoid_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`sigmoid_mul` in plain torch."""
    return x * gate.sigmoid()


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(gate), with each operation rounded to the dtype as in torch.

    Args:
        x: [tokens, n]; any row stride.
        gate: [tokens, n] of x's dtype; any row stride.

    Returns:
        [tokens, n], contiguous.
    """
    if not runs_triton(x):
        return sigmoid_mul_reference(x, gate)
    num_tokens, width = x.shape
    assert gate.shape == x.shape
    assert gate.dtype == x.dtype
    assert x.stride(1) == gate.stride(1) == 1
    out = x.new_empty(num_tokens, width)
    if num_tokens:
        _sigmoid_mul_kernel[(num_tokens, -(-width // _COLUMNS))](
            x, gate, out, x.stride(0), gate.stride(0), width, block=_COLUMNS, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out


@jit
def _silu_mul_kernel(
    gate_up: tensor,
    out: tensor,
    stride: tensor,
    n: tensor,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < n
    gate_row = gate_up + token * stride
    await_predecessor(overlaps)
    release_successor(overlaps)
    gate = tl.load(gate_row + columns, mask=inside)
    up = tl.load(gate_row + n + columns, mask=inside)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * n + columns, product.to(gate.dtype), mask=inside)


@jit
def _sigmoid_mul_kernel(
    x: tensor,
    gate: tensor,
    out: tensor,
    x_stride: tensor,
    gate_stride: tensor,
    n: tensor,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < n
    await_predecessor(overlaps)
    release_successor(overlaps)
    own = tl.load(x + token * x_stride + columns, mask=inside)
    factor = tl.sigmoid(tl.load(gate + token * gate_stride + columns, mask=inside).to(tl.float32))
    product = own.to(tl.float32) * factor.to(own.dtype).to(tl.float32)
    tl.store(out + token * n + columns, product.to(own.dtype), mask=inside)


@jit
def _activation_kernel(
    x: tensor,
    out: tensor,
    x_stride: tensor,
    n: tensor,
    block: constexpr,
    kind: constexpr,
    is_gated: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles `block` columns of one token; `kind` as in `ACTIVATIONS`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < n
    await_predecessor(overlaps)
    release_successor(overlaps)
    gate = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if kind == 0:
        wide = wide * tl.sigmoid(wide)
    elif kind == 1:
        wide = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    elif kind == 2:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        wide = 0.5 * wide * (2.0 * tl.sigmoid(2.0 * inner))  # 1 + tanh(inner)
    else:
        wide = tl.maximum(wide, 0.0)
        if kind == 4:
            wide = wide * wide
    result = wide.to(gate.dtype)
    if is_gated:
        up = tl.load(x + token * x_stride + n + column, mask=inside, other=0.0)
        result = (result.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + token * n + column, result, mask=inside)


@jit
def softplus(x: tensor) -> tensor:
    """log(1 + exp(x)) of float32, with a small relative error for any x, within a kernel."""
    # max(x, 0) + log(1 + e) with e = exp(-|x|), where 1 + e would round away most of a small e.
    # log(1 + e) = 2 artanh(s), whose series converges quickly for s of at most 1/3.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    series = 1.0 / 15.0 * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series
