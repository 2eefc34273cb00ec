"""Pages under a tenant's addresses: the one way any tenant gets them and gives them up.

"Make room, acquire, map, and undo all of it if one of these fails" is written here once, for
weights, KV, state and any other tenant. A tenant decides which of its addresses need pages, and
keeps its own books.

What happens to the pages can be recorded, so that another process repeats it on a range of its own
(`aquifer.cache.journal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from aquifer.memory.pages import Page
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.runs import as_run, join, runs


@dataclass(frozen=True, slots=True)
class Mapped:
    """Pages that were put under a range's places from `index` on."""

    index: int
    pages: tuple[Page, ...]


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


PageOp = Mapped | Aliased | GivenUp | Shared | Released


class Residency:
    """The pages of one owner under the addresses of one range.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        range_: where they are mapped.

    Attributes:
        range: as given.
        record: called with each operation, in order; None for no recording.
    """

    def __init__(self, pool: PagePool, owner: Owner, range_: VirtualRange) -> None:
        self.range = range_
        self.record: Callable[[PageOp], None] | None = None
        self._pool = pool
        self._owner = owner

    def populate(
        self,
        stretches: Sequence[range],
        *,
        may_reclaim: bool = True,
        is_overwritten: bool = False,
    ) -> bool:
        """Put pages under these places, all or none; False means that the pool is short.

        A place that still has the page which was given up there gets it back unchanged. Contents
        are the owner's old bytes, or zeros; any bytes, if they are to be overwritten.

        Args:
            stretches: places without a page in use.
            may_reclaim: whether to unmap retired pages of other places, and to take pages from
                other tenants. Without it, the call waits only where one of these places still has
                a page that is shared, or that is being unmapped.
            is_overwritten: whether all bytes are written before any is read.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        retired = self._pool.retired
        missing = stretches
        taken: Sequence[int] = ()
        if retired.num_places:
            taken = retired.reuse(self.range, join(stretches))
            missing = _without(stretches, taken)
        is_done = False
        try:  # nearly every step comes here, and an ExitStack would take a fifth of the time
            is_done = self._map_new(missing, may_reclaim, is_overwritten)
        finally:
            if taken and not is_done:
                retired.retire(self.range, taken)
        if not is_done:
            return False
        if self.record is not None:
            for stretch in filter(None, stretches):
                self.record(Mapped(stretch.start, tuple(self.range.pages_at(stretch))))
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
        with ExitStack() as undo:
            taken = retired.reuse_pages(self.range, index, pages)
            if len(taken) < len(pages):
                places = [index + i for i in taken]
                undo.callback(retired.retire, self.range, places)
                missing = _without([range(index, index + len(pages))], places)
                self._map(missing, [pages[i - index] for each in missing for i in each])
            undo.pop_all()
        # A place that is reused has its own reference, which was retired with it.
        if taken:
            is_all = len(taken) == len(pages)
            self._pool.release(pages if is_all else [pages[i] for i in taken])
        if self.record is not None and pages:
            self.record(Aliased(index, tuple(pages)))

    def give_up(self, indices: Sequence[int]) -> None:
        """Give up the pages at these places, as soon as no work in flight can touch them.

        The opposite of `populate` and `alias`.
        """
        if indices:
            self._pool.retired.retire(self.range, indices)
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

    def transfer(self, pages: Sequence[Page], owner: Owner) -> None:
        """Account pages to another owner of the same model."""
        if pages:
            self._pool.transfer(pages, owner)

    def _map_new(self, stretches: Sequence[range], may_reclaim: bool, is_overwritten: bool) -> bool:
        """Acquire pages and map them at these stretches, all or none; False if the pool is short.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        pages = self._pool.acquire(
            self._owner,
            sum(map(len, stretches)),
            self.range.page_bytes,
            may_reclaim=may_reclaim,
            is_overwritten=is_overwritten,
        )
        if pages is None:
            return False
        try:
            self._map(stretches, as_run(pages))
        except BaseException:
            self._pool.release(pages)
            raise
        return True

    def _map(self, stretches: Iterable[range], pages: Sequence[Page]) -> None:
        """Map `pages` at these stretches in turn, all or none.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        mapped: list[range] = []
        done = 0
        try:
            for stretch in stretches:
                end = done + len(stretch)
                if end > done:
                    self.range.map(stretch.start, pages[done:end])
                    mapped.append(stretch)
                    done = end
        except BaseException:
            for stretch in mapped:
                self.range.unmap(stretch)
            raise


def _without(stretches: Sequence[range], taken: Sequence[int]) -> list[range]:
    """The stretches without some of their numbers."""
    if not taken:
        return list(stretches)
    if len(taken) == sum(map(len, stretches)):
        return []
    gone = set(taken)
    left: list[range] = []
    for stretch in stretches:
        rest = [i for i in stretch if i not in gone]
        left += [range(rest[start], rest[end - 1] + 1) for start, end in runs(rest)]
    return left
