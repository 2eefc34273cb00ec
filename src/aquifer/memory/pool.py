"""The one pool of physical pages: a byte budget, owners, sharing, and exact accounting.

Every page is in one of three places, and the equation below holds between any two calls:

    budget + excess = sum over owners of bytes in use + bytes retired + bytes idle
                      + bytes not created

"In use" pages have an owner and at least one reference. "Retired" ones have references that their
holders gave up, and are mapped still (`retire.py`). "Idle" pages were given back but are kept,
mapped nowhere, because creating one costs far more than handing one out again; beyond the watermark
they really go back to the system. The pool never chooses a victim: when it is short it calls its
reclaim hook, and if that does not help it answers None.

One owner has no pages: what the process holds of the device beside them (`account_overhead`). That
figure is measured and not granted, so it may exceed what the budget has left. The excess is then
positive, nothing is idle or left to be created, and the pool is short until enough comes back.

All methods but two are for the engine's loop. A second thread calls `stock`, which creates idle
pages ahead of need, so that the loop finds them made, and `retired.collect`, which gives back what
work in flight has stopped using.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.base import Driver, Handle
from aquifer.memory.retire import RetireQueue


class Kind(StrEnum):
    """What a page is used for."""

    WEIGHTS = "weights"
    KV = "kv"
    STATE = "state"
    PREFIX = "prefix"
    OVERHEAD = "overhead"  # no pages, but memory all the same


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A tenant of the pool: one kind of data of one model."""

    model: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.model}/{self.kind}"


PROCESS = Owner("process", Kind.OVERHEAD)
"""Whose the bytes are that the process holds of the device beside pages."""

# No model has an empty name, so these two are nobody's.
_NOBODY = Owner("", Kind.KV)
"""Who last wrote to a page of unknown contents: nobody asks for these, so all get it zeroed."""

_UNTOUCHED = Owner("", Kind.WEIGHTS)
"""Whose idle pages are fresh from the driver: zero, so anybody may have them as they are."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Where the budget is at one moment. All figures in bytes.

    `budget_bytes + excess_bytes == sum(in_use_bytes.values()) + retired_bytes + idle_bytes +
    uncreated_bytes`, and where there is an excess, nothing is idle or uncreated.
    """

    budget_bytes: int
    in_use_bytes: dict[Owner, int]  # that of `PROCESS` included
    retired_bytes: int  # of pages that nobody uses, mapped still where they were used last
    idle_bytes: int
    uncreated_bytes: int
    excess_bytes: int  # by which overhead and pages that cannot go are more than the budget

    @property
    def overhead_bytes(self) -> int:
        """What the process holds of the device beside pages, and pages without data."""
        return sum(n for owner, n in self.in_use_bytes.items() if owner.kind == Kind.OVERHEAD)

    @property
    def free_bytes(self) -> int:
        """What could be acquired without taking anything from anyone who uses it.

        Without an excess, this and what is in use are the budget.
        """
        return max(
            self.idle_bytes + self.uncreated_bytes + self.retired_bytes - self.excess_bytes, 0
        )


class _Page(NamedTuple):
    """An in-use page's record: a value, which all pages have in common that are alike."""

    page_bytes: int
    owner: Owner
    num_references: int = 1
    num_retired: int = 0  # of the references: given up by their holders, but not yet released

    @property
    def is_retired(self) -> bool:
        """Whether nobody uses it."""
        return self.num_retired == self.num_references

    def changed(self, num_references: int = 0, num_retired: int = 0) -> _Page:
        """The same with so many references more, and so many more of them retired."""
        return _Page(
            self.page_bytes,
            self.owner,
            self.num_references + num_references,
            self.num_retired + num_retired,
        )


@dataclass(slots=True)
class _Idle:
    """Idle pages of one size, by the owner that wrote to them last."""

    by_owner: dict[Owner, list[Handle]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.by_owner.values()))

    def count(self, owner: Owner) -> int:
        """Pages that `owner` used last."""
        return len(self.by_owner.get(owner, ()))

    def take(self, owner: Owner, count: int) -> list[Handle]:
        """Up to `count` pages that `owner` used last."""
        pages = self.by_owner.get(owner, [])
        cut = max(len(pages) - count, 0)
        taken = pages[cut:]
        del pages[cut:]
        return taken[::-1]

    def take_any(self, count: int) -> list[Handle]:
        """Up to `count` pages from whoever has most idle."""
        taken: list[Handle] = []
        while len(taken) < count and self.by_owner:
            owner = max(self.by_owner, key=lambda o: len(self.by_owner[o]))
            taken += self.take(owner, count - len(taken))
            if not self.by_owner[owner]:
                del self.by_owner[owner]
        return taken

    def put(self, owner: Owner, handles: Sequence[Handle]) -> None:
        """Keep pages; they come out again in ascending order, so that neighbours stay so."""
        self.by_owner.setdefault(owner, []).extend(sorted(handles, reverse=True))


class PagePool:
    """Acquires pages from a driver under one byte budget, and is the only one to do so.

    Args:
        driver: where pages come from.
        budget_bytes: what all pages together may take, idle ones included.
        page_bytes: the page size used where `acquire` is not told another one.
        keep_idle_bytes: the watermark: idle pages beyond it are given back to the system.

    Attributes:
        on_short: the reclaim hook. Called with the number of bytes missing; it should release
            pages (its victims are its own choice) and return whether it released any. It may be
            called again within one `acquire`, until it returns False.
        retired: pages that were given up, but are mapped until nothing in flight can touch them,
            or until somebody needs them elsewhere.
    """

    def __init__(
        self,
        driver: Driver,
        budget_bytes: int,
        page_bytes: int | None = None,
        keep_idle_bytes: int | None = None,
    ) -> None:
        self.driver = driver
        self.page_bytes = page_bytes or driver.default_page_bytes
        # Whole pages only, so that a full pool is exactly full.
        self.budget_bytes = budget_bytes // self.page_bytes * self.page_bytes
        self.keep_idle_bytes = (
            self.budget_bytes // 8 if keep_idle_bytes is None else keep_idle_bytes
        )
        self.on_short: Callable[[int], bool] | None = None
        self._pages: dict[Handle, _Page] = {}
        self._idle: dict[int, _Idle] = {}
        self._in_use_bytes: Counter[Owner] = Counter()
        self._retired_bytes = 0
        self._idle_bytes = 0
        self._overhead_bytes = 0
        # Held while pages are created. Whoever wants both takes this one first.
        self._creating = threading.RLock()
        # Held while the books above are read or written. `stock` lets go of it while the system
        # makes pages, so that the loop can go on meanwhile.
        self._books = threading.RLock()
        self.retired = RetireQueue(self, self._books)

    @property
    def created_bytes(self) -> int:
        """Bytes of all pages that exist: in use, retired or idle."""
        return self._in_use_bytes.total() + self._retired_bytes + self._idle_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody uses: idle pages, what is not created, and retired pages."""
        with self._books:
            in_use_bytes = self._in_use_bytes.total() + self._overhead_bytes
            return max(self.budget_bytes - in_use_bytes, 0)

    @property
    def ready_bytes(self) -> int:
        """The part of `free_bytes` that is had without unmapping anything: idle or not created."""
        with self._books:
            return max(self.free_bytes - self._retired_bytes, 0)

    def account_overhead(self, num_bytes: int) -> None:
        """Say what the process holds of the device beside pages: `Driver.overhead_bytes`.

        It is a part of the budget from now on, in place of what was said before. Room for it is
        made by giving back idle pages, then retired ones. If that is not enough, the pool is short
        until enough is released.
        """
        with self._creating, self._books:
            self._overhead_bytes = num_bytes
            while (excess_bytes := self._excess_bytes) > 0:
                if self._idle_bytes:
                    self.trim(max(self._idle_bytes - excess_bytes, 0))
                elif not self.retired.reclaim(excess_bytes):
                    return

    def acquire(
        self,
        owner: Owner,
        count: int,
        page_bytes: int | None = None,
        *,
        may_reclaim: bool = True,
    ) -> list[Handle] | None:
        """Take `count` pages for `owner`: all of them, or None and nothing has changed.

        A page whose last user was another owner is zeroed, and a new page is zero; a page that
        comes back to the same owner keeps its bytes.

        Args:
            owner: whose they will be.
            count: how many.
            page_bytes: their size; None for the pool's own.
            may_reclaim: whether to get retired pages back, which may wait for work in flight, and
                to call the reclaim hook. Otherwise it is None where idle pages and what is not
                created do not suffice.

        Raises:
            DriverError: the device refused; nothing is leaked, nothing is in use.
        """
        page_bytes = page_bytes or self.page_bytes
        with self._books:
            idle = self._idle.setdefault(page_bytes, _Idle())
            if idle.count(owner) + idle.count(_UNTOUCHED) >= count:
                ready = idle.take(owner, count)
                if len(ready) < count:
                    ready += idle.take(_UNTOUCHED, count - len(ready))
                self._idle_bytes -= count * page_bytes
                return self._hand_out(ready, owner, page_bytes)
        with self._creating, self._books:
            return self._acquire_slowly(owner, count, page_bytes, idle, may_reclaim)

    def stock(self, target_bytes: int, batch_pages: int = 16) -> bool:
        """Create a batch of idle pages, if fewer than `target_bytes` are untouched and idle.

        May be called from another thread than the other methods.

        Returns: whether there may be more to do.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        with self._creating:
            with self._books:
                idle = self._idle.setdefault(self.page_bytes, _Idle())
                missing_bytes = min(
                    target_bytes - idle.count(_UNTOUCHED) * self.page_bytes,
                    self.keep_idle_bytes - self._idle_bytes,
                    -self._excess_bytes,
                )
            count = min(missing_bytes // self.page_bytes, batch_pages)
            if count <= 0:
                return False
            handles = self.driver.create(self.page_bytes, count)
            with self._books:
                idle.put(_UNTOUCHED, handles)
                self._idle_bytes += count * self.page_bytes
        return True

    def share(self, handles: Sequence[Handle]) -> None:
        """Add a reference to each page; each must be released once more."""
        with self._books:
            self._change(handles, lambda page: page.changed(num_references=1))

    def num_references(self, handle: Handle) -> int:
        """How many places have the page, those that are retired included; 0 if it is idle."""
        page = self._pages.get(handle)
        return page.num_references if page else 0

    def is_in_use(self, handle: Handle) -> bool:
        """Whether the page has a reference that is not retired."""
        page = self._pages.get(handle)
        return page is not None and not page.is_retired

    def retire(self, handles: Sequence[Handle]) -> None:
        """Note that one reference of each page was given up, and will be released later.

        For `retired` alone. A page of which all references are retired is in use by nobody.
        """
        with self._books:
            self._change(handles, lambda page: page.changed(num_retired=1))

    def unretire(self, handles: Sequence[Handle]) -> None:
        """The opposite of `retire`: one retired reference of each page is an ordinary one again."""
        with self._books:
            self._change(handles, lambda page: page.changed(num_retired=-1), is_used=False)

    def transfer(self, handles: Sequence[Handle], owner: Owner) -> None:
        """Account pages to another owner of the same model from now on; their bytes stay.

        This is how a finished request's KV becomes a retained prefix.
        """

        def transferred(page: _Page) -> _Page:
            if page.owner.model != owner.model:
                raise InvariantError(f"a page of {page.owner} cannot go to {owner} unzeroed")
            return page._replace(owner=owner)

        with self._books:
            self._change(handles, transferred)

    def release(self, handles: Sequence[Handle]) -> None:
        """Drop one reference of each page. Pre-condition: the caller has unmapped them.

        Pages without references become idle; what exceeds the watermark goes back to the system.
        """
        with self._books:
            done: dict[tuple[int, Owner], list[Handle]] = {}
            group: list[Handle] = []
            last: _Page | None = None  # whose group that is
            before: _Page | None = None
            after: _Page | None = None
            for handle in handles:
                page = self._in_use(handle)
                if page.num_references == 1:
                    del self._pages[handle]
                    if page is not last:
                        last, group = page, done.setdefault((page.page_bytes, page.owner), [])
                    group.append(handle)
                    continue
                if after is None or (page is not before and page != before):
                    before, after = page, page.changed(num_references=-1)
                self._pages[handle] = after
                if after.is_retired:
                    self._rebook(before, after, 1)
                    self.retired.end_of_use(handle)
            for (page_bytes, owner), group in done.items():
                self._in_use_bytes[owner] -= len(group) * page_bytes
                self._idle_bytes += len(group) * page_bytes
                self._idle.setdefault(page_bytes, _Idle()).put(owner, group)
            excess_bytes = max(self._excess_bytes, 0)
            self.trim(max(min(self.keep_idle_bytes, self._idle_bytes - excess_bytes), 0))

    def trim(self, keep_bytes: int = 0) -> int:
        """Give idle pages back to the system until at most `keep_bytes` are left idle.

        Returns: the bytes given back.
        """
        with self._books:
            given_bytes = 0
            for page_bytes, idle in self._idle.items():
                excess = -(-(self._idle_bytes - keep_bytes) // page_bytes)
                if excess > 0:
                    handles = idle.take_any(excess)
                    self.driver.release(handles)
                    self._idle_bytes -= len(handles) * page_bytes
                    given_bytes += len(handles) * page_bytes
            return given_bytes

    def usage(self) -> PoolUsage:
        """The whole budget, accounted for."""
        with self._books:
            in_use_bytes = {**self._in_use_bytes, PROCESS: self._overhead_bytes}
            return PoolUsage(
                budget_bytes=self.budget_bytes,
                in_use_bytes={o: n for o, n in sorted(in_use_bytes.items()) if n},
                retired_bytes=self._retired_bytes,
                idle_bytes=self._idle_bytes,
                uncreated_bytes=max(-self._excess_bytes, 0),
                excess_bytes=max(self._excess_bytes, 0),
            )

    def check(self) -> None:
        """Verify the accounting against the page records.

        Raises:
            InvariantError: an equation of docs/memory.md does not hold.
        """
        with self._books:
            in_use: Counter[Owner] = Counter()
            retired_bytes = 0
            for handle, page in self._pages.items():
                if page.is_retired:
                    retired_bytes += page.page_bytes
                else:
                    in_use[page.owner] += page.page_bytes
                if not 0 <= page.num_retired <= page.num_references > 0:
                    raise InvariantError(f"M2: page {handle} is in use without a reference")
            idle_handles = [
                handle
                for idle in self._idle.values()
                for handles in idle.by_owner.values()
                for handle in handles
            ]
            idle_bytes = sum(page_bytes * len(idle) for page_bytes, idle in self._idle.items())
            if +in_use != +self._in_use_bytes:
                raise InvariantError(
                    f"M1: owners hold {in_use}, the ledger says {self._in_use_bytes}"
                )
            if (idle_bytes, retired_bytes) != (self._idle_bytes, self._retired_bytes):
                raise InvariantError(
                    f"M1: {idle_bytes} bytes idle and {retired_bytes} retired, the ledger says "
                    f"{self._idle_bytes} and {self._retired_bytes}"
                )
            if (
                len(set(idle_handles)) != len(idle_handles)
                or set(idle_handles) & self._pages.keys()
            ):
                raise InvariantError("M3: a page is in two places")
            if self._excess_bytes > 0 and self._idle_bytes:
                raise InvariantError(
                    f"M1: {self._idle_bytes} bytes idle at an excess of {self._excess_bytes}"
                )
            if self.created_bytes > self.budget_bytes:
                raise InvariantError(
                    f"M1: {self.created_bytes} bytes exist in a budget of {self.budget_bytes}"
                )

    def close(self) -> None:
        """Give the idle pages back. Pre-condition: none is in use."""
        self.retired.settle()
        if self._pages:
            raise InvariantError(f"{len(self._pages)} pages are still in use: {self.usage()}")
        self.trim()

    @property
    def _excess_bytes(self) -> int:
        """Pages and overhead beyond the budget; negative as long as there is room."""
        return self.created_bytes + self._overhead_bytes - self.budget_bytes

    def _in_use(self, handle: Handle) -> _Page:
        page = self._pages.get(handle)
        if page is None or page.num_retired == page.num_references:
            raise InvariantError(f"page {handle} is named by someone who does not hold it")
        return page

    def _change(
        self,
        handles: Sequence[Handle],
        change: Callable[[_Page], _Page],
        *,
        is_used: bool = True,
    ) -> None:
        """Put other records in place of these pages' own, and keep the books.

        Thousands of pages come at once, and most of them are alike. A record is changed once for
        all pages in a row that are, and the new one is theirs in common. A page may be named twice.

        Args:
            handles: which pages.
            change: gives the new record for the old one.
            is_used: whether it is an error if a page is not in use.
        """
        before: _Page | None = None
        after: _Page | None = None
        count = 0
        try:
            for handle in handles:
                page = self._pages.get(handle)
                if page is None or (page is not before and page != before):
                    self._rebook(before, after, count)
                    count = 0
                    before = self._in_use(handle) if is_used else self._pages[handle]
                    after = change(before)
                assert after is not None
                self._pages[handle] = after
                count += 1
        finally:
            self._rebook(before, after, count)

    def _rebook(self, before: _Page | None, after: _Page | None, count: int) -> None:
        """Enter in the books that so many pages have another record."""
        if not count:
            return
        for page, sign in ((before, -1), (after, 1)):
            assert page is not None
            if page.is_retired:
                self._retired_bytes += sign * count * page.page_bytes
            else:
                self._in_use_bytes[page.owner] += sign * count * page.page_bytes

    def _hand_out(self, handles: list[Handle], owner: Owner, page_bytes: int) -> list[Handle]:
        """Enter pages as in use."""
        self._pages.update(dict.fromkeys(handles, _Page(page_bytes, owner)))
        self._in_use_bytes[owner] += len(handles) * page_bytes
        return handles

    def _acquire_slowly(
        self, owner: Owner, count: int, page_bytes: int, idle: _Idle, may_reclaim: bool
    ) -> list[Handle] | None:
        """Acquire where ready pages do not suffice: create, zero what was another's, reclaim."""
        while (missing := count * page_bytes - self._within_reach_bytes(page_bytes)) > 0:
            if not may_reclaim:
                return None
            if self.retired.reclaim(missing):
                continue
            if self.on_short is None or not self.on_short(missing):
                return None
        own = idle.take(owner, count)
        fresh = idle.take(_UNTOUCHED, count - len(own))
        wanted = count - len(own) - len(fresh)
        room = max(-self._excess_bytes, 0) // page_bytes
        foreign: list[Handle] = []
        new: list[Handle] = []
        try:
            # Creating costs about as much as zeroing, but leaves other owners' bytes where
            # they may still be of use to them; so foreign pages come last.
            foreign = idle.take_any(wanted - min(room, wanted))
            if foreign:
                self.driver.zero(foreign)
            num_new = wanted - len(foreign)
            self._give_back_other_sizes(page_bytes, num_new)
            new = self.driver.create(page_bytes, num_new) if num_new else []
        except DriverError:
            idle.put(owner, own)
            idle.put(_UNTOUCHED, fresh)
            idle.put(_NOBODY, foreign)  # zeroed or not: they will be again
            raise
        self._idle_bytes -= (count - len(new)) * page_bytes
        return self._hand_out(own + fresh + foreign + new, owner, page_bytes)

    def _within_reach_bytes(self, page_bytes: int) -> int:
        """Bytes obtainable as pages of this size: idle ones, plus what can be created."""
        same_size = len(self._idle.get(page_bytes, ())) * page_bytes
        other_sizes = self._idle_bytes - same_size
        creatable = max(other_sizes - self._excess_bytes, 0)
        return same_size + creatable // page_bytes * page_bytes

    def _give_back_other_sizes(self, page_bytes: int, num_new: int) -> None:
        """Make room in the budget for `num_new` pages by destroying idle ones of other sizes."""
        short_bytes = self._excess_bytes + num_new * page_bytes
        for other_bytes, idle in self._idle.items():
            if short_bytes <= 0:
                return
            if other_bytes != page_bytes:
                handles = idle.take_any(-(-short_bytes // other_bytes))
                self.driver.release(handles)
                self._idle_bytes -= len(handles) * other_bytes
                short_bytes -= len(handles) * other_bytes
