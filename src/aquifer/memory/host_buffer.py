"""Host memory that a device copies from and to at the full speed of the bus.

For a GPU it is page-locked. While the driver locks memory, no thread of the process can launch
anything: for 0.5 s for each GiB of new memory, most of which the kernel needs to fill pages with
zeros. So that is done before, without the driver, and then memory is locked in pieces with pauses
between them. The price is that no copy may go from one piece into the next: `in_pieces` cuts them.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator

import torch

from aquifer.errors import DriverError

PIECE_BYTES = 32 << 20
"""Memory that is page-locked with one call: it stops launches for about 2 ms."""

_PAUSE_S = 1e-3
"""Time for launches between two pieces."""


class HostBuffer:
    """Memory of the host, to be page-locked where the device is a GPU.

    It is taken from the system as it is: torch's own page-locked memory is rounded up to powers of
    two and never given back.

    Args:
        num_bytes: its size.
        device: device of the copies. For a modelled one ("meta") there is no memory either.

    Attributes:
        bytes: [num_bytes] uint8; not to be used after `close`. Each copy of a GPU has to be within
            one piece (`in_pieces`), and is slow beyond the first `locked_bytes`.
        locked_bytes: how much `lock` has done so far; all of it where nothing needs to be locked.

    Raises:
        DriverError: the host has no such memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._locks = device.type == "cuda"
        self.locked_bytes = 0 if self._locks else num_bytes
        if device.type == "meta":
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory seldom has huge pages
        try:
            memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
            memory.madvise(mmap.MADV_HUGEPAGE)  # locking costs by the page
        except (OSError, ValueError) as error:
            raise DriverError("ENOMEM", f"no {num_bytes} bytes of host memory: {error}") from error
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)

    def lock(self) -> Iterator[int]:
        """Page-lock the memory, piece by piece; nothing on a CPU.

        Yields: `locked_bytes`, after each piece.

        Raises:
            DriverError: the host does not let more of it be page-locked.
        """
        while self.locked_bytes < self.num_bytes:
            piece = self.bytes[self.locked_bytes :][:PIECE_BYTES]
            piece[:: mmap.PAGESIZE].zero_()  # has the kernel make the pages
            status = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), len(piece), 0)
            if int(status) != 0:
                raise DriverError(
                    str(status), f"{self.num_bytes} bytes of host memory cannot be page-locked"
                )
            self.locked_bytes += len(piece)
            yield self.locked_bytes
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Give the memory back. Pre-condition: no copy to or from it is in flight."""
        if self._locks:
            for start in range(0, self.locked_bytes, PIECE_BYTES):
                torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr() + start)
        self.locked_bytes = 0
        self.bytes = torch.empty(0, dtype=torch.uint8)


def locked_buffer(num_bytes: int, device: torch.device) -> HostBuffer:
    """A buffer that is page-locked as a whole, where the device is a GPU.

    Raises:
        DriverError: the host has no such memory, or does not let it be page-locked.
    """
    buffer = HostBuffer(num_bytes, device)
    try:
        for _ in buffer.lock():
            pass
    except BaseException:
        buffer.close()
        raise
    return buffer


def in_pieces(
    host: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a copy, so that each part of it is within one piece of a `HostBuffer`.

    Args:
        host: [n] uint8, a stretch of the buffer's `bytes`.
        other: [n] uint8, what it is copied from or to.

    Yields: parts of both, of equal sizes.
    """
    start, end = 0, PIECE_BYTES - int(host.storage_offset()) % PIECE_BYTES
    while start < len(host):
        yield host[start:end], other[start:end]
        start, end = end, end + PIECE_BYTES
