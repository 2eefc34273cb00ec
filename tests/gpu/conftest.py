"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere they are not collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from aquifer.memory.driver.cuda import CudaDriver


@pytest.fixture(autouse=True)
def no_cached_memory() -> None:
    """Give back what torch keeps of earlier tests' memory: it counts as the process's overhead."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    """The driver of the first GPU; all memory that a test leaves is released."""
    driver = CudaDriver()
    yield driver
    driver.close()
    gc.collect()
    torch.cuda.empty_cache()
