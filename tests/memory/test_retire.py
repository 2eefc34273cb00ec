"""Retired pages: never unmapped under work in flight, and never lost.

The device here is late, and unmapping what unfinished work touches fails the test on the spot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
import torch
from tests.cases import covering
from tests.memory.late_driver import LateDriver, LateFence

from aquifer.cache import KV_CACHES, group_cache
from aquifer.cache.base import AttentionOptions, KVLayout, LayerKV, Rows, Spans
from aquifer.cache.virtual import VirtualCache
from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Handle
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import PROCESS, Kind, Owner, Page, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.stock import PageStocker

PAGE = 4096
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)


@pytest.fixture
def driver() -> Iterator[LateDriver]:
    driver = LateDriver()
    yield driver
    driver.close()


@pytest.fixture
def pool(driver: LateDriver) -> Iterator[PagePool]:
    pool = PagePool(driver, 8 * PAGE, PAGE)
    yield pool
    pool.close()


@pytest.fixture
def range_(pool: PagePool) -> Iterator[VirtualRange]:
    range_ = VirtualRange(pool.pages, 32 * PAGE, PAGE)
    yield range_
    pool.retired.settle()
    pool.release(range_.unmap(sorted(range_.pages)))
    range_.close()


def _map(pool: PagePool, range_: VirtualRange, index: int, count: int) -> None:
    pages = pool.acquire(A, count)
    assert pages is not None
    range_.map(index, pages)


def _launch(driver: LateDriver, range_: VirtualRange, index: int, count: int) -> None:
    driver.launch([range_.address + i * PAGE for i in range(index, index + count)])


def test_a_page_leaves_only_after_its_fence(driver, pool, range_):
    _map(pool, range_, 0, 4)
    _launch(driver, range_, 0, 4)
    pool.retired.retire(range_, range(4))
    assert not pool.retired.collect()
    assert (range_.num_mapped_pages, pool.usage().in_use_bytes) == (4, {})
    assert (pool.usage().retired_bytes, pool.free_bytes) == (4 * PAGE, 8 * PAGE)
    assert (pool.usage().free_bytes, pool.ready_bytes) == (8 * PAGE, 4 * PAGE)
    driver.finish()
    assert pool.retired.collect()
    assert not pool.retired.collect()
    assert (range_.num_mapped_pages, pool.usage().in_use_bytes) == (0, {})
    assert (pool.usage().retired_bytes, pool.free_bytes, pool.ready_bytes) == (
        0,
        8 * PAGE,
        8 * PAGE,
    )
    assert driver.num_waits == 0


def test_without_fences_it_leaves_at_once():
    driver = HostDriver()
    pool = PagePool(driver, 8 * PAGE, PAGE)
    range_ = VirtualRange(pool.pages, 8 * PAGE, PAGE)
    _map(pool, range_, 0, 3)
    pool.retired.retire(range_, [0, 2])
    assert (len(pool.retired), range_.num_mapped_pages) == (0, 1)
    assert pool.usage().in_use_bytes == {A: PAGE}
    pool.retired.retire(range_, [1])
    range_.close()
    pool.close()
    driver.close()


def test_a_short_pool_waits_for_the_oldest_and_does_not_call_its_hook(driver, pool, range_):
    asked: list[int] = []

    def on_short(missing_bytes: int, asker: Owner) -> bool:
        asked.append(missing_bytes)
        return False

    pool.on_short = on_short
    for index in (0, 4):
        _map(pool, range_, index, 4)
        _launch(driver, range_, index, 4)
        pool.retired.retire(range_, range(index, index + 4))
    pages = pool.acquire(B, 3)
    assert pages is not None
    assert (driver.num_done, driver.num_waits, asked) == (1, 1, [])
    assert range_.num_mapped_pages == 5
    assert pool.acquire(B, 6) is None  # five are left, and all of them come back first
    assert (driver.num_done, asked, len(pool.retired)) == (2, [PAGE], 0)
    pool.release(pages)


def test_taken_back_where_it_is(driver, pool, range_):
    _map(pool, range_, 0, 4)
    before = range_.pages_at(range(4))
    _launch(driver, range_, 0, 4)
    pool.retired.retire(range_, range(4))
    assert list(pool.retired.reuse(range_, range(3))) == [0, 1, 2]
    assert not pool.retired.reuse(range_, range(4, 6))
    driver.finish()
    while pool.retired.collect():
        pass
    assert range_.pages_at(range(3)) == before[:3]
    assert range_.num_mapped_pages == 3
    assert pool.usage().in_use_bytes == {A: 3 * PAGE}


def test_what_is_left_of_a_stretch_is_its_beginning(driver, pool, range_):
    _map(pool, range_, 0, 6)
    _launch(driver, range_, 0, 6)
    pool.retired.retire(range_, range(6))
    assert pool.retired.reclaim(4 * PAGE)
    assert sorted(range_.pages) == [0, 1]
    assert list(pool.retired.reuse(range_, range(6))) == [0, 1]


def test_a_shared_page_is_not_written_by_two(driver, pool, range_):
    """It is unmapped, at the price of waiting, and its other users keep it."""
    _map(pool, range_, 0, 3)
    shared = range_.pages_at(range(1, 2))
    pool.share(shared)
    range_.map(9, shared)
    _launch(driver, range_, 0, 3)
    pool.retired.retire(range_, range(3))
    assert (pool.usage().retired_bytes, pool.usage().in_use_bytes) == (2 * PAGE, {A: PAGE})
    assert list(pool.retired.reuse(range_, range(3))) == [0, 2]
    assert driver.num_waits == 1
    assert sorted(range_.pages) == [0, 2, 9]
    assert pool.num_references(shared[0]) == 1


def test_nothing_is_given_up_twice(driver, pool, range_):
    _map(pool, range_, 0, 2)
    _launch(driver, range_, 0, 2)
    pool.retired.retire(range_, [0])
    with pytest.raises(InvariantError, match="given up twice"):
        pool.retired.retire(range_, [1, 0])
    with pytest.raises(InvariantError, match="is not mapped"):
        pool.retired.retire(range_, [1, 2])
    assert len(pool.retired) == 1


def test_a_page_of_which_all_places_are_retired_is_not_in_use(driver, pool, range_):
    """M1, M2: it is counted once, and must not be named until one of them takes it back."""
    _map(pool, range_, 0, 1)
    page = range_.pages_at(range(1))
    for index in (5, 9):
        pool.share(page)
        range_.map(index, page)
    _launch(driver, range_, 0, 10)
    pool.retired.retire(range_, [0, 5])
    assert (pool.usage().retired_bytes, pool.usage().in_use_bytes) == (0, {A: PAGE})
    driver.finish()
    pool.release(range_.unmap([9]))
    assert (pool.usage().retired_bytes, pool.usage().in_use_bytes) == (PAGE, {})
    for act in (pool.share, pool.release):
        with pytest.raises(InvariantError, match="does not hold it"):
            act(page)
    pool.check()
    assert pool.retired.reclaim(PAGE)
    pool.check()


def test_a_place_of_a_page_in_use_is_left_alone(driver, pool, range_):
    """To unmap it would free nothing; at the end of the use, the page is like any other."""
    _map(pool, range_, 0, 4)
    kept = range_.pages_at(range(2))
    pool.share(kept)
    pool.retired.retire(range_, range(4))
    assert (len(pool.retired), pool.retired.num_places()) == (2, 4)
    assert pool.usage().retired_bytes == 2 * PAGE
    driver.finish()
    assert pool.retired.collect()
    assert not pool.retired.collect()
    assert not pool.retired.reclaim(PAGE)
    assert sorted(range_.pages) == [0, 1]
    assert pool.acquire(B, 7) is None
    woken: list[bool] = []
    pool.retired.on_retire = lambda: woken.append(True)
    pool.release(kept[:1])
    assert woken == [True]
    assert (len(pool.retired), pool.retired.num_places()) == (1, 2)
    pool.check()
    pages = pool.acquire(B, 7)
    assert pages is not None
    assert sorted(range_.pages) == [1]
    pool.release([*pages, *kept[1:]])


def test_room_is_made_to_the_end_where_a_page_is_at_several_places(driver, pool, range_):
    """The first places that are given back free nothing, and more are asked for."""
    _map(pool, range_, 0, 2)
    for index in (10, 20):
        pool.share(range_.pages_at(range(2)))
        range_.map(index, range_.pages_at(range(2)))
    _launch(driver, range_, 0, 32)
    for index in (0, 10, 20):
        pool.retired.retire(range_, [index, index + 1])
    assert (len(pool.retired), pool.usage().retired_bytes) == (6, 2 * PAGE)
    pages = pool.acquire(B, 8)
    assert pages is not None
    assert range_.num_mapped_pages == 0
    pool.release(pages)


def test_a_page_is_taken_back_where_it_is_though_others_have_it(driver, pool, range_):
    """Where another page is, that one goes; the device is waited for only then."""
    _map(pool, range_, 0, 4)
    pages = range_.pages_at(range(4))
    held = pages[:3]
    pool.share(held)
    _launch(driver, range_, 0, 4)
    pool.retired.retire(range_, range(4))
    # The last is not in use, so it cannot be reused by name.
    assert [pool.retired.indices_of(range_, page) for page in pages] == [[0], [1], [2], []]
    pool.share(held[:1])
    assert list(pool.retired.reuse_pages(range_, [0], held[:1])) == [0]
    assert driver.num_waits == 0
    assert pool.num_references(held[0]) == 2
    pool.share([held[2]])
    assert list(pool.retired.reuse_pages(range_, [1, 2], [held[2], held[2]])) == [2]
    assert driver.num_waits == 1
    assert sorted(range_.pages) == [0, 2, 3]
    assert list(pool.retired.reuse_pages(range_, range(8, 8 + len(held)), held)) == []
    pool.check()
    pool.release(held)
    assert pool.usage().in_use_bytes == {A: 2 * PAGE}


def test_a_place_on_its_way_out_is_waited_for(driver, pool, range_, monkeypatch):
    """The stocker unmaps a page while the loop wants another one at that very place."""
    _map(pool, range_, 0, 1)
    _map(pool, range_, 5, 1)
    pool.retired.retire(range_, [0])
    driver.finish()
    unmap = driver.unmap
    started = threading.Event()

    def slow_unmap(*arguments: int) -> None:
        started.set()
        time.sleep(0.05)
        unmap(*arguments)

    monkeypatch.setattr(driver, "unmap", slow_unmap)
    stocker = threading.Thread(target=pool.retired.collect)
    stocker.start()
    started.wait()
    page = range_.pages_at(range(5, 6))
    assert list(pool.retired.reuse_pages(range_, [0], page)) == []
    pool.share(page)
    range_.map(0, page)
    stocker.join()
    pool.check()


@pytest.mark.parametrize("units", [1, 4])
def test_only_who_wants_its_indices_waits_for_a_page_on_its_way_out(
    driver, pool, range_, monkeypatch, units
):
    """A large page lies at indices behind its place, too."""
    page = pool.acquire(A, 1, units * PAGE)
    range_.map(8, page)
    _map(pool, range_, 20, 1)
    pool.retired.retire(range_, [8])
    driver.finish()
    unmap = driver.unmap
    started, may_end, asked = (threading.Event() for _ in range(3))

    def late_unmap(*arguments: int) -> None:
        started.set()
        assert may_end.wait(300)
        unmap(*arguments)

    def look() -> None:
        asked.set()
        found.append(pool.retired.sizes_at(range_, range(8 + units - 1, 16)))

    found: list[dict[int, int]] = []
    monkeypatch.setattr(driver, "unmap", late_unmap)
    threads = [threading.Thread(target=each) for each in (pool.retired.collect, look)]
    threads[0].start()
    assert started.wait(300)
    for others in (range(8), range(8 + units, 32)):
        assert 8 not in pool.retired.sizes_at(range_, others)
    pool.retired.vacate(range_, [20])
    threads[1].start()
    assert asked.wait(300)
    may_end.set()
    for thread in threads:
        thread.join()
    assert found == [{}]
    pool.check()


def test_a_place_on_its_way_out_is_seen(driver, pool, range_, monkeypatch):
    """Another thread may run when a fence is destroyed, as torch gives up the interpreter then."""
    seen: list[tuple[int, int]] = []
    others: list[threading.Thread] = []

    def look() -> None:
        seen.append((pool.retired.num_places(), range_.num_mapped_pages))

    class Destroyed(LateFence):
        def __del__(self) -> None:
            others.append(threading.Thread(target=look))
            others[0].start()
            others[0].join(0.05)

    monkeypatch.setattr(driver, "fence", lambda: Destroyed(driver, 0))
    _map(pool, range_, 0, 1)
    pool.retired.retire(range_, [0])
    assert pool.retired.collect()
    others[0].join()
    # Seen when it is out, or before it went; never mapped and yet not counted.
    ((num_places, num_mapped),) = seen
    assert num_places >= num_mapped


@pytest.mark.parametrize("seed", range(5))
def test_random_accounts(seed):
    """M1 to M4 with shared pages, retired ones and overhead, against a table of holders."""
    random = Random(seed)
    driver = LateDriver()
    pool = PagePool(driver, 40 * PAGE, PAGE, random.choice([0, 8]) * PAGE)
    range_ = VirtualRange(pool.pages, 64 * PAGE, PAGE)
    owners = {index: random.choice([A, B]) for index in range(64)}
    held: dict[int, Page] = {}  # places in use
    retired: dict[int, Page] = {}  # at least those that were not unmapped meanwhile
    owner_of: dict[Page, Owner] = {}
    kept: list[Page] = []  # one reference each, without a place
    overhead_bytes = 0

    def free_places() -> list[int]:
        return [index for index in range(64) if index not in held and index not in retired]

    for _ in range(600):
        act = random.choice(
            ("map", "map", "share", "retire", "back", "same", "keep", "collect", "over", "settle")
        )
        if act == "map" and free_places():
            index = random.choice(free_places())
            owner = owners[index]
            may_reclaim = random.random() < 0.5
            pages = pool.acquire(owner, 1, may_reclaim=may_reclaim)
            used = len({*held.values(), *kept})
            if pages is None:
                unused = len(set(retired.values()) - {*held.values(), *kept})
                room_bytes = (40 - used - (0 if may_reclaim else unused)) * PAGE - overhead_bytes
                assert room_bytes < PAGE
            else:
                range_.map(index, pages)
                held[index], owner_of[pages[0]] = pages[0], owner
        elif act == "share" and held and free_places():
            index, page = random.choice(free_places()), random.choice(list(held.values()))
            pool.share([page])
            range_.map(index, [page])
            held[index] = page
        elif act == "retire" and held:
            chosen = sorted(random.sample(list(held), random.randint(1, min(len(held), 6))))
            driver.launch([range_.address + index * PAGE for index in chosen])
            pool.retired.retire(range_, chosen)
            retired |= {index: held.pop(index) for index in chosen}
            driver.finish(len(driver.work) - random.randint(0, 3))
        elif act == "back" and retired:
            index = random.choice(list(retired))
            page = retired.pop(index)
            if pool.retired.reuse(range_, [index]):
                held[index] = page
        elif act == "same" and retired:
            index = random.choice(list(retired))
            page = random.choice([retired[index], *held.values()])
            if page in held.values() or page in kept:
                is_there = retired.pop(index) == page
                pool.share([page])
                assert list(pool.retired.reuse_pages(range_, [index], [page])) == [index] * is_there
                if is_there:
                    held[index] = page
                else:
                    pool.release([page])
        elif act == "keep" and (held or kept):
            if held and len(kept) < 10:
                kept.append(random.choice(list(held.values())))
                pool.share(kept[-1:])
            elif kept:
                pool.release([kept.pop(random.randrange(len(kept)))])
        elif act == "collect":
            pool.retired.collect()
        elif act == "over":
            overhead_bytes = random.choice([0, 0, 1, 5 * PAGE, 20 * PAGE + 7, 41 * PAGE])
            pool.account_overhead(overhead_bytes)
        elif act == "settle" and random.random() < 0.1:
            pool.retired.settle()
        retired = {index: page for index, page in retired.items() if index in range_.pages}
        pool.check()
        usage = pool.usage()
        in_use = {page: owner_of[page] for page in (*held.values(), *kept)}
        expected = {
            owner: num_bytes
            for owner in (A, B)
            if (num_bytes := list(in_use.values()).count(owner) * PAGE)
        }
        assert usage.in_use_bytes == expected | (
            {PROCESS: overhead_bytes} if overhead_bytes else {}
        )
        assert usage.retired_bytes == len(set(retired.values()) - set(in_use)) * PAGE
        assert pool.retired.num_places() == len(retired)
        assert len(pool.retired) == sum(page not in in_use for page in retired.values())
        total = sum(usage.in_use_bytes.values())
        terms = usage.retired_bytes + usage.idle_bytes + usage.uncreated_bytes
        assert total + terms == 40 * PAGE + usage.excess_bytes
        assert not usage.excess_bytes or usage.idle_bytes == usage.uncreated_bytes == 0
        assert usage.free_bytes == pool.free_bytes == max(40 * PAGE - total, 0)
        assert driver.resident_bytes() == pool.created_bytes
        assert range_.num_mapped_pages == len(held) + len(retired)
    driver.finish()
    pool.release(kept)
    pool.retired.retire(range_, sorted(held))
    pool.account_overhead(0)
    pool.retired.settle()
    assert not pool.usage().in_use_bytes
    range_.close()
    pool.close()
    driver.close()


def test_overhead_takes_idle_pages_then_retired_ones(driver, pool, range_):
    _map(pool, range_, 0, 6)
    _launch(driver, range_, 0, 6)
    pool.retired.retire(range_, range(2, 6))
    idle = pool.acquire(B, 1)
    assert idle is not None
    pool.release(idle)
    pool.account_overhead(2 * PAGE)
    assert (pool.usage().idle_bytes, pool.usage().retired_bytes) == (0, 4 * PAGE)
    pool.account_overhead(3 * PAGE)
    assert (range_.num_mapped_pages, driver.num_waits) == (5, 1)
    pool.account_overhead(7 * PAGE)
    assert (range_.num_mapped_pages, pool.usage().excess_bytes) == (2, PAGE)
    assert (pool.free_bytes, pool.acquire(B, 1)) == (0, None)
    assert pool.acquire(B, 0) == []
    pool.retired.retire(range_, [1])
    assert (pool.usage().retired_bytes, pool.usage().free_bytes, pool.free_bytes) == (PAGE, 0, 0)
    pool.retired.settle()
    assert (pool.usage().excess_bytes, pool.usage().idle_bytes, pool.created_bytes) == (0, 0, PAGE)
    pool.account_overhead(0)
    assert pool.free_bytes == 7 * PAGE


def test_large_pages_are_made_of_retired_small_ones(driver, pool, range_):
    """As weights that come while the KV of sequences that ended lies about."""
    _map(pool, range_, 0, 8)
    _launch(driver, range_, 0, 8)
    pool.retired.retire(range_, range(8))
    assert pool.acquire(B, 1, 4 * PAGE, may_reclaim=False) is None
    large = pool.acquire(B, 2, 4 * PAGE)
    assert large is not None
    assert (range_.num_mapped_pages, driver.resident_bytes()) == (0, 8 * PAGE)
    pool.release(large)


def test_the_stocker_leaves_retired_pages_alone_until_the_pool_gets_short(driver):
    pool = PagePool(driver, 32 * PAGE, PAGE)
    range_ = VirtualRange(pool.pages, 32 * PAGE, PAGE)
    stocker = PageStocker(pool, 0)
    stocker.start()
    _map(pool, range_, 0, 24)
    pool.retired.retire(range_, range(24))
    assert not stocker.wants_retired
    assert (range_.num_mapped_pages, pool.ready_bytes) == (24, 8 * PAGE)
    pages = pool.acquire(B, 7)  # one is left, and two are to be ready: a sixteenth
    assert pages is not None
    stocker.wake()
    _until(lambda: pool.ready_bytes >= 2 * PAGE)
    assert 0 < range_.num_mapped_pages < 24
    pool.check()
    assert list(pool.retired.reuse(range_, range(8))) == list(
        range(8)
    )  # what is left is the beginning
    stocker.close()
    pool.release(pages)
    pool.retired.retire(range_, range(8))
    pool.retired.settle()
    range_.close()
    pool.close()


def test_pages_that_are_given_up_are_unmapped_and_none_created_meanwhile(driver, monkeypatch):
    """What a load evicts is the load's. Only a step (`wake`) asks for stock."""
    created: list[int] = []
    create = driver.create

    def note(page_bytes: int, count: int) -> list[Handle]:
        created.append(count)
        handles: list[Handle] = create(page_bytes, count)
        return handles

    pool = PagePool(driver, 16 * PAGE, PAGE)
    range_ = VirtualRange(pool.pages, 32 * PAGE, PAGE)
    stocker = PageStocker(pool, 8, reclaim_below=1.0)
    stocker.start()
    _map(pool, range_, 0, 8)
    monkeypatch.setattr(driver, "create", note)
    pool.retired.retire(range_, range(8))
    _until(lambda: not pool.retired.num_places())
    assert not created
    pool.trim()
    stocker.wake()
    _until(lambda: pool.created_bytes == 2 * PAGE)  # the watermark
    assert created == [2]
    stocker.close()
    range_.close()
    pool.close()


LAYOUTS = {
    "small": KVLayout((LayerKV(2, 16, 16), LayerKV(1, 24, 8)), torch.float32),
    "large": KVLayout((LayerKV(4, 96, 96), LayerKV(2, 128, 64)), torch.float32),  # over a page
}
MAX_SEQS, MAX_TOKENS = 6, 96


def test_the_next_sequence_of_a_slot_finds_its_pages_mapped():
    """Deferred reclamation: nothing is created, mapped or unmapped, however long they lay."""
    driver = LateDriver()
    pool = PagePool(driver, 300 * PAGE, PAGE)
    stocker = PageStocker(pool, 0)
    stocker.start()
    cache = VirtualCache(pool, A, LAYOUTS["small"], MAX_SEQS, MAX_TOKENS)
    range_ = cache.tensors.range
    slots = np.array([2, 4])
    assert cache.reserve(slots, np.array([80, 60]))
    before = dict(range_.pages)
    for slot in slots.tolist():
        cache.release(slot)
    driver.finish()
    assert not stocker.wants_retired
    assert cache.stats(0).mapped_bytes == 0
    assert pool.usage().retired_bytes == len(before) * PAGE
    assert cache.reserve(slots, np.array([30, 90]))
    assert {i: page for i, page in range_.pages.items() if i in before} == before
    assert cache.stats(120).mapped_bytes == pool.usage().in_use_bytes[A]
    assert cache.reserve(slots, np.array([96, 96]))
    assert {i: page for i, page in range_.pages.items() if i in before} == before
    assert pool.usage().retired_bytes == 0
    cache.close()
    stocker.close()
    pool.close()
    driver.close()


def _in_use(pool: PagePool, range_: VirtualRange) -> set[int]:
    """Indices of pages that are mapped and not retired."""
    retired = pool.retired.indices(range_)  # first: places may leave between the two looks
    return set(range_.pages) - retired


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("name", "layout", "seed"), covering(KV_CACHES, LAYOUTS, range(6), strength=2)
)
def test_random_lives_on_a_late_device(name, layout, seed):
    """Sequences come, grow and end in a crowded pool, each step one or two behind.

    Each token's K is its sequence's number and its position; a step reads back all of them. With
    odd seeds, the stocker's thread collects beside it.
    """
    random = Random(seed)
    driver = LateDriver()
    pool = PagePool(driver, random.choice([12, 40, 200]) * PAGE, PAGE)
    stocker = PageStocker(pool, 8)
    if seed % 2:
        stocker.start()
    cache = group_cache(name, 8)(pool, A, LAYOUTS[layout], MAX_SEQS, MAX_TOKENS)
    range_ = cache.tensors.range
    lengths = np.zeros(MAX_SEQS, np.int64)
    number = np.zeros(MAX_SEQS, np.int64)
    num_refused = 0
    for step in range(150):
        for slot in range(MAX_SEQS):
            if lengths[slot] and random.random() < 0.15:
                cache.release(slot)
                lengths[slot] = 0
        slots = np.array(sorted(random.sample(range(MAX_SEQS), random.randint(1, MAX_SEQS))))
        counts = np.array([random.randint(1, 12) for _ in slots])
        inside = lengths[slots] + counts <= MAX_TOKENS
        slots, counts = slots[inside], counts[inside]
        if not len(slots):
            continue
        before = _in_use(pool, range_)
        if not cache.reserve(slots, lengths[slots] + counts):
            num_refused += 1
            assert _in_use(pool, range_) == before
            continue
        number[slots[lengths[slots] == 0]] = step
        spans = Spans.make(slots, lengths[slots], counts)
        view = cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
        row_slots, positions = spans.rows()
        for index, layer in enumerate(LAYOUTS[layout].layers):
            mark = torch.from_numpy(number[row_slots] * 1000 + positions).float()[:, None, None]
            keys = mark.expand(-1, layer.num_kv_heads, layer.key_dim)
            values = mark.expand(-1, layer.num_kv_heads, layer.value_dim)
            # The mean of all values so far, as no query prefers any key.
            view.write(index, keys, values)
            attended = view.attend(index, torch.zeros_like(keys), AttentionOptions(1.0))
            mean = number[row_slots] * 1000 + positions / 2
            expected = torch.from_numpy(mean).float()[:, None, None].expand_as(attended)
            torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-2)
        lengths[slots] += counts
        driver.launch([range_.address + i * PAGE for i in _in_use(pool, range_)])
        driver.finish(len(driver.work) - random.randint(0, 2))
        if not seed % 2 and random.random() < 0.5:
            pool.retired.collect()
        pool.check()
        # K1
        in_use_bytes = len(_in_use(pool, range_)) * PAGE
        assert cache.stats(int(lengths.sum())).mapped_bytes == in_use_bytes
        assert pool.usage().in_use_bytes.get(A, 0) == in_use_bytes
    assert num_refused or pool.budget_bytes > 12 * PAGE
    for left in np.flatnonzero(lengths):
        cache.release(int(left))
    driver.finish()
    assert pool.free_bytes == pool.budget_bytes
    if seed % 2:
        stocker.close()
    cache.close()
    assert not len(pool.retired)
    assert not pool.usage().in_use_bytes
    pool.close()
    driver.close()
