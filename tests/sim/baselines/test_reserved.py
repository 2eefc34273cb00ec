"""Regions reserved whole: sizes, waste by kind, and bytes read back, forks included.

Numbers such as K1 are the invariants of docs/memory.md.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.dense_kv import DenseKV

from aquifer.cache.base import (
    AttentionOptions,
    KVLayout,
    LayerKV,
    Rows,
    Spans,
    StateLayout,
    StateTensor,
)
from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.sim.baselines.reserved import Policy, ReservedCache, tokens_to_reserve

PAGE = 4096
BLOCK_SIZE = 4
MAX_SEQS, MAX_TOKENS = 4, 60
OWNER = Owner("a", Kind.KV)
LAYOUT = KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.float32)  # 1088 bytes a token
POLICIES: tuple[Policy, ...] = ("max", "pow2", "oracle")


class Harness:
    """A manager, and the dense tensors that it must agree with."""

    def __init__(self, policy: Policy, num_pages: int):
        self.driver = FaultyDriver(HostDriver())
        self.pool = PagePool(self.driver, num_pages * PAGE, PAGE)
        self.cache = ReservedCache(
            self.pool, OWNER, LAYOUT, MAX_SEQS, MAX_TOKENS, policy=policy, block_size=BLOCK_SIZE
        )
        self.dense = DenseKV(LAYOUT, MAX_SEQS, MAX_TOKENS)
        self.lengths = np.zeros(MAX_SEQS + 1, np.int64)
        self.finals = np.zeros(MAX_SEQS + 1, np.int64)
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, slot: int, num_prompt: int, num_total: int) -> bool:
        self.cache.expect(slot, num_prompt, num_total)
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
            assert region[0] % len(region) == 0
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


@pytest.mark.parametrize(
    ("policy", "num_prompt", "num_total", "expected"),
    [
        ("max", 10, 35, 2048),
        ("pow2", 10, 35, 42),  # an output of 25 reserves 32 (section 6.1)
        ("pow2", 10, 42, 42),
        ("pow2", 10, 11, 11),
        ("pow2", 1024, 1030, 1032),
        ("pow2", 1600, 2048, 2048),  # not 1600 + 512
        ("oracle", 10, 35, 35),
    ],
)
def test_policies(policy, num_prompt, num_total, expected):
    assert tokens_to_reserve(policy, num_prompt, num_total, 2048) == expected


def test_unknown_policy():
    with pytest.raises(ConfigError, match="unknown policy 'most'; choose max, pow2, oracle"):
        Harness("most", 8)  # type: ignore[arg-type]


def test_recurrent_state_is_refused():
    layout = KVLayout((LayerKV(1, 2, 2),), torch.float32)
    state = StateLayout(((StateTensor("state", (4,), torch.float32),),))
    driver = HostDriver()
    pool = PagePool(driver, 1 << 20)
    try:
        with pytest.raises(ConfigError, match="no room for recurrent state; replay with virtual"):
            ReservedCache(pool, Owner("model", Kind.KV), layout, 2, 8, state)
    finally:
        driver.close()


def test_waste_by_kind():
    """One sequence of 5 tokens so far, 13 in the end: Fig. 3, with numbers."""
    expected = {  # future, internal, and where the region ends; in tokens
        "max": (8, 60 - 13, 64),
        "pow2": (8, 19 - 13, 32),  # 10 outputs reserve 16; 19 tokens are 5 blocks, so 8
        "oracle": (8, 0, 16),
    }
    for policy in POLICIES:
        harness = Harness(policy, 200)
        assert harness.begin(0, 3, 13)
        harness.write([0], [2])
        waste = harness.cache.waste(5, harness.finals)
        future, internal, region = expected[policy]
        bytes_ = LAYOUT.token_bytes
        assert (waste.future_bytes, waste.internal_bytes) == (future * bytes_, internal * bytes_)
        page_bytes = -(-region * bytes_ // PAGE) * PAGE
        assert waste.external_bytes == page_bytes - (13 + internal) * bytes_
        assert PAGE * harness.cache.footprint.pages(13) <= page_bytes
        harness.release(0)
        harness.check()
        harness.close()


def test_a_region_too_small_is_our_own_mistake():
    harness = Harness("oracle", 200)
    assert harness.begin(1, 3, 7)  # two blocks
    with pytest.raises(InvariantError, match="outgrown"):
        harness.cache.reserve(np.array([1]), np.array([9]))
    # Where nothing was said, room is made for the longest; what was said stays until the next time.
    assert harness.cache.reserve(np.array([2]), np.array([1]))
    assert harness.cache.reserve(np.array([2]), np.array([MAX_TOKENS]))
    harness.cache.release(2)
    harness.cache.release(1)
    harness.lengths[1] = harness.finals[1] = 0
    assert harness.cache.reserve(np.array([1]), np.array([1]))
    with pytest.raises(InvariantError, match="outgrown"):
        harness.cache.reserve(np.array([1]), np.array([9]))
    harness.cache.release(1)
    harness.check()
    harness.close()


def test_nothing_is_held():
    harness = Harness("max", 200)
    assert not harness.cache.can_share
    assert harness.begin(0, 5, 9)
    with pytest.raises(InvariantError):
        harness.cache.retain(harness.cache.blocks(0, 5))
    harness.close()


def test_free_memory_in_pieces_that_are_too_small():
    """External fragmentation: half of the arena is free, and half of it cannot be had at once."""
    harness = Harness("oracle", -(-8 * BLOCK_SIZE * LAYOUT.token_bytes // PAGE))
    for slot in range(MAX_SEQS):
        assert harness.begin(slot, 1, 2 * BLOCK_SIZE)  # a quarter each
    for slot in (0, 2):
        harness.release(slot)
    assert not harness.begin(0, 1, 4 * BLOCK_SIZE)
    assert harness.begin(0, 1, 2 * BLOCK_SIZE)
    harness.check()
    harness.close()


@pytest.mark.parametrize("call", ["create", "map"])
def test_the_device_refuses(call):
    harness = Harness("pow2", 200)
    assert harness.begin(0, 5, 9)
    before = harness.pool.usage().in_use_bytes, harness.cache.free_blocks
    harness.driver.fail_at = harness.driver.num_calls + (call == "map")
    harness.cache.expect(1, 40, 50)
    with pytest.raises(DriverError, match=call):
        harness.cache.reserve(np.array([1]), np.array([40]))
    assert before == (harness.pool.usage().in_use_bytes, harness.cache.free_blocks)
    harness.check()
    harness.close()


def test_tokens_to_the_host_and_back():
    harness = Harness("oracle", 200)
    assert harness.begin(0, 11, 20)
    assert harness.begin(1, 6, 30)
    host = torch.empty(7 * LAYOUT.token_bytes, dtype=torch.uint8)
    harness.cache.upload()
    harness.cache.copy_out(0, range(3, 10), host)
    harness.release(0)
    harness.cache.expect(2, 8, 16)
    assert harness.cache.reserve(np.array([2]), np.array([8]))
    harness.cache.copy_in(2, range(1, 8), host)
    again = torch.empty_like(host)
    harness.cache.copy_out(2, range(1, 8), again)
    assert torch.equal(again, host)
    for stored, dense in zip(harness.cache.tensors.layers, harness.dense.layers, strict=True):
        for part, expected in zip(stored, dense, strict=True):
            found = part[harness.cache.blocks(2, 8)].flatten(0, 1)[1:8]
            assert torch.equal(found, expected[0, 3:10])
    harness.cache.release(2)
    harness.check()
    harness.close()


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    num_pages=st.integers(10, 70),
    operations=st.lists(
        st.tuples(
            st.sampled_from(("begin", "begin", "fork", "write", "write", "release")),
            st.integers(0, MAX_SEQS - 1),
            st.integers(0, MAX_SEQS - 1),
            st.integers(1, MAX_TOKENS),
        ),
        max_size=25,
    ),
)
def test_random_lives(policy, num_pages, operations):
    """What is written is read back, in a pool that is often short; a refusal changes nothing."""
    harness = Harness(policy, num_pages)
    for what, slot, other, number in operations:
        length, final = int(harness.lengths[slot]), int(harness.finals[slot])
        before = harness.pool.usage().in_use_bytes, harness.cache.free_blocks
        done = True
        if what == "begin" and not length and number > 1:
            done = harness.begin(slot, 1 + other * number // MAX_SEQS, number)
        elif what == "fork" and length and not harness.lengths[other]:
            done = harness.fork(slot, other)
        elif what == "write" and length < final:
            harness.write([slot], [min(number % 7 + 1, final - length)])
        elif what == "release" and length:
            harness.release(slot)
        if not done:
            after = harness.pool.usage().in_use_bytes, harness.cache.free_blocks
            assert after == before
        harness.check()
    harness.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_footprint_is_what_a_region_takes(policy: Policy):
    pool = PagePool(HostDriver(), 64 * PAGE, PAGE)
    cache = ReservedCache(pool, OWNER, LAYOUT, 2, 100, policy=policy, block_size=4)
    lengths = [1, 4, 5, 60, 100]
    # Of so many tokens, in blocks of four: a power of two of blocks.
    regions = [128] * 5 if policy == "max" else [4, 4, 8, 64, 128]
    expected = [-(-tokens * LAYOUT.token_bytes // PAGE) for tokens in regions]
    assert [cache.footprint.pages(count) for count in lengths] == expected
    assert cache.footprint.pages(np.array(lengths)).tolist() == expected
    assert cache.footprint.most(40, 61, 3) == 3 * cache.footprint.pages(60), "nothing is shared"
    longest = cache.footprint.longest(80, 40, 2)
    assert cache.footprint.most(40, longest, 2) <= 80 < cache.footprint.most(40, longest + 1, 2)
    cache.close()
    pool.close()
    pool.driver.close()
