"""Preemption where the host has no memory to swap to: KV is computed again."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.cache.swap import SwapSpace
from aquifer.cache.virtual import VirtualCache
from aquifer.engine.preemption import Preemption
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE = 4096
NUM_TOKENS = 20


@pytest.mark.parametrize("mode", ["swap", "auto"])
@pytest.mark.parametrize(
    ("num_bytes", "is_moved"),
    [(1 << 20, True), (4, False), (1 << 60, False)],
    ids=["enough", "less than a region", "refused"],
)
def test_kv_is_moved_only_where_the_host_has_memory(
    num_bytes: int, is_moved: bool, mode: Any
) -> None:
    with (
        closing(HostDriver()) as driver,
        closing(PagePool(driver, 16 * PAGE, PAGE)) as pool,
        closing(SwapSpace(num_bytes, driver.device)) as space,
    ):
        layout = KVLayout((LayerKV(2, 16, 16),), torch.float32)
        with closing(VirtualCache(pool, Owner("a", Kind.KV), layout, 2, 64)) as cache:
            assert cache.reserve(np.array([1]), np.array([NUM_TOKENS]))
            preemption = Preemption(space, mode)
            # Computing it again would take long, so any copy is cheaper.
            swapped = preemption.swap_out(cache, [1], [NUM_TOKENS], lambda start, count: 1e9)
            assert (swapped is not None) == is_moved
            assert preemption.moved_bytes == is_moved * NUM_TOKENS * layout.token_bytes
            assert (preemption.copy_s(1 << 20) > 0) == (num_bytes == 1 << 20)
