"""Cohere's Command R (cohere) and Command A (cohere2): attention beside the MLP, one LayerNorm
without bias, neighbouring dimensions rotated."""

from __future__ import annotations

from dataclasses import replace

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
)

_DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 0.0625}


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of either model type."""
    is_second = fields.text("model_type") == "cohere2"
    own = {"sliding_window": 4096} if is_second else {"rope_theta": 500_000.0}
    known = fields.with_defaults(_DEFAULTS | own)
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_eps", has_bias=False)
    rope = reading.read_rope(known, sizes, architecture)
    has_bias = known.flag("attention_bias", default=False)
    head_norm = None
    if not is_second and known.flag("use_qk_norm", default=False):
        head_norm = HeadNorm(norm, HeadSpan.EACH_HEAD)
    layers = reading.plain_layers(sizes)
    if is_second:  # only sliding layers have a rotary embedding
        interval = known.integer("sliding_window_pattern", 1, MOST_LAYERS, default=4)
        sliding = reading.are_sliding(known, sizes.num_layers, lambda i: (i + 1) % interval != 0)
        window, scale = reading.read_window(known), sizes.head_dim**-0.5
        layers = tuple(
            Layer(scale, window, 0 if window is not None else None)
            if slides
            else Layer(scale, None, None)
            for slides in sliding
        )
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=has_bias,
            head_norm=head_norm,
            is_interleaved=True,
        ),
        mlp=Mlp(reading.read_width(known), reading.read_activation(known, architecture)),
        block=Block(before_attention=norm, is_parallel=True),
        layers=layers,
        ropes=(rope,),
        norm=norm,
        head=Head(
            known.flag("tie_word_embeddings", default=True),
            scale=known.number("logit_scale", 1e-9, 1e9),
        ),
    )
