"""A manager of contiguous regions beside dense tensors, for its tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tests.models.dense_kv import DenseKV

from aquifer.cache.base import AttentionOptions, KVLayout, LayerKV, Rows, Spans
from aquifer.cache.contiguous import ContiguousCache
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.predict.lengths import Forecast

PAGE = 4096
BLOCK_SIZE = 4
MAX_SEQS, MAX_TOKENS = 4, 60
OWNER = Owner("a", Kind.KV)
LAYOUT = KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.float32)  # 1088 bytes a token


class ContiguousHarness:
    """A manager of contiguous regions, and the dense tensors that it must agree with.

    Args:
        make: makes the manager in a pool.
        num_pages: pages of the pool.
    """

    def __init__(self, make: Callable[[PagePool], ContiguousCache], num_pages: int):
        self.driver = FaultyDriver(HostDriver())
        self.pool = PagePool(self.driver, num_pages * PAGE, PAGE)
        self.cache = make(self.pool)
        self.dense = DenseKV(LAYOUT, MAX_SEQS, MAX_TOKENS)
        self.lengths = np.zeros(MAX_SEQS + 1, np.int64)
        self.finals = np.zeros(MAX_SEQS + 1, np.int64)
        self.generator = torch.Generator().manual_seed(0)

    def begin(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> bool:
        self.cache.expect(slot, num_prompt, num_total, forecast)
        if not self.cache.reserve(np.array([slot]), np.array([num_prompt])):
            return False
        self.finals[slot] = num_total
        self.write([slot], [num_prompt])
        return True

    def fork(self, parent: int, child: int) -> bool:
        count = int(self.lengths[parent])
        self.cache.expect(child, count, int(self.finals[parent]))
        if not self.cache.fork(parent, child, count):
            return False
        self.lengths[child], self.finals[child] = count, self.finals[parent]
        for dense in self.dense.layers:
            for part in dense:
                part[child] = part[parent]
        return True

    def write(self, slots: list[int], counts: list[int]) -> None:
        """Run a step, and compare attention over all there is."""
        assert self.cache.reserve(np.array(slots), self.lengths[slots] + counts)
        spans = Spans.make(np.array(slots), self.lengths[slots], np.array(counts))
        self.cache.upload()
        view = self.cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
        dense = self.dense.view(spans.slots, spans.starts, spans.counts)
        for index, layer in enumerate(LAYOUT.layers):
            query, key, value = (
                torch.randn(sum(counts), heads, dim, generator=self.generator)
                for heads, dim in (
                    (layer.num_kv_heads, layer.key_dim),
                    (layer.num_kv_heads, layer.key_dim),
                    (layer.num_kv_heads, layer.value_dim),
                )
            )
            for each in (view, dense):
                each.write(index, key, value)
            actual = view.attend(index, query, AttentionOptions(0.2))
            torch.testing.assert_close(
                actual, dense.attend(index, query, AttentionOptions(0.2)), rtol=1e-5, atol=1e-5
            )
        self.lengths[slots] += counts

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.lengths[slot] = self.finals[slot] = 0

    def check(self) -> None:
        """K1, K2 and K4: exact accounting, regions apart, and each byte as it was written."""
        self.pool.check()
        self.cache.check()
        running = np.flatnonzero(self.lengths)
        written = int(self.lengths.sum())
        stats = self.cache.stats(written)
        waste = self.cache.waste(written, self.finals)
        assert self.pool.usage().in_use_bytes.get(OWNER, 0) == stats.mapped_bytes
        assert self.driver.mapped_pages * PAGE == stats.mapped_bytes
        parts = (waste.future_bytes, waste.internal_bytes, waste.external_bytes)
        assert min(parts) >= 0
        assert sum(parts) == stats.wasted_bytes
        used: set[int] = set()
        for slot in running.tolist():
            length = int(self.lengths[slot])
            blocks = self.cache.blocks(slot, length)
            assert len(blocks) == -(-length // BLOCK_SIZE)
            assert not used & set(blocks)
            used |= set(blocks)
            region = self.cache.slot_blocks(slot)
            assert region == list(range(region[0], region[-1] + 1))
            for stored, dense in zip(self.cache.tensors.layers, self.dense.layers, strict=True):
                for part, expected in zip(stored, dense, strict=True):
                    found = part[blocks].flatten(0, 1)[:length]
                    assert torch.equal(found, expected[slot, :length])

    def close(self) -> None:
        self.cache.close()
        assert not self.pool.usage().in_use_bytes
        self.pool.close()
        driver = self.driver
        assert (driver.live_handles, driver.mapped_pages, driver.reservations) == (set(), 0, {})
        driver.close()
