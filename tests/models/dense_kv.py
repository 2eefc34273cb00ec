"""Reference `KVView`: KV and state in plain tensors, and attention computed one token at a time."""

from __future__ import annotations

import numpy as np
import torch

from aquifer.cache.base import (
    AttentionOptions,
    IntArray,
    KVLayout,
    KVView,
    Recurrence,
    Rows,
    Spans,
    StateLayout,
)
from aquifer.cache.state_view import StateView, WithoutState
from aquifer.kernels.prefill_attention import PrefillSpans


def empty_states(layout: StateLayout | None, num_slots: int) -> list[list[torch.Tensor]]:
    """The state of each layer for that many sequences, as caches give it; not a number so far.

    Slots are not neighbours: the first stride of a state is any.
    """
    return [
        [
            torch.full((num_slots, 2, *each.shape), torch.nan, dtype=each.dtype)[:, 0]
            for each in layer
        ]
        for layer in (() if layout is None else layout.layers)
    ]


class DenseKV:
    """KV of `num_slots` sequences of up to `max_tokens` tokens each; with a layout, state too."""

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        max_tokens: int,
        state_layout: StateLayout | None = None,
    ) -> None:
        shape = (num_slots, max_tokens, layout.token_elements)
        # Not a number, so that a read of what was never written shows in the result.
        self.layers = layout.split(torch.full(shape, torch.nan, dtype=layout.dtype))
        self.states = empty_states(state_layout, num_slots)

    def view(self, slots: IntArray, starts: IntArray, counts: IntArray) -> KVView:
        """One step, which writes [starts, starts + counts) of each slot."""
        return _DenseView(self.layers, self.states, Spans.make(slots, starts, counts))


class _DenseView:
    def __init__(
        self,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        states: list[list[torch.Tensor]],
        spans: Spans,
    ) -> None:
        self._layers = layers
        self._spans = spans
        rows = Rows.of(spans, 0, torch.device("cpu"))
        self._state = StateView(states, rows) if states else WithoutState()

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        return self._state.recur(layer, inputs, recurrence)

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, positions = map(torch.from_numpy, self._spans.rows())
        return *self._layers[layer], slots, positions

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values, slots, positions = self.destination(layer)
        assert key.shape[0] == value.shape[0] == len(slots)
        keys[slots, positions] = key
        values[slots, positions] = value

    @property
    def decoding(self) -> None:
        return None

    def whole_prompts(self) -> PrefillSpans | None:
        return None

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        keys, values = self._layers[layer]
        slots, positions = self._spans.rows()
        assert query.shape[0] == len(slots)
        rows = [
            _attend_one(
                query[row],
                keys[slot, _first(position, how.window_tokens) : position + 1],
                values[slot, _first(position, how.window_tokens) : position + 1],
                how,
            )
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True))
        ]
        return torch.stack(rows)


def _first(position: np.int64, window_tokens: int | None) -> int:
    return 0 if window_tokens is None else max(0, int(position) + 1 - window_tokens)


def _attend_one(
    query: torch.Tensor,  # [heads, key_dim]
    keys: torch.Tensor,  # [length, kv_heads, key_dim]
    values: torch.Tensor,  # [length, kv_heads, value_dim]
    how: AttentionOptions,
) -> torch.Tensor:
    group = query.shape[0] // keys.shape[1]
    scores = torch.einsum("hd,lhd->hl", query, keys.repeat_interleave(group, 1)) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if how.slopes is not None:
        scores = scores - how.slopes[:, None] * torch.arange(len(keys) - 1, -1, -1)
    sums = scores.logsumexp(-1)
    if how.sinks is not None:
        sums = torch.logaddexp(sums, how.sinks)
    weights = torch.exp(scores - sums[:, None])
    return torch.einsum("hl,lhd->hd", weights, values.repeat_interleave(group, 1))
