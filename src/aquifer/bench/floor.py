"""What the machine allows, measured: no program can be faster."""

from __future__ import annotations

import time

import torch

_BYTES = 512 << 20  # several times any cache
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
