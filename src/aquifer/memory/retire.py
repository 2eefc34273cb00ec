"""Pages that were given up while work in flight may still touch them.

A device runs behind the loop that gives it work: when the loop learns that a sequence has ended,
a step that reads and writes the sequence's pages may be in flight. Unmapping a page under a kernel
is a fault, and releasing it lets the next owner's bytes mix with the old one's. Hence the rule:

    a page is unmapped, and its reference given back to the pool, only after a fence that was made
    when it was given up has passed.

Between the two it is "retired": still mapped, and accounted to no owner. It may stay so for as
long as other pages are available. A retired place is left in one of five ways:

- `reuse`: the tenant that gave it up wants a page at the same place again. The page stays
  where it is: work that was in flight and work that comes later run in order. For the slots of a
  virtual cache this is deferred reclamation (vAttention, section 5.4.2): no unmapping, no mapping.
- `reuse_pages`: likewise, to read that very page, which may have other users too.
- `collect`: its fence has passed, and the stocker's thread unmaps it, off the critical path.
  `stock.py` decides when: as late as possible, so that more places can be reused. A tenant that
  wants to use a place otherwise says so with `vacate_soon`.
- `reclaim`: the pool is short and waits for the fence. It is at most as far away as the work in
  flight, so this comes before pages that are in use are taken.
- `settle`: the fences of a range are waited for, before its addresses are given back.

A page may be retired at one place and in use at another, or held by the prefix cache. To unmap it
at the first frees nothing, so such places are "parked": `collect` and `reclaim` skip them until the
last use of the page ends, or `vacate_soon` names them. So a request that continues a cached
conversation finds its pages where they were, also in a full pool.

On a device that does not run ahead (`Driver.runs_ahead`) a page is never retired: it goes at once.

The loop's structure would allow a simpler rule, since tokens come back one step late: what was
given up at the commit of step n is out of use at the commit of step n + 2. But a change of the loop
could break that rule unnoticed, and the result would be wrong tokens of another request. A fence
costs a few microseconds for each sequence that ends, and does not depend on the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import NamedTuple

from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Fence
from aquifer.memory.ledger import Ledger
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.range import VirtualRange

_Place = int  # an address: no two ranges have pages at the same one


class _Retired(NamedTuple):
    """What is known of a retired place."""

    range: VirtualRange
    fence: Fence  # of the moment when it was given up


_COLLECT_PAGES = 16
"""How many pages `collect` unmaps in one go: about 0.3 ms, which is how long `reuse` may have
to wait for one of them."""


class RetireQueue:
    """The retired pages of one pool, in the order in which they were given up.

    Places are unmapped in that order, and those of one call from its last to its first, so that the
    beginning of a stretch stays longest. Places of a page that is still in use join the queue when
    that use ends.

    `collect` may be called from another thread than the other methods.

    Args:
        ledger: the pool's books. Their lock guards the queue too, so that there is one order of
            locks.
        pages: the pool's pages.

    Attributes:
        on_retire: called when places were retired, which can be collected later.
    """

    def __init__(self, ledger: Ledger, pages: PageTable) -> None:
        self.on_retire: Callable[[], None] | None = None
        self._ledger = ledger
        self._pages = pages
        self._driver = pages.driver
        self._changed = threading.Condition(ledger.lock)
        # All places that are retired and not leaving. Those of one call share the value.
        self._retired: dict[_Place, _Retired] = {}
        self._waiting: dict[_Place, None] = {}  # their part with pages out of use, oldest first
        self._parked: dict[Page, dict[_Place, None]] = {}  # the other places, by their page
        self._unwanted: dict[_Place, None] = {}  # those of `vacate_soon`, oldest first
        self._leaving: dict[_Place, _Retired] = {}  # being unmapped by `collect` right now

    def __len__(self) -> int:
        """Places that were given up and still have their page, which is not in use elsewhere."""
        with self._changed:
            return len(self._waiting) + len(self._leaving)

    @property
    def defers(self) -> bool:
        """Whether pages that are given up stay mapped for a time."""
        return self._driver.runs_ahead

    @property
    def num_places(self) -> int:
        """Places that were given up and still have their page."""
        with self._changed:  # else a place could be missed between the two
            return len(self._retired) + len(self._leaving)

    @property
    def has_unwanted(self) -> bool:
        """Whether places are to be vacated soon, and still have their page."""
        return bool(self._unwanted)

    def indices(self, range_: VirtualRange) -> set[int]:
        """Indices of the places in a range that were given up and still have their page."""
        with self._changed:
            found = chain(self._retired.items(), self._leaving.items())
            return {range_.index_at(place) for place, each in found if each.range is range_}

    def retire(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Give up the pages at these indices, with the reference that the caller holds to each.

        Raises:
            InvariantError: there is no page, or it was given up already.
        """
        if not indices:
            return
        fence = self._driver.fence()
        if fence is None:
            self.release(range_.unmap(indices))
            return
        with self._changed:
            places = range_.addresses(reversed(indices))
            if not (
                self._retired.keys().isdisjoint(places) and self._leaving.keys().isdisjoint(places)
            ):
                raise InvariantError("a page of a range was given up twice")
            pages = range_.pages_at(reversed(indices))
            in_use = self._ledger.retire(pages)
            self._retired.update(dict.fromkeys(places, _Retired(range_, fence)))
            for place, page in zip(places, pages, strict=True):
                if page in in_use:
                    self._parked.setdefault(page, {})[place] = None
                else:
                    self._waiting[place] = None
            for page in self._parked.keys() & set(pages) - in_use:
                self._unpark(page)
        if self.on_retire is not None:
            self.on_retire()

    def release(self, pages: Sequence[Page]) -> None:
        """Drop one reference of each page, for `PagePool.release` and for pages unmapped here.

        The places of a page that has only retired references left may be collected from now on.
        """
        with self._changed:
            ended = [page for page in self._ledger.release(pages) if page in self._parked]
            for page in ended:
                self._unpark(page)
            self._pages.release(self._ledger.take_surplus())
        if ended and self.on_retire is not None:
            self.on_retire()

    def reuse(self, range_: VirtualRange, indices: Sequence[int]) -> list[int]:
        """Use places again: to be called before pages are mapped at these indices.

        Returns: the indices where the page is still mapped; it is the caller's again, with its
            bytes. At all others nothing is mapped when this returns. It waits for a fence only if a
            page is shared, since writing to that one would change the bytes of its other users.
        """
        with self._changed:
            if not (self._retired or self._leaving):
                return []
            places = self._places(range_, indices)
            unused = list(compress(indices, map(self._waiting.__contains__, places)))
            found = range_.pages_at(unused)
            are_single = self._ledger.are_single(found)
            taken = list(compress(unused, are_single))
            pages = list(compress(found, are_single))
            self._ledger.unretire(pages)
            self._forget(range_.addresses(taken), pages)
            if len(taken) < len(places):
                self._vacate(places)
            return taken

    def reuse_pages(self, range_: VirtualRange, index: int, pages: Sequence[Page]) -> list[int]:
        """Use places again to read what these pages hold, one page a place from `index` on.

        To be called before the pages are mapped there. They may have other users too, so the
        caller must not write to them. A place with another page is unmapped, after its fence.

        Args:
            range_: the range of the places.
            index: the first place.
            pages: pages that are in use.

        Returns: positions in `pages` of those that are still mapped at their places; the reference
            that was retired there is the caller's. At all other places nothing is mapped.
        """
        with self._changed:
            if not (self._retired or self._leaving):
                return []
            places = self._places(range_, range(index, index + len(pages)))
            taken = [
                i
                for i, (place, page) in enumerate(zip(places, pages, strict=True))
                if place in self._parked.get(page, ())
            ]
            taken_pages = [pages[i] for i in taken]
            self._ledger.unretire(taken_pages)
            self._forget([places[i] for i in taken], taken_pages)
            self._vacate(places)
            return taken

    def indices_of(self, range_: VirtualRange, page: Page) -> list[int]:
        """Indices of the places where `reuse_pages` would find the page, which is in use."""
        with self._changed:
            places = self._parked.get(page, ())
            return [range_.index_at(each) for each in places if self._retired[each].range is range_]

    def vacate_soon(self, range_: VirtualRange, indices: Iterable[int]) -> None:
        """Have `collect` unmap these places before all others, also where pages are in use.

        Those that have no retired page are left alone, as are those that are used again before.
        """
        with self._changed:
            places = range_.addresses(indices)
            self._unwanted.update(dict.fromkeys(each for each in places if each in self._retired))
        if self.on_retire is not None:
            self.on_retire()

    def collect(self, *, frees_memory: bool = True) -> bool:
        """Unmap and give back some pages after their fences have passed; never waits.

        Args:
            frees_memory: False for places of `vacate_soon` alone.

        Returns: whether there may be more of them.
        """
        with self._changed:
            batch = self._passed(self._unwanted, _COLLECT_PAGES)
            if not batch and frees_memory:
                batch = self._passed(self._waiting, _COLLECT_PAGES)
            leaving = {place: self._retired[place] for place in batch}
            self._forget(batch, _pages_at(leaving))
            self._leaving.update(leaving)
        if not batch:
            return False
        pages: list[Page] = []
        try:
            pages = _unmap(leaving)
        finally:
            with self._changed:
                for place in leaving:
                    del self._leaving[place]
                self._release_retired(pages)
                self._changed.notify_all()
        return True

    def reclaim(self, num_bytes: int) -> bool:
        """Unmap the pages that were given up first, to get about `num_bytes`; waits for fences.

        It may be less where a page is at several places; the caller repeats it until it suffices.

        Returns: whether any place was given back, by this call or by a `collect` that it waited
            for; if not, all retired pages are in use elsewhere.
        """
        with self._changed:
            if self._leaving:
                self._changed.wait()
                return True
            if not self._waiting:
                return False
            oldest = next(iter(self._waiting))
            range_, fence = self._retired[oldest]
            fence.wait()
            self._give_back(self._passed(self._waiting, -(-num_bytes // range_.page_bytes)))
            return True

    def settle(self, range_: VirtualRange | None = None) -> None:
        """Give back all retired pages of a range, or of all, after the work that may touch them.

        It waits for the fences of these places only; places in other ranges stay as they are.
        """

        def is_of_range(retired: _Retired) -> bool:
            return range_ is None or retired.range is range_

        with self._changed:
            while any(map(is_of_range, self._leaving.values())):
                self._changed.wait()
            self._vacate([place for place, each in self._retired.items() if is_of_range(each)])

    def _places(self, range_: VirtualRange, indices: Iterable[int]) -> list[_Place]:
        """These places, after `collect` has finished with those that it is unmapping."""
        places = range_.addresses(indices)
        while self._leaving and not self._leaving.keys().isdisjoint(places):
            self._changed.wait()
        return places

    def _passed(self, places: Iterable[_Place], max_pages: int) -> list[_Place]:
        """The first of these places that have passed their fences, up to one that has not."""
        batch: list[_Place] = []
        passed: Fence | None = None
        for place in places:
            fence = self._retired[place].fence
            if len(batch) == max_pages or (fence is not passed and not fence.passed()):
                break
            passed = fence
            batch.append(place)
        return batch

    def _unpark(self, page: Page) -> None:
        """Let the places of a page wait for collection, since it is no longer in use."""
        self._waiting.update(self._parked.pop(page, {}))

    def _forget(self, places: Sequence[_Place], pages: Sequence[Page]) -> None:
        """Remove places, which are no longer retired, with the pages that are mapped there."""
        for place, page in zip(places, pages, strict=True):
            del self._retired[place]
            if place in self._waiting:
                del self._waiting[place]
                continue
            parked = self._parked[page]
            del parked[place]
            if not parked:
                del self._parked[page]
        if self._unwanted:
            for place in places:
                self._unwanted.pop(place, None)

    def _vacate(self, places: Sequence[_Place]) -> None:
        """Unmap and give back those of the places that are retired, after their fences."""
        retired = [place for place in places if place in self._retired]
        for fence in {self._retired[place].fence for place in retired}:
            fence.wait()
        self._give_back(retired)

    def _give_back(self, places: Sequence[_Place]) -> None:
        """Unmap and release. Pre-condition: their fences have passed."""
        given_back = {place: self._retired[place] for place in places}
        self._forget(places, _pages_at(given_back))
        self._release_retired(_unmap(given_back))

    def _release_retired(self, pages: Sequence[Page]) -> None:
        """Release references that were retired."""
        if pages:
            self._ledger.unretire(pages)
            self.release(pages)


def _pages_at(places: Mapping[_Place, _Retired]) -> list[Page]:
    return [each.range.page(each.range.index_at(place)) for place, each in places.items()]


def _unmap(places: Mapping[_Place, _Retired]) -> list[Page]:
    by_range: dict[VirtualRange, list[int]] = {}
    for place, retired in places.items():
        by_range.setdefault(retired.range, []).append(retired.range.index_at(place))
    return [page for range_, indices in by_range.items() for page in range_.unmap(sorted(indices))]
