"""Captured steps: the batch sizes for which steps are captured, and the tensors between graphs.

Launching the kernels of a step one by one takes longer than running them. Captured as a graph they
are one launch. What is captured: steps in which each sequence decodes one token
(`aquifer.engine.decode_graphs`), short steps that read prompts (`aquifer.engine.whole_graphs`), the
parts of all other steps between attention (`aquifer.engine.chunk_graphs`), and logits and sampling
(`aquifer.engine.sample_graphs`). All are captured before the model serves, so that no request waits
for one.

A graph knows addresses. So what one graph leaves for the next is in tensors that stay
(`StepBuffers`), and everything else is found by slot on the device: a graph stays valid while
sequences grow, and while pages come and go under its addresses. Rows that only pad a batch have
slot -1; they read and write no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aquifer.cache.spans import IntArray, Spans
from aquifer.memory.driver.dlpack import tensor_over

_REPORTS = 8
"""Steps of which the tokens are kept for the host; at most two are in flight."""


def padded_size(num_seqs: int) -> int:
    """The batch size that stands for this one: at most 15 % of the rows of a large one pad it."""
    if num_seqs <= 4:
        return 1 << (num_seqs - 1).bit_length()
    multiple = 8 if num_seqs <= 64 else 16 if num_seqs <= 256 else 32
    return -(-num_seqs // multiple) * multiple


def padded_sizes(max_seqs: int) -> list[int]:
    """All values of `padded_size` for up to `max_seqs` sequences, ascending."""
    return sorted({padded_size(num_seqs) for num_seqs in range(1, max_seqs + 1)})


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """A step that reads prompts, as the host hands it to a captured one."""

    spans: Spans  # its tokens
    num_decodes: int  # spans, from the first, that are one token each
    token_ids: IntArray  # [tokens]; -1 for the token that the device sampled last in a sequence
    context_lengths: IntArray  # [tokens], see `ModelInput`
    sampled: IntArray  # [n], spans of which the last token's hidden state is wanted
    # [3, n], of these: slots; the same, but -1 for rows that sampling leaves alone; and tokens that
    # each row's sequence has.
    sampling: IntArray


class StepBuffers:
    """Tensors on the device that captured graphs read and write, one step after the other.

    Args:
        max_rows: sequences of the largest step.
        device: the device.

    Attributes:
        slots: [rows] int64, slots of the rows that get a token; -1 for padding.
        sampled_slots: [rows] int64, the same but -1 for rows that the host samples.
        num_tokens: [rows] int64, tokens of each row's sequence.
        token_ids: [rows] int64, the new tokens.
        reports: [steps, rows] int64 on the host, the new tokens of the latest steps.
        next_report: [1] int64, where those of the next step go.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows = padded_size(max_rows)
        rows = torch.zeros(4, self.max_rows, dtype=torch.int64, device=device)
        rows[:2] = -1
        self.inputs = rows[:3]
        self.slots, self.sampled_slots, self.num_tokens, self.token_ids = rows
        self.reports = torch.zeros(
            _REPORTS, self.max_rows, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self.next_report = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_reports = 0
        self._hidden: torch.Tensor | None = None

    @property
    def hidden(self) -> torch.Tensor:
        """[rows, hidden], the hidden state of each row. Pre-condition: `make_hidden` was called."""
        assert self._hidden is not None
        return self._hidden

    def restart_reports(self) -> None:
        """Begin with the first report again, since steps were launched that nothing asked for."""
        self._num_reports = 0
        self.next_report.zero_()

    def report(self) -> torch.Tensor:
        """[rows] on the host, the new tokens of the step that was just launched.

        Complete when the step is, and overwritten after some more steps.
        """
        report = self.reports[self._num_reports % _REPORTS]
        self._num_reports += 1
        return report

    def make_hidden(self, like: torch.Tensor) -> None:
        """Allocate `hidden` for a model with such hidden states, [tokens, hidden]."""
        self._hidden = like.new_zeros(self.max_rows, like.shape[1])


def lasting(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address, which does not keep its memory from other graphs.

    Its content lasts until another graph of the pool runs.

    Args:
        tensor: not empty; strides are any.
    """
    shape, strides = tensor.shape, tensor.stride()
    num_elements = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    num_bytes = num_elements * tensor.dtype.itemsize
    flat = tensor_over(tensor.data_ptr(), num_bytes, tensor.device)
    return flat.view(tensor.dtype).as_strided(shape, strides)
