"""Spans of a step cut into parts: chunks for kernels, padded blocks for recurrences in torch.

A kernel has a program for each chunk of `size` tokens of each span, and a few without work. With p
tokens in the spans before it, chunk j of span s has number p // size + s + j. No two have the same:
a span of n tokens has at most n // size + 1 chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from aquifer.kernels._triton import jit, tensor, tl
from aquifer.kernels.prefill_attention import PrefillSpans

_BLOCK_ELEMENTS = 1 << 20
"""Elements of a block: an intermediate result in float32 takes 4 MiB and stays in the caches."""


@dataclass(frozen=True, slots=True)
class SpanBlock:
    """Neighbouring tokens of each of the longest spans, as many of each; shorter ones are padded.

    A padded place has a row too, that of the span's last token, so that it may be read.
    """

    num_spans: int  # spans that have tokens here: the first ones of `SortedSpans`
    rows: torch.Tensor  # [num_spans, tokens] int64
    is_token: torch.Tensor  # [num_spans, tokens] bool, False for padding


class SortedSpans:
    """The spans of a step, the longest first.

    Args:
        spans: the chunks of the step; at least one.
        device: device of the tensors of indices.

    Attributes:
        slots: [spans] int64.
        starts: [spans] int64, tokens of each sequence before its span.
    """

    def __init__(self, spans: PrefillSpans, device: torch.device) -> None:
        counts = [end - begin for begin, end in zip(spans.offsets, spans.offsets[1:], strict=False)]
        order = sorted(range(len(counts)), key=lambda index: -counts[index])
        self._counts = [counts[index] for index in order]
        self._first_rows = torch.tensor([spans.offsets[index] for index in order], device=device)
        self.slots = torch.tensor([spans.slots[index] for index in order], device=device)
        self.starts = torch.tensor([spans.starts[index] for index in order], device=device)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """The state of each span's sequence before it, [spans, ...] of float32 or wider."""
        read = state[self.slots]
        read[self.starts == 0] = 0
        return read.to(wide_dtype(state))

    def blocks(self, row_elements: int, max_tokens: int) -> Iterator[SpanBlock]:
        """The tokens of all spans, in blocks of bounded size.

        Args:
            row_elements: elements that the largest intermediate result has for a token.
            max_tokens: bound of a block's tokens of one span.
        """
        begin = 0
        while begin < self._counts[0]:
            num_spans = sum(count > begin for count in self._counts)
            size = _BLOCK_ELEMENTS // (num_spans * row_elements)
            size = max(min(size, max_tokens, self._counts[0] - begin), 1)
            tokens = torch.arange(begin, begin + size, device=self.slots.device)
            counts = torch.tensor(self._counts[:num_spans], device=self.slots.device).unsqueeze(1)
            rows = self._first_rows[:num_spans, None] + torch.minimum(tokens, counts - 1)
            yield SpanBlock(num_spans, rows, tokens < counts)
            begin += size


def read_states(state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The states of rows of one token each, [rows, ...] of float32 or wider; 0 at position 0.

    Args:
        state: [slots, ...].
        slots: [rows], none of them -1.
        positions: [rows].
    """
    read = state[slots]
    read[positions == 0] = 0
    return read.to(wide_dtype(state))


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that recurrences of such tensors are computed in: float32, or x's if wider."""
    return torch.promote_types(x.dtype, torch.float32)


def count_chunks(spans: PrefillSpans, size: int) -> int:
    """Upper bound of the numbers of chunks of `size` tokens: programs of a kernel."""
    return (spans.offsets[-1] - spans.offsets[0]) // size + len(spans.slots)


@jit
def find_chunk(
    offsets: tensor, num_spans: tensor, size: tensor, number: tensor
) -> tuple[tensor, tensor]:
    """The chunk with a number: its span, and its index in the span, which may be too large.

    Args:
        offsets: pointer to `PrefillSpans.device_offsets`.
        num_spans: spans of the step, at least one.
        size: tokens of a chunk.
        number: less than `count_chunks`.
    """
    first = tl.load(offsets)
    span = -1
    for begin in range(0, num_spans, 32):
        other = begin + tl.arange(0, 32)
        is_span = other < num_spans
        before = tl.load(offsets + other, mask=is_span, other=0) - first
        is_before = is_span & (before // size + other <= number)
        span += tl.sum(is_before.to(tl.int32), axis=0)
    index = number - (tl.load(offsets + span) - first) // size - span
    return span, index
