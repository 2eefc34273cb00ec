"""Mixtures of experts in the layers of Llama: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.kernels.experts import Routing
from aquifer.models.families import reading
from aquifer.models.limits import MOST_LAYERS, MOST_WIDTH
from aquifer.models.spec import (
    Block,
    DecoderSpec,
    ExpertNames,
    Experts,
    Head,
    HeadNorm,
    HeadSpan,
    Mlp,
)

MOST_EXPERTS = 1 << 12

_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
    },
    "qwen2_moe": {
        "attention_bias": True,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "olmoe": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}
_FUSED = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")
_SINGLE = ExpertNames(
    "mlp.gate",
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.{}.down_proj",
)
_MIXTRAL = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of any of these model types."""
    model_type = fields.text("model_type")
    known = fields.with_defaults(_DEFAULTS[model_type])
    if "clip_qkv" in known:
        raise UnsupportedModelError(architecture, "it clips queries, keys and values (clip_qkv)")
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    rope = reading.read_rope(known, sizes, architecture)
    activation = reading.read_silu(known, architecture)
    has_bias = known.flag("attention_bias", default=False)
    if model_type == "qwen2_moe":
        has_bias = known.flag("qkv_bias", default=True)
    head_norms = {
        "qwen3_moe": HeadNorm(norm),
        "olmoe": HeadNorm(norm, HeadSpan.ALL_HEADS),
    }
    has_experts = which_have_experts(known, sizes.num_layers)
    layers = reading.plain_layers(sizes, _windows(known, sizes.num_layers))
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias and model_type != "qwen2_moe",
            head_norm=head_norms.get(model_type),
        ),
        mlp=Mlp(reading.read_width(known), activation),
        experts=read_experts(fields, known),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(
            replace(layer, has_experts=has) for layer, has in zip(layers, has_experts, strict=True)
        ),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
    )


def read_experts(fields: Fields, known: Fields) -> Experts:
    """The mixture of experts, of one of these model types or of one that names its tensors alike.

    Args:
        fields: the configuration.
        known: the same with the defaults of its model type.
    """
    model_type = known.text("model_type")
    is_mixtral = model_type == "mixtral"
    # Versions of Transformers write either name.
    given = [name for name in ("num_experts", "num_local_experts") if name in fields]
    count = known.integer((given or ["num_experts"])[0], 1, MOST_EXPERTS)
    normalises = is_mixtral or known.flag("norm_topk_prob", default=False)
    width_name = "moe_intermediate_size" if "qwen" in model_type else "intermediate_size"
    shared_width = 0
    if model_type in ("qwen2_moe", "qwen3_next"):
        shared_width = known.integer("shared_expert_intermediate_size", 0, MOST_WIDTH)
    return Experts(
        count=count,
        top_k=known.integer("num_experts_per_tok", 1, count),
        width=reading.read_width(known, width_name),
        routing=Routing(normalise=normalises, rounds_weights=not is_mixtral),
        shared_width=shared_width,
        names=(_MIXTRAL if is_mixtral else _SINGLE, _FUSED),
    )


def which_have_experts(known: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts; the others have an ordinary MLP."""
    step = known.integer("decoder_sparse_step", 1, MOST_LAYERS, default=1)
    dense = set(known.integers("mlp_only_layers", 0, MOST_LAYERS))
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


def _windows(known: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, as Transformers fills it in."""
    model_type = known.text("model_type")
    is_optional = model_type in ("qwen2_moe", "qwen3_moe")
    uses_window = not is_optional or known.flag("use_sliding_window", default=False)
    window = reading.read_window(known) if uses_window else None
    if model_type != "qwen2_moe":
        return (window,) * num_layers
    most = known.integer("max_window_layers", 0, MOST_LAYERS)
    sliding = reading.are_sliding(
        known,
        num_layers,
        lambda index: (index + 1) % 2 != 0 and index < most and window is not None,
    )
    return tuple(window if slides else None for slides in sliding)
