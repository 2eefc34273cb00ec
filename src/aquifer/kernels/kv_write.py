"""Kernel that writes keys and values of a step's tokens into the KV cache."""

from __future__ import annotations

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit,
    jit_once,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)

_ELEMENTS = 2048  # of keys, and as many of values, that a program copies


def kv_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
) -> None:
    """`kv_write` in plain torch."""
    written = row_first >= 0
    if not written.all():
        row_first, row_second, key, value = (
            part[written] for part in (row_first, row_second, key, value)
        )
    keys[row_first, row_second] = key
    values[row_first, row_second] = value


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
) -> None:
    """Write K and V of each row to `keys` and `values` at [row_first, row_second].

    Args:
        key: [tokens, kv_heads, key_dim], any strides.
        value: [tokens, kv_heads, value_dim], any strides.
        keys: [slots, max_tokens, kv_heads, key_dim] or [blocks, block_size, kv_heads, key_dim];
            last stride 1, others any.
        values: the same with value_dim.
        row_first: [tokens] int64, first index into the KV cache; below 0 for padding, for which
            nothing is written.
        row_second: [tokens] int64, second index.
    """
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    assert keys.shape[2:] == (num_heads, key_dim)
    assert values.shape[2:] == (num_heads, value_dim)
    assert value.shape[:2] == (num_tokens, num_heads)
    assert row_first.shape == row_second.shape == (num_tokens,)
    if not runs_triton(key):
        kv_write_reference(key, value, keys, values, row_first, row_second)
        return
    assert keys.stride(3) == values.stride(3) == 1
    if num_tokens == 0:
        return
    widest = pow2(max(key_dim, value_dim))
    heads = min(pow2(num_heads), max(_ELEMENTS // widest, 1))
    _kv_write_kernel[(num_tokens, -(-num_heads // heads))](
        key, value, keys, values, row_first, row_second,
        *key.stride(), *value.stride(), *keys.stride()[:3], *values.stride()[:3],
        num_heads=num_heads, key_dim=key_dim, key_pow2=pow2(key_dim),
        value_dim=value_dim, value_pow2=pow2(value_dim), heads=heads,
        num_warps=4, **launch_options(key.device),
    )  # fmt: skip


# Strides of the sources depend on the number of tokens, and where they begin on slicing.
@jit_once(
    counts=(
        "key_token_stride",
        "key_head_stride",
        "value_token_stride",
        "value_head_stride",
    ),
    indices=("key", "value", "row_first", "row_second"),
)
def _kv_write_kernel(
    key: tensor,
    value: tensor,
    keys: tensor,
    values: tensor,
    row_first: tensor,
    row_second: tensor,
    key_token_stride: tensor,
    key_head_stride: tensor,
    key_dim_stride: tensor,
    value_token_stride: tensor,
    value_head_stride: tensor,
    value_dim_stride: tensor,
    keys_first_stride: tensor,
    keys_second_stride: tensor,
    keys_head_stride: tensor,
    values_first_stride: tensor,
    values_second_stride: tensor,
    values_head_stride: tensor,
    num_heads: constexpr,
    key_dim: constexpr,
    key_pow2: constexpr,
    value_dim: constexpr,
    value_pow2: constexpr,
    heads: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program copies K and V of up to `heads` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    await_predecessor(overlaps)
    release_successor(overlaps)
    first = tl.load(row_first + token)
    second = tl.load(row_second + token)
    num_written = tl.where(first >= 0, num_heads, 0)  # 0 for padding
    _copy_heads(
        key + token * key_token_stride, key_head_stride, key_dim_stride,
        keys + first * keys_first_stride + second * keys_second_stride, keys_head_stride,
        head, num_written, key_dim, key_pow2,
    )  # fmt: skip
    _copy_heads(
        value + token * value_token_stride, value_head_stride, value_dim_stride,
        values + first * values_first_stride + second * values_second_stride, values_head_stride,
        head, num_written, value_dim, value_pow2,
    )  # fmt: skip


@jit
def _copy_heads(
    source: tensor,
    source_head_stride: tensor,
    source_dim_stride: tensor,
    target: tensor,
    target_head_stride: tensor,
    head: tensor,
    num_heads: tensor,
    dim: constexpr,
    dim_pow2: constexpr,
) -> None:
    lane = tl.arange(0, dim_pow2)[None, :]
    head = head.to(tl.int64)[:, None]
    inside = (head < num_heads) & (lane < dim)
    row = tl.load(source + head * source_head_stride + lane * source_dim_stride, mask=inside)
    tl.store(target + head * target_head_stride + lane, row, mask=inside)
