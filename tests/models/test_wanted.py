"""Steps that want the hidden states of some rows only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, save_tiny
from tests.models.serving import StepKV, loaded_model

from aquifer.cache.base import KVView
from aquifer.cache.spans import Spans
from aquifer.cache.view import AttentionOptions
from aquifer.models import Model, ModelInput, Wanted, plan_model
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.models.spec import Attention
from aquifer.weights.checkpoint import Checkpoint

SLOTS, STARTS, COUNTS = np.array([2, 0, 1]), np.array([0, 0, 0]), np.array([5, 3, 7])


class Attended(StepKV):
    """KV that notes the layers in which the wanted rows attend, and how many rows."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.kv_layout, 3, 16, None)
        self.calls: list[tuple[int, int]] = []

    def of(self, spans: Spans) -> KVView:
        view = self.view(spans.slots, spans.starts, spans.counts)
        attend = view.attend

        def noting(layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
            self.calls.append((layer, len(query)))
            return attend(layer, query, how)

        view.attend = noting  # type: ignore[method-assign]
        return view


@torch.inference_mode()
def hidden_states(model: Model, wanted: list[int] | None) -> tuple[torch.Tensor, Attended]:
    """Hidden states of a step of three prompts; of the last rows of some."""
    spans = Spans.make(SLOTS, STARTS, COUNTS)
    kv = Attended(model)
    ids = torch.arange(spans.num_tokens) % 50
    positions = torch.from_numpy(spans.rows()[1])
    of_wanted = None
    if wanted is not None:
        indices = np.array(wanted, np.int64)
        rows = torch.from_numpy(spans.offsets[1:][indices] - 1)
        of_wanted = Wanted(rows, kv.of(spans.ends_of(indices)))
    view = kv.view(SLOTS, STARTS, COUNTS)
    return model.forward(ModelInput(ids, positions, positions + 1, of_wanted), view), kv


@pytest.mark.parametrize("family", sorted({*OUR_DECODER} - {*HYBRIDS}))
def test_wanted_rows_are_those_of_all(family: str, tmp_path: Path) -> None:
    save_tiny(OUR_DECODER[family](), tmp_path)
    plan = plan_model(Checkpoint.open(tmp_path), None)
    assert isinstance(plan, DecoderPlan)
    # Others compute all rows in all layers.
    narrows = isinstance(plan.spec.attention, Attention) and not plan.spec.block.is_parallel
    with loaded_model(Checkpoint.open(tmp_path), plan_model, torch.float32) as model:
        whole, _ = hidden_states(model, None)
        for wanted in ([0, 2], [1], []):
            some, kv = hidden_states(model, wanted)
            rows = Spans.make(SLOTS, STARTS, COUNTS).offsets[1:][wanted] - 1
            torch.testing.assert_close(some, whole[torch.from_numpy(rows)], atol=1e-5, rtol=1e-5)
            last_layer = len(model.kv_layout.layers) - 1
            assert kv.calls == ([(last_layer, len(wanted))] if narrows else [])
