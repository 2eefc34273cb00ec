"""StableLM: LayerNorm around a gated MLP, a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.spec import Block, DecoderSpec, Head, HeadNorm, HeadSpan, Mlp, Names


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of StableLM."""
    known = fields.with_defaults({"max_position_embeddings": 4096, "num_key_value_heads": 32})
    sizes = reading.read_sizes(known)
    norm = reading.layer_norm(known, "layer_norm_eps")
    rope = reading.read_rope(known, sizes, architecture, default_partial=0.25)
    is_parallel = known.flag("use_parallel_residual", default=False)
    head_norm = None
    if known.flag("qk_layernorm", default=False):
        own = reading.layer_norm(known, "layer_norm_eps", has_bias=False)
        head_norm = HeadNorm(own, HeadSpan.EACH_HEAD)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=known.flag("use_qkv_bias", default=False),
            head_norm=head_norm,
        ),
        mlp=Mlp(reading.read_width(known), reading.read_activation(known, architecture)),
        block=Block(
            before_attention=norm,
            before_mlp=None if is_parallel else norm,
            is_parallel=is_parallel,
        ),
        layers=reading.plain_layers(sizes),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(
            q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}"
        ),
    )
