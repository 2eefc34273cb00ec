"""Hybrids of attention and Mamba-2 with an MLP in each layer: Bamba, Granite 4 and Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aquifer.fields import Fields
from aquifer.kernels.experts import Routing
from aquifer.models.families import reading
from aquifer.models.families.llama import with_multipliers
from aquifer.models.families.mamba import (
    check_silu,
    read_dt_limit,
    read_heads,
    read_state_size,
    read_taps,
)
from aquifer.models.families.moe import MOST_EXPERTS
from aquifer.models.limits import MOST_LAYERS, MOST_WIDTH
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.models.spec import (
    Block,
    DecoderSpec,
    ExpertNames,
    Experts,
    Factors,
    Head,
    Layer,
    Mlp,
    Names,
)
from aquifer.weights.forms import Form

MIXER_NAMES = Names(
    before_mlp="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norm="final_layernorm",
)
"""Names of the stored tensors of Bamba, Falcon-H1 and Jamba."""

_BAMBA: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
}
_FALCON: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
_GRANITE: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}

_GRANITE_EXPERTS = (
    ExpertNames(
        "block_sparse_moe.router.layer",
        ("block_sparse_moe.input_linear",),
        "block_sparse_moe.output_linear",
        ((".weight", Form.PLAIN),),
    ),
    ExpertNames(
        "block_sparse_moe.router",
        ("block_sparse_moe.experts.gate_up_proj",),
        "block_sparse_moe.experts.down_proj",
    ),
)
_MOST_FACTOR = 1e9


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Bamba, in which a layer has attention or a mixer."""
    known = fields.with_defaults(reading.without_null_kv_heads(fields, _BAMBA))
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    check_silu(known, architecture)
    rope = reading.read_rope(known, sizes, architecture, default_partial=0.5)
    bias = known.flag("attention_bias", default=False)
    attending = set(known.integers("attn_layer_indices", 0, MOST_LAYERS))
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(sizes.attention, qkv_bias=bias, out_bias=bias),
        mlp=Mlp(reading.read_width(known), "silu", has_bias=known.flag("mlp_bias", default=False)),
        mixer=_mixer(known, _width(known), norm.eps),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=_layers([i in attending for i in range(sizes.num_layers)], sizes.head_dim**-0.5, 0),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=MIXER_NAMES,
    )


def read_granite(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Granite 4, the layers of which have experts and a shared expert, or
    that one alone."""
    known = fields.with_defaults(_GRANITE)
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    check_silu(known, architecture)
    has_rope = known.text("position_embedding_type", default="none") == "rope"
    rope = reading.read_rope(known, sizes, architecture) if has_rope else None
    bias = known.flag("attention_bias", default=False)
    width = reading.read_width(known, "shared_intermediate_size", default=1024)
    count = known.integer("num_local_experts", 0, MOST_EXPERTS, default=8)
    kinds = reading.read_kinds(known, sizes.num_layers)
    layers = _layers([kind == reading.FULL for kind in kinds], 1.0, 0 if has_rope else None)
    spec = DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions if rope is None else rope.max_model_len,
        attention=replace(sizes.attention, qkv_bias=bias, out_bias=bias),
        mlp=Mlp(width, "silu"),
        mixer=_mixer(known, _width(known), norm.eps),
        experts=_granite_experts(known, count, width) if count else None,
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(replace(layer, has_experts=count > 0) for layer in layers),
        ropes=() if rope is None else (rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=Names(
            up=("shared_mlp.input_linear",),
            down="shared_mlp.output_linear",
            shared_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
        ),
    )
    return with_multipliers(spec, known)


def read_falcon(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Falcon-H1, in which each layer has attention beside a mixer."""
    known = fields.with_defaults(reading.without_null_kv_heads(fields, _FALCON))
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    check_silu(known, architecture)
    rope = reading.read_rope(known, sizes, architecture)
    bias = known.flag("attention_bias", default=False)
    is_tied = known.flag("tie_word_embeddings", default=False)
    embed, head = _factor(known, "embedding_multiplier"), _factor(known, "lm_head_multiplier")
    if is_tied and abs(head) < 1 / _MOST_FACTOR:
        raise known.error(
            "lm_head_multiplier", "other than 0, as the embedding has that factor too"
        )
    gate, down = _factors(known, "mlp_multipliers", 2)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(sizes.attention, qkv_bias=bias, out_bias=bias),
        mlp=Mlp(reading.read_width(known), "silu", has_bias=known.flag("mlp_bias", default=False)),
        mixer=_falcon_mixer(fields, known, norm.eps),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=(Layer(sizes.head_dim**-0.5, has_mixer=True),) * sizes.num_layers,
        ropes=(rope,),
        norm=norm,
        head=Head(is_tied),
        embed_scale=embed / head if is_tied else 1.0,
        factors=Factors(
            embed=1.0 if is_tied else embed,
            attention_in=_factor(known, "attention_in_multiplier"),
            key=_factor(known, "key_multiplier"),
            attention_out=_factor(known, "attention_out_multiplier"),
            gate=gate,
            down=down,
            head=head,
        ),
        names=MIXER_NAMES,
    )


def _layers(attend: list[bool], scale: float, rope: int | None) -> tuple[Layer, ...]:
    """Layers with attention or a mixer."""
    return tuple(
        Layer(scale, rope=rope)
        if attends
        else Layer(rope=None, has_attention=False, has_mixer=True)
        for attends in attend
    )


def _width(known: Fields) -> int:
    """Width of a mixer that is as wide as the hidden states times a factor."""
    hidden_size = known.integer("hidden_size", 1, MOST_WIDTH)
    return hidden_size * known.integer("mamba_expand", 1, MOST_WIDTH // hidden_size, default=2)


def _mixer(known: Fields, width: int, eps: float | None) -> Mamba2:
    """The mixer of that width, with a norm unless there is no epsilon for it."""
    names = "mamba_n_heads", "mamba_d_head", "mamba_n_groups"
    num_heads, head_dim, num_groups = read_heads(known, width, names, (128, 1))
    bias = known.flag("mamba_proj_bias", default=False)
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=read_state_size(known, "mamba_d_state", 256),
        kernel_size=read_taps(known, "mamba_d_conv"),
        norm_eps=eps,
        conv_bias=known.flag("mamba_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        dt_limit=read_dt_limit(known),
    )


def _falcon_mixer(fields: Fields, known: Fields, eps: float) -> Mamba2:
    """The mixer of Falcon-H1, which has a width of its own and may lack the norm.

    Args:
        fields: the configuration.
        known: the same with the defaults of its model type.
        eps: added to the mean square in norms.
    """
    is_null = "mamba_d_ssm" in fields.values and "mamba_d_ssm" not in fields
    given = known.integer("mamba_d_ssm", 1, MOST_WIDTH, default=1024)
    width = _width(known) if is_null else given
    has_norm = known.flag("mamba_rms_norm", default=False)
    return replace(
        _mixer(known, width, eps if has_norm else None),
        norm_before_gate=known.flag("mamba_norm_before_gate", default=True),
        out_bias=known.flag("projectors_bias", default=False),
        in_factor=_factor(known, "ssm_in_multiplier"),
        factors=_factors(known, "ssm_multipliers", 5),
        out_factor=_factor(known, "ssm_out_multiplier"),
    )


def _granite_experts(known: Fields, count: int, shared_width: int) -> Experts:
    top_k = known.integer("num_experts_per_tok", 1, count, default=2)
    return Experts(
        count=count,
        top_k=top_k,
        width=reading.read_width(known),
        routing=Routing("softmax_of_chosen", rounds_weights=True),
        shared_width=shared_width,
        is_shared_gated=False,
        names=_GRANITE_EXPERTS,
    )


def _factor(known: Fields, name: str) -> float:
    return known.number(name, -_MOST_FACTOR, _MOST_FACTOR, default=1.0)


def _factors(known: Fields, name: str, count: int) -> tuple[float, ...]:
    if name not in known:
        return (1.0,) * count
    return known.numbers(name, -_MOST_FACTOR, _MOST_FACTOR, count)
