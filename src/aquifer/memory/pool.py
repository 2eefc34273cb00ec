"""The one pool of physical pages: acquires them from a driver under one byte budget.

The pool keeps its books in a `Ledger` (`ledger.py`), whose equations hold between any two calls.
It never chooses a victim: when it is short it takes retired pages back (`retire.py`), then calls
its reclaim hook, and if that does not help it answers None.

All methods but four are for the engine's loop. A second thread calls `stock`, which creates idle
pages ahead of need, so that the loop finds them made, and `retired.collect`, which gives back what
work in flight has stopped using. Any thread may call `share` for pages that it knows to be in use,
while it holds `lock`, and `release` for what it has shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.base import Driver
from aquifer.memory.gate import Gate
from aquifer.memory.guard import GuardedPages
from aquifer.memory.ledger import Ledger
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.owners import GUARD, PROCESS, UNKNOWN, UNTOUCHED, Kind, Owner, PoolUsage
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.retire import RetireQueue

__all__ = ["PROCESS", "Kind", "Owner", "Page", "PagePool", "PoolSize", "PoolUsage"]


_BATCH_PAGES = 4
"""How many pages `stock` creates in one go: up to 3 ms beside other calls of the driver, which is
how long a caller may have to wait that needs a page of a size that none is ready of."""


class PoolSize(NamedTuple):
    """The size of a pool, for another one like it in another process."""

    budget_bytes: int  # without the guard page
    page_bytes: int
    has_guards: bool


class PagePool:
    """Acquires pages from a driver under one byte budget, and is the only one to do so.

    Args:
        driver: where pages come from.
        budget_bytes: bound of all pages together, idle ones included.
        page_bytes: the page size used where `acquire` is not told another one.
        keep_idle_bytes: the watermark: idle pages beyond it are given back to the system.
        guards: whether freed pages are poisoned, and there is a guard page (`guard.py`), which
            comes on top of the budget.

    Attributes:
        pages: the pages that exist, by number.
        on_short: the reclaim hook. Called with the number of bytes missing, in the budget or on the
            device, and the owner that they are for; it should release pages of its choice and
            return whether it released any. It may be called again within one `acquire`, until it
            returns False.
        retired: pages that were given up, but are mapped until nothing in flight can touch them,
            or until they are needed elsewhere.
        mapper: maps pages ahead of need; None where that is done in the step before.
        gate: entered by the loop while it prepares a step; threads of the pool's wait for it.
        guards: `pages`, if these are guarded; else None.

    Raises:
        DriverError: the device refused the guard page.
    """

    def __init__(
        self,
        driver: Driver,
        budget_bytes: int,
        page_bytes: int | None = None,
        keep_idle_bytes: int | None = None,
        *,
        guards: bool = False,
    ) -> None:
        self.driver = driver
        self.page_bytes = page_bytes or driver.default_page_bytes
        self.guards = GuardedPages(driver, self.page_bytes) if guards else None
        self.pages = PageTable(driver, self.page_bytes) if self.guards is None else self.guards
        # Whole pages only, so that a full pool is exactly full.
        self.budget_bytes = budget_bytes // self.page_bytes * self.page_bytes
        self.keep_idle_bytes = (
            self.budget_bytes // 8 if keep_idle_bytes is None else keep_idle_bytes
        )
        self.on_short: Callable[[int, Owner], bool] | None = None
        self.budget_bytes += self.page_bytes * guards
        self._ledger = Ledger(self.budget_bytes, self.keep_idle_bytes)
        if self.guards is not None:
            self._ledger.hand_out([self.guards.guard], GUARD, self.page_bytes)
        # Held while pages are created; taken before the ledger's lock where both are needed.
        # `stock` creates pages without the ledger's lock, so that the loop can go on.
        self._creating = threading.RLock()
        self.retired = RetireQueue(self._ledger, self.pages)
        self.mapper: BackgroundMapper | None = None
        self.gate = Gate()

    @property
    def size(self) -> PoolSize:
        """Its size."""
        has_guards = self.guards is not None
        guard_bytes = self.page_bytes * has_guards
        return PoolSize(self.budget_bytes - guard_bytes, self.page_bytes, has_guards)

    @property
    def lock(self) -> threading.RLock:
        """Guards the books; a caller holds it around several calls that have to be one step."""
        return self._ledger.lock

    @property
    def created_bytes(self) -> int:
        """Bytes of all pages that exist: in use, retired or idle."""
        return self._ledger.created_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not in use: idle pages, pages not created, and retired pages."""
        return self._ledger.free_bytes

    @property
    def ready_bytes(self) -> int:
        """The part of `free_bytes` that needs no unmapping: idle or not created."""
        return self._ledger.ready_bytes

    def account_overhead(self, num_bytes: int) -> None:
        """Account device memory that the process holds outside pages: `Driver.overhead_bytes`.

        It is a part of the budget and replaces the last figure. Room for it is made by giving back
        idle pages, then retired ones. If that is not enough, the pool is short until enough is
        released.
        """
        ledger = self._ledger
        with self._creating, ledger.lock:
            ledger.set_overhead(num_bytes)
            while (excess_bytes := ledger.excess_bytes) > 0:
                if ledger.idle_bytes:
                    self.trim(max(ledger.idle_bytes - excess_bytes, 0))
                elif not self.retired.reclaim(excess_bytes):
                    return

    def make_room(self, owner: Owner, num_bytes: int) -> None:
        """Have the reclaim hook release what is missing of `num_bytes` at once, as far as it can.

        To be called before many calls of `acquire`, each of which would ask it for a little.

        Args:
            owner: the owner that they are for.
            num_bytes: what these calls will acquire together.
        """
        if not self.retired.defers:  # pages beyond the watermark would be destroyed at once
            return
        while (missing_bytes := num_bytes - self.free_bytes) > 0:
            if self.on_short is None or not self.on_short(missing_bytes, owner):
                return

    def acquire(
        self,
        owner: Owner,
        count: int,
        page_bytes: int | None = None,
        *,
        may_reclaim: bool = True,
        is_overwritten: bool = False,
    ) -> list[Page] | None:
        """Take `count` pages for `owner`: all of them, or None and nothing has changed.

        A page whose last user was another owner is zeroed, and a new page is zero; a page that
        comes back to the same owner keeps its bytes.

        Args:
            owner: the pages' owner from now on.
            count: number of pages.
            page_bytes: their size; None for the pool's own.
            may_reclaim: whether to unmap retired pages, which may wait for work in flight, and to
                call the reclaim hook. If not, the answer is None where idle pages and pages not
                created yet do not suffice.
            is_overwritten: whether all bytes are written before any is read: then none is zeroed.

        Raises:
            DriverError: the device refused, and no other page could take the place of what it
                refused; nothing is leaked, nothing is in use.
        """
        page_bytes = page_bytes or self.page_bytes
        pages = self._ledger.take_ready(owner, count, page_bytes, is_overwritten=is_overwritten)
        if pages is not None:
            if self.guards is not None:
                self.guards.take(pages)
            return pages
        with self._creating, self._ledger.lock:
            return self._acquire_slowly(owner, count, page_bytes, may_reclaim, is_overwritten)

    def take_ready(self, owner: Owner, count: int) -> list[Page] | None:
        """Take `count` pages of the pool's own size, if that needs no call of the driver."""
        pages = self._ledger.take_ready(owner, count, self.page_bytes)
        if pages is not None and self.guards is not None:
            self.guards.take(pages)
        return pages

    def stock(self, target_bytes: int, batch_pages: int = _BATCH_PAGES) -> bool:
        """Create a batch of idle pages, if fewer than `target_bytes` are untouched and idle.

        May be called from another thread than the other methods.

        Returns: whether there may be more to do.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        page_bytes = self.page_bytes
        with self._creating:
            count = min(self.num_to_stock(target_bytes), batch_pages)
            if count == 0:
                return False
            pages = self.pages.create(page_bytes, count)
            self._ledger.put_idle(pages, UNTOUCHED, page_bytes)
        return True

    def num_to_stock(self, target_bytes: int) -> int:
        """Number of pages that `stock` has to create before `target_bytes` are untouched and idle.

        The budget and the watermark come first.
        """
        ledger, page_bytes = self._ledger, self.page_bytes
        with ledger.lock:
            missing_bytes = min(
                target_bytes - ledger.count_idle(page_bytes, UNTOUCHED) * page_bytes,
                self.keep_idle_bytes - ledger.idle_bytes,
                -ledger.excess_bytes,
            )
        return max(missing_bytes // page_bytes, 0)

    def share(self, pages: Sequence[Page]) -> None:
        """Add a reference to each page; each must be released once more."""
        self._ledger.share(pages)

    def num_references(self, page: Page) -> int:
        """References to a page, those that are retired included; 0 if it is idle."""
        return self._ledger.num_references(page)

    def transfer(self, pages: Sequence[Page], owner: Owner, *, is_shared: bool = False) -> None:
        """Account pages to another owner from now on; their bytes stay.

        This is how a finished request's KV becomes a retained prefix.

        Args:
            pages: the pages.
            owner: an owner of the same model.
            is_shared: whether the owner may be of another model, which has the same bytes.
        """
        self._ledger.transfer(pages, owner, is_shared=is_shared)

    def release(self, pages: Sequence[Page]) -> None:
        """Drop one reference of each page. Pre-condition: the caller has unmapped them.

        Pages without references become idle; what exceeds the watermark goes back to the system.
        """
        self.retired.release(pages)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give idle pages back to the system until at most `keep_bytes` are left idle.

        Returns: the bytes given back.
        """
        with self._ledger.lock:
            before_bytes = self._ledger.idle_bytes
            self.pages.release(self._ledger.take_surplus(keep_bytes))
            return before_bytes - self._ledger.idle_bytes

    def usage(self) -> PoolUsage:
        """The whole budget, accounted for."""
        return self._ledger.usage()

    def owned_bytes(self, owner: Owner) -> int:
        """Bytes of the pages in use that are an owner's."""
        return self._ledger.owned_bytes(owner)

    def check(self) -> None:
        """Verify the accounting against the page records, and the guard page if there is one.

        Raises:
            InvariantError: an equation of docs/memory.md does not hold, or something wrote to the
                guard page.
        """
        self._ledger.check()
        if self.guards is not None:
            self.guards.check()

    def close(self) -> None:
        """Give the idle pages back. Pre-condition: none is in use."""
        self.retired.settle()
        if self.guards is not None:
            self.guards.check()
            self.release([self.guards.guard])
        if num_left := self._ledger.num_records:
            raise InvariantError(f"{num_left} pages are still in use: {self.usage()}")
        self.trim()

    def _acquire_slowly(
        self,
        owner: Owner,
        count: int,
        page_bytes: int,
        may_reclaim: bool,
        is_overwritten: bool,
    ) -> list[Page] | None:
        """Acquire where ready pages do not suffice: create, zero other owners' pages, reclaim."""
        ledger = self._ledger
        is_refused = False
        while True:
            missing_bytes = count * page_bytes - ledger.within_reach_bytes(page_bytes)
            if missing_bytes > 0:
                if may_reclaim and self._reclaim(missing_bytes, owner):
                    continue
                return None
            # A device that has refused has less than the budget says: there is no room but what
            # idle pages take.
            room_bytes = 0 if is_refused else max(-ledger.excess_bytes, 0)
            # Pages that need no zeroing, which are all where they are overwritten.
            own = ledger.take_idle(page_bytes, count, None if is_overwritten else owner)
            fresh = ledger.take_idle(page_bytes, count - len(own), UNTOUCHED)
            wanted = count - len(own) - len(fresh)
            # Creating costs about as much as zeroing, but leaves other owners' bytes where they
            # may still be of use to them; so foreign pages come last.
            num_foreign = max(wanted - room_bytes // page_bytes, 0)
            foreign = ledger.take_idle(page_bytes, num_foreign, None)
            new_bytes = (wanted - len(foreign)) * page_bytes
            if self.guards is not None:
                self.guards.take([*own, *foreign])
            try:
                if foreign:
                    self.pages.fill(foreign, 0)
                # Room is made by destroying idle pages of other sizes.
                self.pages.release(ledger.take_other_sizes(page_bytes, new_bytes - room_bytes))
                new = self.pages.create(page_bytes, new_bytes // page_bytes) if new_bytes else []
            except DriverError:
                # Pages that were left idle, because there seemed to be room to create others.
                has_idle = not is_refused and new_bytes > 0 and ledger.idle_bytes > 0
                is_refused = True
                ledger.put_idle(own, UNKNOWN if is_overwritten else owner, page_bytes)
                ledger.put_idle(fresh, UNTOUCHED, page_bytes)
                ledger.put_idle(foreign, UNKNOWN, page_bytes)  # zeroed or not: they will be again
                if self.guards is not None:
                    self.guards.poison([*own, *foreign])
                if has_idle or (may_reclaim and self._reclaim(max(new_bytes, page_bytes), owner)):
                    continue
                raise
            pages = own + fresh + foreign + new
            ledger.hand_out(pages, owner, page_bytes)
            return pages

    def _reclaim(self, num_bytes: int, owner: Owner) -> bool:
        """Make some bytes idle or not created: first retired ones, then those the hook releases."""
        return self.retired.reclaim(num_bytes) or (
            self.on_short is not None and self.on_short(num_bytes, owner)
        )
