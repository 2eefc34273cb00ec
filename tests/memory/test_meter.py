"""When the system is asked what a process holds outside of pages, and what counts until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from aquifer.errors import DriverError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.meter import OverheadMeter
from aquifer.memory.pool import PagePool

PAGE = 4096


class AskedDriver(HostDriver):
    """A device whose system tells each time another figure, and may fail."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.known_bytes = 0
        self.fails = False
        self.answered = threading.Semaphore(0)

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        if not asks_system:
            return self.known_bytes
        assert threading.current_thread() is not threading.main_thread()
        self.num_asked += 1
        fails = self.fails
        try:
            if fails:
                raise DriverError("LOST", "the device is gone")
            return 10 * PAGE * self.num_asked
        finally:
            self.answered.release()


@pytest.fixture
def driver() -> Iterator[AskedDriver]:
    with closing(AskedDriver()) as driver:
        yield driver


@pytest.fixture
def pool(driver: AskedDriver) -> Iterator[PagePool]:
    with closing(PagePool(driver, 64 * PAGE, PAGE)) as pool:
        yield pool


@pytest.fixture
def meter(pool: PagePool) -> Iterator[OverheadMeter]:
    meter = OverheadMeter(pool)
    meter.every_s = 0.0
    meter.start()
    with closing(meter):
        yield meter


def until_accounted(meter: OverheadMeter, driver: AskedDriver, pool: PagePool) -> int:
    """The figure that the next answer of the system makes the pool's."""
    before = pool.usage().overhead_bytes
    driver.answered.acquire()
    meter.every_s = float("inf")
    while pool.usage().overhead_bytes == before:
        meter.update(is_idle=False)
    return pool.usage().overhead_bytes


def test_the_system_is_not_asked_while_steps_run(
    driver: AskedDriver, pool: PagePool, meter: OverheadMeter
) -> None:
    for held in (3, 5, 4):
        driver.known_bytes = held * PAGE
        meter.update(is_idle=False)
        assert pool.usage().overhead_bytes == held * PAGE
    assert driver.num_asked == 0
    meter.update(is_idle=True)
    assert until_accounted(meter, driver, pool) == 10 * PAGE
    assert driver.num_asked == 1


def test_the_system_is_asked_in_the_end_if_steps_always_run(
    driver: AskedDriver, pool: PagePool, meter: OverheadMeter
) -> None:
    meter.update(is_idle=False)
    assert driver.num_asked == 0
    meter.longest_busy_s = 0.0
    meter.update(is_idle=False)
    meter.longest_busy_s = float("inf")
    assert until_accounted(meter, driver, pool) == 10 * PAGE


def test_updates_while_steps_run_do_not_put_off_what_is_asked_when_none_do(
    driver: AskedDriver, pool: PagePool, meter: OverheadMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    meter.every_s = 10.0
    for _ in range(3):
        now_s += 11.0
        driver.known_bytes += PAGE
        meter.update(is_idle=False)
        assert pool.usage().overhead_bytes == driver.known_bytes
        now_s += 1.0
        meter.update(is_idle=True)
        driver.answered.acquire()
        while pool.usage().overhead_bytes == driver.known_bytes:
            meter.update(is_idle=True)
    assert driver.num_asked == 3


def test_nothing_is_looked_at_before_it_is_time(
    driver: AskedDriver, pool: PagePool, meter: OverheadMeter
) -> None:
    meter.every_s = float("inf")
    driver.known_bytes = PAGE
    for is_idle in (False, True):
        meter.update(is_idle=is_idle)
    assert driver.num_asked == pool.usage().overhead_bytes == 0


def test_a_device_that_does_not_answer_is_asked_again(
    driver: AskedDriver, pool: PagePool, meter: OverheadMeter
) -> None:
    driver.fails = True
    meter.update(is_idle=True)
    driver.answered.acquire()
    driver.fails = False
    meter.update(is_idle=True)
    assert until_accounted(meter, driver, pool) == 20 * PAGE


def test_a_device_without_a_thread_is_asked_at_once() -> None:
    class Measured(HostDriver):
        def overhead_bytes(self, *, asks_system: bool = True) -> int:
            return 7 * PAGE

    with closing(Measured()) as driver, closing(PagePool(driver, 64 * PAGE, PAGE)) as pool:
        meter = OverheadMeter(pool)
        meter.every_s = 0.0
        meter.start()
        meter.update(is_idle=True)
        assert pool.usage().overhead_bytes == 7 * PAGE
        meter.close()
