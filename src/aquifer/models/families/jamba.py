"""Jamba: attention without rotary embedding in some layers and Mamba in the others, experts in some
of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aquifer.fields import Fields
from aquifer.kernels.experts import Routing
from aquifer.models.families import reading
from aquifer.models.families.bamba import MIXER_NAMES
from aquifer.models.families.mamba import check_silu, read_dt_rank, read_state_size, read_taps
from aquifer.models.families.moe import MOST_EXPERTS
from aquifer.models.limits import MOST_LAYERS, MOST_WIDTH
from aquifer.models.mixers.mamba1 import InnerNorm, Mamba1
from aquifer.models.spec import Block, DecoderSpec, ExpertNames, Experts, Head, Layer, Mlp

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
}
_EXPERTS = (
    ExpertNames(
        "feed_forward.router",
        ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
        "feed_forward.experts.{}.down_proj",
    ),
    ExpertNames(
        "feed_forward.router",
        ("feed_forward.experts.gate_up_proj",),
        "feed_forward.experts.down_proj",
    ),
)


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration."""
    known = fields.with_defaults(reading.without_null_kv_heads(fields, _DEFAULTS))
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    check_silu(known, architecture)
    count = known.integer("num_experts", 1, MOST_EXPERTS, default=16)
    width = reading.read_width(known)
    attends = _periodic(known, "attn_layer", (8, 4), sizes.num_layers)
    has_experts = _periodic(known, "expert_layer", (2, 1), sizes.num_layers)
    attending = Layer(sizes.head_dim**-0.5, rope=None)
    mixing = Layer(rope=None, has_attention=False, has_mixer=True)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=sizes.attention,
        mlp=Mlp(width, "silu"),
        mixer=_mixer(known, sizes.hidden_size, norm.eps),
        experts=_experts(known, count, width) if count > 1 else None,
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(
            replace(attending if attends[i] else mixing, has_experts=count > 1 and has_experts[i])
            for i in range(sizes.num_layers)
        ),
        ropes=(),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
        names=MIXER_NAMES,
    )


def _periodic(
    known: Fields, name: str, defaults: tuple[int, int], num_layers: int
) -> tuple[bool, ...]:
    """Whether each layer is one of those that recur with a period, from an offset on."""
    period = known.integer(f"{name}_period", 1, MOST_LAYERS, default=defaults[0])
    offset = known.integer(f"{name}_offset", 0, period - 1, default=defaults[1])
    return tuple(index % period == offset for index in range(num_layers))


def _mixer(known: Fields, hidden_size: int, eps: float) -> Mamba1:
    expand = known.integer("mamba_expand", 1, MOST_WIDTH // hidden_size, default=2)
    return Mamba1(
        width=expand * hidden_size,
        state_size=read_state_size(known, "mamba_d_state", 16),
        kernel_size=read_taps(known, "mamba_d_conv"),
        dt_rank=read_dt_rank(known, "mamba_dt_rank", hidden_size),
        inner_norm=InnerNorm.WEIGHTED,
        norm_eps=eps,
        conv_bias=known.flag("mamba_conv_bias", default=True),
        proj_bias=known.flag("mamba_proj_bias", default=False),
    )


def _experts(known: Fields, count: int, width: int) -> Experts:
    top_k = known.integer("num_experts_per_tok", 1, count, default=2)
    return Experts(count, top_k, width, Routing(rounds_weights=True), names=_EXPERTS)
