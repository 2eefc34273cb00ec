"""Rotary position embedding (RoPE, RoFormer), which rotates pairs of dimensions of a head."""

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
from aquifer.kernels.norm import NormWeights, norm_reference

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


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool = False
) -> torch.Tensor:
    """Rotate the first dimensions of each head by its token's angles; the others stay.

    Args:
        x: [tokens, heads, head_dim].
        cos: [tokens, rotated / 2], times the attention factor if the scaling has one.
        sin: [tokens, rotated / 2], likewise.
        is_interleaved: whether a pair is two neighbours; else one of each half of those rotated.

    Returns:
        [tokens, heads, head_dim] of x's dtype.
    """
    num_rotated = 2 * cos.shape[1]
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    part, rest = x[..., :num_rotated], x[..., num_rotated:]
    if is_interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((torch.stack(pair, dim=-1).flatten(-2), rest), dim=-1)
    first, second = part.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def split_heads(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, *, is_grouped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads of queries, keys and values of a fused projection.

    Args:
        qkv: [tokens, (heads + 2 kv_heads) * dim].
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        is_grouped: see `qk_norm_rope_write`.

    Returns:
        [tokens, heads, dim], and twice [tokens, kv_heads, dim].
    """
    if not is_grouped:
        heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v
    groups = qkv.unflatten(1, (num_kv_heads, num_heads // num_kv_heads + 2, -1))
    return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]


def qk_norm_rope_write_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
    *,
    eps: float,
    plus_one: bool = False,
    is_interleaved: bool = False,
    is_grouped: bool = False,
) -> None:
    """`qk_norm_rope_write` in plain torch."""
    q, k, v = split_heads(qkv, query.shape[1], keys.shape[2], is_grouped=is_grouped)
    if q_weight is not None and k_weight is not None:
        q_norm, k_norm = (
            NormWeights(weight, None, eps, plus_one=plus_one) for weight in (q_weight, k_weight)
        )
        q, k = norm_reference(q, q_norm), norm_reference(k, k_norm)
    if cos is not None and sin is not None:
        q, k = (rotary(part, cos, sin, is_interleaved=is_interleaved) for part in (q, k))
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
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
    *,
    eps: float = 0.0,
    plus_one: bool = False,
    is_interleaved: bool = False,
    is_grouped: bool = False,
) -> None:
    """Normalise and rotate queries and keys, and write K and V into the KV cache.

    K and V of row i go to `keys[row_first[i], row_second[i]]`: (slot, position) where KV is
    contiguous, (block, offset in the block) where it is paged.

    Args:
        qkv: [tokens, (heads + 2 kv_heads) * dim], the fused projection; any row stride.
        q_weight: [dim], weight of the norm of query heads; None for no norm.
        k_weight: [dim], weight of the norm of key heads; None exactly if `q_weight` is.
        cos: [tokens, rotated / 2] float32, contiguous, see `rotary`; None for no rotation.
        sin: [tokens, rotated / 2] float32, contiguous; None exactly if `cos` is.
        query: [tokens, heads, dim], contiguous, overwritten.
        keys: [slots, max_tokens, kv_heads, dim] or [blocks, block_size, kv_heads, dim]; last
            stride 1, others any.
        values: likewise.
        row_first: [tokens] int64, first index into the KV cache; below 0 for padding, for which
            nothing is written there.
        row_second: [tokens] int64, second index.
        eps: added to the mean square of the norm.
        plus_one: whether the norm's weights are one more than what is stored.
        is_interleaved: see `rotary`.
        is_grouped: whether the heads of a KV head are together: its queries, its key, its value;
            else all queries come first, then all keys, then all values.
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = keys.shape[2]
    assert qkv.shape == (num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    assert keys.shape == values.shape
    assert keys.shape[3] == dim
    assert cos is None or cos.shape[1] <= dim // 2
    assert row_first.shape == row_second.shape == (num_tokens,)
    assert (q_weight is None) == (k_weight is None)
    assert (cos is None) == (sin is None)
    if not runs_triton(qkv):
        qk_norm_rope_write_reference(
            qkv, q_weight, k_weight, cos, sin, query, keys, values, row_first, row_second, eps=eps,
            plus_one=plus_one, is_interleaved=is_interleaved, is_grouped=is_grouped,
        )  # fmt: skip
        return
    half = 0
    if cos is not None and sin is not None:
        assert cos.shape == sin.shape
        assert len(cos) == num_tokens
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        half = cos.shape[1]
    assert query.is_contiguous()
    assert qkv.stride(1) == keys.stride(3) == values.stride(3) == 1
    q_blocks, kv_blocks = -(-num_heads // _HEADS), -(-num_kv_heads // _HEADS)
    if num_tokens == 0:
        return
    pairs = half or dim // 2  # a program holds pairs of dimensions, rotated or not
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
        dim=dim,
        half=pairs,
        half_pow2=1 << (pairs - 1).bit_length(),
        rest_pow2=1 << (dim - 2 * pairs - 1).bit_length() if dim > 2 * pairs else 0,
        block_heads=_HEADS,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        norm_kind=0 if q_weight is None else 2 if plus_one else 1,
        rotates=cos is not None,
        is_interleaved=is_interleaved,
        is_grouped=is_grouped,
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
    dim: constexpr,
    half: constexpr,
    half_pow2: constexpr,
    rest_pow2: constexpr,
    block_heads: constexpr,
    q_blocks: constexpr,
    kv_blocks: constexpr,
    norm_kind: constexpr,
    rotates: constexpr,
    is_interleaved: constexpr,
    is_grouped: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles up to `block_heads` heads of one token, all of q, or of k, or of v.

    It holds the first `2 * half` dimensions as pairs that rotate together, and the rest apart.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    await_predecessor(overlaps)
    release_successor(overlaps)
    first = tl.load(row_first + token)
    second = tl.load(row_second + token)
    head = tl.arange(0, block_heads)[:, None]
    num_written = tl.where(first >= 0, num_kv_heads, 0)  # KV heads to write; 0 for padding
    source = qkv + token * qkv_stride
    angle = token * half
    group = num_heads // num_kv_heads
    if block < q_blocks:
        q_head = head + block * block_heads
        q_row = q_head
        if is_grouped:
            q_row = q_head // group * (group + 2) + q_head % group
        q_target = query + (token * num_heads + q_head) * dim
        _write_heads(
            source + q_row * dim, q_target, q_head < num_heads, q_weight, cos, sin, angle, eps,
            dim, half, half_pow2, rest_pow2, norm_kind, rotates, is_interleaved,
        )  # fmt: skip
    elif block < q_blocks + kv_blocks:
        k_head = head + (block - q_blocks) * block_heads
        k_row = num_heads + k_head
        if is_grouped:
            k_row = k_head * (group + 2) + group
        k_token = keys + (first * key_first_stride + second * key_second_stride)
        _write_heads(
            source + k_row * dim, k_token + k_head * key_head_stride, k_head < num_written,
            k_weight, cos, sin, angle, eps,
            dim, half, half_pow2, rest_pow2, norm_kind, rotates, is_interleaved,
        )  # fmt: skip
    else:
        v_head = head + (block - q_blocks - kv_blocks) * block_heads
        v_row = num_heads + num_kv_heads + v_head
        if is_grouped:
            v_row = v_head * (group + 2) + group + 1
        v_token = values + (first * value_first_stride + second * value_second_stride)
        _write_heads(
            source + v_row * dim, v_token + v_head * value_head_stride, v_head < num_written,
            k_weight, cos, sin, angle, eps,
            dim, half, half_pow2, rest_pow2, 0, False, False,
        )  # fmt: skip


@jit
def _write_heads(
    source: tensor,
    target: tensor,
    is_head: tensor,
    weight: tensor,
    cos: tensor,
    sin: tensor,
    angle: tensor,
    eps: tensor,
    dim: constexpr,
    half: constexpr,
    half_pow2: constexpr,
    rest_pow2: constexpr,
    norm_kind: constexpr,
    rotates: constexpr,
    is_interleaved: constexpr,
) -> None:
    """Normalise, rotate and store some heads, rounded where the reference rounds.

    Args:
        source: [heads, 1], where each begins.
        target: likewise.
        is_head: [heads, 1].
        norm_kind: 0 for no norm, 1 for RMSNorm, 2 for one with a weight one more than stored.
    """
    pair = tl.arange(0, half_pow2)[None, :]
    if is_interleaved:
        low, high = 2 * pair, 2 * pair + 1
    else:
        low, high = pair, pair + half
    is_pair = pair < half
    inside = is_head & is_pair
    # All loads come first, so that they overlap.
    a_stored = tl.load(source + low, mask=inside, other=0.0)
    b_stored = tl.load(source + high, mask=inside, other=0.0)
    dtype = a_stored.dtype
    a, b = a_stored.to(tl.float32), b_stored.to(tl.float32)
    if rotates:
        c = tl.load(cos + angle + pair, mask=is_pair, other=0.0).to(dtype).to(tl.float32)
        s = tl.load(sin + angle + pair, mask=is_pair, other=0.0).to(dtype).to(tl.float32)
    if rest_pow2 > 0:
        other = 2 * half + tl.arange(0, rest_pow2)[None, :]
        is_other = other < dim
        rest = tl.load(source + other, mask=is_head & is_other, other=0.0).to(tl.float32)
    if norm_kind > 0:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if rest_pow2 > 0:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / dim + eps)[:, None]
        a = _weighed(a * factor, weight + low, is_pair, a_stored, norm_kind)
        b = _weighed(b * factor, weight + high, is_pair, a_stored, norm_kind)
        if rest_pow2 > 0:
            rest = _weighed(rest * factor, weight + other, is_other, a_stored, norm_kind)
    if rotates:
        a_c, a_s = (a * c).to(dtype).to(tl.float32), (a * s).to(dtype).to(tl.float32)
        b_c, b_s = (b * c).to(dtype).to(tl.float32), (b * s).to(dtype).to(tl.float32)
        a, b = a_c - b_s, b_c + a_s
    tl.store(target + low, a.to(dtype), mask=inside)
    tl.store(target + high, b.to(dtype), mask=inside)
    if rest_pow2 > 0:
        tl.store(target + other, rest.to(dtype), mask=is_head & is_other)


@jit
def _weighed(
    wide: tensor, weight: tensor, inside: tensor, stored: tensor, norm_kind: constexpr
) -> tensor:
    """Multiply normalised values by the norm's weight; rounded as torch does to `stored`'s dtype,
    in float32."""
    dtype = stored.dtype
    scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    if norm_kind == 1:
        wide = wide.to(dtype).to(tl.float32)
    else:
        scale += 1.0
    return (wide * scale).to(dtype).to(tl.float32)
