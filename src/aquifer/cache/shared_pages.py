"""Pages that several sequences have, or that are held: their users and holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aquifer.errors import InvariantError
from aquifer.memory.pages import Page
from aquifer.memory.pool import Kind, Owner
from aquifer.memory.records import Records
from aquifer.memory.residency import Residency
from aquifer.memory.runs import join


class _Shared(NamedTuple):
    """Record of a page that is held, or has several users. All other pages have one user.

    Its references in the pool are one for each user, one if it is held, and the retired ones.
    """

    num_users: int = 1  # slots that have it, and pending copies that read it
    num_holds: int = 0

    def changed(self, num_users: int = 0, num_holds: int = 0) -> _Shared | None:
        """A record with that many more users and holds; None if it is not held and has one user at
        most."""
        changed = _Shared(self.num_users + num_users, self.num_holds + num_holds)
        return changed if changed.num_holds or changed.num_users > 1 else None


_PRIVATE = _Shared()


class SharedPages:
    """Counts the users and the holds of pages, and accounts pages that are only held as prefixes.

    Args:
        residency: the pages under the addresses of a cache.
        owner: owner of the pages that sequences use.

    Attributes:
        num_saved: users of shared pages, less one for each page.
    """

    def __init__(self, residency: Residency, owner: Owner) -> None:
        self.num_saved = 0
        self._residency = residency
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

    def hold(self, pages: Sequence[Page]) -> None:
        """Keep a reference of each page, one also if it is held several times."""
        self._residency.share(pages)
        again: list[Sequence[Page]] = []
        for before, _, run in self._shared.change(
            pages, lambda _, shared: (shared or _PRIVATE).changed(num_holds=1)
        ):
            if before is not None and before.num_holds:
                again.append(run)
        self._residency.release(join(again))

    def drop(self, pages: Sequence[Page]) -> None:
        """The opposite of `hold`: release the reference of a page at its last drop.

        Raises:
            InvariantError: a page is not held.
        """

        def dropped(page: Page, shared: _Shared | None) -> _Shared | None:
            if shared is None or not shared.num_holds:
                raise InvariantError(f"page {page} is dropped, but not held")
            return shared.changed(num_holds=-1)

        done: list[Sequence[Page]] = []
        unused: list[Sequence[Page]] = []
        for before, _, run in self._shared.change(pages, dropped):
            if before is not None and before.num_holds == 1:
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
                self.num_saved += len(run)
        self._residency.transfer(join(retained), self._owner)

    def end_use(self, pages: Sequence[Page]) -> None:
        """Count one user less for each page; the caller releases its reference afterwards."""
        retained: list[Sequence[Page]] = []
        for before, _, run in self._shared.change(
            pages, lambda _, shared: None if shared is None else shared.changed(num_users=-1)
        ):
            if before is not None and before.num_users > 1:
                self.num_saved -= len(run)
            elif before is not None:
                retained.append(run)
        self._residency.transfer(join(retained), self._prefix_owner)
