"""Steps in which each sequence decodes one token, as captured graphs.

The host writes the slots that run to one tensor, and everything else is found by slot. There is a
graph for each padded batch size, which ends with the hidden states; `SampleGraphs` goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from aquifer.engine.graphs import StepBuffers
from aquifer.kernels.capture import GraphPool

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs slots [n]; gives hidden states [n, hidden], and overwrites the second tensor, [n], with the
tokens that each sequence has then."""


class DecodeGraphs:
    """The captured decode steps of one model.

    Args:
        forward: the step to capture. It must launch the same kernels for any rows, padding
            included.
        rehearsal: launches the same kernels, each at least once, and gives no results.
        buffers: where it reads the slots, and leaves hidden states and lengths.
        pool: the graphs' memory.
    """

    def __init__(
        self, forward: Forward, rehearsal: Forward, buffers: StepBuffers, pool: GraphPool
    ) -> None:
        self._forward = forward
        self._rehearsal = rehearsal
        self._buffers = buffers
        self._pool = pool
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, size: int) -> None:
        """Run the step of the slots in the buffers, as many as `size`, a padded size."""
        self._captured[size].replay()

    def rehearse(self, size: int) -> None:
        """Launch the kernels of the step of that size, without results."""
        self._launch(size, self._rehearsal)

    def capture(self, size: int) -> None:
        """Capture the step of that size."""
        self._captured[size] = self._pool.capture(lambda: self._launch(size, self._forward))

    def _launch(self, size: int, forward: Forward) -> None:
        buffers = self._buffers
        hidden = forward(buffers.slots[:size], buffers.num_tokens[:size])
        buffers.hidden[:size].copy_(hidden)
