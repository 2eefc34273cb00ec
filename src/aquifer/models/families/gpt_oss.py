"""GPT-OSS: experts with biases, sinks and biases in attention, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.kernels.experts import CLAMP_LIMIT, CLAMP_SLOPE, Routing
from aquifer.models.families import reading
from aquifer.models.families.moe import MOST_EXPERTS
from aquifer.models.spec import Block, DecoderSpec, ExpertNames, Experts, Head, Mlp
from aquifer.weights.forms import Form
from aquifer.weights.mxfp4 import BLOCK_VALUES

_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": CLAMP_SLOPE,
    "swiglu_limit": CLAMP_LIMIT,
}
_ROPE_DEFAULTS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}

_PLAIN = ExpertNames(
    "mlp.router",
    ("mlp.experts.gate_up_proj",),
    "mlp.experts.down_proj",
    forms=(("", Form.TRANSPOSED),),
)
_MXFP4 = replace(_PLAIN, forms=(("_blocks", Form.MXFP4_BLOCKS), ("_scales", Form.MXFP4_SCALES)))


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of GPT-OSS."""
    has_rope = "rope_parameters" in fields or "rope_scaling" in fields
    known = fields.with_defaults(_DEFAULTS | ({} if has_rope else {"rope_scaling": _ROPE_DEFAULTS}))
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    rope = reading.read_rope(known, sizes, architecture)
    has_bias = known.flag("attention_bias", default=True)
    sliding = reading.are_sliding(known, sizes.num_layers, lambda index: index % 2 == 0)
    window = reading.read_window(known)
    layers = reading.plain_layers(sizes, tuple(window if slides else None for slides in sliding))
    experts = _experts(known, architecture)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(sizes.attention, qkv_bias=has_bias, out_bias=has_bias, has_sinks=True),
        mlp=Mlp(experts.width, "silu"),  # which no layer has
        experts=experts,
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(replace(layer, has_experts=True) for layer in layers),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
    )


def _experts(known: Fields, architecture: str) -> Experts:
    """The mixture of experts, the same in every layer."""
    activation = reading.read_activation(known, architecture)
    slope = known.number("swiglu_alpha", 0.0, 1e6)
    limit = known.number("swiglu_limit", 0.0, 1e6)
    if (activation, slope, limit) != ("silu", CLAMP_SLOPE, CLAMP_LIMIT):
        raise UnsupportedModelError(
            architecture,
            f"its hidden_act, swiglu_alpha and swiglu_limit are not silu, {CLAMP_SLOPE:g} and "
            f"{CLAMP_LIMIT:g}",
        )
    count = known.integer("num_local_experts", 1, MOST_EXPERTS)
    return Experts(
        count=count,
        top_k=known.integer("num_experts_per_tok", 1, count),
        width=reading.read_width(known),
        routing=Routing("softmax_of_chosen", rounds_weights=True),
        activation="clamped_swiglu",
        has_bias=True,
        is_interleaved=True,
        names=_stored(known, architecture),
    )


def _stored(known: Fields, architecture: str) -> tuple[ExpertNames, ...]:
    """The ways in which a checkpoint may store the experts of a layer.

    In a quantised one, layers may be left as they are (`modules_to_not_convert`), so the tensors of
    each layer decide.
    """
    if not known.values.get("quantization_config"):
        return (_PLAIN,)
    method = known.section("quantization_config").text("quant_method", default="unknown")
    if method != "mxfp4":
        raise UnsupportedModelError(architecture, f"its weights are quantised ({method})")
    for name in ("hidden_size", "intermediate_size"):  # the inputs of both products
        if reading.read_width(known, name) % BLOCK_VALUES:
            raise known.error(name, f"a multiple of {BLOCK_VALUES} for weights in MXFP4")
    return (_MXFP4, _PLAIN)
