"""Inboxes of ranks in the memory of their GPUs, which the other ranks write to."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import torch

from aquifer.errors import DriverError
from aquifer.kernels.all_reduce import DATA_SLICE_WORDS, SLICE_WORDS, PeerInboxes
from aquifer.memory.driver.base import Driver, ExportedPages
from aquifer.memory.window import Window
from aquifer.weights import peer_socket

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_MESSAGE_BYTES = 512 << 10
"""Largest tensor of two ranks that is sent as messages. Of more ranks it is smaller, as each sends
to all others."""

_DATA_BYTES = 64 << 20
"""Largest tensor of two ranks that is sent as data."""

_MANY_DATA_BYTES = 4 << 20
"""The same of more ranks, divided as that of messages is: NCCL sends less of large tensors then."""

_ANSWER_S = 60.0
"""How long another rank may take: it comes when it has opened its own inbox."""


class PeerMemory:
    """The inbox of a rank, mapped by all others, and theirs, mapped here.

    They are outside of the pool, as NCCL's buffers are. `open_peer_memory` makes it.

    Args:
        rank: number of this one.
        size: number of ranks.
        driver: makes and maps pages on this rank's device; closed with this.
        folder: where the ranks meet, the same for all; each makes a file there.

    Raises:
        DriverError: there is not so much memory; nothing is left.
        OSError: the file cannot be made; likewise.
    """

    inboxes: PeerInboxes

    def __init__(self, rank: int, size: int, driver: Driver, folder: Path) -> None:
        self._rank = rank
        self._size = size
        self._driver = driver
        self._folder = folder
        data_bytes = _DATA_BYTES if size == 2 else _MANY_DATA_BYTES // (size - 1)
        self._message_slices = _MESSAGE_BYTES // (size - 1) // (SLICE_WORDS * 4)
        self._data_slices = data_bytes // (DATA_SLICE_WORDS * 4)
        inbox_bytes = PeerInboxes.inbox_bytes(size, self._message_slices, self._data_slices)
        self._page_bytes = -(-inbox_bytes // driver.granularity_bytes) * driver.granularity_bytes
        with ExitStack() as undo:
            undo.callback(driver.close)
            self._handles = driver.create(self._page_bytes, 1)
            self._address = driver.reserve(self._page_bytes)
            driver.map(self._address, self._handles)
            self._listener = undo.enter_context(closing(socket.socket(socket.AF_UNIX)))
            self._listener.settimeout(_ANSWER_S)
            self._listener.bind(str(self._path(rank)))
            self._listener.listen(size)
            self._undo = undo.pop_all()

    def meet(self) -> PeerInboxes:
        """Exchange the inboxes with all other ranks. Pre-condition: each has made its own.

        Raises:
            DriverError: the devices cannot map each other's memory.
            OSError: another rank does not answer.
        """
        device = self._driver.device
        addresses = [self._address] * self._size
        with ExitStack() as files:
            for other, pages in self._exchanged(files).items():
                window = Window(self._driver, self._page_bytes, [pages])
                self._undo.callback(window.close)
                addresses[other] = window.bytes.data_ptr()
        self.inboxes = PeerInboxes(
            self._rank,
            self._driver.view(self._address, self._page_bytes).view(torch.int64),
            torch.tensor(addresses, dtype=torch.int64).to(device),
            torch.zeros(self._message_slices, dtype=torch.int32, device=device),
            torch.zeros(self._data_slices, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )
        return self.inboxes

    def stop(self) -> None:
        """Let kernels that wait for another rank end; what they return from now on is wrong."""
        self.inboxes.stop[0] = 1

    def close(self) -> None:
        """Release all. Pre-condition: no kernel that uses it runs."""
        self._undo.close()

    def _path(self, rank: int) -> Path:
        """The socket at which a rank hands out its inbox."""
        return self._folder / f"inbox-{rank}"

    def _exchanged(self, files: ExitStack) -> dict[int, ExportedPages]:
        """The pages of each other rank, while own ones are sent to all of them.

        Args:
            files: closes their descriptors.
        """
        others = [other for other in range(self._size) if other != self._rank]
        found: dict[int, ExportedPages] = {}
        with ExitStack() as stack:
            own = self._driver.export(self._handles)
            stack.callback(peer_socket.close_files, own.files)
            # A connection is made before the other rank accepts it, so none waits for another here.
            connections = {
                other: stack.enter_context(
                    closing(peer_socket.connect(self._path(other), _ANSWER_S))
                )
                for other in others
            }
            for _ in others:
                accepted = stack.enter_context(closing(self._listener.accept()[0]))
                peer_socket.send(accepted, [own.places], own.files)
            for other, connection in connections.items():
                (places,), received = peer_socket.receive(connection)
                files.callback(peer_socket.close_files, received)
                found[other] = ExportedPages(
                    self._page_bytes, received, [(at, byte) for at, byte in places]
                )
        return found


def open_peer_memory(
    rank: int,
    size: int,
    open_driver: Callable[[], Driver],
    folder: Path,
    all_agree: Callable[[bool], bool],
) -> PeerMemory | None:
    """Open it on all ranks, or on none: then the reason is logged.

    Args:
        rank: number of this one.
        size: number of ranks.
        open_driver: opens a driver of this rank's device, of which pages can be exported.
        folder: see `PeerMemory`.
        all_agree: tells whether all ranks have called it with True.
    """
    memory = _attempted(lambda: PeerMemory(rank, size, open_driver(), folder))
    if all_agree(memory is not None):
        assert memory is not None
        if all_agree(_attempted(memory.meet) is not None):
            return memory
    if memory is not None:
        memory.close()
    return None


def _attempted(attempt: Callable[[], _T]) -> _T | None:
    """What it returns; None if the devices refuse, and the reason is logged."""
    try:
        return attempt()
    except (DriverError, OSError) as error:
        _log.warning("devices cannot write to each other's memory, so NCCL adds up all: %s", error)
        return None
