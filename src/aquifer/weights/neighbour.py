"""A connection to one other engine process: what it lends, and its pages that are mapped here."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from aquifer.errors import DriverError
from aquifer.memory.driver.base import Driver, ExportedPages
from aquifer.memory.window import Window
from aquifer.weights import peer_socket

_log = logging.getLogger(__name__)

BATCH_PAGES = 8
"""Pages that are mapped ahead at a time: a load that comes meanwhile waits for no more."""

_ANSWER_S = 1.0
"""How long a neighbour may take for an answer; it takes about a millisecond."""

_MOST_ASKED = 3
"""Most requests for pages under way: the neighbour opens some while others are mapped here."""


class GoneError(Exception):
    """A neighbour does not answer any more, or its pages cannot be mapped."""


class _StoppedError(Exception):
    """Pages are not to be mapped ahead any more for now."""


@dataclass(frozen=True, slots=True)
class LentGroup:
    """A group of weights that a neighbour lends."""

    key: str
    offer: int
    num_bytes: int  # of its parameters
    parts: tuple[tuple[int, int], ...]  # sizes of pages, in bytes, and how many there are of each

    @classmethod
    def of(cls, described: Sequence[Any]) -> LentGroup:
        """A group as the neighbour describes it."""
        key, offer, num_bytes, parts = described
        return cls(key, offer, num_bytes, tuple((size, count) for size, count in parts))

    @property
    def num_pages(self) -> int:
        """Number of its pages, of any size."""
        return sum(num_pages for _, num_pages in self.parts)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of its pages."""
        return sum(page_bytes * num_pages for page_bytes, num_pages in self.parts)

    def batches(self, num_pages: int) -> list[_Batch]:
        """Its pages, so many at a time."""
        end = self.num_pages
        starts = range(0, end, num_pages)
        return [_Batch(self.offer, at, min(at + num_pages, end)) for at in starts]

    def sizes(self, first: int, end: int) -> list[tuple[int, int]]:
        """Sizes of the pages [first, end), in bytes, and how many there are of each."""
        sizes: list[tuple[int, int]] = []
        start = 0
        for page_bytes, num_pages in self.parts:
            count = min(end, start + num_pages) - max(first, start)
            if count > 0:
                sizes.append((page_bytes, count))
            start += num_pages
        return sizes


class _Batch(NamedTuple):
    """Pages [first, end) of an offer."""

    offer: int
    first: int
    end: int


@dataclass(slots=True)
class _Opened:
    """Pages of a group, mapped here."""

    group: LentGroup
    window: Window
    num_uses: int


class Neighbour:
    """A connection to another engine process, and the pages of it that are mapped here.

    The mapping of a group is kept until its offer is withdrawn. Methods are for one thread, unless
    they say otherwise; another one receives what the neighbour sends.

    Args:
        path: its socket.
        driver: maps its pages.
        on_news: called in that thread when it has offered or withdrawn something.

    Attributes:
        path: as given.
        is_gone: whether it answers no more.
        is_refused: whether the device refuses to map its pages.
        num_mapped_pages: how many of its pages are mapped here.
        mapped_bytes: bytes of these.

    Raises:
        OSError: nothing listens at the path.
    """

    def __init__(self, path: Path, driver: Driver, on_news: Callable[[], None]) -> None:
        self.path = path
        self.is_gone = False
        self.is_refused = False
        self.num_mapped_pages = 0
        self.mapped_bytes = 0
        self._driver = driver
        self._on_news = on_news
        self._connection = peer_socket.connect(path, _ANSWER_S)
        self._answers: SimpleQueue[tuple[list[Any], list[int]] | None] = SimpleQueue()
        self._answers_come = True
        self._asked: deque[_Batch] = deque()  # of which the answers are still to come
        self._lock = threading.Lock()  # guards the rest
        self._offered: dict[int, LentGroup] = {}  # by offer
        self._opened: dict[int, _Opened] = {}  # by offer
        self._mapped: dict[str, int] = {}  # offers that are open and not withdrawn, by key
        self._thread = threading.Thread(target=self._listen, name="aquifer-neighbour", daemon=True)
        self._thread.start()

    @property
    def offered(self) -> list[LentGroup]:
        """What it offers, the earliest first."""
        with self._lock:
            return list(self._offered.values())

    @property
    def mapped(self) -> frozenset[str]:
        """Keys of the groups that it offers and that are mapped here."""
        with self._lock:
            return frozenset(self._mapped)

    def is_mapped(self, key: str) -> bool:
        """Whether it offers a group that is mapped here. For any thread."""
        return key in self._mapped

    def is_open(self, group: LentGroup) -> bool:
        """Whether the pages of a group that is lent are mapped."""
        return group.offer in self._opened

    def borrow(self, keys: Iterable[str]) -> tuple[int, dict[str, LentGroup]]:
        """Borrow what it has of these groups; returns the number of the loan, and the groups.

        Raises:
            GoneError: it does not answer.
        """
        with self._failing():
            _, loan, lent = self._ask(["borrow", list(keys)])
            return loan, {group.key: group for group in map(LentGroup.of, lent)}

    def give_back(self, loan: int) -> bool:
        """End a loan; returns whether it still stood. Pre-condition: copies from it are done."""
        try:
            with self._failing():
                while self._asked:  # what nothing is mapped of any more
                    peer_socket.close_files(self._answer()[1])
                    self._asked.popleft()
                _, stood = self._ask(["return", loan])
                return bool(stood)
        except GoneError:
            return False

    def open(self, group: LentGroup, upcoming: Iterable[LentGroup] = ()) -> Window:
        """The pages of a group that is lent; to be ended with `leave`.

        Args:
            group: the group.
            upcoming: lent groups that are opened next, in order: their pages are asked for while
                others are mapped.

        Raises:
            GoneError: it does not answer, or the device refuses to map them.
        """
        return self._open(group, upcoming, peer_socket.MOST_FILES, lambda: True)

    def leave(self, group: LentGroup) -> None:
        """No copy reads the pages of a group any more."""
        window: Window | None = None
        with self._lock:
            opened = self._opened[group.offer]
            opened.num_uses -= 1
            # Where a process may have few mappings, none is kept.
            is_kept = self._driver.max_mappings is None and group.offer in self._offered
            if not opened.num_uses and not (is_kept and not self.is_gone):
                window = self._forget(group.offer)
        if window is not None:
            window.close()

    def map_ahead(self, keys: Iterable[str], goes_on: Callable[[], bool]) -> bool:
        """Map the pages of groups that are not mapped, if it lends them.

        Args:
            keys: the groups.
            goes_on: asked before each batch of pages; if not, the rest is left.

        Returns: whether any group is mapped now that was not.

        Raises:
            GoneError: it does not answer, or the device refuses to map them.
        """
        loan, groups = self.borrow(keys)
        num_mapped = 0
        try:
            for group in groups.values():
                self._open(group, (), BATCH_PAGES, goes_on)
                self.leave(group)
                num_mapped += 1
        except _StoppedError:
            pass
        finally:
            self.give_back(loan)
        return num_mapped > 0

    def close(self) -> None:
        """End the connection. Pre-condition: no copy reads its pages."""
        self.is_gone = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()
        with suppress(Empty):
            while True:  # answers that nothing has waited for
                answer = self._answers.get_nowait()
                if answer is not None:
                    peer_socket.close_files(answer[1])
        with self._lock:
            windows = [self._forget(offer) for offer in list(self._opened)]
        for window in windows:
            window.close()

    def _open(
        self,
        group: LentGroup,
        upcoming: Iterable[LentGroup],
        batch_pages: int,
        goes_on: Callable[[], bool],
    ) -> Window:
        with self._lock:
            if (opened := self._opened.get(group.offer)) is not None:
                opened.num_uses += 1
                return opened.window
            ahead = [each for each in upcoming if each.offer not in self._opened]
        wanted = [batch for each in (group, *ahead) for batch in each.batches(batch_pages)]
        with self._failing(), closing(self._pages(group, wanted, goes_on)) as pages:
            window = Window(self._driver, group.mapped_bytes, pages)
        with self._lock:
            self._opened[group.offer] = _Opened(group, window, 1)
            self.num_mapped_pages += group.num_pages
            self.mapped_bytes += group.mapped_bytes
            if group.offer in self._offered:
                self._mapped[group.key] = group.offer
        return window

    def _forget(self, offer: int) -> Window:
        """Forget the pages of a group, which are to be unmapped; the lock is held."""
        opened = self._opened.pop(offer)
        self.num_mapped_pages -= opened.group.num_pages
        self.mapped_bytes -= opened.group.mapped_bytes
        if self._mapped.get(opened.group.key) == offer:
            del self._mapped[opened.group.key]
        return opened.window

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever fails, the neighbour is asked for nothing more."""
        try:
            yield
        except (OSError, ValueError, TypeError, LookupError, DriverError) as error:
            self.is_gone = True
            if isinstance(error, DriverError):
                self.is_refused = True
                _log.warning("weights of another device cannot be mapped here: %s", error)
            raise GoneError from error

    def _ask(self, request: Sequence[Any]) -> list[Any]:
        """Send a request; returns the answer, which has no descriptors."""
        peer_socket.send(self._connection, request)
        answer, files = self._answer()
        peer_socket.close_files(files)
        return answer

    def _answer(self) -> tuple[list[Any], list[int]]:
        """The answer to the earliest request that has none yet, with its descriptors."""
        with suppress(Empty):
            if self._answers_come and (answer := self._answers.get(timeout=_ANSWER_S)) is not None:
                return answer
        self._answers_come = False  # one that is late must not be taken for another one
        raise ConnectionError("the neighbour does not answer")

    def _pages(
        self, group: LentGroup, wanted: Sequence[_Batch], goes_on: Callable[[], bool]
    ) -> Generator[ExportedPages, None, None]:
        """The pages of a group that is lent, while those that come after it are asked for.

        Args:
            group: the group.
            wanted: all its batches, and then those of others.
            goes_on: asked before each batch.
        """
        to_ask = deque(batch for batch in wanted if batch not in self._asked)
        while wanted and wanted[0].offer == group.offer:
            if not goes_on():
                raise _StoppedError
            while to_ask and len(self._asked) < _MOST_ASKED:
                peer_socket.send(self._connection, ["open", *to_ask[0]])
                self._asked.append(to_ask.popleft())
            answer, files = self._answer()
            try:
                batch, wanted = wanted[0], wanted[1:]
                if self._asked.popleft() != batch:
                    raise ValueError("other pages than are wanted next")
                yield from _pieces(answer, files, group.sizes(batch.first, batch.end))
            finally:
                peer_socket.close_files(files)

    def _listen(self) -> None:
        """Receive what the neighbour sends, until it is gone."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while True:
            try:
                poller.poll()
                message, files = peer_socket.receive(self._connection)
                match message:
                    case ["offered", [*groups]]:
                        self._learn([LentGroup.of(each) for each in groups])
                    case ["withdrawn", [*offers]]:
                        self._withdraw(offers)
                    case _:
                        self._answers.put((message, files))
            except (OSError, EOFError, ValueError, TypeError):
                self.is_gone = True
                self._answers.put(None)
                with self._lock:
                    offers = [*self._offered, *self._opened]
                self._withdraw(offers)  # or its memory would stay in use
                return

    def _learn(self, groups: Iterable[LentGroup]) -> None:
        with self._lock:
            self._offered.update((group.offer, group) for group in groups)
        self._on_news()

    def _withdraw(self, offers: Iterable[int]) -> None:
        """Unmap the pages of groups, or do so when no copy reads them any more."""
        windows: list[Window] = []
        with self._lock:
            for offer in offers:
                self._offered.pop(offer, None)
                opened = self._opened.get(offer)
                if opened is not None and self._mapped.get(opened.group.key) == offer:
                    del self._mapped[opened.group.key]
                if opened is not None and not opened.num_uses:
                    windows.append(self._forget(offer))
        for window in windows:
            window.close()
        self._on_news()


def _pieces(
    answer: Sequence[Any], files: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[ExportedPages]:
    """The pages of an answer, those of one size together.

    Raises:
        ValueError: they are not of these sizes.
    """
    _, pieces = answer
    if [(page_bytes, len(places)) for page_bytes, _, places in pieces] != list(sizes):
        raise ValueError("other pages than were offered")
    for page_bytes, num_files, places in pieces:
        own, files = files[:num_files], files[num_files:]
        yield ExportedPages(page_bytes, own, [(file, at) for file, at in places])
