"""Times of work on a GPU."""

from __future__ import annotations

import torch


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
