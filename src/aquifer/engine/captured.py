"""All captured steps of one model, made before it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from aquifer.cache.base import IntArray
from aquifer.cache.spans import Rows, Spans
from aquifer.cache.view import LaunchView
from aquifer.engine import chunk_graphs, decode_graphs, sample_graphs
from aquifer.engine.chunk_graphs import ChunkGraphs, ChunkInputs, chunk_sizes
from aquifer.engine.decode_graphs import DecodeGraphs
from aquifer.engine.graphs import ChunkStep, StepBuffers, padded_size, padded_sizes
from aquifer.engine.reports import OnStage
from aquifer.engine.sample_graphs import CAPTURED_MODES, Sampled, SampleGraphs
from aquifer.engine.sampler import SamplingMode
from aquifer.engine.whole_graphs import MOST_TOKENS, WholeGraphs
from aquifer.kernels import compiled_together
from aquifer.kernels.capture import GraphPool
from aquifer.memory.transfer import Uploads, upload, upload_into

LONG_STEP_S = 0.05
"""Steps that take longer than this on the device are not captured: launching their kernels one by
one takes 10 to 20 ms of the host, while the step before runs."""

LEAST_PIECES_TOKENS = 512
"""Fewer tokens are not captured in pieces, where steps are captured whole too."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The two kinds of step of a model, up to the hidden states."""

    decode: decode_graphs.Forward  # one token of each sequence
    forward: chunk_graphs.Forward  # any tokens


class CapturedSteps:
    """The captured steps of one model.

    Args:
        steps: what to capture.
        rehearsals: launch the same kernels, each at least once, and give no results.
        sample: logits and sampling.
        view: makes the view of a step's KV.
        buffers: what they read and write.
        max_seqs: sequences of the largest step.
        max_tokens: tokens of the largest step.
        device: the device.
        has_state: whether layers have recurrences.
    """

    def __init__(
        self,
        steps: Steps,
        rehearsals: Steps,
        sample: sample_graphs.Sample,
        view: Callable[[Rows], LaunchView],
        buffers: StepBuffers,
        max_seqs: int,
        max_tokens: int,
        device: torch.device,
        *,
        has_state: bool,
    ) -> None:
        self._device = device
        self._buffers = buffers
        self._view = view
        self._sizes = padded_sizes(max_seqs)
        self._chunk_sizes = chunk_sizes(max_tokens)
        self._inputs = ChunkInputs(max_tokens, buffers.max_rows, max_seqs, device)
        pool = GraphPool(device)
        self._decodes = DecodeGraphs(steps.decode, rehearsals.decode, buffers, pool)
        self._samples = SampleGraphs(sample, buffers, pool)
        self._chunks = ChunkGraphs(
            steps.forward, rehearsals.forward, view, self._inputs, buffers, pool
        )
        self._whole = WholeGraphs(steps.forward, rehearsals.forward, view, buffers, pool, device)
        self._most_whole_tokens = 0 if has_state else MOST_TOKENS
        self._uploaded = np.full((2, buffers.max_rows), -1, np.int64)

    def rehearse(self, token_s: float, on_stage: OnStage) -> None:
        """Compile what the steps need.

        Args:
            token_s: seconds a token of a large step.
            on_stage: told how many kernels are compiled.
        """
        self._clear()
        with compiled_together(self._device, partial(on_stage, "kernels")):
            for size in reversed(self._in_pieces(token_s)):
                self._chunks.rehearse(size)
            for size in reversed(self._as_a_whole(token_s)):
                self._whole.rehearse(size)
            for size in reversed(self._sizes):
                self._decodes.rehearse(size)
                for mode in CAPTURED_MODES:
                    self._samples.rehearse(size, mode)

    def capture(self, token_s: float, on_stage: OnStage) -> None:
        """Capture the steps. Pre-condition: `rehearse` was called.

        Args:
            token_s: as in `rehearse`.
            on_stage: told how many steps are captured.
        """
        self._clear()
        pieces, whole = self._in_pieces(token_s), self._as_a_whole(token_s)
        captures = [
            *(partial(self._capture_decodes, size) for size in reversed(self._sizes)),
            *(partial(self._chunks.capture, size) for size in reversed(pieces)),
            *(partial(self._whole.capture, size) for size in reversed(whole)),
        ]
        for num_done, capture in enumerate(captures, 1):
            capture()
            on_stage("steps", num_done, len(captures))
        self._buffers.restart_reports()

    def keep_fast(self, seconds_of: Callable[[Callable[[], None]], float]) -> None:
        """Drop captured steps that a larger one does better; see `WholeGraphs.keep_fast`."""
        self._whole.keep_fast(seconds_of)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens for which steps that read prompts are captured, ascending."""
        whole = self._whole.sizes
        largest = max(whole, default=0)
        return *whole, *(size for size in self._chunks.sizes if size > largest)

    def has_chunks(self, spans: Spans, num_decodes: int) -> bool:
        """Whether a step that reads prompts is captured; see `ChunkStep`."""
        return (
            self._whole.size_of(spans, num_decodes) is not None
            or self._chunks.size_of(spans.num_tokens) is not None
        )

    def decode(self, slots: IntArray, sampled_slots: IntArray, uploads: Uploads) -> None:
        """Run a step of one token for each sequence, up to the hidden states.

        The slots are not copied to the device if the same ones ran before.

        Args:
            slots: [n].
            sampled_slots: [n], the same but -1 for rows that `sample` is to leave alone.
            uploads: what else the step needs on the device.
        """
        size = padded_size(len(slots))
        padded = np.full((2, size), -1, np.int64)
        padded[0, : len(slots)] = slots
        padded[1, : len(slots)] = sampled_slots
        if not np.array_equal(padded, self._uploaded[:, :size]):
            uploads.add(padded, self._buffers.inputs[:2, :size].copy_)
        uploads.send()
        self._uploaded[:, :size] = padded  # only now: the upload may fail
        self._decodes.run(size)

    def run_chunks(self, step: ChunkStep) -> None:
        """Run a step that reads prompts, up to the hidden states; `sample` goes on.

        Pre-condition: `has_chunks`.
        """
        spans, num_decodes, sampled = step.spans, step.num_decodes, step.sampled
        self._uploaded[:] = -2  # no slot: `decode` must upload its own
        size = self._whole.size_of(spans, num_decodes)
        if size is not None:
            self._whole.run(size, step)
            return
        size = self._chunks.size_of(spans.num_tokens)
        assert size is not None
        num_tokens, last = spans.num_tokens, spans.ends_of(sampled)
        slots, positions, *chunks = Rows.arrays(spans, num_decodes)
        packed = self._inputs.packed(
            size,
            (step.token_ids, positions, slots, step.context_lengths),
            (spans.offsets[1:][sampled] - 1, last.slots, last.starts),
            chunks,
        )
        upload_into(self._inputs.flat[: len(packed)], packed)
        inputs = self._inputs.of(size)
        lengths = list(map(len, chunks))
        tensors = inputs.chunks[: sum(lengths)].split(lengths)
        own = inputs.slots[:num_tokens], inputs.positions[:num_tokens], *tensors
        num_last = len(sampled)
        padded = np.full((3, padded_size(max(num_last, 1))), -1, np.int64)
        padded[:, :num_last] = step.sampling
        self._buffers.inputs[:, : padded.shape[1]].copy_(upload(padded, self._device))
        self._chunks.run(
            size,
            self._view(Rows.over(spans, num_decodes, own)),
            self._view(Rows.single(inputs.last_slots[:num_last], inputs.last_positions[:num_last])),
        )

    def sample(self, num_rows: int, mode: SamplingMode) -> Sampled:
        """Sample the rows of `decode`, or those that `run_chunks` was to hand on; see
        `SampleGraphs.run`.

        Args:
            num_rows: at least one.
            mode: at least what any of the sampled rows needs.
        """
        return self._samples.run(num_rows, mode)

    def _capture_decodes(self, size: int) -> None:
        """Capture the step in which that many sequences decode, and how it ends."""
        self._decodes.capture(size)
        for mode in CAPTURED_MODES:
            self._samples.capture(size, mode)

    def _as_a_whole(self, token_s: float) -> list[int]:
        """Numbers of tokens of which a step is captured whole, ascending."""
        return [size for size in self._short(token_s) if size <= self._most_whole_tokens]

    def _in_pieces(self, token_s: float) -> list[int]:
        """Numbers of tokens of which a step is captured in pieces, ascending.

        Shorter ones are captured whole, and the few of more chunks than fit in take the pieces of a
        larger step.
        """
        short = self._short(token_s)
        if not self._most_whole_tokens:
            return short
        return [size for size in short if size >= LEAST_PIECES_TOKENS or size == short[-1]]

    def _short(self, token_s: float) -> list[int]:
        """Numbers of tokens of which a step is captured, ascending."""
        return [size for size in self._chunk_sizes if size * token_s <= LONG_STEP_S]

    def _clear(self) -> None:
        """Make all rows of decode steps padding."""
        self._uploaded[:] = -1
        self._buffers.inputs.fill_(-1)
