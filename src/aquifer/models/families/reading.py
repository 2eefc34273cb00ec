"""What the families read in the same way from a `config.json`, as Transformers 4 or 5 wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aquifer.errors import UnsupportedModelError
from aquifer.fields import Fields
from aquifer.models.limits import (
    LEAST_POSITIONS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_VOCAB,
    MOST_WIDTH,
)
from aquifer.models.rope import RotarySettings
from aquifer.models.spec import Attention, Layer, Norm

FULL, SLIDING = "full_attention", "sliding_attention"  # entries of `layer_types`
LINEAR = "linear_attention"  # a mixer

_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}  # in configurations of Transformers 4

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Transformers' names of activations, and ours."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that every decoder has."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    @property
    def attention(self) -> Attention:
        """Attention of these heads, without any options."""
        return Attention(self.num_heads, self.num_kv_heads, self.head_dim)


def read_sizes(fields: Fields, *, kv_heads: str = "num_key_value_heads") -> Sizes:
    """Read the sizes.

    Args:
        fields: the configuration, with the defaults of its model type.
        kv_heads: name of the number of KV heads.

    Raises:
        ConfigError: one of them is missing or impossible, or they do not fit together.
    """
    hidden_size = fields.integer("hidden_size", 1, MOST_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, MOST_HEADS)
    num_kv_heads = fields.integer(kv_heads, 1, MOST_HEADS, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(kv_heads, f"a divisor of the {num_heads} heads")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of the {num_heads} heads, or head_dim set")
    head_dim = fields.integer("head_dim", 1, MOST_WIDTH, default=hidden_size // num_heads)
    if head_dim % 2 and "head_dim" in fields:
        raise fields.error("head_dim", "even")
    if head_dim % 2:
        raise fields.error("hidden_size", f"an even multiple of the {num_heads} heads")
    return Sizes(
        vocab_size=fields.integer("vocab_size", 1, MOST_VOCAB),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", 1, MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings", LEAST_POSITIONS, MOST_POSITIONS),
    )


def renamed(fields: Fields, names: dict[str, str]) -> Fields:
    """The same fields, and some under the names that `read_sizes` knows, unless they have these.

    Args:
        fields: the configuration.
        names: names in the configuration, by the usual ones.
    """
    values = {ours: fields.values[stored] for ours, stored in names.items() if stored in fields}
    return fields.with_defaults(values)


def without_null_kv_heads(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults, but for KV heads that are given as null: then there are as many as heads."""
    name = "num_key_value_heads"
    is_null = name in fields.values and name not in fields
    return {key: value for key, value in defaults.items() if not (is_null and key == name)}


def read_width(fields: Fields, name: str = "intermediate_size", default: int | None = None) -> int:
    """Width of an MLP."""
    return fields.integer(name, 1, MOST_WIDTH, default=default)


def read_activation(fields: Fields, architecture: str, name: str = "hidden_act") -> str:
    """The activation, by our name.

    Raises:
        ConfigError: it is missing, or no text.
        UnsupportedModelError: it is not implemented.
    """
    activation = fields.text(name, default="silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            architecture, f"its {name} {activation!r} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[activation]


def read_silu(fields: Fields, architecture: str) -> str:
    """The activation of a model whose parts have no other: "silu".

    Raises:
        ConfigError: it is missing, or no text.
        UnsupportedModelError: it is another one.
    """
    activation = read_activation(fields, architecture)
    if activation != "silu":
        raise UnsupportedModelError(architecture, f"its hidden_act {activation!r} is not silu")
    return activation


def rms_norm(fields: Fields, *, plus_one: bool = False, default: float = 1e-6) -> Norm:
    """RMSNorm with the configuration's epsilon."""
    eps = fields.number("rms_norm_eps", 1e-30, 1.0, default=default)
    return Norm(eps, plus_one=plus_one)


def layer_norm(fields: Fields, name: str, *, has_bias: bool = True) -> Norm:
    """LayerNorm with the epsilon of that name."""
    return Norm(fields.number(name, 1e-30, 1.0, default=1e-5), centred=True, has_bias=has_bias)


def read_rope(
    fields: Fields, sizes: Sizes, architecture: str, default_partial: float = 1.0
) -> RotarySettings:
    """The rotary embedding of the whole model.

    Args:
        fields: the configuration.
        sizes: its sizes.
        architecture: for messages.
        default_partial: part of each head that is rotated, unless it is given. With 1, no other is
            allowed: the family rotates whole heads.
    """
    rope = RotarySettings.read(
        fields, sizes.head_dim, sizes.max_positions, default_partial=default_partial
    )
    if default_partial == 1.0 and rope.partial_factor != 1.0:
        raise UnsupportedModelError(
            architecture, "it rotates only a part of each head (partial_rotary_factor)"
        )
    return rope


def read_ropes_by_kind(
    fields: Fields, sizes: Sizes, sliding_theta: str, *, sliding_is_plain: bool
) -> tuple[RotarySettings, RotarySettings]:
    """The rotary embeddings of layers with full and with sliding attention.

    Args:
        fields: the configuration, with a default of `rope_theta`, and of `sliding_theta`.
        sizes: its sizes.
        sliding_theta: name of the base for sliding layers, where it is not in `rope_parameters`.
        sliding_is_plain: whether `rope_scaling` is for full layers alone.
    """
    given = fields.section("rope_parameters")
    settings = []
    for kind, theta in ((FULL, "rope_theta"), (SLIDING, sliding_theta)):
        values = dict(given.section(kind).values) if kind in given else {}
        if kind == FULL or not (values or sliding_is_plain):
            values |= fields.section("rope_scaling").values
        values.setdefault("rope_theta", fields.values.get(theta))
        own = Fields(fields.file, values, f"rope_parameters.{kind}.")
        settings.append(
            RotarySettings.read(fields, sizes.head_dim, sizes.max_positions, fields=own)
        )
    return settings[0], settings[1]


def are_sliding(
    fields: Fields, num_layers: int, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Whether each layer has sliding attention.

    Args:
        fields: the configuration.
        num_layers: number of layers.
        default: whether a layer has it, given its number, unless `layer_types` say so.

    Raises:
        ConfigError: `layer_types` are impossible.
    """
    layer_types = fields.texts("layer_types") or tuple(
        SLIDING if default(index) else FULL for index in range(num_layers)
    )
    if len(layer_types) != num_layers or not {SLIDING, FULL}.issuperset(layer_types):
        raise fields.error(
            "layer_types", f'a list of "{FULL}" or "{SLIDING}" for each of {num_layers} layers'
        )
    return tuple(kind == SLIDING for kind in layer_types)


def modern_kinds(layer_types: Iterable[str]) -> tuple[str, ...]:
    """Kinds of layers by the names that Transformers 5 has for them."""
    return tuple(_OLD_KINDS.get(kind, kind) for kind in layer_types)


def read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Whether each layer of a hybrid has attention (`FULL`) or a mixer (`LINEAR`); by default the
    latter.

    Raises:
        ConfigError: `layer_types` are impossible.
    """
    name = "layers_block_type" if "layers_block_type" in fields else "layer_types"
    kinds = modern_kinds(fields.texts(name)) or (LINEAR,) * num_layers
    if len(kinds) != num_layers or not {LINEAR, FULL}.issuperset(kinds):
        raise fields.error(
            name, f'a list of "{FULL}" or "{LINEAR}" for each of {num_layers} layers'
        )
    return kinds


def read_window(fields: Fields) -> int | None:
    """Tokens of the sliding window; None without one."""
    if "sliding_window" not in fields:
        return None
    return fields.integer("sliding_window", 1, MOST_POSITIONS)


def plain_layers(
    sizes: Sizes, windows_tokens: tuple[int | None, ...] | None = None, scale: float | None = None
) -> tuple[Layer, ...]:
    """Layers with the usual scale and the first rotary embedding.

    Args:
        sizes: the sizes.
        windows_tokens: sliding window of each layer; None for none at all.
        scale: factor on the dot products; None for the usual one.
    """
    factor = sizes.head_dim**-0.5 if scale is None else scale
    windows = windows_tokens or (None,) * sizes.num_layers
    return tuple(Layer(factor, window) for window in windows)
