"""Nemotron-H, a layer of which has one part: Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

import math
from typing import Any

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.kernels.experts import Routing
from aquifer.models.families import reading
from aquifer.models.families.mamba import check_silu, read_state_size, read_taps
from aquifer.models.families.moe import MOST_EXPERTS
from aquifer.models.limits import MOST_HEADS, MOST_LAYERS, MOST_WIDTH
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.models.spec import (
    Block,
    DecoderSpec,
    ExpertNames,
    Experts,
    Head,
    Layer,
    Mlp,
    Names,
    Norm,
)

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
}
_OTHER_NAMES = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}
"""Names of some entries in other configurations, by the usual ones."""

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": reading.LINEAR, "*": reading.FULL, "-": _MLP, "E": _EXPERTS}
_EXPERT_NAMES = (
    ExpertNames("mixer.gate", ("mixer.experts.{}.up_proj",), "mixer.experts.{}.down_proj"),
    ExpertNames("mixer.gate", ("mixer.experts.up_proj",), "mixer.experts.down_proj"),
)
_NAMES = Names(
    other_prefixes=("backbone.",),
    embed="embeddings",
    before_attention="norm",
    before_mlp="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    mixer="mixer",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    norm="norm_f",
    shared_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    choice_bias="mixer.gate.e_score_correction_bias",
)


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration."""
    defaults = reading.without_null_kv_heads(fields, _DEFAULTS)
    known = reading.renamed(fields, _OTHER_NAMES).with_defaults(defaults)
    kinds = _kinds(known)
    sizes = reading.read_sizes(known.with_defaults({"num_hidden_layers": len(kinds)}))
    norm = Norm(known.number("layer_norm_epsilon", 1e-30, 1.0, default=1e-5))
    check_silu(known, architecture, "mamba_hidden_act")
    activation = reading.read_activation(known, architecture, "mlp_hidden_act")
    has_bias = known.flag("mlp_bias", default=False)
    layers = {
        reading.LINEAR: Layer(rope=None, has_attention=False, has_mixer=True, has_mlp=False),
        reading.FULL: Layer(sizes.head_dim**-0.5, rope=None, has_mlp=False),
        _MLP: Layer(rope=None, has_attention=False),
        _EXPERTS: Layer(rope=None, has_attention=False, has_experts=True),
    }
    experts = None
    if _EXPERTS in kinds:
        experts = _experts(known, architecture, activation, has_bias=has_bias)
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=sizes.max_positions,
        attention=sizes.attention,
        mlp=Mlp(
            reading.read_width(known, default=21504), activation, is_gated=False, has_bias=has_bias
        ),
        mixer=_mixer(known, norm.eps),
        experts=experts,
        block=Block(before_attention=norm, before_mlp=norm),
        layers=tuple(layers[kind] for kind in kinds),
        ropes=(),
        norm=norm,
        head=Head(is_tied=False),  # whatever tie_word_embeddings says, as in Transformers
        names=_NAMES,
    )


def _kinds(known: Fields) -> tuple[str, ...]:
    """The part of each layer.

    Raises:
        ConfigError: there is no such part, or there are too many layers.
    """
    name = "layers_block_type" if "layers_block_type" in known else "layer_types"
    if name in known:
        kinds = reading.modern_kinds(known.texts(name))
    else:
        name = "hybrid_override_pattern"
        letters = known.values.get(name) or "ME*-"
        if not isinstance(letters, str):
            raise known.error(name, f"a text of the letters {' '.join(_LETTERS)}")
        kinds = tuple(_LETTERS.get(letter, letter) for letter in letters)
    if not 1 <= len(kinds) <= MOST_LAYERS or not set(_LETTERS.values()).issuperset(kinds):
        parts = ", ".join(_LETTERS.values())
        raise known.error(name, f"of up to {MOST_LAYERS} layers, each one of {parts}")
    return kinds


def _mixer(known: Fields, eps: float) -> Mamba2:
    num_heads = known.integer("mamba_num_heads", 1, MOST_HEADS, default=128)
    num_groups = known.integer("n_groups", 1, MOST_HEADS, default=8)
    if num_heads % num_groups:
        raise known.error("n_groups", f"a divisor of the {num_heads} heads")
    bias = known.flag("use_bias", default=False)
    return Mamba2(
        num_heads=num_heads,
        head_dim=known.integer("mamba_head_dim", 1, MOST_WIDTH // num_heads, default=64),
        num_groups=num_groups,
        state_size=read_state_size(known, "ssm_state_size", 128),
        kernel_size=read_taps(known, "conv_kernel"),
        norm_eps=eps,
        conv_bias=known.flag("use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        dt_limit=(known.number("time_step_min", 0.0, 1e9, default=0.001), math.inf),
    )


def _experts(known: Fields, architecture: str, activation: str, *, has_bias: bool) -> Experts:
    """The mixture of experts, the products of which have no biases.

    Raises:
        UnsupportedModelError: experts have another activation, or a width of their own that hidden
            states are projected to.
    """
    if "moe_latent_size" in known:
        raise UnsupportedModelError(
            architecture, "its experts work on projected hidden states (moe_latent_size)"
        )
    if activation != "relu2":
        raise UnsupportedModelError(
            architecture, "its experts have another activation than relu2 (mlp_hidden_act)"
        )
    count = known.integer("n_routed_experts", 1, MOST_EXPERTS, default=8)
    num_groups = known.integer("n_group", 1, count, default=1)
    if count % num_groups or count // num_groups < 2:
        raise known.error("n_group", f"a divisor of the {count} experts, with two in each group")
    top_groups = known.integer("topk_group", 1, num_groups, default=1)
    return Experts(
        count=count,
        top_k=known.integer("num_experts_per_tok", 1, count // num_groups * top_groups, default=2),
        width=reading.read_width(known, "moe_intermediate_size", default=7688),
        routing=Routing(
            "sigmoid",
            normalise=known.flag("norm_topk_prob", default=True),
            num_groups=num_groups,
            top_groups=top_groups,
            group_score="best_two",
            scale=known.number("routed_scaling_factor", 0.0, 1e9, default=1.0),
        ),
        shared_width=reading.read_width(known, "moe_shared_expert_intermediate_size", default=7688),
        is_shared_gated=False,
        has_choice_bias=True,
        routes_in_float32=True,
        activation="relu2",
        shared_bias=has_bias,
        names=_EXPERT_NAMES,
    )
