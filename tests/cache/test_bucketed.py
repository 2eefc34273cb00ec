"""Regions by buckets: sequences that outgrow theirs are moved, and keep each byte."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.contiguous_harness import (
    BLOCK_SIZE,
    LAYOUT,
    MAX_SEQS,
    MAX_TOKENS,
    OWNER,
    PAGE,
    ContiguousHarness,
)

from aquifer.cache.base import KVLayout, LayerKV, StateLayout, StateTensor
from aquifer.cache.bucketed import BucketedCache
from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.memory.pool import PagePool
from aquifer.predict.lengths import Forecast

REGION = MAX_TOKENS * LAYOUT.token_bytes


def make(pool: PagePool, *, keeps_mapped: bool = False) -> BucketedCache:
    return BucketedCache(
        pool,
        OWNER,
        LAYOUT,
        MAX_SEQS,
        MAX_TOKENS,
        block_size=BLOCK_SIZE,
        keeps_mapped=keeps_mapped,
    )


class Harness(ContiguousHarness):
    cache: BucketedCache

    def __init__(self, num_pages: int, *, keeps_mapped: bool = False) -> None:
        super().__init__(partial(make, keeps_mapped=keeps_mapped), num_pages)
        self.keeps_mapped = keeps_mapped

    def start(self, slot: int, num_prompt: int, num_total: int, output: int | None) -> bool:
        """Begin a sequence that is expected to have some output; None for not known."""
        forecast = None if output is None else Forecast.certain(output)
        if not self.begin(slot, num_prompt, num_total + 1, forecast):
            return False
        self.finals[slot] = num_total
        return True


def region(harness: Harness, slot: int) -> int:
    return len(harness.cache.slot_blocks(slot))


def test_a_region_is_of_the_bucket_that_holds_what_is_expected() -> None:
    harness = Harness(300)
    # Before anything is known, the buckets end at 8, 16, 24, 32, 40, 48, 56 and 60 tokens.
    assert harness.cache.bounds.bounds == [8, 16, 24, 32, 40, 48, 56, 60]
    for slot, prompt, output, blocks in ((0, 5, 2, 2), (1, 5, 9, 4), (2, 30, 11, 12)):
        assert harness.start(slot, prompt, 60, output)
        assert region(harness, slot) == blocks
    assert harness.start(3, 5, 60, None)
    assert region(harness, 3) == 15  # nothing is known, so it is as long as it can be
    harness.check()
    for slot in range(4):
        harness.release(slot)
    assert harness.start(0, 5, 20, 40)
    assert region(harness, 0) == 5  # it can never have more
    harness.release(0)
    harness.close()


def test_a_sequence_that_outgrows_its_region_is_moved_once() -> None:
    harness = Harness(300)
    assert harness.start(0, 5, 60, 2)
    assert harness.start(1, 5, 60, 9)
    first = harness.cache.slot_blocks(0)
    for _ in range(3):
        harness.write([0, 1], [1, 1])
    assert harness.cache.slot_blocks(0) == first
    assert harness.cache.num_overflows == 0
    harness.write([0], [1])  # the ninth token
    assert harness.cache.num_overflows == 1
    assert harness.cache.copied_bytes == 2 * BLOCK_SIZE * LAYOUT.token_bytes
    assert region(harness, 0) == 15
    assert not set(first) & set(harness.cache.slot_blocks(0))
    harness.check()
    for _ in range(50):
        harness.write([0], [1])
    assert harness.cache.num_overflows == 1
    harness.check()
    harness.release(0)
    assert harness.start(2, 6, 60, 1)
    assert harness.cache.slot_blocks(2) == first  # from the free list of its bucket
    harness.release(1)
    harness.release(2)
    harness.check()
    harness.close()


def test_without_room_to_move_nothing_changes() -> None:
    harness = Harness(-(-REGION // PAGE) + 1)
    assert harness.start(0, 5, 60, 2)
    before = harness.cache.slot_blocks(0), harness.pool.usage().in_use_bytes
    assert not harness.cache.reserve(np.array([0]), np.array([9]))
    assert (harness.cache.slot_blocks(0), harness.pool.usage().in_use_bytes) == before
    harness.check()
    harness.release(0)
    # Alone, and with nothing expected, it has all there is.
    assert harness.start(0, 9, 60, None)
    harness.write([0], [51])
    harness.check()
    harness.release(0)
    harness.close()


def test_more_than_was_announced_is_our_own_mistake() -> None:
    harness = Harness(300)
    assert harness.start(0, 5, 20, 2)
    with pytest.raises(InvariantError, match="may have 20"):
        harness.cache.reserve(np.array([0]), np.array([21]))
    harness.release(0)
    harness.close()


def test_pages_stay_where_memory_is_not_virtual() -> None:
    harness = Harness(200, keeps_mapped=True)
    assert harness.start(0, 5, 60, 2)
    mapped = harness.driver.mapped_pages
    assert mapped * PAGE >= harness.cache.free_blocks * harness.cache.block_bytes
    harness.write([0], [10])
    assert harness.cache.num_overflows == 1
    assert harness.start(1, 5, 60, None)
    harness.release(0)
    assert harness.driver.mapped_pages == mapped
    harness.cache.check()
    harness.release(1)
    harness.close()


def test_buckets_learn_from_sequences_that_have_ended() -> None:
    harness = Harness(100)
    for _ in range(50):
        harness.cache.note_end(21)
    assert harness.cache.bounds.bounds == [24, 60]
    harness.close()


def test_recurrent_state_is_refused() -> None:
    state = StateLayout(((StateTensor("state", (4,), torch.float32),),))
    harness = Harness(10)
    layout = KVLayout((LayerKV(1, 2, 2),), torch.float32)
    with pytest.raises(ConfigError, match="recurrent state choose virtual or paged"):
        BucketedCache(harness.pool, OWNER, layout, 2, 8, state)
    harness.close()


@pytest.mark.parametrize("call", ["create", "map"])
def test_a_device_that_refuses_costs_no_region(call: str) -> None:
    harness = Harness(200)
    assert harness.start(0, 5, 60, 2)
    before = harness.pool.usage().in_use_bytes, harness.cache.free_blocks
    harness.driver.fail_at = harness.driver.num_calls + (call == "map")
    with pytest.raises(DriverError, match=call):
        harness.cache.reserve(np.array([0]), np.array([9]))
    assert (harness.pool.usage().in_use_bytes, harness.cache.free_blocks) == before
    harness.check()
    harness.release(0)
    harness.close()


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    num_pages=st.integers(20, 90),
    operations=st.lists(
        st.tuples(
            st.sampled_from(("begin", "begin", "fork", "write", "write", "release", "learn")),
            st.integers(0, MAX_SEQS - 1),
            st.integers(0, MAX_SEQS - 1),
            st.integers(1, MAX_TOKENS - 1),
        ),
        max_size=30,
    ),
)
def test_random_lives(num_pages: int, operations: list[tuple[str, int, int, int]]) -> None:
    """What is written is read back, forecasts right or wrong; a refusal changes nothing."""
    harness = Harness(num_pages)
    for what, slot, other, number in operations:
        length, final = int(harness.lengths[slot]), int(harness.finals[slot])
        before = harness.pool.usage().in_use_bytes, harness.cache.free_blocks
        done = True
        if what == "begin" and not length:
            expected = (None, 1, number, 3 * number)[other]
            done = harness.start(slot, 1 + number // 2, number, expected)
        elif what == "fork" and length and not harness.lengths[other]:
            harness.cache.expect(other, length, final + 1)
            done = harness.fork(slot, other)
        elif what == "write" and length < final:
            count = min(number % 7 + 1, final - length)
            if harness.cache.reserve(np.array([slot]), np.array([length + count])):
                harness.write([slot], [count])
            else:
                done = False
        elif what == "release" and length:
            harness.release(slot)
        elif what == "learn":
            for _ in range(50):
                harness.cache.note_end(number)
        if not done:
            assert (harness.pool.usage().in_use_bytes, harness.cache.free_blocks) == before
        harness.check()
    harness.close()
