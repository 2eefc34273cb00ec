"""Tests that need an NVIDIA GPU: `make test-gpu`. Elsewhere they are not collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from aquifer.memory.driver.cuda import CudaDriver


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    """The driver of the first GPU; all memory that a test leaves is released."""
    driver = CudaDriver()
    yield driver
    driver.close()
    gc.collect()
    torch.cuda.empty_cache()
