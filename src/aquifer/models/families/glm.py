"""GLM-4: neighbouring dimensions of half of each head rotated.

Later models (0414, `glm4`) have norms before and after attention and MLP, earlier ones (`glm`)
before them only.
"""

from __future__ import annotations

from dataclasses import replace

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Block, DecoderSpec, Head, Mlp, Names


def read_first(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of an earlier model."""
    spec = read(fields, architecture)
    norm = spec.norm
    return replace(spec, block=Block(before_attention=norm, before_mlp=norm))


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of a later model."""
    known = fields.with_defaults(
        {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072}
    )
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known, default=1.5625e-7)
    rope = reading.read_rope(known, sizes, architecture, default_partial=0.5)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=known.flag("attention_bias", default=True),
            is_interleaved=True,
        ),
        mlp=Mlp(reading.read_width(known), reading.read_activation(known, architecture)),
        block=Block(norm, norm, norm, norm),
        layers=reading.plain_layers(sizes),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(
            after_attention="post_self_attn_layernorm",
            after_mlp="post_mlp_layernorm",
            up=("mlp.gate_up_proj",),
        ),
    )
