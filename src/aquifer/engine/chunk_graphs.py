"""Steps that read prompts, captured in pieces: everything but attention and recurrences.

Short ones are captured whole too (`aquifer.engine.whole_graphs`).

Which sequences run, and how many tokens of each, changes the shape of attention and of recurrences
only. All else depends on the number of tokens alone. So the parts of a step between the layers'
attention are captured for some numbers of tokens, to which others are padded, and attention is
launched between them as the step needs it. Pieces of one step:

    embedding, first norm, QKV, rotation, KV written | attention | output, MLP, next QKV, ... | ...

The model's code is not cut: while a step is captured, its calls of `KVView.attend` and
`KVView.recur` end one piece and begin the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from aquifer.cache.spans import IntArray, Rows
from aquifer.cache.state_view import Recurrence
from aquifer.cache.view import AttentionOptions, KVView, LaunchView
from aquifer.engine.graphs import StepBuffers, lasting
from aquifer.kernels.capture import GraphPool
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.models import Wanted

Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, KVView, Wanted | None], torch.Tensor
]
"""Runs (token ids, positions, slots, context lengths, each [tokens], a view of their KV, and the
rows that are wanted or None for all); gives hidden states of the rows, [rows, hidden]. A token id
below 0 stands for the last token of the row's slot."""

_PER_OCTAVE = 4
_LEAST_TOKENS = 16
_EVEN_TOKENS = 256  # up to here, sizes are multiples of 64: steps are bound by reading weights

NARROWED = 2
"""Steps of at least this many times the rows to hand on compute the last layer for these alone,
and for all that there may be."""


def chunk_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens to capture, ascending: from 256 on four for each doubling.

    Args:
        max_tokens: tokens of the largest step, which is one of them.
    """
    sizes = {16, 32, 64, 128, 192, 256, max_tokens}
    octave = _EVEN_TOKENS
    while octave < max_tokens:
        sizes.update(octave + octave * part // _PER_OCTAVE for part in range(1, _PER_OCTAVE + 1))
        octave *= 2
    return sorted(size for size in sizes if size <= max_tokens)


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call of `KVView.attend` in a captured step."""

    layer: int
    query: torch.Tensor  # [size, heads, key_dim], as the piece before leaves it
    out: torch.Tensor  # [size, heads, value_dim], read by the piece after it
    how: AttentionOptions
    of_wanted: bool  # whether it is that of the wanted rows alone

    def launch(self, view: LaunchView, wanted: LaunchView) -> None:
        """Launch it for the tokens of a step, or for the rows that are wanted."""
        chosen = wanted if self.of_wanted else view
        chosen.attend_into(self.layer, self.query, self.out, self.how)


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """One call of `KVView.recur` in a captured step."""

    layer: int
    inputs: torch.Tensor  # [size, columns], as the piece before leaves it
    out: torch.Tensor  # [size, out_columns], read by the piece after it
    recurrence: Recurrence

    def launch(self, view: LaunchView, _: LaunchView) -> None:
        """Launch it for the tokens of a step."""
        view.recur_into(self.layer, self.inputs, self.out, self.recurrence)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured step: a piece, then for each layer attention or a recurrence, and another piece.

    A layer with both has a piece between them.
    """

    pieces: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    between: list[_Attention | _Recurrence] = field(default_factory=list)


class InputTensors(NamedTuple):
    """The inputs of a captured step on the device, all int64."""

    token_ids: torch.Tensor  # [size]
    positions: torch.Tensor  # [size]
    slots: torch.Tensor  # [size], -1 for padding
    context_lengths: torch.Tensor  # [size]
    last_rows: torch.Tensor  # [max_rows], rows of which hidden states are handed on
    last_slots: torch.Tensor  # [max_rows], their slots
    last_positions: torch.Tensor  # [max_rows], their positions
    chunks: torch.Tensor  # of chunks, see `Rows.arrays`; as long as a step needs


_NUM_COLUMNS, _NUM_LAST = 4, 3  # of the tensors above: [size], and [max_rows]


class ChunkInputs:
    """The inputs of a captured step on the device, in one tensor that one copy fills.

    Args:
        max_tokens: tokens of the largest step.
        max_rows: hidden states that a step hands on.
        max_chunks: prompts that a step reads parts of.
        device: the device.
    """

    def __init__(
        self, max_tokens: int, max_rows: int, max_chunks: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        num_elements = _NUM_COLUMNS * max_tokens + _NUM_LAST * max_rows + 4 * max_chunks + 1
        self.flat = torch.zeros(num_elements, dtype=torch.int64, device=device)

    def clear(self, size: int) -> None:
        """Make the rows of a step of that many tokens padding: token 0 at position 0 of no slot."""
        self.flat.zero_()
        self.of(size).slots.fill_(-1)

    def of(self, size: int) -> InputTensors:
        """The inputs of a step of that many tokens, where it reads them."""
        sizes = [size] * _NUM_COLUMNS + [self.max_rows] * _NUM_LAST
        return InputTensors(*self.flat.split([*sizes, len(self.flat) - sum(sizes)]))

    def packed(
        self,
        size: int,
        columns: Sequence[IntArray],
        last: Sequence[IntArray],
        chunks: Sequence[IntArray],
    ) -> IntArray:
        """The beginning of `flat` for a step.

        Args:
            size: the captured number of tokens.
            columns: the first of `InputTensors`, of the step's own tokens; the rest is padding.
            last: those of the rows to hand on; the rest is padding.
            chunks: `InputTensors.chunks`, in parts.
        """
        widths = [size] * _NUM_COLUMNS + [self.max_rows] * _NUM_LAST
        packed = np.zeros(sum(widths) + sum(map(len, chunks)), np.int64)
        packed[2 * size : 3 * size] = -1  # slots
        first = 0
        for width, values in zip(widths, (*columns, *last), strict=True):
            packed[first : first + len(values)] = values
            first += width
        np.concatenate(chunks, out=packed[first:])
        return packed


class ChunkGraphs:
    """The captured steps of one model that read prompts.

    Args:
        forward: the model.
        rehearsal: launches the same kernels, each at least once, and gives no results.
        view: makes the view of a step's KV.
        inputs: where it reads.
        buffers: where it leaves the hidden states of the rows to hand on.
        pool: the graphs' memory.
    """

    def __init__(
        self,
        forward: Forward,
        rehearsal: Forward,
        view: Callable[[Rows], LaunchView],
        inputs: ChunkInputs,
        buffers: StepBuffers,
        pool: GraphPool,
    ) -> None:
        self._forward = forward
        self._rehearsal = rehearsal
        self._view = view
        self._inputs = inputs
        self._buffers = buffers
        self._pool = pool
        self._captured: dict[int, _Captured] = {}
        # For the results of attention, and of recurrences, of any layer.
        self._outs: dict[str, torch.Tensor] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured numbers of tokens, ascending."""
        return tuple(sorted(self._captured))

    def size_of(self, num_tokens: int) -> int | None:
        """The least captured number of tokens that these fit in; None if they do not."""
        return min((size for size in self._captured if size >= num_tokens), default=None)

    def run(self, size: int, view: LaunchView, wanted: LaunchView) -> None:
        """Run the step in the inputs.

        Args:
            size: a captured number of tokens.
            view: of the KV of those that are no padding.
            wanted: of the KV of the rows to hand on, each as a step of one token.
        """
        captured = self._captured[size]
        first, *others = captured.pieces
        first.replay()
        for launched, piece in zip(captured.between, others, strict=True):
            launched.launch(view, wanted)
            piece.replay()

    def rehearse(self, size: int) -> None:
        """Launch the kernels of the step of that many tokens, without attention and results."""
        uncut = _Uncut(self._padding(size), self._out_of)
        self._run(size, self._rehearsal, uncut, uncut)

    def capture(self, size: int) -> None:
        """Capture the step of that many tokens; the largest comes first, so that all share its
        memory. Pre-condition: `rehearse` was called for the largest."""
        padding = self._padding(size)
        cut = _Cut(padding, self._out_of, self._pool, _Captured())
        wanted = _Cut(padding, self._out_of, self._pool, cut.captured, of_wanted=True)
        with self._pool.capturing():
            cut.begin()
            try:
                self._run(size, self._forward, cut, wanted)
            except BaseException:
                cut.abandon()
                raise
            cut.end()
        self._captured[size] = cut.captured

    def _padding(self, size: int) -> LaunchView:
        """Make all rows padding; a view of them. Which decode is for attention alone to know."""
        self._inputs.clear(size)
        inputs = self._inputs.of(size)
        return self._view(Rows(inputs.slots, inputs.positions, inputs.positions[:0], None))

    def _run(self, size: int, forward: Forward, view: KVView, of_wanted: KVView) -> None:
        token_ids, positions, slots, contexts, rows, *_ = self._inputs.of(size)
        wanted = Wanted(rows, of_wanted) if size >= NARROWED * len(rows) else None
        hidden = forward(token_ids, positions, slots, contexts, view, wanted)
        self._buffers.hidden.copy_(hidden[rows] if wanted is None else hidden)

    def _out_of(self, kind: str, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Where attention, or a recurrence, leaves its results."""
        num_elements = math.prod(shape)
        out = self._outs.get(kind)
        if out is None or out.numel() < num_elements:
            assert not self._captured, "rehearse the largest step before one is captured"
            out = self._outs[kind] = like.new_zeros(num_elements)
        return out[:num_elements].view(shape)


_OutOf = Callable[[str, torch.Tensor, tuple[int, ...]], torch.Tensor]


class _Uncut:
    """A `KVView` that leaves out attention and recurrences."""

    decoding = None

    def __init__(self, view: LaunchView, out_of: _OutOf) -> None:
        self._view = view
        self._out_of = out_of

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._view.destination(layer)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._view.write(layer, key, value)

    def whole_prompts(self) -> PrefillSpans | None:
        return None

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        value_dim = self._view.destination(layer)[1].shape[-1]
        return self._out_of("attention", query, (*query.shape[:2], value_dim))

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        return self._out_of("recurrence", inputs, (len(inputs), recurrence.out_columns))


class _Cut(_Uncut):
    """The same while a step is captured: where attention or a recurrence would be, a piece ends.

    Args:
        view: of the rows, which are padding.
        out_of: finds where results go.
        pool: the graphs' memory.
        captured: what has been captured; added to.
        of_wanted: whether the rows are those that are wanted.
    """

    def __init__(
        self,
        view: LaunchView,
        out_of: _OutOf,
        pool: GraphPool,
        captured: _Captured,
        *,
        of_wanted: bool = False,
    ) -> None:
        super().__init__(view, out_of)
        self._pool = pool
        self._of_wanted = of_wanted
        self.captured = captured

    def begin(self) -> None:
        """Begin a piece."""
        self.captured.pieces.append(self._pool.begin())

    def end(self) -> None:
        """End the piece."""
        self.captured.pieces[-1].capture_end()

    def abandon(self) -> None:
        """End the piece after an exception."""
        self._pool.abandon(self.captured.pieces[-1])

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        out = super().attend(layer, query, how)
        self._next(_Attention(layer, lasting(query), out, how, self._of_wanted))
        return out

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        out = super().recur(layer, inputs, recurrence)
        self._next(_Recurrence(layer, lasting(inputs), out, recurrence))
        return out

    def _next(self, between: _Attention | _Recurrence) -> None:
        """End the piece, and begin the one after what is launched next."""
        self.captured.between.append(between)
        self.end()
        self.begin()
