"""Matrix products of few tokens with large weights.

On a GPU such a product is as fast as its weight can be read. cuBLAS, made for larger ones, leaves
bandwidth unused where the matrix is small; so for up to `MAX_TILE_TOKENS` tokens there are two
kernels of our own, and `tune` measures which is the best for each shape.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import constexpr, jit, runs_triton, tensor, tl, triton

_MAX_VECTORS = 4
_MAX_TOKENS = 256

MAX_TILE_TOKENS = 64
"""Beyond that, arithmetic counts as much as bandwidth, and cuBLAS has it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a product: [tokens, in] with [out, in]."""

    tokens: int
    out: int
    in_: int


@dataclass(frozen=True, slots=True)
class Tile:
    """How our kernels cut a product: the part of the weight that a program reads at once."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1  # parts on their way into shared memory; for more than one token


_VECTOR_TILES = (Tile(2, 1024, 4), Tile(1, 1024, 2), Tile(4, 512, 4), Tile(4, 1024, 8))
_MATRIX_TILES = (
    Tile(16, 256, 2, 4),
    Tile(16, 512, 4, 3),
    Tile(32, 128, 4, 5),
    Tile(64, 128, 4, 4),
)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None
) -> torch.Tensor:
    """x @ weight.T + bias.

    Args:
        x: [tokens, in].
        weight: [out, in], contiguous.
        bias: [out] or None.
        tile: on a GPU, what `tune` found for this shape: None for cuBLAS.

    Returns:
        [tokens, out], contiguous.
    """
    if tile is not None and runs_triton(x):
        return _tiled(x, weight, bias, tile)
    if x.device.type == "cpu":
        return linear_reference(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` in plain torch, as a CPU likes it.

    In float32 on a CPU, one product of few rows leaves most cores idle, or waits for memory on one
    of them. Cut into groups of weight rows it becomes a batch of products, one for each core;
    measured on two cores, that is 1.2 times as fast for 32 to 64 tokens, and 2.7 times for one.
    For very few tokens the weight is the left factor, and is then read as fast as memory allows.
    """
    num_tokens, num_rows = len(x), len(weight)
    groups = _groups(num_rows) if x.dtype == torch.float32 and num_tokens <= _MAX_TOKENS else 1
    if groups == 1:
        return F.linear(x, weight, bias)
    parts = weight.view(groups, num_rows // groups, -1)  # [groups, out / groups, in]
    spread = x.expand(groups, *x.shape)  # [groups, tokens, in]
    if num_tokens <= _MAX_VECTORS:
        product = torch.bmm(parts, spread.transpose(1, 2)).view(num_rows, num_tokens).t()
    else:
        product = torch.bmm(spread, parts.transpose(1, 2)).transpose(0, 1).flatten(1)
    if bias is not None:
        product = product + bias
    return product.contiguous()


def _groups(num_rows: int) -> int:
    """Into how many equal groups to cut that many rows: at least one for each thread; or 1."""
    groups = 4
    while groups < torch.get_num_threads():
        groups *= 2
    return groups if num_rows % groups == 0 else 1


def _tiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """The kernel for one token, or the one for several."""
    num_tokens, num_in = x.shape
    num_out = len(weight)
    assert weight.shape == (num_out, num_in)
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert x.dtype == weight.dtype
    assert num_tokens <= MAX_TILE_TOKENS
    out = x.new_empty(num_tokens, num_out)
    grid = (-(-num_out // tile.rows),)
    even = num_in % tile.columns == 0
    if num_tokens == 1:
        _vector_kernel[grid](
            x, weight, bias, out, num_out, num_in,
            rows=tile.rows, columns=tile.columns, has_bias=bias is not None, even=even,
            num_warps=tile.num_warps,
        )  # fmt: skip
    elif num_tokens > 1:
        _matrix_kernel[grid](
            x, weight, bias, out, num_tokens, num_out, num_in, x.stride(0),
            tokens=max(1 << (num_tokens - 1).bit_length(), 16), rows=tile.rows,
            columns=tile.columns, has_bias=bias is not None, even=even,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


@jit
def _vector_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    out: tensor,
    num_out: tensor,
    num_in: tensor,
    rows: constexpr,
    columns: constexpr,
    has_bias: constexpr,
    even: constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = row < num_out
    weight_rows = weight + row.to(tl.int64)[:, None] * num_in
    sums = tl.zeros([rows, columns], tl.float32)
    for start in range(0, num_in, columns):
        place = start + column
        if even:
            w = tl.load(weight_rows + place[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(x + place)
        else:
            within = place < num_in
            w = tl.load(weight_rows + place[None, :], mask=inside[:, None] & within, other=0.0)
            v = tl.load(x + place, mask=within, other=0.0)
        sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if has_bias:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=inside)


@jit
def _matrix_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    out: tensor,
    num_tokens: tensor,
    num_out: tensor,
    num_in: tensor,
    x_stride: tensor,
    tokens: constexpr,
    rows: constexpr,
    columns: constexpr,
    has_bias: constexpr,
    even: constexpr,
) -> None:
    """The weight is the left factor: its rows fill the matrix unit, tokens are the short side."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = tl.arange(0, tokens)
    column = tl.arange(0, columns)
    inside = (row < num_out)[:, None]
    present = (token < num_tokens)[None, :]
    weight_tile = weight + row.to(tl.int64)[:, None] * num_in + column[None, :]
    x_tile = x + token[None, :] * x_stride + column[:, None]
    sums = tl.zeros([rows, tokens], tl.float32)
    for start in range(0, num_in, columns):
        if even:
            w = tl.load(weight_tile + start, mask=inside, other=0.0)
            v = tl.load(x_tile + start, mask=present, other=0.0)
        else:
            within = start + column < num_in
            w = tl.load(weight_tile + start, mask=inside & within[None, :], other=0.0)
            v = tl.load(x_tile + start, mask=present & within[:, None], other=0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)[:, None]
    place = token[None, :] * num_out + row[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside & present)


def tiles(shape: Shape) -> tuple[Tile, ...]:
    """What `tune` tries besides cuBLAS."""
    if shape.tokens == 1:
        return _VECTOR_TILES
    return _MATRIX_TILES if shape.tokens <= MAX_TILE_TOKENS else ()


def tune(
    shapes: Iterable[Shape],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    min_gain: float = 0.03,
) -> dict[Shape, Tile | None]:
    """For each shape what is the fastest, None for cuBLAS.

    It allocates weights of three times the device's L2 cache, or one of the largest shape, for as
    long as it runs.

    Args:
        shapes: products to come.
        device: a CUDA device.
        dtype: of weights and activations.
        min_gain: the part of cuBLAS's time that a kernel must save to be taken.
    """
    shapes = list(dict.fromkeys(shapes))
    best: dict[Shape, Tile | None] = {}
    for shape, seconds in measure(shapes, device, dtype):
        tile = min(seconds, key=lambda candidate: seconds[candidate])
        best[shape] = tile if seconds[tile] < (1 - min_gain) * seconds[None] else None
    return best


def measure(
    shapes: Iterable[Shape], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Shape, Mapping[Tile | None, float]]]:
    """Seconds of one product by each candidate, None being cuBLAS.

    Candidates run in CUDA graphs, each over as many weights as overflow the L2 cache, for in a
    model too every weight comes from memory.
    """
    shapes = list(shapes)
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    largest = max((shape.out * shape.in_ for shape in shapes), default=0)
    num_elements = max(3 * cache_bytes // dtype.itemsize, largest)
    pool = torch.empty(num_elements, dtype=dtype, device=device).normal_(std=0.02)
    for shape in shapes:
        num_copies = num_elements // (shape.out * shape.in_)
        weights = pool[: num_copies * shape.out * shape.in_].view(num_copies, shape.out, shape.in_)
        x = torch.randn(shape.tokens, shape.in_, dtype=dtype, device=device)
        seconds: dict[Tile | None, float] = {}
        for tile in (None, *tiles(shape)):
            try:
                seconds[tile] = _seconds(x, weights, tile)
            except triton.runtime.errors.OutOfResources:
                continue  # more shared memory than this device has
        yield shape, seconds


def _seconds(x: torch.Tensor, weights: torch.Tensor, tile: Tile | None) -> float:
    """Median over replays of the time of one product."""
    linear(x, weights[0], None, tile)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(x.device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for weight in weights:
            linear(x, weight, None, tile)
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(weights))
    return statistics.median(times)
