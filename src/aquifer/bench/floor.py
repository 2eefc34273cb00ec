"""What the machine allows, measured: no program can be faster."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

_BYTES = 512 << 20  # several times any cache
_COPY_BYTES = 4 << 30  # of a GPU, likewise
_REPEATS = 8


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, the best of several runs."""
    data = torch.ones(_BYTES // 4)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return _BYTES / min(seconds)


def device_copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a large copy on the current GPU; the median.

    Not captured as a graph: there, a copy goes through a copy engine, which is slower than the
    multiprocessors are.
    """
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    target.copy_(source)
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize()
    times_ms = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]
    return 2e3 * _COPY_BYTES / statistics.median(times_ms)
