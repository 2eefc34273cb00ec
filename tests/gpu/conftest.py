"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere they are skipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from aquifer.memory.driver.cuda import CudaDriver


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU; these tests run with `make test-gpu` where it does")


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    """The driver of the first GPU; whatever a test leaves is given back."""
    driver = CudaDriver()
    yield driver
    driver.close()
    gc.collect()
    torch.cuda.empty_cache()
