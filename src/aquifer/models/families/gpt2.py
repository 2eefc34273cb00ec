"""GPT-2: learned positions, weights stored transposed."""

from __future__ import annotations

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Attention, Block, DecoderSpec, Head, Layer, Mlp, Names, Positions


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of GPT-2."""
    known = reading.renamed(
        fields,
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ).with_defaults({"activation_function": "gelu_new"})
    if known.flag("add_cross_attention", default=False):
        raise UnsupportedModelError(architecture, "it attends to an encoder")
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_epsilon")
    scale = sizes.head_dim**-0.5 if known.flag("scale_attn_weights", default=True) else 1.0
    by_layer = known.flag("scale_attn_by_inverse_layer_idx", default=False)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=Attention(
            sizes.num_heads, sizes.num_heads, sizes.head_dim, qkv_bias=True, out_bias=True
        ),
        mlp=Mlp(
            reading.read_width(known, "n_inner", 4 * sizes.hidden_size),
            reading.read_activation(known, architecture, "activation_function"),
            is_gated=False,
            has_bias=True,
        ),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(
            Layer(scale / (index + 1) if by_layer else scale, rope=None)
            for index in range(sizes.num_layers)
        ),
        ropes=(),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=True)),
        positions=Positions(sizes.max_positions),
        names=Names(
            prefix="transformer.",
            embed="wte",
            positions="wpe",
            layer="h.{}",
            before_attention="ln_1",
            before_mlp="ln_2",
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
            norm="ln_f",
            are_transposed=True,
        ),
    )
