"""Weights that other engine processes of this machine have on their devices, copied from there.

A neighbour lends groups of weights (`aquifer.weights.lender`): it does not take their pages away
while they are read. Their pages are mapped here, and copied from device to device. Mapping takes
several times as long as copying. So the mapping of a group is kept for the next time, and while
nothing is loaded, the groups that are missing here are mapped ahead, a few pages at a time
(`aquifer.weights.neighbour`).

A copy counts only if the neighbour says at its end that the loan still stood. What a neighbour does
not have, refuses, or does not bring because it has died comes from another place.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from aquifer.memory.driver.base import Driver
from aquifer.weights import peer_socket
from aquifer.weights.loader import begin_copying, work_so_far
from aquifer.weights.neighbour import BATCH_PAGES, GoneError, LentGroup, Neighbour
from aquifer.weights.sources import WeightSource
from aquifer.weights.turns import TurnThread

_log = logging.getLogger(__name__)

_LEFT_OUT_S = 30.0
"""How long a neighbour that has not answered is not asked again."""

_UPCOMING_GROUPS = 8
"""How many groups to come a neighbour's pages are asked for, while those of one are mapped."""

_MOST_PAGES = 16384
"""Pages of neighbours beyond which no more are mapped ahead."""

_PAUSE_S = 0.01
"""Between two turns of mapping ahead, so that neither process is busy with it."""

_BATCH_PAUSE_S = 0.002
"""Between two batches of one turn."""

_MEET_S = 1.0
"""Between two turns in which nothing was to be mapped: new neighbours are met."""


class _Found(NamedTuple):
    """A group that a neighbour lends."""

    neighbour: Neighbour
    group: LentGroup
    loan: int


class Borrowing:
    """Groups of weights that neighbours lend for one load, and their copies.

    Args:
        thread: does all that has to do with neighbours, in order.
        found: what was found at which neighbour, by key.
        loans: what is to be given back.
        on_finished: called in that thread at the end.
    """

    def __init__(
        self,
        thread: TurnThread,
        found: Mapping[str, _Found],
        loans: Sequence[tuple[Neighbour, int]],
        on_finished: Callable[[], None],
    ) -> None:
        self._thread = thread
        self._found = found
        self._sources = {
            key: WeightSource.MAPPED
            if each.neighbour.is_open(each.group)
            else WeightSource.NEIGHBOUR
            for key, each in found.items()
        }
        self._loans = loans
        self._on_finished = on_finished
        self._order: list[str] = []  # of the copies
        self._reads: dict[str, Future[Callable[[], None]]] = {}
        self._open: list[tuple[Neighbour, LentGroup]] = []
        self._finished: frozenset[str] | None = None

    def source_of(self, key: str) -> WeightSource | None:
        """How a group would come from a neighbour; None if none lends it."""
        return self._sources.get(key)

    def read(self, key: str, target: torch.Tensor) -> None:
        """Begin to copy a group.

        Args:
            key: what it is.
            target: uint8, its bytes on this device.
        """
        after = work_so_far(target.device)
        self._order.append(key)
        self._reads[key] = self._thread.submit(self._read, key, len(self._order), target, after)

    def finish(self) -> frozenset[str]:
        """Wait for all copies, and give back what was borrowed; returns the groups that are here.

        The contents of others are any bytes, and nothing writes to them any more.
        """
        if self._finished is None:
            self._finished = self._thread.submit(self._finish).result()
        return self._finished

    def _read(
        self, key: str, number: int, target: torch.Tensor, after: torch.cuda.Event | None
    ) -> Callable[[], None]:
        """Begin a copy; returns what waits for it.

        Args:
            key: what it is.
            number: how many copies were asked for up to this one.
            target: where to.
            after: the work that it waits for.
        """
        neighbour, group = self._found[key][:2]
        if neighbour.is_gone:
            raise GoneError
        next_ones = map(self._found.__getitem__, self._order[number : number + _UPCOMING_GROUPS])
        upcoming = [each.group for each in next_ones if each.neighbour is neighbour]
        window = neighbour.open(group, upcoming)
        self._open.append((neighbour, group))
        source = window.bytes[: group.num_bytes]
        return begin_copying([(source, target)], after, stream="neighbours")

    def _finish(self) -> frozenset[str]:
        copied: list[str] = []
        try:
            for key, read in self._reads.items():
                with suppress(GoneError):
                    read.result()()
                    copied.append(key)
        finally:
            self._reads.clear()
            while self._open:
                neighbour, group = self._open.pop()
                neighbour.leave(group)
            stood = {
                (neighbour, loan) for neighbour, loan in self._loans if neighbour.give_back(loan)
            }
            self._loans = ()
            self._on_finished()
        found = ((key, self._found[key]) for key in copied)
        return frozenset(key for key, each in found if (each.neighbour, each.loan) in stood)


class Neighbours:
    """The other engine processes of this machine, as far as they lend weights.

    Args:
        folder: where the sockets of all are.
        own: this process's own.
        driver: maps their pages.
        maps_ahead: whether the pages of wanted groups are mapped before a load. Pre-condition: the
            driver sets no limit to mappings, or none would stay.

    Attributes:
        num_changes: changes when other groups are mapped, and no more are about to be.
    """

    def __init__(self, folder: Path, own: Path, driver: Driver, *, maps_ahead: bool) -> None:
        self.num_changes = 0
        self._folder = folder
        self._driver = driver
        self._left_out = {own: math.inf}  # until when, on the clock of `time.monotonic`
        self._neighbours: dict[Path, Neighbour] = {}
        self._num_borrowings = 0  # that are not finished
        self._wanted: dict[str, int] = {}  # bytes of groups that are missing here, by key
        self._mapped: frozenset[str] = frozenset()  # as it was at the last change
        self._thread = TurnThread("aquifer-borrow", self._map_ahead if maps_ahead else None)

    def start(self) -> None:
        """Start the thread that all borrowing is done in."""
        self._thread.start()

    def want(self, sizes_bytes: Mapping[str, int]) -> None:
        """Map groups ahead from now on, where a neighbour has them.

        Args:
            sizes_bytes: bytes of the parameters of each group, by key.
        """
        self._wanted.update(sizes_bytes)

    def forget(self, keys: Iterable[str]) -> None:
        """The opposite of `want`. What is mapped of them stays so."""
        for key in keys:
            self._wanted.pop(key, None)

    def has_mapped(self, key: str) -> bool:
        """Whether a group is mapped, as it was at the last change."""
        return key in self._mapped

    @property
    def num_mapped_pages(self) -> int:
        """How many pages of neighbours are mapped."""
        return sum(each.num_mapped_pages for each in list(self._neighbours.values()))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of these."""
        return sum(each.mapped_bytes for each in list(self._neighbours.values()))

    def borrow(self, sizes_bytes: Mapping[str, int]) -> Borrowing:
        """Borrow what neighbours have of some groups; to be ended with `Borrowing.finish`.

        Args:
            sizes_bytes: bytes of the parameters of each group, by key.
        """
        return self._thread.submit(self._borrow, sizes_bytes).result()

    def close(self) -> None:
        """End all connections. Pre-condition: nothing is borrowed."""
        self._thread.close()
        for neighbour in self._neighbours.values():
            neighbour.close()
        self._neighbours.clear()

    def _borrow(self, sizes_bytes: Mapping[str, int]) -> Borrowing:
        """Groups come from where they are mapped, and the others from whichever has them."""
        self._meet()
        self._num_borrowings += 1
        found: dict[str, _Found] = {}
        loans: list[tuple[Neighbour, int]] = []
        for is_mapped in (True, False):
            for neighbour in self._neighbours.values():
                wanted = sizes_bytes.keys() - found.keys()
                if is_mapped:
                    wanted = {key for key in wanted if neighbour.is_mapped(key)}
                if not wanted:
                    continue
                with suppress(GoneError):
                    loan, groups = neighbour.borrow(sorted(wanted))
                    loans.append((neighbour, loan))
                    found |= {
                        key: _Found(neighbour, group, loan)
                        for key, group in groups.items()
                        if group.num_bytes == sizes_bytes.get(key)
                    }
        return Borrowing(self._thread, found, loans, self._end_borrowing)

    def _end_borrowing(self) -> None:
        self._num_borrowings -= 1
        self._part()
        self._thread.hasten()

    def _meet(self) -> None:
        """Connect to neighbours that are new, and leave those that are gone."""
        self._part()
        for path in peer_socket.paths_in(self._folder):
            if path in self._neighbours or self._left_out.get(path, 0.0) > time.monotonic():
                continue
            try:
                self._neighbours[path] = Neighbour(path, self._driver, self._thread.hasten)
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

    # --- mapping ahead -------------------------------------------------------------------------

    def _map_ahead(self) -> float:
        """Map a few pages that are wanted; returns seconds until the next turn."""
        if self._num_borrowings:
            return _MEET_S  # or when these are finished
        self._meet()
        for neighbour in self._neighbours.values():
            keys = self._to_map(neighbour)
            with suppress(GoneError):
                if keys and neighbour.map_ahead(keys, self._goes_on):
                    return _PAUSE_S
            if neighbour.is_gone or not self._thread.is_free_for(0.0):
                self._part()
                return _PAUSE_S
        mapped = frozenset().union(*(each.mapped for each in self._neighbours.values()))
        if mapped != self._mapped:
            self._mapped = mapped
            self.num_changes += 1
        return _MEET_S

    def _to_map(self, neighbour: Neighbour) -> list[str]:
        """What of a neighbour is wanted and mapped nowhere: a group, or a few small ones."""
        keys: list[str] = []
        num_pages = 0
        left_pages = _MOST_PAGES - self.num_mapped_pages
        for group in neighbour.offered:
            if self._wanted.get(group.key) != group.num_bytes:
                continue
            if any(each.is_mapped(group.key) for each in self._neighbours.values()):
                continue
            num_pages += group.num_pages
            if num_pages > left_pages or (keys and num_pages > BATCH_PAGES):
                break
            keys.append(group.key)
        return keys

    def _goes_on(self) -> bool:
        return self._thread.is_free_for(_BATCH_PAUSE_S)
