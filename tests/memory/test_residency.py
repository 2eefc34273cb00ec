"""Residency: all or nothing, the same pages again where they lie, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from tests.memory.late_driver import LateDriver

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import (
    Aliased,
    GivenUp,
    Mapped,
    PageOp,
    Released,
    Residency,
    Shared,
)
from aquifer.memory.runs import runs

PAGE = 4096
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)


class Home:
    """A tenant on a device that is late or not, and may refuse."""

    def __init__(self, *, is_late: bool) -> None:
        self.device = LateDriver() if is_late else HostDriver()
        self.driver = FaultyDriver(self.device)
        self.pool = PagePool(self.driver, 16 * PAGE, PAGE)
        self.range = VirtualRange(self.pool.pages, 32 * PAGE, PAGE)
        self.residency = Residency(self.pool, A, self.range)

    def in_use(self) -> dict[int, Page]:
        retired = self.pool.retired.indices(self.range)
        return {i: page for i, page in self.range.pages.items() if i not in retired}

    def close(self) -> None:
        self.residency.give_up(sorted(self.in_use()))
        self.pool.retired.settle()
        self.range.close()
        assert not self.pool.usage().in_use_bytes
        self.pool.close()
        driver = self.driver
        assert (driver.live_handles, driver.mapped_pages, driver.reservations) == (set(), 0, {})


@pytest.fixture(params=[False, True], ids=["host", "late"])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    home = Home(is_late=request.param)
    yield home
    home.close()


def test_stretches_are_populated_all_or_none(home):
    assert home.residency.populate([range(3, 6), range(10, 10), range(20, 22)])
    assert sorted(home.in_use()) == [3, 4, 5, 20, 21]
    others = home.pool.acquire(B, 8)
    assert others is not None
    assert not home.residency.populate([range(2), range(24, 26)])
    assert sorted(home.in_use()) == [3, 4, 5, 20, 21]
    assert home.pool.usage().in_use_bytes == {A: 5 * PAGE, B: 8 * PAGE}
    home.pool.release(others)


def test_what_was_given_up_comes_back_where_it_lies(home):
    assert home.residency.populate([range(8)])
    before = dict(home.range.pages)
    home.range.tensor((8, PAGE), torch.uint8).copy_(torch.arange(8)[:, None])
    home.residency.give_up([1, 2, 5])
    num_calls = home.driver.num_calls
    assert home.residency.populate([range(1, 3), range(5, 6)])
    if isinstance(home.device, LateDriver):
        assert (home.range.pages, home.driver.num_calls) == (before, num_calls)
        assert home.range.tensor((8, PAGE), torch.uint8)[:, 9].tolist() == list(range(8))
    assert sorted(home.in_use()) == list(range(8))


def test_one_page_at_two_places(home):
    assert home.residency.populate([range(2)])
    pages = home.range.pages_at(range(2))
    home.residency.share(pages)
    home.residency.alias(7, pages)
    assert [home.pool.num_references(page) for page in pages] == [2, 2]
    home.range.tensor((2 * PAGE,), torch.uint8).fill_(9)
    assert (home.range.tensor((2 * PAGE,), torch.uint8, 7 * PAGE) == 9).all()
    home.residency.give_up([7, 8])
    num_calls = home.driver.num_calls
    home.residency.share(pages)
    home.residency.alias(7, pages)  # one that was left there needs no call
    assert home.driver.num_calls == num_calls + (not isinstance(home.device, LateDriver))
    assert home.pool.usage().in_use_bytes == {A: 2 * PAGE}
    home.pool.check()


def test_every_call_refused_once(home):
    """M6: places, references and mappings are as they were, and the call works when repeated."""
    random = Random(0)
    num_refused = 0
    for step in range(300):
        used = home.in_use()
        free = [i for i in range(32) if i not in used]
        before = used, home.pool.usage().in_use_bytes
        home.driver.fail_at = home.driver.num_calls + random.randrange(3)
        wanted = sorted(random.sample(free, min(len(free), random.randint(1, 5))))
        stretches = [range(wanted[start], wanted[end - 1] + 1) for start, end in runs(wanted)]
        try:
            if step % 3 or not used:
                done = home.residency.populate(stretches, may_reclaim=random.random() < 0.5)
            else:
                page = random.choice(list(used.values()))
                home.residency.share([page])
                try:
                    home.residency.alias(wanted[0], [page])
                except DriverError:
                    home.residency.release([page])
                    raise
                done = True
        except DriverError:
            num_refused += 1
            done = False
        home.driver.fail_at = None
        if not done:
            assert (home.in_use(), home.pool.usage().in_use_bytes) == before
        home.pool.check()
        used = home.in_use()
        if len(used) > 12:
            home.residency.give_up(sorted(random.sample(list(used), random.randint(1, 12))))
            if isinstance(home.device, LateDriver) and random.random() < 0.3:
                home.device.finish()
                home.pool.retired.collect()
    assert num_refused > 20


def test_what_is_recorded(home):
    recorded: list[PageOp] = []
    home.residency.record = recorded.append
    assert home.residency.populate([range(2, 4), range(5, 5)])
    one, two = home.range.pages_at([2, 3])
    home.residency.share([one])
    home.residency.alias(9, [one])
    home.residency.share([two])
    home.residency.release([two])
    home.residency.give_up([2, 9])
    home.residency.give_up([])
    home.driver.fail_at = home.driver.num_calls
    home.pool.retired.settle()
    home.pool.trim()
    with pytest.raises(DriverError):
        home.residency.populate([range(20, 30)])
    assert not home.residency.populate([range(12, 32)])
    assert recorded == [
        Mapped(2, (one, two)),
        Shared((one,)),
        Aliased(9, (one,)),
        Shared((two,)),
        Released((two,)),
        GivenUp((2, 9)),
    ]


def test_numbers_of_pages_do_not_repeat_and_ascend():
    driver = HostDriver()
    table = PageTable(driver)
    first = table.create(PAGE, 3)
    table.release(first[:2])
    second = table.create(2 * PAGE, 4)
    assert first + second == sorted(set(first + second))
    assert table.numbers == [first[2], *second]
    assert (len(table), driver.resident_bytes()) == (1 + 4, PAGE + 4 * 2 * PAGE)
    for act in (table.release, table.zero):
        with pytest.raises(InvariantError, match="does not exist"):
            act(first[:1])
    table.release(table.numbers)
    assert (len(table), driver.resident_bytes()) == (0, 0)
    driver.close()


@pytest.mark.parametrize(
    ("numbers", "step", "expected"),
    [
        ([], 1, []),
        ([4], 1, [(0, 1)]),
        ([4, 5, 9, 8], 1, [(0, 2), (2, 3), (3, 4)]),
        ([0, 8, 16, 17], 8, [(0, 3), (3, 4)]),
    ],
)
def test_runs(numbers, step, expected):
    assert runs(numbers, step) == expected
