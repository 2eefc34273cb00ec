"""Load tensors from files: straight into place on the host, through staging buffers on a device.

For a device, a few threads read the files in large stretches, each with many tensors or a part of
one, into page-locked buffers. Each buffer is copied to the device as a whole, and its tensors are
copied from there to their places, converted to another dtype, transposed or decoded where needed:

    file --read--> buffer (page-locked) --copy--> stage (device) --scatter--> parameters

Copies run on a stream of their own while the threads read ahead, so loading takes as long as the
slower of the two. Besides the weights, nothing larger than the buffers is held in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from aquifer.weights.checkpoint import StoredTensor, read_into, read_range, read_stretch
from aquifer.weights.forms import Target

BUFFER_BYTES = 16 << 20
"""Size of one copy to the device. Copies of 8 MB or more reach the full speed of the bus."""

NUM_BUFFERS = 8
"""Number of stretches read at a time. One thread reads cached files at a quarter of the speed of
the bus, or less."""

_ALIGNMENT_BYTES = 64  # start of a stretch in its file; keeps tensors aligned in the buffer
_MAX_GAP_BYTES = 1 << 20  # larger gaps between tensors begin a new stretch, smaller are read too


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start_bytes, start_bytes + num_bytes) of a stored tensor: whole elements."""

    stored: StoredTensor
    target: Target  # of the whole tensor
    start_bytes: int
    num_bytes: int

    @property
    def offset_bytes(self) -> int:
        """Offset of the piece in the file, or in a part that is scattered over it."""
        return self.start_bytes + (self.stored.offset_bytes if self.stored.is_contiguous else 0)


@dataclass(slots=True)
class Stretch:
    """Bytes [begin_bytes, end_bytes) that are read at once, and the pieces in them.

    They are of a file; or of a part of a stored tensor that is scattered over its file, such as
    some columns, and that is all the stretch has. Then nothing between the runs is read.
    """

    file: Path
    begin_bytes: int
    end_bytes: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return self.end_bytes - self.begin_bytes

    def read(self, out: torch.Tensor) -> None:
        """Read it.

        Args:
            out: [num_bytes] uint8, on the host.

        Raises:
            ConfigError: the file ended early or cannot be read.
        """
        stored = self.pieces[0].stored
        if stored.is_contiguous:
            read_range(self.file, self.begin_bytes, out)
        else:
            read_stretch(stored, self.begin_bytes, out)


def load_tensors(
    jobs: Sequence[tuple[StoredTensor, Target]], on_bytes: Callable[[int], None]
) -> None:
    """Fill tensors of one device from files; their contents are complete on return.

    Args:
        jobs: (stored tensor or part of one, what it fills), in the order in which they are read.
        on_bytes: called after each read with the number of stored bytes in it.

    Raises:
        ConfigError: a file ended early or cannot be read.
    """
    if not jobs:
        return
    device = jobs[0][1].part.device
    if device.type != "cpu":
        _load_staged(plan_stretches(jobs, BUFFER_BYTES), device, on_bytes)
        return
    for stored, target in jobs:
        read_into(stored, target)
        on_bytes(stored.num_bytes)


def copy_bytes(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (source, target) pairs as `begin_copying` does; done on return."""
    begin_copying(copies)()


def work_so_far(device: torch.device) -> torch.cuda.Event | None:
    """The work that this thread has handed to a device so far; None on the host."""
    if device.type == "cpu":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


class CopyQueue:
    """Copies between page-locked memory and a device, or within it, done in their order.

    They are handed to a stream of their own, one call of the driver for each: another
    thread's calls, such as those that unmap pages, may keep any call waiting.

    Args:
        device: a GPU.
        after: the work that they wait for; None for what this thread has handed to the device.
        stream: queues with the same one share the order.
    """

    def __init__(
        self, device: torch.device, after: torch.cuda.Event | None = None, stream: str = "host"
    ) -> None:
        self._stream = _stream(device, stream)
        self._stream.wait_event(after or torch.cuda.current_stream(device).record_event())

    def add(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy (source, target) pairs: uint8, of equal sizes."""
        with torch.cuda.stream(self._stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)

    def done(self) -> Callable[[], None]:
        """What waits until all that were added so far are done."""
        event: torch.cuda.Event = self._stream.record_event()
        return lambda: event.synchronize()


def begin_copying(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    after: torch.cuda.Event | None = None,
    stream: str = "host",
) -> Callable[[], None]:
    """Begin to copy (source, target) pairs as a `CopyQueue` does; on the host, they are done.

    Returns: waits until the copies are done.
    """
    devices = {t.device for pair in copies for t in pair if t.device.type != "cpu"}
    if not devices:
        for source, target in copies:
            target.copy_(source)
        return lambda: None
    (device,) = devices
    queue = CopyQueue(device, after, stream)
    queue.add(copies)
    return queue.done()


def plan_stretches(jobs: Iterable[tuple[StoredTensor, Target]], max_bytes: int) -> list[Stretch]:
    """Cut tensors, in the order given, into stretches of at most `max_bytes`."""
    stretches: list[Stretch] = []
    last: Stretch | None = None
    for stored, target in jobs:
        done = 0
        if not stored.is_contiguous:
            step = max(max_bytes // stored.dtype.itemsize, 1) * stored.dtype.itemsize
            for done in range(0, stored.num_bytes, step):
                end = min(done + step, stored.num_bytes)
                piece = Piece(stored, target, done, end - done)
                stretches.append(Stretch(stored.file, done, end, [piece]))
            last = None
            continue
        while done < stored.num_bytes:
            at = stored.offset_bytes + done
            if (
                last is None
                or last.file != stored.file
                or at < last.begin_bytes  # the same tensor again, or scales stored before numbers
                or at - last.end_bytes > _MAX_GAP_BYTES
                or at + stored.dtype.itemsize > last.begin_bytes + max_bytes
            ):
                begin = at // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
                last = Stretch(stored.file, begin, begin)
                stretches.append(last)
            room_bytes = last.begin_bytes + max_bytes - at
            room_bytes -= room_bytes % stored.dtype.itemsize
            count = min(stored.num_bytes - done, room_bytes)
            last.pieces.append(Piece(stored, target, done, count))
            last.end_bytes = max(last.end_bytes, at + count)
            done += count
    return stretches


def scatter(stage: torch.Tensor, stretch: Stretch) -> None:
    """Write each piece of a stretch to its target, in order.

    Args:
        stage: uint8, the bytes of the stretch, on the host or on the device of the targets.
        stretch: the pieces to copy.
    """
    for piece in stretch.pieces:
        begin = piece.offset_bytes - stretch.begin_bytes
        source = stage[begin : begin + piece.num_bytes]
        dtype = piece.stored.dtype
        if piece.target.is_copy(dtype):
            out = piece.target.part.view(-1).view(torch.uint8)
            out[piece.start_bytes : piece.start_bytes + piece.num_bytes].copy_(source)
            continue
        if begin % dtype.itemsize:  # a file whose tensors are not aligned
            source = source.clone()
        piece.target.write(source.view(dtype), piece.start_bytes // dtype.itemsize)


class _Buffer:
    """Page-locked memory for one stretch, and the event of its latest copy to the device."""

    def __init__(self) -> None:
        self.bytes = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()

    def read(self, stretch: Stretch) -> None:
        """Fill the buffer from the file, after the copy of its former contents has ended."""
        self.copied.synchronize()
        stretch.read(self.bytes[: stretch.num_bytes])


@cache
def _stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """A stream of all loads: torch keeps freed memory, such as that of decoding, by stream."""
    return torch.cuda.Stream(device)


def _load_staged(
    stretches: Sequence[Stretch], device: torch.device, on_bytes: Callable[[int], None]
) -> None:
    with torch.cuda.device(device):
        stage = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        stream = _stream(device, "host")
        stream.wait_stream(torch.cuda.current_stream(device))
        free = [_Buffer() for _ in range(min(NUM_BUFFERS, len(stretches)))]
        reading: deque[tuple[Stretch, _Buffer, Future[None]]] = deque()
        threads = ThreadPoolExecutor(max(len(free), 1), "aquifer-read")
        try:
            todo = deque(stretches)
            while todo or reading:
                while todo and free:
                    stretch, buffer = todo.popleft(), free.pop()
                    reading.append((stretch, buffer, threads.submit(buffer.read, stretch)))
                stretch, buffer, read = reading.popleft()
                read.result()
                num_bytes = stretch.num_bytes
                with torch.cuda.stream(stream):
                    stage[:num_bytes].copy_(buffer.bytes[:num_bytes], non_blocking=True)
                    buffer.copied.record(stream)
                    scatter(stage, stretch)
                free.append(buffer)
                on_bytes(sum(piece.num_bytes for piece in stretch.pieces))
        finally:
            # Also after a failure: no thread or copy may use the buffers or the pages any more.
            threads.shutdown(cancel_futures=True)
            stream.synchronize()
