"""What is prefetched, and where kernels overlap; how they then run is tested on a GPU only."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels import _triton
from aquifer.kernels._triton import launch_options, prefetch_options

NOTHING = {"ahead": None, "ahead_rows": 0, "ahead_columns": 0, "ahead_stride": 0}
CPU = torch.device("cpu")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this machine are taken for those of such a device."""
    monkeypatch.setattr(_triton, "is_hopper", lambda device: True)
    monkeypatch.setattr(_triton, "prefetch_bytes", 1 << 20)


def weight(num_out: int, num_in: int) -> torch.Tensor:
    return torch.empty(num_out, num_in, dtype=torch.bfloat16)


def test_nothing_overlaps_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "overlap", True)
    assert launch_options(CPU) == {"overlaps": False}
    assert prefetch_options(weight(64, 64), 1) == NOTHING


@pytest.mark.usefixtures("on_hopper")
def test_overlap_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for overlap in (True, False):
        monkeypatch.setattr(_triton, "overlap", overlap)
        options = launch_options(CPU)
        assert options["overlaps"] is overlap
        assert ("launch_pdl" in options) is overlap


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("num_in", [8, 1000, 1024, 14336])
@pytest.mark.parametrize("num_out", [1, 100, 1024, 4096, 151936])
def test_prefetched_part(num_out: int, num_in: int) -> None:
    """As much as allowed, in stretches of whole sectors, and nothing beyond a row or the weight."""
    w = torch.empty(1, 1, dtype=torch.bfloat16).expand(num_out, num_in)
    options = prefetch_options(w, 32)
    assert options["ahead"] is w
    assert options["ahead_stride"] == num_in
    rows, columns = options["ahead_rows"], options["ahead_columns"]
    assert 1 <= rows <= num_out
    assert 1 <= columns <= num_in
    assert columns * 2 % 16 == 0
    fetched, whole = rows * columns * 2, num_out * num_in * 2
    assert fetched <= 1 << 20
    assert fetched == whole or fetched > 1 << 19


@pytest.mark.usefixtures("on_hopper")
def test_no_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = weight(64, 65)
    shifted = torch.empty(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    for tensor, num_tokens in ((None, 1), (weight(64, 64), 257), (odd, 1), (shifted, 1)):
        assert prefetch_options(tensor, num_tokens) == NOTHING
    monkeypatch.setattr(_triton, "prefetch_bytes", 0)
    assert prefetch_options(weight(64, 64), 1) == NOTHING
