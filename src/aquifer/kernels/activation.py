"""SwiGLU activation between the two matrix products of a feed-forward layer."""

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
