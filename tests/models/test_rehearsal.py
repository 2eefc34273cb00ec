"""The layers that are enough to compile every kernel of a model, and rows of padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, OUR_DECODER, save_tiny

from aquifer.cache.base import AttentionOptions, Recurrence
from aquifer.cache.layout import KVLayout
from aquifer.kernels import KERNEL_ALIGNMENT_BYTES
from aquifer.kernels.experts import experts
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.models import Model, ModelInput, decoder, plan_model
from aquifer.weights.checkpoint import Checkpoint


class Visited:
    """A `KVView` that notes in which ways layers attend, where their KV begins, and which layers
    have state."""

    def __init__(self, layout: KVLayout) -> None:
        self._layers = layout.split(torch.zeros(1, 1, layout.token_elements, dtype=layout.dtype))
        self._alignments = layout.alignments(KERNEL_ALIGNMENT_BYTES)
        self._padding = torch.tensor([-1])
        self.layers: list[int] = []
        self.state_layers: list[int] = []
        self.kinds: set[tuple[object, ...]] = set()

    def pad(self, num_rows: int) -> None:
        """Let steps have that many rows; none of them writes KV."""
        self._padding = torch.full((num_rows,), -1)

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return *self._layers[layer], self._padding, self._padding

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        raise AssertionError("our decoder writes where `destination` says")

    @property
    def decoding(self) -> None:
        return None

    def whole_prompts(self) -> PrefillSpans | None:
        return None

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        self.layers.append(layer)
        self.kinds.add((how.window_tokens, how.softcap, self._alignments[layer]))
        return query.new_zeros(*query.shape[:2], self._layers[layer][1].shape[-1])

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        self.state_layers.append(layer)
        self.kinds.add((type(recurrence),))
        return inputs.new_zeros(len(inputs), recurrence.out_columns)


def visit(model: Model) -> Visited:
    view = Visited(model.kv_layout)
    one = torch.zeros(1, dtype=torch.int64)
    hidden = model.forward(ModelInput(one, one, one + 1), view)
    assert model.logits(hidden).shape == (1, model.vocab_size)
    return view


@pytest.mark.parametrize("family", sorted(OUR_DECODER))
def test_a_rehearsal_has_every_kind_of_layer(family: str, tmp_path: Path) -> None:
    config = OUR_DECODER[family]()
    config.num_hidden_layers = 6
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * 6)[:6]
    if getattr(config, "no_rope_layers", None):
        config.no_rope_layers = (config.no_rope_layers * 6)[:6]
    save_tiny(config, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint, None)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        parameter.name: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        for parameter in plan.parameters
    }
    model = plan.build(tensors)
    whole, rehearsal = visit(model), visit(model.rehearsal())
    assert whole.layers == list(range(6))
    assert rehearsal.kinds == whole.kinds
    assert {0} < set(rehearsal.layers) < set(whole.layers)


@pytest.mark.parametrize(
    ("pattern", "attending", "mixing"),
    [
        # The first layer; each part after one that adds one result; and, after experts with a
        # shared one, which add two, a mixer and attention.
        ("M-*-M-*EM-M-E*E*", [0, 2], [0, 1, 2]),
        ("MMMM", [], [0, 1]),
        ("*-*-", [0, 1], []),
    ],
)
def test_a_rehearsal_of_a_hybrid(
    pattern: str, attending: list[int], mixing: list[int], tmp_path: Path
) -> None:
    values = HYBRIDS["nemotron_h"]().to_dict() | {"hybrid_override_pattern": pattern}
    values = {k: v for k, v in values.items() if k not in ("layers_block_type", "layer_types")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    plan = plan_model(Checkpoint.without_tensors(tmp_path), torch.float32)
    model = plan.build({each.name: torch.ones(each.shape) for each in plan.parameters})
    whole, rehearsal = visit(model), visit(model.rehearsal())
    assert whole.layers == list(range(pattern.count("*")))
    assert whole.state_layers == list(range(pattern.count("M")))
    assert (rehearsal.layers, rehearsal.state_layers) == (attending, mixing)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2_moe"])
def test_rows_of_padding_have_no_experts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step pads with rows of context length 0."""
    save_tiny(OUR_DECODER[family](), tmp_path)
    plan = plan_model(Checkpoint.open(tmp_path), None)
    model = plan.build({each.name: torch.ones(each.shape) for each in plan.parameters})
    chosen: list[torch.Tensor] = []

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:
        chosen.append(arguments[3])
        return experts(*arguments, **options)

    monkeypatch.setattr(decoder, "experts", noting)
    zeros = torch.zeros(3, dtype=torch.int64)
    view = Visited(plan.kv_layout)
    view.pad(3)
    model.forward(ModelInput(zeros, zeros, torch.tensor([1, 0, 7])), view)
    assert chosen
    for ids in chosen:
        assert (ids[[0, 2]] >= 0).all()
        assert (ids[1] == -1).all()
