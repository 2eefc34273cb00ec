"""Slots, handles and allocators of AVMP, against their rules."""

from __future__ import annotations

from random import Random

import pytest

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
from aquifer.cache.avmp.slots import SharedSlotStore, SlotStore, aligned

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
