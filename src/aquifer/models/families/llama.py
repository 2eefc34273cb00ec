"""Llama, and what differs in a few fields: Mistral, Ministral, Qwen2, Qwen3, SmolLM3, Seed-OSS and
Granite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aquifer.fields import Fields
from aquifer.models.families import reading
from aquifer.models.limits import MOST_LAYERS
from aquifer.models.spec import Block, DecoderSpec, Head, HeadNorm, Layer, Mlp

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "ministral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "smollm3": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    "seed_oss": {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 8},
    "granite": {"max_position_embeddings": 2048},
}
"""Defaults of absent configuration entries that differ between model types."""

_FIXED: dict[str, dict[str, Any]] = {
    "mistral": {"use_sliding_window": True, "attention_bias": False, "mlp_bias": False},
    "ministral": {"use_sliding_window": True, "attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True, "mlp_bias": False},
    "qwen3": {"mlp_bias": False},
}
"""Entries that Transformers does not read for a model type, with what they amount to."""

_ALL_WINDOWED = frozenset({"mistral", "ministral"})  # unless `layer_types` are given
_NO_OUT_BIAS = frozenset({"qwen2"})


def read(fields: Fields, architecture: str) -> DecoderSpec:
    """Read a configuration of any of these model types."""
    model_type = fields.text("model_type")
    fields = fields.replaced(_FIXED.get(model_type, {}))
    known = fields.with_defaults(_DEFAULTS[model_type])
    sizes = reading.read_sizes(known)
    norm = reading.rms_norm(known)
    activation = reading.read_activation(known, architecture)
    has_bias = known.flag("attention_bias", default=False)
    out_bias = has_bias and model_type not in _NO_OUT_BIAS
    if model_type == "seed_oss":
        out_bias = known.flag("attention_out_bias", default=False)
    rope = reading.read_rope(known, sizes, architecture)
    spec = DecoderSpec(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=rope.max_model_len,
        attention=replace(
            sizes.attention,
            qkv_bias=has_bias,
            out_bias=out_bias,
            head_norm=HeadNorm(norm) if model_type == "qwen3" else None,
        ),
        mlp=Mlp(
            reading.read_width(known), activation, has_bias=known.flag("mlp_bias", default=False)
        ),
        block=Block(before_attention=norm, before_mlp=norm),
        layers=_layers(fields, known, sizes),
        ropes=(rope,),
        norm=norm,
        head=Head(known.flag("tie_word_embeddings", default=False)),
    )
    return with_multipliers(spec, known) if model_type == "granite" else spec


def _layers(fields: Fields, known: Fields, sizes: reading.Sizes) -> tuple[Layer, ...]:
    """The layers, with their windows; absent `layer_types` are filled in as Transformers does.

    Args:
        fields: the configuration.
        known: the same with the defaults of its model type.
        sizes: its sizes.
    """
    model_type = known.text("model_type")
    is_null = "sliding_window" in fields.values and "sliding_window" not in fields
    # The mask of SmolLM3 follows from the types of layers, where they are given.
    is_given = model_type == "smollm3" and "layer_types" in known
    uses_window = not is_null and (is_given or known.flag("use_sliding_window", default=False))
    window = reading.read_window(known) if uses_window else None
    rotates = (True,) * sizes.num_layers
    if model_type == "smollm3":
        rotates = _rotating_layers(known, sizes.num_layers)
    if model_type in _ALL_WINDOWED and "layer_types" not in known:
        sliding = (True,) * sizes.num_layers
    else:
        first = known.integer("max_window_layers", 0, MOST_LAYERS, default=0)

        def slides(index: int) -> bool:
            return index >= first and not (model_type == "smollm3" and rotates[index])

        sliding = reading.are_sliding(known, sizes.num_layers, slides)
    scale = sizes.head_dim**-0.5
    return tuple(
        Layer(scale, window if slides else None, 0 if turns else None)
        for slides, turns in zip(sliding, rotates, strict=True)
    )


def _rotating_layers(known: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer of SmolLM3 has a rotary embedding; by default all but every fourth."""
    interval = known.integer("no_rope_layer_interval", 1, MOST_LAYERS, default=4)
    given = known.integers("no_rope_layers", 0, 1)  # 1 for a layer with one, in spite of the name
    flags = given or tuple(int((index + 1) % interval != 0) for index in range(num_layers))
    if len(flags) != num_layers:
        raise known.error("no_rope_layers", f"a list of 0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, flags))


def with_multipliers(spec: DecoderSpec, known: Fields) -> DecoderSpec:
    """The same decoder with Granite's multipliers."""

    def factor(name: str) -> float:
        return known.number(name, 1e-9, 1e9, default=1.0)

    scale = factor("attention_multiplier")
    return replace(
        spec,
        layers=tuple(replace(layer, scale=scale) for layer in spec.layers),
        block=replace(spec.block, residual_scale=factor("residual_multiplier")),
        embed_scale=factor("embedding_multiplier"),
        head=replace(spec.head, scale=1.0 / factor("logits_scaling")),
    )
