"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.interpreter import interpret


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of the test's tensors; on it, operations run their Triton kernels."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpret(monkeypatch)
    return torch.device("cpu")
