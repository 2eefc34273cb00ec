"""Host memory that preempted sequences are moved to, taken when it is first needed."""

from __future__ import annotations

import logging
import threading
import time
from itertools import pairwise

import torch

from aquifer.errors import DriverError
from aquifer.memory.driver import make_current
from aquifer.memory.host_buffer import HostBuffer

_log = logging.getLogger(__name__)

_SAMPLE_BYTES = 16 << 20
"""Size of the copy that measures the bandwidth."""


class SwapMemory:
    """Host memory, taken in order of address by a thread, since page-locking takes a while.

    On a CPU all of it is there at once: it costs nothing before it is touched.

    Args:
        num_bytes: its size.
        device: device of the copies.
        uses_all: whether memory that the host does not let be page-locked is used all the same,
            with slower copies. A rank of a group must have what rank 0 has.

    Attributes:
        bytes_per_s: measured speed of a copy to the device; None until then, and if it is modelled.
        error: why no more memory comes; None if nothing has failed.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, uses_all: bool = False) -> None:
        self.bytes_per_s: float | None = None
        self.error: DriverError | None = None
        self._num_bytes = num_bytes
        self._device = device
        self._uses_all = uses_all
        self._buffer: HostBuffer | None = None
        self._there_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._take, name="aquifer-swap", daemon=True)

    @property
    def there_bytes(self) -> int:
        """How much of it is there, from the beginning of the memory on."""
        return self._there_bytes

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._buffer is not None or self.error is not None

    def begin(self) -> None:
        """Begin to take the memory, if that was not done before."""
        if self.is_begun:
            return
        try:
            self._buffer = HostBuffer(self._num_bytes, self._device)
        except DriverError as error:
            self.error = error
            return
        if self._device.type == "cuda":
            self._thread.start()
            return
        self._there_bytes = self._buffer.locked_bytes
        if self._device.type != "meta":
            self.bytes_per_s = _copy_rate(self._buffer.bytes[:_SAMPLE_BYTES], self._device)

    def wait(self, num_bytes: int) -> bool:
        """Wait until the first `num_bytes` are there; whether they are."""
        self.begin()
        with self._changed:
            self._changed.wait_for(lambda: self._there_bytes >= num_bytes or self.error is not None)
        return self._there_bytes >= num_bytes

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 from byte `start` on; waits until it is there.

        Raises:
            DriverError: the host has refused it.
        """
        if not self.wait(start + num_bytes):
            assert self.error is not None
            raise self.error
        assert self._buffer is not None
        return self._buffer.bytes[start : start + num_bytes]

    def close(self) -> None:
        """Give the memory back. Pre-condition: no copy to or from it is in flight."""
        self._is_closed = True
        if self._thread.ident is not None:
            self._thread.join()
        if self._buffer is not None:
            self._buffer.close()

    def _take(self) -> None:
        assert self._buffer is not None
        error: DriverError | None = None
        try:
            make_current(self._device)
            for there_bytes in self._buffer.lock():
                if self.bytes_per_s is None:
                    sample = self._buffer.bytes[: min(there_bytes, _SAMPLE_BYTES)]
                    self.bytes_per_s = _copy_rate(sample, self._device)
                self._come(there_bytes)
                if self._is_closed:
                    return
        except DriverError as refused:
            if self._uses_all:
                _log.warning("copies of preempted KV on %s are slower: %s", self._device, refused)
                self._come(self._num_bytes)
                return
            error = refused
        except RuntimeError as failed:  # of the device: torch has no narrower one
            error = DriverError("cudaErrorUnknown", str(failed))
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _come(self, there_bytes: int) -> None:
        """So many bytes are there."""
        with self._changed:
            self._there_bytes = there_bytes
            self._changed.notify_all()


def _copy_rate(part: torch.Tensor, device: torch.device) -> float:
    """Bytes per second from host memory to the device, the faster of two copies.

    Work of the device that comes before them is not counted.
    """
    target = torch.empty_like(part, device=device)
    if device.type != "cuda":
        return part.numel() / min(_seconds(part, target) for _ in range(2))
    events: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    for event in events[1:]:
        target.copy_(part, non_blocking=True)
        event.record()
    events[-1].synchronize()
    milliseconds: float = min(begin.elapsed_time(end) for begin, end in pairwise(events))
    return part.numel() / (milliseconds / 1e3)


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start
