"""StarCoder2: LayerNorm, an MLP without a gate, a sliding window."""

from __future__ import annotations

from dataclasses import replace

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Block, DecoderSpec, Head, Mlp, Names


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of StarCoder2."""
    known = fields.with_defaults(
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
        }
    )
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "norm_epsilon")
    rope = reading.read_rope(known, sizes, architecture)
    has_bias = known.flag("use_bias", default=True)
    window = reading.read_window(known)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp=Mlp(
            reading.read_width(known),
            reading.read_activation(known, architecture),
            is_gated=False,
            has_bias=has_bias,
        ),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=reading.plain_layers(sizes, (window,) * sizes.num_layers),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=True)),
        names=Names(up=("mlp.c_fc",), down="mlp.c_proj"),
    )
