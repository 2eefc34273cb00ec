"""Pages that several sequences have, or that are held: their users and holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple, cast

from aquifer.errors import InvariantError
from aquifer.memory.pages import Page
from aquifer.memory.pool import Kind, Owner
from aquifer.memory.records import Records
from aquifer.memory.residency import Residency
from aquifer.memory.runs import join, runs
from aquifer.memory.stripes import StripedResidency


class _Shared(NamedTuple):
    """Record of a page that is held, or has several users. All other pages have one user.

    Its references in the pool are one for each user, one if it is held, and the retired ones.
    """

    num_users: int = 1  # slots that have it, and pending copies that read it
    num_holds: int = 0

    def changed(self, num_users: int = 0, num_holds: int = 0) -> _Shared | None:
        """A record with that many more users and holds; None if it is not held and has one user at
        most."""
        changed = _shared(self.num_users + num_users, self.num_holds + num_holds)
        return changed if changed.num_holds or changed.num_users > 1 else None


_shared = lru_cache(4096)(_Shared)  # one object for all pages of which the same is true
_PRIVATE = _shared()


class SharedPages:
    """Counts the users and the holds of pages, and accounts pages that are only held as prefixes.

    A sequence uses whole pages. Holds are of blocks: a page of several blocks is held as long as
    any of them is.

    Args:
        residency: the pages under the addresses of a cache.
        owner: owner of the pages that sequences use.

    Attributes:
        num_saved: users of shared pages, less one for each page; pages of several blocks count for
            each of these.
    """

    def __init__(self, residency: Residency | StripedResidency, owner: Owner) -> None:
        self.num_saved = 0
        self._residency = residency
        self._range = residency.range
        self._owner = owner
        self._prefix_owner = Owner(owner.model, Kind.PREFIX)
        self._shared: Records[_Shared] = Records()

    def __len__(self) -> int:
        return len(self._shared)

    def __contains__(self, page: Page) -> bool:
        return page in self._shared

    @property
    def num_held(self) -> int:
        """Number of pages that are held."""
        return sum(page.num_holds > 0 for _, page in self._shared.items())

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep a reference of each block's page, one also if it is held several times."""
        for count, pages in self._by_page(blocks):
            self._residency.share(pages)
            again: list[Sequence[Page]] = []
            for before, _, run in self._shared.change(pages, partial(_held, count)):
                if before is not None and before.num_holds:
                    again.append(run)
            self._residency.release(join(again))

    def drop(self, blocks: Sequence[int]) -> None:
        """The opposite of `hold`: release the reference of a page at its last drop.

        Raises:
            InvariantError: a page is not held.
        """
        for count, pages in self._by_page(blocks):
            done: list[Sequence[Page]] = []
            unused: list[Sequence[Page]] = []
            for before, _, run in self._shared.change(pages, partial(_dropped, count)):
                if before is not None and before.num_holds == count:
                    done.append(run)
                    if not before.num_users:
                        unused.append(run)
            # As pages of KV they need no zeroing for the next sequence.
            self._residency.transfer(join(unused), self._owner)
            self._residency.release(join(done))

    def begin_use(self, pages: Sequence[Page]) -> None:
        """Count one more user of each page, and add a reference for it."""
        self._residency.share(pages)
        retained: list[Sequence[Page]] = []
        for before, _, run in self._shared.change(
            pages, lambda _, shared: (shared or _PRIVATE).changed(num_users=1)
        ):
            if before is not None and not before.num_users:
                retained.append(run)
            else:
                self.num_saved += self._num_blocks(run)
        self._residency.transfer(join(retained), self._owner)

    def end_use(self, pages: Sequence[Page]) -> None:
        """Count one user less for each page; the caller releases its reference afterwards."""
        retained: list[Sequence[Page]] = []
        for before, _, run in self._shared.change(
            pages, lambda _, shared: None if shared is None else shared.changed(num_users=-1)
        ):
            if before is not None and before.num_users > 1:
                self.num_saved -= self._num_blocks(run)
            elif before is not None:
                retained.append(run)
        self._residency.transfer(join(retained), self._prefix_owner)

    def _num_blocks(self, pages: Sequence[Page]) -> int:
        if not self._range.has_large:
            return len(pages)
        return sum(self._range.sizes(pages))

    def _by_page(self, blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[Page]]]:
        """(number of its blocks among these, pages), for all pages of these blocks."""
        if not self._range.has_large:
            yield 1, cast(Sequence[Page], blocks)
            return
        # In the order of the blocks, which is that of the places or the reverse: pages that are
        # given up first are used again first.
        is_reverse = len(runs(blocks, -1)) < len(runs(blocks))
        counts: dict[Page, int] = {}
        for page, _, start, end in self._range.pieces(blocks[::-1] if is_reverse else blocks):
            counts[page] = counts.get(page, 0) + end - start
        entries = counts.items()
        for count, group in groupby(reversed(entries) if is_reverse else entries, _count_of):
            yield count, [page for page, _ in group]


def _count_of(entry: tuple[Page, int]) -> int:
    return entry[1]


def _held(count: int, _: Page, shared: _Shared | None) -> _Shared | None:
    return (shared or _PRIVATE).changed(num_holds=count)


def _dropped(count: int, page: Page, shared: _Shared | None) -> _Shared | None:
    if shared is None or shared.num_holds < count:
        raise InvariantError(f"page {page} is dropped, but not held")
    return shared.changed(num_holds=-count)
