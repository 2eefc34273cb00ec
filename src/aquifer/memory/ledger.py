"""The books of a page pool: owner and state of each page, and the equations between them.

Every page is in one of three states, and this equation holds between any two calls:

    budget + excess = sum over owners of bytes in use + bytes retired + bytes idle
                      + bytes not created

A page "in use" has an owner and at least one reference that is not retired. All references of a
"retired" page were given up by their holders, but it is still mapped (`retire.py`). An "idle" page
has no references and is mapped nowhere; it is kept because creating a page costs far more than
handing one out again.

One owner has no pages: the process, with the device memory that it holds outside of pages. That
figure is measured and not granted, so it may exceed what the budget has left. The excess is then
positive, nothing is idle or left to be created, and the pool is short until enough is released.

The ledger calls no driver. Its users do what it decides, while they hold its lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from aquifer.errors import InvariantError
from aquifer.memory.idle import IdlePages
from aquifer.memory.owners import PROCESS, UNTOUCHED, Owner, PoolUsage
from aquifer.memory.pages import Page
from aquifer.memory.records import Records
from aquifer.memory.runs import as_run, join


class _Record(NamedTuple):
    """State of a page that is not idle: a value, which all pages in the same state share.

    There is one object for each (`_record`): records of many pages are compared faster, and the
    garbage collection has less to look at.
    """

    page_bytes: int
    owner: Owner
    num_references: int = 1
    num_retired: int = 0  # references that were given up by their holders, but not yet released

    @property
    def is_retired(self) -> bool:
        """Whether all references are retired."""
        return self.num_retired == self.num_references

    def changed(self, num_references: int = 0, num_retired: int = 0) -> _Record:
        """A record with that many more references, and that many more of them retired."""
        return _record(
            self.page_bytes,
            self.owner,
            self.num_references + num_references,
            self.num_retired + num_retired,
        )

    def owned_by(self, owner: Owner) -> _Record:
        """A record with this owner."""
        return _record(self.page_bytes, owner, self.num_references, self.num_retired)


_record = lru_cache(4096)(_Record)


class Ledger:
    """Records of all pages of one pool, and the bytes of each state and owner.

    Methods that change the books take `lock`, which is reentrant; a caller holds it around several
    calls that have to be one step. Of those that read, `idle_bytes`, `created_bytes`,
    `excess_bytes`, `num_references`, `single_runs` and `num_records` do not take it: a caller holds
    it where the answer has to be of the same moment as another one.

    Args:
        budget_bytes: bound of all pages and the overhead together.
        keep_idle_bytes: the watermark: idle pages beyond it are surplus.

    Attributes:
        lock: guards the books.
    """

    def __init__(self, budget_bytes: int, keep_idle_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.keep_idle_bytes = keep_idle_bytes
        self.lock = threading.RLock()
        self._records: Records[_Record] = Records()
        self._idle: dict[int, IdlePages] = {}  # by page size
        self._in_use_bytes: Counter[Owner] = Counter()
        self._retired_bytes = 0
        self._idle_bytes = 0
        self._overhead_bytes = 0

    # --- figures -----------------------------------------------------------------------------

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle pages."""
        return self._idle_bytes

    @property
    def created_bytes(self) -> int:
        """Bytes of all pages that exist: in use, retired or idle."""
        return self._in_use_bytes.total() + self._retired_bytes + self._idle_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes of pages and overhead beyond the budget; negative as long as there is room."""
        return self.created_bytes + self._overhead_bytes - self.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not in use: idle, not created, or retired."""
        with self.lock:
            in_use_bytes = self._in_use_bytes.total() + self._overhead_bytes
            return max(self.budget_bytes - in_use_bytes, 0)

    @property
    def ready_bytes(self) -> int:
        """The part of `free_bytes` that needs no unmapping: idle or not created."""
        with self.lock:
            return max(self.free_bytes - self._retired_bytes, 0)

    def within_reach_bytes(self, page_bytes: int) -> int:
        """Bytes obtainable as pages of this size: idle ones, plus those that can be created."""
        with self.lock:
            same_size = len(self._idle_of(page_bytes)) * page_bytes
            creatable = max(self._idle_bytes - same_size - self.excess_bytes, 0)
            return same_size + creatable // page_bytes * page_bytes

    def usage(self) -> PoolUsage:
        """The whole budget, accounted for."""
        with self.lock:
            in_use_bytes = {**self._in_use_bytes, PROCESS: self._overhead_bytes}
            return PoolUsage(
                budget_bytes=self.budget_bytes,
                in_use_bytes={o: n for o, n in in_use_bytes.items() if n},
                retired_bytes=self._retired_bytes,
                idle_bytes=self._idle_bytes,
                uncreated_bytes=max(-self.excess_bytes, 0),
                excess_bytes=max(self.excess_bytes, 0),
            )

    def owned_bytes(self, owner: Owner) -> int:
        """Bytes of the pages in use that are an owner's."""
        with self.lock:
            return self._in_use_bytes[owner]

    def num_references(self, page: Page) -> int:
        """References to a page, retired ones included; 0 if it is idle or does not exist."""
        record = self._records.get(page)
        return record.num_references if record else 0

    def single_runs(self, pages: Sequence[Page]) -> Iterator[tuple[bool, Sequence[Page]]]:
        """Whether pages, in use or retired, have one reference alone, retired ones included.

        Yields: (whether it is so, pages) of stretches that cover all pages, in order.
        """
        for record, run in self._records.stretches(pages):
            assert record is not None
            yield record.num_references == 1, run

    # --- idle pages --------------------------------------------------------------------------

    def set_overhead(self, num_bytes: int) -> None:
        """Account device memory of the process outside of pages; replaces the last figure."""
        with self.lock:
            self._overhead_bytes = num_bytes

    def count_idle(self, page_bytes: int, owner: Owner) -> int:
        """Idle pages of a size that `owner` used last."""
        with self.lock:
            return self._idle_of(page_bytes).count(owner)

    def take_ready(
        self, owner: Owner, count: int, page_bytes: int, *, is_overwritten: bool = False
    ) -> list[Page] | None:
        """Hand out idle pages that need no zeroing, if there are as many; else None.

        Args:
            owner: their owner from now on.
            count: number of pages.
            page_bytes: their size.
            is_overwritten: whether none needs it.
        """
        with self.lock:
            idle = self._idle_of(page_bytes)
            if is_overwritten:
                if len(idle) < count:
                    return None
                pages = idle.take_any(count)
            else:
                if idle.count(owner) + idle.count(UNTOUCHED) < count:
                    return None
                pages = idle.take(owner, count)
                if len(pages) < count:
                    pages += idle.take(UNTOUCHED, count - len(pages))
            self._idle_bytes -= count * page_bytes
            self.hand_out(pages, owner, page_bytes)
            return pages

    def take_idle(self, page_bytes: int, count: int, owner: Owner | None) -> list[Page]:
        """Take up to `count` idle pages that `owner` used last, or any if that is None.

        They have no record until `hand_out` or `put_idle`.
        """
        with self.lock:
            idle = self._idle_of(page_bytes)
            pages = idle.take_any(count) if owner is None else idle.take(owner, count)
            self._idle_bytes -= len(pages) * page_bytes
            return pages

    def put_idle(self, pages: Sequence[Page], owner: Owner, page_bytes: int) -> None:
        """Keep pages without a record as idle ones that `owner` used last."""
        with self.lock:
            self._idle_of(page_bytes).put(owner, pages)
            self._idle_bytes += len(pages) * page_bytes

    def take_surplus(self, keep_bytes: int | None = None) -> list[Page]:
        """Take idle pages until at most `keep_bytes` are left idle; the caller releases them.

        Args:
            keep_bytes: None for the watermark, less the excess if there is one.
        """
        with self.lock:
            if keep_bytes is None:
                excess_bytes = max(self.excess_bytes, 0)
                keep_bytes = max(min(self.keep_idle_bytes, self._idle_bytes - excess_bytes), 0)
            surplus: list[Page] = []
            for page_bytes in self._idle:
                count = -(-(self._idle_bytes - keep_bytes) // page_bytes)
                if count > 0:
                    surplus += self.take_idle(page_bytes, count, None)
            return surplus

    def take_other_sizes(self, page_bytes: int, num_bytes: int) -> list[Page]:
        """Take idle pages of other sizes until `num_bytes` are taken, or there are no more."""
        with self.lock:
            taken: list[Page] = []
            for other_bytes in self._idle:
                if other_bytes != page_bytes and num_bytes > 0:
                    pages = self.take_idle(other_bytes, -(-num_bytes // other_bytes), None)
                    num_bytes -= len(pages) * other_bytes
                    taken += pages
            return taken

    # --- references --------------------------------------------------------------------------

    def hand_out(self, pages: Sequence[Page], owner: Owner, page_bytes: int) -> None:
        """Enter pages without a record as in use, with one reference each."""
        with self.lock:
            numbers = as_run(pages) if len(pages) > 1 else pages
            self._records.fill(numbers, _record(page_bytes, owner))
            self._in_use_bytes[owner] += len(pages) * page_bytes

    def share(self, pages: Sequence[Page]) -> None:
        """Add a reference to each page."""
        self._change(pages, lambda record: record.changed(num_references=1))

    def transfer(self, pages: Sequence[Page], owner: Owner, *, is_shared: bool = False) -> None:
        """Account pages to another owner: of the same model, or of one that has the same bytes."""

        def transferred(record: _Record) -> _Record:
            if record.owner.model != owner.model and not is_shared:
                raise InvariantError(f"a page of {record.owner} cannot go to {owner} unzeroed")
            return record.owned_by(owner)

        self._change(pages, transferred)

    def retire(self, pages: Sequence[Page]) -> list[tuple[bool, Sequence[Page]]]:
        """Note that one reference of each page was given up, and will be released later.

        Returns: (whether they are still in use, pages) of stretches that cover all pages, in order.
            What is said of a page that is named twice is true before the next of these.
        """
        changed = self._change(pages, lambda record: record.changed(num_retired=1))
        return [(not record.is_retired, run) for record, run in changed]

    def unretire(self, pages: Sequence[Page]) -> None:
        """The opposite of `retire`: one retired reference of each page is an ordinary one again."""
        self._change(pages, lambda record: record.changed(num_retired=-1), must_be_in_use=False)

    def drop_retired(self, pages: Sequence[Page]) -> None:
        """Release one retired reference of each page, which has others that are not retired."""
        self._change(pages, lambda record: record.changed(num_references=-1, num_retired=-1))

    def release(self, pages: Sequence[Page]) -> list[Sequence[Page]]:
        """Drop one reference of each page; pages without references become idle.

        Returns: the pages that have only retired references left, in stretches.
        """

        def released(page: Page, record: _Record | None) -> _Record | None:
            record = _in_use(page, record)
            return None if record.num_references == 1 else record.changed(num_references=-1)

        idle: dict[_Record, list[Sequence[Page]]] = {}
        retired: list[Sequence[Page]] = []
        with self.lock:
            for before, after, run in self._records.change(pages, released):
                assert before is not None
                if after is None:
                    self._in_use_bytes[before.owner] -= len(run) * before.page_bytes
                    idle.setdefault(before, []).append(run)
                elif after.is_retired:
                    self._rebook(before, after, len(run))
                    retired.append(run)
            for record, group in idle.items():
                self.put_idle(join(group), record.owner, record.page_bytes)
        return retired

    def check(self) -> None:
        """Verify the figures against the records.

        Raises:
            InvariantError: an equation of docs/memory.md does not hold.
        """
        with self.lock:
            in_use: Counter[Owner] = Counter()
            retired_bytes = 0
            for page, record in self._records.items():
                if record.is_retired:
                    retired_bytes += record.page_bytes
                else:
                    in_use[record.owner] += record.page_bytes
                if not 0 <= record.num_retired <= record.num_references > 0:
                    raise InvariantError(f"M2: page {page} is in use without a reference")
            idle = [
                page
                for group in self._idle.values()
                for pages in group.by_owner.values()
                for page in pages
            ]
            idle_bytes = sum(page_bytes * len(group) for page_bytes, group in self._idle.items())
            if +in_use != +self._in_use_bytes:
                raise InvariantError(
                    f"M1: owners hold {in_use}, the ledger says {self._in_use_bytes}"
                )
            if (idle_bytes, retired_bytes) != (self._idle_bytes, self._retired_bytes):
                raise InvariantError(
                    f"M1: {idle_bytes} bytes idle and {retired_bytes} retired, the ledger says "
                    f"{self._idle_bytes} and {self._retired_bytes}"
                )
            if len(set(idle)) != len(idle) or any(page in self._records for page in idle):
                raise InvariantError("M3: a page is in two places")
            if self.excess_bytes > 0 and self._idle_bytes:
                raise InvariantError(
                    f"M1: {self._idle_bytes} bytes idle at an excess of {self.excess_bytes}"
                )
            if self.created_bytes > self.budget_bytes:
                raise InvariantError(
                    f"M1: {self.created_bytes} bytes exist in a budget of {self.budget_bytes}"
                )

    @property
    def num_records(self) -> int:
        """Pages that are in use or retired."""
        return len(self._records)

    def _idle_of(self, page_bytes: int) -> IdlePages:
        idle = self._idle.get(page_bytes)
        if idle is None:
            idle = self._idle[page_bytes] = IdlePages()
        return idle

    def _change(
        self,
        pages: Sequence[Page],
        change: Callable[[_Record], _Record],
        *,
        must_be_in_use: bool = True,
    ) -> list[tuple[_Record, Sequence[Page]]]:
        """Replace the records of pages, and update the bytes of states and owners.

        Args:
            pages: the pages.
            change: returns the new record for the old one.
            must_be_in_use: whether it is an error if a page is not in use.

        Returns: the stretches of pages that have equal records, and the new record of each.
        """

        def changed(page: Page, record: _Record | None) -> _Record:
            if must_be_in_use or record is None:
                record = _in_use(page, record)
            return change(record)

        runs: list[tuple[_Record, Sequence[Page]]] = []
        with self.lock:
            for before, after, run in self._records.change(pages, changed):
                assert before is not None
                assert after is not None
                self._rebook(before, after, len(run))
                runs.append((after, run))
        return runs

    def _rebook(self, before: _Record, after: _Record, count: int) -> None:
        """Update the bytes of states and owners for `count` pages with another record."""
        for record, sign in ((before, -1), (after, 1)):
            if record.is_retired:
                self._retired_bytes += sign * count * record.page_bytes
            else:
                self._in_use_bytes[record.owner] += sign * count * record.page_bytes


def _in_use(page: Page, record: _Record | None) -> _Record:
    """The record of a page that has to be in use."""
    if record is None or record.is_retired:
        raise InvariantError(f"page {page} is not in use: the caller does not hold it")
    return record
