"""Footprints against formulas written out, against each other, and against the managers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.cache.footprint import UNLIMITED_TOKENS, Footprint, PartFootprint
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE = 4096
reproducible = settings(deadline=None, database=None, derandomize=True)


@dataclass(frozen=True)
class Formulas:
    """The formulas of `Footprint`, written out."""

    token_bytes: int
    page_bytes: int
    block_size: int | None  # tokens; None where a block is a page

    @property
    def block_bytes(self) -> int:
        return self.page_bytes if self.block_size is None else self.block_size * self.token_bytes

    @property
    def footprint(self) -> Footprint:
        return Footprint(self.token_bytes, self.block_bytes, self.page_bytes)

    def bytes_needed(self, num_tokens: int) -> int:
        if self.block_size is None:
            num_bytes = num_tokens * self.token_bytes
        else:
            num_bytes = -(-num_tokens // self.block_size) * self.block_bytes
        return -(-num_bytes // self.page_bytes) * self.page_bytes

    def group_bytes(self, num_prompt: int, num_total: int, num_sequences: int) -> int:
        needed_bytes = self.bytes_needed(num_total - 1)
        shared_bytes = (num_prompt - 1) * self.token_bytes
        shared_bytes -= shared_bytes % self.block_bytes
        return needed_bytes + (num_sequences - 1) * (needed_bytes - shared_bytes)

    def growth_bytes(self, left: np.ndarray) -> int:
        page_bytes = max(self.page_bytes, self.token_bytes)
        return int(np.maximum(left * self.token_bytes, (left > 0) * page_bytes).sum())


def pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)


formulas = st.builds(
    Formulas,
    token_bytes=st.integers(1, 300),
    page_bytes=st.sampled_from([1, 7, 64, 100]),
    block_size=st.none() | st.integers(1, 20),
)
lengths = st.integers(1, 200)
counts = st.integers(1, 5)


@given(reference=formulas, num_tokens=st.lists(st.integers(0, 500), min_size=1, max_size=5))
@reproducible
def test_pages_of_a_sequence(reference: Formulas, num_tokens: list[int]):
    footprint = reference.footprint
    expected = [reference.bytes_needed(count) // reference.page_bytes for count in num_tokens]
    assert [footprint.pages(count) for count in num_tokens] == expected
    assert footprint.pages(np.array(num_tokens, np.int64)).tolist() == expected


@given(reference=formulas, num_prompt=lengths, num_outputs=lengths, num_sequences=counts)
@reproducible
def test_most_pages_of_a_request(
    reference: Formulas, num_prompt: int, num_outputs: int, num_sequences: int
):
    total = num_prompt + num_outputs
    needed = pages(reference.group_bytes(num_prompt, total, num_sequences), reference.page_bytes)
    assert reference.footprint.most(num_prompt, total, num_sequences) == needed


@given(reference=formulas, more=st.lists(st.integers(0, 70), max_size=8))
@reproducible
def test_growth_of_running_sequences(reference: Formulas, more: list[int]):
    left = np.array(more, np.int64)
    needed = pages(reference.growth_bytes(left), reference.page_bytes)
    assert reference.footprint.growth(left, left) == needed


@given(reference=formulas, num_tokens=lengths, num_cached=st.integers(0, 200))
@reproducible
def test_pages_of_an_admission(reference: Formulas, num_tokens: int, num_cached: int):
    num_cached = min(num_cached, num_tokens - 1)
    needed = reference.footprint.needed(num_tokens, num_cached)
    # Cached tokens of a block that is copied save nothing.
    cached_bytes = num_cached * reference.token_bytes
    whole_bytes = cached_bytes - cached_bytes % reference.block_bytes
    missing_bytes = reference.bytes_needed(num_tokens) - whole_bytes
    assert needed == pages(missing_bytes, reference.page_bytes)


@given(reference=formulas, num_tokens=st.integers(0, 500))
@reproducible
def test_whole_blocks(reference: Formulas, num_tokens: int):
    footprint = reference.footprint
    count = footprint.whole_blocks(num_tokens)
    num_bytes = footprint.kv_bytes(num_tokens)
    assert num_bytes == num_tokens * reference.token_bytes
    assert footprint.blocks_bytes(count) <= num_bytes < footprint.blocks_bytes(count + 1)
    needed = pages(count * reference.block_bytes, reference.page_bytes)
    assert footprint.blocks_pages(count) == needed
    assert footprint.block_tokens == reference.block_bytes / reference.token_bytes


@given(reference=formulas, num_prompt=lengths, total=st.integers(2, 400), num_sequences=counts)
@reproducible
def test_more_tokens_never_take_less(
    reference: Formulas, num_prompt: int, total: int, num_sequences: int
):
    footprint = reference.footprint
    num_prompt = min(num_prompt, total - 1)
    most = footprint.most(num_prompt, total, num_sequences)
    assert footprint.pages(total) >= footprint.pages(total - 1)
    assert footprint.most(num_prompt, total + 1, num_sequences) >= most
    assert footprint.most(num_prompt, total, num_sequences + 1) >= most
    assert footprint.most(max(num_prompt - 1, 1), total, num_sequences) >= most
    assert most >= footprint.pages(total - 1)


@given(reference=formulas, num_pages=st.integers(-3, 60), num_prompt=lengths, num_sequences=counts)
@reproducible
def test_longest_is_the_inverse_of_most(
    reference: Formulas, num_pages: int, num_prompt: int, num_sequences: int
):
    footprint = reference.footprint
    longest = footprint.longest(num_pages, num_prompt, num_sequences)
    room_bytes = num_pages * reference.page_bytes
    limit = max(room_bytes, 0) // reference.token_bytes + 2
    # Among requests with this prompt, by trying all lengths.
    fitting = [
        total
        for total in range(num_prompt + 1, max(limit, num_prompt + 1) + 1)
        if reference.group_bytes(num_prompt, total, num_sequences) <= room_bytes
    ]
    if fitting:
        assert longest == max(fitting)
        return
    assert 1 <= longest <= num_prompt
    # A prompt with one output, as long as that in all, fits, and one of a token more does not.
    for total, fits in ((longest, longest > 1), (longest + 1, False)):
        if total > 1:
            needed_bytes = reference.group_bytes(total - 1, total, num_sequences)
            assert (needed_bytes <= room_bytes) == fits


def test_figures_of_llama_3_8b():
    """128 KiB a token, pages of 2 MiB: 16 tokens to a page, and to a block of 16."""
    for footprint in (
        Footprint(128 << 10, 2 << 20, 2 << 20),
        Footprint(128 << 10, 16 * (128 << 10), 2 << 20),
    ):
        assert footprint.block_tokens == 16
        assert [footprint.pages(count) for count in (0, 1, 16, 17)] == [0, 1, 1, 2]
        assert footprint.whole_blocks(47) == 2
        # Four sequences of 100 tokens: 7 pages each, of which three share the first 3.
        assert footprint.most(49, 101, 4) == 4 * 7 - 3 * 3
        assert footprint.longest(19, 49, 4) == 16 * 7 + 1
        assert footprint.longest(18, 49, 4) == 16 * 6 + 1
        assert footprint.needed(100, 49) == 4
        assert footprint.growth(np.array([0, 1, 64]), np.array([8, 8, 8])) == 5


@pytest.mark.parametrize("block_bytes", [0, 4096])
def test_a_model_without_kv_takes_no_memory(block_bytes: int):
    footprint = Footprint(0, block_bytes, 4096)
    assert footprint.pages(10**6) == 0
    assert footprint.pages(np.array([1, 10**6])).tolist() == [0, 0]
    assert footprint.most(1000, 2000, 8) == 0
    assert footprint.needed(1000, 10) == 0
    assert footprint.growth(np.array([64, 64]), np.array([8, 8])) == 0
    assert footprint.longest(0) == footprint.longest(100, 50, 4) == UNLIMITED_TOKENS
    assert footprint.whole_blocks(1000) == footprint.kv_bytes(1000) == 0
    assert footprint.block_tokens == 0


def test_a_manager_that_shares_nothing_takes_all_of_it_for_each_sequence():
    footprint = Footprint(100, 400, 400, shares=False)
    assert footprint.most(81, 101, 3) == 3 * 25
    assert footprint.needed(100, 80) == 25


@given(
    reference=formulas,
    place_pages=st.integers(1, 6),
    kept=lengths,
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    idle=st.integers(0, 30),
    num_total=st.integers(2, 400),
)
@example(
    reference=Formulas(8, 64, 17),
    place_pages=6,
    kept=33,
    steps=[21, 1, 3, 9],
    idle=1,
    num_total=400,
)
@reproducible
def test_windows_of_several_sequences(
    reference: Formulas,
    place_pages: int,
    kept: int,
    steps: list[int],
    idle: int,
    num_total: int,
):
    """Each sequence begins as late in a block as it can, and has its part of the largest step."""
    token_bytes, block_bytes = place_pages * reference.token_bytes, reference.block_bytes
    block_bytes *= place_pages
    whole = Footprint(token_bytes, block_bytes, reference.page_bytes, place_pages=place_pages)
    part = PartFootprint(whole, kept, sum(steps) + idle)
    before = block_bytes - gcd(token_bytes, block_bytes)
    num_blocks = 0
    for step in steps:
        worst = (before + (kept + step) * token_bytes - 1) // block_bytes + 1
        num_blocks += min(worst, whole.blocks(num_total - 1))
    assert part.most(1, num_total, len(steps)) >= whole.blocks_pages(num_blocks)


@pytest.mark.parametrize("name", KV_CACHES)
@pytest.mark.parametrize("width", [64, 136, 1100], ids=["aligned", "straddling", "large"])
def test_managers_take_what_their_footprint_says(name: str, width: int):
    layout = KVLayout((LayerKV(1, width, width),), torch.float32)  # 8, 3.8 and 0.5 to a page
    pool = PagePool(HostDriver(), 300 * PAGE, PAGE)
    cache = kv_cache(name, 4)(pool, Owner("a", Kind.KV), layout, 1, 64)
    before = pool.free_bytes
    for num_tokens in (1, 7, 8, 9, 50):
        cache.expect(1, num_tokens, num_tokens + 1)
        assert cache.reserve(np.array([1]), np.array([num_tokens]))
        assert before - pool.free_bytes == cache.footprint.pages(num_tokens) * PAGE
        assert len(cache.blocks(1, num_tokens)) * cache.footprint.block_bytes >= num_tokens * (
            cache.footprint.token_bytes
        )
    cache.release(1)
    cache.close()
    pool.close()
    pool.driver.close()
