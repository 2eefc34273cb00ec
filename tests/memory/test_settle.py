"""A tenant that closes gives back its own retired pages, and waits for no other tenant's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.memory.late_driver import LateDriver

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.weights.parameters import Parameter
from aquifer.weights.store import WeightStore

PAGE, LARGE = 4096, 4 * 4096
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)
LAYOUT = KVLayout((LayerKV(2, 16, 16),), torch.float32)


class TwoSizesDriver(LateDriver):
    """A late device with pages of two sizes."""

    default_page_bytes = PAGE
    large_page_bytes = LARGE


@pytest.fixture
def driver() -> Iterator[TwoSizesDriver]:
    driver = TwoSizesDriver()
    yield driver
    driver.close()


@pytest.fixture
def pool(driver: TwoSizesDriver) -> Iterator[PagePool]:
    pool = PagePool(driver, 64 * PAGE, PAGE)
    yield pool
    pool.close()


@pytest.fixture
def other(pool: PagePool) -> Iterator[VirtualRange]:
    """A range of another tenant."""
    other = VirtualRange(pool.pages, 8 * PAGE, PAGE)
    yield other
    pool.retired.settle(other)
    other.close()


def _retire(driver: LateDriver, pool: PagePool, range_: VirtualRange) -> None:
    """Retire four pages, which the device still works on."""
    pages = pool.acquire(B, 4)
    assert pages is not None
    range_.map(0, pages)
    driver.launch([range_.address])
    pool.retired.retire(range_, range(4))


def _assert_only_other(driver: LateDriver, pool: PagePool, other: VirtualRange) -> None:
    """The pages in `other` are retired as they were, and no others."""
    assert (driver.num_done, driver.num_waits) == (0, 0)
    assert pool.retired.indices(other) == set(range(4)) == set(other.pages)
    assert pool.usage().retired_bytes == 4 * PAGE


@pytest.mark.parametrize("name", KV_CACHES)
def test_a_cache_leaves_the_pages_of_others_retired(driver, pool, other, name):
    cache = kv_cache(name, 4)(pool, A, LAYOUT, 4, 64)
    assert cache.reserve(np.array([1, 2]), np.array([40, 20]))
    for slot in (1, 2):
        cache.release(slot)
    _retire(driver, pool, other)
    cache.close()
    _assert_only_other(driver, pool, other)


def test_weights_leave_the_pages_of_others_retired(driver, pool, other):
    """Large pages have ranges of their own."""
    parameters = [
        Parameter("large", (LARGE + PAGE,), torch.uint8, ()),
        Parameter("small", (7,), torch.uint8, ()),
    ]
    store = WeightStore(pool, Owner("a", Kind.WEIGHTS), parameters)
    assert store.populate()
    store.evict()
    _retire(driver, pool, other)
    store.close()
    _assert_only_other(driver, pool, other)


def test_without_a_range_all_are_given_back(driver, pool, other):
    one = VirtualRange(pool.pages, 8 * PAGE, PAGE)
    for range_ in (one, other):
        _retire(driver, pool, range_)
    pool.retired.settle(one)
    assert (driver.num_done, one.num_mapped_pages) == (1, 0)
    assert pool.retired.indices(other) == set(range(4))
    _retire(driver, pool, one)
    pool.retired.settle()
    assert (driver.num_done, one.num_mapped_pages, other.num_mapped_pages) == (3, 0, 0)
    one.close()


def test_pages_on_their_way_out_of_another_range_are_not_waited_for(
    driver, pool, other, monkeypatch
):
    one = VirtualRange(pool.pages, 8 * PAGE, PAGE)
    _retire(driver, pool, other)
    driver.finish()
    began, may_end = threading.Event(), threading.Event()
    unmap = driver.unmap

    def slow_unmap(*arguments: int) -> None:
        began.set()
        may_end.wait(10)
        unmap(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "unmap", slow_unmap)
        stocker = threading.Thread(target=pool.retired.collect)
        stocker.start()
        began.wait()
        pool.retired.settle(one)
        assert pool.retired.num_places() == other.num_mapped_pages == 4  # still on their way
        may_end.set()
        pool.retired.settle(other)
        assert pool.retired.num_places() == 0
        stocker.join()
    one.close()
