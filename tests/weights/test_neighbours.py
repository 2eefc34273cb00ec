"""Weights from neighbours: bytes equal, loans hold, and whatever fails leaves nothing wrong.

The neighbours are pools in one process here, which share pages through the same sockets and
descriptors as processes do. `tests/engine/test_neighbours.py` has real processes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from threading import Event, Thread

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
from aquifer.weights.neighbour import Neighbour
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
    costs_version = None

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
        self.is_mapped_ahead = maps_ahead
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
        while (missing := self.reuse.populate(self.member, copies := self.copies())) is None:
            assert self.is_mapped_ahead  # and a neighbour has what was evicted until now
            until(lambda: not self.loans.has_loans)
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
        """What is there has its contents, and each page is accounted for.

        What others map ahead is lent for a moment.
        """
        for group in self.store.resident:
            assert torch.equal(self.store.bytes_of(group), self.expected(group))
        self.pool.check()

        def is_exact() -> bool:
            in_use_bytes = self.pool.usage().in_use_bytes.get(self.store.owner, 0)
            return in_use_bytes == self.store.resident_bytes and not self.loans.has_loans

        if self.is_mapped_ahead:
            until(is_exact)
        assert is_exact()

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


def num_handles(store: WeightStore, groups: Iterable[ParameterGroup]) -> int:
    """Number of pages of groups, of all sizes."""
    return sum(len(pages) // size for group in groups for size, pages in group.stretches)


def test_what_a_neighbour_has_comes_from_there(make: Make):
    """Pages of two sizes, more of one group than a message has descriptors; again and again."""
    lender, borrower = make(), make()
    assert lender.load() == {WeightSource.DISK: NUM_GROUPS}
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    borrower.check()
    num_adopted = borrower.device.num_adopted
    for _ in range(3):  # with the mappings of the first time
        borrower.evict(borrower.store.groups[1:])
        assert borrower.load() == {WeightSource.MAPPED: NUM_GROUPS - 1}
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
        WeightSource.MAPPED: NUM_GROUPS - 2,
    }
    for side in (first, second, third):
        side.check()
    third.host.close()


def test_what_is_lent_stays_while_the_lender_evicts_it(make: Make):
    """No other owner gets lent pages before the copy is done, even if memory is short."""
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
        assert WeightSource.HOST not in sources
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
    assert borrower.load() == {WeightSource.MAPPED: NUM_GROUPS}


def test_a_process_that_was_killed_is_forgotten(make: Make, tmp_path: Path):
    """It has left its socket."""
    lender, borrower = make(), make()
    lender.load()
    dead, path = peer_socket.listen(lender.lender.path.parent)
    dead.close()
    assert path.exists()
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    assert not path.exists()


def test_a_folder_that_goes_while_a_process_begins_to_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last process that listened there ends."""
    make_folder = Path.mkdir

    def make_and_lose(self: Path, mode: int, *, exist_ok: bool) -> None:
        make_folder(self, mode, exist_ok=exist_ok)
        monkeypatch.undo()
        peer_socket.forget(self, 1)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    listener, path = peer_socket.listen(tmp_path / "s")
    listener.close()
    assert list(peer_socket.paths_in(tmp_path / "s")) == [path]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"?",
        b'["open"]',
        b'["open", 1, 0, 1]',
        b'["borrow", [[]]]',
        b'["return", {}]',
        b"[" * 10**6,
        None,
    ],
)
def test_a_connection_that_sends_nonsense_is_ended(make: Make, body: bytes | None):
    """And others are served."""
    lender, borrower = make(), make()
    lender.load()
    with peer_socket.connect(lender.lender.path, WAIT_S) as connection:
        sent = b"\xff" * 4 if body is None else len(body).to_bytes(4, "big") + body
        connection.sendall(sent)
        while connection.recv(4096):  # what is offered comes first
            pass
    assert borrower.load() == {WeightSource.NEIGHBOUR: NUM_GROUPS}
    borrower.check()
    lender.check()


def test_what_is_mapped_ahead_is_used(make: Make):
    """A load maps nothing then. What is mapped stays so, until the lender evicts it."""
    lender, borrower = make(), make(maps_ahead=True)
    groups = lender.store.groups
    lender.load()
    until(lambda: borrower.neighbours.num_mapped_pages == num_handles(lender.store, groups))
    assert len(adopted(borrower)) == borrower.neighbours.num_mapped_pages
    assert borrower.neighbours.mapped_bytes == lender.store.resident_bytes
    num_adopted = borrower.device.num_adopted
    for _ in range(2):
        assert borrower.load() == {WeightSource.MAPPED: NUM_GROUPS}
        borrower.check()
        borrower.evict()
    assert borrower.device.num_adopted == num_adopted
    until(lambda: all(map(borrower.neighbours.has_mapped, lender.member.keys.values())))
    lender.check()
    lender.evict(groups[2:])
    left = num_handles(lender.store, groups[:2])
    until(lambda: borrower.neighbours.num_mapped_pages == left)
    until(lambda: not borrower.neighbours.has_mapped(lender.member.keys[groups[2]]))
    assert borrower.neighbours.has_mapped(lender.member.keys[groups[0]])
    assert len(adopted(borrower)) == left
    assert lender.pool.usage().in_use_bytes == {lender.store.owner: lender.store.resident_bytes}
    assert borrower.load() == {WeightSource.MAPPED: 2, WeightSource.DISK: NUM_GROUPS - 2}
    borrower.check()
    lender.lender.close()
    until(lambda: not adopted(borrower))
    assert borrower.neighbours.num_mapped_pages == borrower.neighbours.mapped_bytes == 0


def test_only_what_is_missing_is_mapped_ahead(make: Make):
    """Once, from any that has it."""
    borrower = make(maps_ahead=True)
    borrower.load()
    first, second = make(), make()
    first.load()
    second.load()
    groups = borrower.store.groups

    def is_mapped(some: Sequence[ParameterGroup]) -> bool:
        has = [borrower.neighbours.has_mapped(borrower.member.keys[group]) for group in groups]
        return has == [group in some for group in groups]

    for some in (groups[1:2], groups):
        borrower.evict(some)
        until(lambda: is_mapped(some))  # noqa: B023
        assert len(adopted(borrower)) == num_handles(borrower.store, some)
    first.evict(first.store.groups[:2])
    second.evict(second.store.groups[:1])
    until(lambda: is_mapped(groups[1:]))
    assert len(adopted(borrower)) == num_handles(borrower.store, groups[1:])
    assert borrower.load() == {WeightSource.MAPPED: NUM_GROUPS - 1, WeightSource.DISK: 1}
    borrower.check()


def test_no_more_is_mapped_ahead_than_may_be(make: Make, monkeypatch: pytest.MonkeyPatch):
    """A load maps the rest."""
    lender = make()
    lender.load()
    by_use = lender.store.by_use
    most_pages = num_handles(lender.store, by_use[:3]) + 1
    monkeypatch.setattr("aquifer.weights.neighbours._MOST_PAGES", most_pages)
    borrower = make(maps_ahead=True)
    until(lambda: borrower.neighbours.num_changes > 0)
    assert borrower.neighbours.num_mapped_pages == most_pages - 1
    assert borrower.load() == {WeightSource.MAPPED: 3, WeightSource.NEIGHBOUR: NUM_GROUPS - 3}
    borrower.check()


def test_a_neighbour_that_goes_while_its_pages_are_mapped_ahead(make: Make):
    for at in range(3):
        lender, borrower = make(), make(maps_ahead=True)
        count, is_gone = at, Event()

        def go() -> None:
            nonlocal count
            count -= 1
            if count == -1:
                lender.lender.close()  # noqa: B023
                is_gone.set()  # noqa: B023

        borrower.device.on_adopt = go
        lender.load()
        assert is_gone.wait(WAIT_S)
        until(lambda: not adopted(borrower))  # noqa: B023
        assert borrower.load() == {WeightSource.DISK: NUM_GROUPS}
        borrower.check()
        lender.check()
        borrower.lender.close()


def test_a_device_that_refuses_to_map_ahead(make: Make):
    """That neighbour is not asked any more."""
    lender, borrower = make(), make(maps_ahead=True)
    borrower.driver.fail_at = borrower.driver.num_calls + 4
    lender.load()
    until(lambda: borrower.driver.failed_call is not None)
    until(lambda: not adopted(borrower))
    assert borrower.load() == {WeightSource.DISK: NUM_GROUPS}
    borrower.check()
    lender.check()


def test_mapping_ahead_stops_for_a_load(make: Make):
    """Within a group: nothing of it stays mapped, and it is mapped by the load."""
    lender, borrower = make(), make()
    lender.load()
    key = lender.member.keys[lender.store.groups[3]]
    neighbour = Neighbour(lender.lender.path, borrower.driver, lambda: None)
    for num_batches in (0, 1, 3):
        answers = iter([True] * num_batches + [False])
        assert not neighbour.map_ahead([key], lambda: next(answers))  # noqa: B023
        assert next(answers, None) is None
        assert not adopted(borrower)
        until(lambda: not lender.loans.has_loans)
    assert neighbour.map_ahead([key], lambda: True)
    assert neighbour.mapped == {key}
    loan, groups = neighbour.borrow([key])
    assert neighbour.is_open(groups[key])
    assert neighbour.give_back(loan)
    neighbour.close()
    assert not adopted(borrower)


def test_pages_are_asked_for_while_others_are_mapped(make: Make):
    """What was asked for and is not wanted any more is left, and descriptors are closed."""
    lender, borrower = make(), make()
    lender.load()
    num_files = len(os.listdir("/proc/self/fd"))
    neighbour = Neighbour(lender.lender.path, borrower.driver, lambda: None)
    loan, groups = neighbour.borrow(lender.member.keys.values())
    lent = list(groups.values())
    for number, group in enumerate(lent[:2]):
        window = neighbour.open(group, lent[number + 1 :])
        (own,) = (each for each, key in lender.member.keys.items() if key == group.key)
        expected = lender.expected(own)
        assert torch.equal(window.bytes[: group.num_bytes], expected)
        del window
        neighbour.leave(group)
    assert neighbour.give_back(loan)
    assert not lender.loans.has_loans
    neighbour.close()
    until(lambda: len(os.listdir("/proc/self/fd")) == num_files)


def test_a_group_that_is_renamed_is_found_by_its_new_key(make: Make):
    lender, borrower = make(), make(maps_ahead=True)
    lender.load()
    group = lender.store.groups[0]
    old, new = lender.member.keys[group], "renamed"
    until(lambda: borrower.neighbours.num_mapped_pages > 0 and borrower.neighbours.num_changes > 0)
    lender.loans.rename(old, new)
    (renamed,) = lender.loans.lend([old, new])
    assert renamed.key == new
    assert lender.loans.is_lent([new])
    lender.loans.end([renamed])
    rest = num_handles(lender.store, lender.store.groups[1:])
    until(lambda: borrower.neighbours.num_mapped_pages == rest)
    assert borrower.load() == {WeightSource.MAPPED: NUM_GROUPS - 1, WeightSource.DISK: 1}
    borrower.check()


def test_a_group_that_is_renamed_stays_lent(make: Make):
    """Each loan is ended once, whatever the group was called when it began."""
    lender = make()
    lender.load()
    group = lender.store.groups[0]
    old, new = lender.member.keys[group], "renamed"
    before = lender.loans.lend([old])
    lender.loans.rename(old, new)
    lender.member.keys[group] = new
    assert lender.reuse.is_lent(lender.member)
    assert not lender.loans.is_lent([old])
    after = lender.loans.lend([new])
    lender.loans.end(before)
    assert lender.loans.is_lent([new])
    lender.loans.end(after)
    assert not lender.loans.has_loans
    lender.loans.rename(new, old)
    lender.member.keys[group] = old
    lender.check()


def test_two_loads_at_once_borrow_the_same_groups(make: Make):
    """Each ends its own loan, and the pages stay mapped for the other one."""
    lender, borrower = make(), make()
    lender.load()
    group = lender.store.groups[0]
    key, num_bytes = lender.member.keys[group], lender.store.num_bytes_of(group)
    first, second = (borrower.neighbours.borrow({key: num_bytes}) for _ in range(2))
    targets = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
    first.read(key, targets[0])
    second.read(key, targets[1])
    assert first.finish() == {key}
    assert lender.loans.is_lent([key])
    assert second.finish() == {key}
    assert first.finish() == {key}
    assert all(torch.equal(target, lender.expected(group)) for target in targets)
    assert not lender.loans.has_loans
    lender.check()
    borrower.check()


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


@pytest.mark.parametrize("maps_ahead", [False, True])
def test_random_loads_and_evictions(make: Make, maps_ahead: bool):
    """Random loads and evictions in three processes, while one of them is replaced now and then."""
    random = Random(4)
    sides = [make(maps_ahead=maps_ahead) for _ in range(3)]
    totals = dict.fromkeys(WeightSource, 0)
    for _ in range(60):
        number = random.randrange(3)
        side = sides[number]
        if random.random() < 0.1:
            side.evict()
            side.lender.close()
            sides[number] = make(maps_ahead=maps_ahead)
            continue
        side.evict(random.sample(side.store.groups, random.randrange(len(side.store.groups) + 1)))
        if random.random() < 0.7:
            for source, count in side.load().items():
                totals[source] += count
        side.check()
    neighbours = totals[WeightSource.NEIGHBOUR], totals[WeightSource.MAPPED]
    assert min(neighbours) > 0 < totals[WeightSource.DISK] < sum(neighbours)
    for side in sides:
        side.evict()
    for side in sides:
        until(lambda: not adopted(side))  # noqa: B023


def test_a_folder_that_others_can_open_is_not_used(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    listener, path = peer_socket.listen(folder)
    assert list(peer_socket.paths_in(folder)) == [path]
    listener.close()
    peer_socket.forget(folder, os.getpid() + 1)
    assert path.exists()
    peer_socket.forget(folder, os.getpid())
    assert not folder.exists()
    folder.mkdir(0o750)
    link.symlink_to(folder)
    for each in (folder, link):
        with pytest.raises(PermissionError, match="only this user"):
            peer_socket.listen(each)
