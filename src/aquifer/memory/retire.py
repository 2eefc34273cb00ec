"""Pages that were given up while work in flight may still touch them.

A device runs behind the loop that gives it work: when the loop learns that a sequence has ended,
a step that reads and writes the sequence's pages may be in flight. Unmapping a page under a kernel
is a fault, and releasing it lets the next owner's bytes mix with the old one's. Hence the rule:

    a page is unmapped, and its reference given back to the pool, only after a fence that was made
    when it was given up has passed.

Between the two it is "retired": mapped still, and accounted to nobody. It may stay so for as long
as there are other pages to be had. There are four ways out:

- `take_back`: whoever gave it up wants a page at the same place again. It stays where it is: work
  that was in flight and work that comes later run in order. With the slots of a virtual cache
  this is deferred reclamation (vAttention, section 5.4.2): no unmapping and no mapping at all.
- `collect`: its fence has passed, and the stocker's thread unmaps it, off the critical path. When
  is up to that thread (`stock.py`): as late as can be, so that more may be taken back.
- `reclaim`: the pool is short and waits for the fence. It is at most as far away as the work in
  flight, so this comes before anybody else's pages are taken.
- `settle`: all fences are waited for, before addresses are given back.

On a device without fences (`Driver.fence` is None) a page is never retired: it goes at once.

The loop's own structure would allow a simpler rule, since tokens come back one step late: what was
given up at the commit of step n is out of use at the commit of step n + 2. But that holds only as
long as nobody changes the loop, and its breach shows as wrong tokens of somebody else. An event
costs a few microseconds for each sequence that ends, and holds whatever the loop does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Fence, Handle

if TYPE_CHECKING:
    from aquifer.memory.pool import PagePool
    from aquifer.memory.virtual import VirtualRange

_Place: TypeAlias = "tuple[VirtualRange, int]"  # a range, and the index of a page in it

_COLLECT_PAGES = 16
"""How many pages `collect` unmaps in one go: about 0.3 ms, which is how long `take_back` may have
to wait for one of them."""


class RetireQueue:
    """The retired pages of one pool, in the order in which they were given up.

    Places leave in that order, and those of one call from its last to its first: what is left of a
    stretch is its beginning.

    `collect` may be called from another thread than the other methods.

    Args:
        pool: to which pages go back.
        books: the pool's lock, so that there is one order of locks.

    Attributes:
        on_retire: called when there is something to collect, sooner or later.
    """

    def __init__(self, pool: PagePool, books: threading.RLock) -> None:
        self.on_retire: Callable[[], None] | None = None
        self._pool = pool
        self._changed = threading.Condition(books)
        self._waiting: dict[_Place, Fence] = {}  # oldest first
        self._leaving: set[_Place] = set()  # being unmapped by `collect` right now

    def __len__(self) -> int:
        """Places that were given up and have their page still."""
        return len(self._waiting) + len(self._leaving)

    def retire(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Give up the pages at these indices, with the reference that the caller holds to each.

        Raises:
            InvariantError: there is no page, or it was given up already.
        """
        if not indices:
            return
        fence = self._pool.driver.fence()
        if fence is None:
            self._pool.release(range_.unmap_at(indices))
            return
        with self._changed:
            handles: list[Handle] = []
            for index in indices:
                if (range_, index) in self._waiting or (range_, index) in self._leaving:
                    raise InvariantError(f"page {index} of a range was given up twice")
                handles += range_.handles(index, 1)
            self._pool.retire(handles)
            for index in reversed(indices):
                self._waiting[range_, index] = fence
        if self.on_retire is not None:
            self.on_retire()

    def take_back(self, range_: VirtualRange, index: int, count: int) -> int:
        """Use places again: to be called before pages are mapped at [index, index + count).

        Returns: how many of the first of these places still have their page, which is the
            caller's again with its bytes. At all others nothing is mapped when this returns. For
            that it waits for a fence only if a page is shared: writing to it again would change
            the bytes of whoever else has it.
        """
        with self._changed:
            if not len(self):
                return 0
            places = [(range_, i) for i in range(index, index + count)]
            while any(place in self._leaving for place in places):
                self._changed.wait()
            num_taken = 0
            for place in places:
                if place not in self._waiting or not self._is_exclusive(place):
                    break
                num_taken += 1
            self._pool.unretire(range_.handles(index, num_taken))
            for place in places[:num_taken]:
                del self._waiting[place]
            others = [place for place in places[num_taken:] if place in self._waiting]
            for fence in {self._waiting[place] for place in others}:
                fence.wait()
            self._give_back(others)
            return num_taken

    def collect(self) -> bool:
        """Unmap and give back some pages whose fence has passed; never waits for one.

        Returns: whether there may be more of them.
        """
        with self._changed:
            batch = self._oldest(_COLLECT_PAGES)
            self._leaving.update(batch)
            for place in batch:
                del self._waiting[place]
        if not batch:
            return False
        handles: list[Handle] = []
        try:
            handles = _unmap(batch)
        finally:
            with self._changed:
                self._release(handles)
                self._leaving.difference_update(batch)
                self._changed.notify_all()
        return True

    def reclaim(self, num_bytes: int) -> bool:
        """Wait for the pages that were given up first, to get about `num_bytes` back.

        Returns: whether any came back; if not, there are none.
        """
        with self._changed:
            if self._leaving:
                self._changed.wait()
                return True
            if not self._waiting:
                return False
            (range_, _), fence = next(iter(self._waiting.items()))
            fence.wait()
            self._give_back(self._oldest(-(-num_bytes // range_.page_bytes)))
            return True

    def settle(self) -> None:
        """Wait until nothing in flight can touch any retired page, and give all of them back."""
        with self._changed:
            while self._leaving:
                self._changed.wait()
            for fence in set(self._waiting.values()):
                fence.wait()
            self._give_back(list(self._waiting))

    def _is_exclusive(self, place: _Place) -> bool:
        range_, index = place
        (handle,) = range_.handles(index, 1)
        return self._pool.num_references(handle) == 1

    def _oldest(self, max_pages: int) -> list[_Place]:
        """The first places whose fences have passed."""
        batch: list[_Place] = []
        passed: Fence | None = None
        for place, fence in self._waiting.items():
            if len(batch) == max_pages or (fence is not passed and not fence.passed()):
                break
            passed = fence
            batch.append(place)
        return batch

    def _give_back(self, places: Sequence[_Place]) -> None:
        """Unmap and release. Pre-condition: their fences have passed."""
        handles = _unmap(places)
        for place in places:
            del self._waiting[place]
        self._release(handles)

    def _release(self, handles: Sequence[Handle]) -> None:
        """Let go of references that were retired."""
        self._pool.unretire(handles)
        self._pool.release(handles)


def _unmap(places: Iterable[_Place]) -> list[Handle]:
    by_range: dict[VirtualRange, list[int]] = {}
    for range_, index in places:
        by_range.setdefault(range_, []).append(index)
    return [
        handle
        for range_, indices in by_range.items()
        for handle in range_.unmap_at(sorted(indices))
    ]
