"""How long page-locking of host memory stops the launches of other threads.

    python benchmarks/gpu/page_locking.py [--bytes 4GiB] [--device cuda:0]

The main thread launches three small kernels and waits for them, again and again, while another
thread takes memory in one of these ways. It prints the time that the memory takes, and the longest
steps of the main thread.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console

from aquifer.memory import host_buffer
from aquifer.memory.host_buffer import HostBuffer, in_pieces
from aquifer.sizes import format_size, parse_size

_PIECES = (8 << 20, 32 << 20, 64 << 20)


def measure(what: str, work: Callable[[], object], device: torch.device, console: Console) -> None:
    """Print how long some work of another thread takes, and what it does to launches."""
    small = torch.zeros(1024, device=device)
    taken_s: list[float] = []

    def run() -> None:
        torch.cuda.set_device(device)
        begin_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - begin_s)

    thread = threading.Thread(target=run)
    steps_ms: list[float] = []
    torch.cuda.synchronize(device)
    thread.start()
    last_s = time.perf_counter()
    while thread.is_alive():
        for _ in range(3):
            small.add_(1)
        torch.cuda.current_stream(device).synchronize()
        now_s = time.perf_counter()
        steps_ms.append(1e3 * (now_s - last_s))
        last_s = now_s
    steps_ms.sort()
    longest = ", ".join(f"{step:.1f}" for step in steps_ms[-3:])
    median = steps_ms[len(steps_ms) // 2]
    console.print(
        f"{what:<44} took {1e3 * taken_s[0]:7.1f} ms; {len(steps_ms):6} steps, median "
        f"{median:.3f} ms, longest {longest} ms"
    )


def lock_at_once(buffer: HostBuffer) -> None:
    """Page-lock all of a buffer with one call."""
    status = torch.cuda.cudart().cudaHostRegister(buffer.bytes.data_ptr(), buffer.num_bytes, 0)
    assert int(status) == 0
    torch.cuda.cudart().cudaHostUnregister(buffer.bytes.data_ptr())


def lock_in_pieces(buffer: HostBuffer) -> None:
    """Page-lock all of a buffer as the engine does."""
    for _ in buffer.lock():
        pass


def copy_rate(buffer: HostBuffer, device: torch.device) -> float:
    """Bytes per second of a copy of a buffer to a device in pieces, the best of three."""
    target = torch.empty(buffer.num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        begin_s = time.perf_counter()
        for host, other in in_pieces(buffer.bytes, target):
            other.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return buffer.num_bytes / min(seconds)


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=parse_size, default=4 << 30, help="memory to take")
    parser.add_argument("--device", default="cuda:0", help="the device")
    arguments = parser.parse_args()
    num_bytes, device = arguments.bytes, torch.device(arguments.device)
    console = Console(width=200, highlight=False)
    console.print(f"{torch.cuda.get_device_name(device)}, {format_size(num_bytes)}")
    measure(
        "torch.empty(pin_memory=True)",
        lambda: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
        device,
        console,
    )
    new = HostBuffer(num_bytes, device)
    measure("locked at once, new", lambda: lock_at_once(new), device, console)
    measure("locked at once, its pages are there", lambda: lock_at_once(new), device, console)
    new.close()
    for piece_bytes in _PIECES:
        host_buffer.PIECE_BYTES = piece_bytes
        buffer = HostBuffer(num_bytes, device)
        name = f"in pieces of {format_size(piece_bytes)}"
        measure(f"locked {name}", partial(lock_in_pieces, buffer), device, console)
        console.print(f"  copied {name}: {copy_rate(buffer, device) / 1e9:.1f} GB/s")
        measure(f"unlocked {name}", buffer.close, device, console)


if __name__ == "__main__":
    main()
