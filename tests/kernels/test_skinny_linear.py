"""The product of a few tokens with a weight that loads it ahead, against float64."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_linear import Factors, check_captured_chain, error

from aquifer.kernels import skinny_linear as module
from aquifer.kernels._cuda import has_large_blocks
from aquifer.kernels.skinny_linear import MAX_TOKENS, skinny_linear, tiling

MAX_ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
# [out, in]: a unit a block, several, several tiles, and rows and columns that end within one.
SHAPES = [(4096, 4096), (1024, 3072), (6144, 1024), (1000, 1088), (8, 64), (520, 192), (20000, 512)]


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda", 0)
    if not has_large_blocks(device):
        pytest.skip("needs a Hopper GPU")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, MAX_TOKENS])
def test_products(
    device: torch.device, num_tokens: int, gated: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    for num_out, num_in in SHAPES:
        shape = num_tokens, num_out, num_in
        x, weight, bias, exact = Factors.make(device, shape, dtype, gated=gated, has_bias=has_bias)
        result = skinny_linear(x, weight, bias, gated=gated)
        assert result.shape == (num_tokens, num_out)
        assert error(result, exact) < 2 * MAX_ERROR[dtype]
        assert torch.equal(skinny_linear(x, weight, bias, gated=gated), result)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 9, 16])
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 14336), (1024, 3072)])
def test_captured_chain(device: torch.device, num_tokens: int, hidden: int, inner: int) -> None:
    check_captured_chain(device, skinny_linear, num_tokens, hidden, inner)


@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
@pytest.mark.parametrize("multiprocessors", [14, 78, 132])
@pytest.mark.parametrize("num_out", [8, 1024, 3072, 4096, 5120, 6144, 14336, 128256])
def test_tilings(num_out: int, multiprocessors: int, gated: bool) -> None:
    """Warps have as much to do as each other, and shared memory has room for several tiles."""
    for num_in in (64, 128, 192, 1024, 14336):
        how = tiling(num_out, num_in, multiprocessors, gated=gated)
        assert how.chunks * 4 % how.shares == 0
        assert how.num_threads <= 14 * 32
        assert how.num_stages >= 3


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_large_blocks", lambda _: True)

    monkeypatch.setattr(module, "count_multiprocessors", lambda _: 132)

    def fits(
        num_tokens: int,
        num_rows: int,
        num_in: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        gated: bool = False,
    ) -> bool:
        x = torch.empty(num_tokens, num_in, dtype=dtype, device="meta")
        return module.fits(x, x.new_empty(num_rows, num_in), None, gated=gated)

    assert [fits(n, 4096, 4096) for n in (1, 2, 16, 17)] == [False, True, True, False]
    assert fits(16, 1024, 3072)
    assert not fits(16, 128256, 4096)  # a large weight
    assert not fits(16, 1152, 4096)  # nearly half of the blocks would idle
    # The other kernel's programs would begin a second wave, fill one, or begin a fourth.
    assert [fits(8, n, 1536, gated=True) for n in (17920, 16384, 37888)] == [True, False, False]
    assert not fits(16, 4092, 4096)  # rows are no multiple of eight
    assert not fits(16, 4096, 4064)  # nor columns one of 64
    assert not fits(16, 4096, 4096, dtype=torch.float32)
    monkeypatch.setattr(module, "has_large_blocks", lambda _: False)
    assert not fits(16, 4096, 4096)
