"""Two branches of a step at the same time, on two streams.

A small kernel leaves most of a GPU idle: it waits for memory, and its last programs for each other.
Where a layer has two branches of the same input, such as attention and a mixer, the kernels of one
fill what those of the other leave.

In a captured CUDA graph the second stream becomes a branch of the graph. The rules of `_triton.py`
hold on each stream: the first kernel of the second stream starts after what the first stream had
been given before, and the first kernel after both branches starts after both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

_First = TypeVar("_First")
_Second = TypeVar("_Second")


class _Lane(threading.local):
    is_second = False


_lane = _Lane()


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all models: torch keeps 32 MiB for cuBLAS for each until the process ends."""
    return torch.cuda.Stream(device)


def lane() -> int:
    """Which of two branches the current thread is launching: 1 within `second`, else 0.

    Scratch memory that kernels use one after the other is kept for each.
    """
    return int(_lane.is_second)


def at_once(
    first: Callable[[], _First], second: Callable[[], _Second], device: torch.device
) -> tuple[_First, _Second]:
    """Run two functions that launch kernels; on a GPU, their kernels may run at the same time.

    What they read must be kept by the caller until this returns, as memory that is freed is used
    again on the stream that it was allocated for.

    Args:
        first: runs on the current stream.
        second: runs on another one, and must not call `at_once`.
        device: where the kernels run.

    Returns: the results of both, for kernels on the current stream.
    """
    assert not _lane.is_second, "there are only two branches"
    if device.type != "cuda":
        return first(), second()
    current, beside = torch.cuda.current_stream(device), _second_stream(device)
    beside.wait_stream(current)
    _lane.is_second = True
    try:
        with torch.cuda.stream(beside):
            result = second()
    finally:
        _lane.is_second = False
    try:
        return first(), result
    finally:
        current.wait_stream(beside)
