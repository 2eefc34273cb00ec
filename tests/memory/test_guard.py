"""Pages that are poisoned while they are idle, and writes to them that are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.memory.late_driver import LateDriver

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.guard import POISON
from aquifer.memory.owners import GUARD
from aquifer.memory.pool import Kind, Owner, Page, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import Residency

PAGE = 4096
KV, OTHER, WEIGHTS = (
    Owner("a", Kind.KV),
    Owner("b", Kind.KV),
    Owner("b", Kind.WEIGHTS),
)


class Memory:
    """A pool with guards, and a place to read and write its pages."""

    def __init__(self, *, guards: bool = True) -> None:
        self.driver = FaultyDriver(HostDriver())
        self.pool = PagePool(self.driver, 8 * PAGE, PAGE, 4 * PAGE, guards=guards)
        self.windows = {
            size: VirtualRange(self.pool.pages, size, size) for size in (PAGE, 2 * PAGE)
        }

    def acquire(self, owner: Owner, count: int = 1, **options: bool) -> list[Page]:
        pages = self.pool.acquire(owner, count, **options)
        assert pages is not None
        return pages

    def write(self, page: Page, byte: int, place: slice = slice(None), size: int = PAGE) -> None:
        window = self.windows[size]
        window.map(0, [page])
        window.tensor((size,), torch.uint8)[place] = byte
        window.unmap(window.places(range(window.num_mapped_pages)))

    def bytes_of(self, page: Page) -> set[int]:
        window = self.windows[PAGE]
        window.map(0, [page])
        found = set(window.tensor((PAGE,), torch.uint8).tolist())
        window.unmap(range(1))
        return found


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    for window in memory.windows.values():
        window.close()
    memory.pool.close()
    assert memory.driver.is_unused
    memory.driver.close()


def test_poison_is_nan():
    poison = torch.full((8,), POISON, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert poison.view(dtype).isnan().all()
    assert (poison.view(torch.int64) == -1).all()


def test_what_a_page_that_was_freed_holds(memory):
    (page,) = memory.acquire(KV)
    assert memory.bytes_of(page) == {0}  # as ever, a new page reads as zeros
    memory.write(page, 7)
    memory.pool.release([page])
    assert memory.acquire(KV) == [page]
    assert memory.bytes_of(page) == {POISON}
    memory.pool.release([page])
    memory.pool.check()


def test_without_guards_it_holds_what_it_held():
    memory = Memory(guards=False)
    (page,) = memory.acquire(KV)
    memory.write(page, 7)
    memory.pool.release([page])
    assert memory.acquire(KV) == [page]
    assert memory.bytes_of(page) == {7}
    memory.write(page, 8)
    memory.pool.release([page])
    memory.write(page, 9)
    assert memory.acquire(KV) == [page]
    memory.pool.release([page])
    memory.pool.close()


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_a_page_of_another_owner_reads_as_zeros(memory, is_overwritten):
    """Unless the owner writes all of it: then it need not be zeroed, and must not be read."""
    pages = memory.acquire(KV, 8)
    memory.write(pages[0], 7)
    memory.pool.keep_idle_bytes = 0
    memory.pool.release(pages[:3])
    taken = memory.acquire(WEIGHTS, 3, is_overwritten=is_overwritten)
    assert sorted(taken) == pages[:3]
    for page in taken:
        assert memory.bytes_of(page) == {POISON if is_overwritten else 0}
    memory.pool.release(pages[3:] + taken)


def test_pages_that_are_still_shared_keep_their_bytes(memory):
    pages = memory.acquire(KV, 2)
    memory.pool.share(pages[:1])
    for page in pages:
        memory.write(page, 7)
    memory.pool.release(pages)
    assert memory.bytes_of(pages[0]) == {7}
    assert memory.acquire(KV) == pages[1:]
    memory.pool.release([pages[0], pages[1]])


HANDED_ON: dict[str, Callable[[PagePool], object]] = {
    "same owner": lambda pool: pool.acquire(KV, 2),
    "ready": lambda pool: pool.take_ready(KV, 2),
    "zeroed": lambda pool: pool.acquire(OTHER, 2),
    "overwritten": lambda pool: pool.acquire(OTHER, 2, is_overwritten=True),
    "trim": lambda pool: pool.trim(),
    "other size": lambda pool: pool.acquire(WEIGHTS, 1, 2 * PAGE),
    "overhead": lambda pool: pool.account_overhead(3 * PAGE),
}


@pytest.mark.parametrize("how", HANDED_ON)
def test_a_write_to_a_freed_page_is_found(how):
    """When the page is handed out, or given back to the system; and it is named."""
    memory = Memory()
    memory.acquire(OTHER, 6)
    pages = memory.acquire(KV, 2)
    memory.pool.release(pages)
    memory.write(pages[1], 0, slice(PAGE - 1, PAGE))
    with pytest.raises(InvariantError, match=f"freed page was written to: {pages[1]};"):
        HANDED_ON[how](memory.pool)
    # The stocker's thread may have found it: then the engine's loop gets the error too.
    with pytest.raises(InvariantError, match=f"freed page was written to: {pages[1]};"):
        memory.pool.acquire(KV, 0)
    memory.driver.close()


def test_pages_of_two_sizes_that_become_idle_at_once():
    memory = Memory()
    small = memory.acquire(KV, 2)
    large = memory.pool.acquire(KV, 1, 2 * PAGE)
    assert large is not None
    memory.pool.release([small[0], *large, small[1]])
    assert sorted(memory.acquire(KV, 2)) == small
    memory.write(large[0], 1, slice(2 * PAGE - 1, 2 * PAGE), 2 * PAGE)
    with pytest.raises(InvariantError, match=f"freed page was written to: {large[0]};"):
        memory.pool.acquire(KV, 1, 2 * PAGE)
    memory.driver.close()


def test_a_page_that_cannot_be_poisoned_is_released_all_the_same(memory):
    (page,) = memory.acquire(KV)
    memory.write(page, 7)
    memory.driver.fail_at = memory.driver.num_calls
    memory.pool.release([page])
    assert memory.driver.failed_call == "fill"
    assert memory.acquire(KV) == [page]
    assert memory.bytes_of(page) == {7}
    memory.pool.release([page])


def test_idle_pages_are_poisoned_again_where_an_acquisition_is_refused(memory):
    kept = memory.acquire(OTHER, 5)
    pages = memory.acquire(KV, 2)
    memory.pool.release(pages)
    memory.driver.fail_at = memory.driver.num_calls + 1  # the creation of the third page
    memory.pool.on_short = lambda _bytes, _owner: False
    with pytest.raises(DriverError):
        memory.pool.acquire(WEIGHTS, 3, may_reclaim=False)
    memory.pool.check()
    taken = memory.acquire(WEIGHTS, 2, is_overwritten=True)
    assert sorted(taken) == pages
    assert [memory.bytes_of(page) for page in taken] == [{POISON}] * 2
    memory.pool.release([*kept, *taken])


def test_the_guard_page_comes_on_top_of_the_budget(memory):
    pool = memory.pool
    assert pool.usage().in_use_bytes == {GUARD: PAGE}
    assert (pool.budget_bytes, pool.free_bytes) == (9 * PAGE, 8 * PAGE)
    assert pool.usage().overhead_bytes == PAGE
    assert pool.guards is not None
    assert memory.bytes_of(pool.guards.guard) == {POISON}
    assert pool.acquire(KV, 9) is None


def test_a_write_to_the_guard_page_is_found():
    memory = Memory()
    assert memory.pool.guards is not None
    memory.pool.check()
    memory.write(memory.pool.guards.guard, 0, slice(100, 101))
    for act in (memory.pool.check, memory.pool.close):
        with pytest.raises(InvariantError, match="the guard page was written to"):
            act()


def test_a_retired_page_is_not_poisoned_before_its_fence():
    """Work in flight may still read it; a late write of that work is before the poison."""
    driver = LateDriver()
    pool = PagePool(driver, 8 * PAGE, PAGE, 4 * PAGE, guards=True)
    range_ = VirtualRange(pool.pages, 4 * PAGE, PAGE)
    residency = Residency(pool, KV, range_)
    assert residency.populate([range(2)])
    tensor = range_.tensor((2, PAGE), torch.uint8)
    tensor.fill_(7)
    pages = list(range_.pages_at(range(2)))
    driver.launch([range_.address])
    residency.give_up(range(2))
    assert (tensor == 7).all()
    tensor[0] = 5
    assert pool.retired.reclaim(2 * PAGE)  # waits for the fence
    assert not range_.pages
    assert pool.acquire(KV, 2) == pages  # what the late work wrote is no write to a freed page
    pool.release(pages)
    range_.close()
    pool.close()
    driver.close()
