"""Logits and sampling of a step, as captured graphs: what follows the hidden states.

There is a graph for each padded number of rows and each way of choosing tokens. Steps in which a
request has penalties are not captured: the counts of tokens that they need move as more requests
have some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from aquifer.engine.graphs import StepBuffers, lasting, padded_size
from aquifer.engine.sampler import SamplingMode
from aquifer.kernels.capture import GraphPool

Sample = Callable[[int, SamplingMode], torch.Tensor | None]
"""Samples the first n rows of the buffers into the buffers, and updates the columns; gives their
logits, as `TokenChoice.choose`."""

CAPTURED_MODES = (SamplingMode.GREEDY, SamplingMode.PLAIN, SamplingMode.FULL)


class Sampled(NamedTuple):
    """What a run leaves; later ones overwrite it."""

    logits: torch.Tensor | None  # [rows, vocab]; None where ranks have a part each
    token_ids: torch.Tensor  # [rows]
    report: torch.Tensor  # [rows], the same on the host, once the device is done


class SampleGraphs:
    """The captured samplings of one model.

    Args:
        sample: what to capture.
        buffers: its inputs and outputs.
        pool: the graphs' memory.
    """

    def __init__(self, sample: Sample, buffers: StepBuffers, pool: GraphPool) -> None:
        self._sample = sample
        self._buffers = buffers
        self._pool = pool
        self._captured: dict[
            tuple[int, SamplingMode], tuple[torch.cuda.CUDAGraph, torch.Tensor | None]
        ] = {}

    def run(self, num_rows: int, mode: SamplingMode) -> Sampled:
        """Sample the first rows of the buffers.

        Args:
            num_rows: number of rows; those after them up to the padded size have slot -1.
            mode: at least what any of the rows needs.
        """
        size = padded_size(num_rows)
        captured = self._captured.get((size, mode))
        if captured is None:
            logits = self._sample(size, mode)
        else:
            graph, logits = captured
            graph.replay()
        return Sampled(
            None if logits is None else logits[:num_rows],
            self._buffers.token_ids[:num_rows],
            self._buffers.report()[:num_rows],
        )

    def rehearse(self, size: int, mode: SamplingMode) -> None:
        """Launch the kernels of sampling that many rows."""
        self._sample(size, mode)

    def capture(self, size: int, mode: SamplingMode) -> None:
        """Capture the sampling of that many rows."""
        found: list[torch.Tensor] = []

        def sample() -> None:
            logits = self._sample(size, mode)
            if logits is not None:
                found.append(lasting(logits))

        graph = self._pool.capture(sample)
        self._captured[size, mode] = graph, found[0] if found else None
