"""A device that has less than the budget says: the pool goes on with what it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.memory.late_driver import LateDriver
from tests.memory.page_tenant import PageTenant
from tests.memory.small_driver import SmallDriver

from aquifer.errors import DriverError
from aquifer.memory.pool import Kind, Owner, Page, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.reclaim import Reclaimer

PAGE = 4096
DEVICE_PAGES, BUDGET_PAGES = 8, 16
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)


class SmallLateDriver(SmallDriver, LateDriver):
    """A small device that runs behind."""


@pytest.fixture
def driver() -> Iterator[SmallLateDriver]:
    driver = SmallLateDriver(DEVICE_PAGES * PAGE)
    yield driver
    driver.close()


@pytest.fixture
def pool(driver: SmallLateDriver) -> Iterator[PagePool]:
    pool = PagePool(driver, BUDGET_PAGES * PAGE, PAGE, 4 * PAGE)
    yield pool
    pool.check()
    pool.close()


def _acquire(pool: PagePool, owner: Owner, count: int, page_bytes: int = PAGE) -> list[Page]:
    pages = pool.acquire(owner, count, page_bytes)
    assert pages is not None
    return pages


def _fill(pool: PagePool, range_: VirtualRange, count: int) -> None:
    range_.map(0, _acquire(pool, A, count))
    range_.tensor((count * PAGE,), torch.uint8).fill_(1)


def test_retired_pages_are_unmapped_where_no_page_can_be_created(driver, pool):
    range_ = VirtualRange(pool.pages, 16 * PAGE, PAGE)
    _fill(pool, range_, DEVICE_PAGES)
    driver.launch([range_.address])
    pool.retired.retire(range_, range(DEVICE_PAGES))
    with pytest.raises(DriverError):
        pool.acquire(B, 6, may_reclaim=False)
    assert (driver.num_waits, len(pool.retired)) == (0, DEVICE_PAGES)
    pages = _acquire(pool, B, 6)  # two more than the watermark lets lie idle
    assert (driver.num_waits, len(pool.retired)) == (1, 2)
    range_.map(8, pages)
    assert not range_.tensor((6 * PAGE,), torch.uint8, 8 * PAGE).any()  # M5
    pool.release(range_.unmap(range(8, 14)))
    pool.retired.settle()
    range_.close()


def test_tenants_give_up_what_the_device_does_not_have(pool):
    reclaimer = Reclaimer(lambda: 0.0)
    pool.on_short = reclaimer.reclaim
    tenant = PageTenant(pool, A, [1.0, 2.0, 3.0, 4.0])
    reclaimer.register(tenant)
    held = _acquire(pool, B, 4)
    before = pool.usage().in_use_bytes
    with pytest.raises(DriverError):
        pool.acquire(B, 1, may_reclaim=False)
    assert pool.usage().in_use_bytes == before
    held += _acquire(pool, B, 3)
    assert [regret for regret, _ in tenant.pages] == [4.0]
    with pytest.raises(DriverError):  # the last one does not suffice
        pool.acquire(B, 2)
    assert (tenant.pages, pool.usage().in_use_bytes) == ([], {B: 7 * PAGE})
    held += _acquire(pool, B, 1)
    pool.release(held)


def test_idle_pages_of_others_come_before_new_ones_that_the_device_refuses(driver, pool):
    """Idle pages of the same size are zeroed, of other sizes destroyed; neither is reclaiming."""
    range_ = VirtualRange(pool.pages, 4 * PAGE, PAGE)
    _fill(pool, range_, 4)
    others = _acquire(pool, A, 4)
    pool.release(range_.unmap(range(4)))
    assert pool.usage().idle_bytes == 4 * PAGE
    pages = pool.acquire(B, 3, may_reclaim=False)
    assert pages is not None
    range_.map(0, pages)
    assert not range_.tensor((3 * PAGE,), torch.uint8).any()  # M5
    pool.release(range_.unmap(range(3)))
    assert (driver.num_refusals, pool.usage().idle_bytes) == (1, 4 * PAGE)
    large = pool.acquire(B, 1, 4 * PAGE, may_reclaim=False)
    assert large is not None
    assert (driver.num_refusals, pool.usage().idle_bytes) == (2, 0)
    pool.release(others + large)
    range_.close()
