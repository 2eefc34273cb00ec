"""Host memory for swapping: its size, and a host that refuses it."""

from __future__ import annotations

import pytest
import torch

from aquifer.cache.swap import SwapSpace

CPU = torch.device("cpu")
ALIGN_BYTES = 4096
MORE_THAN_ANY_HOST = 1 << 60


@pytest.mark.parametrize("num_regions", [0, 1, 2])
def test_only_whole_regions_count(num_regions: int) -> None:
    """A space smaller than one region is no space, and never asks for memory of no bytes."""
    for num_bytes in (num_regions * ALIGN_BYTES, (num_regions + 1) * ALIGN_BYTES - 1):
        space = SwapSpace(num_bytes, CPU)
        assert space.num_bytes == num_regions * ALIGN_BYTES
        assert space.prepare() == space.prepare(wait=True) == (num_regions > 0)
        assert space.bytes_per_s > 0
        space.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # for the latter a thread takes the memory
def test_a_host_that_refuses_is_asked_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    space = SwapSpace(MORE_THAN_ANY_HOST, torch.device(device))
    assert space.num_bytes == MORE_THAN_ANY_HOST
    assert [space.prepare(wait=True) for _ in range(3)] == [False] * 3
    assert (space.num_bytes, space.used_bytes) == (0, 0)
    (record,) = caplog.records
    assert "--swap-space" in record.getMessage()
    space.close()
