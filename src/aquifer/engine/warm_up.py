"""Warm-up of a model on a device: its memory for activations, and its kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from aquifer.cache.layout import KVLayout
from aquifer.cache.spans import Rows, Spans
from aquifer.cache.state_view import Recurrence
from aquifer.cache.view import AttentionOptions, KVSource
from aquifer.engine.choosing import TokenChoice
from aquifer.engine.graphs import StepBuffers
from aquifer.engine.reports import OnStage
from aquifer.engine.sampler import SamplingMode
from aquifer.kernels import compiled_together
from aquifer.kernels.kv_write import kv_write
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.prefill_work import MIN_SPLIT_KEYS
from aquifer.memory.driver.base import Driver
from aquifer.models import Model, ModelInput
from aquifer.models.latent import LEAST_PROMPT_TOKENS

_CHUNK_TOKENS = 8
_PREFIX_TOKENS = 2 * MIN_SPLIT_KEYS


@dataclass(frozen=True, slots=True)
class _Attention:
    """How a model's layers attend."""

    layer: int
    num_heads: int
    key_dim: int
    dtype: torch.dtype
    how: AttentionOptions


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """The recurrence of a model's layers, with columns and row stride of its inputs."""

    layer: int
    columns: int
    stride: int
    dtype: torch.dtype
    recurrence: Recurrence


class _NoCache:
    """A `KVView` of padding alone: nothing is written, and nothing is attended to."""

    decoding = None

    def __init__(self, layout: KVLayout, padding: torch.Tensor) -> None:
        self._padding = padding
        layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in layout.groups():
            token = padding.new_zeros((1, 1, group.layout.token_elements), dtype=layout.dtype)
            layers.update(zip(group.layers, group.layout.split(token), strict=True))
        self._layers = [layers[layer] for layer in range(len(layers))]
        self._attentions: dict[tuple[object, ...], _Attention] = {}
        self.recurrence: _Recurrence | None = None  # of the first layer that has state

    @property
    def attentions(self) -> list[_Attention]:
        """The ways in which the layers have attended, with the first layer of each."""
        return list(self._attentions.values())

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return *self._layers[layer], self._padding, self._padding

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        kv_write(key, value, *self.destination(layer))

    def whole_prompts(self) -> PrefillSpans | None:
        return None

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        if self.recurrence is None:
            self.recurrence = _Recurrence(
                layer, inputs.shape[1], inputs.stride(0), inputs.dtype, recurrence
            )
        return inputs.new_zeros(len(inputs), recurrence.out_columns)

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        shape = (*query.shape[1:], query.dtype, how)
        kv_shape = self._layers[layer][1].shape
        self._attentions.setdefault((*shape, kv_shape), _Attention(layer, *shape))
        return query.new_zeros(*query.shape[:2], kv_shape[-1])


class WarmUp:
    """Runs everything once that a model's steps may run, of no sequence at all.

    Args:
        model: the model.
        kv: gives the addresses of its KV.
        choice: chooses its tokens.
        buffers: its buffers; hidden states are allocated.
        driver: of the device.
        max_seqs: sequences of the largest step.
        max_tokens: length of the longest sequence.
        num_tokens: tokens of the largest step.
    """

    def __init__(
        self,
        model: Model,
        kv: KVSource,
        choice: TokenChoice,
        buffers: StepBuffers,
        driver: Driver,
        max_seqs: int,
        max_tokens: int,
        num_tokens: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._choice = choice
        self._buffers = buffers
        self._driver = driver
        self._device = driver.device
        self._max_seqs = max_seqs
        self._num_tokens = num_tokens
        is_latent = any(layer.is_latent for layer in model.kv_layout.layers)
        # A chunk of a prompt, after a prefix that is long enough for attention to be split.
        count = min(_CHUNK_TOKENS, num_tokens, max_tokens)
        start = min(_PREFIX_TOKENS, max_tokens - count)
        self._chunk = Spans.make(np.array([1]), np.array([start]), np.array([count]))
        # Layers with latent KV compute long prompts in another way.
        self._prompt: Spans | None = None
        if is_latent and min(num_tokens, max_tokens) >= LEAST_PROMPT_TOKENS:
            zero = np.array([0])
            self._prompt = Spans.make(zero + 1, zero, zero + LEAST_PROMPT_TOKENS)
        self._attentions: list[_Attention] = []
        self._recurrence: _Recurrence | None = None

    @property
    def has_state(self) -> bool:
        """Whether layers have recurrences. Pre-condition: `run` was called."""
        return self._recurrence is not None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV that the first slot should have."""
        longest = int(self._chunk.starts[0] + self._chunk.counts[0])
        return longest if self._prompt is None else max(longest, LEAST_PROMPT_TOKENS)

    def run(self, on_stage: OnStage, *, has_kv: bool) -> float:
        """Compile or load the kernels, and take the device's memory for activations.

        Args:
            on_stage: told how many kernels are compiled.
            has_kv: whether the first slot has that KV; otherwise, no attention is run.

        Returns: seconds that a token of the largest step takes.
        """
        with compiled_together(self._device, partial(on_stage, "kernels")):
            self._kv.rehearse()
            self._run_padding(self._model.rehearsal())
            if has_kv:
                self._attend_chunk()
        self._kv.rehearse()
        step_s = self._run_padding(self._model)
        if has_kv:
            self._attend_chunk()
            # Its intermediate results are memory that the largest step needs.
            zero = np.array([0])
            self._recur(Spans.make(zero + 1, zero, zero + self._num_tokens))
        return step_s / self._num_tokens

    def seconds_of(self, work: Callable[[], None]) -> float:
        """Seconds from the launch of some work to its end: the shorter one of two runs."""
        seconds = math.inf
        for _ in range(2):
            self._wait()
            begun_s = time.perf_counter()
            work()
            self._wait()
            seconds = min(seconds, time.perf_counter() - begun_s)
        return seconds

    def _run_padding(self, model: Model) -> float:
        """Run the largest step, and sample in every way; seconds of the former."""
        padding = torch.full((self._num_tokens,), -1, dtype=torch.int64, device=self._device)
        zeros = torch.zeros_like(padding)
        view = _NoCache(self._model.kv_layout, padding)
        self._wait()
        begun_s = time.perf_counter()
        contexts = torch.ones_like(padding)  # rows of padding would have no experts
        hidden = model.forward(ModelInput(zeros, zeros, contexts), view)
        self._wait()
        step_s = time.perf_counter() - begun_s
        self._attentions, self._recurrence = view.attentions, view.recurrence
        self._buffers.make_hidden(hidden)
        num_seqs = min(self._max_seqs + 1, self._num_tokens)
        for mode in SamplingMode:
            self._choice.choose(
                hidden[:num_seqs], padding[:num_seqs], zeros[:num_seqs], zeros[:num_seqs], mode
            )
        return step_s

    def _attend_chunk(self) -> None:
        """Run the chunk and the prompt, and attention alone."""
        for spans in (self._chunk, self._prompt):
            if spans is not None:
                rows = Rows.of(spans, 0, self._device)
                few = torch.zeros_like(rows.positions)
                batch = ModelInput(few, rows.positions, rows.positions + 1)
                self._model.forward(batch, self._kv.view(rows))
        self._attend(self._chunk)

    def _attend(self, spans: Spans) -> None:
        view = self._kv.view(Rows.of(spans, 0, self._device))
        for attention in self._attentions:
            shape = (spans.num_tokens, attention.num_heads, attention.key_dim)
            view.attend(
                attention.layer,
                torch.zeros(shape, dtype=attention.dtype, device=self._device),
                attention.how,
            )
        self._recur(spans)

    def _recur(self, spans: Spans) -> None:
        """Run the recurrence of a layer, if any has one."""
        if self._recurrence is not None:
            of = self._recurrence
            shape = (spans.num_tokens, of.stride)
            inputs = torch.zeros(shape, dtype=of.dtype, device=self._device)[:, : of.columns]
            view = self._kv.view(Rows.of(spans, 0, self._device))
            view.recur(of.layer, inputs, of.recurrence)

    def _wait(self) -> None:
        """Wait for everything that has been launched."""
        fence = self._driver.fence()
        if fence is not None:
            fence.wait()
