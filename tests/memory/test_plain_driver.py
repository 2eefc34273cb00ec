"""The driver of a device without virtual memory: addresses are memory, and pages are numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.driver.plain import PlainDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import Residency

PAGE = 64 * 1024
OWNER = Owner("m", Kind.KV)


class MeasuredDriver(HostDriver):
    """A host on which what torch allocates counts as the process's overhead, as on a GPU."""

    held_bytes = 0

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        return self.held_bytes


@pytest.fixture
def inner() -> MeasuredDriver:
    return MeasuredDriver()


@pytest.fixture
def driver(inner: MeasuredDriver) -> Iterator[PlainDriver]:
    driver = PlainDriver(inner)
    yield driver
    driver.close()


def test_open_by_name():
    driver = open_driver("cpu", is_plain=True)
    assert isinstance(driver, PlainDriver)
    assert driver.name == "plain host"
    assert driver.device == torch.device("cpu")
    driver.close()


def test_addresses_are_memory(driver: PlainDriver):
    """All of it, from the start; mapping and unmapping change no byte."""
    address = driver.reserve(4 * PAGE)
    assert address % driver.granularity_bytes == 0
    view = driver.view(address, 4 * PAGE)
    assert not view.any()
    view.copy_(torch.arange(4 * PAGE) % 251)
    expected = view.clone()
    handles = driver.create(PAGE, 2)
    driver.map(address + PAGE, handles)
    assert torch.equal(view, expected)
    driver.unmap(address + PAGE, PAGE, 2)
    driver.map(address, handles[::-1])
    assert torch.equal(view, expected)
    driver.unmap(address, PAGE, 2)
    driver.release(handles)
    driver.free(address, 4 * PAGE)
    again = driver.reserve(4 * PAGE)
    assert not driver.view(again, 4 * PAGE).any()


def test_mapped_pages_are_filled_and_compared(driver: PlainDriver):
    address = driver.reserve(3 * PAGE)
    handles = driver.create(PAGE, 2)
    driver.map(address + PAGE, handles[:1])
    driver.fill(handles, 7)
    view = driver.view(address, 3 * PAGE).view(3, PAGE)
    assert [row.unique().tolist() for row in view] == [[0], [7], [0]]
    assert driver.unlike(handles, 7) == []
    view[1, 5] = 6
    assert driver.unlike(handles, 7) == handles[:1]


def test_what_cannot_be(driver: PlainDriver):
    address = driver.reserve(4 * PAGE)
    handles = driver.create(PAGE, 2)
    driver.map(address, handles[:1])
    with pytest.raises(DriverError, match="cannot be at several addresses"):
        driver.map(address + PAGE, handles[::-1])
    driver.map(address + PAGE, handles[1:])  # nothing had changed
    with pytest.raises(InvariantError, match="is mapped"):
        driver.release(handles)
    with pytest.raises(InvariantError, match="no page of"):
        driver.unmap(address, PAGE, 3)
    with pytest.raises(InvariantError, match="never reserved"):
        driver.free(address, PAGE)
    with pytest.raises(DriverError, match="not a positive multiple"):
        driver.create(PAGE + 1, 1)
    with pytest.raises(DriverError, match=r"OUT_OF_MEMORY: no .* are free"):
        driver.reserve(1 << 60)


def test_reservations_are_no_overhead(driver: PlainDriver, inner: MeasuredDriver):
    """They are the memory of the pages, which the pool counts."""
    inner.held_bytes = 5 * PAGE
    assert driver.overhead_bytes() == 5 * PAGE
    address = driver.reserve(3 * PAGE)
    inner.held_bytes += driver.reserved_bytes
    assert driver.reserved_bytes >= 3 * PAGE
    assert driver.overhead_bytes() == 5 * PAGE
    driver.free(address, 3 * PAGE)
    assert driver.reserved_bytes == 0


def test_a_pool_of_it(driver: PlainDriver):
    """Pages come and go under two ranges, and the books agree."""
    pool = PagePool(driver, 6 * PAGE, PAGE)
    ranges = [VirtualRange(pool.pages, 4 * PAGE, PAGE) for _ in range(2)]
    one, two = (Residency(pool, OWNER, range_) for range_ in ranges)
    assert one.populate([range(4)])
    assert not two.populate([range(3)])
    ranges[0].tensor((4 * PAGE,), torch.uint8).fill_(3)
    one.give_up(range(1, 3))
    assert two.populate([range(3)])
    assert not ranges[1].tensor((4 * PAGE,), torch.uint8).any()
    pool.check()
    assert pool.owned_bytes(OWNER) == 5 * PAGE
    one.give_up([0, 3])
    two.give_up(range(3))
    for range_ in ranges:
        range_.close()
    pool.close()
    assert driver.reserved_bytes == 0
