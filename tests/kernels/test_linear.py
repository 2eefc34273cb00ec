"""Products of few tokens against float64."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels.linear import MAX_TILE_TOKENS, Shape, Tile, linear, tiles, tune

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL_TILES: dict[int, tuple[Tile, ...]] = {
    1: (Tile(2, 32, 4), Tile(4, 64, 2)),
    3: (Tile(16, 32, 2, 2), Tile(32, 64, 4, 3)),
}


@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (37, 40), (16, 100)])
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_tiles(
    device: torch.device,
    num_tokens: int,
    num_out: int,
    num_in: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products of bfloat16")
    generator = torch.Generator(device).manual_seed(num_out)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, weight = random(num_tokens, num_in + 8)[:, :num_in], random(num_out, num_in)
    bias = random(num_out) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    candidates = SMALL_TILES[min(num_tokens, 3)]
    if device.type == "cuda" and dtype != torch.float32:
        candidates += tiles(Shape(num_tokens, num_out, num_in))
    for tile in (None, *candidates):
        result = linear(x, weight, bias, tile)
        assert result.is_contiguous()
        assert result.dtype == dtype
        assert (result.double() - exact).norm() / exact.norm() < MAX_ERROR[dtype], tile


def test_no_tiles_for_many_tokens() -> None:
    assert not tiles(Shape(MAX_TILE_TOKENS + 1, 64, 64))


def test_tune(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only a GPU can be measured")
    shapes = [Shape(tokens, 1024, 512) for tokens in (1, 4, 32, 256)]
    chosen = tune([*shapes, shapes[0]], device)
    assert list(chosen) == shapes
    assert all(tile is None or tile in tiles(shape) for shape, tile in chosen.items())
