"""Times of work on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS = 2


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Replay a CUDA graph, each time on an idle device, and return the seconds of each replay."""
    seconds: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


def captured_seconds(work: Callable[[], None], repeats: int) -> list[float]:
    """Capture some work in a CUDA graph, and return the seconds of each replay; see
    `replay_seconds`. Before, it runs once, which compiles its kernels, and is replayed twice."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return replay_seconds(graph, _WARM_UPS + repeats)[_WARM_UPS:]
