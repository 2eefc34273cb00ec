"""Both KV managers: what is written is read back, and every byte is accounted for.

Numbers such as K1 are the invariants of docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from tests.cache.guards import guards_of, in_use_bytes
from tests.cases import covering, tries
from tests.memory.small_driver import SmallDriver
from tests.models.dense_kv import DenseKV

from aquifer.cache import KV_CACHES, group_cache, kv_cache
from aquifer.cache.base import (
    AttentionOptions,
    KVLayout,
    KVPart,
    LayerKV,
    Rows,
    Spans,
)
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.swap import SwapSpace
from aquifer.cache.tensors import KVShape
from aquifer.cache.virtual import VirtualCache
from aquifer.errors import ConfigError, DriverError
from aquifer.kernels.alibi import alibi_slopes
from aquifer.memory.driver.base import Handle
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool

CPU = torch.device("cpu")
PAGE = 4096
BLOCK_SIZE = 8
AHEAD_TOKENS = 16
MAX_SEQS, MAX_TOKENS = 6, 160
OWNER, OTHER = Owner("a", Kind.KV), Owner("b", Kind.KV)

# Two layers that differ in everything; 2 query heads for each KV head in `_step`.
SMALL_TOKENS = KVLayout((LayerKV(2, 16, 16), LayerKV(1, 24, 8)), torch.float32)
ODD_TOKENS = KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.float32)  # 1088 bytes
LARGE_TOKENS = KVLayout((LayerKV(4, 96, 96), LayerKV(2, 128, 64)), torch.float32)  # over a page
LATENT_TOKENS = KVLayout(
    (LayerKV(1, 24, 16, is_latent=True), LayerKV(1, 72, 40, is_latent=True)), torch.float32
)
LAYOUTS = {
    "small": SMALL_TOKENS,
    "odd": ODD_TOKENS,
    "large": LARGE_TOKENS,
    "latent": LATENT_TOKENS,
}


class Harness:
    """A manager, the dense tensors that it must agree with, and the lengths of both."""

    def __init__(
        self,
        name: str,
        layout: KVLayout,
        num_pages: int,
        keep_idle_pages: int = 4,
        *,
        guards: bool = True,
    ):
        self.name, self.layout = name, layout
        self.driver = FaultyDriver(HostDriver())
        self.pool = PagePool(
            self.driver, num_pages * PAGE, PAGE, keep_idle_pages * PAGE, guards=guards
        )
        make = partial(group_cache(name, BLOCK_SIZE), self.pool, OWNER, layout)
        self.cache: KVPart = make(MAX_SEQS, MAX_TOKENS)
        self.dense = DenseKV(layout, MAX_SEQS, MAX_TOKENS)
        self.lengths = np.zeros(MAX_SEQS, np.int64)
        self.generator = torch.Generator().manual_seed(0)

    def reserve(self, slots: list[int], counts: list[int]) -> bool:
        return self.cache.reserve(np.array(slots), self.lengths[slots] + counts)

    def step(
        self,
        slots: list[int],
        counts: list[int],
        *,
        window_tokens: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        has_slopes: bool = False,
    ) -> None:
        """Write tokens of several sequences and compare attention over all there is."""
        spans = Spans.make(np.array(slots), self.lengths[slots], np.array(counts))
        self.cache.upload()
        view = self.cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
        dense_view = self.dense.view(np.array(slots), self.lengths[slots], np.array(counts))
        for index, layer in enumerate(self.layout.layers):
            # Slices of one larger tensor, as the fused projection of a model gives them.
            heads = layer.num_kv_heads
            widths = [2 * heads * layer.key_dim, heads * layer.key_dim, heads * layer.value_dim]
            fused = torch.randn(sum(counts), sum(widths), generator=self.generator)
            query, key, value = (
                part.unflatten(1, (-1, dim))
                for part, dim in zip(
                    fused.split(widths, 1),
                    (layer.key_dim, layer.key_dim, layer.value_dim),
                    strict=True,
                )
            )
            sinks = None
            if has_sinks:
                sinks = 3 * torch.randn(2 * heads, generator=self.generator)
            slopes = alibi_slopes(2 * heads, torch.device("cpu")) if has_slopes else None
            how = AttentionOptions(0.2, window_tokens, softcap, sinks, slopes)
            if layer.is_latent:  # its kernels know no other options
                value, how = key[..., : layer.value_dim], AttentionOptions(0.2)
            for each in (view, dense_view):
                each.write(index, key, value)
            actual = view.attend(index, query, how)
            expected = dense_view.attend(index, query, how)
            assert actual.shape == (sum(counts), 2 * heads, layer.value_dim)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        self.lengths[slots] += counts

    def read_back(self, slot: int) -> None:
        """Check every K and V that was written, exactly."""
        length = int(self.lengths[slot])
        for index in range(len(self.layout.layers)):
            keys, values = self.stored(slot, index)
            dense_keys, dense_values = self.dense.layers[index]
            assert torch.equal(keys, dense_keys[slot, :length])
            assert torch.equal(values, dense_values[slot, :length])

    def stored(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot where they lie: [length, kv_heads, head_dim] each."""
        keys, values = self.cache.tensors.layers[layer]
        length = int(self.lengths[slot])
        if self.name == "virtual":
            return keys[slot, :length], values[slot, :length]
        blocks = torch.tensor(self.cache.blocks(slot, length), dtype=torch.int64)
        return keys[blocks].flatten(0, 1)[:length], values[blocks].flatten(0, 1)[:length]

    @property
    def num_mapped_pages(self) -> int:
        return self.driver.mapped_pages - len(guards_of(self.cache))

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.lengths[slot] = 0

    def check(self) -> None:
        """K1 and K2: all mapped bytes are in use by the owner, and are written or wasted."""
        self.pool.check()
        written_tokens = int(self.lengths.sum())
        stats = self.cache.stats(written_tokens)
        assert stats.written_tokens == written_tokens
        assert stats.written_bytes == written_tokens * self.layout.token_bytes
        assert stats.mapped_bytes == stats.written_bytes + stats.wasted_bytes
        assert stats.wasted_bytes >= 0
        assert in_use_bytes(self.pool).get(OWNER, 0) == stats.mapped_bytes
        assert self.num_mapped_pages * PAGE == stats.mapped_bytes

    def waste_bound_bytes(self) -> int:
        """K3: bytes that may be mapped without a token in them, while nothing was released."""
        token_bytes = self.layout.token_bytes
        num_running = np.count_nonzero(self.lengths)
        if self.name == "virtual":
            return int(num_running) * (PAGE + AHEAD_TOKENS * token_bytes)
        return int(num_running) * (BLOCK_SIZE * token_bytes) + PAGE

    def close(self) -> None:
        self.cache.close()
        assert not in_use_bytes(self.pool)
        self.pool.close()
        driver = self.driver
        assert driver.is_unused
        driver.close()


@pytest.fixture(params=KV_CACHES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return LAYOUTS[request.param]


@pytest.fixture
def harness(name: str, layout: KVLayout) -> Iterator[Harness]:
    harness = Harness(name, layout, 1500)
    yield harness
    harness.close()


def test_unknown_name():
    with pytest.raises(ConfigError, match="'virutal'; choose one of virtual, paged"):
        group_cache("virutal")


def test_layouts_that_cannot_be_layer_major():
    """Each buffer has an equal part of a token; a manager of whole tokens has no buffers."""
    for layers in (
        (LayerKV(2, 32, 16),),
        (LayerKV(2, 32, 32), LayerKV(1, 32, 32)),
        (LayerKV(1, 48, 32, is_latent=True), LayerKV(1, 32, 32)),
    ):
        with pytest.raises(ConfigError, match="layer-major needs keys and values of the same size"):
            _ = KVLayout(layers, torch.float32).num_buffers
    latent = KVLayout((LayerKV(1, 48, 32, is_latent=True),) * 3, torch.float32)
    assert (latent.num_buffers, KVLayout((LayerKV(2, 8, 8),) * 3, torch.float32).num_buffers) == (
        3,
        6,
    )
    with pytest.raises(ConfigError, match="kv_cache avmp keeps whole tokens together"):
        kv_cache("avmp", mapping=MappingOptions(is_layer_major=True))


@pytest.mark.parametrize(
    ("name", "layout", "seed"),
    covering(KV_CACHES, LAYOUTS, range(tries(4)), strength=2),
    indirect=["name", "layout"],
)
def test_random_lives(name, layout, seed):
    """Sequences come, grow by chunks and by tokens, and go, in a pool that is often short."""
    peak_bytes = MAX_SEQS * MAX_TOKENS * layout.token_bytes
    harness = Harness(name, layout, peak_bytes // PAGE // 3, keep_idle_pages=seed)
    rng = np.random.default_rng(seed)
    num_short = 0
    for _ in range(120):
        if rng.random() < 0.25:
            harness.release(int(rng.integers(MAX_SEQS)))
            harness.check()
            continue
        slots = rng.permutation(MAX_SEQS)[: rng.integers(1, MAX_SEQS + 1)]
        counts = np.where(rng.random(len(slots)) < 0.6, 1, rng.integers(1, 40, len(slots)))
        fits = harness.lengths[slots] + counts <= MAX_TOKENS
        slots, counts = slots[fits].tolist(), counts[fits].tolist()
        if not slots:
            continue
        before = harness.pool.usage(), harness.num_mapped_pages
        if harness.reserve(slots, counts):
            harness.step(slots, counts, window_tokens=[None, 7, 50][rng.integers(3)])
        else:
            num_short += 1
            after = harness.pool.usage(), harness.num_mapped_pages
            assert after == before
        for slot in range(MAX_SEQS):
            harness.read_back(slot)
        harness.check()
    assert num_short > 3
    for slot in range(MAX_SEQS):
        harness.release(slot)
    assert harness.cache.stats(0).mapped_bytes == 0
    harness.check()
    harness.close()


def test_no_two_slots_share_bytes(harness):
    """K4: each token of each layer has bytes of its own."""
    for counts in ([5, 30, 1], [20, 1, 17]):
        assert harness.reserve([0, 3, 5], counts)
        harness.step([0, 3, 5], counts)
    seen: set[int] = set()
    for slot in (0, 3, 5):
        for layer, kv in enumerate(harness.layout.layers):
            keys, values = harness.cache.tensors.layers[layer]
            for position in range(int(harness.lengths[slot])):
                at = (slot, position)
                if harness.name == "paged":
                    block = harness.cache.blocks(slot, position + 1)[-1]
                    at = (block, position % BLOCK_SIZE)
                # A latent value is a part of its key.
                for tensor in (keys[at],) if kv.is_latent else (keys[at], values[at]):
                    # [kv_heads, head_dim], contiguous
                    assert tensor.is_contiguous()
                    elements = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 4)
                    assert seen.isdisjoint(elements)
                    seen.update(elements)
    assert len(seen) * 4 == harness.lengths.sum() * harness.layout.token_bytes


@pytest.mark.parametrize(
    ("window_tokens", "softcap"), covering([None, 1, 6, 33], [None, 3.0], strength=1)
)
def test_attention_in_chunks(harness, window_tokens, softcap):
    """A prompt in chunks beside others that decode, then all of them decode."""
    for slots, counts in [
        ([2], [9]),
        ([0, 2, 4], [31, 1, 12]),
        ([4, 2, 0, 1], [1, 1, 20, 3]),
        ([0, 1, 2, 4], [1, 1, 1, 1]),
        ([1, 0], [50, 1]),
    ]:
        assert harness.reserve(slots, counts)
        harness.step(slots, counts, window_tokens=window_tokens, softcap=softcap)
    for slot in range(MAX_SEQS):
        harness.read_back(slot)


@pytest.mark.parametrize(
    ("option", "window_tokens"), covering(["has_sinks", "has_slopes"], [None, 6], strength=1)
)
def test_attention_with_sinks_or_slopes(harness, window_tokens, option):
    """Each layer has sinks of its own."""
    for slots, counts in [([2], [9]), ([0, 2, 4], [31, 1, 12]), ([4, 2, 0], [1, 1, 20])]:
        assert harness.reserve(slots, counts)
        harness.step(slots, counts, window_tokens=window_tokens, **{option: True})


def test_waste_is_bounded(harness):
    """K3, at every length that a growing batch goes through."""
    rng = np.random.default_rng(0)
    starts = rng.integers(1, 40, MAX_SEQS).tolist()
    slots = list(range(MAX_SEQS))
    counts = starts
    while (harness.lengths[slots] + counts).max() <= MAX_TOKENS:
        assert harness.reserve(slots, counts)
        harness.lengths[slots] += counts
        harness.check()
        stats = harness.cache.stats(int(harness.lengths.sum()))
        assert stats.wasted_bytes < harness.waste_bound_bytes()
        counts = rng.integers(1, 4, MAX_SEQS).tolist()
    for slot in slots:
        harness.release(slot)
    assert harness.cache.stats(0).wasted_bytes == 0


def test_the_footprint_is_enough_and_no_more_than_is_taken(name, layout):
    """A pool of just that size holds the sequence, and one of a page less does not."""
    for num_tokens in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 100, MAX_TOKENS):
        needed_bytes = PAGE * Harness(name, layout, 1).cache.footprint.pages(num_tokens)
        assert needed_bytes % PAGE == 0
        assert needed_bytes >= num_tokens * layout.token_bytes
        harness = Harness(name, layout, needed_bytes // PAGE)
        assert harness.reserve([3], [num_tokens])
        assert in_use_bytes(harness.pool) == {OWNER: needed_bytes}
        harness.step([3], [num_tokens])
        harness.read_back(3)
        harness.close()
        if needed_bytes > PAGE:
            harness = Harness(name, layout, needed_bytes // PAGE - 1)
            assert not harness.reserve([3], [num_tokens])
            harness.check()
            harness.close()


def test_all_or_nothing(name, layout):
    """One of several sequences does not fit, as another tenant has the pages: none gets any."""
    needed_pages = -(-2 * MAX_TOKENS * layout.token_bytes // PAGE) + 4
    harness = Harness(name, layout, needed_pages)
    others = harness.pool.acquire(OTHER, needed_pages - 4 - 40 * layout.token_bytes // PAGE)
    assert others is not None
    assert harness.reserve([0], [10])
    harness.step([0], [10])
    before = harness.pool.usage()
    for _ in range(20):
        assert not harness.reserve([0, 1], [1, 100])
        assert not harness.reserve([1, 2, 0], [1, 1, 90])
    assert harness.pool.usage() == before
    harness.check()
    harness.pool.release(others)
    # All of it can be acquired now: the refused call took nothing.
    assert harness.reserve([0, 1], [MAX_TOKENS - 10, MAX_TOKENS])
    harness.step([0, 1], [MAX_TOKENS - 10, MAX_TOKENS])
    for slot in (0, 1):
        harness.read_back(slot)
    harness.close()


def test_asking_for_less_is_no_change(harness):
    assert harness.reserve([0, 1], [50, 20])
    before = harness.pool.usage()
    for counts in ([50, 20], [1, 1], [0, 0]):
        assert harness.reserve([0, 1], counts)
    assert harness.pool.usage() == before


def test_release_of_an_empty_slot_is_no_change(harness):
    harness.release(4)
    assert harness.reserve([4], [1])
    harness.step([4], [1])
    harness.release(4)
    harness.release(4)
    harness.check()
    assert not in_use_bytes(harness.pool)


def test_pages_of_another_owner_come_back_zeroed(name):
    """M5 for a tenant: the bytes of one model are gone before the other model gets the page."""
    harness = Harness(name, SMALL_TOKENS, 16, keep_idle_pages=16, guards=False)
    assert harness.reserve([0], [100])
    harness.step([0], [100])
    harness.release(0)
    other = group_cache(name, BLOCK_SIZE)(harness.pool, OTHER, SMALL_TOKENS, MAX_SEQS, MAX_TOKENS)
    assert other.reserve(np.array([0]), np.array([MAX_TOKENS]))
    keys, values = other.tensors.layers[0]
    # Slot 0, or the blocks of slot 0: both are the first there are.
    mapped = slice(0, 1) if name == "virtual" else slice(0, MAX_TOKENS // BLOCK_SIZE)
    assert not keys[mapped].any()
    assert not values[mapped].any()
    other.close()
    harness.close()


def test_virtual_maps_ahead_only_where_the_pool_has_it():
    """A sequence of tokens larger than a page grows by 16 tokens at a time."""
    pages_per_token = -(-LARGE_TOKENS.token_bytes // PAGE)
    harness = Harness("virtual", LARGE_TOKENS, 40)
    assert harness.reserve([0], [1])
    ahead_bytes = harness.cache.stats(1).mapped_bytes
    assert ahead_bytes >= AHEAD_TOKENS * LARGE_TOKENS.token_bytes
    assert ahead_bytes < AHEAD_TOKENS * LARGE_TOKENS.token_bytes + PAGE
    calls = harness.driver.num_calls
    for count in range(1, AHEAD_TOKENS + 1):
        assert harness.reserve([0], [count])
    assert harness.driver.num_calls == calls
    harness.release(0)
    others = harness.pool.acquire(OTHER, 40 - pages_per_token)
    assert others is not None
    assert harness.reserve([0], [1])
    assert harness.cache.stats(1).mapped_bytes == pages_per_token * PAGE
    harness.pool.release(others)
    harness.close()


SPREAD_SEQS = 24
PAGE_OF_TOKENS = KVLayout((LayerKV(1, 32, 32),), torch.float32)  # 16 tokens a page


def _growing(num_seqs: int, num_pages: int) -> tuple[PagePool, VirtualCache, list[int]]:
    """A cache, and a list of the pages mapped by each call to the driver."""
    driver = FaultyDriver(HostDriver())
    pool = PagePool(driver, num_pages * PAGE, PAGE)
    mapped: list[int] = []
    act = driver.map

    def count(address: int, handles: Sequence[Handle]) -> None:
        mapped.append(len(handles))
        act(address, handles)

    driver.map = count  # type: ignore[method-assign]
    return pool, VirtualCache(pool, OWNER, PAGE_OF_TOKENS, num_seqs, 1024), mapped


def _close(pool: PagePool, cache: VirtualCache) -> None:
    cache.close()
    pool.close()
    pool.driver.close()


def test_virtual_spreads_the_pages_of_sequences_that_grow_together():
    """K3, and at most 24 pages in a call, for any number of sequences of the same length."""
    num_seqs = 256
    pool, cache, mapped = _growing(num_seqs, 4000)
    slots = np.arange(num_seqs)
    assert cache.reserve(slots, np.full(num_seqs, 5))
    assert len(mapped) == num_seqs
    most = 0
    for length in range(6, 150):
        mapped.clear()
        assert cache.reserve(slots, np.full(num_seqs, length))
        most = max(most, sum(mapped))
        stats = cache.stats(num_seqs * length)
        token_bytes = PAGE_OF_TOKENS.token_bytes
        assert 0 <= stats.wasted_bytes < num_seqs * (PAGE + AHEAD_TOKENS * token_bytes)
        assert pool.usage().in_use_bytes == {OWNER: stats.mapped_bytes}  # K1
    assert most == SPREAD_SEQS
    _close(pool, cache)


def test_virtual_does_not_map_ahead_where_lengths_are_spread_already():
    num_seqs = 256
    pool, cache, mapped = _growing(num_seqs, 4000)
    slots = np.arange(num_seqs)
    lengths = 1 + slots % 16
    for _ in range(16):  # use up the room on the first pages
        assert cache.reserve(slots, lengths)
        lengths += 1
    for _ in range(80):
        mapped.clear()
        assert cache.reserve(slots, lengths)
        assert sum(mapped) == np.count_nonzero(lengths % 16 == 1) == 16
        lengths += 1
    _close(pool, cache)


def test_virtual_maps_ahead_for_those_who_are_short_first():
    """32 sequences, of which 31 are short in the next call, and are too many for it."""
    pool, cache, _ = _growing(33, 4000)
    slots = np.arange(32)
    assert cache.reserve(slots, np.ones(32, np.int64))
    before = [len(cache.slot_blocks(slot)) for slot in range(32)]
    assert cache.reserve(slots[::-1].copy(), np.where(slots[::-1] == 7, 10, 16))
    grown = [slot for slot in range(32) if len(cache.slot_blocks(slot)) > before[slot]]
    assert len(grown) == 31 - SPREAD_SEQS
    assert 7 not in grown
    _close(pool, cache)


def test_virtual_maps_ahead_of_need_only_what_lies_ready():
    """No page is reclaimed for it, and failing to map ahead is no error."""
    num_seqs = 64
    pool, cache, mapped = _growing(num_seqs, num_seqs + 3)
    asked: list[int] = []

    def on_short(missing_bytes: int, asker: Owner) -> bool:
        asked.append(missing_bytes)
        return False

    pool.on_short = on_short
    slots = np.arange(num_seqs)
    for length in range(1, 17):
        mapped.clear()
        assert cache.reserve(slots, np.full(num_seqs, length))
    assert pool.usage().free_bytes == 3 * PAGE
    assert (mapped, asked) == ([], [])
    assert not cache.reserve(slots, np.full(num_seqs, 17))
    assert asked == [(num_seqs - 3) * PAGE]
    _close(pool, cache)


def test_virtual_maps_only_what_is_needed_where_the_device_has_no_more():
    """Mapping ahead is optional, so the call succeeds where only that is refused."""
    needed_pages = -(-LARGE_TOKENS.token_bytes // PAGE)
    driver = SmallDriver(needed_pages * PAGE)
    pool = PagePool(driver, 100 * PAGE, PAGE)
    cache = VirtualCache(pool, OWNER, LARGE_TOKENS, MAX_SEQS, MAX_TOKENS)
    assert cache.reserve(np.array([1]), np.array([1]))
    assert driver.num_refusals == 1
    assert len(cache.slot_blocks(1)) == needed_pages
    with pytest.raises(DriverError):  # this one is needed
        cache.reserve(np.array([2]), np.array([1]))
    assert list(cache.slot_blocks(2)) == []
    cache.close()
    pool.close()
    driver.close()


def test_paged_takes_the_lowest_block_and_gives_back_whole_pages():
    """K5: after most sequences ended, the blocks that are left do not pin all pages for long."""
    harness = Harness("paged", SMALL_TOKENS, 200, keep_idle_pages=0)
    for slot in range(MAX_SEQS):
        assert harness.reserve([slot], [40])
    for slot in (0, 2, 4):
        harness.release(slot)
    highest = harness.cache.blocks(5, 40)[4]
    assert harness.reserve([0], [5 * BLOCK_SIZE])
    taken = harness.cache.blocks(0, 40)
    assert list(taken) == list(range(5))
    assert max(taken) < highest
    for slot in range(1, MAX_SEQS):
        harness.release(slot)
    mapped_bytes = harness.cache.stats(0).mapped_bytes
    assert mapped_bytes == PAGE * harness.cache.footprint.pages(5 * BLOCK_SIZE)
    harness.close()


def test_layout_splits_a_token_into_layers():
    tokens = torch.arange(2 * ODD_TOKENS.token_elements).view(2, -1)
    assert ODD_TOKENS.token_elements == 3 * 64 + 80
    assert ODD_TOKENS.token_bytes == 4 * ODD_TOKENS.token_elements
    (k0, v0), (k1, v1) = ODD_TOKENS.split(tokens)
    assert (k0.shape, v0.shape) == ((2, 3, 40), (2, 3, 24))
    assert (k1.shape, v1.shape) == ((2, 1, 56), (2, 1, 24))
    flat = torch.cat([part.flatten(1) for part in (k0, v0, k1, v1)], dim=1)
    assert torch.equal(flat, tokens)


def test_layout_of_latent_tokens():
    """A value is a part of its key, and takes no bytes of its own."""
    assert LATENT_TOKENS.token_elements == 24 + 72
    assert LATENT_TOKENS.token_bytes == 4 * (24 + 72)
    tokens = torch.arange(2 * LATENT_TOKENS.token_elements).view(2, -1)
    (k0, v0), (k1, v1) = LATENT_TOKENS.split(tokens)
    assert k0[1].tolist() == [list(range(96, 120))]
    assert v0[1].tolist() == [list(range(96, 112))]
    assert k1[0].tolist() == [list(range(24, 96))]
    assert v1[0].tolist() == [list(range(24, 64))]
    assert (v0.data_ptr(), v1.data_ptr()) == (k0.data_ptr(), k1.data_ptr())
    assert LATENT_TOKENS.alignments(128) == [(0, 0), (96, 96)]
    assert LATENT_TOKENS.attention_operations(5) == 2 * 5 * (24 + 16 + 72 + 40)


def test_writing_latent_tokens_leaves_their_values_alone():
    """What is given as the value is not written over the key."""
    pool = PagePool(HostDriver(), 16 * PAGE, PAGE)
    cache = group_cache("virtual", BLOCK_SIZE)(pool, OWNER, LATENT_TOKENS, MAX_SEQS, MAX_TOKENS)
    assert cache.reserve(np.array([1]), np.array([2]))
    spans = Spans.make(np.array([1]), np.array([0]), np.array([2]))
    view = cache.tensors.view(Rows.of(spans, 0, CPU))
    view.write(0, torch.ones(2, 1, 24), torch.zeros(2, 1, 16))
    keys, values, first, second = view.destination(0)
    assert (keys[first, second] == 1).all()
    assert (values[first, second] == 1).all()
    cache.release(1)
    cache.close()
    pool.close()


def test_spans_name_every_row():
    spans = Spans.make(np.array([4, 1, 2]), np.array([0, 7, 3]), np.array([2, 1, 3]))
    slots, positions = spans.rows()
    assert spans.num_tokens == 6
    assert spans.offsets.tolist() == [0, 2, 3, 6]
    assert slots.tolist() == [4, 4, 1, 2, 2, 2]
    assert positions.tolist() == [0, 1, 7, 3, 4, 5]


NO_KV = KVLayout((), torch.float32)


def test_a_model_without_kv(name):
    """It never takes pages; sequences fork, and nothing is retained or swapped."""
    driver = FaultyDriver(HostDriver())
    pool = PagePool(driver, 8 * PAGE, PAGE)
    cache = group_cache(name, BLOCK_SIZE)(pool, OWNER, NO_KV, MAX_SEQS, MAX_TOKENS)
    driver.fail_at = driver.num_calls  # the device gets no call
    slots = np.array([1, 2, 5])
    for length in (1, 40, MAX_TOKENS):
        assert cache.reserve(slots, np.full(3, length))
    assert cache.footprint.pages(MAX_TOKENS) == 0
    assert (list(cache.blocks(1, 40)), list(cache.slot_blocks(1))) == ([], [])
    assert cache.fork(1, 3, 40)
    assert cache.adopt(4, [], 7)
    cache.retain([])
    cache.unretain([])
    assert cache.tokens_in(5) == cache.tokens_touching(5) == 0
    assert cache.preferred_slot([], [6]) is None
    assert cache.footprint.block_bytes > 0
    rows = Rows.of(Spans.make(slots, np.zeros(3, np.int64), np.ones(3, np.int64)), 0, CPU)
    cache.upload()
    cache.tensors.view(rows)
    space = SwapSpace(1 << 20, CPU)
    swapped = space.swap_out(cache, [1, 2], [40, 30])
    assert swapped is not None
    assert space.used_bytes == 0
    cache.release(1)
    cache.release(2)
    assert space.swap_in(cache, [2, 6], swapped)
    stats = cache.stats(500)
    assert (stats.written_bytes, stats.mapped_bytes, stats.shared_bytes) == (0, 0, 0)
    assert not in_use_bytes(pool)
    cache.close()
    pool.close()


def test_a_cache_takes_no_page_before_its_first_sequence(name):
    driver = FaultyDriver(HostDriver())
    pool = PagePool(driver, 8 * PAGE, PAGE)
    cache = group_cache(name, BLOCK_SIZE)(pool, OWNER, SMALL_TOKENS, MAX_SEQS, MAX_TOKENS)
    assert (len(pool.pages), driver.mapped_pages) == (0, 0)
    cache.close()
    assert not driver.reservations


class AnchoredDriver(HostDriver):
    """A host that says it is a GPU, so that caches have anchors; its tensors are not used."""

    device = torch.device("cuda", 0)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def test_blocks_behind_the_anchor_begin_where_a_page_does():
    """So that `Footprint.pages` is right for them. Here a block is three quarters of a page."""
    pool = PagePool(AnchoredDriver(), 8 * PAGE, PAGE)
    layout = KVLayout((LayerKV(1, 3 * PAGE // 64, 3 * PAGE // 64),), torch.float32)
    shape = KVShape.blocks(pool, layout, MAX_SEQS, MAX_TOKENS, 2, 10)
    assert (shape.row_bytes, shape.num_anchor_pages) == (3 * PAGE // 4, 1)
    assert shape.first_row == 4
    assert shape.num_rows == 14
    pool.driver.close()


def test_the_anchor_comes_with_the_first_sequence():
    """It is overhead of the model, in a page of its own, until the cache is closed."""
    driver = FaultyDriver(AnchoredDriver())
    pool = PagePool(driver, 8 * PAGE, PAGE)
    cache = VirtualCache(pool, OWNER, SMALL_TOKENS, MAX_SEQS, MAX_TOKENS)
    others = pool.acquire(OTHER, 8)
    assert others is not None
    assert not cache.reserve(np.array([1]), np.array([1]))
    assert not cache.adopt(2, [], 0)
    pool.release(others)
    assert cache.reserve(np.array([1]), np.array([1]))
    overhead = Owner(OWNER.model, Kind.OVERHEAD)
    kv_bytes = cache.stats(1).mapped_bytes
    assert pool.usage().in_use_bytes == {OWNER: kv_bytes, overhead: PAGE}
    cache.release(1)
    assert pool.usage().in_use_bytes == {overhead: PAGE}
    assert list(cache.tensors.range.pages) == [0]
    cache.close()
    assert not in_use_bytes(pool)
    pool.close()
    assert driver.is_unused
