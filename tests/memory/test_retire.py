"""Retired pages: never unmapped under work in flight, and never lost.

The device here is late: work that it was given is done when a test says so, or when somebody
waits for it. Unmapping what unfinished work touches fails the test on the spot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np
import pytest
import torch

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, LayerKV, Spans
from aquifer.errors import InvariantError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.stock import PageStocker
from aquifer.memory.virtual import VirtualRange

PAGE = 4096
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)


class LateFence:
    """Passes when the device has done so many pieces of work."""

    def __init__(self, device: LateDriver, count: int) -> None:
        self._device = device
        self._count = count

    def passed(self) -> bool:
        return self._device.num_done >= self._count

    def wait(self) -> None:
        self._device.num_waits += not self.passed()
        self._device.finish(self._count)


class LateDriver(HostDriver):
    """Host pages under a device that runs behind."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[frozenset[int]] = []  # addresses of the pages that each piece touches
        self.num_done = 0
        self.num_waits = 0

    def launch(self, addresses: Sequence[int]) -> None:
        self.work.append(frozenset(addresses))

    def finish(self, count: int | None = None) -> None:
        self.num_done = max(self.num_done, len(self.work) if count is None else count)

    def fence(self) -> LateFence:  # type: ignore[override]  # the host has none
        return LateFence(self, len(self.work))

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        places = range(address, address + count * page_bytes, page_bytes)
        for touched in self.work[self.num_done :]:
            assert not touched.intersection(places), "unmapped under work in flight"
        super().unmap(address, page_bytes, count)


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
def range_(driver: LateDriver, pool: PagePool) -> Iterator[VirtualRange]:
    range_ = VirtualRange(driver, 32 * PAGE, PAGE)
    yield range_
    pool.retired.settle()
    pool.release(range_.unmap_all())
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
    assert (range_.num_mapped_pages, pool.usage().in_use_bytes) == (4, {A: 4 * PAGE})
    assert (pool.retired.num_bytes, pool.free_bytes) == (4 * PAGE, 8 * PAGE)
    driver.finish()
    assert pool.retired.collect()
    assert not pool.retired.collect()
    assert (range_.num_mapped_pages, pool.usage().in_use_bytes) == (0, {})
    assert (pool.retired.num_bytes, pool.free_bytes) == (0, 8 * PAGE)
    assert driver.num_waits == 0


def test_without_fences_it_leaves_at_once():
    driver = HostDriver()
    pool = PagePool(driver, 8 * PAGE, PAGE)
    range_ = VirtualRange(driver, 8 * PAGE, PAGE)
    _map(pool, range_, 0, 3)
    pool.retired.retire(range_, [0, 2])
    assert (len(pool.retired), range_.num_mapped_pages) == (0, 1)
    assert pool.usage().in_use_bytes == {A: PAGE}
    pool.retired.retire(range_, [1])
    range_.close()
    pool.close()
    driver.close()


def test_who_is_short_waits_for_the_oldest_and_takes_from_nobody(driver, pool, range_):
    asked: list[int] = []

    def on_short(missing_bytes: int) -> bool:
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
    before = range_.handles(0, 4)
    _launch(driver, range_, 0, 4)
    pool.retired.retire(range_, range(4))
    assert pool.retired.take_back(range_, 0, 3) == 3
    assert pool.retired.take_back(range_, 4, 2) == 0
    driver.finish()
    while pool.retired.collect():
        pass
    assert range_.handles(0, 3) == before[:3]
    assert range_.num_mapped_pages == 3
    assert pool.usage().in_use_bytes == {A: 3 * PAGE}


def test_what_is_left_of_a_stretch_is_its_beginning(driver, pool, range_):
    _map(pool, range_, 0, 6)
    _launch(driver, range_, 0, 6)
    pool.retired.retire(range_, range(6))
    assert pool.retired.reclaim(4 * PAGE)
    assert sorted(range_._handles) == [0, 1]
    assert pool.retired.take_back(range_, 0, 6) == 2


def test_a_shared_page_is_not_written_by_two(driver, pool, range_):
    """It goes, at the price of waiting, and whoever else has it keeps it."""
    _map(pool, range_, 0, 3)
    shared = range_.handles(1, 1)
    pool.share(shared)
    range_.map(9, shared)
    _launch(driver, range_, 0, 3)
    pool.retired.retire(range_, range(3))
    assert pool.retired.num_bytes == 2 * PAGE
    assert pool.retired.take_back(range_, 0, 3) == 1
    assert driver.num_waits == 1
    assert sorted(range_._handles) == [0, 9]
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


LAYOUTS = {
    "small": KVLayout((LayerKV(2, 16, 16), LayerKV(1, 24, 8)), torch.float32),
    "large": KVLayout((LayerKV(4, 96, 96), LayerKV(2, 128, 64)), torch.float32),  # over a page
}
MAX_SEQS, MAX_TOKENS = 6, 96


def _in_use(pool: PagePool, range_: VirtualRange) -> set[int]:
    """Indices of pages that are mapped and not retired."""
    with pool._books:
        retired = {i for _, i in [*pool.retired._waiting, *pool.retired._leaving]}
        return set(range_._handles) - retired


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KV_CACHES)
def test_random_lives_on_a_late_device(name, layout, seed):
    """Sequences come, grow and end in a crowded pool, each step one or two behind.

    Each token's K is its sequence's number and its position; a step reads back all of them. With
    odd seeds, the stocker's thread collects beside it.
    """
    random = Random(seed)
    driver = LateDriver()
    pool = PagePool(driver, random.choice([12, 40, 200]) * PAGE, PAGE)
    stocker = PageStocker(pool, 8 * PAGE)
    if seed % 2:
        stocker.start()
    cache = kv_cache(name, 8)(pool, A, LAYOUTS[layout], MAX_SEQS, MAX_TOKENS)
    range_: VirtualRange = cache._range  # type: ignore[attr-defined]
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
        view = cache.view(spans)
        row_slots, positions = spans.rows()
        for index, layer in enumerate(LAYOUTS[layout].layers):
            mark = torch.from_numpy(number[row_slots] * 1000 + positions).float()[:, None, None]
            keys = mark.expand(-1, layer.num_kv_heads, layer.key_dim)
            values = mark.expand(-1, layer.num_kv_heads, layer.value_dim)
            # The mean of all values so far, as no query prefers any key.
            attended = view.attend(index, torch.zeros_like(keys), keys, values, scale=1.0)
            mean = number[row_slots] * 1000 + positions / 2
            expected = torch.from_numpy(mean).float()[:, None, None].expand_as(attended)
            torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-2)
        lengths[slots] += counts
        driver.launch([range_.address + i * PAGE for i in _in_use(pool, range_)])
        driver.finish(len(driver.work) - random.randint(0, 2))
        if not seed % 2 and random.random() < 0.5:
            pool.retired.collect()
        pool.check()
    assert num_refused or pool.budget_bytes > 12 * PAGE
    for left in np.flatnonzero(lengths):
        cache.release(int(left))
    driver.finish()
    if seed % 2:
        _until(lambda: not len(pool.retired))
        stocker.close()
    cache.close()
    assert not pool.usage().in_use_bytes
    pool.close()
    driver.close()
