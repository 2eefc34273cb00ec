"""Groups of weights on the device that other processes may read, and those that they read now.

A group is offered from when it has its contents until it is evicted. Its pages are the same ones
meanwhile. While it is lent, each of its pages has one reference more: if it is evicted nevertheless
(a model is unloaded or removed), the pages stay as they are, in use, until the loan ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from aquifer.memory.pool import Page, PagePool


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A group that may be read.

    Attributes:
        number: its own; a group that is offered again, or by another key, has another one.
        key: what it is.
        num_bytes: of its parameters, which begin with its pages.
        parts: its pages in order, each part of pages of one size: (size in bytes, pages).
        group: stays the same when the group is renamed, while `number` and `key` do not.
    """

    number: int
    key: str
    num_bytes: int
    parts: tuple[tuple[int, Sequence[Page]], ...]
    group: int


class Offered(NamedTuple):
    """A group that is to be offered: what it is, bytes of its parameters, and its pages."""

    key: str
    num_bytes: int
    parts: Sequence[tuple[int, Sequence[Page]]]


class LoanBook:
    """What a process offers to others, and what they have borrowed.

    `offer`, `rename` and `withdraw` are for the engine's loop, the other methods for any thread.
    The pool's lock guards the book.

    Args:
        pool: where the pages are from.

    Attributes:
        on_change: called with offers that are withdrawn, and with those that are new; it must not
            block.
    """

    def __init__(self, pool: PagePool) -> None:
        self.on_change: Callable[[Sequence[Offer], Sequence[Offer]], None] = lambda gone, new: None
        self._pool = pool
        self._numbers = count(1)
        self._offers: dict[str, Offer] = {}
        self._num_loans: Counter[int] = Counter()  # by `Offer.group`
        self._changed = threading.Condition(pool.lock)
        self._num_changes = 0
        self._num_pauses = 0

    @property
    def offers(self) -> list[Offer]:
        """All that is offered, the earliest first."""
        with self._pool.lock:
            return list(self._offers.values())

    def offer(self, groups: Iterable[Offered]) -> None:
        """Offer groups that have their contents."""
        with self._pool.lock:
            new = [
                Offer(number := next(self._numbers), key, num_bytes, tuple(parts), group=number)
                for key, num_bytes, parts in groups
            ]
            self._offers.update((offer.key, offer) for offer in new)
            self.on_change((), new)

    def rename(self, key: str, new: str) -> None:
        """Let a group, if it is offered, be offered by another key instead."""
        with self._pool.lock:
            offer = self._offers.pop(key, None)
            if offer is not None:
                self._offers[new] = renamed = replace(offer, number=next(self._numbers), key=new)
                self.on_change([offer], [renamed])

    def withdraw(self, keys: Iterable[str]) -> None:
        """Offer groups no more; they may lose their pages, but for those that are lent."""
        with self._pool.lock:
            offers = [self._offers.pop(key) for key in keys if key in self._offers]
            self.on_change(offers, ())

    def lend(self, keys: Iterable[str]) -> list[Offer]:
        """Lend those of these groups that are offered; none while lending is paused."""
        with self._changed:
            if self._num_pauses:
                return []
            lent = [self._offers[key] for key in keys if key in self._offers]
            for offer in lent:
                for _, pages in offer.parts:
                    self._pool.share(pages)
            self._num_loans.update(offer.group for offer in lent)
            self._num_changes += 1
        return lent

    def end(self, offers: Iterable[Offer]) -> None:
        """End a loan of these groups: the opposite of `lend`."""
        for offer in offers:
            with self._changed:
                self._num_loans[offer.group] -= 1
                if not self._num_loans[offer.group]:
                    del self._num_loans[offer.group]
                for _, pages in offer.parts:
                    self._pool.release(pages)
                self._num_changes += 1
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until nothing is lent, and lend nothing until the end of the context.

        Pre-condition: the caller does not hold the pool's lock.
        """
        with self._changed:
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._num_loans)
        try:
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1

    @property
    def num_changes(self) -> int:
        """How often a loan has begun, or a part of one has ended."""
        return self._num_changes

    @property
    def has_loans(self) -> bool:
        """Whether any group is lent."""
        return bool(self._num_loans)

    def is_lent(self, keys: Iterable[str]) -> bool:
        """Whether any of these groups is offered and lent."""
        if not self._num_loans:
            return False
        with self._pool.lock:
            offers = (self._offers.get(key) for key in keys)
            return any(offer is not None and offer.group in self._num_loans for offer in offers)
