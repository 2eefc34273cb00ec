"""Pages that were given up while work in flight may still touch them.

A device runs behind the loop that gives it work: when the loop learns that a sequence has ended,
a step that reads and writes the sequence's pages may be in flight. Unmapping a page under a kernel
is a fault, and releasing it lets the next owner's bytes mix with the old one's. Hence the rule:

    a page is unmapped, and its reference given back to the pool, only after a fence that was made
    when it was given up has passed.

Between the two it is "retired": still mapped, and accounted to no owner. It may stay so for as
long as other pages are available. A retired place is left in one of these ways:

- `reuse`: the tenant that gave it up wants a page at the same place again. The page stays
  where it is: work that was in flight and work that comes later run in order. For the slots of a
  virtual cache this is deferred reclamation (vAttention, section 5.4.2): no unmapping, no mapping.
- `reuse_pages`: likewise, to read that very page, which may have other users too.
- `collect`: its fence has passed, and the stocker's thread unmaps it, off the critical path.
  `stock.py` decides when: as late as possible, so that more places can be reused. A tenant that
  wants to use a place otherwise says so with `vacate_soon`.
- `reclaim`: the pool is short and waits for the fence. It is at most as far away as the work in
  flight, so this comes before pages that are in use are taken.
- `vacate`, `settle`: some fences are waited for, because a page of another size is to be mapped
  there, or those of a range, before its addresses are given back.

A page may be retired at one place and in use at another, or held by the prefix cache. To unmap it
at the first frees nothing, so such places are "parked": `collect` and `reclaim` skip them until the
last use of the page ends, or `vacate_soon` names them. So a request that continues a cached
conversation finds its pages where they were, also in a full pool.

On a device that does not run ahead (`Driver.runs_ahead`), a page goes at once (`defers`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress

from aquifer.errors import InvariantError
from aquifer.memory.batches import PASSED, Batch, past_fences, without
from aquifer.memory.driver.base import Fence
from aquifer.memory.guard import GuardedPages
from aquifer.memory.ledger import Ledger
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.range import VirtualRange
from aquifer.memory.records import Records
from aquifer.memory.runs import are_equal, join

_Place = tuple[VirtualRange, int]  # a range, and an index in it

_COLLECT_PAGES = 4
"""How many pages `collect` unmaps in one go: 0.1 ms, and 2 ms beside other calls of the driver,
which is how long `reuse` may have to wait for one of them."""


class RetireQueue:
    """The retired pages of one pool, in the order in which they were given up.

    Places are unmapped in that order, and those of one call from its last to its first, so that the
    beginning of a stretch stays longest. Places of a page that is still in use join the queue when
    that use ends. Places in a row are handled as one stretch, as far as the same is true of them.

    `collect` may be called from another thread than the other methods.

    Args:
        ledger: the pool's books. Their lock guards the queue too, so that there is one order of
            locks.
        pages: the pool's pages.

    Attributes:
        on_retire: called when places were retired, which can be collected later.
        defers: whether pages that are given up stay mapped for a time; by default, they do on a
            device that runs ahead.
    """

    def __init__(self, ledger: Ledger, pages: PageTable) -> None:
        self.on_retire: Callable[[], None] | None = None
        self._ledger = ledger
        self._pages = pages
        self._guards = pages if isinstance(pages, GuardedPages) else None
        self._driver = pages.driver
        self.defers = pages.driver.runs_ahead
        self._changed = threading.Condition(ledger.lock)
        # All places that are retired and not leaving, by their range and index.
        self._retired: dict[VirtualRange, Records[Batch]] = {}
        self._waiting: dict[Batch, None] = {}  # those with pages out of use, oldest first
        self._num_waiting = 0  # their places
        self._parked: Records[tuple[Batch, ...]] = Records()  # the other places, by their page
        self._unwanted: dict[_Place, None] = {}  # those of `vacate_soon`, oldest first
        # Those that `collect` is unmapping right now, and how many indices each takes.
        self._leaving: dict[_Place, int] = {}

    def __len__(self) -> int:
        """Places that were given up and still have their page, which is not in use elsewhere."""
        with self._changed:
            return self._num_waiting + len(self._leaving)

    def num_places(self, range_: VirtualRange | None = None) -> int:
        """Places that were given up and still have their page, of a range or of all."""
        with self._changed:  # else a place could be missed between the two
            places = self._retired.values() if range_ is None else [self._places(range_)]
            return sum(map(len, places)) + sum(range_ in (None, each) for each, _ in self._leaving)

    @property
    def has_unwanted(self) -> bool:
        """Whether places are to be vacated soon."""
        return bool(self._unwanted)

    def indices(self, range_: VirtualRange) -> set[int]:
        """Indices of the places in a range that were given up and still have their page."""
        with self._changed:
            found = {index for index, _ in self._places(range_).items()}
            return found | {index for each, index in self._leaving if each is range_}

    def retire(
        self, range_: VirtualRange, indices: Sequence[int], *, is_untouched: bool = False
    ) -> None:
        """Give up the pages at these indices, with the reference that the caller holds to each.

        If it `is_untouched`, no work in flight may touch them, and no fence is needed.

        Raises:
            InvariantError: there is no page, or it was given up already.
        """
        if not indices:
            return
        fence = (None if is_untouched else self._driver.fence()) or PASSED
        if not self.defers:
            fence.wait()
            self.release(range_.unmap(indices))
            return
        with self._changed:
            places = self._retired.setdefault(range_, Records())
            is_retired = places.values_of(indices).count(None) < len(indices)
            if is_retired or self._is_leaving(range_, indices):
                raise InvariantError("a page of a range was given up twice")
            indices = indices[::-1]
            start = 0
            ended: list[Sequence[Page]] = []
            for is_in_use, pages in self._ledger.retire(range_.pages_at(indices)):
                part = indices[start : start + len(pages)]
                start += len(part)
                self._add(Batch(range_, fence, part, pages if is_in_use else None), places)
                if not is_in_use:
                    ended.append(pages)
            for pages in ended:
                self._unpark(pages)
        if self.on_retire is not None:
            self.on_retire()

    def release(self, pages: Sequence[Page]) -> None:
        """Drop one reference of each page, for `PagePool.release` and for pages unmapped here.

        The places of a page that has only retired references left may be collected from now on.
        """
        with self._changed:
            has_ended = False
            for ended in self._ledger.release(pages):
                has_ended |= self._unpark(ended)
            self._pages.release(self._ledger.take_surplus())
            if self._guards is not None:
                self._guards.poison([p for p in pages if not self._ledger.num_references(p)])
        if has_ended and self.on_retire is not None:
            self.on_retire()

    def reuse(self, range_: VirtualRange, indices: Sequence[int]) -> Sequence[int]:
        """Use places again: to be called before pages are mapped at these indices.

        Returns: the indices where the page is still mapped; it is the caller's again, with its
            bytes. At all others nothing is mapped when this returns. It waits for a fence only if a
            page is shared, since writing to that one would change the bytes of its other users.
        """
        with self._changed:
            self._await_leaving(range_, indices)
            taken: list[Sequence[int]] = []
            others: list[Sequence[int]] = []
            for batch, part in self._places(range_).stretches(indices):
                if batch is None:
                    continue
                if batch.is_parked:
                    others.append(part)
                    continue
                start = 0
                for is_single, pages in self._ledger.single_runs(range_.pages_at(part)):
                    places = part[start : start + len(pages)]
                    start += len(places)
                    if is_single:
                        self._ledger.unretire(pages)
                        self._forget(range_, places)
                        taken.append(places)
                    else:
                        others.append(places)
            if others:
                self._vacate(range_, join(others))
            return join(taken)

    def reuse_pages(
        self, range_: VirtualRange, indices: Sequence[int], pages: Sequence[Page]
    ) -> Sequence[int]:
        """Use places again to read what these pages hold, one page a place.

        To be called with a reference to each page, before they are mapped there. The caller must
        not write to them. A place with another page is unmapped, after its fence.

        Args:
            range_: the range of the places.
            indices: the places, as many as pages.
            pages: pages that are in use.

        Returns: the places where their pages are still mapped; the reference that was retired there
            is released, and the caller's is the place's. At all other places nothing is mapped.
        """
        with self._changed:
            self._await_leaving(range_, indices)
            taken: list[Sequence[int]] = []
            others: list[Sequence[int]] = []
            start = 0
            for batch, part in list(self._places(range_).stretches(indices)):
                wanted = pages[start : start + len(part)]
                start += len(part)
                if batch is None:
                    continue
                found = range_.pages_at(part)
                if not batch.is_parked:
                    others.append(part)
                elif are_equal(found, wanted):
                    self._ledger.drop_retired(wanted)
                    self._forget(range_, part, found)
                    taken.append(part)
                else:
                    is_same = [page == other for page, other in zip(found, wanted, strict=True)]
                    same = list(compress(part, is_same))
                    self._ledger.drop_retired(list(compress(wanted, is_same)))
                    self._forget(range_, same)
                    taken.append(same)
                    others.append([i for i, same in zip(part, is_same, strict=True) if not same])
            if others:
                self._vacate(range_, join(others))
            return join(taken)

    def vacate(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Unmap and give back those of these places that are still retired, after their fences."""
        with self._changed:
            self._await_leaving(range_, indices)
            self._vacate(range_, self._places(range_).present(indices))

    def sizes_at(self, range_: VirtualRange, indices: range) -> dict[int, int]:
        """The places of pages that were given up at some indices and are still there, and how many
        indices each takes. Pages in use at these indices are named too."""
        with self._changed:
            self._await_leaving(range_, indices)
            if not self._places(range_):
                return {}
            return range_.sizes_at(indices)

    def indices_of(self, range_: VirtualRange, page: Page, *, is_passed: bool = False) -> list[int]:
        """Indices of the places where `reuse_pages` would find the page, which is in use; if
        `is_passed`, of those that no work in flight may touch."""
        with self._changed:
            batches = (past_fences if is_passed else tuple)(self._parked.get(page) or ())
            return [each.indices_of([page])[0] for each in batches if each.range is range_]

    def vacate_soon(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Have `collect` unmap these places before all others, also where pages are in use.

        Those that have no retired page are left alone, as are those that are used again before.
        """
        with self._changed:
            there = self._places(range_).present(indices)
            self._unwanted.update(dict.fromkeys((range_, index) for index in there))
        if self.on_retire is not None:
            self.on_retire()

    def collect(self, *, frees_memory: bool = True) -> bool:
        """Unmap and give back some pages after their fences have passed; never waits.

        Args:
            frees_memory: False for places of `vacate_soon` alone.

        Returns: whether there may be more.
        """
        with self._changed:
            leaving = self._passed(self._unwanted, _COLLECT_PAGES)
            if not leaving and frees_memory:
                leaving = self._passed(self._all_waiting(), _COLLECT_PAGES)
            for range_, indices in leaving.items():
                self._forget(range_, indices)
                for index, page in zip(indices, range_.pages_at(indices), strict=True):
                    self._leaving[range_, index] = range_.num_places(page)
        if not leaving:
            return False
        pages: list[Page] = []
        try:
            for range_, indices in leaving.items():
                pages += range_.unmap(sorted(indices))
        finally:
            with self._changed:
                for range_, indices in leaving.items():
                    for index in indices:
                        del self._leaving[range_, index]
                self._release_retired(pages)
                self._changed.notify_all()
        return True

    def reclaim(self, num_bytes: int) -> bool:
        """Unmap the pages that were given up first, to get about `num_bytes`; waits for fences.

        It may be less where a page is at several places; the caller repeats it until it suffices.

        Returns: whether any place was given back, also by a `collect` that it waited for; if not,
            all retired pages are in use elsewhere.
        """
        with self._changed:
            if self._leaving:
                self._changed.wait()
                return True
            if not self._waiting:
                return False
            oldest = next(iter(self._waiting))
            oldest.fence.wait()
            places = self._until(num_bytes)
            for range_, indices in self._passed(places, len(places)).items():
                self._give_back(range_, indices)
            return True

    def settle(self, range_: VirtualRange | None = None) -> None:
        """Give back all retired pages of a range, or of all, after the work that may touch them.

        It waits for the fences of these places only; places in other ranges stay as they are.
        """
        with self._changed:
            while any(range_ in (None, each) for each, _ in self._leaving):
                self._changed.wait()
            for each in list(self._retired) if range_ is None else [range_]:
                self._vacate(each, [index for index, _ in self._places(each).items()])
                self._retired.pop(each, None)

    def _places(self, range_: VirtualRange) -> Records[Batch]:
        """The retired places of a range."""
        return self._retired.get(range_) or Records()

    def _is_leaving(self, range_: VirtualRange, indices: Sequence[int]) -> bool:
        """Whether `collect` is unmapping a page that lies at any of these indices."""
        wanted = indices if isinstance(indices, range) or not self._leaving else set(indices)
        return any(
            each is range_ and any(i in wanted for i in range(index, index + size))
            for (each, index), size in self._leaving.items()
        )

    def _await_leaving(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Wait until `collect` has finished with the pages that lie at any of these indices."""
        while self._is_leaving(range_, indices):
            self._changed.wait()

    def _all_waiting(self) -> Iterator[_Place]:
        """All waiting places, oldest first."""
        for batch in self._waiting:
            places = self._places(batch.range)
            for index in batch.indices:
                if places.get(index) is batch:
                    yield batch.range, index

    def _until(self, num_bytes: int) -> list[_Place]:
        """The waiting places that were given up first, up to so many bytes."""
        found = []
        for range_, index in self._all_waiting():
            if num_bytes <= 0:
                break
            found.append((range_, index))
            num_bytes -= range_.num_places(range_.page(index)) * range_.page_bytes
        return found

    def _passed(self, places: Iterable[_Place], max_pages: int) -> dict[VirtualRange, list[int]]:
        """The first of these places that have passed their fences, up to one that has not."""
        found: dict[VirtualRange, list[int]] = {}
        passed: Fence | None = None
        for (range_, index), _ in zip(places, range(max_pages), strict=False):
            batch = self._retired[range_].get(index)
            assert batch is not None
            if batch.fence is not passed and not batch.fence.passed():
                break
            passed = batch.fence
            found.setdefault(range_, []).append(index)
        return found

    def _add(self, batch: Batch, places: Records[Batch]) -> None:
        """Enter a new batch with its places, which belong to no other from now on."""
        batch.num_left = len(batch.indices)
        places.fill(batch.indices, batch)
        if batch.pages is None:
            self._waiting[batch] = None
            self._num_waiting += batch.num_left
            return
        for _ in self._parked.change(batch.pages, lambda _, before: (*(before or ()), batch)):
            pass

    def _unpark(self, pages: Sequence[Page]) -> bool:
        """Let the places of pages wait for collection, since these are no longer in use.

        Returns: whether there are such places.
        """
        if not self._parked:
            return False
        ended: list[tuple[Batch, Sequence[Page]]] = []
        for before, _, run in self._parked.change(pages, lambda _page, _before: None):
            ended += ((batch, run) for batch in before or ())
        for batch, run in ended:
            waiting = Batch(batch.range, batch.fence, batch.indices_of(run), None)
            self._add(waiting, self._retired[batch.range])
        return bool(ended)

    def _forget(
        self, range_: VirtualRange, indices: Sequence[int], pages: Sequence[Page] | None = None
    ) -> None:
        """Remove places, which are no longer retired; their pages are still mapped there."""
        for batch, _, part in self._retired[range_].change(indices, lambda _, _batch: None):
            assert batch is not None
            if batch.is_parked:
                of_part = pages if pages and len(part) == len(indices) else range_.pages_at(part)
                for _ in self._parked.change(of_part, partial(without, batch)):
                    pass
                continue
            self._num_waiting -= len(part)
            batch.num_left -= len(part)
            if not batch.num_left:
                del self._waiting[batch]
        if self._unwanted:
            for index in indices:
                self._unwanted.pop((range_, index), None)

    def _vacate(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Unmap and give back these places, which are retired, after their fences."""
        batches = {batch for batch, _ in self._places(range_).stretches(indices)}
        for fence in {batch.fence for batch in batches if batch is not None}:
            fence.wait()
        self._give_back(range_, indices)

    def _give_back(self, range_: VirtualRange, indices: Sequence[int]) -> None:
        """Unmap and release. Pre-condition: their fences have passed."""
        if indices:
            self._forget(range_, indices)
            self._release_retired(range_.unmap(sorted(indices)))

    def _release_retired(self, pages: Sequence[Page]) -> None:
        """Release references that were retired."""
        if pages:
            self._ledger.unretire(pages)
            self.release(pages)
