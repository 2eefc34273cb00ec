"""Two branches at the same time, against one after the other."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels import _triton
from aquifer.kernels.beside import at_once, lane
from aquifer.kernels.linear import Tile, linear


def test_results_and_lanes(device: torch.device) -> None:
    assert at_once(lane, lambda: "second", device) == (0, "second")
    if device.type == "cuda":
        assert at_once(lambda: "first", lane, device) == ("first", 1)
    assert lane() == 0


@pytest.mark.parametrize("fails", ["first", "second"])
def test_a_branch_that_fails(fails: str, device: torch.device) -> None:
    def failing() -> int:
        raise ValueError("one branch")

    branches = (failing, lane) if fails == "first" else (lane, failing)
    with pytest.raises(ValueError, match="one branch"):
        at_once(*branches, device)
    assert at_once(lane, lambda: 2, device) == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_products_with_scratch_memory(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both split their columns, so that both count in scratch memory; their input is made just
    before, and their results are read just after."""
    monkeypatch.setattr(_triton, "overlap", True)
    device = torch.device("cuda", torch.cuda.current_device())
    tile = Tile(64, 128, 4, 4, 4)
    weights = torch.randn(2, 1024, 2048, device=device, dtype=torch.bfloat16)
    own = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) * 2048**-0.5
    x = torch.randn(32, 2048, device=device, dtype=torch.bfloat16)

    def layers(*, branched: bool) -> list[torch.Tensor]:
        results = []
        y = x
        for _ in range(20):
            y = linear(y, own, None, tile)

            def product(index: int, y: torch.Tensor = y) -> torch.Tensor:
                return linear(y, weights[index], None, tile)

            if branched:
                pair = at_once(lambda: product(0), lambda: product(1), device)
            else:
                pair = product(0), product(1)
            results.append(pair[0] + pair[1])
        return results

    expected = layers(branched=False)
    if not captured:
        got = layers(branched=True)
    else:
        graph = torch.cuda.CUDAGraph()
        layers(branched=True)
        with torch.cuda.graph(graph):
            got = layers(branched=True)
        for _ in range(20):
            graph.replay()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
