"""Host memory for swapping: its size, memory that comes in pieces, and a host that refuses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from aquifer.cache import swap_memory
from aquifer.cache.swap import SwapSpace
from aquifer.cache.swap_memory import SwapMemory
from aquifer.errors import DriverError
from aquifer.memory import host_buffer
from aquifer.memory.host_buffer import HostBuffer, in_pieces

CPU = torch.device("cpu")
ALIGN_BYTES = 4096
PIECE_BYTES = 4 * ALIGN_BYTES
MORE_THAN_ANY_HOST = 1 << 60
GIVE_UP_S = 60


@pytest.mark.parametrize("num_regions", [0, 1, 2])
def test_only_whole_regions_count(num_regions: int) -> None:
    """A space smaller than one region is no space, and never asks for memory of no bytes."""
    for num_bytes in (num_regions * ALIGN_BYTES, (num_regions + 1) * ALIGN_BYTES - 1):
        space = SwapSpace(num_bytes, CPU)
        assert space.num_bytes == num_regions * ALIGN_BYTES
        assert space.prepare() == (num_regions > 0)
        assert not space.wait_for_more()
        assert space.bytes_per_s > 0
        space.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # for the latter a thread takes the memory
def test_a_host_that_refuses_is_asked_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    space = SwapSpace(MORE_THAN_ANY_HOST, torch.device(device))
    assert space.num_bytes == MORE_THAN_ANY_HOST
    assert [space.prepare() for _ in range(3)] == [False] * 3
    assert not space.wait_for_more()
    assert (space.num_bytes, space.used_bytes) == (0, 0)
    (record,) = caplog.records
    assert "--swap-space" in record.getMessage()
    space.close()


class Locker:
    """Stands for CUDA's runtime: locks pieces, each when the test says so, up to a bound."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.locked: list[tuple[int, int]] = []  # addresses and sizes
        self.unlocked: list[int] = []
        self.turns = threading.Semaphore(0)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert self.turns.acquire(timeout=GIVE_UP_S)
        if len(self.locked) == self.most:
            return 2
        self.locked.append((address, num_bytes))
        return flags

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unlocked.append(address)
        return 0


@pytest.fixture
def locker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locker]:
    """A device that needs locked memory."""
    locker = Locker(1 << 30)
    monkeypatch.setattr(host_buffer, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locker)
    monkeypatch.setattr(swap_memory, "make_current", lambda device: None)
    monkeypatch.setattr(swap_memory, "_copy_rate", lambda part, device: 5e9)
    yield locker
    assert locker.unlocked == [address for address, _ in locker.locked]


def test_memory_is_used_as_it_comes(locker: Locker) -> None:
    begun: list[None] = []
    space = SwapSpace(
        5 * PIECE_BYTES, torch.device("cuda"), 1e9, on_begin=lambda: begun.append(None)
    )
    assert not begun
    assert not space.prepare()
    assert not space.prepare()
    assert begun == [None]
    assert (space.used_bytes, space.bytes_per_s) == (0, 1e9)
    memory = space.memory
    for num in range(1, 6):
        locker.turns.release()
        assert space.wait_for_more()
        assert space.prepare()
        assert (memory.there_bytes, space.used_bytes) == (num * PIECE_BYTES, 0)
        assert space.bytes_per_s == 5e9
        assert space.free_bytes == num * PIECE_BYTES
    assert not space.wait_for_more()
    assert {size for _, size in locker.locked} == {PIECE_BYTES}
    space.close()


def test_what_the_host_has_locked_before_it_refused_is_used(
    locker: Locker, caplog: pytest.LogCaptureFixture
) -> None:
    locker.most = 2
    space = SwapSpace(5 * PIECE_BYTES, torch.device("cuda"))
    space.prepare()
    locker.turns.release(3)
    while space.wait_for_more():
        pass
    assert space.prepare()
    assert (space.num_bytes, space.used_bytes) == (2 * PIECE_BYTES, 0)
    assert space.free_bytes == 2 * PIECE_BYTES
    (record,) = caplog.records
    assert "--swap-space" in record.getMessage()
    with pytest.raises(DriverError):
        space.memory.part(2 * PIECE_BYTES, 1)
    space.close()


def test_a_rank_uses_what_the_host_does_not_let_be_locked(
    locker: Locker, caplog: pytest.LogCaptureFixture
) -> None:
    locker.most = 1
    memory = SwapMemory(3 * PIECE_BYTES, torch.device("cuda"), uses_all=True)
    memory.begin()
    locker.turns.release(2)
    part = memory.part(PIECE_BYTES - 1, 2 * PIECE_BYTES + 1)
    part.fill_(7)
    assert (memory.there_bytes, memory.error) == (3 * PIECE_BYTES, None)
    assert len(locker.locked) == 1
    (record,) = caplog.records
    assert "are slower" in record.getMessage()
    memory.close()


def test_a_device_that_fails_keeps_nobody_waiting(
    locker: Locker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(swap_memory, "make_current", fail)
    space = SwapSpace(5 * PIECE_BYTES, torch.device("cuda"))
    space.prepare()
    assert not space.wait_for_more()
    assert space.num_bytes == 0
    assert locker.locked == []
    space.close()


def test_a_part_is_waited_for(locker: Locker) -> None:
    memory = SwapMemory(3 * PIECE_BYTES, torch.device("cuda"))
    found: list[torch.Tensor] = []
    waiting = threading.Thread(
        target=lambda: found.append(memory.part(PIECE_BYTES - 1, PIECE_BYTES))
    )
    waiting.start()
    locker.turns.release(1)
    assert memory.wait(PIECE_BYTES)
    assert not found
    locker.turns.release(1)
    waiting.join(GIVE_UP_S)
    (part,) = found
    assert len(part) == PIECE_BYTES
    assert part.data_ptr() == locker.locked[0][0] + PIECE_BYTES - 1
    locker.turns.release(1)  # the thread ends
    memory.close()


@pytest.mark.parametrize(
    ("start", "num_bytes", "sizes"),
    [
        (0, PIECE_BYTES, [PIECE_BYTES]),
        (1, PIECE_BYTES, [PIECE_BYTES - 1, 1]),
        (PIECE_BYTES - 1, PIECE_BYTES + 2, [1, PIECE_BYTES, 1]),
        (PIECE_BYTES, 5, [5]),
        (7, 0, []),
    ],
)
def test_copies_are_cut_where_pieces_end(
    monkeypatch: pytest.MonkeyPatch, start: int, num_bytes: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(host_buffer, "PIECE_BYTES", PIECE_BYTES)
    buffer = HostBuffer(3 * PIECE_BYTES, CPU)
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    target = buffer.bytes[start : start + num_bytes]
    pairs = list(in_pieces(target, source))
    assert [len(host) for host, _ in pairs] == [len(other) for _, other in pairs] == sizes
    for host, other in pairs:
        host.copy_(other)
    assert torch.equal(target, source)
    buffer.close()
