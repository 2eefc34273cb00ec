"""Phi (1, 1.5, 2) and Phi-3: partial rotary embedding; attention beside the MLP in the former."""

from __future__ import annotations

from dataclasses import replace

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.rope import RotarySettings
from aquifer.models.spec import Block, DecoderSpec, Head, HeadNorm, Mlp, Names

_THIRD_DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Phi."""
    known = fields.with_defaults({"max_position_embeddings": 2048, "hidden_act": "gelu_new"})
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_eps")
    rope = reading.read_rope(known, sizes, architecture, default_partial=0.5)
    head_norm = HeadNorm(norm) if known.flag("qk_layernorm", default=False) else None
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=True,
            out_bias=True,
            head_norm=head_norm,
        ),
        mlp=Mlp(
            reading.read_width(known),
            reading.read_activation(known, architecture),
            is_gated=False,
            has_bias=True,
        ),
        block=Block(before_attention=norm, is_parallel=True),
        layers=reading.plain_layers(sizes),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False), has_bias=True),
        names=Names(
            out="self_attn.dense",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            up=("mlp.fc1",),
            down="mlp.fc2",
            norm="final_layernorm",
        ),
    )


def read_third(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Phi-3, Phi-3.5 or Phi-4: as Llama, with projections stored fused."""
    known = fields.with_defaults(_THIRD_DEFAULTS)
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known, default=1e-5)
    rope = RotarySettings.read(known, sizes.head_dim, sizes.max_positions)
    window = reading.read_window(known)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=sizes.attention,
        mlp=Mlp(reading.read_width(known), reading.read_activation(known, architecture)),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=reading.plain_layers(sizes, (window,) * sizes.num_layers),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    )
