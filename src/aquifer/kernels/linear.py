"""Linear layers for few tokens (GEMV and skinny GEMM), fused with the norm or activation before.

On a GPU such a product is bound by the bandwidth at which its weight is read. cuBLAS, tuned for
larger products, leaves bandwidth unused where the matrix is small. So there are kernels for one
token, which can fuse the norm or the activation before the product, and for several, which can
compute a gated activation of it. They are used for up to `MAX_TILE_TOKENS`, and of small weights
for up to `_MAX_TOKENS`. `best_tile` chooses; benchmarks/gpu/small_kernels.py measures candidates.
On Hopper, `skinny_linear.py` has a kernel for 2 to 16 tokens, and `hopper_linear.py` one for 33 and
more, with large weights.

The kernels overlap with their neighbours, see `_triton.py`. Before they wait, those for one token
load the first tile of the weight into registers, and those for several have the first ones fetched
into the L2 cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from aquifer.kernels import hopper_linear, skinny_linear
from aquifer.kernels._triton import (
    MIN_DOT,
    await_predecessor,
    constexpr,
    count_multiprocessors,
    jit,
    jit_once,
    launch_options,
    pow2,
    prefetch,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.activation import silu_mul
from aquifer.kernels.beside import lane
from aquifer.kernels.norm import _normalised, add_rms_norm, rms_norm

_MAX_VECTORS = 4
_MAX_SMALL_VECTORS, _SMALL_BYTES = 8, 2 << 20
_MAX_TOKENS = 256
"""Tokens up to which small weights have kernels of their own, and are split on a CPU."""

MAX_TILE_TOKENS = 64
"""Products of more tokens are as much compute-bound as memory-bound: those of large weights use
cuBLAS."""

MAX_NORM_COLUMNS = 16384
"""The widest row that a program normalises in registers."""

_WAVE = 128
"""Programs of more than `MAX_TILE_TOKENS` tokens that run at once, one on each of 132 SMs."""

_WAVE_PRODUCTS = 1 << 23
"""A program of so many products takes as long as cuBLAS; measured."""

_TWO_WAVES = range(208, 265)
"""Programs of a gated product that fill two waves on 132 SMs to four fifths and more."""

_GATED_COLUMNS = 4096
"""Up to this many columns, gated products of up to 128 tokens are faster than cuBLAS, and up to
half as many those of more; measured."""

_ROWS_OF_FOUR = (1024, 3072)
"""Columns of a weight of which four rows at once are faster than two, for one token; measured."""

_AHEAD_TILES = 2
"""Tiles of the weight that a program for several tokens has fetched into the L2 cache while it
waits. By measurement, two are faster than one or four (benchmarks/gpu)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a product: [tokens, in] with [out, in]."""

    tokens: int
    out: int
    in_: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Tiling of a product: the tile of the weight that a program reads at once."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1  # pipeline stages in shared memory; for more than one token
    num_splits: int = 1  # programs that share a row's columns (split-K); likewise
    tokens: int = 32  # most tokens that a program multiplies by; likewise


_SUM_TILE = Tile(4, 2048, 4)
"""Tiling of two products that are added, by measurement of Falcon-H1-7B (benchmarks/gpu)."""

_VECTOR_TILES = (
    Tile(2, 1024, 4),
    Tile(1, 1024, 2),
    Tile(4, 512, 4),
    Tile(4, 1024, 8),
    Tile(2, 2048, 4),
    Tile(2, 4096, 8),
)
_MATRIX_TILES = (
    Tile(16, 256, 2, 4),
    Tile(16, 512, 4, 3),
    Tile(32, 128, 4, 5),
    Tile(64, 128, 4, 4),
    Tile(32, 256, 4, 2, 4),
    Tile(32, 256, 4, 2, 8),
    Tile(64, 128, 4, 4, 2),
    Tile(64, 128, 4, 4, 4),
    Tile(64, 128, 4, 3, 8),
)
_PART_TILES = (
    Tile(64, 64, 4, 5, tokens=64),
    Tile(64, 128, 4, 4, tokens=64),
    Tile(64, 128, 4, 4, 2, 64),
    Tile(64, 128, 4, 4, 4, 64),
    Tile(64, 128, 4, 3, tokens=128),
    Tile(128, 64, 8, 4, tokens=128),
)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Compute x @ weight.T + bias.

    Args:
        x: [tokens, in].
        weight: [out, in]; contiguous, or the transpose of one that is, which cuBLAS multiplies.
            [2 out, in] if `gated`, gate before up.
        bias: [out], or [2 out] if `gated`; or None.
        tile: on a GPU, replaces `best_tile`; for benchmarks and tests.
        out_dtype: dtype that sums are rounded to, x's or float32; None for x's. Without a bias.
        gated: whether `silu_mul` of the product is wanted, not the product; rounded likewise.

    Returns:
        [tokens, out], contiguous.
    """
    out_dtype = out_dtype or x.dtype
    is_wider = out_dtype != x.dtype
    assert not is_wider or (out_dtype == torch.float32 and bias is None and not gated)
    if runs_triton(x) and weight.is_contiguous():
        if tile is None and not is_wider:
            if skinny_linear.fits(x, weight, bias, gated=gated):
                return skinny_linear.skinny_linear(x, weight, bias, gated=gated)
            if hopper_linear.fits(x, weight, bias, gated=gated):
                return hopper_linear.hopper_linear(x, weight, bias, gated=gated)
        if tile is None:
            tile = best_tile(Shape(len(x), len(weight), x.shape[1]), gated=gated)
            # Tensor cores do not support float32, nor Triton's interpreter dot of some dtypes.
            if len(x) > 1 and (x.dtype == torch.float32 or not x.is_cuda):
                tile = None
        if tile is not None:
            return _tiled(x, weight, bias, tile, out_dtype, gated=gated)
    if gated:
        return silu_mul(linear(x, weight, bias))
    if x.device.type == "cpu":
        return linear_reference(x.to(out_dtype), weight.to(out_dtype), bias)
    if is_wider:
        return torch.mm(x, weight.T, out_dtype=out_dtype)
    return F.linear(x, weight, bias)


def sum_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    other: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T + y @ other.T for one token, rounded once.

    On a GPU it is one kernel, and the norm after it has one tensor to add, not two.

    Args:
        x: [1, in]; the first tile of its weight comes while the kernel waits.
        weight: [out, in], contiguous.
        y: [1, other_in].
        other: [out, other_in], contiguous.
        tile: replaces the one that was chosen by measurement; for benchmarks and tests.

    Returns:
        [1, out], contiguous.
    """
    assert len(x) == len(y) == 1
    assert len(weight) == len(other)
    if runs_triton(x):
        return _vector(x, weight, None, tile or _SUM_TILE, x.dtype, (y, other), gated=False)
    return (linear(x, weight, None).float() + linear(y, other, None).float()).to(x.dtype)


def norm_linear(
    delta: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream, normalise the sum, and multiply by a weight.

    Rounded like `add_rms_norm` or `rms_norm`, followed by `linear`, and by `silu_mul` if `gated`.

    Args:
        delta: [tokens, in], the last layer's output; None to add nothing.
        residual: [tokens, in], the residual stream. Unless `delta` is None it may be overwritten:
            use the returned one.
        norm_weight: [in].
        eps: added to the mean square.
        weight: [out, in], contiguous; [2 out, in] if `gated`, gate before up.
        bias: [out], or [2 out] if `gated`; or None.
        gated: whether the gated activation of the product is wanted, not the product.

    Returns:
        (rms_norm(residual + delta) @ weight.T + bias or its activation, [tokens, out] and
        contiguous; residual + delta, [tokens, in]).
    """
    num_tokens, num_in = residual.shape
    if num_tokens != 1 or num_in > MAX_NORM_COLUMNS or not runs_triton(residual):
        if delta is None:
            normed = rms_norm(residual, norm_weight, eps)
        else:
            normed = add_rms_norm(delta, residual, norm_weight, eps)
        return linear(normed, weight, bias, gated=gated), residual
    num_out = len(weight) // (2 if gated else 1)
    assert weight.shape == ((2 if gated else 1) * num_out, num_in)
    assert weight.is_contiguous()
    assert residual.dtype == norm_weight.dtype == weight.dtype
    assert residual.stride(1) == 1
    out = residual.new_empty(1, num_out)
    # The sum goes to a new tensor: while one program stores it, others still read `residual`.
    total = residual
    if delta is not None:
        assert delta.shape == residual.shape
        assert delta.dtype == residual.dtype
        assert delta.stride(1) == 1
        total = residual.new_empty(1, num_in)
    tile = norm_tile(num_in, gated=gated)
    num_programs = norm_programs(num_out, tile, count_multiprocessors(residual.device))
    _norm_vector_kernel[(num_programs,)](
        delta, residual, norm_weight, total, weight, bias, out, eps, num_out,
        num_in=num_in, rows=tile.rows, columns=tile.columns, gated=gated,
        has_delta=delta is not None, has_bias=bias is not None, num_warps=tile.num_warps,
        **launch_options(residual.device),
    )  # fmt: skip
    return out, total


def silu_linear(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute (silu(gate) * up) @ weight.T + bias, rounded like `silu_mul` followed by `linear`.

    Args:
        gate_up: [tokens, 2 in], gate before up; any row stride.
        weight: [out, in], contiguous.
        bias: [out] or None.

    Returns:
        [tokens, out], contiguous.
    """
    if len(gate_up) != 1 or not runs_triton(gate_up):
        return linear(silu_mul(gate_up), weight, bias)
    num_out, num_in = weight.shape
    tile = gated_tile(num_out, num_in, count_multiprocessors(gate_up.device))
    return _vector(gate_up, weight, bias, tile, gate_up.dtype, gated=True)


def best_tile(shape: Shape, *, gated: bool = False) -> Tile | None:
    """Return the tile that `linear` uses on a GPU; None for cuBLAS.

    Chosen by measurement on an H200 (benchmarks/gpu/small_kernels.json). For one token this tile
    was the best or within 8 % of it for every shape, and cuBLAS was never ahead by more than 2 %.
    For up to 32, the tile of 64 rows was the best or within 4 % of it for every shape, cuBLAS
    included, with columns split where rows alone are too few to occupy the device. For more, whole
    layers of models of 0.5 to 8 billion parameters were compared with cuBLAS (benchmarks/gpu).

    Args:
        shape: of the product; a gated one has the rows of both, gate and up.
        gated: whether its activation is wanted.
    """
    if shape.tokens == 1:
        if gated:
            return None
        if shape.in_ > 2 * shape.out:  # as in the last product of an MLP
            tile = Tile(2, 4096, 8) if shape.out <= 2048 else Tile(2, 2048, 4)
            return replace(tile, columns=min(pow2(shape.in_, MIN_DOT), tile.columns))
        rows = 4 if shape.in_ in _ROWS_OF_FOUR else 2
        return Tile(rows, min(pow2(shape.in_, MIN_DOT), 1024), 4)
    if shape.tokens > MAX_TILE_TOKENS:
        return _one_wave(shape, gated=gated)
    tokens = 32 if shape.tokens <= 32 else 64
    if gated and tokens > 32:
        return Tile(64, 64, 4, 5, tokens=tokens)
    num_splits = 1
    if shape.out <= 4096 and shape.in_ >= shape.out:
        num_splits = 4 if shape.out < 2048 else 2
    # Where rows are few, deeper pipelines make up for few programs.
    num_stages = 5 if 2048 <= shape.out <= 8192 and tokens == 32 else 4
    return Tile(64, 128, 4, num_stages, min(num_splits, -(-shape.in_ // 128)), tokens)


def _one_wave(shape: Shape, *, gated: bool) -> Tile | None:
    """A tile with which all programs run at once, each for a short time; None if there is none."""
    if shape.tokens > _MAX_TOKENS:
        return None
    if gated:
        num_parts = -(-shape.tokens // 128)
        if shape.in_ * num_parts > _GATED_COLUMNS:
            return None
        for tile in (Tile(64, 128, 4, 3, tokens=128), Tile(128, 64, 8, 4, tokens=128)):
            if -(-shape.out // tile.rows) * num_parts <= _WAVE:
                return tile
        has_two_waves = num_parts == 1 and -(-shape.out // tile.rows) in _TWO_WAVES
        return tile if has_two_waves else None
    num_tiles = -(-shape.out // 64)
    for tokens in (64, 128):
        room = _WAVE // (num_tiles * -(-shape.tokens // tokens))
        if room:
            num_splits = min(1 << (room.bit_length() - 1), 4, max(shape.in_ // 512, 1))
            num_products = 64 * tokens * -(-shape.in_ // num_splits)
            fits = num_products < _WAVE_PRODUCTS
            return Tile(64, 128, 4, 4 if tokens == 64 else 3, num_splits, tokens) if fits else None
    return None


def norm_tile(num_in: int, *, gated: bool = False) -> Tile:
    """Tile of whole rows, so that the norm stays in registers: 16 KiB at 16 bits, or one row.

    With a gate, there is one of the gate's rows and one of those that these multiply. Together they
    are as large for long rows, and half as large for others.
    """
    columns = pow2(num_in, MIN_DOT)
    rows = min(max(8192 // columns, 1), 16)
    num_warps = 4 if columns < 4096 else min(rows * columns // 1024, 16)
    return Tile(max(rows // 4, 1) if gated else rows, columns, num_warps)


def norm_programs(num_out: int, tile: Tile, multiprocessors: int) -> int:
    """Number of programs: all run at once, with tiles divided as equally as possible.

    Each program normalises the row, so there are few: 1024 threads per SM.
    """
    num_tiles = -(-num_out // tile.rows)
    at_once = max(32 // tile.num_warps, 1) * multiprocessors
    return -(-num_tiles // -(-num_tiles // at_once))


def gated_tile(num_out: int, num_in: int, multiprocessors: int) -> Tile:
    """Tile of four rows: each program computes all activations, so fewer programs waste less.

    Where that leaves less than six programs per SM, each reads more at once.
    """
    is_short = num_out < 4 * 6 * multiprocessors
    columns = 2048 if is_short and num_in % 2048 == 0 else min(pow2(num_in, MIN_DOT), 1024)
    return Tile(4, columns, 4 if columns == 2048 else 8)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` in plain torch, arranged for a CPU.

    In float32 on a CPU, one product of few rows leaves most cores idle, or is bound by one core's
    memory bandwidth. Split into groups of weight rows it becomes a batched product, one group per
    core; measured on two cores, that is 1.2 times as fast for 32 to 64 tokens, and 2.7 times for
    one. For very few tokens the weight is the left factor, and is then read at full bandwidth. On
    one thread that pays for a few tokens more if the weight is small: a step of 8 tokens of a model
    of 3 million parameters takes a tenth less time.
    """
    num_tokens, num_rows = len(x), len(weight)
    is_small = weight.nbytes <= _SMALL_BYTES and torch.get_num_threads() == 1
    groups = _groups(num_rows) if x.dtype == torch.float32 and num_tokens <= _MAX_TOKENS else 1
    if groups == 1:
        return F.linear(x, weight, bias)
    parts = weight.view(groups, num_rows // groups, -1)  # [groups, out / groups, in]
    spread = x.expand(groups, *x.shape)  # [groups, tokens, in]
    if num_tokens <= (_MAX_SMALL_VECTORS if is_small else _MAX_VECTORS):
        product = torch.bmm(parts, spread.transpose(1, 2)).view(num_rows, num_tokens).t()
    else:
        product = torch.bmm(spread, parts.transpose(1, 2)).transpose(0, 1).flatten(1)
    if bias is not None:
        product = product + bias
    return product.contiguous()


def _groups(num_rows: int) -> int:
    """Number of equal groups of rows, at least one per thread; 1 if they do not divide."""
    groups = 4
    while groups < torch.get_num_threads():
        groups *= 2
    return groups if num_rows % groups == 0 else 1


def _tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    out_dtype: torch.dtype,
    *,
    gated: bool,
) -> torch.Tensor:
    """Run the kernel for one token, or the one for several."""
    num_tokens, num_in = x.shape
    if num_tokens == 1:
        assert not gated
        return _vector(x, weight, bias, tile, out_dtype, gated=False)
    num_out = len(weight) // (2 if gated else 1)
    assert weight.shape == ((2 if gated else 1) * num_out, num_in)
    assert not gated or tile.rows % 16 == 0
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert x.dtype == weight.dtype
    out = x.new_empty(num_tokens, num_out, dtype=out_dtype)
    if num_tokens == 0:
        return out
    tokens = min(pow2(num_tokens, MIN_DOT), tile.tokens)
    num_tiles, num_parts = -(-len(weight) // tile.rows), -(-num_tokens // tokens)
    partials = counters = None
    if tile.num_splits > 1:
        partials = x.new_empty(
            tile.num_splits * num_tiles * num_parts * tile.rows * tokens, dtype=torch.float32
        )
        counters = _atomic_counters(x.device)[lane()]
        assert num_tiles * num_parts <= len(counters), f"{num_out} rows are too many for {tile}"
    _matrix_kernel[(num_tiles, tile.num_splits, num_parts)](
        x, weight, bias, out, partials, counters, num_tokens, num_out, num_in, x.stride(0),
        tokens=tokens, rows=tile.rows, columns=tile.columns, splits=tile.num_splits,
        ahead_columns=_AHEAD_TILES * tile.columns, gated=gated, has_bias=bias is not None,
        even=num_in % tile.columns == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(x.device),
    )  # fmt: skip
    return out


@functools.lru_cache
def _atomic_counters(device: torch.device) -> torch.Tensor:
    """Atomic counters of the programs that have finished, [2, n]; zero between kernels.

    The last program to count resets its counter. Kernels of one device use them one after the
    other, those of each of two branches (`beside.py`) a row of their own. CUDA graphs refer to the
    tensor, so it is never freed.
    """
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "run a product once before it is captured"
    return torch.zeros(2, 4096, dtype=torch.int32, device=device)


def _vector(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    out_dtype: torch.dtype,
    added: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    gated: bool,
) -> torch.Tensor:
    """Run the kernel for one token.

    Args:
        x: [1, in].
        weight: [out, in].
        bias: [out] or None.
        tile: the tiling.
        out_dtype: dtype of the result.
        added: input and weight of a second product, which is added.
        gated: x is [1, 2 in], and the activation is fused.
    """
    num_out, num_in = weight.shape
    assert x.shape == (1, 2 * num_in if gated else num_in)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert x.dtype == weight.dtype
    y, other = (None, None) if added is None else added
    num_other = 0
    if y is not None and other is not None:
        num_other = y.shape[1]
        assert other.shape == (num_out, num_other)
        assert other.is_contiguous()
        assert y.stride(1) == 1
        assert x.dtype == y.dtype == other.dtype
    out = x.new_empty(1, num_out, dtype=out_dtype)
    _vector_kernel[(-(-num_out // tile.rows),)](
        x, weight, y, other, bias, out, num_out,
        num_in=num_in, num_other=num_other, rows=tile.rows, columns=tile.columns, gated=gated,
        has_bias=bias is not None,
        num_warps=tile.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out


@jit
def _vector_kernel(
    x: tensor,
    weight: tensor,
    y: tensor,
    other: tensor,
    bias: tensor,
    out: tensor,
    num_out: tensor,
    num_in: constexpr,
    num_other: constexpr,
    rows: constexpr,
    columns: constexpr,
    gated: constexpr,
    has_bias: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program handles `rows` rows of the weight, and prefetches one tile."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    # Two dimensions from the start: the compiler then assigns the same columns of both factors to
    # a thread, and nothing goes through shared memory.
    column = tl.arange(0, columns)[None, :]
    inside = row < num_out
    weight_rows = weight + row.to(tl.int64)[:, None] * num_in
    w = _weight_tile(weight_rows, column, inside, num_in, columns)
    await_predecessor(overlaps)
    release_successor(overlaps)
    v = _input_tile(x, column, num_in, gated)
    sums = tl.zeros([rows, columns], tl.float32)
    for start in range(columns, num_in, columns):
        next_w = _weight_tile(weight_rows, start + column, inside, num_in, columns)
        sums += w.to(tl.float32) * v
        w = next_w
        v = _input_tile(x, start + column, num_in, gated)
    if num_other > 0:
        other_rows = other + row.to(tl.int64)[:, None] * num_other
        for start in range(0, num_other, columns):
            next_w = _weight_tile(other_rows, start + column, inside, num_other, columns)
            sums += w.to(tl.float32) * v
            w = next_w
            v = _input_tile(y, start + column, num_other, False)
    sums += w.to(tl.float32) * v
    total = tl.sum(sums, axis=1)
    if has_bias:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=inside)


@jit
def _weight_tile(
    weight_rows: tensor, place: tensor, inside: tensor, num_in: constexpr, columns: constexpr
) -> tensor:
    """Load [rows, columns] of the weight, which is read once: it should be evicted first."""
    mask = inside[:, None]
    if num_in % columns != 0:
        mask = mask & (place < num_in)
    return tl.load(weight_rows + place, mask=mask, other=0.0, eviction_policy="evict_first")


@jit
def _input_tile(x: tensor, place: tensor, num_in: constexpr, gated: constexpr) -> tensor:
    """Load [1, columns] float32 of x, or of the activation of its halves, rounded as `silu_mul`."""
    within = place < num_in
    v = tl.load(x + place, mask=within, other=0.0)
    if gated:
        v = _activated(v, tl.load(x + num_in + place, mask=within, other=0.0))
    return v.to(tl.float32)


@jit
def _activated(gate: tensor, up: tensor) -> tensor:
    """silu(gate) * up, rounded as `silu_mul`."""
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@jit
def _norm_vector_kernel(
    delta: tensor,
    residual: tensor,
    norm_weight: tensor,
    total: tensor,
    weight: tensor,
    bias: tensor,
    out: tensor,
    eps: tensor,
    num_out: tensor,
    num_in: constexpr,
    rows: constexpr,
    columns: constexpr,
    gated: constexpr,
    has_delta: constexpr,
    has_bias: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program normalises the row, then handles every `num_programs`th tile of the weight."""
    first = tl.program_id(0) * rows
    step = tl.num_programs(0) * rows
    column = tl.arange(0, columns)
    within = column < num_in
    row = first + tl.arange(0, rows)
    weight_rows = weight + row.to(tl.int64)[:, None] * num_in
    w = _weight_tile(weight_rows, column[None, :], row < num_out, num_in, columns)
    if gated:  # the rows that those of the gate multiply
        up_rows = weight + (row.to(tl.int64) + num_out)[:, None] * num_in
        u = _weight_tile(up_rows, column[None, :], row < num_out, num_in, columns)
    scales = tl.load(norm_weight + column, mask=within, other=0.0)
    await_predecessor(overlaps)
    release_successor(overlaps)
    own = tl.load(residual + column, mask=within, other=0.0)
    if has_delta:
        added = tl.load(delta + column, mask=within, other=0.0)
        own = (added.to(tl.float32) + own.to(tl.float32)).to(added.dtype)
        if first == 0:
            tl.store(total + column, own, mask=within)
    v = _normalised(own, scales, num_in, eps).to(tl.float32)[None, :]
    for start in range(first, num_out, step):
        next_row = start + step + tl.arange(0, rows)
        weight_rows = weight + next_row.to(tl.int64)[:, None] * num_in
        next_w = _weight_tile(weight_rows, column[None, :], next_row < num_out, num_in, columns)
        if gated:
            up_rows = weight + (next_row.to(tl.int64) + num_out)[:, None] * num_in
            next_u = _weight_tile(up_rows, column[None, :], next_row < num_out, num_in, columns)
        row = start + tl.arange(0, rows)
        inside = row < num_out
        sums = tl.sum(w.to(tl.float32) * v, axis=1)
        if has_bias:
            sums += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        sums = sums.to(out.dtype.element_ty)
        if gated:
            ups = tl.sum(u.to(tl.float32) * v, axis=1)
            if has_bias:
                ups += tl.load(bias + num_out + row, mask=inside, other=0.0).to(tl.float32)
            sums = _activated(sums, ups.to(sums.dtype))
            u = next_u
        tl.store(out + row, sums, mask=inside)
        w = next_w


@jit_once(counts=("num_tokens",))
def _matrix_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    out: tensor,
    partials: tensor,
    tickets: tensor,
    num_tokens: tensor,
    num_out: tensor,
    num_in: tensor,
    x_stride: tensor,
    tokens: constexpr,
    rows: constexpr,
    columns: constexpr,
    splits: constexpr,
    ahead_columns: constexpr,
    gated: constexpr,
    has_bias: constexpr,
    even: constexpr,
    overlaps: constexpr,
) -> None:
    """The weight is the left factor: its rows fill the tensor cores, tokens are the short side.

    If gated, half of a program's rows are the gate's, eight and eight in turn with those that they
    multiply: so a thread has the sums of both, as tensor cores return them.

    If several programs share rows (split-K), the last to finish, as told by an atomic counter
    (`tickets`), adds up the partial sums of all, always in the same order.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    num_rows = num_out
    if gated:
        num_rows = 2 * num_out
        is_up = row % 16 // 8
        row = row // 16 * 8 + row % 8
        # A number behind the last stands for a row that there is none of.
        row = tl.where(row < num_out, row + is_up * num_out, num_rows)
    token = tl.program_id(2) * tokens + tl.arange(0, tokens)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None]
    present = (token < num_tokens)[None, :]
    weight_tile = weight + row.to(tl.int64)[:, None] * num_in + column[None, :]
    x_tile = x + token[None, :] * x_stride + column[:, None]
    # This program's columns are [begin, end).
    share = tl.cdiv(num_in, splits * columns) * columns
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, num_in)
    if overlaps:
        _fetch_ahead(weight, row, num_rows, num_in, begin, end, ahead_columns)
    await_predecessor(overlaps)
    if not gated:
        release_successor(overlaps)
    sums = tl.zeros([rows, tokens], tl.float32)
    for start in range(begin, end, columns):
        if even:
            w = tl.load(weight_tile + start, mask=inside, other=0.0)
            v = tl.load(x_tile + start, mask=present, other=0.0)
        else:
            within = start + column < num_in
            w = tl.load(weight_tile + start, mask=inside & within[None, :], other=0.0)
            v = tl.load(x_tile + start, mask=present & within[:, None], other=0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    if gated:  # its weight is large, and the next product would take its place
        release_successor(overlaps)
    if splits == 1:
        _store_tile(out, bias, sums, row, token, num_out, num_tokens, gated, has_bias)
    else:
        # [splits, tiles of tokens, rows of all programs, tokens]
        own_tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        place = own_tile * rows * tokens
        place += tl.arange(0, rows)[:, None] * tokens + tl.arange(0, tokens)[None, :]
        split_size = tl.num_programs(2) * tl.num_programs(0) * rows * tokens
        tl.store(partials + tl.program_id(1) * split_size + place, sums)
        tl.debug_barrier()  # all threads have stored before one increments the atomic counter
        ticket = tl.atomic_add(tickets + own_tile, 1, sem="acq_rel")
        if ticket == splits - 1:
            sums = tl.zeros([rows, tokens], tl.float32)
            for split in tl.static_range(splits):
                # Bypasses the L1 cache, which may be older than the other programs' stores.
                sums += tl.load(partials + split * split_size + place, cache_modifier=".cg")
            tl.store(tickets + own_tile, 0)
            _store_tile(out, bias, sums, row, token, num_out, num_tokens, gated, has_bias)


@jit
def _fetch_ahead(
    weight: tensor,
    row: tensor,
    num_out: tensor,
    num_in: tensor,
    begin: tensor,
    end: tensor,
    num_columns: constexpr,
) -> None:
    """Begin to fetch the first of a program's columns [begin, end) into the L2 cache."""
    line_columns: constexpr = 128 * 8 // weight.dtype.element_ty.primitive_bitwidth
    num_lines: constexpr = max(num_columns // line_columns, 1)
    column = begin + tl.arange(0, num_lines) * line_columns
    prefetch(
        weight + row.to(tl.int64)[:, None] * num_in + column[None, :],
        (row < num_out)[:, None] & (column < end)[None, :],
    )


@jit
def _store_tile(
    out: tensor,
    bias: tensor,
    sums: tensor,
    row: tensor,
    token: tensor,
    num_out: tensor,
    num_tokens: tensor,
    gated: constexpr,
    has_bias: constexpr,
) -> None:
    if has_bias:
        num_rows = 2 * num_out if gated else num_out
        sums += tl.load(bias + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    results = sums.to(out.dtype.element_ty)
    if gated:
        half: constexpr = sums.shape[0] // 2
        turns = tl.reshape(results, (half // 8, 2, 8, sums.shape[1]))
        gates, ups = tl.split(tl.permute(turns, (0, 2, 3, 1)))
        results = tl.reshape(_activated(gates, ups), (half, sums.shape[1]))
        row = tl.program_id(0) * half + tl.arange(0, half)
    tl.store(
        out + token[None, :] * num_out + row[:, None],
        results,
        mask=(row < num_out)[:, None] & (token < num_tokens)[None, :],
    )


def tiles(shape: Shape) -> tuple[Tile, ...]:
    """Return the tiles that are worth measuring for a shape, besides cuBLAS."""
    if shape.tokens == 1:
        return _VECTOR_TILES
    if shape.tokens > _MAX_TOKENS:
        return ()
    # Splitting columns pays only where rows alone are too few to occupy the device.
    is_short = shape.out <= 8192
    candidates = _MATRIX_TILES if shape.tokens <= 32 else _PART_TILES
    return tuple(tile for tile in candidates if is_short or tile.num_splits == 1)
