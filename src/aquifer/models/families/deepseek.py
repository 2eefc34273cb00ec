"""DeepSeek-V2 and V3: latent attention, and experts in all layers but the first ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.kernels.experts import Routing
from aquifer.models.families import reading
from aquifer.models.limits import MOST_HEADS, MOST_LAYERS, MOST_WIDTH
from aquifer.models.rope import rope_section
from aquifer.models.spec import (
    Block,
    DecoderSpec,
    ExpertNames,
    Experts,
    Head,
    LatentAttention,
    Mlp,
    Names,
    Norm,
)

_MOST_EXPERTS = 1 << 12
_MOST_SCALE = 1e6

_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
}
_COMPRESSED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_Q_RANK, _VALUE_DIM = 1536, 128  # unless they are given

_NORM = Norm(1e-6)
"""The norm of the compressed query and of the compressed KV. Its epsilon is 1e-6, whatever
`rms_norm_eps` says, as in Transformers."""

_SINGLE = ExpertNames(
    "mlp.gate",
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.{}.down_proj",
)
_FUSED = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of either model type.

    Layers beyond `num_hidden_layers`, which predict further tokens (MTP), are left out, as in
    Transformers.
    """
    if fields.values.get("quantization_config"):
        raise UnsupportedModelError(architecture, "its weights are quantised")
    if _is_second(fields) and fields.flag("mlp_bias", default=False):
        raise UnsupportedModelError(architecture, "its MLPs have biases (mlp_bias)")
    known = fields.with_defaults({**_DEFAULTS[fields.text("model_type")], **_COMPRESSED})
    attention = _attention(fields, known, architecture)
    # The rotary embedding knows nothing of the other dimensions of a head.
    rotated = Fields(fields.file, {**known.values, "head_dim": attention.rope_dim})
    sizes = reading.read_sizes(rotated)
    if sizes.num_kv_heads != sizes.num_heads:
        raise fields.error("num_key_value_heads", f"the {sizes.num_heads} heads")
    rope = reading.read_rope(rotated, sizes, architecture)
    norm = reading.rms_norm(known)
    reading.read_silu(known, architecture)
    num_dense = known.integer("first_k_dense_replace", 0, MOST_LAYERS)
    layers = reading.plain_layers(sizes, scale=_scale(fields, attention))
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=attention,
        mlp=Mlp(reading.read_width(known, default=11008 if _is_second(known) else 18432), "silu"),
        experts=_experts(known, architecture),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(
            replace(layer, has_experts=index >= num_dense) for index, layer in enumerate(layers)
        ),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(
            qkv=(
                "self_attn.q_proj" if attention.q_rank is None else "self_attn.q_a_proj",
                "self_attn.kv_a_proj_with_mqa",
            ),
            shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        ),
    )


def _is_second(known: Fields) -> bool:
    return known.text("model_type") == "deepseek_v2"


def _attention(fields: Fields, known: Fields, architecture: str) -> LatentAttention:
    """Latent attention.

    Args:
        fields: the configuration, in which a `q_lora_rank` of null differs from none.
        known: the same with the defaults of its model type.
        architecture: for messages.
    """
    q_rank: int | None = None
    if "q_lora_rank" in fields or "q_lora_rank" not in fields.values:
        q_rank = fields.integer("q_lora_rank", 1, MOST_WIDTH, default=_Q_RANK)
    has_bias = known.flag("attention_bias", default=False)
    if has_bias and q_rank is None:
        raise UnsupportedModelError(
            architecture, "its compressed keys have a bias, and its queries have none"
        )
    rope_dim = known.integer("qk_rope_head_dim", 2, MOST_WIDTH)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "even")
    return LatentAttention(
        num_heads=known.integer("num_attention_heads", 1, MOST_HEADS),
        q_rank=q_rank,
        kv_rank=known.integer("kv_lora_rank", 1, MOST_WIDTH),
        nope_dim=known.integer("qk_nope_head_dim", 1, MOST_WIDTH),
        rope_dim=rope_dim,
        value_dim=known.integer("v_head_dim", 1, MOST_WIDTH, default=_VALUE_DIM),
        norm=_NORM,
        qkv_bias=has_bias,
        out_bias=has_bias,
        is_interleaved=_is_second(known) or known.flag("rope_interleave", default=True),
    )


def _scale(fields: Fields, attention: LatentAttention) -> float:
    """Factor on the dot products. Scaled rotary embeddings with an `mscale_all_dim` raise it, while
    the rotary embedding divides its own magnitude by that (YaRN, section 3.4)."""
    scale = float((attention.nope_dim + attention.rope_dim) ** -0.5)
    rope = rope_section(fields)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    weight = rope.number("mscale_all_dim", 0.0, _MOST_SCALE, default=0.0)
    if kind == "default" or not weight:
        return scale
    factor = rope.number("factor", 1e-6, _MOST_SCALE)
    magnitude = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * magnitude * magnitude


def _experts(known: Fields, architecture: str) -> Experts:
    """The mixture of experts."""
    is_second = _is_second(known)
    count = known.integer("n_routed_experts", 1, _MOST_EXPERTS)
    width = reading.read_width(known, "moe_intermediate_size")
    num_shared = known.integer("n_shared_experts", 1, _MOST_EXPERTS)
    if num_shared * width > MOST_WIDTH:
        raise known.error("n_shared_experts", f"at most {MOST_WIDTH // width} of this width")
    if known.integer("moe_layer_freq", 1, MOST_LAYERS, default=1) != 1:
        raise UnsupportedModelError(
            architecture, "only some of its layers have experts (moe_layer_freq)"
        )
    scoring = known.text("scoring_func")
    method = known.text("topk_method")
    methods = ("greedy", "group_limited_greedy") if is_second else ("noaux_tc",)
    if scoring != ("softmax" if is_second else "sigmoid") or method not in methods:
        raise UnsupportedModelError(
            architecture, f"its router's scoring_func {scoring!r} with topk_method {method!r}"
        )
    # Transformers divides by the sum of the weights in the third version alone.
    normalises = known.flag("norm_topk_prob", default=False)
    if is_second and normalises:
        raise UnsupportedModelError(architecture, "it normalises experts' weights (norm_topk_prob)")
    num_groups, top_groups = 1, 1
    if method != "greedy":
        num_groups = known.integer("n_group", 1, count)
        top_groups = known.integer("topk_group", 1, num_groups)
    least = 1 if is_second else 2  # the score of a group is the sum of its two best
    if count % num_groups or count // num_groups < least:
        raise known.error("n_group", f"such that it divides {count} experts by {least} at least")
    return Experts(
        count=count,
        top_k=known.integer("num_experts_per_tok", 1, count // num_groups * top_groups),
        width=width,
        routing=Routing(
            scoring="softmax" if is_second else "sigmoid",
            normalise=normalises,
            num_groups=num_groups,
            top_groups=top_groups,
            group_score="max" if is_second else "best_two",
            scale=known.number("routed_scaling_factor", 0.0, _MOST_SCALE),
        ),
        shared_width=num_shared * width,
        is_shared_gated=False,
        has_choice_bias=not is_second,
        routes_in_float32=True,
        names=(_SINGLE, _FUSED),
    )
