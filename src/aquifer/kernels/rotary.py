"""Rotary position embedding (RoPE, RoFormer), which rotates the halves of a head as pairs."""

from __future__ import annotations

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit,
    jit_once,
    launch_options,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.norm import rms_norm_reference

_HEADS = 8  # heads of one program
_TOKENS = 16  # tokens of one program of `_rotary_angles_kernel`


def rotary_angles_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles` in plain torch."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotary_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin of the angles by which `rotary` rotates the heads of tokens.

    Args:
        positions: [tokens] int64.
        frequencies: [dim / 2] float32, or [tokens, dim / 2].
        magnitude: the attention factor, multiplied into both.

    Returns:
        cos and sin, each [tokens, dim / 2] float32, contiguous.
    """
    if not runs_triton(positions):
        return rotary_angles_reference(positions, frequencies, magnitude)
    num_tokens, half = len(positions), frequencies.shape[-1]
    assert frequencies.is_contiguous()
    cos, sin = torch.empty(2, num_tokens, half, dtype=torch.float32, device=positions.device)
    if num_tokens:
        _rotary_angles_kernel[(-(-num_tokens // _TOKENS),)](
            positions, frequencies, cos, sin, num_tokens, magnitude,
            half=half, half_pow2=1 << (half - 1).bit_length(), tokens=_TOKENS,
            is_own=frequencies.dim() == 2, num_warps=4, **launch_options(positions.device),
        )  # fmt: skip
    return cos, sin


@jit_once(counts=("num_tokens",), indices=("positions",))
def _rotary_angles_kernel(
    positions: tensor,
    frequencies: tensor,
    cos: tensor,
    sin: tensor,
    num_tokens: tensor,
    magnitude: tensor,
    half: constexpr,
    half_pow2: constexpr,
    tokens: constexpr,
    is_own: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)[:, None]
    lane = tl.arange(0, half_pow2)[None, :]
    inside = (token < num_tokens) & (lane < half)
    place = token * half + lane
    position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.float32)
    if is_own:
        frequency = tl.load(frequencies + place, mask=inside, other=0.0)
    else:
        frequency = tl.load(frequencies + lane, mask=lane < half, other=0.0)
    angle = position * frequency
    tl.store(cos + place, tl.cos(angle) * magnitude, mask=inside)
    tl.store(sin + place, tl.sin(angle) * magnitude, mask=inside)


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


def qk_norm_rope_write_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
    *,
    eps: float,
) -> None:
    """`qk_norm_rope_write` in plain torch."""
    num_heads, dim = query.shape[1:]
    num_kv_heads = keys.shape[2]
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, dim))
    values_from = num_heads + num_kv_heads
    rotated, v = heads[:, :values_from], heads[:, values_from:]
    if q_weight is not None and k_weight is not None:
        q, k = rotated.split((num_heads, num_kv_heads), dim=1)
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
        rotated = torch.cat((q, k), dim=1)
    q, k = rotary(rotated, cos, sin).split((num_heads, num_kv_heads), dim=1)
    query.copy_(q)
    written = row_first >= 0
    if not written.all():
        row_first, row_second, k, v = (part[written] for part in (row_first, row_second, k, v))
    keys[row_first, row_second] = k
    values[row_first, row_second] = v


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
    *,
    eps: float = 0.0,
) -> None:
    """Normalise and rotate queries and keys, and write K and V into the KV cache.

    K and V of row i go to `keys[row_first[i], row_second[i]]`: (slot, position) where KV is
    contiguous, (block, offset in the block) where it is paged.

    Args:
        qkv: [tokens, (heads + 2 kv_heads) * dim], the fused projection; any row stride.
        q_weight: [dim], weight of the norm of query heads; None for no norm.
        k_weight: [dim], weight of the norm of key heads; None exactly if `q_weight` is.
        cos: [tokens, dim / 2] float32, contiguous, see `rotary`.
        sin: [tokens, dim / 2] float32, contiguous.
        query: [tokens, heads, dim], contiguous, overwritten.
        keys: [slots, max_tokens, kv_heads, dim] or [blocks, block_size, kv_heads, dim]; last
            stride 1, others any.
        values: likewise.
        row_first: [tokens] int64, first index into the KV cache; below 0 for padding, for which
            nothing is written there.
        row_second: [tokens] int64, second index.
        eps: added to the mean square of the norm.
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = keys.shape[2]
    assert qkv.shape == (num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    assert keys.shape == values.shape
    assert keys.shape[3] == dim
    assert cos.shape == sin.shape == (num_tokens, dim // 2)
    assert row_first.shape == row_second.shape == (num_tokens,)
    assert (q_weight is None) == (k_weight is None)
    if not runs_triton(qkv):
        qk_norm_rope_write_reference(
            qkv, q_weight, k_weight, cos, sin, query, keys, values, row_first, row_second, eps=eps
        )
        return
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert query.is_contiguous()
    assert qkv.stride(1) == keys.stride(3) == values.stride(3) == 1
    q_blocks, kv_blocks = -(-num_heads // _HEADS), -(-num_kv_heads // _HEADS)
    if num_tokens == 0:
        return
    _qk_norm_rope_write_kernel[(num_tokens, q_blocks + 2 * kv_blocks)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        query,
        keys,
        values,
        row_first,
        row_second,
        qkv.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        half=dim // 2,
        half_pow2=1 << (dim // 2 - 1).bit_length(),
        block_heads=_HEADS,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        has_norm=q_weight is not None,
        num_warps=4,
        **launch_options(qkv.device),
    )


@jit_once(indices=("row_first", "row_second"))
def _qk_norm_rope_write_kernel(
    qkv: tensor,
    q_weight: tensor,
    k_weight: tensor,
    cos: tensor,
    sin: tensor,
    query: tensor,
    keys: tensor,
    values: tensor,
    row_first: tensor,
    row_second: tensor,
    qkv_stride: tensor,
    key_first_stride: tensor,
    key_second_stride: tensor,
    key_head_stride: tensor,
    value_first_stride: tensor,
    value_second_stride: tensor,
    value_head_stride: tensor,
    eps: tensor,
    num_heads: constexpr,
    num_kv_heads: constexpr,
    half: constexpr,
    half_pow2: constexpr,
    block_heads: constexpr,
    q_blocks: constexpr,
    kv_blocks: constexpr,
    has_norm: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles up to `block_heads` heads of one token, all of q, or of k, or of v."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    await_predecessor(overlaps)
    release_successor(overlaps)
    first = tl.load(row_first + token)
    second = tl.load(row_second + token)
    lane = tl.arange(0, half_pow2)[None, :]
    head = tl.arange(0, block_heads)[:, None]
    num_written = tl.where(first >= 0, num_kv_heads, 0)  # KV heads to write; 0 for padding
    source = qkv + token * qkv_stride + lane
    angle = token * half + lane
    if block < q_blocks:
        q_head = head + block * block_heads
        is_q = (q_head < num_heads) & (lane < half)
        q_source = source + q_head * (2 * half)
        q_low, q_high = _rotated(
            q_source, q_weight, cos, sin, angle, lane, is_q, eps, half, has_norm
        )
        q_target = query + (token * num_heads + q_head) * (2 * half) + lane
        tl.store(q_target, q_low, mask=is_q)
        tl.store(q_target + half, q_high, mask=is_q)
    elif block < q_blocks + kv_blocks:
        k_head = head + (block - q_blocks) * block_heads
        is_k = (k_head < num_written) & (lane < half)
        k_source = source + (num_heads + k_head) * (2 * half)
        k_low, k_high = _rotated(
            k_source, k_weight, cos, sin, angle, lane, is_k, eps, half, has_norm
        )
        k_token = keys + (first * key_first_stride + second * key_second_stride)
        k_target = k_token + k_head * key_head_stride + lane
        tl.store(k_target, k_low, mask=is_k)
        tl.store(k_target + half, k_high, mask=is_k)
    else:
        v_head = head + (block - q_blocks - kv_blocks) * block_heads
        is_v = (v_head < num_written) & (lane < half)
        v_source = source + (num_heads + num_kv_heads + v_head) * (2 * half)
        v_token = values + (first * value_first_stride + second * value_second_stride)
        v_target = v_token + v_head * value_head_stride + lane
        tl.store(v_target, tl.load(v_source, mask=is_v), mask=is_v)
        tl.store(v_target + half, tl.load(v_source + half, mask=is_v), mask=is_v)


@jit
def _rotated(
    source: tensor,
    weight: tensor,
    cos: tensor,
    sin: tensor,
    angle: tensor,
    lane: tensor,
    inside: tensor,
    eps: tensor,
    half: constexpr,
    has_norm: constexpr,
) -> tensor:
    """Return both halves of some heads, [heads, half] each, rounded where the reference rounds."""
    # All loads come first, so that they overlap.
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + half, mask=inside, other=0.0)
    dtype = low.dtype
    c = tl.load(cos + angle, mask=lane < half, other=0.0).to(dtype).to(tl.float32)
    s = tl.load(sin + angle, mask=lane < half, other=0.0).to(dtype).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if has_norm:
        weight_a = tl.load(weight + lane, mask=lane < half, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + half + lane, mask=lane < half, other=0.0).to(tl.float32)
        mean_square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half)
        scale = tl.rsqrt(mean_square + eps)[:, None]
        a = (weight_a * (a * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b = (weight_b * (b * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    a_c, a_s = (a * c).to(dtype).to(tl.float32), (a * s).to(dtype).to(tl.float32)
    b_c, b_s = (b * c).to(dtype).to(tl.float32), (b * s).to(dtype).to(tl.float32)
    return (a_c - b_s).to(dtype), (b_c + a_s).to(dtype)
