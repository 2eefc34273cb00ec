"""Pages that several sequences have, or that are held: their users and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aquifer.errors import InvariantError
from aquifer.memory.pages import Page
from aquifer.memory.pool import Kind, Owner
from aquifer.memory.residency import Residency


@dataclass(slots=True)
class _Shared:
    """Record of a page that is held, or has several users. All other pages have one user.

    Its references in the pool are one for each user, one if it is held, and the retired ones.
    """

    num_users: int = 1  # slots that have it, and pending copies that read it
    num_holds: int = 0


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
        self._shared: dict[Page, _Shared] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def __contains__(self, page: Page) -> bool:
        return page in self._shared

    @property
    def num_held(self) -> int:
        """Number of pages that are held."""
        return sum(page.num_holds > 0 for page in self._shared.values())

    def hold(self, pages: Sequence[Page]) -> None:
        """Keep a reference of each page, one also if it is held several times."""
        self._residency.share(pages)
        again = []
        for page in pages:
            shared = self._shared.setdefault(page, _Shared())
            if shared.num_holds:
                again.append(page)
            shared.num_holds += 1
        self._residency.release(again)

    def drop(self, pages: Sequence[Page]) -> None:
        """The opposite of `hold`: release the reference of a page at its last drop.

        Raises:
            InvariantError: a page is not held.
        """
        done, unused = [], []
        for page in pages:
            shared = self._shared.get(page)
            if shared is None or not shared.num_holds:
                raise InvariantError(f"page {page} is dropped, but not held")
            shared.num_holds -= 1
            if not shared.num_holds:
                done.append(page)
                if not shared.num_users:
                    unused.append(page)
                self._forget_private(page, shared)
        # As pages of KV they need no zeroing for the next sequence.
        self._residency.transfer(unused, self._owner)
        self._residency.release(done)

    def begin_use(self, pages: Sequence[Page]) -> None:
        """Count one more user of each page, and add a reference for it."""
        self._residency.share(pages)
        retained = []
        for page in pages:
            shared = self._shared.get(page)
            if shared is None:
                shared = self._shared[page] = _Shared()
            if shared.num_users:
                self.num_saved += 1
            else:
                retained.append(page)
            shared.num_users += 1
        self._residency.transfer(retained, self._owner)

    def end_use(self, pages: Sequence[Page]) -> None:
        """Count one user less for each page; the caller releases its reference afterwards."""
        retained = []
        for page in pages:
            shared = self._shared.get(page)
            if shared is None:
                continue
            shared.num_users -= 1
            if shared.num_users:
                self.num_saved -= 1
            elif shared.num_holds:
                retained.append(page)
            self._forget_private(page, shared)
        self._residency.transfer(retained, self._prefix_owner)

    def _forget_private(self, page: Page, shared: _Shared) -> None:
        """Delete the record of a page that is not held and has at most one user."""
        if not shared.num_holds and shared.num_users < 2:
            del self._shared[page]
