"""Host memory that a device copies from at the full speed of the bus."""

from __future__ import annotations

import mmap

import torch

from aquifer.errors import DriverError


class HostBuffer:
    """Memory of the host, page-locked where the device is a GPU.

    It is taken from the system as it is: torch's own page-locked memory is rounded up to powers of
    two and never given back.

    Args:
        num_bytes: its size.
        device: device of the copies.

    Attributes:
        bytes: [num_bytes] uint8; not to be used after `close`.

    Raises:
        DriverError: the host has no such memory, or does not let it be page-locked.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            memory = mmap.mmap(-1, max(num_bytes, 1))
            memory.madvise(mmap.MADV_HUGEPAGE)  # locking costs by the page
        except (OSError, ValueError) as error:
            raise DriverError("ENOMEM", f"no {num_bytes} bytes of host memory: {error}") from error
        self.num_bytes = num_bytes
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
        self._is_locked = False
        if device.type == "cuda" and num_bytes:
            runtime = torch.cuda.cudart()
            status = runtime.cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
            if int(status) != 0:
                raise DriverError(
                    str(status), f"{num_bytes} bytes of host memory cannot be page-locked"
                )
            self._is_locked = True

    def close(self) -> None:
        """Give the memory back. Pre-condition: no copy to or from it is in flight."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._is_locked = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
