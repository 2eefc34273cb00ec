"""Weights that other engine processes of this machine have on their devices, copied from there.

A neighbour lends groups of weights (`aquifer.weights.lender`): it does not take their pages away
while they are read. Their pages are mapped here, and copied from device to device. The mapping of a
group is kept for the next time, until its offer is withdrawn.

A copy counts only if the neighbour says at its end that the loan still stood. What a neighbour does
not have, refuses, or does not bring because it has died comes from another place.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from aquifer.errors import DriverError
from aquifer.memory.driver.base import Driver, ExportedPages
from aquifer.memory.window import Window
from aquifer.weights import peer_socket
from aquifer.weights.loader import begin_copying, work_so_far

_log = logging.getLogger(__name__)

_ANSWER_S = 1.0
"""How long a neighbour may take for an answer; it takes about a millisecond."""

_LEFT_OUT_S = 30.0
"""How long a neighbour that has not answered is not asked again."""


class _GoneError(Exception):
    """A neighbour does not answer any more, or its pages cannot be mapped."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of weights that a neighbour lends."""

    offer: int
    num_bytes: int  # of its parameters
    parts: list[tuple[int, int]]  # sizes of pages, in bytes, and how many there are of each

    @property
    def mapped_bytes(self) -> int:
        return sum(page_bytes * num_pages for page_bytes, num_pages in self.parts)


@dataclass(slots=True)
class _Opened:
    """Pages of a group, mapped here."""

    window: Window
    num_uses: int
    is_withdrawn: bool


class _Neighbour:
    """A connection to another engine process, and the pages of it that are mapped here.

    All methods are for one thread; another one receives what the neighbour sends.

    Args:
        path: its socket.
        driver: maps its pages.

    Raises:
        OSError: nothing listens at the path.
    """

    def __init__(self, path: Path, driver: Driver) -> None:
        self.path = path
        self.is_gone = False
        self.is_refused = False  # whether the device refuses to map its pages
        self._driver = driver
        self._connection = peer_socket.connect(path, _ANSWER_S)
        self._answers: SimpleQueue[tuple[list[Any], list[int]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._opened: dict[int, _Opened] = {}  # by offer
        self._withdrawn: set[int] = set()  # offers that are lent and will be offered no more
        self._thread = threading.Thread(target=self._listen, name="aquifer-neighbour", daemon=True)
        self._thread.start()

    def borrow(self, keys: Iterable[str]) -> tuple[int, dict[str, _Group]]:
        """Borrow what it has of these groups; returns the number of the loan, and the groups.

        Raises:
            _GoneError: it does not answer.
        """
        with self._failing():
            _, loan, lent = self._ask(["borrow", list(keys)])
            return loan, {
                key: _Group(offer, num_bytes, [(size, count) for size, count in parts])
                for key, offer, num_bytes, parts in lent
            }

    def give_back(self, loan: int) -> bool:
        """End a loan; returns whether it still stood. Pre-condition: copies from it are done."""
        with self._lock:
            self._withdrawn.clear()
        try:
            with self._failing():
                _, stood = self._ask(["return", loan])
                return bool(stood)
        except _GoneError:
            return False

    def open(self, group: _Group) -> Window:
        """The pages of a group that is lent; to be ended with `leave`.

        Raises:
            _GoneError: it does not answer, or the device refuses to map them.
        """
        with self._lock:
            if (opened := self._opened.get(group.offer)) is not None:
                opened.num_uses += 1
                return opened.window
        with self._failing(), closing(self._pages(group)) as pages:
            window = Window(self._driver, group.mapped_bytes, pages)
        with self._lock:
            self._opened[group.offer] = _Opened(window, 1, group.offer in self._withdrawn)
        return window

    def leave(self, group: _Group) -> None:
        """No copy reads the pages of a group any more."""
        with self._lock:
            opened = self._opened[group.offer]
            opened.num_uses -= 1
            # Where a process may have few mappings, none is kept.
            is_kept = self._driver.max_mappings is None and not opened.is_withdrawn
            if not opened.num_uses and not (is_kept and not self.is_gone):
                self._close(group.offer)

    def close(self) -> None:
        """End the connection. Pre-condition: no copy reads its pages."""
        self.is_gone = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()
        with self._lock:
            for offer in list(self._opened):
                self._close(offer)

    def _close(self, offer: int) -> None:
        """Unmap the pages of a group; the lock is held."""
        self._withdrawn.discard(offer)
        self._opened.pop(offer).window.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever fails, the neighbour is asked for nothing more."""
        try:
            yield
        except (OSError, ValueError, TypeError, LookupError, Empty, DriverError) as error:
            self.is_gone = True
            if isinstance(error, DriverError):
                self.is_refused = True
                _log.warning("weights of another device cannot be mapped here: %s", error)
            raise _GoneError from error

    def _ask(self, request: Sequence[Any]) -> list[Any]:
        """Send a request; returns the answer, which has no descriptors."""
        answer, files = self._ask_for_files(request)
        peer_socket.close_files(files)
        return answer

    def _ask_for_files(self, request: Sequence[Any]) -> tuple[list[Any], list[int]]:
        peer_socket.send(self._connection, request)
        answer = self._answers.get(timeout=_ANSWER_S)
        if answer is None:
            raise ConnectionError("the neighbour is gone")
        return answer

    def _pages(self, group: _Group) -> Generator[ExportedPages, None, None]:
        """The pages of a group that is lent, a message after the other."""
        start = 0
        for page_bytes, num_pages in group.parts:
            stop = start + num_pages
            for first in range(start, stop, peer_socket.MOST_FILES):
                end = min(first + peer_socket.MOST_FILES, stop)
                answer, files = self._ask_for_files(["open", group.offer, first, end])
                try:
                    _, found_bytes, places = answer
                    if found_bytes != page_bytes or len(places) != end - first:
                        raise ValueError("other pages than were offered")
                    yield ExportedPages(page_bytes, files, [(file, at) for file, at in places])
                finally:
                    peer_socket.close_files(files)
            start = stop

    def _listen(self) -> None:
        """Receive what the neighbour sends, until it is gone."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while True:
            try:
                poller.poll()
                message, files = peer_socket.receive(self._connection)
            except (OSError, EOFError, ValueError):
                self.is_gone = True
                self._answers.put(None)
                self._withdraw()  # or its memory would stay in use
                return
            if message[0] == "withdrawn":
                self._withdraw(message[1])
            else:
                self._answers.put((message, files))

    def _withdraw(self, offers: Iterable[int] | None = None) -> None:
        """Unmap the pages of groups, or of all, or do so when no copy reads them any more."""
        with self._lock:
            for offer in list(self._opened) if offers is None else offers:
                opened = self._opened.get(offer)
                if opened is None:
                    self._withdrawn.add(offer)
                elif opened.num_uses:
                    opened.is_withdrawn = True
                else:
                    self._close(offer)


class Borrowing:
    """Groups of weights that neighbours lend for one load, and their copies.

    Args:
        thread: does all that has to do with neighbours, in order.
        found: the neighbour that has each group, by key.
        loans: what is to be given back.
        on_finished: called in that thread at the end.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        found: Mapping[str, tuple[_Neighbour, _Group]],
        loans: Sequence[tuple[_Neighbour, int]],
        on_finished: Callable[[], None],
    ) -> None:
        self._thread = thread
        self._found = found
        self._loans = loans
        self._on_finished = on_finished
        self._reads: dict[str, Future[Callable[[], None]]] = {}
        self._open: list[tuple[_Neighbour, _Group]] = []
        self._finished: frozenset[str] | None = None

    def __contains__(self, key: str) -> bool:
        """Whether a neighbour lends a group."""
        return key in self._found

    def read(self, key: str, target: torch.Tensor) -> None:
        """Begin to copy a group.

        Args:
            key: what it is.
            target: uint8, its bytes on this device.
        """
        after = work_so_far(target.device)
        self._reads[key] = self._thread.submit(self._read, key, target, after)

    def finish(self) -> frozenset[str]:
        """Wait for all copies, and give back what was borrowed; returns the groups that are here.

        The contents of others are any bytes, and nothing writes to them any more.
        """
        if self._finished is None:
            self._finished = self._thread.submit(self._finish).result()
        return self._finished

    def _read(
        self, key: str, target: torch.Tensor, after: torch.cuda.Event | None
    ) -> Callable[[], None]:
        """Begin a copy; returns what waits for it."""
        neighbour, group = self._found[key]
        if neighbour.is_gone:
            raise _GoneError
        window = neighbour.open(group)
        self._open.append((neighbour, group))
        source = window.bytes[: group.num_bytes]
        return begin_copying([(source, target)], after, stream="neighbours")

    def _finish(self) -> frozenset[str]:
        copied: list[str] = []
        try:
            for key, read in self._reads.items():
                with suppress(_GoneError):
                    read.result()()
                    copied.append(key)
        finally:
            self._reads.clear()
            while self._open:
                neighbour, group = self._open.pop()
                neighbour.leave(group)
            stood = {neighbour for neighbour, loan in self._loans if neighbour.give_back(loan)}
            self._loans = ()
            self._on_finished()
        return frozenset(key for key in copied if self._found[key][0] in stood)


class Neighbours:
    """The other engine processes of this machine, as far as they lend weights.

    Args:
        folder: where the sockets of all are.
        own: this process's own.
        driver: maps their pages.
    """

    def __init__(self, folder: Path, own: Path, driver: Driver) -> None:
        self._folder = folder
        self._driver = driver
        self._left_out = {own: math.inf}  # until when, on the clock of `time.monotonic`
        self._neighbours: dict[Path, _Neighbour] = {}
        self._thread = ThreadPoolExecutor(1, "aquifer-borrow")

    def borrow(self, sizes_bytes: Mapping[str, int]) -> Borrowing:
        """Borrow what neighbours have of some groups; to be ended with `Borrowing.finish`.

        Args:
            sizes_bytes: bytes of the parameters of each group, by key.
        """
        return self._thread.submit(self._borrow, sizes_bytes).result()

    def close(self) -> None:
        """End all connections. Pre-condition: nothing is borrowed."""
        self._thread.shutdown()
        for neighbour in self._neighbours.values():
            neighbour.close()
        self._neighbours.clear()

    def _borrow(self, sizes_bytes: Mapping[str, int]) -> Borrowing:
        self._meet()
        found: dict[str, tuple[_Neighbour, _Group]] = {}
        loans: list[tuple[_Neighbour, int]] = []
        for neighbour in self._neighbours.values():
            wanted = sizes_bytes.keys() - found.keys()
            if not wanted:
                break
            with suppress(_GoneError):
                loan, groups = neighbour.borrow(sorted(wanted))
                loans.append((neighbour, loan))
                found |= {
                    key: (neighbour, group)
                    for key, group in groups.items()
                    if group.num_bytes == sizes_bytes.get(key)
                }
        return Borrowing(self._thread, found, loans, self._part)

    def _meet(self) -> None:
        """Connect to neighbours that are new, and leave those that are gone."""
        self._part()
        for path in peer_socket.paths_in(self._folder):
            if path in self._neighbours or self._left_out.get(path, 0.0) > time.monotonic():
                continue
            try:
                self._neighbours[path] = _Neighbour(path, self._driver)
            except ConnectionRefusedError:  # its process was killed
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("the neighbour at %s cannot be asked for weights: %s", path, error)

    def _part(self) -> None:
        """Leave neighbours that are gone."""
        for path, neighbour in list(self._neighbours.items()):
            if neighbour.is_gone:
                del self._neighbours[path]
                neighbour.close()
                until_s = math.inf if neighbour.is_refused else time.monotonic() + _LEFT_OUT_S
                self._left_out[path] = until_s
