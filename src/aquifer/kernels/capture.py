"""Capture of launched kernels as CUDA graphs, which are launched again at once.

Launching the kernels of a step one by one takes longer than running them. A graph repeats the same
launches with the same addresses, so what changes from run to run has to be in tensors that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch._C import _cuda_endAllocateToPool, _cuda_releasePool

_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture CUDA has cancelled. torch's allocator may still refer to them."""


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all models: torch keeps 32 MiB for cuBLAS for each until the process ends."""
    return torch.cuda.Stream(device)


class GraphPool:
    """Captures graphs that share memory for intermediate results.

    A graph may overwrite the intermediate results of all others. So what outlives its run is copied
    to tensors that exist beforehand, or read before the next graph runs.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Make the body's stream one that can be captured, after the work launched so far."""
        current = torch.cuda.current_stream(self._device)
        stream = _capture_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin a graph. Pre-condition: within `capturing`, and no graph is being captured."""
        graph = torch.cuda.CUDAGraph()
        # Other threads map and zero pages meanwhile.
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        return graph

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what `work` launches. Its kernels must have been loaded before.

        Raises:
            Exception: anything that `work` raises; nothing is being captured then.
        """
        with self.capturing():
            graph = self.begin()
            try:
                work()
            except BaseException:
                self.abandon(graph)
                raise
            graph.capture_end()
        return graph

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which an exception was raised.

        The stream, torch's allocator and its random numbers can be used as before. Later graphs
        share memory with each other, and no longer with earlier ones. Pre-condition: within
        `capturing`, and the graph is being captured.
        """
        # A pool whose only graph is dropped is given back by torch, which then refuses its handle.
        handle, self._handle = self._handle, torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            graph.capture_end()
            return
        # CUDA has cancelled the capture, and torch does not undo what it did at the beginning.
        _abandoned.append(graph)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # where `capture_end` did get so far
            _cuda_endAllocateToPool(index, handle)
            _cuda_releasePool(index, handle)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
