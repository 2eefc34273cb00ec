"""Inboxes of ranks: each maps those of all others, or none does."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from aquifer.errors import DriverError
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.driver.host import HostDriver
from aquifer.parallel.peer_memory import PeerMemory, open_peer_memory


class RefusingDriver(HostDriver):
    """Cannot map pages of other processes."""

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        raise DriverError("NOT_SUPPORTED", "could not import a page")


class FullDriver(HostDriver):
    """Has no memory left."""

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        raise DriverError("OUT_OF_MEMORY", f"could not create {count} pages")


def opened(folder: Path, drivers: list[Callable[[], HostDriver]]) -> list[PeerMemory | None]:
    """What the ranks of a group open, each in a thread."""
    size = len(drivers)
    barrier, votes = Barrier(size), [False] * size

    def of_rank(rank: int) -> PeerMemory | None:
        def all_agree(own: bool) -> bool:
            votes[rank] = own
            barrier.wait()
            result = all(votes)
            barrier.wait()
            return result

        return open_peer_memory(rank, size, drivers[rank], folder, all_agree)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_rank_writes_is_in_the_inbox_of_another(size: int, tmp_path: Path) -> None:
    before = num_files()
    memories = opened(tmp_path, [HostDriver] * size)
    drivers = HostDriver()
    for memory in memories:
        assert memory is not None
        ours = memory.inboxes
        assert (ours.size, ours.inbox.data_ptr()) == (size, int(ours.addresses[ours.rank]))
        assert not ours.inbox.any()
        assert not ours.stop.any()
        slices = len(ours.message_epochs), len(ours.data_epochs)
        assert ours.inbox.nbytes >= ours.inbox_bytes(size, *slices)
    for memory in memories:
        assert memory is not None
        ours = memory.inboxes
        for other in range(size):
            there = drivers.view(int(ours.addresses[other]), 8 * size).view(torch.int64)
            there[ours.rank] = 100 + ours.rank
    for memory in memories:
        assert memory is not None
        assert memory.inboxes.inbox[:size].tolist() == [100 + rank for rank in range(size)]
        memory.stop()
        assert memory.inboxes.stop.tolist() == [1]
    for memory in memories:
        assert memory is not None
        memory.close()
    drivers.close()
    assert num_files() == before


@pytest.mark.parametrize("driver", [RefusingDriver, FullDriver])
def test_none_uses_it_if_one_cannot(
    driver: Callable[[], HostDriver], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = num_files()
    assert opened(tmp_path, [HostDriver, driver, HostDriver]) == [None] * 3
    assert num_files() == before
    (record,) = caplog.records
    assert "NCCL adds up all: " in record.getMessage()
