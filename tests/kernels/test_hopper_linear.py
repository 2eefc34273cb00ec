"""Hopper's product of few tokens with a large weight, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels.test_linear import Factors, check_captured_chain, error

from aquifer.kernels import hopper_linear as module
from aquifer.kernels.hopper_linear import Tiling, fits, hopper_linear, tiling
from aquifer.kernels.linear import linear

MAX_ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
MULTIPROCESSORS = 132
# [out, in]: some shared out, some in several rounds, rows and columns that end within a tile.
SHAPES = [(4096, 4096), (6144, 1024), (1000, 1032), (8, 64), (520, 8), (20000, 512)]


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return device


def tilings(num_tokens: int, num_rows: int, num_in: int, *, gated: bool) -> set[Tiling]:
    """The tiling of a product, and others with blocks that run at once."""
    tokens = -(-num_tokens // 32) * 32 if num_tokens > 32 else 64
    found = {tiling(num_tokens, num_rows, num_in, MULTIPROCESSORS, gated=gated)}
    if not gated:
        for rows, splits in itertools.product((64, 128), (1, 2, 4, 8)):
            num_items = -(-num_rows // rows) * splits
            if splits == 1 or (num_items <= MULTIPROCESSORS and splits <= -(-num_in // 64)):
                found.add(Tiling(rows, tokens, num_splits=splits))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("num_tokens", [1, 33, 90, 129, 200, 250])
def test_products(
    device: torch.device, num_tokens: int, gated: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    for num_out, num_in in SHAPES:
        shape = num_tokens, num_out, num_in
        x, weight, bias, exact = Factors.make(device, shape, dtype, gated=gated, has_bias=has_bias)
        for how in tilings(num_tokens, len(weight), num_in, gated=gated):
            result = hopper_linear(x, weight, bias, gated=gated, how=how)
            assert result.shape == (num_tokens, num_out)
            assert error(result, exact) < 2 * MAX_ERROR[dtype], how
            # Whichever block is the last, and with the counters that the first call left.
            again = hopper_linear(x, weight, bias, gated=gated, how=how)
            assert torch.equal(again, result), how


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [40, 96, 192])
def test_captured_chain(device: torch.device, num_tokens: int) -> None:
    def product(
        x: torch.Tensor, weight: torch.Tensor, bias: None, *, gated: bool = False
    ) -> torch.Tensor:
        assert fits(x, weight, bias, gated=gated)
        return linear(x, weight, bias, gated=gated)

    check_captured_chain(device, product, num_tokens, 4096, 14336)


@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("multiprocessors", [14, 78, MULTIPROCESSORS])
@pytest.mark.parametrize("num_rows", [8, 1024, 4096, 5120, 6144, 8192, 28672, 128256])
def test_tilings(num_rows: int, multiprocessors: int, gated: bool) -> None:
    """Blocks that share rows run at once, each has columns, and all tokens have room."""
    for num_tokens, num_in in itertools.product((1, 40, 100, 150, 256), (8, 1024, 4096, 14336)):
        how = tiling(num_tokens, num_rows, num_in, multiprocessors, gated=gated)
        assert num_tokens <= how.tokens < num_tokens + 64
        num_items = -(-num_rows // how.rows) * how.num_splits
        assert how.num_splits == 1 or num_items <= multiprocessors
        assert how.num_splits <= -(-num_in // 64)
        assert how.tokens % (32 if how.rows == 64 else 16) == 0
        assert how.num_stages >= 4


def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_warpgroup_products", lambda _: True)
    monkeypatch.setattr(module, "count_multiprocessors", lambda _: MULTIPROCESSORS)

    def is_used(num_tokens: int, num_out: int, num_in: int, *, gated: bool = False) -> bool:
        x = torch.empty(num_tokens, num_in, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(
            (2 if gated else 1) * num_out, num_in, dtype=torch.bfloat16, device="meta"
        )
        return fits(x, weight, None, gated=gated)

    assert [is_used(n, 4096, 4096) for n in (32, 33, 224, 225)] == [False, True, True, False]
    assert [is_used(n, 4096, 14336) for n in (192, 256, 257)] == [True, True, False]
    assert [is_used(n, 14336, 4096, gated=True) for n in (32, 33, 256, 257)] == [0, 1, 1, 0]
    assert [is_used(n, 128256, 4096) for n in (40, 64, 65)] == [True, True, False]
    assert not is_used(128, 1024, 3072)  # a small weight
    assert not is_used(128, 9728, 2560, gated=True)  # most blocks would idle in a second round
    assert not is_used(128, 4096, 4100)  # rows are not aligned


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_warpgroup_products", lambda _: True)
    monkeypatch.setattr(module, "count_multiprocessors", lambda _: MULTIPROCESSORS)
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert fits(x, weight, None)
    assert not fits(x.float(), weight.float(), None)
    assert not fits(x, weight.T, None)
    assert not fits(x[:, :4094], weight[:, :4094].contiguous(), None)
    assert not fits(x, weight[:4095], None)
    monkeypatch.setattr(module, "has_warpgroup_products", lambda _: False)
    assert not fits(x, weight, None)
