"""Where kernels overlap; how they then run is tested on a GPU only."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels import _triton
from aquifer.kernels._triton import launch_options

CPU = torch.device("cpu")


def test_nothing_overlaps_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "overlap", True)
    assert launch_options(CPU) == {"overlaps": False}


def test_overlap_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "is_hopper", lambda device: True)
    for overlap in (True, False):
        monkeypatch.setattr(_triton, "overlap", overlap)
        options = launch_options(CPU)
        assert options["overlaps"] is overlap
        assert ("launch_pdl" in options) is overlap
