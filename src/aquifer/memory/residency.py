"""Pages under a tenant's addresses: the one way any tenant gets them and gives them up.

"Make room, acquire, map, and undo all of it if one of these fails" is written here once, for
weights, KV, state and any other tenant. A tenant decides which of its addresses need pages, and
keeps its own books.

What happens to the pages can be recorded, so that another process repeats it on a range of its own
(`aquifer.cache.journal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

from aquifer.errors import DriverError
from aquifer.memory.pages import Page
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.runs import as_run, join, runs


@dataclass(frozen=True, slots=True)
class Mapped:
    """Pages that were put under a range's places from `index` on, each of `units` indices."""

    index: int
    pages: tuple[Page, ...]
    units: int = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """Places that pages are being put under in the background; `Mapped` or `Abandoned` follows."""

    stretches: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Places that have not got the pages that were begun."""

    stretches: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Aliased:
    """Pages in use that were put under the places from `index` on, for a held reference each."""

    index: int
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Places of a range that no longer need their pages."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """Pages that stay in use without a place: one more reference to each."""

    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The opposite of `Shared`: one reference less to each page."""

    pages: tuple[Page, ...]


_Piece = tuple[int, Sequence[Page]]  # a place, and the pages from there on

PageOp = Mapped | Begun | Abandoned | Aliased | GivenUp | Shared | Released


@dataclass(frozen=True, slots=True, eq=False)
class PendingPages:
    """Pages that are being mapped by the pool's background thread."""

    pieces: Sequence[_Piece]
    future: Future[None]
    when_settled: Callable[[], None] | None


class Residency:
    """The pages of one owner under the addresses of one range.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        range_: where they are mapped.

    Attributes:
        range: as given.
        place_bytes: size of a page.
        record: called with each operation, in order; None for no recording.
    """

    def __init__(self, pool: PagePool, owner: Owner, range_: VirtualRange) -> None:
        self.range = range_
        self.place_bytes = range_.page_bytes
        self.record: Callable[[PageOp], None] | None = None
        self._pool = pool
        self._owner = owner

    def populate(
        self,
        stretches: Sequence[range],
        *,
        units: int | Sequence[int] = 1,
        may_reclaim: bool = True,
        is_overwritten: bool = False,
    ) -> bool:
        """Put pages under these indices, all or none; False means that the pool is short.

        A place that still has the page which was given up there gets it back unchanged. Contents
        are the owner's old bytes, or zeros; any bytes, if they are to be overwritten.

        Args:
            stretches: indices without a page in use.
            units: size of the pages, in pages of the range's own size, of all stretches or of each;
                it divides the stretch.
            may_reclaim: whether to unmap retired pages of other places, and to take pages from
                other tenants. Without it, the call waits only where one of these places still has
                a page that is shared, or that is being unmapped.
            is_overwritten: whether all bytes are written before any is read.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        retired = self._pool.retired
        places: Sequence[Sequence[int]] = stretches
        if units == 1:
            sizes: Sequence[int] = [1] * len(stretches)
        else:
            sizes = [units] * len(stretches) if isinstance(units, int) else units
            pairs = zip(stretches, sizes, strict=True)
            places = [each if size == 1 else list(each[::size]) for each, size in pairs]
        taken: Sequence[int] = ()
        if retired.num_places(self.range):
            if self.range.has_large or units != 1:
                self._vacate_other_sizes(stretches, sizes)
            taken = retired.reuse(self.range, join(places))
        is_done = bool(taken) and len(taken) == sum(map(len, places))
        try:  # nearly every step comes here, and an ExitStack would take a fifth of the time
            if not is_done:
                missing = _without(places, taken)
                by_size = [(1, missing)] if units == 1 else _by_size(missing, sizes)
                is_done = self._map_new(by_size, may_reclaim, is_overwritten)
        finally:
            if taken and not is_done:
                retired.retire(self.range, taken)
        if not is_done:
            return False
        if self.record is not None:
            for each, size in zip(places, sizes, strict=True):
                if each:
                    self.record(Mapped(each[0], tuple(self.range.pages_at(each)), size))
        return True

    def populate_later(
        self, stretches: Sequence[range], when_settled: Callable[[], None] | None = None
    ) -> PendingPages | None:
        """Put pages under these places, in the pool's background thread.

        The thread begins after the next `BackgroundMapper.begin`. The call itself makes none of the
        driver, and is for places where nothing was given up.

        Args:
            stretches: indices without a page.
            when_settled: called by `settle`, if the pages are there.

        Returns: what is under way, to be ended with `settle`; None where the pool has no thread, or
            not as many pages that are ready.
        """
        mapper = self._pool.mapper
        if mapper is None:
            return None
        pages = self._pool.take_ready(self._owner, sum(map(len, stretches)))
        if pages is None:
            return None
        pieces = list(_cut(stretches, as_run(pages), 1))
        places = [(self.range.address_for(index, run), run) for index, run in pieces]
        if self.record is not None:
            self.record(Begun(tuple(stretches)))
        return PendingPages(pieces, mapper.submit(places), when_settled)

    def settle(self, pending: PendingPages) -> bool:
        """Wait until pages are mapped, and note them; False if the device refused them."""
        assert self._pool.mapper is not None, "it has begun to map them"
        try:
            self._pool.mapper.finish(pending.future)
        except DriverError:
            self._pool.release([page for _, run in pending.pieces for page in run])
            if self.record is not None:
                places = [range(index, index + len(run)) for index, run in pending.pieces]
                self.record(Abandoned(tuple(places)))
            return False
        for index, pages in pending.pieces:
            self.range.note(index, pages)
            if self.record is not None:
                self.record(Mapped(index, tuple(pages)))
        if pending.when_settled is not None:
            pending.when_settled()
        return True

    def alias(self, index: int, pages: Sequence[Page]) -> None:
        """Put pages that are in use elsewhere under the places from `index` on, all or none.

        The reference that the caller holds of each page (`share`) becomes the place's. A place that
        still has the same page gets it back unchanged. The caller must not write to the pages
        through these places while they have other users.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        retired = self._pool.retired
        places = self.places(index, pages)
        with ExitStack() as undo:
            taken = retired.reuse_pages(self.range, places, pages)
            if len(taken) < len(pages):
                undo.callback(self._retire_again, taken)
                if self.range.has_large:
                    end = places[-1] + self.range.num_places(pages[-1])
                    there = retired.sizes_at(self.range, range(index, end))
                    if others := there.keys() - set(places):
                        retired.vacate(self.range, list(others))
                at_places = list(zip(places, pages, strict=True))
                is_taken = set(taken)
                self._map(self._pieces([each for each in at_places if each[0] not in is_taken]))
            undo.pop_all()
        if self.record is not None and pages:
            self.record(Aliased(index, tuple(pages)))

    def give_up(self, indices: Sequence[int], *, is_untouched: bool = False) -> None:
        """Give up the pages at these places, as soon as no work in flight can touch them.

        The opposite of `populate` and `alias`.

        Args:
            indices: the places.
            is_untouched: whether no work was handed to the device that may touch them.
        """
        if indices:
            self._pool.retired.retire(self.range, indices, is_untouched=is_untouched)
            if self.record is not None:
                self.record(GivenUp(tuple(indices)))

    def share(self, pages: Sequence[Page]) -> None:
        """Add a reference to pages: they stay in use, also when their places are given up.

        Raises:
            InvariantError: one of the pages is not in use.
        """
        if not pages:
            return
        self._pool.share(pages)
        if self.record is not None:
            self.record(Shared(tuple(pages)))

    def release(self, pages: Sequence[Page]) -> None:
        """Release the references that `share` added."""
        if not pages:
            return
        self._pool.release(pages)
        if self.record is not None:
            self.record(Released(tuple(pages)))

    def is_in_use(self, page: Page) -> bool:
        """Whether a page has references, those that are retired included."""
        return self._pool.num_references(page) > 0

    def transfer(self, pages: Sequence[Page], owner: Owner) -> None:
        """Account pages to another owner of the same model."""
        if pages:
            self._pool.transfer(pages, owner)

    def places(self, index: int, pages: Sequence[Page]) -> Sequence[int]:
        """The places of pages that follow each other from an index on."""
        if not self.range.has_large:
            return range(index, index + len(pages))
        return list(accumulate(self.range.sizes(pages), initial=index))[:-1]

    def left_at(self, indices: range) -> dict[int, int]:
        """The places at these indices that were given up and still have their page, and how many
        indices each takes."""
        return self._pool.retired.sizes_at(self.range, indices)

    def left_with(self, page: Page, *, is_passed: bool = False) -> list[int]:
        """The places that were given up and still have this page, which is in use elsewhere.

        Args:
            page: the page.
            is_passed: whether only those count that no work in flight may touch.
        """
        return self._pool.retired.indices_of(self.range, page, is_passed=is_passed)

    def vacate_soon(self, indices: Sequence[int]) -> None:
        """Have places that were given up unmapped in the background, before all others."""
        self._pool.retired.vacate_soon(self.range, indices)

    @property
    def defers(self) -> bool:
        """Whether pages that are given up stay mapped for a time."""
        return self._pool.retired.defers

    @property
    def num_places(self) -> int:
        """Pages that the range has room for."""
        return self.range.num_pages

    def _vacate_other_sizes(self, stretches: Sequence[range], sizes: Sequence[int]) -> None:
        """Unmap the pages that were left at these indices and are of another size than is wanted
        there, or lie at other places."""
        retired = self._pool.retired
        for stretch, wanted in zip(stretches, sizes, strict=True):
            if stretch:
                fitting = stretch[::wanted]
                found = retired.sizes_at(self.range, stretch).items()
                others = [i for i, size in found if size != wanted or i not in fitting]
                if others:
                    retired.vacate(self.range, others)

    def _map_new(
        self,
        missing: Sequence[tuple[int, Sequence[Sequence[int]]]],
        may_reclaim: bool,
        is_overwritten: bool,
    ) -> bool:
        """Acquire pages and map them at these places, all or none; False if the pool is short.

        Args:
            missing: sizes of pages, each with lists of ascending places for them.
            may_reclaim: as for `populate`.
            is_overwritten: as for `populate`.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        acquired: list[Page] = []
        pieces: list[_Piece] = []
        is_done = False
        try:
            for size, stretches in missing:
                pages = self._pool.acquire(
                    self._owner,
                    sum(map(len, stretches)),
                    self.range.page_bytes * size,
                    may_reclaim=may_reclaim,
                    is_overwritten=is_overwritten,
                )
                if pages is None:
                    return False
                acquired += pages
                pieces += _cut(stretches, as_run(pages), size)
            self._map(pieces)
            is_done = True
        finally:
            if not is_done:
                self._pool.release(acquired)
        return True

    def _retire_again(self, places: Sequence[int]) -> None:
        """The opposite of `RetireQueue.reuse_pages`: the caller has its references again."""
        self._pool.share(self.range.pages_at(places))
        self._pool.retired.retire(self.range, places)

    def _pieces(self, at: Sequence[tuple[int, Page]]) -> Iterator[_Piece]:
        """Pages with their places, cut into pieces of one size that follow each other."""
        start = 0
        for end in range(1, len(at) + 1):
            place, page = at[end - 1]
            size = self.range.num_places(page)
            if end < len(at):
                next_place, next_page = at[end]
                if next_place == place + size and self.range.num_places(next_page) == size:
                    continue
            yield at[start][0], [page for _, page in at[start:end]]
            start = end

    def _map(self, pieces: Iterable[_Piece]) -> None:
        """Map pages one after the other from a place on, all pieces or none.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        mapped: list[_Piece] = []
        try:
            for place, pages in pieces:
                if pages:
                    self.range.map(place, pages)
                    mapped.append((place, pages))
        except BaseException:
            for place, pages in mapped:
                self.range.unmap(self.places(place, pages))
            raise


def _by_size(
    places: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[tuple[int, list[Sequence[int]]]]:
    """Stretches of places by the size of their pages, the largest first."""
    found: dict[int, list[Sequence[int]]] = {}
    for each, size in zip(places, sizes, strict=True):
        found.setdefault(size, []).append(each)
    return sorted(found.items(), reverse=True)


def _cut(lists: Sequence[Sequence[int]], pages: Sequence[Page], size: int) -> Iterator[_Piece]:
    """As many of the pages as there are places, by stretch of places at this distance, with the
    first of them."""
    done = 0
    for places in lists:
        for start, end in runs(places, size):
            yield places[start], pages[done : done + end - start]
            done += end - start


def _without(stretches: Sequence[Sequence[int]], taken: Sequence[int]) -> Sequence[Sequence[int]]:
    """Each stretch without some of its numbers, which may be no stretch any more."""
    if not taken:
        return stretches
    if len(taken) == sum(map(len, stretches)):
        return [()] * len(stretches)
    gone = set(taken)
    return [[i for i in stretch if i not in gone] for stretch in stretches]
