"""Runs a model as the engine does: weights in pages, tokens in chunks and mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np
import torch
from tests.models.dense_kv import DenseKV, empty_states

from aquifer.cache.base import IntArray, KVLayout, KVView, Rows, Spans, StateLayout
from aquifer.cache.group_view import GroupedView
from aquifer.cache.state_view import StateView
from aquifer.cache.view import StepView, Workspaces
from aquifer.memory.driver import open_driver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.models.base import Model, ModelInput, ModelPlan
from aquifer.models.registry import Planner
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.store import WeightStore


@contextmanager
def loaded_weights(checkpoint: Checkpoint, plan: ModelPlan) -> Iterator[Mapping[str, torch.Tensor]]:
    """A checkpoint's parameters in pages of the host."""
    with ExitStack() as resources:
        driver = open_driver("cpu")
        resources.callback(driver.close)
        pool = PagePool(driver, 8 << 20)
        resources.callback(pool.close)
        store = WeightStore(pool, Owner("tiny", Kind.WEIGHTS), plan.parameters)
        resources.callback(store.close)
        assert store.populate()
        store.load(checkpoint)
        yield store.tensors


@contextmanager
def loaded_model(
    checkpoint: Checkpoint, planner: Planner, dtype: torch.dtype | None = None
) -> Iterator[Model]:
    """A checkpoint's model over parameters in pages of the host."""
    plan = planner(checkpoint, dtype)
    with loaded_weights(checkpoint, plan) as tensors:
        yield plan.build(tensors)


class StepKV:
    """KV in one plain tensor, read and written through `StepView`, as caches do; and state."""

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        max_tokens: int,
        state_layout: StateLayout | None = None,
    ) -> None:
        shape = (num_slots, max_tokens, layout.token_elements)
        # Not a number, so that a read of KV that was never written shows in the result.
        self._layout = layout
        self._layers = layout.split(torch.full(shape, torch.nan, dtype=layout.dtype))
        self._states = empty_states(state_layout, num_slots)

    def view(
        self, slots: IntArray, starts: IntArray, counts: IntArray, num_decodes: int = 0
    ) -> KVView:
        """KV of one step, which writes [starts, starts + counts) of each slot; the first ones may
        decode as on a GPU."""
        spans = Spans.make(slots, starts, counts)
        arrays = Rows.arrays(spans, num_decodes)
        tensors = [torch.from_numpy(array) for array in arrays]
        rows = Rows.over(spans, num_decodes, tensors)
        rows.decode_lengths[rows.slots[:num_decodes] < 0] = 0  # padding, which has no KV to read
        view = StepView(self._layout, self._layers, rows, None, Workspaces())
        if not self._states:
            return view
        places = [(0, index) for index in range(len(self._layers))]
        return GroupedView([view], places, StateView(self._states, rows))


class _Views(Protocol):
    def view(self, slots: IntArray, starts: IntArray, counts: IntArray) -> KVView: ...


def served_logits(
    model: Model,
    sequences: list[torch.Tensor],
    make_kv: Callable[[KVLayout, int, int, StateLayout | None], _Views] = DenseKV,
    state_layout: StateLayout | None = None,
) -> list[torch.Tensor]:
    """Logits of every token: all sequences in one batch, in chunks, then token by token."""
    longest = max(len(ids) for ids in sequences)
    kv = make_kv(model.kv_layout, len(sequences), longest, state_layout)
    scores: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for chunk in (3, 5, 2, *[1] * longest):
        # The last sequence starts one step later, so that positions in a batch always differ.
        late = max(len(sequences) - (not any(done)), 1)
        work = [(i, min(chunk, len(s) - done[i])) for i, s in enumerate(sequences[:late])]
        work = [(i, count) for i, count in reversed(work) if count > 0]
        if not work:
            break
        slots = np.array([i for i, _ in work])
        counts = np.array([count for _, count in work])
        starts = np.array([done[i] for i, _ in work])
        ids = torch.cat([sequences[i][done[i] : done[i] + count] for i, count in work])
        positions = torch.cat([torch.arange(done[i], done[i] + count) for i, count in work])
        batch = ModelInput(ids, positions, positions + 1)
        with torch.inference_mode():
            rows = model.logits(model.forward(batch, kv.view(slots, starts, counts)))
        for (i, count), part in zip(work, rows.split(counts.tolist()), strict=True):
            scores[i].append(part)
            done[i] += count
    return [torch.cat(parts) for parts in scores]
