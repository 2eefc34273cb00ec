"""Gemma 1, 2 and 3 (text): norms with one plus the weight, scaled embeddings, gated GELU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.limits import MOST_LAYERS
from aquifer.models.spec import Block, DecoderSpec, Head, HeadNorm, Layer, Mlp, Names

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
_SANDWICH = Names(before_mlp="pre_feedforward_layernorm")


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of any of these model types."""
    model_type = fields.text("model_type")
    common = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    # A softcap that is null is none, where an absent one has the default.
    nulls = {name for name, value in fields.values.items() if value is None}
    defaults = {k: v for k, v in _DEFAULTS[model_type].items() if k not in nulls}
    known = fields.with_defaults({**common, **defaults})
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known, plus_one=True)
    is_first = model_type == "gemma"
    has_bias = known.flag("attention_bias", default=False)
    activation = "hidden_act" if is_first else "hidden_activation"
    block = Block(before_attention=norm, before_mlp=norm)
    if not is_first:
        block = Block(norm, norm, norm, norm)
    layers, ropes = reading.plain_layers(sizes), (reading.read_rope(known, sizes, architecture),)
    if model_type == "gemma2":
        scale = _scale(known)
        sliding = reading.are_sliding(known, sizes.num_layers, lambda index: index % 2 == 0)
        window = reading.read_window(known)
        layers = tuple(Layer(scale, window if slides else None) for slides in sliding)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=ropes[0].max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
            softcap=_softcap(known, "attn_logit_softcapping"),
        ),
        mlp=Mlp(
            reading.read_width(known), reading.read_activation(known, architecture, activation)
        ),
        block=block,
        layers=layers,
        ropes=ropes,
        norm=norm,
        head=Head(
            known.flag("tie_word_embeddings", default=True),
            softcap=_softcap(known, "final_logit_softcapping"),
        ),
        embed_scale=sizes.hidden_size**0.5,
        names=Names() if is_first else _SANDWICH,
    )


def read_third(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Gemma 3: two rotary embeddings, and norms of queries and keys."""
    if fields.flag("use_bidirectional_attention", default=False):
        raise UnsupportedModelError(architecture, "its attention is not causal")
    known = fields.with_defaults(
        {**_DEFAULTS["gemma3_text"], "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    )
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known, plus_one=True)
    has_bias = known.flag("attention_bias", default=False)
    full, local = reading.read_ropes_by_kind(
        known, sizes, "rope_local_base_freq", sliding_is_plain=True
    )
    interval = known.integer("sliding_window_pattern", 1, MOST_LAYERS, default=6)
    sliding = reading.are_sliding(known, sizes.num_layers, lambda i: (i + 1) % interval != 0)
    window, scale = reading.read_window(known), _scale(known)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
            head_norm=HeadNorm(norm),  # and no softcap, whatever the file says, as in Transformers
        ),
        mlp=Mlp(
            reading.read_width(known),
            reading.read_activation(known, architecture, "hidden_activation"),
        ),
        block=Block(norm, norm, norm, norm),
        layers=tuple(
            Layer(scale, window, 1) if slides else Layer(scale, None, 0) for slides in sliding
        ),
        ropes=(full, local),
        norm=norm,
        head=Head(
            known.flag("tie_word_embeddings", default=True),
            softcap=_softcap(known, "final_logit_softcapping"),
        ),
        embed_scale=sizes.hidden_size**0.5,
        names=_SANDWICH,
    )


def _scale(known: Fields) -> float:
    return 1.0 / math.sqrt(known.number("query_pre_attn_scalar", 1e-6, 1e9))


def _softcap(known: Fields, name: str) -> float | None:
    return known.number(name, 1e-6, 1e9) if name in known else None
