"""Around attention over latent KV: what is written to the cache, and the products of each head."""

from __future__ import annotations

import torch

from aquifer.kernels._triton import (
    MIN_DOT,
    await_predecessor,
    constexpr,
    count_multiprocessors,
    jit,
    jit_once,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.norm import rms_norm_reference
from aquifer.kernels.rotary import rotary

MAX_TILE_TOKENS = 64
"""Products of more tokens use cuBLAS."""

_HEADS = 16  # heads of one program of `_latent_rope_write_kernel`


def latent_rope_write_reference(
    query: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated: torch.Tensor,
    keys: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
    *,
    eps: float,
    is_interleaved: bool,
) -> None:
    """`latent_rope_write` in plain torch."""
    latent, key = row.split((len(weight), row.shape[1] - len(weight)), dim=1)
    wide = rotary(query.float(), cos, sin, is_interleaved=is_interleaved)
    rotated.copy_(wide)
    key = rotary(key.float().unsqueeze(1), cos, sin, is_interleaved=is_interleaved)[:, 0]
    whole = torch.cat((rms_norm_reference(latent, weight, eps), key.to(row.dtype)), dim=1)
    written = row_first >= 0
    if not written.all():
        row_first, row_second, whole = (part[written] for part in (row_first, row_second, whole))
    keys[row_first, row_second, 0] = whole


def latent_rope_write(
    query: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated: torch.Tensor,
    keys: torch.Tensor,
    row_first: torch.Tensor,
    row_second: torch.Tensor,
    *,
    eps: float,
    is_interleaved: bool,
) -> None:
    """Write the tokens' rows into the KV cache, and rotate their queries.

    A row is the latent, normalised (RMSNorm), and the key that all heads share, rotated. Rotations
    are computed in float32 and rounded once. Row i goes to `keys[row_first[i], row_second[i], 0]`:
    (slot, position) where KV is contiguous, (block, offset in the block) where it is paged.

    Args:
        query: [tokens, heads, rope_dim], the part of queries that is rotated; last stride 1.
        row: [tokens, latent + rope_dim], the projection; last stride 1.
        weight: [latent], weight of the norm.
        cos: [tokens, rope_dim / 2] float32, contiguous, see `rotary`.
        sin: [tokens, rope_dim / 2] float32, contiguous.
        rotated: [tokens, heads, rope_dim], overwritten with the rotated queries; last stride 1. It
            may be `query` itself.
        keys: [slots, max_tokens, 1, latent + rope_dim] or [blocks, block_size, 1, ...]; last stride
            1, others any.
        row_first: [tokens] int64, first index into the KV cache; below 0 for padding, for which
            nothing is written there.
        row_second: [tokens] int64, second index.
        eps: added to the mean square of the norm.
        is_interleaved: see `rotary`.
    """
    num_tokens, num_heads, rope_dim = query.shape
    latent_dim = len(weight)
    assert row.shape == (num_tokens, latent_dim + rope_dim)
    assert rotated.shape == query.shape
    assert keys.shape[2:] == (1, latent_dim + rope_dim)
    assert cos.shape == sin.shape == (num_tokens, rope_dim // 2)
    assert row_first.shape == row_second.shape == (num_tokens,)
    if not runs_triton(query):
        latent_rope_write_reference(
            query, row, weight, cos, sin, rotated, keys, row_first, row_second, eps=eps,
            is_interleaved=is_interleaved,
        )  # fmt: skip
        return
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert all(t.stride(-1) == 1 for t in (query, row, rotated, keys))
    if num_tokens == 0:
        return
    _latent_rope_write_kernel[(num_tokens, 1 + -(-num_heads // _HEADS))](
        query, row, weight, cos, sin, rotated, keys, row_first, row_second,
        *query.stride()[:2], row.stride(0), *rotated.stride()[:2], *keys.stride()[:2], eps,
        num_heads=num_heads, block_heads=_HEADS, latent_dim=latent_dim,
        latent_pow2=pow2(latent_dim), half=rope_dim // 2, half_pow2=pow2(rope_dim // 2),
        is_interleaved=is_interleaved, num_warps=4, **launch_options(query.device),
    )  # fmt: skip


@jit_once(indices=("row_first", "row_second"))
def _latent_rope_write_kernel(
    query: tensor,
    row: tensor,
    weight: tensor,
    cos: tensor,
    sin: tensor,
    rotated: tensor,
    keys: tensor,
    row_first: tensor,
    row_second: tensor,
    query_stride: tensor,
    query_head_stride: tensor,
    row_stride: tensor,
    rotated_stride: tensor,
    rotated_head_stride: tensor,
    key_first_stride: tensor,
    key_second_stride: tensor,
    eps: tensor,
    num_heads: constexpr,
    block_heads: constexpr,
    latent_dim: constexpr,
    latent_pow2: constexpr,
    half: constexpr,
    half_pow2: constexpr,
    is_interleaved: constexpr,
    overlaps: constexpr,
) -> None:
    """The first program of a token writes its row, the others rotate up to `block_heads` heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    await_predecessor(overlaps)
    release_successor(overlaps)
    if block == 0:
        first = tl.load(row_first + token)
        second = tl.load(row_second + token)
        if first >= 0:
            source = row + token * row_stride
            target = keys + (first * key_first_stride + second * key_second_stride)
            dim = tl.arange(0, latent_pow2)
            inside = dim < latent_dim
            stored = tl.load(source + dim, mask=inside, other=0.0)
            scale = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
            wide = stored.to(tl.float32)
            wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / latent_dim + eps)
            wide = wide.to(stored.dtype).to(tl.float32) * scale
            tl.store(target + dim, wide.to(stored.dtype), mask=inside)
            # One row of heads: the key that all heads share.
            one = tl.arange(0, 1)[:, None]
            _rotate(
                source + latent_dim + one, target + latent_dim + one, one < 1, cos, sin,
                token * half, half, half_pow2, is_interleaved,
            )  # fmt: skip
    else:
        head = ((block - 1) * block_heads + tl.arange(0, block_heads))[:, None]
        _rotate(
            query + token * query_stride + head * query_head_stride,
            rotated + token * rotated_stride + head * rotated_head_stride,
            head < num_heads, cos, sin, token * half, half, half_pow2, is_interleaved,
        )  # fmt: skip


@jit
def _rotate(
    source: tensor,
    target: tensor,
    is_head: tensor,
    cos: tensor,
    sin: tensor,
    angle: tensor,
    half: constexpr,
    half_pow2: constexpr,
    is_interleaved: constexpr,
) -> None:
    """Rotate heads that begin at `source` [heads, 1], and store them at `target` [heads, 1]."""
    pair = tl.arange(0, half_pow2)[None, :]
    if is_interleaved:
        low, high = 2 * pair, 2 * pair + 1
    else:
        low, high = pair, pair + half
    is_pair = pair < half
    inside = is_head & is_pair
    stored = tl.load(source + low, mask=inside, other=0.0)
    a = stored.to(tl.float32)
    b = tl.load(source + high, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + angle + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + angle + pair, mask=is_pair, other=0.0)
    tl.store(target + low, (a * c - b * s).to(stored.dtype), mask=inside)
    tl.store(target + high, (b * c + a * s).to(stored.dtype), mask=inside)


def head_products_reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`head_products` in plain torch."""
    out.copy_(torch.bmm(x.transpose(0, 1), weight).transpose(0, 1))


def head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply each head of each token by the head's own matrix.

    Args:
        x: [tokens, heads, n]; last stride 1.
        weight: [heads, n, m]; one of the last two strides is 1.
        out: [tokens, heads, m], overwritten; last stride 1.
    """
    num_tokens, num_heads, n = x.shape
    m = weight.shape[2]
    assert weight.shape == (num_heads, n, m)
    assert out.shape == (num_tokens, num_heads, m)
    assert x.dtype == weight.dtype == out.dtype
    if not runs_triton(x):
        head_products_reference(x, weight, out)
        return
    assert x.stride(2) == out.stride(2) == 1
    assert 1 in weight.stride()[1:]
    if num_tokens == 0:
        return
    if num_tokens > MAX_TILE_TOKENS:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return
    # In float32, which tensor cores do not multiply, longer products spill registers.
    block_n = min(pow2(n, MIN_DOT), 16 if x.dtype == torch.float32 else 128)
    block_m = min(pow2(m, MIN_DOT), 64)
    while block_m > MIN_DOT and num_heads * -(-m // block_m) < count_multiprocessors(x.device):
        block_m //= 2
    _head_products_kernel[(-(-m // block_m), num_heads)](
        x, weight, out, num_tokens, *x.stride()[:2], *weight.stride(), *out.stride()[:2],
        n=n, m=m, tokens=pow2(num_tokens, MIN_DOT), block_n=block_n, block_m=block_m,
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip


@jit_once(counts=("num_tokens",))
def _head_products_kernel(
    x: tensor,
    weight: tensor,
    out: tensor,
    num_tokens: tensor,
    x_stride: tensor,
    x_head_stride: tensor,
    weight_head_stride: tensor,
    weight_n_stride: tensor,
    weight_m_stride: tensor,
    out_stride: tensor,
    out_head_stride: tensor,
    n: constexpr,
    m: constexpr,
    tokens: constexpr,
    block_n: constexpr,
    block_m: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles all tokens of one head, and `block_m` columns of its matrix. It prefetches
    one tile of the matrix, the first one before it waits."""
    column = tl.program_id(0) * block_m + tl.arange(0, block_m)[None, :]
    head = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, tokens)[:, None]
    inner = tl.arange(0, block_n)
    columns = weight + head * weight_head_stride + column * weight_m_stride
    x_rows = x + token.to(tl.int64) * x_stride + head * x_head_stride
    w = _matrix_tile(columns, inner[:, None], column, weight_n_stride, n, m)
    await_predecessor(overlaps)
    release_successor(overlaps)
    acc = tl.zeros([tokens, block_m], tl.float32)
    for start in range(0, n, block_n):
        place = start + inner[None, :]
        v = tl.load(x_rows + place, mask=(token < num_tokens) & (place < n), other=0.0)
        next_place = start + block_n + inner[:, None]
        next_w = _matrix_tile(columns, next_place, column, weight_n_stride, n, m)
        acc = tl.dot(v, w, acc, input_precision="ieee")
        w = next_w
    tl.store(
        out + token.to(tl.int64) * out_stride + head * out_head_stride + column,
        acc.to(out.dtype.element_ty),
        mask=(token < num_tokens) & (column < m),
    )


@jit
def _matrix_tile(
    columns: tensor, place: tensor, column: tensor, n_stride: tensor, n: constexpr, m: constexpr
) -> tensor:
    """Load [block_n, block_m] of a head's matrix, zeros beyond its end."""
    return tl.load(columns + place * n_stride, mask=(place < n) & (column < m), other=0.0)
