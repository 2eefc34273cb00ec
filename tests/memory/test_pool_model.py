"""The pool against a dictionary: random operations, all invariants after each, real bytes.

Numbers in parentheses are the invariants of docs/memory.md.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cases import tries

from aquifer.errors import InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.guard import POISON
from aquifer.memory.owners import GUARD
from aquifer.memory.pool import PROCESS, Kind, Owner, Page, PagePool
from aquifer.memory.range import VirtualRange

SMALL, LARGE = 4096, 12288
BUDGET = 16 * SMALL
# The last two are names that a careless pool could take for marks of its own.
OWNERS = [
    Owner("a", Kind.KV),
    Owner("a", Kind.PREFIX),
    Owner("b", Kind.KV),
    Owner("b", Kind.WEIGHTS),
    Owner("unknown", Kind.KV),
    Owner("untouched", Kind.KV),
]


@dataclass
class Contents:
    """What the oracle knows of a page."""

    page_bytes: int
    owner: Owner
    num_references: int
    byte: int  # all of its bytes


class PoolMachine(RuleBasedStateMachine):
    @initialize(keep_idle_pages=st.sampled_from([0, 3, 16]), guards=st.booleans())
    def start(self, keep_idle_pages: int, guards: bool):
        self.driver = FaultyDriver(HostDriver())
        self.pool = PagePool(
            self.driver, BUDGET + 100, SMALL, keep_idle_pages * SMALL, guards=guards
        )
        self.guard_bytes = SMALL * guards
        self.keep_idle_bytes = keep_idle_pages * SMALL
        self.windows = {size: VirtualRange(self.pool.pages, size, size) for size in (SMALL, LARGE)}
        self.overhead_bytes = 0
        self.pages: dict[Page, Contents] = {}  # in use
        self.left: dict[Page, Contents] = {}  # as they were when they were given back
        self.holdings: list[list[Page]] = []  # each holds one reference of each of its pages
        self.random = random.Random(0)

    @rule(
        owner=st.sampled_from(OWNERS),
        count=st.integers(0, 7),
        page_bytes=st.sampled_from([SMALL, LARGE, None]),
        has_hook=st.booleans(),
        may_reclaim=st.booleans(),
    )
    def acquire(
        self, owner: Owner, count: int, page_bytes: int | None, has_hook: bool, may_reclaim: bool
    ):
        self.pool.on_short = self.reclaim if has_hook else None
        wanted_bytes = count * (page_bytes or SMALL)
        num_holdings = len(self.holdings)
        before = self.pool.usage()
        handles = self.pool.acquire(owner, count, page_bytes, may_reclaim=may_reclaim)
        self.pool.on_short = None
        assert may_reclaim or len(self.holdings) == num_holdings
        if handles is None:  # M6
            assert wanted_bytes > BUDGET - self.in_use_bytes() - self.overhead_bytes
            assert not (has_hook and may_reclaim and self.holdings)
            if len(self.holdings) == num_holdings:
                assert self.pool.usage() == before
            return
        assert len(handles) == len(set(handles)) == count
        for handle in handles:
            assert handle not in self.pages
            page = Contents(page_bytes or SMALL, owner, 1, self.read(handle, page_bytes or SMALL))
            was = self.left.pop(handle, None)
            left = POISON if self.guard_bytes else was and was.byte
            allowed = {0, left} if was and was.owner == owner else {0}
            assert page.byte in allowed  # M5
            self.pages[handle] = page
        if handles:
            self.holdings.append(handles)

    def reclaim(self, missing_bytes: int, asker: Owner) -> bool:
        """The hook: give up any of the holdings, as long as there is one."""
        assert missing_bytes > 0
        if not self.holdings:
            return False
        self.give_up(self.random.randrange(len(self.holdings)))
        return True

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        self.give_up(data.draw(st.integers(0, len(self.holdings) - 1)))
        assert self.pool.usage().idle_bytes <= self.keep_idle_bytes  # M7

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def share(self, data: st.DataObject):
        holding = data.draw(st.sampled_from(self.holdings))
        part = data.draw(st.lists(st.sampled_from(holding), min_size=1, unique=True))
        self.pool.share(part)
        self.holdings.append(part)
        for handle in part:
            self.pages[handle].num_references += 1

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def transfer(self, data: st.DataObject, owner: Owner):
        holding = data.draw(st.sampled_from(self.holdings))
        if self.pages[holding[0]].owner.model != owner.model:
            with pytest.raises(InvariantError, match="unzeroed"):
                self.pool.transfer(holding, owner)
            return
        self.pool.transfer(holding, owner)
        for handle in holding:
            page = self.pages[handle]
            page.owner = owner
            assert self.read(handle, page.page_bytes) == page.byte

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), byte=st.integers(1, 255))
    def write(self, data: st.DataObject, byte: int):
        for handle in data.draw(st.sampled_from(self.holdings)):
            page = self.pages[handle]
            window = self.windows[page.page_bytes]
            window.map(0, [handle])
            window.tensor((page.page_bytes,), torch.uint8).fill_(byte)
            window.unmap(range(1))
            page.byte = byte

    @rule(keep_pages=st.integers(0, 8))
    def trim(self, keep_pages: int):
        idle_bytes = self.pool.usage().idle_bytes
        given_bytes = self.pool.trim(keep_pages * SMALL)
        assert self.pool.usage().idle_bytes == idle_bytes - given_bytes <= keep_pages * SMALL

    @rule(target_pages=st.integers(0, 6), batch_pages=st.integers(1, 4))
    def stock(self, target_pages: int, batch_pages: int):
        while self.pool.stock(target_pages * SMALL, batch_pages):
            pass
        assert self.pool.usage().idle_bytes <= self.keep_idle_bytes

    @rule(num_bytes=st.one_of(st.just(0), st.integers(0, BUDGET + SMALL)))
    def account_overhead(self, num_bytes: int):
        """It takes what it is, and leaves what is in use alone."""
        idle_bytes = self.pool.usage().idle_bytes
        self.pool.account_overhead(num_bytes)
        self.overhead_bytes = num_bytes
        room_bytes = max(BUDGET - self.in_use_bytes() - num_bytes, 0)
        # Not more goes than has to; the size of a page comes on top.
        kept_bytes = self.pool.usage().idle_bytes
        assert min(idle_bytes, room_bytes - LARGE) < kept_bytes + 1 <= idle_bytes + 1

    @rule()
    def release_of_unknown(self):
        with pytest.raises(InvariantError):
            self.pool.release([Page(-1)])

    @invariant()
    def holds(self):
        self.pool.check()
        usage = self.pool.usage()
        in_use = sum(usage.in_use_bytes.values())
        # M1, and that the driver really holds as many bytes (M4)
        accounted_bytes = in_use + usage.retired_bytes + usage.idle_bytes + usage.uncreated_bytes
        assert accounted_bytes == usage.budget_bytes + usage.excess_bytes
        budget_bytes = BUDGET + self.guard_bytes
        assert usage.budget_bytes == budget_bytes
        assert min(usage.idle_bytes, usage.uncreated_bytes, usage.excess_bytes) >= 0
        assert not usage.excess_bytes or usage.idle_bytes == usage.uncreated_bytes == 0
        assert usage.overhead_bytes == self.overhead_bytes + self.guard_bytes
        assert in_use + usage.free_bytes == max(budget_bytes, in_use)
        assert usage.free_bytes == self.pool.free_bytes == self.pool.ready_bytes
        created_bytes = in_use - self.overhead_bytes + usage.idle_bytes
        assert self.resident_bytes() == created_bytes == self.pool.created_bytes <= budget_bytes
        by_owner = dict.fromkeys(OWNERS, 0)
        by_owner |= {PROCESS: self.overhead_bytes, GUARD: self.guard_bytes}
        for handle, page in self.pages.items():  # M2
            by_owner[page.owner] += page.page_bytes
            assert self.pool.num_references(handle) == page.num_references
        assert usage.in_use_bytes == {owner: n for owner, n in by_owner.items() if n}
        assert self.driver.mapped_pages == 0

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        while self.holdings:
            self.give_up(0)
        self.pool.close()
        assert not self.driver.live_handles
        assert self.resident_bytes() == 0
        for window in self.windows.values():
            window.close()
        assert not self.driver.reservations
        self.driver.close()

    def give_up(self, index: int) -> None:
        holding = self.holdings.pop(index)
        for handle in holding:
            page = self.pages[handle]
            page.num_references -= 1
            assert self.read(handle, page.page_bytes) == page.byte  # for all that share it
            if not page.num_references:
                self.left[handle] = self.pages.pop(handle)
        self.pool.release(holding)

    def read(self, handle: Page, page_bytes: int) -> int:
        """The one byte that fills a page."""
        window = self.windows[page_bytes]
        window.map(0, [handle])
        page = window.tensor((page_bytes,), torch.uint8)
        byte = int(page[0])
        assert bool((page == byte).all())
        window.unmap(range(1))
        return byte

    def in_use_bytes(self) -> int:
        return sum(page.page_bytes for page in self.pages.values())

    def resident_bytes(self) -> int:
        assert isinstance(self.driver.inner, HostDriver)
        return self.driver.inner.resident_bytes()


TestPoolModel = PoolMachine.TestCase
TestPoolModel.settings = settings(
    max_examples=tries(250), stateful_step_count=40, deadline=None, database=None, derandomize=True
)


def test_a_page_may_be_released_only_by_its_holders():
    driver = HostDriver()
    pool = PagePool(driver, 4 * SMALL, SMALL)
    owner = Owner("a", Kind.KV)
    handles = pool.acquire(owner, 1)
    assert handles is not None
    pool.share(handles)
    pool.release(handles)
    assert pool.num_references(handles[0]) == 1
    with pytest.raises(InvariantError, match="still in use"):
        pool.close()
    pool.release(handles)
    assert pool.num_references(handles[0]) == 0
    for act in (pool.release, pool.share):
        with pytest.raises(InvariantError):
            act(handles)
    with pytest.raises(InvariantError):
        pool.transfer(handles, owner)
    pool.check()
    pool.close()
    driver.close()


@pytest.mark.parametrize("model", ["a", "unknown", "untouched"])
def test_a_page_of_another_model_is_zeroed_whatever_that_is_called(model: str):
    """M5, for names that a careless pool could take for marks of its own."""
    driver = HostDriver()
    pool = PagePool(driver, 4 * SMALL, SMALL, 4 * SMALL)
    window = VirtualRange(pool.pages, 4 * SMALL, SMALL)
    for owner in (Owner(model, Kind.KV), Owner("b", Kind.KV), Owner(model, Kind.WEIGHTS)):
        handles = pool.acquire(owner, 4)
        assert handles is not None
        window.map(0, handles)
        page = window.tensor((4 * SMALL,), torch.uint8)
        assert not page.any()
        page.fill_(1)
        pool.release(window.unmap(sorted(window.pages)))
    pool.close()
    window.close()
    driver.close()


def test_pages_that_are_overwritten_are_not_zeroed():
    """Untouched ones come last: those serve owners who need zeros."""
    driver = HostDriver()
    pool = PagePool(driver, 4 * SMALL, SMALL, 4 * SMALL)
    window = VirtualRange(pool.pages, 4 * SMALL, SMALL)
    used = pool.acquire(Owner("a", Kind.WEIGHTS), 3)
    assert used is not None
    window.map(0, used)
    window.tensor((3 * SMALL,), torch.uint8).fill_(1)
    pool.release(window.unmap(range(3)))
    assert pool.stock(4 * SMALL)
    other = Owner("b", Kind.WEIGHTS)
    for count in (3, 4):
        pages = pool.acquire(other, count, is_overwritten=True)
        assert pages is not None
        assert set(used) <= set(pages)
        window.map(0, sorted(pages))
        assert window.tensor((3 * SMALL,), torch.uint8).all()
        pool.release(window.unmap(range(count)))
        pool.check()
    pages = pool.acquire(Owner("c", Kind.KV), 4)
    assert pages is not None
    window.map(0, pages)
    assert not window.tensor((4 * SMALL,), torch.uint8).any()
    pool.release(window.unmap(range(4)))
    pool.close()
    window.close()
    driver.close()


@pytest.mark.parametrize("keep_idle_pages", [0, 5, 64])
def test_the_watermark_is_kept_and_the_rest_given_back(keep_idle_pages: int):
    """M7: idle pages stay up to the watermark; beyond it the memory itself goes back."""
    driver = HostDriver()
    pool = PagePool(driver, 64 * SMALL, SMALL, keep_idle_pages * SMALL)
    handles = pool.acquire(Owner("a", Kind.KV), 40)
    assert handles is not None
    assert driver.resident_bytes() == 40 * SMALL
    pool.release(handles)
    kept_pages = min(keep_idle_pages, 40)
    assert pool.usage().idle_bytes == driver.resident_bytes() == kept_pages * SMALL
    assert pool.free_bytes == 64 * SMALL
    pool.trim()
    assert pool.usage().idle_bytes == driver.resident_bytes() == 0
    pool.close()
    driver.close()


def test_the_watermark_is_an_eighth_of_the_budget_by_default():
    assert PagePool(HostDriver(), 64 * SMALL, SMALL).keep_idle_bytes == 8 * SMALL


def test_the_hook_is_asked_until_it_gives_up():
    driver = HostDriver()
    pool = PagePool(driver, 8 * SMALL, SMALL)
    owner = Owner("a", Kind.KV)
    held = [pool.acquire(owner, 2) for _ in range(4)]
    asked = []

    def reclaim(missing_bytes: int, asker: Owner) -> bool:
        asked.append(missing_bytes)
        handles = held.pop() if len(held) > 1 else None
        if handles is not None:
            pool.release(handles)
        return handles is not None

    pool.on_short = reclaim
    wanted = pool.acquire(Owner("b", Kind.KV), 3)
    assert wanted is not None
    assert asked == [3 * SMALL, SMALL]
    assert pool.acquire(owner, 6) is None
    assert asked == [3 * SMALL, SMALL, 5 * SMALL, 3 * SMALL]
    pool.check()
    pool.release(wanted + (held.pop() or []))
    pool.close()
    driver.close()


def test_pages_in_stock_are_handed_out_without_a_call_to_the_driver():
    driver = FaultyDriver(HostDriver())
    pool = PagePool(driver, 64 * SMALL, SMALL, 32 * SMALL)
    while pool.stock(20 * SMALL):
        pass
    assert pool.usage().idle_bytes == 20 * SMALL
    driver.fail_at = driver.num_calls
    handles = pool.acquire(Owner("a", Kind.KV), 20)
    assert handles is not None
    pool.check()
    pool.release(handles)
    pool.close()
    driver.close()
