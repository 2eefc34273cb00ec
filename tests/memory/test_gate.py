"""The gate between the loop and the threads that call the driver ahead of need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from aquifer.memory import gate as module
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.gate import Gate
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import Residency
from aquifer.memory.stock import PageStocker

PAGE = 4096
PATIENCE_S = 300.0


class _Watched(Gate):
    """Tells when a thread has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = threading.Semaphore(0)

    def wait(self) -> None:
        self.arrivals.release()
        super().wait()

    def await_arrival(self) -> None:
        assert self.arrivals.acquire(timeout=PATIENCE_S)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[PagePool]:
    """A pool at whose gate threads wait until it is open, however long that takes."""
    monkeypatch.setattr(module, "_MOST_S", PATIENCE_S)
    with closing(HostDriver()) as driver:
        pool = PagePool(driver, 16 * PAGE, PAGE, 16 * PAGE)
        pool.gate = _Watched()
        yield pool
        pool.close()


def test_pages_are_mapped_once_the_step_is_launched_or_waits_for_them(pool: PagePool):
    owner, gate = Owner("a", Kind.KV), pool.gate
    range_ = VirtualRange(pool.pages, 8 * PAGE, PAGE)
    residency = Residency(pool, owner, range_)
    assert pool.stock(8 * PAGE)
    assert isinstance(gate, _Watched)
    with closing(BackgroundMapper(pool.pages, gate)) as pool.mapper:
        for waits in (False, True):
            before = pool.pages.num_background_calls
            with gate:
                pending = residency.populate_later([range(4)])
                assert pending is not None
                pool.mapper.begin()
                gate.await_arrival()
                assert pool.pages.num_background_calls == before
                if waits:
                    assert residency.settle(pending)
            assert waits or residency.settle(pending)
            assert pool.pages.num_background_calls == before + 1
            residency.give_up(range(4))
    pool.mapper = None
    range_.close()


def test_pages_are_created_once_the_step_is_launched(pool: PagePool):
    gate = pool.gate
    assert isinstance(gate, _Watched)
    stocker = PageStocker(pool, 4)
    stocker.start()
    try:
        with gate:
            stocker.wake()
            gate.await_arrival()
            assert not pool.created_bytes
        for _ in range(2):  # it comes again, when all are there, and then to collect
            gate.await_arrival()
        assert pool.created_bytes == 4 * PAGE
    finally:
        stocker.close()


def test_a_thread_does_not_wait_for_long(pool: PagePool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MOST_S", 0.0)
    with pool.gate:
        pool.gate.wait()
