"""The bucketed cache: regions of predicted size, moved when they are too small; each byte as it was
written, and each page accounted for.

Numbers such as K1 are the invariants of docs/memory.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.guards import guards_of, in_use_bytes
from tests.models.dense_kv import DenseKV

from aquifer.cache import BUCKETED, kv_cache
from aquifer.cache.base import (
    AttentionOptions,
    KVLayout,
    LayerKV,
    Rows,
    Spans,
    StateLayout,
    StateTensor,
)
from aquifer.cache.bucketed import BucketedCache
from aquifer.cache.buckets import BucketBounds, Granularity
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.swap import SwapSpace
from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.predict.lengths import Forecast

PAGE = 4096
BLOCK_SIZE = 4
MAX_SEQS, MAX_TOKENS = 4, 120
OWNER = Owner("a", Kind.KV)
LAYOUT = KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.float32)  # 1088 bytes a token
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of more than 32 blocks are multiples of that."""
    monkeypatch.setattr("aquifer.cache.bucketed._MID_BLOCKS", 32)


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens * LAYOUT.token_bytes // PAGE)


class Harness:
    """A manager, and the dense tensors that it must agree with."""

    def __init__(self, num_pages: int, **options: Any):
        self.driver = FaultyDriver(HostDriver())
        self.pool = PagePool(self.driver, num_pages * PAGE, PAGE, guards=True)
        self.cache = BucketedCache(
            self.pool, OWNER, LAYOUT, MAX_SEQS, MAX_TOKENS, block_size=BLOCK_SIZE, **options
        )
        self.dense = DenseKV(LAYOUT, MAX_SEQS + 1, MAX_TOKENS)
        self.lengths = np.zeros(MAX_SEQS + 1, np.int64)
        self.finals = np.zeros(MAX_SEQS + 1, np.int64)
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, slot: int, num_prompt: int, final: int, forecast: Forecast | None) -> bool:
        self.cache.expect(slot, num_prompt, final + 1, forecast)
        if not self.cache.reserve(np.array([slot]), np.array([num_prompt])):
            self.cache.release(slot)
            return False
        self.finals[slot] = final
        assert self.write([slot], [num_prompt])
        return True

    def fork(self, parent: int, child: int) -> bool:
        count = int(self.lengths[parent])
        self.cache.expect(child, count, int(self.finals[parent]) + 1)
        if not self.cache.fork(parent, child, count):
            self.cache.release(child)
            return False
        self.lengths[child], self.finals[child] = count, self.finals[parent]
        for dense in self.dense.layers:
            for part in dense:
                part[child] = part[parent]
        return True

    def write(self, slots: list[int], counts: list[int]) -> bool:
        """Run a step, and compare attention over all there is; False if there is no room."""
        if not self.cache.reserve(np.array(slots), self.lengths[slots] + counts):
            return False
        spans = Spans.make(np.array(slots), self.lengths[slots], np.array(counts))
        self.cache.upload()
        view = self.cache.tensors.view(Rows.of(spans, 0, CPU))
        dense = self.dense.view(spans.slots, spans.starts, spans.counts)
        for index, layer in enumerate(LAYOUT.layers):
            query, key, value = (
                torch.randn(sum(counts), layer.num_kv_heads, dim, generator=self.generator)
                for dim in (layer.key_dim, layer.key_dim, layer.value_dim)
            )
            for each in (view, dense):
                each.write(index, key, value)
            actual = view.attend(index, query, AttentionOptions(0.2))
            torch.testing.assert_close(
                actual, dense.attend(index, query, AttentionOptions(0.2)), rtol=1e-5, atol=1e-5
            )
        self.lengths[slots] += counts
        return True

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.lengths[slot] = self.finals[slot] = 0

    @property
    def books(self) -> tuple[object, ...]:
        """What a refusal must leave as it was."""
        return (
            in_use_bytes(self.pool),
            self.cache.free_blocks,
            self.cache.occupancy,
            [self.cache.slot_blocks(slot) for slot in range(1, MAX_SEQS + 1)],
        )

    def check(self) -> None:
        """K1, K2 and K4: exact accounting, regions apart, and each byte as it was written."""
        self.pool.check()
        self.cache.check()
        stats = self.cache.stats(int(self.lengths.sum()))
        assert in_use_bytes(self.pool).get(OWNER, 0) == stats.mapped_bytes
        assert (self.driver.mapped_pages - len(guards_of(self.cache))) * PAGE == stats.mapped_bytes
        assert stats.wasted_bytes >= 0
        used: set[int] = set()
        for slot in np.flatnonzero(self.lengths).tolist():
            length = int(self.lengths[slot])
            region = self.cache.slot_blocks(slot)
            assert list(region) == list(range(region[0], region[0] + len(region)))
            assert not used & set(region)
            used |= set(region)
            blocks = self.cache.blocks(slot, length)
            assert blocks == region[: -(-length // BLOCK_SIZE)]
            for stored, dense in zip(self.cache.tensors.layers, self.dense.layers, strict=True):
                for part, expected in zip(stored, dense, strict=True):
                    found = part[blocks].flatten(0, 1)[:length]
                    assert torch.equal(found, expected[slot, :length])

    def close(self) -> None:
        self.cache.close()
        assert not in_use_bytes(self.pool)
        self.pool.close()
        assert self.driver.is_unused
        self.driver.close()


def region_tokens(harness: Harness, slot: int) -> int:
    return len(harness.cache.slot_blocks(slot)) * BLOCK_SIZE


def test_a_region_is_of_the_bucket_of_its_forecast():
    harness = Harness(400)
    assert harness.cache.bounds.bounds == (16, 32, 64, MAX_TOKENS)
    assert harness.begin(1, 10, 100, Forecast.certain(20))
    assert harness.begin(2, 10, 100, Forecast.certain(60))
    assert harness.begin(3, 10, 50, None)
    assert harness.begin(4, 10, 12, Forecast.certain(50))  # it is ended before
    assert [region_tokens(harness, slot) for slot in (1, 2, 3, 4)] == [32, 80, 64, 16]
    assert harness.cache.occupancy == {
        (32, False): 1, (80, True): 1, (64, True): 1, (16, False): 1
    }  # fmt: skip
    harness.check()
    harness.close()


def test_a_sequence_that_outgrows_its_region_moves():
    """Its KV comes along byte for byte, and its old region can be had at once."""
    harness = Harness(400)
    assert harness.begin(1, 10, 100, Forecast.certain(6))
    assert harness.write([1], [6])
    old = harness.cache.slot_blocks(1)
    assert (len(old) * BLOCK_SIZE, harness.cache.num_overflows) == (16, 0)
    assert harness.write([1], [1])
    harness.check()
    assert region_tokens(harness, 1) == 48, "twice its 17 tokens"
    moved_bytes = len(old) * BLOCK_SIZE * LAYOUT.token_bytes
    assert (harness.cache.num_overflows, harness.cache.migrated_bytes) == (1, moved_bytes)
    assert harness.cache.copied_bytes == moved_bytes
    assert harness.begin(2, 3, 9, Forecast.certain(6))
    assert harness.cache.slot_blocks(2) == old
    assert harness.write([1, 2], [31, 6])
    harness.check()
    assert harness.cache.num_overflows == 1
    assert harness.write([1], [12])
    assert region_tokens(harness, 1) == 112, "all that it may ever have"
    harness.check()
    harness.close()


def test_several_move_in_one_step_or_none():
    harness = Harness(3 * pages_of(16) + pages_of(48) + 1)
    for slot in (1, 2):
        assert harness.begin(slot, 10, 100, Forecast.certain(6))
    assert harness.write([1, 2], [6, 6])
    assert harness.begin(3, 4, 8, Forecast.certain(4))
    before = harness.books
    assert not harness.write([1, 2], [1, 1]), "room for one of them"
    assert harness.books == before
    stuck_slots = [harness.cache.stuck_slot]
    assert harness.cache.num_overflows == 0
    harness.check()
    assert harness.write([1], [1])
    assert [*stuck_slots, harness.cache.stuck_slot] == [2, None]
    harness.release(1)
    assert harness.write([2], [1])
    harness.check()
    harness.close()


def test_the_reserve_is_left_for_those_that_move():
    """Regular buckets leave pages for one region of the largest size."""
    reserve_pages = pages_of(128)  # in whole pages: 17 pages are 16 blocks
    harness = Harness(reserve_pages + pages_of(16) + 2 * pages_of(64) + 3)
    assert harness.begin(1, 10, 100, Forecast.certain(6))
    for slot in (2, 3):
        assert harness.begin(slot, 10, 60, Forecast.certain(50))
    before = harness.books
    assert not harness.begin(4, 10, 60, Forecast.certain(50))
    assert harness.books == before
    assert harness.write([1], [20]), "it moves to the reserve"
    harness.check()
    assert harness.cache.occupancy == {(64, False): 2, (64, True): 1}
    for slot in (1, 2, 3):
        harness.release(slot)
        harness.check()
    assert not in_use_bytes(harness.pool), "the reserve is held only while sequences run"
    harness.close()


def test_the_largest_bucket_with_a_free_region():
    harness = Harness(2 * pages_of(64) + 1)
    assert harness.cache.free_bucket_tokens == MAX_TOKENS
    found = []
    for slot, output in ((1, 50), (2, 9), (3, 9)):
        assert harness.begin(slot, 4, 100, Forecast.certain(output))
        found.append(harness.cache.free_bucket_tokens)
    assert found == [64, 32, 32]
    harness.release(1)
    assert harness.cache.free_bucket_tokens == 64
    harness.close()


def test_without_room_for_two_there_is_no_reserve():
    harness = Harness(2 * pages_of(64))
    for slot in (1, 2):
        assert harness.begin(slot, 10, 60, Forecast.certain(50))
    assert not harness.begin(3, 1, MAX_TOKENS, None)
    for slot in (1, 2):
        harness.release(slot)
    assert harness.begin(3, 1, MAX_TOKENS, None), "what fits alone gets its region"
    harness.check()
    harness.close()


def test_the_arena_is_one_piece_when_nothing_runs():
    """Pieces of other sizes, at any place, are in the way of no request that runs alone."""
    harness = Harness(pages_of(MAX_TOKENS))
    for number in range(12):
        slot = 1 + number % MAX_SEQS
        harness.release(slot)
        harness.begin(slot, 3, 90, Forecast.certain(5 + 7 * number % 40))
        harness.check()
    for slot in range(1, MAX_SEQS + 1):
        harness.release(slot)
    assert harness.begin(1, 100, MAX_TOKENS, None)
    harness.check()
    harness.close()


def test_a_preempted_sequence_is_routed_by_what_it_has():
    harness = Harness(400)
    harness.cache.expect(1, 10, 101, Forecast.certain(6))
    assert harness.cache.reserve(np.array([1]), np.array([16]))
    assert region_tokens(harness, 1) == 32
    harness.cache.release(1)
    harness.cache.expect(1, 10, 101, Forecast.certain(6))
    assert harness.cache.reserve(np.array([1]), np.array([15]))
    assert region_tokens(harness, 1) == 16
    harness.close()


def test_without_expectation_a_region_holds_what_is_asked_for():
    harness = Harness(400)
    harness.cache.expect(1, 10, 101)
    harness.cache.release(1)
    assert harness.cache.reserve(np.array([1]), np.array([17]))
    assert region_tokens(harness, 1) == 32
    harness.cache.release(1)
    harness.close()


def test_bounds_follow_what_finishes_and_regions_stay():
    sizes = Granularity(4 * BLOCK_SIZE, 32 * BLOCK_SIZE, MAX_TOKENS)
    harness = Harness(400, bounds=BucketBounds(sizes, 3, window=10, every=10))
    assert list(harness.cache.bounds.bounds) == [32, 64, MAX_TOKENS]
    assert harness.begin(1, 10, 100, Forecast.certain(50))
    for _ in range(10):
        harness.cache.learn(41)
    assert list(harness.cache.bounds.bounds) == [48, MAX_TOKENS]
    assert harness.begin(2, 10, 100, Forecast.certain(30))
    assert (region_tokens(harness, 1), region_tokens(harness, 2)) == (64, 48)
    assert harness.write([1, 2], [54, 38])
    harness.check()
    assert harness.cache.num_overflows == 0
    harness.close()


def test_pages_that_stay_mapped():
    """With `kept_bytes`, no page is mapped or unmapped after the first region."""
    num_pages = 2 * pages_of(MAX_TOKENS) + 10
    harness = Harness(num_pages, kept_bytes=num_pages * PAGE)
    assert harness.cache.lacks_pages
    assert harness.cache.kept_bytes == 0
    assert harness.begin(1, 10, 100, Forecast.certain(6))
    harness.check()
    num_calls = harness.driver.num_calls
    mapped_bytes = harness.cache.stats(0).mapped_bytes
    assert (num_pages - 2) * PAGE <= mapped_bytes == harness.cache.kept_bytes <= num_pages * PAGE
    assert harness.begin(2, 10, 60, Forecast.certain(50))
    assert harness.write([1, 2], [20, 3])
    assert harness.cache.num_overflows == 1
    assert harness.begin(3, 10, MAX_TOKENS, None)
    assert not harness.begin(4, 10, MAX_TOKENS, None)
    for slot in (1, 2, 3):
        harness.release(slot)
        harness.check()
    assert harness.begin(3, 10, MAX_TOKENS, None)
    harness.check()
    assert harness.driver.num_calls == num_calls
    assert harness.cache.stats(0).mapped_bytes == mapped_bytes
    harness.close()


@pytest.mark.parametrize("num_pages", [100, 3 * pages_of(MAX_TOKENS)])
@pytest.mark.parametrize("call", ["create", "map"])
def test_the_device_refuses(call: str, num_pages: int):
    harness = Harness(num_pages)
    assert harness.begin(1, 10, 100, Forecast.certain(6))
    assert harness.begin(2, 10, 100, Forecast.certain(6))
    before = harness.books
    harness.driver.fail_at = harness.driver.num_calls + (call == "map")
    harness.cache.expect(3, 60, 101, Forecast.certain(1))
    with pytest.raises(DriverError, match=call):
        harness.cache.reserve(np.array([3, 1]), np.array([60, 17]))
    assert harness.books == before
    harness.check()
    harness.close()


def test_tokens_to_the_host_and_back():
    harness = Harness(400)
    assert harness.begin(1, 11, 100, Forecast.certain(2))
    assert harness.write([1], [9])  # it has moved
    space = SwapSpace(1 << 20, CPU)
    swapped = space.swap_out(harness.cache, [1], [20])
    assert swapped is not None
    harness.cache.release(1)
    assert harness.begin(2, 6, 30, Forecast.certain(10))
    harness.cache.expect(3, 11, 101, Forecast.certain(2))
    assert space.swap_in(harness.cache, [3], swapped)
    space.close()
    harness.lengths[3], harness.lengths[1] = 20, 0
    harness.finals[3] = 100
    for dense in harness.dense.layers:
        for part in dense:
            part[3] = part[1]
    assert harness.write([3, 2], [5, 1])
    harness.check()
    harness.close()


def test_a_fork_into_a_region_that_is_too_small():
    """A slot that waits to fork has a region, and nothing in it: it is not copied."""
    harness = Harness(400)
    assert harness.begin(1, 30, 100, Forecast.certain(10))
    harness.cache.expect(2, 10, 101, Forecast.certain(5))
    assert harness.cache.reserve(np.array([2]), np.array([1]))
    assert region_tokens(harness, 2) == 16
    copied_bytes = harness.cache.copied_bytes
    assert harness.cache.fork(1, 2, 30)
    harness.lengths[2], harness.finals[2] = 30, 100
    for dense in harness.dense.layers:
        for part in dense:
            part[2] = part[1]
    assert harness.write([1, 2], [1, 1])
    harness.check()
    assert harness.cache.num_overflows == 0
    assert harness.cache.copied_bytes - copied_bytes == 8 * BLOCK_SIZE * LAYOUT.token_bytes
    harness.close()


def test_nothing_is_held():
    harness = Harness(200)
    assert not harness.cache.can_share
    assert harness.begin(1, 5, 9, None)
    with pytest.raises(InvariantError):
        harness.cache.retain(harness.cache.blocks(1, 5))
    harness.close()


def test_what_it_cannot_do_is_refused():
    driver = HostDriver()
    pool = PagePool(driver, 1 << 20)
    state = StateLayout(((StateTensor("state", (4,), torch.float32),),))
    with pytest.raises(ConfigError, match="no room for recurrent state"):
        kv_cache(BUCKETED)(pool, OWNER, LAYOUT, 2, 8, state)
    with pytest.raises(ConfigError, match="kv_cache bucketed keeps whole tokens together"):
        kv_cache(BUCKETED, mapping=MappingOptions(is_layer_major=True))
    pool.close()
    driver.close()


def test_the_footprint_is_what_a_region_takes():
    harness = Harness(400)
    footprint = harness.cache.footprint
    lengths = [0, 1, 16, 17, 64, 113, 120]
    expected = [pages_of(tokens) for tokens in (0, 16, 16, 32, 64, 120, 120)]
    assert [footprint.pages(count) for count in lengths] == expected
    assert footprint.pages(np.array(lengths)).tolist() == expected
    assert footprint.most(40, 61) == pages_of(64)
    assert footprint.growth(np.array([5]), np.array([3])) == 0
    reserve_pages = footprint.most(40, 61, 3) - 3 * pages_of(64)
    assert reserve_pages >= pages_of(MAX_TOKENS)
    longest = footprint.longest(80, 40)
    assert footprint.most(40, longest) <= 80 < footprint.most(40, longest + 1)
    harness.close()


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    num_pages=st.integers(33, 110),
    keeps_mapped=st.booleans(),
    operations=st.lists(
        st.tuples(
            st.sampled_from(("begin", "begin", "fork", "write", "write", "write", "end", "abort")),
            st.integers(1, MAX_SEQS),
            st.integers(1, MAX_SEQS),
            st.integers(1, MAX_TOKENS),
            st.sampled_from((0.2, 1.0, 1.0, 3.0, None)),
        ),
        max_size=30,
    ),
)
def test_random_lives(
    num_pages: int,
    keeps_mapped: bool,
    operations: list[tuple[str, int, int, int, float | None]],
):
    """Forecasts that are short, right and long, in a pool that is often short."""
    sizes = Granularity(4 * BLOCK_SIZE, 32 * BLOCK_SIZE, MAX_TOKENS)
    bounds = BucketBounds(sizes, 4, window=8, every=2)
    kept_bytes = num_pages * PAGE if keeps_mapped else None
    harness = Harness(num_pages, kept_bytes=kept_bytes, bounds=bounds)
    for what, slot, other, number, factor in operations:
        length, final = int(harness.lengths[slot]), int(harness.finals[slot])
        before = harness.books
        has_any = bool(harness.lengths.any())
        done = True
        if what == "begin" and not length and number > 1:
            prompt = 1 + other * number // (MAX_SEQS + 1)
            output = max(int((number - prompt) * (factor or 1)), 1)
            forecast = None if factor is None else Forecast.certain(output)
            done = harness.begin(slot, prompt, number, forecast)
            assert done or has_any, "what fits alone is served"
        elif what == "fork" and length and not harness.lengths[other]:
            done = harness.fork(slot, other)
        elif what == "write" and length < final:
            done = harness.write([slot], [min(number % 9 + 1, final - length)])
        elif what in ("end", "abort") and length:
            if what == "end":
                harness.cache.learn(length + 1)
            harness.release(slot)
        if not done:
            assert harness.books == before
        harness.check()
    harness.close()
