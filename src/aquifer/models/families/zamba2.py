"""Zamba2: Mamba-2 in all layers, and before it, in some, a transformer block that layers share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.families.mamba import read_heads, read_state_size, read_taps
from aquifer.models.limits import MOST_LAYERS, MOST_WIDTH
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.models.spec import (
    Attention,
    Block,
    DecoderSpec,
    Head,
    Layer,
    Mlp,
    Names,
    SharedBlocks,
    SharedUse,
)

_HYBRID = "hybrid"  # entry of `layers_block_type`
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
}
_LONG_POSITIONS = 16384  # longest context with `use_long_context`
_GATED_NORM_EPS = 1e-5  # not in the configuration
_USUAL_HYBRIDS = (6, 12, 18, 24, 30, 36, 42, 47, 51)
_USUAL_LAYERS = 54


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of Zamba2."""
    known = fields.with_defaults(_DEFAULTS)
    if known.flag("use_long_context", default=False):
        values = {**known.values, "max_position_embeddings": _LONG_POSITIONS}
        known = Fields(known.file, values)
    hidden_size = known.integer("hidden_size", 1, MOST_WIDTH)
    num_heads = known.integer("num_attention_heads", 1, MOST_WIDTH)
    if 2 * hidden_size % num_heads or 2 * hidden_size // num_heads % 2:
        raise known.error("hidden_size", f"a multiple of the {num_heads} heads")
    head_dim = 2 * hidden_size // num_heads
    # The size of heads follows from the others, whatever the file says.
    sizes = reading.read_sizes(Fields(known.file, {**known.values, "head_dim": head_dim}))
    norm = reading.rms_norm(known)
    has_rope = known.flag("use_mem_rope", default=False)
    rope = reading.read_rope(known, sizes, architecture) if has_rope else None
    has_bias = known.flag("add_bias_linear", default=False)
    hybrids = _read_hybrids(known, sizes.num_layers)
    count = known.integer("num_mem_blocks", 1, MOST_LAYERS, default=1)
    is_tied = known.flag("tie_word_embeddings", default=True)
    if not is_tied:  # Transformers then ties no weights at all: each use has a block of its own
        count = max(len(hybrids), 1)
    blocks = SharedBlocks(
        count=count,
        layers=hybrids,
        attention=sizes.attention,
        mlp=Mlp(
            reading.read_width(known, default=4 * hidden_size),
            reading.read_activation(known, architecture),
            has_bias=has_bias,
        ),
        norm=norm,
        rank=known.integer("adapter_rank", 1, MOST_WIDTH, default=128),
        adapts_attention=_adapts_attention(known, sizes.attention),
    )
    alone = Layer(rope=None, has_attention=False, has_mixer=True, has_mlp=False)
    layers = [alone] * sizes.num_layers
    for index, number in enumerate(hybrids):
        layers[number] = replace(
            alone,
            scale=(head_dim / 2) ** -0.5,
            rope=0 if has_rope else None,
            shared_use=SharedUse(index % count, index),
        )
    return DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=hidden_size,
        max_model_len=sizes.max_positions if rope is None else rope.max_model_len,
        attention=None,
        mlp=None,
        mixer=_mixer(known, hidden_size, has_bias=has_bias),
        shared=blocks if hybrids else None,
        block=Block(before_attention=norm),
        layers=tuple(layers),
        ropes=() if rope is None else (rope,),
        norm=norm,
        head=Head(is_tied),
        names=Names(norm="final_layernorm"),
    )


def _adapts_attention(known: Fields, heads: Attention) -> bool:
    """Whether queries, keys and values have adapters."""
    adapts = known.flag("use_shared_attention_adapter", default=False)
    if adapts and heads.num_kv_heads != heads.num_heads:
        raise known.error(
            "num_key_value_heads", f"the {heads.num_heads} heads, as keys and values have adapters"
        )
    return adapts


def _read_hybrids(known: Fields, num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers with a shared block.

    Raises:
        ConfigError: `layers_block_type` is impossible, or missing in a model of unusual depth.
    """
    name = "layers_block_type" if "layers_block_type" in known else "layer_types"
    kinds = reading.modern_kinds(known.texts(name))
    if not kinds and num_layers == _USUAL_LAYERS:
        return _USUAL_HYBRIDS
    if len(kinds) != num_layers or not {reading.LINEAR, _HYBRID}.issuperset(kinds):
        valid = f'"{reading.LINEAR}" or "{_HYBRID}"'
        raise known.error(name, f"a list of {valid} for each of {num_layers} layers")
    hybrids = tuple(index for index, kind in enumerate(kinds) if kind == _HYBRID)
    given = known.integers("hybrid_layer_ids", 0, MOST_LAYERS)
    if given and given != hybrids:
        raise known.error("hybrid_layer_ids", f"{list(hybrids)}, the hybrid ones of {name}")
    return hybrids


def _mixer(known: Fields, hidden_size: int, *, has_bias: bool) -> Mamba2:
    """The mixer. Its time steps have a lower bound alone."""
    width = known.integer("mamba_expand", 1, MOST_WIDTH // hidden_size, default=2) * hidden_size
    names = "n_mamba_heads", "mamba_headdim", "mamba_ngroups"
    num_heads, head_dim, num_groups = read_heads(known, width, names, (8, 1))
    least = known.number("time_step_min", 0.0, 1e9, default=0.001)
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=read_state_size(known, "mamba_d_state", 64),
        kernel_size=read_taps(known, "mamba_d_conv"),
        norm_eps=_GATED_NORM_EPS,
        in_bias=has_bias,
        out_bias=has_bias,
        dt_limit=(least, float("inf")),
    )
