"""Short steps that read prompts, captured whole, attention too.

A step in pieces (`aquifer.engine.chunk_graphs`) costs the host some launches for each layer, which
take longer than a short step takes on the device. Here nothing is left to launch between: kernels
of attention read on the device which rows decode and which are of chunks, from lists of a fixed
length that the host fills before each run. So these graphs are launched at once.

What is launched does not shrink with the step: there are as many programs as the largest lists
need, and those without work end at once. Therefore only for short steps, with few chunks.
Recurrences are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from aquifer.cache.spans import IntArray, Rows, Spans
from aquifer.cache.view import LaunchView
from aquifer.engine.chunk_graphs import NARROWED, Forward
from aquifer.engine.graphs import ChunkStep, StepBuffers, padded_size
from aquifer.kernels.capture import GraphPool
from aquifer.kernels.prefill_work import NOTHING, PROGRAM_COLUMNS, Tiling, Work, plan_work
from aquifer.memory.transfer import upload_into
from aquifer.models import Wanted

MOST_TOKENS = 1792
"""Steps with more tokens take the device longer than the host, in pieces too."""

_SLOWER = 1.1
"""A graph is dropped if it takes this many times as long as the next larger one."""

MOST_CHUNKS = 32
"""Each may add a program without work for each group of heads. More prompts than that in so few
tokens are rare."""


class FixedSpans(NamedTuple):
    """The chunks of a step, in tensors that stay; see `DeviceSpans`."""

    device_slots: torch.Tensor  # [MOST_CHUNKS]
    device_starts: torch.Tensor  # [MOST_CHUNKS]
    device_offsets: torch.Tensor  # [MOST_CHUNKS + 1]
    works: Callable[[Tiling], Work]

    def work(self, tiling: Tiling) -> Work:
        """The lists of a launch."""
        return self.works(tiling)


class _Inputs(NamedTuple):
    """The inputs of a captured step on the device, all int64."""

    token_ids: torch.Tensor  # [size]
    positions: torch.Tensor  # [size]
    slots: torch.Tensor  # [size], -1 for padding
    context_lengths: torch.Tensor  # [size]
    last_rows: torch.Tensor  # [rows], rows of which hidden states are handed on
    last_slots: torch.Tensor  # [rows], their slots
    last_positions: torch.Tensor  # [rows], their positions
    last_lengths: torch.Tensor  # [rows], tokens of their sequences with these; 0 for padding
    decode_lengths: torch.Tensor  # [rows], the same of the first rows of the step
    chunk_slots: torch.Tensor  # [MOST_CHUNKS]; this and the next two as in `PrefillSpans`
    chunk_starts: torch.Tensor  # [MOST_CHUNKS]
    chunk_offsets: torch.Tensor  # [MOST_CHUNKS + 1]
    sampling: torch.Tensor  # [3 * padded rows], see `ChunkStep`; -1 for padding


_SLOTS, _SAMPLING = map(_Inputs._fields.index, ("slots", "sampling"))


class StepLayout:
    """Where the inputs of a captured step of some number of tokens are, within one vector.

    Args:
        size: tokens.
        max_rows: hidden states that it hands on, and rows that decode, at most; a padded size.
        tilings: of its launches of attention to chunks.
    """

    def __init__(self, size: int, max_rows: int, tilings: Sequence[Tiling]) -> None:
        self.num_rows = min(size, max_rows)
        self._tilings = tilings
        self._sampling_rows = min(padded_size(self.num_rows), max_rows)
        self._widths = [size] * 4 + [self.num_rows] * 5 + [MOST_CHUNKS] * 2 + [MOST_CHUNKS + 1]
        self._widths.append(3 * self._sampling_rows)
        for tiling in tilings:
            num_programs = tiling.most_programs(size, MOST_CHUNKS)
            self._widths += [num_programs * PROGRAM_COLUMNS, tiling.most_merges]

    @property
    def num_elements(self) -> int:
        """Length of the vector."""
        return sum(self._widths)

    def split(self, flat: torch.Tensor) -> tuple[_Inputs, dict[Tiling, Work]]:
        """The inputs within a vector that is at least as long."""
        parts = flat[: self.num_elements].split(self._widths)
        lists = iter(parts[_SAMPLING + 1 :])
        works = {
            tiling: Work(next(lists).view(-1, PROGRAM_COLUMNS), next(lists), tiling.room)
            for tiling in self._tilings
        }
        return _Inputs(*parts[: _SAMPLING + 1]), works

    def pack(self, step: ChunkStep) -> IntArray:
        """The vector for a step."""
        spans, num_decodes, sampled = step.spans, step.num_decodes, step.sampled
        last, chunks = spans.ends_of(sampled), slice(num_decodes, None)
        starts, counts = spans.starts[chunks], spans.counts[chunks]
        slots, positions = spans.rows()
        padded = np.full((3, self._sampling_rows), NOTHING)
        padded[:, : len(sampled)] = step.sampling
        values: list[IntArray] = [
            step.token_ids,
            positions,
            slots,
            step.context_lengths,
            spans.offsets[1:][sampled] - 1,
            last.slots,
            last.starts,
            last.starts + 1,
            spans.starts[:num_decodes] + 1,
            spans.slots[chunks],
            starts,
            spans.offsets[chunks],
            padded.ravel(),
        ]
        for tiling in self._tilings:
            programs, merges, _ = plan_work(starts, counts, tiling)
            values += [programs.ravel(), merges]
        packed = np.zeros(self.num_elements, np.int64)
        first = 0
        for place, (width, value) in enumerate(zip(self._widths, values, strict=True)):
            packed[first : first + len(value)] = value
            if place == _SLOTS or place > _SAMPLING:
                packed[first + len(value) : first + width] = NOTHING
            first += width
        return packed

    def padding(self) -> IntArray:
        """The vector of a step without tokens."""
        none = np.zeros(0, np.int64)
        spans = Spans.make(none, none, none)
        sampling = np.zeros((3, 0), np.int64)
        return self.pack(ChunkStep(spans, 0, none, none, none, sampling))


class WholeGraphs:
    """The short steps of one model that read prompts, captured whole.

    Args:
        forward: the model.
        rehearsal: launches the same kernels, each at least once, and gives no results.
        view: makes the view of a step's KV.
        buffers: where it leaves the hidden states of the rows to hand on, and inputs of sampling.
        pool: the graphs' memory.
        device: the device.
    """

    def __init__(
        self,
        forward: Forward,
        rehearsal: Forward,
        view: Callable[[Rows], LaunchView],
        buffers: StepBuffers,
        pool: GraphPool,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._rehearsal = rehearsal
        self._view = view
        self._buffers = buffers
        self._pool = pool
        self._device = device
        self._tilings: dict[Tiling, None] = {}  # in the order in which they were first needed
        self._flat: torch.Tensor | None = None
        self._captured: dict[int, tuple[StepLayout, torch.cuda.CUDAGraph]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured numbers of tokens, ascending."""
        return tuple(sorted(self._captured))

    def size_of(self, spans: Spans, num_decodes: int) -> int | None:
        """The least captured number of tokens that a step fits in; None if it does not fit.

        Args:
            spans: as in `ChunkStep`.
            num_decodes: likewise.
        """
        if len(spans.slots) - num_decodes > MOST_CHUNKS:
            return None
        num_tokens = spans.num_tokens
        return min((size for size in self._captured if size >= num_tokens), default=None)

    def run(self, size: int, step: ChunkStep) -> None:
        """Run a step, up to the hidden states; `size` is `size_of` it."""
        assert self._flat is not None
        layout, graph = self._captured[size]
        packed = layout.pack(step)
        upload_into(self._flat[: len(packed)], packed)
        graph.replay()

    def rehearse(self, size: int) -> None:
        """Launch the kernels of the step of that many tokens, without results."""
        layout = StepLayout(size, self._buffers.max_rows, ())
        inputs, _ = layout.split(torch.from_numpy(layout.padding()).to(self._device))

        def work(tiling: Tiling) -> Work:
            self._tilings[tiling] = None
            needed = StepLayout(size, self._buffers.max_rows, (tiling,))
            _, works = needed.split(torch.from_numpy(needed.padding()).to(self._device))
            return works[tiling]

        self._launch(size, self._rehearsal, inputs, work)

    def capture(self, size: int) -> None:
        """Capture the step of that many tokens. Pre-condition: `rehearse` was called for each
        size, and the largest is captured first."""
        layout = StepLayout(size, self._buffers.max_rows, tuple(self._tilings))
        padding = torch.from_numpy(layout.padding()).to(self._device)
        if self._flat is None:
            self._flat = torch.zeros_like(padding)
        self._flat[: len(padding)].copy_(padding)
        inputs, works = layout.split(self._flat)
        graph = self._pool.capture(
            lambda: self._launch(size, self._forward, inputs, works.__getitem__)
        )
        self._captured[size] = layout, graph

    def keep_fast(self, seconds_of: Callable[[Callable[[], None]], float]) -> None:
        """Drop the graphs that take longer than the next larger one, which then takes their steps.

        cuBLAS has slow kernels for some numbers of rows: with 448 tokens, a step of Llama-3-8B took
        a quarter longer than with 512 (benchmarks/gpu). Each graph runs once before the model
        serves, too.

        Args:
            seconds_of: runs something, and tells how long it takes.
        """
        larger, larger_s = 0, math.inf
        for size in reversed(self.sizes):
            seconds = self._seconds(size, seconds_of)
            # Again, as something else may have kept the device busy.
            if seconds > _SLOWER * larger_s and (
                self._seconds(size, seconds_of) > _SLOWER * self._seconds(larger, seconds_of)
            ):
                del self._captured[size]
            else:
                larger, larger_s = size, seconds

    def _seconds(self, size: int, seconds_of: Callable[[Callable[[], None]], float]) -> float:
        """How long a step of padding takes."""
        assert self._flat is not None
        layout, graph = self._captured[size]
        padding = layout.padding()
        self._flat[: len(padding)].copy_(torch.from_numpy(padding))
        return seconds_of(graph.replay)

    def _launch(
        self, size: int, forward: Forward, inputs: _Inputs, works: Callable[[Tiling], Work]
    ) -> None:
        chunks = FixedSpans(inputs.chunk_slots, inputs.chunk_starts, inputs.chunk_offsets, works)
        rows = Rows(inputs.slots, inputs.positions, inputs.decode_lengths, None, chunks)
        last_rows, wanted = inputs.last_rows, None
        if size >= NARROWED * len(last_rows):
            last = Rows(inputs.last_slots, inputs.last_positions, inputs.last_lengths, None)
            wanted = Wanted(last_rows, self._view(last))
        hidden = forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.context_lengths,
            self._view(rows),
            wanted,
        )
        self._buffers.hidden[: len(last_rows)].copy_(
            hidden[last_rows] if wanted is None else hidden
        )
        sampling = inputs.sampling.view(3, -1)
        self._buffers.inputs[:, : sampling.shape[1]].copy_(sampling)
