"""The thread that lends weights of this process to its neighbours: the other engine processes.

A neighbour is told what is offered, when it connects and whenever that changes, and which offers
are withdrawn, so that it unmaps their pages:

    ["offered", [group, ...]]      each as [key, offer, bytes, [[page bytes, pages], ...]]
    ["withdrawn", [offer, ...]]

It sends requests, and gets an answer to each, in their order:

    ["borrow", [key, ...]]         those of the groups that are offered are lent, of which it was
    ["lent", loan, [group, ...]]   told before

    ["open", offer, first, end]    descriptors of the pages [first, end) of a group that is lent; a
    ["pages", [piece, ...]]        piece has those of one size, as
                                   [page bytes, descriptors, [[descriptor, offset], ...]]

    ["return", loan]               a loan is ended
    ["returned", stood]            whether it had not ended before

What a neighbour has borrowed stays until it says so, its connection ends, or `LONGEST_S` are over.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
        self._changes: SimpleQueue[tuple[Sequence[Offer], Sequence[Offer]]] = SimpleQueue()
        self._numbers = count(1)
        self._borrowers: dict[int, _Borrower] = {}  # by descriptor
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="aquifer-lend", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._loans.on_change = self._on_change
        self._thread.start()

    def close(self) -> None:
        """End all loans and the thread."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink()

    def _on_change(self, withdrawn: Sequence[Offer], offered: Sequence[Offer]) -> None:
        self._changes.put((withdrawn, offered))
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
                self._tell_changes()
            elif key.fd in self._borrowers:
                self._serve(self._borrowers[key.fd])
        self._end_old_loans()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_S)
            self._borrowers[connection.fileno()] = borrower = _Borrower(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            self._tell(borrower, (), self._loans.offers)

    def _drop(self, borrower: _Borrower) -> None:
        """End a connection, if it has not ended, and all its loans."""
        if self._borrowers.pop(borrower.connection.fileno(), None) is None:
            return
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
                loan = next(self._numbers)
                borrower.loans[loan] = offers = self._loans.lend(keys)
                borrower.begun_s[loan] = time.monotonic()
                self._tell_changes()  # among them, that these are offered
                return ["lent", loan, list(map(_described, offers))], ()
            case ["open", int(number), int(first), int(end)]:
                return self._open(borrower.lent(number), first, end)
            case ["return", int(loan)]:
                ended = borrower.loans.pop(loan, None)
                if ended is not None:
                    del borrower.begun_s[loan]
                    self._loans.end(ended)
                return ["returned", ended is not None], ()
        raise ValueError(f"no request {request!r}")

    def _open(self, offer: Offer, first: int, end: int) -> tuple[list[Any], Sequence[int]]:
        """Pages [first, end) of a group as an answer, with descriptors."""
        files: list[int] = []
        pieces: list[Any] = []
        with ExitStack() as undo:
            undo.callback(peer_socket.close_files, files)
            for pages in _between(offer, first, end):
                exported = self._pages.export(pages)
                files += exported.files
                pieces.append([exported.page_bytes, len(exported.files), exported.places])
            undo.pop_all()
        return ["pages", pieces], files

    def _tell_changes(self) -> None:
        """Tell all neighbours what is offered or withdrawn since they were told last."""
        withdrawn: list[int] = []
        offered: dict[int, Offer] = {}
        with suppress(Empty):
            while True:
                gone, new = self._changes.get_nowait()
                withdrawn += [offer.number for offer in gone]
                for offer in gone:
                    offered.pop(offer.number, None)
                offered.update((offer.number, offer) for offer in new)
        for borrower in list(self._borrowers.values()):
            self._tell(borrower, withdrawn, list(offered.values()))

    def _tell(
        self, borrower: _Borrower, withdrawn: Sequence[int], offered: Sequence[Offer]
    ) -> None:
        try:
            if withdrawn:
                peer_socket.send(borrower.connection, ["withdrawn", withdrawn])
            if offered:
                peer_socket.send(borrower.connection, ["offered", list(map(_described, offered))])
        except OSError:
            self._drop(borrower)

    def _end_old_loans(self) -> None:
        latest_s = time.monotonic() - self._longest_s
        for borrower in list(self._borrowers.values()):
            if min(borrower.begun_s.values(), default=latest_s) < latest_s:
                _log.warning("a neighbour has read weights for too long, and is disconnected")
                self._drop(borrower)


def _described(offer: Offer) -> list[Any]:
    """A group as a neighbour is told of it."""
    parts = [[page_bytes, len(pages)] for page_bytes, pages in offer.parts]
    return [offer.key, offer.number, offer.num_bytes, parts]


def _between(offer: Offer, first: int, end: int) -> list[Sequence[Page]]:
    """Pages [first, end) of a group, those of one size together.

    Raises:
        LookupError: there are no such pages, or they are too many for a message.
    """
    num_pages = sum(len(pages) for _, pages in offer.parts)
    if not (0 <= first < end <= num_pages and end - first <= peer_socket.MOST_FILES):
        raise LookupError(f"no pages [{first}, {end})")
    found: list[Sequence[Page]] = []
    for _, pages in offer.parts:
        found.append(pages[max(first, 0) : max(end, 0)])
        first, end = first - len(pages), end - len(pages)
    return [pages for pages in found if len(pages)]
