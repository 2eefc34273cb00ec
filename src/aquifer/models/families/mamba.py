"""Models of mixers alone: Mamba, FalconMamba and Mamba-2; and what hybrids read of theirs."""

from __future__ import annotations

import math

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.limits import (
    MOST_HEADS,
    MOST_LAYERS,
    MOST_STATE,
    MOST_TAPS,
    MOST_VOCAB,
    MOST_WIDTH,
    UNLIMITED_POSITIONS,
)
from aquifer.models.mixers.base import Mixer
from aquifer.models.mixers.mamba1 import InnerNorm, Mamba1
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.models.spec import Block, DecoderSpec, Head, Layer, Names, Norm

NO_LIMIT = (0.0, math.inf)
"""Bounds of a time step that it never exceeds."""


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of any of these model types."""
    model_type = fields.text("model_type")
    hidden_size = fields.integer("hidden_size", 1, MOST_WIDTH, default=_HIDDEN[model_type])
    norm = Norm(fields.number("layer_norm_epsilon", 1e-30, 1.0, default=1e-5))
    check_silu(fields, architecture)
    num_layers = fields.integer(
        "num_hidden_layers", 1, MOST_LAYERS, default=64 if model_type == "mamba2" else 32
    )
    mixer: Mixer
    if model_type == "mamba2":
        mixer = _read_second(fields, hidden_size, norm.eps)
    else:
        mixer = _read_first(fields, hidden_size)
    return DecoderSpec(
        vocab_size=fields.integer("vocab_size", 1, MOST_VOCAB, default=_VOCAB[model_type]),
        hidden_size=hidden_size,
        max_model_len=UNLIMITED_POSITIONS,
        attention=None,
        mlp=None,
        mixer=mixer,
        block=Block(before_attention=norm),
        layers=(Layer(rope=None, has_attention=False, has_mixer=True, has_mlp=False),) * num_layers,
        ropes=(),
        norm=norm,
        head=Head(fields.flag("tie_word_embeddings", default=model_type != "mamba2")),
        names=Names(
            prefix="backbone.",
            embed="embeddings",
            before_attention="norm",
            mixer="mixer",
            norm="norm_f",
        ),
    )


_HIDDEN = {"mamba": 768, "falcon_mamba": 768, "mamba2": 4096}
_VOCAB = {"mamba": 50280, "falcon_mamba": 50280, "mamba2": 32768}


def check_silu(fields: Fields, architecture: str, name: str = "hidden_act") -> None:
    """Refuse an activation of the convolution that is not silu.

    Raises:
        UnsupportedModelError: it is another one.
    """
    if reading.read_activation(fields, architecture, name) != "silu":
        raise UnsupportedModelError(
            architecture, f"its {name} {fields.text(name)!r} is not silu, as in its mixers"
        )


def read_taps(fields: Fields, name: str) -> int:
    """Taps of a mixer's convolution."""
    return fields.integer(name, 2, MOST_TAPS, default=4)


def read_state_size(fields: Fields, name: str, default: int) -> int:
    """Numbers of a mixer's state for each element or channel."""
    return fields.integer(name, 1, MOST_STATE, default=default)


def read_dt_rank(fields: Fields, name: str, hidden_size: int) -> int:
    """Elements that the time steps of Mamba are made of; "auto" stands for their usual number."""
    if fields.values.get(name, "auto") == "auto":
        return -(-hidden_size // 16)
    return fields.integer(name, 1, MOST_WIDTH)


def read_dt_limit(fields: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """Bounds of the time steps of Mamba-2.

    JSON has no infinity: Transformers 5 writes an object for it, `{"__float__": "Infinity"}`, and
    older versions the word alone.
    """
    if name not in fields:
        return NO_LIMIT
    values = fields.values[name]
    if isinstance(values, list):
        infinity = {"__float__": "Infinity"}
        values = [math.inf if value == infinity else value for value in values]
    least, most = Fields(fields.file, {name: values}).numbers(name, 0.0, math.inf, 2)
    if most < least:
        raise fields.error(name, "a list of two numbers in ascending order")
    return least, most


def read_heads(
    fields: Fields, width: int, names: tuple[str, str, str], defaults: tuple[int, int]
) -> tuple[int, int, int]:
    """Number of heads of Mamba-2, elements of a head, and number of groups.

    Args:
        fields: the configuration.
        width: elements of all heads.
        names: of the three in the configuration. The elements of a head may be "auto".
        defaults: of the numbers of heads and groups.

    Raises:
        ConfigError: they do not fit together.
    """
    heads, dim, groups = names
    num_heads = fields.integer(heads, 1, MOST_HEADS, default=defaults[0])
    if width % num_heads:
        raise fields.error(heads, f"a divisor of the mixer's width, {width}")
    head_dim = width // num_heads
    if fields.values.get(dim) not in (None, "auto", head_dim):
        raise fields.error(dim, f"{head_dim}, the mixer's width {width} divided by {heads}")
    num_groups = fields.integer(groups, 1, MOST_HEADS, default=defaults[1])
    if num_heads % num_groups:
        raise fields.error(groups, f"a divisor of the {num_heads} heads")
    return num_heads, head_dim, num_groups


def _read_first(fields: Fields, hidden_size: int) -> Mamba1:
    is_falcon = fields.text("model_type") == "falcon_mamba"
    if "intermediate_size" in fields:  # counts more than the factor
        width = reading.read_width(fields)
    else:
        width = fields.integer("expand", 1, MOST_WIDTH // hidden_size, default=2) * hidden_size
    return Mamba1(
        width=width,
        state_size=read_state_size(fields, "state_size", 16),
        kernel_size=read_taps(fields, "conv_kernel"),
        dt_rank=read_dt_rank(fields, "time_step_rank", hidden_size),
        inner_norm=InnerNorm.PLAIN if is_falcon else InnerNorm.NONE,
        norm_eps=fields.number("mixer_rms_eps", 1e-30, 1.0, default=1e-6),
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=fields.flag("use_bias", default=False),
    )


def _read_second(fields: Fields, hidden_size: int, eps: float) -> Mamba2:
    width = fields.integer("expand", 1, MOST_WIDTH // hidden_size, default=2) * hidden_size
    names = "num_heads", "head_dim", "n_groups"
    num_heads, head_dim, num_groups = read_heads(fields, width, names, (128, 8))
    bias = fields.flag("use_bias", default=False)
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=read_state_size(fields, "state_size", 128),
        kernel_size=read_taps(fields, "conv_kernel"),
        norm_eps=eps,
        conv_bias=fields.flag("use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        dt_limit=read_dt_limit(fields),
    )
