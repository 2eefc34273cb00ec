"""GPT-NeoX and Pythia: attention beside the MLP, a quarter of each head rotated."""

from __future__ import annotations

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Attention, Block, DecoderSpec, Head, Mlp, Names


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of GPT-NeoX."""
    known = fields.with_defaults({"max_position_embeddings": 2048, "hidden_act": "gelu"})
    # An older name of the part that is rotated.
    older = {"partial_rotary_factor": fields.values.get("rotary_pct")}
    known = known.with_defaults({name: value for name, value in older.items() if value is not None})
    theta = fields.values.get("rotary_emb_base")
    known = known.with_defaults({} if theta is None else {"rope_theta": theta})
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_eps")
    rope = reading.read_rope(known, sizes, architecture, default_partial=0.25)
    has_bias = known.flag("attention_bias", default=True)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=Attention(
            sizes.num_heads,
            sizes.num_heads,
            sizes.head_dim,
            qkv_bias=has_bias,
            out_bias=has_bias,
            is_grouped=True,
        ),
        mlp=Mlp(
            reading.read_width(known),
            reading.read_activation(known, architecture),
            is_gated=False,
            has_bias=True,
        ),
        block=Block(
            before_attention=norm,
            before_mlp=norm,
            is_parallel=known.flag("use_parallel_residual", default=True),
        ),
        layers=reading.plain_layers(sizes),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(
            prefix="gpt_neox.",
            embed="embed_in",
            qkv=("attention.query_key_value",),
            out="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            norm="final_layer_norm",
            head="embed_out",
        ),
    )
