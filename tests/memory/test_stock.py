"""The stocker's thread on a device that refuses for a while."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from aquifer.errors import DriverError
from aquifer.memory.driver.base import Handle
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.stock import PageStocker

PAGE = 4096
STOCK_PAGES = 4


class FullDriver(HostDriver):
    """A device that may be full, and tells that it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True
        self.asked = threading.Semaphore(0)

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        is_full = self.is_full
        self.asked.release()
        if is_full:
            raise DriverError("FULL", "no page is left")
        return super().create(page_bytes, count)


def test_refusals_in_a_row_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with closing(FullDriver()) as driver, closing(PagePool(driver, 64 * PAGE, PAGE)) as pool:
        stocker = PageStocker(pool, STOCK_PAGES)
        stocker.start()

        def wake(times: int) -> None:
            for _ in range(times):
                stocker.wake()
                assert driver.asked.acquire(timeout=10)

        wake(3)
        driver.is_full = False
        wake(1)
        driver.is_full = True
        pages = pool.acquire(Owner("a", Kind.KV), STOCK_PAGES)  # waits until they are in stock
        assert pages is not None
        wake(3)
        stocker.close()
        assert [record.getMessage() for record in caplog.records] == [
            "could not create pages ahead of need: FULL: no page is left"
        ] * 2
        pool.release(pages)
