"""Zamba2: where the weights of shared blocks are stored, and configurations that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.architectures import HYBRIDS, save_tiny

from aquifer.errors import ConfigError
from aquifer.fields import Fields
from aquifer.models import plan_model
from aquifer.models.families import FAMILIES
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.parameters import check_sources

SMALL: dict[str, Any] = {
    "model_type": "zamba2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "layers_block_type": ["mamba", "hybrid"],
}
FIRST, SECOND = (f"model.layers.{i}.shared_transformer." for i in (1, 3))  # users of a block


@pytest.mark.parametrize("users", [(SECOND,), (FIRST, SECOND)])
def test_blocks_are_found_under_any_of_their_layers(users: tuple[str, ...], tmp_path: Path) -> None:
    save_tiny(HYBRIDS["zamba2"](), tmp_path)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.startswith(FIRST):
            part = name.removeprefix(FIRST)
            stored |= {user + part: tensor.clone() for user in users}
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    plan = plan_model(checkpoint)
    check_sources(checkpoint, plan.parameters)
    qkv = [each for each in plan.parameters if each.name.startswith("shared.0.qkv")]
    assert len(qkv) == 1  # once, although two layers use it
    assert qkv[0].sources[0].name == f"{users[0]}self_attn.q_proj.weight"
    assert len(plan.kv_layout.layers) == 3
    state = plan.state_layout()
    assert state is not None
    assert len(state.layers) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type"),
        ({"layers_block_type": ["hybrid"]}, "layers_block_type"),
        ({"num_attention_heads": 3}, "hidden_size"),
        ({"n_mamba_heads": 3}, "n_mamba_heads"),
        (
            {"num_key_value_heads": 2, "use_shared_attention_adapter": True},
            "num_key_value_heads",
        ),
    ],
)
def test_impossible_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILIES["zamba2"](Fields(Path("config.json"), {**SMALL, **changes}), "Zamba2ForCausalLM")
