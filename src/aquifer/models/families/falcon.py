"""Falcon of the new architecture: attention beside the MLP, projections stored by KV head."""

from __future__ import annotations

from dataclasses import replace

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Block, DecoderSpec, Head, Mlp, Names


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Falcon with the new decoder architecture (40B, 180B, Falcon 2)."""
    known = fields.with_defaults({"max_position_embeddings": 2048, "activation": "gelu"})
    if not known.flag("new_decoder_architecture", default=False):
        raise UnsupportedModelError(architecture, "it is a Falcon of the older architecture")
    if known.flag("alibi", default=False):
        raise UnsupportedModelError(architecture, "it adds a bias to attention (ALiBi)")
    if not known.flag("parallel_attn", default=True):
        raise UnsupportedModelError(architecture, "its attention is not beside the MLP")
    sizes = reading.read_sizes(known, kv_heads="num_kv_heads")
    norm = reading.layer_norm(known, "layer_norm_epsilon")
    rope = reading.read_rope(known, sizes, architecture)
    has_bias = known.flag("bias", default=False)
    num_norms = known.integer("num_ln_in_parallel_attn", 1, 2, default=2)
    width = reading.read_width(known, "ffn_hidden_size", 4 * sizes.hidden_size)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
            is_grouped=True,
        ),
        mlp=Mlp(
            width,
            reading.read_activation(known, architecture, "activation"),
            is_gated=False,
            has_bias=has_bias,
        ),
        block=Block(
            before_attention=norm, before_mlp=norm if num_norms == 2 else None, is_parallel=True
        ),
        layers=reading.plain_layers(sizes),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=True)),
        names=Names(
            prefix="transformer.",
            embed="word_embeddings",
            layer="h.{}",
            before_attention="ln_attn" if num_norms == 2 else "input_layernorm",
            before_mlp="ln_mlp",
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            norm="ln_f",
        ),
    )
