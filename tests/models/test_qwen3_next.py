"""Configurations of Qwen3-Next: sizes of the real model, defaults, and fields that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aquifer.cache.base import KVLayout, LayerKV, StateTensor
from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models import plan_model
from aquifer.models.decoder_plan import DecoderPlan
from aquifer.models.families import FAMILIES
from aquifer.models.spec import DecoderSpec
from aquifer.weights.checkpoint import Checkpoint

# The parts of the published configuration that describe the model.
REAL: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def read(**changes: Any) -> DecoderSpec:
    fields = Fields(Path("config.json"), {**REAL, **changes})
    return FAMILIES["qwen3_next"](fields, "Qwen3NextForCausalLM")


def test_real_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    plan = plan_model(Checkpoint.without_tensors(tmp_path))
    assert isinstance(plan, DecoderPlan)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert plan.num_parameters == sum(tensor.numel() for tensor in model.parameters())
    assert plan.max_model_len == 262144
    # A token takes 24 KiB in the twelve layers of attention.
    assert plan.kv_layout == KVLayout((LayerKV(2, 256, 256),) * 12, torch.bfloat16)
    state = plan.state_layout(torch.float32)
    assert state is not None
    conv = StateTensor("conv", (8192, 3), torch.bfloat16)
    assert state.layers == ((conv, StateTensor("delta", (32, 128, 128), torch.float32)),) * 36
    (rope,) = plan.spec.ropes
    assert len(rope.frequencies) == 32
    wide = {p.name.rpartition(".")[2] for p in plan.parameters if p.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}


def test_defaults_are_those_of_transformers() -> None:
    """Of the fields that a configuration may leave out."""
    optional = set(REAL) - {"architectures", "model_type", "torch_dtype", "rope_theta"}
    sizes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    given = {key: value for key, value in REAL.items() if key not in optional - sizes}
    fields = Fields(Path("config.json"), given)
    spec = FAMILIES["qwen3_next"](fields, "Qwen3NextForCausalLM")
    config = transformers.Qwen3NextConfig(**{key: REAL[key] for key in sizes})
    whole = Fields(Path("config.json"), config.to_dict() | {"rope_theta": REAL["rope_theta"]})
    expected = FAMILIES["qwen3_next"](whole, "Qwen3NextForCausalLM")
    for part in ("max_model_len", "attention", "mlp", "experts", "mixer", "layers", "norm"):
        assert getattr(spec, part) == getattr(expected, part), part


def test_which_layers_have_attention() -> None:
    def attend(spec: DecoderSpec) -> list[int]:
        assert all(layer.has_attention != layer.has_mixer for layer in spec.layers)
        return [index for index, layer in enumerate(spec.layers) if layer.has_attention]

    assert attend(read()) == list(range(3, 48, 4))
    assert attend(read(full_attention_interval=3)) == list(range(2, 48, 3))
    kinds = ["full_attention", "linear_attention"]
    assert attend(read(num_hidden_layers=2, layer_types=kinds)) == [0]


def test_layers_without_experts() -> None:
    with_experts = [layer.has_experts for layer in read(mlp_only_layers=[0, 5]).layers]
    assert with_experts == [index not in (0, 5) for index in range(48)]
    spec = read(num_experts=0)
    assert spec.experts is None
    assert not any(layer.has_experts for layer in spec.layers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["full_attention"]),
        ("layer_types", ["sliding_attention"] * 48),
        ("linear_num_value_heads", 24),
        ("linear_num_key_heads", 0),
        ("linear_conv_kernel_dim", 1),
        ("partial_rotary_factor", 1.5),
    ],
)
def test_impossible_fields(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        read(**{field: value})


def test_another_activation() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act"):
        read(hidden_act="gelu")
