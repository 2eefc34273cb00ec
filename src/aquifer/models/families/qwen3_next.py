"""Qwen3-Next: layers of Gated DeltaNet, and every fourth one with gated attention; experts."""

from __future__ import annotations

from dataclasses import replace

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.families.moe import MOST_EXPERTS, read_experts, which_have_experts
from aquifer.models.limits import MOST_HEADS, MOST_LAYERS, MOST_TAPS, MOST_WIDTH
from aquifer.models.mixers.gated_delta import GatedDelta
from aquifer.models.spec import Block, DecoderSpec, Head, HeadNorm, Layer, Mlp, Names

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration."""
    known = fields.with_defaults(_DEFAULTS)
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known, plus_one=True)
    rope = reading.read_rope(known, sizes, architecture, default_partial=0.25)
    activation = reading.read_silu(known, architecture)
    has_bias = known.flag("attention_bias", default=False)
    has_any = known.integer("num_experts", 0, MOST_EXPERTS) > 0
    has_experts = which_have_experts(known, sizes.num_layers)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
            head_norm=HeadNorm(norm),
            has_gate=True,
        ),
        mlp=Mlp(reading.read_width(known), activation),
        experts=read_experts(fields, known) if has_any else None,
        mixer=_read_mixer(known, norm.eps),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(
            Layer(
                sizes.head_dim**-0.5,
                has_attention=kind == reading.FULL,
                has_mixer=kind == reading.LINEAR,
                has_experts=has and has_any,
            )
            for kind, has in zip(_kinds(known, sizes.num_layers), has_experts, strict=True)
        ),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(mixer="linear_attn"),
    )


def _read_mixer(known: Fields, norm_eps: float) -> GatedDelta:
    """The description of Gated DeltaNet."""
    num_key_heads = known.integer("linear_num_key_heads", 1, MOST_HEADS)
    num_value_heads = known.integer("linear_num_value_heads", 1, MOST_HEADS)
    if num_value_heads % num_key_heads:
        raise known.error("linear_num_value_heads", f"a multiple of the {num_key_heads} key heads")
    return GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=known.integer("linear_key_head_dim", 1, MOST_WIDTH),
        value_dim=known.integer("linear_value_head_dim", 1, MOST_WIDTH),
        kernel_size=known.integer("linear_conv_kernel_dim", 2, MOST_TAPS),
        norm_eps=norm_eps,
    )


def _kinds(known: Fields, num_layers: int) -> tuple[str, ...]:
    """Whether each layer has attention or Gated DeltaNet; see `reading.read_kinds`."""
    if "layer_types" in known:
        return reading.read_kinds(known, num_layers)
    interval = known.integer("full_attention_interval", 1, MOST_LAYERS, default=4)
    return tuple(
        reading.LINEAR if (index + 1) % interval else reading.FULL for index in range(num_layers)
    )
