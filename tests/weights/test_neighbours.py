"""Weights from neighbours: bytes equal, loans hold, and whatever fails leaves nothing wrong.

The neighbours are pools in one process here, which share pages through the same sockets and
descriptors as processes do. `tests/engine/test_neighbours.py` has real processes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from threading import Thread

import pytest
import torch

from aquifer.errors import DriverError
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights import peer_socket
from aquifer.weights.copies import Copies
from aquifer.weights.host_cache import HostCache
from aquifer.weights.lender import Lender
from aquifer.weights.loans import LoanBook
from aquifer.weights.neighbours import Neighbours
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.sources import SourceSpeeds, WeightSource
from aquifer.weights.store import WeightStore

PAGE, LARGE = 4096, 4 * 4096
SIZES = (9 * PAGE, 100, 5 * PAGE + 17, 70 * PAGE, 300 * PAGE + 5, 24)
NUM_PAGES = sum(-(-size // PAGE) for size in SIZES if size >= PAGE) + 1
OTHER = Owner("b", Kind.KV)
WAIT_S = 30.0


class Device(HostDriver):
    """A device that may have any number of mappings, of pages of two sizes."""

    default_page_bytes = PAGE
    large_page_bytes = LARGE
    max_mappings = None  # type: ignore[assignment]  # mappings of neighbours' pages are kept

    def __init__(self) -> None:
        super().__init__()
        self.on_adopt: Callable[[], None] = lambda: None
        self.num_adopted = 0

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        self.num_adopted += 1
        self.on_adopt()
        return super().adopt(pages)


class Use:
    """A model that is idle."""

    is_idle = True
    sensitivity = 1.0

    def probability(self, now_s: float) -> float:
        return 0.5

    def on_evict(self) -> None:
        pass


class Side:
    """An engine process, as far as it has weights of one model, filled with numbers from a seed."""

    def __init__(
        self,
        folder: Path,
        budget_pages: int = NUM_PAGES,
        *,
        maps_ahead: bool = False,
        **options: float,
    ) -> None:
        self.device = Device()
        self.driver = FaultyDriver(self.device)
        self.pool = PagePool(self.driver, budget_pages * PAGE)
        self.loans = LoanBook(self.pool)
        self.lender = Lender(self.loans, self.pool.pages, folder, **options)
        self.lender.start()
        self.neighbours = Neighbours(folder, self.lender.path, self.driver, maps_ahead=maps_ahead)
        self.neighbours.start()
        self.speeds = SourceSpeeds()
        self.host = HostCache(0, torch.device("cpu"))
        self.reuse = ReuseStore(self.host, Path("nowhere"), self.loans, self.neighbours)
        parameters = [Parameter(str(i), (size,), torch.uint8, ()) for i, size in enumerate(SIZES)]
        self.store = WeightStore(self.pool, Owner("m", Kind.WEIGHTS), parameters)
        keys = {group: " ".join(group.names) for group in self.store.groups}
        self.member = self.reuse.register(self.store, Use(), {}, keys)

    def expected(self, group: ParameterGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(group.names[0]) + int(group.names[0]))
        shape = (self.store.num_bytes_of(group),)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    def copies(self) -> Copies:
        missing = {group: self.member.keys[group] for group in self.reuse.missing(self.member)}
        return Copies(self.host, self.neighbours, self.store, missing, self.speeds)

    def load(self) -> dict[WeightSource, int]:
        """Load what is missing; returns the number of groups by their sources."""
        copies = self.copies()
        missing = self.reuse.populate(self.member, copies)
        assert missing is not None
        lost = copies.finish()
        for group in missing:
            if copies.source_of(group) is WeightSource.DISK:
                self.store.bytes_of(group).copy_(self.expected(group))
        self.reuse.filled(self.member, missing)
        sources = [copies.source_of(group) for group in missing]
        assert all(copies.source_of(group) is WeightSource.DISK for group in lost)
        return {source: sources.count(source) for source in sources}

    def evict(self, groups: Sequence[ParameterGroup] | None = None) -> None:
        self.reuse.evict(self.member, groups)

    def check(self) -> None:
        """What is there has its contents, and each page is accounted for."""
        for group in self.store.resident:
            assert torch.equal(self.store.bytes_of(group), self.expected(group))
        self.pool.check()
        assert not self.loans.has_loans
        in_use_bytes = self.pool.usage().in_use_bytes
        assert in_use_bytes.get(self.store.owner, 0) == self.store.resident_bytes

    def close(self) -> None:
        self.evict()
        self.store.close()
        self.neighbours.close()
        self.lender.close()
        self.pool.close()
        assert self.driver.is_unused
        self.driver.close()


Make = Callable[..., Side]


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    folder = tmp_path_factory.mktemp("s")
    with ExitStack() as resources:

        def make_it(**options: float) -> Side:
            side = Side(folder, **options)  # type: ignore[arg-type]
            resources.callback(side.close)
            return side

        yield make_it
    assert list(peer_socket.paths_in(folder)) == []


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


NUM_GROUPS = sum(size >= PAGE for size in SIZES) + 1


def test_what_a_neighbour_has_comes_from_there(make: Make):
    """Pages of two sizes, more of one group than a message has descriptors; again and again."""
    lender, borrower = make(), make()
    assert lender.load() == {WeightSource.DISK: NUM_GROUPS}
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    borrower.check()
    num_adopted = borrower.device.num_adopted
    for _ in range(3):  # with the mappings of the first time
        borrower.evict(borrower.store.groups[1:])
        assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS - 1}
        borrower.check()
        lender.check()
    assert borrower.device.num_adopted == num_adopted
    lender.evict()
    until(lambda: not borrower.driver.live_handles & adopted(borrower))
    assert lender.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    lender.check()


def adopted(side: Side) -> set[Handle]:
    """Pages of neighbours that are open."""
    return {handle for handle in side.driver.live_handles if handle >= 1 << 64}


def test_pages_of_a_process_that_ends_are_unmapped(make: Make):
    """At once: their memory is in use until then, and another process may need it."""
    lender, borrower = make(), make()
    lender.load()
    borrower.load()
    assert adopted(borrower)
    lender.lender.close()
    until(lambda: not adopted(borrower))
    borrower.evict()
    assert borrower.load() == {WeightSource.DISK: NUM_GROUPS}


def test_each_group_comes_from_whichever_has_it(make: Make):
    first, second, third = make(), make(), make()
    first.load()
    second.load()
    first.evict(first.store.groups[:2])
    second.evict(second.store.groups[2:])
    third.host = HostCache(1 << 20, torch.device("cpu"))
    assert third.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    third.check()
    second.evict()
    third.evict()
    for group in third.store.groups[:1]:
        key = third.member.keys[group]
        assert third.host.keep(key, third.expected(group), lambda: 0.5)
    assert third.load() == {
        WeightSource.HOST: 1,
        WeightSource.DISK: 1,
        WeightSource.NEIGHBOUR: NUM_GROUPS - 2,
    }
    for side in (first, second, third):
        side.check()
    third.host.close()


def test_what_is_lent_stays_while_the_lender_evicts_it(make: Make):
    """Its pages go to nobody else before the copy is done, however short the lender is."""
    lender, borrower = make(), make()
    lender.load()
    free_bytes: list[int] = []

    def evict_and_overwrite() -> None:
        lender.evict()
        while (pages := lender.pool.acquire(OTHER, 1)) is not None:
            lender.pool.pages.fill(pages, 0xEE)
            taken.extend(pages)
        free_bytes.append(lender.pool.free_bytes)
        borrower.device.on_adopt = lambda: None

    taken: list[int] = []
    borrower.device.on_adopt = evict_and_overwrite
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    borrower.check()
    assert (free_bytes, taken) == ([0], [])  # all of it was lent
    lender.check()
    assert lender.pool.free_bytes == lender.pool.budget_bytes
    until(lambda: not adopted(borrower))


def test_a_neighbour_that_goes_in_the_middle(make: Make):
    """What has come until then does not count, and all of it comes from elsewhere."""
    for at in range(4):
        lender, borrower = make(), make()
        lender.load()
        count = at

        def go() -> None:
            nonlocal count
            count -= 1
            if count == -1:
                lender.lender.close()  # noqa: B023

        borrower.device.on_adopt = go
        sources = borrower.load()
        assert count < 0
        assert sources == {WeightSource.DISK: NUM_GROUPS}
        borrower.check()
        lender.check()
        assert not adopted(borrower)
        borrower.lender.close()


@pytest.mark.parametrize("refuses", ["lender", "borrower"])
def test_a_device_that_refuses_any_call(make: Make, refuses: str):
    """Own pages, or those of the neighbour: the load fails and nothing has changed, or it succeeds
    with what is right. If it was about the neighbour's, that one is not asked any more."""
    failed = set()
    for number in range(1000):
        lender, borrower = make(), make()
        lender.load()
        driver = (lender if refuses == "lender" else borrower).driver
        driver.fail_at = driver.num_calls + number
        try:
            sources = borrower.load()
        except DriverError:
            assert not borrower.store.resident
        else:
            assert sum(sources.values()) == NUM_GROUPS
            if driver.failed_call is not None:
                assert sources[WeightSource.DISK]
        borrower.check()
        lender.check()
        if driver.failed_call is None:
            break
        driver.fail_at = None
        failed.add(driver.failed_call)
        borrower.evict()
        sources = borrower.load()
        assert set(sources) <= {WeightSource.DISK, WeightSource.NEIGHBOUR}
        if driver.failed_call == "adopt":
            assert sources == {WeightSource.DISK: NUM_GROUPS}
        borrower.check()
        for side in (borrower, lender):
            side.evict()
            side.lender.close()
    else:
        pytest.fail("it refused more calls than there are")
    assert failed == ({"export"} if refuses == "lender" else {"create", "map", "reserve", "adopt"})


def test_a_loan_that_lasts_too_long(make: Make):
    """It ends, and the copy does not count."""
    lender, borrower = make(longest_s=0.05), make()
    lender.load()
    borrower.device.on_adopt = lambda: until(lambda: not lender.loans.has_loans)
    assert borrower.load() == {WeightSource.DISK: NUM_GROUPS}
    borrower.check()
    lender.check()


def test_while_lending_is_paused_nothing_is_lent(make: Make):
    """It begins when what was lent has been given back."""
    lender, borrower = make(), make()
    lender.load()
    found: list[bool] = []

    def pause() -> None:
        with lender.reuse.lending_paused():
            found.append(lender.reuse.has_loans)

    thread = Thread(target=pause)
    borrower.device.on_adopt = lambda: None if thread.ident else thread.start()
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    thread.join()
    assert found == [False]
    borrower.evict()
    with lender.reuse.lending_paused(), lender.reuse.lending_paused():
        assert borrower.load() == {WeightSource.DISK: NUM_GROUPS}
    borrower.evict()
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}


def test_a_process_that_was_killed_is_forgotten(make: Make, tmp_path: Path):
    """It has left its socket."""
    lender, borrower = make(), make()
    lender.load()
    dead, path = peer_socket.listen(lender.lender.path.parent)
    dead.close()
    assert path.exists()
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    assert not path.exists()


@pytest.mark.parametrize(
    "body",
    [b"{}", b"?", b'["open"]', b'["open", 1, 0, 1]', b'["borrow", [[]]]', b'["return", {}]', None],
)
def test_a_connection_that_sends_nonsense_is_ended(make: Make, body: bytes | None):
    """And others are served."""
    lender, borrower = make(), make()
    lender.load()
    with peer_socket.connect(lender.lender.path, WAIT_S) as connection:
        sent = b"\xff" * 4 if body is None else len(body).to_bytes(4, "big") + body
        connection.sendall(sent)
        assert connection.recv(1) == b""
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    borrower.check()
    lender.check()


def test_messages_with_descriptors():
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].settimeout(WAIT_S)
        files = [os.memfd_create(str(i)) for i in range(peer_socket.MOST_FILES)]
        for number, file in enumerate(files):
            os.write(file, bytes([number]))
        for _ in range(3):
            peer_socket.send(ends[0], ["many", [1, 2]], files)
            peer_socket.send(ends[0], ["none"])
        for _ in range(3):
            message, received = peer_socket.receive(ends[1])
            assert message == ["many", [1, 2]]
            assert [os.pread(file, 1, 0)[0] for file in received] == list(range(len(files)))
            peer_socket.close_files(received)
            assert peer_socket.receive(ends[1]) == (["none"], [])
        peer_socket.close_files(files)
        ends[0].close()
        with pytest.raises(EOFError):
            peer_socket.receive(ends[1])


def test_random_loads_and_evictions(make: Make):
    """Of three processes, one of which is replaced now and then."""
    random = Random(4)
    sides = [make() for _ in range(3)]
    totals = dict.fromkeys(WeightSource, 0)
    for _ in range(60):
        number = random.randrange(3)
        side = sides[number]
        if random.random() < 0.1:
            side.evict()
            side.lender.close()
            sides[number] = make()
            continue
        side.evict(random.sample(side.store.groups, random.randrange(len(side.store.groups) + 1)))
        if random.random() < 0.7:
            for source, count in side.load().items():
                totals[source] += count
        side.check()
    assert totals[WeightSource.NEIGHBOUR] > totals[WeightSource.DISK] > 0
    for side in sides:
        side.evict()
    for side in sides:
        until(lambda: not adopted(side))  # noqa: B023
