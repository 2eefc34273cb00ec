"""Ranges: what is where, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aquifer.errors import InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pages import PageTable
from aquifer.memory.range import VirtualRange

PAGE = 4096


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    driver = FaultyDriver(HostDriver())
    yield driver
    driver.close()


@pytest.fixture
def table(driver: FaultyDriver) -> PageTable:
    return PageTable(driver, PAGE)


def test_sizes_are_rounded_up_to_pages(driver, table):
    for num_bytes, num_pages in [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)]:
        pages = VirtualRange(table, num_bytes, PAGE)
        assert (pages.num_pages, pages.num_bytes) == (num_pages, num_pages * PAGE)
        assert driver.reservations == {pages.address: num_pages * PAGE}
        pages.close()
        assert not driver.reservations


def test_map_and_unmap_keep_track(driver, table):
    numbers = table.create(PAGE, 6)
    pages = VirtualRange(table, 8 * PAGE, PAGE)
    pages.map(1, numbers[:2])
    pages.map(4, numbers[2:5])
    assert pages.num_mapped_pages == driver.mapped_pages == 5
    assert pages.mapped_bytes == 5 * PAGE
    assert pages.pages_at(range(4, 7)) == range(numbers[2], numbers[4] + 1)
    assert list(pages.unmap(range(5, 6))) == [numbers[3]]
    assert list(pages.unmap(range(5, 5))) == []
    pages.map(5, [numbers[5]])
    assert pages.pages_at(range(4, 7)) == [numbers[2], numbers[5], numbers[4]]
    assert pages.unmap(sorted(pages.pages)) == [*numbers[:2], numbers[2], numbers[5], numbers[4]]
    assert pages.num_mapped_pages == driver.mapped_pages == 0
    pages.close()


def test_one_page_at_two_addresses_of_two_ranges(table):
    [number] = table.create(PAGE, 1)
    one, other = VirtualRange(table, 2 * PAGE, PAGE), VirtualRange(table, 2 * PAGE, PAGE)
    one.map(0, [number])
    other.map(1, one.pages_at(range(1)))
    one.tensor((4,), torch.int32).copy_(torch.arange(4, dtype=torch.int32))
    assert other.tensor((4,), torch.int32, PAGE).tolist() == [0, 1, 2, 3]
    assert list(one.unmap(sorted(one.pages))) == [number]
    assert list(other.unmap(sorted(other.pages))) == [number]


def test_tensor_offsets_and_strides(driver, table):
    pages = VirtualRange(table, 2 * PAGE, PAGE)
    pages.map(0, table.create(PAGE, 2))
    flat = pages.tensor((2 * PAGE // 4,), torch.float32)
    flat.copy_(torch.arange(2 * PAGE // 4))
    assert pages.tensor((2, 3), torch.float32, 4 * 5).tolist() == [[5, 6, 7], [8, 9, 10]]
    strided = pages.tensor((2, 3), torch.float32, 4, stride=(100, 2))
    assert strided.tolist() == [[1, 3, 5], [101, 103, 105]]
    assert strided.data_ptr() == pages.address + 4
    assert pages.tensor((), torch.float32, 8).item() == 2
    assert pages.tensor((0, 7), torch.float32).shape == (0, 7)
    last = pages.tensor((2,), torch.float32, 2 * PAGE - 8)
    assert last.tolist() == [2 * PAGE / 4 - 2, 2 * PAGE / 4 - 1]
    driver.unmap(pages.address, PAGE, 2)


def test_all_tensors_of_a_range_are_views_of_one(
    driver: FaultyDriver, table: PageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made for the first of them, and can be written to in any mode, wherever that was."""
    viewed: list[tuple[int, int]] = []
    view = driver.view

    def counted_view(address: int, num_bytes: int) -> torch.Tensor:
        viewed.append((address, num_bytes))
        return view(address, num_bytes)

    monkeypatch.setattr(driver, "view", counted_view)
    pages = VirtualRange(table, 2 * PAGE, PAGE)
    pages.map(0, table.create(PAGE, 2))
    assert viewed == []
    with torch.inference_mode():
        first = pages.tensor((2,), torch.float32)
    pages.tensor((4,), torch.uint8, 3).fill_(7)
    assert first.view(torch.uint8).tolist() == [0, 0, 0, 7, 7, 7, 7, 0]
    assert viewed == [(pages.address, 2 * PAGE)]
    first.fill_(1.0)
    driver.unmap(pages.address, PAGE, 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset_bytes", "stride"),
    [
        ((2 * PAGE + 1,), torch.uint8, 0, None),
        ((PAGE,), torch.uint8, PAGE + 1, None),
        ((PAGE // 2,), torch.float32, 4, None),
        ((2, 2), torch.uint8, 0, (2 * PAGE - 1, 1)),
        ((1,), torch.uint8, -1, None),
        ((1,), torch.float32, 2, None),
    ],
)
def test_a_tensor_that_leaves_the_range(table, shape, dtype, offset_bytes, stride):
    pages = VirtualRange(table, 2 * PAGE, PAGE)
    with pytest.raises(InvariantError):
        pages.tensor(shape, dtype, offset_bytes, stride)


def test_what_may_not_be_mapped_or_unmapped(driver, table):
    numbers = table.create(PAGE, 3)
    pages = VirtualRange(table, 4 * PAGE, PAGE)
    pages.map(1, numbers[:1])
    for index, group in [(-1, numbers[1:2]), (3, numbers[1:3]), (4, numbers[1:2])]:
        with pytest.raises(InvariantError, match="leave the range"):
            pages.map(index, group)
    for index, count in [(1, 1), (0, 2)]:
        with pytest.raises(InvariantError, match="mapped already"):
            pages.map(index, numbers[1 : 1 + count])
    for index, count in [(0, 1), (1, 2), (3, 2), (-1, 1)]:
        with pytest.raises(InvariantError, match="is not mapped"):
            pages.unmap(range(index, index + count))
        with pytest.raises(InvariantError, match="is not mapped"):
            pages.pages_at(range(index, index + count))
    with pytest.raises(InvariantError, match="still mapped"):
        pages.close()
    assert driver.mapped_pages == 1
    assert list(pages.unmap(sorted(pages.pages))) == numbers[:1]
    pages.close()


def test_units_by_page(driver, table):
    pages = VirtualRange(table, 32 * PAGE, PAGE)
    (four,), (two,), ones = (table.create(size * PAGE, n) for size, n in ((4, 1), (2, 1), (1, 3)))
    for index, group in [(0, [four]), (4, [two]), (6, ones)]:
        pages.map(index, group)
    assert [pages.page_of(number) for number in (four + 3, two + 1)] == [four, two]
    for numbers, expected in [
        ([], []),
        (range(four, four + 4), [(four, 0, 0, 4)]),
        ([four + 1, four + 2], [(four, 1, 0, 2)]),
        ([four + 2, four + 3, two, two + 1], [(four, 2, 0, 2), (two, 0, 2, 4)]),
        (
            [*range(two, two + 2), *ones],
            [(two, 0, 0, 2), *((ones[i], 0, i + 2, i + 3) for i in range(3))],
        ),
        (
            [four, four, two + 1, four + 1],
            [(four, 0, 0, 1), (four, 0, 1, 2), (two, 1, 2, 3), (four, 1, 3, 4)],
        ),
    ]:
        assert list(pages.pieces(numbers)) == expected
    pages.unmap(list(pages.pages))
    pages.close()
