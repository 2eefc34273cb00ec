"""Decode steps as CUDA graphs.

A step of one token for each sequence is hundreds of kernels, which take longer to launch than to
run. Captured as a graph they are one launch. Everything that changes from step to step is on the
device: the host writes the slots that run to one tensor, and everything else is found by slot. So a
graph stays valid while sequences grow, and while pages come and go under its addresses.

There is a graph for each padded batch size and each way of choosing tokens, captured when it is
first needed, and kept. Rows of padding have slot -1; they read and write no cache. Where the host
needs the logits of some rows, another graph keeps the logits and samples all other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from aquifer.cache.base import IntArray
from aquifer.engine.sampler import SamplingMode
from aquifer.kernels import compiled_together
from aquifer.memory.transfer import upload

Step = Callable[[torch.Tensor, torch.Tensor, SamplingMode], tuple[torch.Tensor, torch.Tensor]]
"""Runs (slots [n], sampled slots [n], mode); gives (logits [n, vocab], token ids [n])."""

_Key = tuple[int, SamplingMode, bool]  # padded batch size, mode, whether logits are kept


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all models: torch keeps 32 MiB for cuBLAS for each until the process ends."""
    return torch.cuda.Stream(device)


def padded_size(num_seqs: int) -> int:
    """The batch size that stands for this one: at most 15 % of the rows of a large one pad it."""
    if num_seqs <= 4:
        return 1 << (num_seqs - 1).bit_length()
    multiple = 8 if num_seqs <= 64 else 16 if num_seqs <= 256 else 32
    return -(-num_seqs // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor | None  # kept only where the host needs them
    token_ids: torch.Tensor


class DecodeGraphs:
    """The captured steps of one model.

    Args:
        step: the step to capture. It must launch the same kernels for any rows, padding included.
        max_seqs: sequences of the largest step.
        device: the device that it runs on.
    """

    def __init__(self, step: Step, max_seqs: int, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Read by every graph from the first entry on: slots of its rows, and of those it samples.
        size = padded_size(max_seqs)
        self._slots = torch.full((2, size), -1, dtype=torch.int64, device=device)
        self._uploaded = np.full((2, size), -1, np.int64)
        self._captured: dict[_Key, _Captured] = {}

    def run(
        self, slots: IntArray, mode: SamplingMode, sampled_slots: IntArray | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Replay the step of these slots.

        Nothing is copied to the device if the same slots ran before.

        Args:
            slots: [n].
            mode: what the rows need that are sampled.
            sampled_slots: [n], the same but -1 for rows that are not to be sampled; None to sample
                all.

        Returns:
            (logits [n, vocab] if some rows are not sampled, token ids [n]), both overwritten by
            the next run.
        """
        size = padded_size(len(slots))
        key = (size, mode, sampled_slots is not None)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        padded = np.full((2, size), -1, np.int64)
        padded[0, : len(slots)] = slots
        padded[1, : len(slots)] = slots if sampled_slots is None else sampled_slots
        if not np.array_equal(padded, self._uploaded[:, :size]):
            self._slots[:, :size].copy_(upload(padded, self._device))
            self._uploaded[:, :size] = padded  # only now: the upload may fail
        captured.graph.replay()
        logits = captured.logits
        return None if logits is None else logits[: len(slots)], captured.token_ids[: len(slots)]

    def forget_counts(self) -> None:
        """Drop the graphs that read counts of tokens, because these are at another address now.

        They are captured again when needed.
        """
        for key in [key for key in self._captured if key[1] == SamplingMode.FULL]:
            del self._captured[key]

    def _capture(self, size: int, mode: SamplingMode, keeps_logits: bool) -> _Captured:
        self._uploaded[:] = -1
        self._slots.fill_(-1)
        slots, sampled_slots = self._slots[0, :size], self._slots[1, :size]
        # Once without capturing, over padding alone: kernels must be compiled before.
        with compiled_together(self._device):
            self._step(slots, sampled_slots, mode)
        self._step(slots, sampled_slots, mode)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        capturing = _capture_stream(self._device)
        capturing.wait_stream(current)
        with torch.cuda.stream(capturing):
            # Other threads map and zero pages meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits, token_ids = self._step(slots, sampled_slots, mode)
            finally:
                graph.capture_end()
        current.wait_stream(capturing)
        return _Captured(graph, logits if keeps_logits else None, token_ids)
