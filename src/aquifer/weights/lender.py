"""The thread that lends weights of this process to its neighbours: the other engine processes.

A neighbour sends requests, and gets an answer to each:

    ["borrow", [key, ...]]        -> ["lent", loan, [group, ...]]: those that are here, each as
                                     [key, offer, bytes, [[page bytes, number of pages], ...]]
    ["open", offer, first, end]   -> ["pages", page bytes, [[file, offset], ...]] with descriptors:
                                     pages [first, end) of a group, all of one size
    ["return", loan]              -> ["returned", whether it was still lent]

It is also told which offers are withdrawn, so that it unmaps their pages:

    ["withdrawn", [offer, ...]]

What a neighbour has borrowed stays until it says so, its connection ends, or `LONGEST_S` are over.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from aquifer.errors import DriverError
from aquifer.memory.pages import Page, PageTable
from aquifer.weights import peer_socket
from aquifer.weights.loans import LoanBook, Offer

_log = logging.getLogger(__name__)

LONGEST_S = 60.0
"""How long a loan may last: a copy takes much less than a second."""

_SEND_S = 2.0
"""How long a neighbour may take to read an answer."""


class _Borrower:
    """A connection of a neighbour."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.loans: dict[int, list[Offer]] = {}
        self.begun_s: dict[int, float] = {}  # by loan
        self.known: set[int] = set()  # offers of which it may have mapped the pages

    def lent(self, number: int) -> Offer:
        """The offer of that number.

        Raises:
            LookupError: it is not lent.
        """
        for offers in self.loans.values():
            for offer in offers:
                if offer.number == number:
                    return offer
        raise LookupError(f"offer {number} is not lent")


class Lender:
    """Lends what a loan book offers.

    Args:
        loans: the book.
        pages: the pages of this process.
        folder: where the sockets of all engine processes are.
        longest_s: how long a loan may last.

    Attributes:
        path: its socket.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self, loans: LoanBook, pages: PageTable, folder: Path, longest_s: float = LONGEST_S
    ) -> None:
        self._longest_s = longest_s
        self._loans = loans
        self._pages = pages
        self._listener, self.path = peer_socket.listen(folder)
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._withdrawn: SimpleQueue[int] = SimpleQueue()
        self._numbers = count(1)
        self._borrowers: dict[int, _Borrower] = {}  # by descriptor
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="aquifer-lend", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._loans.on_withdrawn = self._on_withdrawn
        self._thread.start()

    def close(self) -> None:
        """End all loans and the thread."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink()

    def _on_withdrawn(self, number: int) -> None:
        self._withdrawn.put(number)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # it is about to wake up anyway, or has ended
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wait()
        finally:  # whatever happens, nothing stays lent
            for borrower in list(self._borrowers.values()):
                self._drop(borrower)
            self._selector.close()
            for each in (self._listener, self._waker, self._wakened):
                each.close()

    def _wait(self) -> None:
        """Wait for requests and withdrawals, and handle them."""
        timeout_s = self._longest_s / 10 if self._loans.has_loans else None
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakened:
                self._wakened.recv(4096)
                self._tell_withdrawn()
            elif key.fd in self._borrowers:
                self._serve(self._borrowers[key.fd])
        self._end_old_loans()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_S)
            self._borrowers[connection.fileno()] = _Borrower(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, borrower: _Borrower) -> None:
        """End a connection, and all its loans."""
        del self._borrowers[borrower.connection.fileno()]
        self._selector.unregister(borrower.connection)
        borrower.connection.close()
        for offers in borrower.loans.values():
            self._loans.end(offers)

    def _serve(self, borrower: _Borrower) -> None:
        """Answer a request."""
        files: Sequence[int] = ()
        try:
            request, unwanted = peer_socket.receive(borrower.connection)
            peer_socket.close_files(unwanted)
            answer, files = self._answer(borrower, request)
            peer_socket.send(borrower.connection, answer, files)
        except EOFError:
            self._drop(borrower)
        except (OSError, ValueError, LookupError, TypeError, DriverError) as error:
            _log.warning("a neighbour that reads weights is disconnected: %r", error)
            self._drop(borrower)
        finally:
            peer_socket.close_files(files)

    def _answer(self, borrower: _Borrower, request: list[Any]) -> tuple[list[Any], Sequence[int]]:
        """The answer to a request, with descriptors.

        Raises:
            LookupError: the group is not lent, or has not these pages.
            ValueError: there is no such request.
            DriverError: the device refused.
        """
        match request:
            case ["borrow", [*keys]]:
                offers = self._loans.lend(keys)
                loan = next(self._numbers)
                borrower.loans[loan] = offers
                borrower.begun_s[loan] = time.monotonic()
                borrower.known.update(offer.number for offer in offers)
                lent = [
                    [
                        offer.key,
                        offer.number,
                        offer.num_bytes,
                        [[page_bytes, len(pages)] for page_bytes, pages in offer.parts],
                    ]
                    for offer in offers
                ]
                return ["lent", loan, lent], ()
            case ["open", int(number), int(first), int(end)]:
                exported = self._pages.export(_between(borrower.lent(number), first, end))
                return ["pages", exported.page_bytes, exported.places], exported.files
            case ["return", int(loan)]:
                ended = borrower.loans.pop(loan, None)
                if ended is not None:
                    del borrower.begun_s[loan]
                    self._loans.end(ended)
                return ["returned", ended is not None], ()
        raise ValueError(f"no request {request!r}")

    def _tell_withdrawn(self) -> None:
        numbers: set[int] = set()
        with suppress(Empty):
            while True:
                numbers.add(self._withdrawn.get_nowait())
        for borrower in list(self._borrowers.values()):
            gone = borrower.known & numbers
            if gone:
                borrower.known -= gone
                try:
                    peer_socket.send(borrower.connection, ["withdrawn", sorted(gone)])
                except OSError:
                    self._drop(borrower)

    def _end_old_loans(self) -> None:
        latest_s = time.monotonic() - self._longest_s
        for borrower in list(self._borrowers.values()):
            if min(borrower.begun_s.values(), default=latest_s) < latest_s:
                _log.warning("a neighbour has read weights for too long, and is disconnected")
                self._drop(borrower)


def _between(offer: Offer, first: int, end: int) -> Sequence[Page]:
    """Pages [first, end) of a group.

    Raises:
        LookupError: there are no such pages of one size.
    """
    for _, pages in offer.parts:
        if 0 <= first < end <= len(pages) and end - first <= peer_socket.MOST_FILES:
            return pages[first:end]
        first, end = first - len(pages), end - len(pages)
    raise LookupError(f"no pages [{first}, {end})")
