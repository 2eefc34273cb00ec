"""Products of few tokens against float64; fused ones against their parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.cases import EVERY_KERNEL_CASE, covering

from aquifer.kernels import _triton
from aquifer.kernels._triton import MIN_DOT
from aquifer.kernels.activation import silu_mul_reference
from aquifer.kernels.linear import (
    MAX_TILE_TOKENS,
    Shape,
    Tile,
    best_tile,
    gated_tile,
    linear,
    norm_linear,
    norm_programs,
    norm_tile,
    silu_linear,
    sum_linear,
    tiles,
)
from aquifer.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5
SMALL_TILES: dict[int, tuple[Tile, ...]] = {
    1: (Tile(2, 32, 4), Tile(4, 64, 2)),
    3: (Tile(16, 32, 2, 2), Tile(32, 64, 4, 3), Tile(16, 32, 2, 2, 3), Tile(16, 16, 2, 2, 8)),
}

TILE_CASES = covering(
    # (number, dtype). The interpreter has no products of bfloat16, only sums for one token, and
    # takes long for many.
    [
        (count, dtype)
        for count in (1, 3, 17, 40, 70, 150, 250)
        for dtype in MAX_ERROR
        if torch.cuda.is_available()
        or (count <= 40 and (dtype is not torch.bfloat16 or count == 1))
    ],
    (False, True),
    [(64, 64), (37, 40), (16, 100)],
    strength=2,
    every=EVERY_KERNEL_CASE,
)


@pytest.fixture(
    params=[
        pytest.param(False, id="serial"),
        pytest.param(True, id="overlapping", marks=pytest.mark.gpu),
    ]
)
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "overlap", request.param)


class Random:
    """Random tensors of one dtype; rows are padded with NaN."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device, self._dtype = device, dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        random = torch.randn(shape, generator=self._generator, device=self._device)
        return random.to(self._dtype)

    def rows(self, num_rows: int, num_columns: int) -> torch.Tensor:
        wide = torch.full((num_rows, num_columns + 8), torch.nan, device=self._device)
        wide[:, :num_columns] = self(num_rows, num_columns)
        return wide.to(self._dtype)[:, :num_columns]


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def exact_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


class Factors(NamedTuple):
    """Random factors of a product, and what it should be."""

    x: torch.Tensor  # [tokens, in]
    weight: torch.Tensor  # [out, in]; [2 out, in] if gated
    bias: torch.Tensor | None
    exact: torch.Tensor  # [tokens, out] float64

    @classmethod
    def make(
        cls,
        device: torch.device,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        gated: bool,
        has_bias: bool = True,
    ) -> Factors:
        """Factors of a shape, which is tokens, out and in."""
        num_tokens, num_out, num_in = shape
        random = Random(device, dtype, num_out)
        num_rows = 2 * num_out if gated else num_out
        x, weight = random.rows(num_tokens, num_in), random(num_rows, num_in) * num_in**-0.5
        bias = random(num_rows) if has_bias else None
        exact = exact_product(x, weight, bias)
        if gated:
            exact = silu_mul_reference(exact.to(dtype).double())
        return cls(x, weight, bias, exact)


def check_captured_chain(
    device: torch.device,
    product: Callable[..., torch.Tensor],
    num_tokens: int,
    hidden: int,
    inner: int,
) -> None:
    """Replay feed-forward layers one after the other: each kernel reads what the last one wrote.

    Args:
        device: the device.
        product: called like `linear`.
        num_tokens: tokens.
        hidden: elements of a token.
        inner: elements of an activation.
    """
    random = Random(device, torch.bfloat16, 3)
    gate_ups = [random(2 * inner, hidden) * hidden**-0.5 for _ in range(4)]
    downs = [random(hidden, inner) * inner**-0.5 for _ in range(4)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for gate_up, down in zip(gate_ups, downs, strict=True):
            x = product(product(x, gate_up, None, gated=True), down, None)
        return x

    x = random(num_tokens, hidden)
    expected = run(x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = run(x)
    for _ in range(20):
        result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("tile", [None, Tile(2, 32, 4), Tile(4, 64, 2)])
@pytest.mark.parametrize("shape", [(24, 40, 96), (9, 130, 33), (70, 64, 64), (5, 2100, 16)])
def test_two_products_that_are_added(
    device: torch.device, shape: tuple[int, int, int], tile: Tile | None, dtype: torch.dtype
) -> None:
    num_out, num_in, num_other = shape
    random = Random(device, dtype, 5)
    x, y = random.rows(1, num_in), random.rows(1, num_other)
    weight, other = random(num_out, num_in), random(num_out, num_other)
    exact = exact_product(x, weight, None) + exact_product(y, other, None)
    result = sum_linear(x, weight, y, other, tile)
    assert result.is_contiguous()
    assert error(result, exact) < MAX_ERROR[dtype]


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize(
    ("tokens", "has_bias", "shape"),
    TILE_CASES,
    ids=str,
)
def test_tiles(
    device: torch.device, tokens: tuple[int, torch.dtype], has_bias: bool, shape: tuple[int, int]
) -> None:
    (num_tokens, dtype), (num_out, num_in) = tokens, shape
    random = Random(device, dtype, num_out)
    x, weight = random.rows(num_tokens, num_in), random(num_out, num_in)
    bias = random(num_out) if has_bias else None
    exact = exact_product(x, weight, bias)
    candidates = SMALL_TILES[min(num_tokens, 3)]
    if device.type == "cuda" and dtype != torch.float32:
        candidates += tiles(Shape(num_tokens, num_out, num_in))
    for tile in (None, *candidates):
        # Programs that share columns use counters, which a call must leave at 0 for the next.
        num_calls = 2 if tile is not None and tile.num_splits > 1 else 1
        for _ in range(num_calls):
            result = linear(x, weight, bias, tile)
            assert result.is_contiguous()
            assert result.dtype == dtype
            assert error(result, exact) < MAX_ERROR[dtype], tile


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize(
    ("tokens", "has_bias", "shape"),
    TILE_CASES,
    ids=str,
)
def test_gated_tiles(
    device: torch.device, tokens: tuple[int, torch.dtype], has_bias: bool, shape: tuple[int, int]
) -> None:
    (num_tokens, dtype), (num_out, num_in) = tokens, shape
    random = Random(device, dtype, num_out)
    x, weight = random.rows(num_tokens, num_in), random(2 * num_out, num_in)
    bias = random(2 * num_out) if has_bias else None
    exact = silu_mul_reference(exact_product(x, weight, bias).to(dtype).double())
    own = best_tile(Shape(num_tokens, 2 * num_out, num_in), gated=True)
    is_own = num_tokens > 1 and (device.type != "cuda" or dtype != torch.float32)
    for tile in (None, *(SMALL_TILES[3] if num_tokens > 1 else ()), own if is_own else None):
        for _ in range(1 if tile is None else 2):  # the counters of the first call are 0 again
            result = linear(x, weight, bias, tile, gated=True)
            assert result.shape == (num_tokens, num_out)
            assert result.is_contiguous()
            assert result.dtype == dtype
            assert error(result, exact) < 2 * MAX_ERROR[dtype], tile


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_sums_in_float32(device: torch.device, num_tokens: int, dtype: torch.dtype) -> None:
    """They are not rounded to the dtype of the factors."""
    random = Random(device, dtype, 4)
    x, weight = random.rows(num_tokens, 100), random(37, 100)
    exact = exact_product(x, weight, None)
    tiles = SMALL_TILES[min(num_tokens, 3)] if num_tokens <= MAX_TILE_TOKENS else ()
    for tile in (None, *tiles):
        result = linear(x, weight, None, tile, out_dtype=torch.float32)
        assert result.dtype == torch.float32
        assert error(result, exact) < MAX_ERROR[torch.float32], tile


def test_sums_of_several_programs_are_always_the_same(device: torch.device) -> None:
    random = Random(device, torch.float16, 1)
    x, weight = random(4, 256), random(64, 256)
    tile = Tile(16, 32, 2, 2, 8)
    first = linear(x, weight, None, tile)
    for _ in range(3):
        assert torch.equal(linear(x, weight, None, tile), first)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize(
    ("num_tokens", "gated", "shape", "has_delta", "has_bias", "dtype"),
    covering(
        [0, 1, 3],
        (False, True),
        [(300, 64), (37, 100), (5, 1000)],
        (False, True),
        (False, True),
        MAX_ERROR,
        strength=3,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_norm_linear(
    device: torch.device,
    num_tokens: int,
    shape: tuple[int, int],
    has_delta: bool,
    has_bias: bool,
    gated: bool,
    dtype: torch.dtype,
) -> None:
    num_out, num_in = shape
    random = Random(device, dtype, num_in)
    residual, norm_weight = random.rows(num_tokens, num_in), random(num_in)
    delta = random.rows(num_tokens, num_in) if has_delta else None
    num_rows = 2 * num_out if gated else num_out
    weight, bias = random(num_rows, num_in), random(num_rows) if has_bias else None
    total = residual.clone()
    if delta is None:
        normed = rms_norm(total, norm_weight, EPS)
    else:
        normed = add_rms_norm(delta, total, norm_weight, EPS)
    exact = exact_product(normed, weight, bias)
    if gated:
        exact = silu_mul_reference(exact.to(dtype).double())

    result, new_residual = norm_linear(delta, residual, norm_weight, EPS, weight, bias, gated=gated)
    assert result.shape == (num_tokens, num_out)
    assert result.is_contiguous()
    assert result.dtype == new_residual.dtype == dtype
    assert torch.equal(new_residual, total)
    if num_tokens:
        # A last bit of the norm may differ, as its sum is in another order.
        assert error(result, exact) < (4 if gated else 2) * MAX_ERROR[dtype]


def test_norm_linear_leaves_one_row_of_the_stream_as_it_was(device: torch.device) -> None:
    """Other programs still read it while one stores the sum."""
    random = Random(device, torch.float32, 0)
    residual, delta, weight = random(1, 64), random(1, 64), random(8, 64)
    before = residual.clone()
    _, total = norm_linear(delta, residual, random(64), EPS, weight, None)
    assert torch.equal(residual, before)
    assert torch.equal(total, before + delta)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (37, 100), (9, 2100)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_silu_linear(
    device: torch.device,
    num_tokens: int,
    num_out: int,
    num_in: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    random = Random(device, dtype, num_in)
    gate_up, weight = random.rows(num_tokens, 2 * num_in), random(num_out, num_in)
    bias = random(num_out) if has_bias else None
    # In float32, what torch computes is no more right than what we do.
    wide = gate_up.double() if dtype == torch.float32 else gate_up
    exact = exact_product(silu_mul_reference(wide), weight, bias)
    result = silu_linear(gate_up, weight, bias)
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert error(result, exact) < 2 * MAX_ERROR[dtype]


@pytest.mark.parametrize("num_in", [8, 100, 896, 1024, 3072, 4096, 14336])
@pytest.mark.parametrize("num_out", [1, 100, 1024, 4096, 28672, 151936])
def test_cuts_for_one_token(num_out: int, num_in: int) -> None:
    """Tiles cover all rows, and the numbers of tiles of two programs differ by one at most."""
    tile = best_tile(Shape(1, num_out, num_in))
    assert tile is not None
    assert tile.columns & (tile.columns - 1) == 0
    assert tile.columns < 2 * max(num_in, MIN_DOT)
    assert tile.rows * tile.columns <= 64 * 32 * tile.num_warps  # numbers that a thread holds
    gated = gated_tile(num_out, num_in, 132)
    assert gated.columns & (gated.columns - 1) == 0
    assert gated.columns <= 1024 or num_in % gated.columns == 0
    for norm in (norm_tile(num_in), norm_tile(num_in, gated=True)):
        assert norm.columns >= num_in
        num_tiles = -(-num_out // norm.rows)
        num_programs = norm_programs(num_out, norm, 132)
        assert num_programs <= num_tiles
        assert num_programs * norm.num_warps <= 32 * 132
        assert num_programs * -(-num_tiles // num_programs) - num_tiles < num_programs


@pytest.mark.parametrize("num_in", [8, 100, 896, 1024, 3072, 4096, 14336])
@pytest.mark.parametrize("num_out", [1, 100, 1024, 4096, 28672, 151936])
def test_cuts_for_few_tokens(num_out: int, num_in: int) -> None:
    """Columns are shared out only where rows are few, and each program has some."""
    tile = best_tile(Shape(MAX_TILE_TOKENS, num_out, num_in))
    assert tile is not None
    assert 1 <= tile.num_splits <= -(-num_in // tile.columns)
    assert tile.num_splits == 1 or -(-num_out // tile.rows) * tile.num_splits <= 2 * 132


@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("num_out", [2, 1024, 1152, 4096, 6144, 9728, 28672])
def test_cuts_for_many_tokens(num_out: int, gated: bool) -> None:
    """All programs run at once, and each has columns."""
    sizes = itertools.product((65, 128, 192, 256), (8, 896, 1024, 2048, 3072, 4864))
    for num_tokens, num_in in sizes:
        tile = best_tile(Shape(num_tokens, num_out, num_in), gated=gated)
        if tile is None:
            continue
        num_programs = -(-num_out // tile.rows) * -(-num_tokens // tile.tokens) * tile.num_splits
        assert num_programs <= (264 if gated and num_tokens <= 128 else 132)
        assert tile.num_splits <= -(-num_in // tile.columns)


@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
def test_no_tiles_for_many_tokens_or_large_weights(gated: bool) -> None:
    assert not tiles(Shape(257, 64, 64))
    assert best_tile(Shape(257, 64, 64), gated=gated) is None
    assert best_tile(Shape(256, 28672, 4096), gated=gated) is None
    assert best_tile(Shape(256, 4096, 2048)) is None


@pytest.mark.gpu  # for graphs are CUDA's
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_captured_chain(device: torch.device, num_tokens: int) -> None:
    """A feed-forward layer after the other, replayed; each kernel reads what the last one wrote."""
    hidden, inner, num_layers = 1024, 3072, 8
    random = Random(device, torch.bfloat16, 3)
    gate_ups = [random(2 * inner, hidden) * hidden**-0.5 for _ in range(num_layers)]
    downs = [random(hidden, inner) * inner**-0.5 for _ in range(num_layers)]
    norm_weight, embedded = random(hidden).abs(), torch.empty_like(random(num_tokens, hidden))

    def forward() -> torch.Tensor:
        residual, delta = embedded.clone(), None
        for gate_up_weight, down_weight in zip(gate_ups, downs, strict=True):
            gate_up, residual = norm_linear(delta, residual, norm_weight, EPS, gate_up_weight, None)
            delta = silu_linear(gate_up, down_weight, None)
        assert delta is not None
        return residual + delta

    def reference() -> torch.Tensor:
        stream = embedded.clone()
        for gate_up_weight, down_weight in zip(gate_ups, downs, strict=True):
            normed = rms_norm_reference(stream, norm_weight, EPS)
            gate_up = F.linear(normed, gate_up_weight)
            stream = stream + F.linear(silu_mul_reference(gate_up), down_weight)
        return stream

    embedded.zero_()
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for _ in range(20):
        embedded.copy_(random(num_tokens, hidden))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, reference().double()) < 2e-2
