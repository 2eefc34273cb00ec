"""From files to where the tensors lie: straight into place on the host, staged for a device.

For a device, the file is read in large stretches, many tensors or parts of one at a time, by a
few threads into page-locked buffers. Each buffer is copied to the device as a whole, and its
tensors go from there to their places, changing their dtype on the way:

    file --read--> buffer (page-locked) --copy--> stage (device) --scatter--> parameters

Copies follow each other on a stream of their own while the threads read ahead, so the time is that
of the slower of the two. Nothing larger than the buffers is ever held beside the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aquifer.weights.checkpoint import Checkpoint, StoredTensor, read_range

BUFFER_BYTES = 16 << 20
"""Size of one copy to the device. From 8 MB on, a copy runs at the full speed of the bus."""

NUM_BUFFERS = 8
"""How many stretches are read at a time: one thread reads cached files at a quarter of the speed
of the bus, or less."""

_ALIGNMENT_BYTES = 64  # of a stretch in its file, so that tensors are aligned in the buffer too
_MAX_GAP_BYTES = 1 << 20  # what is rather read in vain than skipped by starting a new stretch


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stored tensor: bytes [start, start + num_bytes) of it, whole elements."""

    stored: StoredTensor
    out: torch.Tensor  # where the whole tensor goes
    start_bytes: int
    num_bytes: int

    @property
    def offset_bytes(self) -> int:
        """Where it begins in the file."""
        return self.stored.offset_bytes + self.start_bytes


@dataclass(slots=True)
class Stretch:
    """Neighbouring pieces of one file, to be read at once: [begin_bytes, end_bytes)."""

    file: Path
    begin_bytes: int
    end_bytes: int
    pieces: list[Piece] = field(default_factory=list)


def load_tensors(
    checkpoint: Checkpoint,
    jobs: Sequence[tuple[str, torch.Tensor]],
    on_bytes: Callable[[int], None],
) -> None:
    """Fill tensors of one device from a checkpoint; they are complete when this returns.

    Args:
        checkpoint: where the stored tensors are.
        jobs: (name of a stored tensor, contiguous tensor of its shape to fill), in file order.
        on_bytes: told how many stored bytes have been read, again and again.

    Raises:
        ConfigError: a file ended early or could not be read.
    """
    if not jobs:
        return
    device = jobs[0][1].device
    if device.type != "cpu":
        stretches = plan_stretches(
            [(checkpoint.tensors[name], out) for name, out in jobs], BUFFER_BYTES
        )
        _load_staged(stretches, device, on_bytes)
        return
    for name, out in jobs:
        checkpoint.read_into(name, out)
        on_bytes(checkpoint.tensors[name].num_bytes)


def plan_stretches(
    jobs: Iterable[tuple[StoredTensor, torch.Tensor]], max_bytes: int
) -> list[Stretch]:
    """Cut tensors, given in file order, into stretches of at most `max_bytes`."""
    stretches: list[Stretch] = []
    last: Stretch | None = None
    for stored, out in jobs:
        done = 0
        while done < stored.num_bytes:
            at = stored.offset_bytes + done
            if (
                last is None
                or last.file != stored.file
                or at < last.begin_bytes  # a tensor that fills two parameters comes twice
                or at - last.end_bytes > _MAX_GAP_BYTES
                or at + stored.dtype.itemsize > last.begin_bytes + max_bytes
            ):
                begin = at // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
                last = Stretch(stored.file, begin, begin)
                stretches.append(last)
            room_bytes = last.begin_bytes + max_bytes - at
            room_bytes -= room_bytes % stored.dtype.itemsize
            count = min(stored.num_bytes - done, room_bytes)
            last.pieces.append(Piece(stored, out, done, count))
            last.end_bytes = max(last.end_bytes, at + count)
            done += count
    return stretches


def scatter(stage: torch.Tensor, stretch: Stretch) -> None:
    """Copy each piece from a stretch's bytes to its place, converting where the dtypes differ.

    Args:
        stage: uint8, the stretch's bytes, on the device of the tensors to fill.
        stretch: which pieces they are.
    """
    for piece in stretch.pieces:
        begin = piece.offset_bytes - stretch.begin_bytes
        source = stage[begin : begin + piece.num_bytes]
        dtype = piece.stored.dtype
        if dtype == piece.out.dtype:
            out = piece.out.view(-1).view(torch.uint8)
            out[piece.start_bytes : piece.start_bytes + piece.num_bytes].copy_(source)
            continue
        if begin % dtype.itemsize:  # a file whose tensors are not aligned
            source = source.clone()
        first = piece.start_bytes // dtype.itemsize
        out = piece.out.view(-1)[first : first + piece.num_bytes // dtype.itemsize]
        out.copy_(source.view(dtype))


class _Buffer:
    """Page-locked memory for one stretch, and when the device is done with it."""

    def __init__(self) -> None:
        self.bytes = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()

    def read(self, stretch: Stretch) -> None:
        """Fill it from the file, once the copy of what it held is done."""
        self.copied.synchronize()
        num_bytes = stretch.end_bytes - stretch.begin_bytes
        read_range(stretch.file, stretch.begin_bytes, self.bytes[:num_bytes])


def _load_staged(
    stretches: Sequence[Stretch], device: torch.device, on_bytes: Callable[[int], None]
) -> None:
    with torch.cuda.device(device):
        stage = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        stream = torch.cuda.Stream(device)
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
                num_bytes = stretch.end_bytes - stretch.begin_bytes
                with torch.cuda.stream(stream):
                    stage[:num_bytes].copy_(buffer.bytes[:num_bytes], non_blocking=True)
                    buffer.copied.record(stream)
                    scatter(stage, stretch)
                free.append(buffer)
                on_bytes(sum(piece.num_bytes for piece in stretch.pieces))
        finally:
            # Whether or not all went well, nothing may still read the buffers or write the pages.
            threads.shutdown(cancel_futures=True)
            stream.synchronize()
