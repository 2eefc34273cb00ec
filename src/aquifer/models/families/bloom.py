"""BLOOM and MPT: attention with linear biases (ALiBi) in place of positions."""

from __future__ import annotations

from dataclasses import replace

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Block, DecoderSpec, Head, Mlp, Names


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of BLOOM."""
    known = reading.renamed(
        fields,
        {
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",  # of the training
        },
    ).with_defaults({"max_position_embeddings": 2048})
    if known.flag("apply_residual_connection_post_layernorm", default=False):
        raise UnsupportedModelError(
            architecture,
            "it adds to normed states (apply_residual_connection_post_layernorm)",
        )
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_epsilon")
    layers = reading.plain_layers(sizes)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=replace(
            sizes.attention,
            qkv_bias=True,
            out_bias=True,
            is_grouped=True,
            has_alibi=True,
        ),
        mlp=Mlp(4 * sizes.hidden_size, "gelu_tanh", is_gated=False, has_bias=True),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(replace(layer, rope=None) for layer in layers),
        ropes=(),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=True)),
        embed_norm=norm,
        names=Names(
            prefix="transformer.",
            embed="word_embeddings",
            embed_norm="word_embeddings_layernorm",
            layer="h.{}",
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            norm="ln_f",
        ),
    )


def read_mpt(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of MPT."""
    known = reading.renamed(
        fields,
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
    ).with_defaults({"max_position_embeddings": 2048})
    of = known.section("attn_config")
    _check_mpt(known, of, architecture)
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_epsilon", has_bias=False)
    scale = of.number("softmax_scale", 1e-6, 1e6, default=sizes.head_dim**-0.5)
    layers = reading.plain_layers(sizes, scale=scale)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=replace(sizes.attention, has_alibi=True),
        mlp=Mlp(4 * sizes.hidden_size, "gelu", is_gated=False),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(replace(layer, rope=None) for layer in layers),
        ropes=(),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=True)),
        names=Names(
            prefix="transformer.",
            embed="wte",
            layer="blocks.{}",
            before_attention="norm_1",
            before_mlp="norm_2",
            qkv=("attn.Wqkv",),
            out="attn.out_proj",
            up=("ffn.up_proj",),
            down="ffn.down_proj",
            norm="norm_f",
        ),
    )


def _check_mpt(known: Fields, attention: Fields, architecture: str) -> None:
    """Refuse settings that Transformers ignores, and clipping."""
    kind = attention.text("attn_type", default="multihead_attention")
    is_usual = {
        "attn_config.alibi": attention.flag("alibi", default=True),
        "attn_config.alibi_bias_max": attention.number("alibi_bias_max", 0.0, 1e6, default=8) == 8,
        "attn_config.attn_type": kind == "multihead_attention",
        "attn_config.clip_qkv": "clip_qkv" not in attention,
        "attn_config.prefix_lm": not attention.flag("prefix_lm", default=False),
        "attn_config.qk_ln": not attention.flag("qk_ln", default=False),
        "expansion_ratio": known.number("expansion_ratio", 0.0, 1e6, default=4) == 4,
        "logit_scale": "logit_scale" not in known,
        "no_bias": known.flag("no_bias", default=True),
    }
    for name, usual in is_usual.items():
        if not usual:
            raise UnsupportedModelError(architecture, f"its {name} is not the usual one")
