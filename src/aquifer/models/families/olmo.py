"""OLMo-2, OLMo-3 and EXAONE-4: norms after attention and MLP instead of before, and of queries and
keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.limits import MOST_LAYERS
from aquifer.models.spec import (
    Block,
    DecoderSpec,
    Head,
    HeadNorm,
    HeadSpan,
    Layer,
    Mlp,
    Names,
)

_NAMES = Names(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


def read_second(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of OLMo-2."""
    known = fields.with_defaults({"max_position_embeddings": 2048, "rms_norm_eps": 1e-5})
    sizes = reading.read_sizes(known)
    rope = reading.read_rope(known, sizes, architecture)
    spec = _spec(known, architecture, sizes, HeadSpan.ALL_HEADS, reading.plain_layers(sizes))
    return spec(max_model_len=rope.max_model_len, ropes=(rope,))


def read_third(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of OLMo-3: three of four layers slide, without scaling of the rotary
    embedding."""
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    known = fields.with_defaults({**defaults, "rope_theta": 500_000.0, "sliding_window": 4096})
    sizes = reading.read_sizes(known)
    full, local = reading.read_ropes_by_kind(known, sizes, "rope_theta", sliding_is_plain=True)
    sliding = reading.are_sliding(known, sizes.num_layers, lambda index: (index + 1) % 4 != 0)
    window, scale = reading.read_window(known), sizes.head_dim**-0.5
    layers = tuple(
        Layer(scale, window, 1) if slides else Layer(scale, None, 0) for slides in sliding
    )
    spec = _spec(known, architecture, sizes, HeadSpan.ALL_HEADS, layers)
    return spec(max_model_len=full.max_model_len, ropes=(full, local))


def read_exaone(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of EXAONE-4: layers with full attention have no rotary embedding, if
    there are sliding ones."""
    defaults = {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    is_null = "sliding_window" in fields.values and "sliding_window" not in fields
    if is_null:
        del defaults["sliding_window"]
    known = fields.with_defaults(defaults)
    sizes = reading.read_sizes(known)
    rope = reading.read_rope(known, sizes, architecture)
    window = reading.read_window(known)
    pattern = known.values["sliding_window_pattern"]
    if isinstance(pattern, str):  # such as "LLLG"
        length = len(pattern)
    else:
        length = known.integer("sliding_window_pattern", 0, MOST_LAYERS)
    sliding = reading.are_sliding(
        known, sizes.num_layers, lambda index: window is not None and (index + 1) % length != 0
    )
    scale = sizes.head_dim**-0.5
    layers = tuple(
        Layer(scale, window if slides else None, 0 if slides or window is None else None)
        for slides in sliding
    )
    spec = _spec(known, architecture, sizes, HeadSpan.HEAD, layers)
    return spec(max_model_len=rope.max_model_len, ropes=(rope,))


def _spec(
    known: Fields,
    architecture: str,
    sizes: reading.Sizes,
    span: HeadSpan,
    layers: tuple[Layer, ...],
) -> partial[DecoderSpec]:
    """The spec, but for its rotary embeddings and its context length."""
    norm = reading.rms_norm(known, default=1e-5)
    has_bias = known.flag("attention_bias", default=False)
    return partial(
        DecoderSpec,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
            head_norm=HeadNorm(norm, span),
        ),
        mlp=Mlp(reading.read_width(known), reading.read_activation(known, architecture)),
        block=Block(after_attention=norm, after_mlp=norm),
        layers=layers,
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=_NAMES,
    )
