"""A follower that executes a leader's journal: its memory is equal wherever a kernel reads."""

from __future__ import annotations

import pickle
from random import Random

import numpy as np
import pytest
import torch
from tests.cache.guards import guards_of, in_use_bytes
from tests.cases import EVERY_CASE, covering
from tests.memory.late_driver import LateDriver
from tests.memory.queued_mapper import QueuedMapper

from aquifer.cache import KV_CACHES, group_cache
from aquifer.cache.base import (
    AttentionOptions,
    KVLayout,
    KVPart,
    KVView,
    LayerKV,
    Rows,
    Spans,
)
from aquifer.cache.follower import KVFollower
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.swap import SwappedKV, SwapSpace
from aquifer.cache.swap_memory import SwapMemory
from aquifer.cache.tensors import KVTensors
from aquifer.cache.virtual import VirtualCache
from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Driver
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE = 4096
BLOCK_SIZE = 4
MAX_SEQS, MAX_TOKENS = 5, 48
KV = Owner("a", Kind.KV)
LAYOUTS = {
    "aligned": KVLayout((LayerKV(1, 32, 32), LayerKV(1, 48, 16)), torch.float32),
    "straddling": KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.float32),
    "large": KVLayout((LayerKV(4, 96, 96), LayerKV(2, 128, 160)), torch.float32),
}
EQUAL_LAYOUTS = {  # for layer-major KV: a page in each buffer has 8 tokens, or a part of the last
    "aligned": KVLayout((LayerKV(2, 64, 64), LayerKV(4, 32, 32)), torch.float32),
    "straddling": KVLayout((LayerKV(3, 40, 40),), torch.float32),
    "large": KVLayout((LayerKV(1, 1100, 64, is_latent=True),) * 3, torch.float32),
}
SWAP_BYTES = 4 << 20


class Pair:
    """A leader and a follower; steps write the same tokens on both sides, and compare them."""

    def __init__(
        self,
        name: str,
        layout: KVLayout,
        num_pages: int,
        drivers: tuple[Driver, Driver],
        *,
        guards: bool = True,
    ):
        self.layout = layout
        self.drivers = drivers
        self.pool = PagePool(drivers[0], num_pages * PAGE, PAGE, guards=guards)
        self.is_background = name == "background"
        # It has another budget and other pages were taken before, so its page numbers differ.
        self.other_pool = PagePool(drivers[1], (num_pages + 3) * PAGE, PAGE, guards=guards)
        self.other_pages = self.other_pool.acquire(Owner("b", Kind.KV), 3) or []
        if self.is_background:  # before a cache asks for it
            for pool in (self.pool, self.other_pool):
                pool.mapper = BackgroundMapper(pool.pages)
                pool.keep_idle_bytes = num_pages * PAGE
        make = group_cache(
            "paged" if "paged" in name else "virtual",
            BLOCK_SIZE,
            MappingOptions(
                2 * PAGE if name == "large pages" else None,
                is_layer_major="layer-major" in name,
            ),
        )
        self.cache: KVPart = make(self.pool, KV, layout, MAX_SEQS, MAX_TOKENS)
        self.cache.tensors.record()
        shape = pickle.loads(pickle.dumps(self.cache.tensors.shape))
        self.follower = KVFollower(self.other_pool, KV, shape)
        self.space = SwapSpace(SWAP_BYTES, torch.device("cpu"))
        self.host_memory = SwapMemory(SWAP_BYTES, torch.device("cpu"))
        self.lengths: dict[int, int] = {}
        self.generator = torch.Generator().manual_seed(0)

    def sync(self) -> None:
        self.cache.upload()
        ops = pickle.loads(pickle.dumps(self.cache.tensors.take_journal()))
        self.follower.execute(ops, self.host_memory)

    def step(self, counts: dict[int, int]) -> None:
        """Write new tokens through the view of either side, and read all of these sequences."""
        slots = np.array(list(counts))
        starts = np.array([self.lengths.get(slot, 0) for slot in counts])
        spans = Spans.make(slots, starts, np.array(list(counts.values())))
        self.sync()
        rows = Rows.of(spans, 0, torch.device("cpu"))
        views: list[KVView] = [self.cache.tensors.view(rows), self.follower.view(rows)]
        for index, layer in enumerate(self.layout.layers):
            heads = layer.num_kv_heads
            query, key, value = (
                torch.randn(spans.num_tokens, heads, dim, generator=self.generator)
                for dim in (layer.key_dim, layer.key_dim, layer.value_dim)
            )
            for view in views:
                view.write(index, key, value)
            read = [view.attend(index, query, AttentionOptions(0.3)) for view in views]
            assert torch.equal(*read)
        for slot, count in counts.items():
            self.lengths[slot] = self.lengths.get(slot, 0) + count
        for driver in self.drivers:
            if isinstance(driver, LateDriver):
                driver.launch([])

    def compare(self) -> None:
        """Every token of every sequence, byte by byte, and who has which pages."""
        if isinstance(self.cache, VirtualCache):
            for slot in range(MAX_SEQS):
                self.cache._slots.settle(slot)  # noqa: SLF001
        self.sync()
        token_bytes = self.layout.token_bytes
        tensors, other = self.cache.tensors, self.follower.tensors
        for slot, length in self.lengths.items():
            out = torch.empty(length * token_bytes, dtype=torch.uint8)
            self.cache.copy_out(slot, range(length), out)
            tokens = tensors.shape.row_tokens
            blocks = (
                [slot] if tensors.shape.table_shape is None else self.cache.blocks(slot, length)
            )
            parts = [
                self._bytes_of(other, block, min(tokens, length - i * tokens) * token_bytes)
                for i, block in enumerate(blocks)
            ]
            assert torch.equal(torch.cat(parts), out)
        tensors.take_journal()  # the copies that were made to compare
        in_use = tensors.range.pages.keys() - self.pool.retired.indices(tensors.range)
        if self.pool.guards is not None:
            in_use -= guards_of(self.cache)
        other_in_use = other.range.pages.keys() - self.other_pool.retired.indices(other.range)
        assert other_in_use - (other.guard.guards if other.guard else set()) == in_use
        assert in_use_bytes(self.other_pool).get(KV, 0) == sum(in_use_bytes(self.pool).values())
        self.pool.check()
        self.other_pool.check()

    @staticmethod
    def _bytes_of(tensors: KVTensors, row: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a slot or block."""
        found = torch.empty(num_bytes, dtype=torch.uint8)
        tensors.copy_out(row * tensors.shape.row_bytes, found)
        return found

    def close(self) -> None:
        self.cache.close()
        self.follower.execute(self.cache.tensors.take_journal(), self.host_memory)
        self.follower.close()
        self.other_pool.release(self.other_pages)
        for pool in (self.pool, self.other_pool):
            assert not in_use_bytes(pool)
            if pool.mapper is not None:
                pool.mapper.close()
            pool.close()
            pool.driver.close()


@pytest.mark.parametrize(
    ("name", "layout", "seed"),
    covering(
        (*KV_CACHES, "large pages", "layer-major virtual", "layer-major paged", "background"),
        LAYOUTS,
        range(4),
        strength=2,
    ),
)
def test_random_lives(name, layout, seed):
    """Forks, adoptions, growth, ends and swaps, in a pool that is often short."""
    random = Random(seed)
    kv = (EQUAL_LAYOUTS if "layer-major" in name else LAYOUTS)[layout]
    peak_bytes = MAX_SEQS * MAX_TOKENS * kv.token_bytes
    drivers: tuple[Driver, Driver] = (
        LateDriver() if seed % 2 else HostDriver(),
        LateDriver() if seed % 4 > 1 else HostDriver(),
    )
    pair = Pair(name, kv, max(peak_bytes // PAGE // 2, 12), drivers)
    cache, lengths = pair.cache, pair.lengths
    retained: list[tuple[list[int], int]] = []
    swapped: list[list[SwappedKV]] = []
    done: dict[str, int] = {}
    for _ in range(250 if EVERY_CASE else 120):
        for pool in (
            pair.pool,
            pair.other_pool,
        ):  # what is not ready is not mapped in the background
            if pair.is_background and random.random() < 0.5:
                pool.stock(random.randint(0, 12) * PAGE)
        act = random.choice(("grow", "grow", "grow", "fork", "end", "adopt", "drop", "out", "in"))
        free = [slot for slot in range(MAX_SEQS) if slot not in lengths]
        is_done = False
        if act == "grow":
            slots = random.sample(range(MAX_SEQS), random.randint(1, 3))
            counts = {slot: random.choice([1, 1, 3, 9]) for slot in slots}
            ends = [lengths.get(slot, 0) + count for slot, count in counts.items()]
            for slot in counts.keys() - lengths.keys() if name == "large pages" else ():
                cache.expect(slot, random.randint(1, 40), MAX_TOKENS + 1)
            if max(ends) <= MAX_TOKENS and cache.reserve(np.array(slots), np.array(ends)):
                pair.step(counts)
                is_done = True
        elif act == "fork" and lengths and free:
            parent, child = random.choice(list(lengths)), random.choice(free)
            count = random.randint(1, lengths[parent])
            if cache.fork(parent, child, count):
                lengths[child] = count
                is_done = True
                if random.random() < 0.3:
                    cache.release(parent)
                    del lengths[parent]
        elif act == "end" and lengths:
            slot = random.choice(list(lengths))
            if random.random() < 0.7:
                blocks = list(cache.blocks(slot, lengths[slot]))
                cache.upload()
                cache.retain(blocks)
                retained.append((blocks, lengths[slot]))
            cache.release(slot)
            del lengths[slot]
            is_done = True
        elif act == "adopt" and retained and free:
            blocks, count = random.choice(retained)
            slot = random.choice(free)
            if cache.adopt(slot, blocks, count):
                lengths[slot] = count
                is_done = True
        elif act == "drop" and retained:
            cache.unretain(retained.pop(random.randrange(len(retained)))[0])
            is_done = True
        elif act == "out" and lengths:
            slots = random.sample(list(lengths), random.randint(1, len(lengths)))
            group = pair.space.swap_out(cache, slots, [lengths[slot] for slot in slots])
            if group is not None:
                swapped.append(group)
                for slot in slots:
                    cache.release(slot)
                    del lengths[slot]
                is_done = True
        elif act == "in" and swapped and len(free) >= len(swapped[0]):
            slots = random.sample(free, len(swapped[0]))
            if pair.space.swap_in(cache, slots, swapped[0]):
                lengths.update(zip(slots, [kv.num_tokens for kv in swapped.pop(0)], strict=True))
                is_done = True
        done[act] = done.get(act, 0) + is_done
        if random.random() < 0.5:
            pair.compare()
        for driver, pool in zip(drivers, (pair.pool, pair.other_pool), strict=True):
            if isinstance(driver, LateDriver) and random.random() < 0.3:
                driver.finish(max(len(driver.work) - random.randint(0, 2), 0))
                pool.retired.collect()
    assert min(done.values()) > 0
    pair.compare()
    for slot in list(lengths):
        cache.release(slot)
    for blocks, _ in retained:
        cache.unretain(blocks)
    lengths.clear()
    pair.compare()
    pair.close()


def test_nothing_is_recorded_unless_asked():
    pool = PagePool(HostDriver(), 64 * PAGE, PAGE)
    cache = group_cache("virtual")(pool, KV, LAYOUTS["aligned"], 2, 16)
    with pytest.raises(InvariantError, match="nothing was recorded"):
        cache.tensors.take_journal()
    assert cache.reserve(np.array([1]), np.array([9]))
    with pytest.raises(InvariantError, match="before the first page"):
        cache.tensors.record()
    cache.close()


def test_a_follower_without_room():
    pair = Pair("virtual", LAYOUTS["aligned"], 12, (HostDriver(), HostDriver()))
    others = pair.other_pool.acquire(Owner("b", Kind.KV), 12)
    assert others is not None
    assert pair.cache.reserve(np.array([1]), np.array([9]))
    with pytest.raises(InvariantError, match="has no room"):
        pair.sync()


def background_pair() -> tuple[Pair, list[QueuedMapper], list[FaultyDriver]]:
    """Pages of 8 tokens, all of them ready. A sequence fills two, and more are on their way."""
    drivers = [FaultyDriver(HostDriver()) for _ in range(2)]
    pair = Pair("background", LAYOUTS["aligned"], 40, (drivers[0], drivers[1]), guards=False)
    mappers = []
    for pool in (pair.pool, pair.other_pool):
        assert pool.mapper is not None
        pool.mapper.close()
        pool.mapper = QueuedMapper(pool.pages)
        mappers.append(pool.mapper)
        while pool.stock(40 * PAGE):
            pass
    for count in (1, 15):
        assert pair.cache.reserve(np.array([1]), np.array([pair.lengths.get(1, 0) + count]))
        pair.step({1: count})
    assert [len(mapper.work) for mapper in mappers] == [1, 1]
    return pair, mappers, drivers


def test_a_follower_maps_in_the_background_what_its_leader_does():
    """Where its thread keeps up, none of its own calls is in the way of a step."""
    pair, mappers, _ = background_pair()
    for length in range(17, 48):
        for mapper in mappers:
            mapper.catch_up()
        calls = pair.other_pool.pages.num_foreground_calls
        assert pair.cache.reserve(np.array([1]), np.array([length]))
        pair.step({1: 1})
        assert pair.other_pool.pages.num_foreground_calls == calls
    assert len(mappers[1].work) == len(mappers[0].work) > 1
    pair.compare()
    pair.cache.release(1)
    pair.lengths.clear()
    pair.close()


@pytest.mark.parametrize("side", [0, 1])
def test_what_one_of_both_is_refused_is_mapped_in_the_step(side: int) -> None:
    pair, mappers, drivers = background_pair()
    drivers[side].fail_at = drivers[side].num_calls
    for mapper in mappers:
        mapper.catch_up()
    assert drivers[side].failed_call == "map"
    for length in range(17, 30):
        assert pair.cache.reserve(np.array([1]), np.array([length]))
        pair.step({1: 1})
    pair.compare()
    pair.cache.release(1)
    pair.lengths.clear()
    pair.close()
