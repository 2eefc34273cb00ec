"""Slots, handles and allocators of AVMP, against their rules."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from aquifer.cache import kv_cache
from aquifer.cache.avmp import (
    DynamicPools,
    EvictionRule,
    FixedDual,
    HybridAllocator,
    PaddedUnified,
    SharedPages,
    SlotSizes,
    StaticPools,
)
from aquifer.cache.avmp.allocators import Pressure
from aquifer.cache.avmp.handles import Store, VirtualPageTable, store_of
from aquifer.cache.avmp.manager import AvmpCache
from aquifer.cache.avmp.slots import SharedSlotStore, SlotStore, aligned
from aquifer.cache.base import KVLayout, LayerKV, StateLayout, StateTensor
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool

SIZES = SlotSizes(kv_page_bytes=1024, state_bytes=4096)


def test_slots_are_taken_from_the_top_and_freed_onto_it() -> None:
    store = SlotStore(100, 128 * 6)
    assert (store.slot_bytes, store.num_slots) == (128, 6)
    assert store.allocate(1, 2) == [0, 1]
    assert store.allocate(2, 3) == [2, 3, 4]
    store.release(1)
    assert store.free == [5, 0, 1]
    assert store.allocate(3, 2) == [1, 0]
    assert [aligned(size) for size in (1, 128, 129)] == [128, 128, 256]


def test_the_one_that_was_touched_longest_ago_loses_all() -> None:
    store = SlotStore(128, 128 * 4)
    assert store.allocate(1, 2)
    assert store.allocate(2, 1)
    assert store.allocate(1, 1)  # touched again
    assert store.allocate(3, 1) == [2]  # that of 2
    assert store.lost == {2}
    # Once is not enough, and what was evicted stays so.
    assert store.allocate(4, 4) is None
    assert store.lost == {1, 2}
    assert sorted(store.free) == [0, 1, 3]


@pytest.mark.parametrize(
    ("rule", "gets", "lost"),
    [("once", False, {1}), ("until it fits", True, {1, 2, 3}), ("never", False, set())],
)
def test_rules(rule: EvictionRule, gets: bool, lost: set[int]) -> None:
    store = SlotStore(128, 128 * 4, rule)
    for request in (1, 2, 3):
        assert store.allocate(request, 1)
    assert (store.allocate(4, 4) is not None) == gets
    assert store.lost == lost
    assert store.num_evictions == len(lost)


def test_a_failed_try_one_by_one_reverses_the_stack() -> None:
    store = SlotStore(128, 128 * 3, "never", takes_singly=True)
    assert store.allocate(1, 4) is None
    assert store.free == [0, 1, 2]
    plain = SlotStore(128, 128 * 3, "never")
    assert plain.allocate(1, 4) is None
    assert plain.free == [2, 1, 0]


def test_slots_go_from_one_store_to_another() -> None:
    store = SlotStore(128, 128 * 4)
    assert store.allocate(1, 1) == [0]
    assert not store.can_give(5)
    assert not store.can_give(4)
    assert store.can_give(3)
    store.shrink(2)
    assert (store.num_slots, store.free) == (2, [1])
    store.grow(2)
    assert store.allocate(2, 3) == [3, 2, 1]


def test_a_slot_that_is_freed_by_its_first_owner() -> None:
    store = SharedSlotStore(128, 128 * 2)
    first = store.allocate(1, 2)
    assert first is not None
    second = store.allocate(2, 1)
    assert second is not None
    assert store.lost == {1}
    store.free_numbers(1, first)  # takes the slot of 2
    assert (store.num_stale, store.lost) == (1, {1, 2})
    assert sorted(store.free) == [0, 1]
    store.free_numbers(2, second)  # nobody has it
    assert sorted(store.free) == [0, 1]


def test_handles_find_their_slots_until_these_are_freed() -> None:
    table = VirtualPageTable([1024, 4096])
    pages, blocks = table.add(Store.KV, [3, 1]), table.add(Store.STATE, [3])
    assert all(0 <= handle < 1 << 32 for handle in (*pages, *blocks))
    assert [store_of(handle) for handle in (*pages, *blocks)] == [Store.KV, Store.KV, Store.STATE]
    assert table.resolve(pages[0]) == (Store.KV, 3 * 1024)
    assert table.resolve(blocks[0]) == (Store.STATE, 3 * 4096)
    table.remove(Store.KV, [3])
    assert table.resolve(pages[0]) is None
    assert table.resolve(pages[1]) == (Store.KV, 1024)
    (again,) = table.add(Store.KV, [3])
    assert again not in pages
    assert len(table) == 3


def test_a_store_that_is_short_gets_a_batch_of_the_other() -> None:
    pools = DynamicPools(SIZES, 64 * 1024, batch=2)
    kv, states = pools.stores
    assert (kv.num_slots, states.num_slots) == (32, 8)
    assert pools.allocate(1, Store.STATE, 1)
    # 40 pages: two blocks make 8 pages more.
    handles = pools.allocate(2, Store.KV, 40)
    assert handles is not None
    assert (kv.num_slots, states.num_slots) == (40, 6)
    assert (pools.num_rebalances, pools.migrated_bytes, pools.wasted_bytes) == (1, 8192, 0)
    assert pools.pressure is Pressure.BALANCED
    # The next one is evicted first, and six blocks cannot be given while one is live.
    assert pools.allocate(3, Store.KV, 80) is None
    assert all(pools.table.resolve(handle) is None for handle in handles)
    pools.end(1, [])
    pools.end(3, [])
    assert len(pools.table) == 0


def test_thresholds_count_where_they_are_used() -> None:
    options = {"batch": 1, "uses_thresholds": True}
    strict = DynamicPools(SIZES, 64 * 1024, threshold_high=0.9, **options)  # type: ignore[arg-type]
    assert strict.allocate(1, Store.STATE, 2)
    assert strict.allocate(2, Store.KV, 33) is None
    assert (strict.num_rebalances, strict.num_refused) == (0, 1)
    assert strict.pressure is Pressure.KV_PRESSURED
    loose = DynamicPools(SIZES, 64 * 1024, threshold_low=1.1, **options)  # type: ignore[arg-type]
    assert loose.allocate(2, Store.KV, 33)
    assert loose.allocate(3, Store.KV, 37) is None  # too soon after the last one
    assert (loose.num_rebalances, loose.num_refused) == (1, 1)


def test_a_block_of_state_is_pages_of_the_shared_pool() -> None:
    pool = SharedPages(SIZES, 10 * 1024)
    assert len(pool.allocate(1, Store.STATE, 2) or ()) == 8
    assert len(pool.allocate(2, Store.KV, 2) or ()) == 2
    assert pool.allocate(3, Store.STATE, 1) is not None
    assert pool.lost == {1}


@pytest.mark.parametrize("rule", ["once", "until it fits", "never"])
@pytest.mark.parametrize(
    "kind",
    [PaddedUnified, FixedDual, StaticPools, DynamicPools, SharedPages],
    ids=lambda k: k.__name__,
)
def test_slots_are_never_lost_nor_given_twice(
    kind: type[HybridAllocator], rule: EvictionRule
) -> None:
    """Random requests: what is free and what the ledger has are all slots, each once."""
    random = Random(5)
    allocator = kind(SIZES, 256 * 1024, rule=rule)  # type: ignore[call-arg]
    given: dict[int, list[int]] = {}
    for number in range(2000):
        if given and random.random() < 0.2:
            request = random.choice(list(given))
            allocator.end(request, given.pop(request))
        else:
            request = random.choice([number, *given])
            store = random.choice((Store.KV, Store.KV, Store.STATE))
            ids = allocator.allocate(request, store, random.randint(1, 40))
            given.setdefault(request, []).extend(ids or ())
        for slots in allocator.stores:
            held = [slot for of in slots.ledger.values() for slot in of]
            assert sorted([*slots.free, *held]) == list(range(slots.num_slots))
        if isinstance(allocator, StaticPools):
            held_in_all = sum(len(of) for s in allocator.stores for of in s.ledger.values())
            assert len(allocator.table) == held_in_all
    for request in list(given):
        allocator.end(request, given.pop(request))
    assert all(len(slots.free) == slots.num_slots for slots in allocator.stores)


PAGE = 4096
TOKENS = KVLayout((LayerKV(2, 16, 16), LayerKV(2, 16, 16)), torch.float32)  # 512 bytes
STATE = StateLayout(((StateTensor("state", (64, 64), torch.float32),),) * 2)  # 32 KiB


def _cache(
    name: str, num_pages: int, state: StateLayout | None = STATE
) -> tuple[AvmpCache, PagePool]:
    pool = PagePool(HostDriver(), num_pages * PAGE, PAGE, 0)
    cache = kv_cache(name, 8, 64)(pool, Owner("a", Kind.KV), TOKENS, 8, 256, state)
    assert isinstance(cache, AvmpCache)
    return cache, pool


def _close(cache: AvmpCache, pool: PagePool) -> None:
    cache.close()
    pool.check()
    assert not pool.usage().in_use_bytes
    pool.close()


def _reserve(cache: AvmpCache, slot: int, num_tokens: int) -> bool:
    return cache.reserve(np.array([slot]), np.array([num_tokens]))


def test_a_batch_that_is_too_large() -> None:
    """64 pages: half for KV, that is 32 blocks or 256 tokens, and half for four states."""
    for name in ("avmp-fixed", "avmp"):
        cache, pool = _cache(name, 64)
        assert _reserve(cache, 1, 200)
        assert [store.num_slots for store in cache.stores.allocator.stores] == [32, 4]
        assert not _reserve(cache, 2, 100)  # a batch is 64 states
        assert pool.usage().in_use_bytes.get(Owner("a", Kind.KV)) == 25 * PAGE
        _close(cache, pool)


def test_a_batch_that_is_free() -> None:
    """Slots are moved if none of them is live, and never more bytes are mapped than there are."""
    cache, pool = _cache("avmp", 64 * 40)  # 1280 blocks, and 160 states
    assert _reserve(cache, 1, 1)
    kv, states = cache.stores.allocator.stores
    assert (kv.num_slots, states.num_slots) == (1280, 160)
    taken = cache.stores.take(Store.KV, 1279)
    assert cache.stores.allocator.num_moves == 0
    assert _reserve(cache, 2, 9)
    assert cache.stores.allocator.num_moves == 1
    assert (kv.num_slots, states.num_slots) == (1280 + 64 * 8, 160 - 64)
    sizes = kv.num_slots * kv.slot_bytes + states.num_slots * states.slot_bytes
    assert sizes <= pool.budget_bytes
    for each in taken:
        cache.stores.give(Store.KV, each)
    cache.release(1)
    assert len(states.free) == states.num_slots - 1
    _close(cache, pool)
    assert len(kv.free) == kv.num_slots


def test_states_are_counted() -> None:
    """A fifth sequence finds no slot for its state, and nothing of it is left."""
    cache, pool = _cache("avmp-fixed", 64)
    for slot in range(1, 5):
        assert _reserve(cache, slot, 1)
    before = pool.usage()
    assert not _reserve(cache, 5, 1)
    assert pool.usage() == before
    cache.release(2)
    assert _reserve(cache, 5, 1)
    _close(cache, pool)


def test_padded_slots_are_of_layers() -> None:
    """A slot is as large as the state of one layer, and a block has one for each of two."""
    cache, pool = _cache("avmp-padded", 64)  # 16 slots of 16 KiB
    assert _reserve(cache, 1, 48)  # 6 blocks and a state: 14 slots
    assert not _reserve(cache, 2, 1)
    assert _reserve(cache, 1, 56)
    assert not _reserve(cache, 1, 57)
    _close(cache, pool)


def test_without_states_all_is_for_kv() -> None:
    cache, pool = _cache("avmp", 64, None)
    assert _reserve(cache, 1, 256)
    assert _reserve(cache, 2, 256)
    assert not _reserve(cache, 3, 1)
    _close(cache, pool)


def test_a_dead_handle_has_no_slot() -> None:
    pools = DynamicPools(SIZES, 1 << 16)
    (handle,) = pools.allocate(1, Store.KV, 1) or ()
    assert pools.slot_of(handle) == 0
    pools.end_one(1, Store.KV, handle)
    with pytest.raises(InvariantError, match="is dead"):
        pools.slot_of(handle)


def test_unknown_variant() -> None:
    pool = PagePool(HostDriver(), 64 * PAGE, PAGE, 0)
    with pytest.raises(ConfigError, match="unknown variant 'avm'"):
        AvmpCache("avm", 8, None, pool, Owner("a", Kind.KV), TOKENS, 8, 256)
    pool.close()


def test_numbers_of_dead_handles_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all 2^31, which is a month of 800 blocks a second; here they are eight."""
    monkeypatch.setattr("aquifer.cache.avmp.handles._NUM_BITS", 3)
    table = VirtualPageTable([1024, 4096])
    first = table.add(Store.KV, [0, 1, 2, 3, 4, 5])
    state = table.add(Store.STATE, [0])
    table.remove(Store.KV, [0, 1, 3, 4])
    again = table.add(Store.KV, [0, 1, 3, 4, 6])
    live = [first[2], first[5], *state, *again]
    assert len(set(live)) == len(table) == 8
    assert [table.resolve(handle) for handle in again] == [
        (Store.KV, slot * 1024) for slot in (0, 1, 3, 4, 6)
    ]
    assert table.resolve(first[2]) == (Store.KV, 2048)
    assert table.resolve(state[0]) == (Store.STATE, 0)
