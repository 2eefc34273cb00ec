"""OPT: learned positions, ReLU."""

from __future__ import annotations

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Attention, Block, DecoderSpec, Head, Layer, Mlp, Names, Positions

_OPT_OFFSET = 2
"""Rows before that of the first position."""


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of OPT, but for the one of 350M, which normalises sums."""
    known = fields.with_defaults(
        {"max_position_embeddings": 2048, "activation_function": "relu", "ffn_dim": 3072}
    )
    sizes = reading.read_sizes(known)
    embed_dim = known.integer("word_embed_proj_dim", 1, 1 << 20, default=sizes.hidden_size)
    if not known.flag("do_layer_norm_before", default=True) or embed_dim != sizes.hidden_size:
        raise UnsupportedModelError(architecture, "it normalises sums, or projects embeddings")
    if not known.flag("layer_norm_elementwise_affine", default=True):
        raise UnsupportedModelError(architecture, "its norms have no weights")
    norm = reading.layer_norm(known, "layer_norm_eps")
    has_bias = known.flag("enable_bias", default=True)
    has_norm = not known.flag("_remove_final_layer_norm", default=False)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=Attention(
            sizes.num_heads, sizes.num_heads, sizes.head_dim, qkv_bias=has_bias, out_bias=has_bias
        ),
        mlp=Mlp(
            reading.read_width(known, "ffn_dim"),
            reading.read_activation(known, architecture, "activation_function"),
            is_gated=False,
            has_bias=has_bias,
        ),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(Layer(sizes.head_dim**-0.5, rope=None) for _ in range(sizes.num_layers)),
        ropes=(),
        norm=norm if has_norm else None,
        head=Head(known.flag("tie_word_embeddings", default=True)),
        positions=Positions(sizes.max_positions + _OPT_OFFSET, _OPT_OFFSET),
        names=Names(
            prefix="model.decoder.",
            before_attention="self_attn_layer_norm",
            before_mlp="final_layer_norm",
            out="self_attn.out_proj",
            up=("fc1",),
            down="fc2",
            norm="final_layer_norm",
        ),
    )
