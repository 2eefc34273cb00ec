"""A model's configuration as Transformers reads it, checked before and after.

A configuration class of Transformers is code: it fills in one entry for each layer, and divides by
the number of heads. So the sizes are checked first, under the names that the class has for them,
and the class gets what was checked, not the file.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, NoReturn

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from aquifer.errors import UnsupportedModelError, as_config_error
from aquifer.fields import Fields
from aquifer.models.limits import (
    LEAST_POSITIONS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_OTHER,
    MOST_POSITIONS,
    MOST_VOCAB,
    MOST_WIDTH,
)
from aquifer.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt"})  # their configurations do not say so
_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_BOUNDS = {
    "num_hidden_layers": (1, MOST_LAYERS),
    "num_attention_heads": (1, MOST_HEADS),
    "num_key_value_heads": (1, MOST_HEADS),
    "hidden_size": (1, MOST_WIDTH),
    "head_dim": (1, MOST_WIDTH),
    "vocab_size": (1, MOST_VOCAB),
    "max_position_embeddings": (LEAST_POSITIONS, MOST_POSITIONS),
}
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)


def load_config(checkpoint: Checkpoint) -> Any:
    """Make the configuration object of a model that can be served, as far as it shows.

    Raises:
        UnsupportedModelError: the architecture cannot be served; the message says why.
        ConfigError: a field is missing or impossible.
    """
    fields, architecture = checkpoint.fields, checkpoint.architecture
    if fields.values.get("quantization_config"):
        method = fields.section("quantization_config").text("quant_method", default="unknown")
        raise UnsupportedModelError(
            architecture,
            f"its weights are quantised (quantization_config, {method}); use a checkpoint in "
            "bfloat16",
        )
    model_type = fields.text("model_type")
    if model_type not in CONFIG_MAPPING:
        custom = (
            ", and code that comes with a checkpoint is never run" if "auto_map" in fields else ""
        )
        raise UnsupportedModelError(
            architecture, f"this version of Transformers does not know {model_type!r}{custom}"
        )
    config_class = CONFIG_MAPPING[model_type]
    _check_class(config_class, fields, architecture)
    _check_sizes(config_class, fields)
    with as_config_error(f"{fields.file} is not a valid {model_type} configuration"):
        config = config_class.from_dict(copy.deepcopy(dict(fields.values)))
        _check_config(config, architecture)
    return config


def read_max_model_len(config: Any, fields: Fields) -> int:
    """Longest context in tokens for which the rotary embedding does not depend on the batch.

    "longrope" and "dynamic" scaling change with the longest position in a batch, so one request
    would change the results of another. Contexts end where that would begin: for "longrope" at the
    original length, for "dynamic" at the configured one.

    Args:
        config: the configuration object.
        fields: the fields that it was made of.

    Raises:
        ConfigError: there is no longest context, or it is out of bounds.
    """
    name = next((name for name in _POSITIONS if getattr(config, name, None)), _POSITIONS[0])
    stored_name = config.attribute_map.get(name, name)
    known = fields.with_defaults({stored_name: getattr(config, name, None)})
    longest = known.integer(stored_name, LEAST_POSITIONS, MOST_POSITIONS)
    static = [
        rope.integer("original_max_position_embeddings", LEAST_POSITIONS, MOST_POSITIONS)
        for rope in _rope_parameters(config, fields)
        if rope.values.get("rope_type") == "longrope"
    ]
    result = min([longest, *static])
    if result < longest:
        _log.warning(
            "%s: contexts are limited to %d of %d tokens, because in longer ones the rotary "
            "scaling depends on the other requests in the batch",
            fields.file.parent,
            result,
            longest,
        )
    return result


def _rope_parameters(config: Any, fields: Fields) -> list[Fields]:
    """Rotary settings: one for the whole model, or one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return [Fields(fields.file, value, "rope_parameters.") for value in nested or [settings]]


def _check_class(config_class: Any, fields: Fields, architecture: str) -> None:
    """Refuse architectures that are no plain decoder, before any of their code runs."""

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModelError(architecture, reason)

    if getattr(config_class, "is_encoder_decoder", False) is True:
        refuse("it is an encoder-decoder")
    if config_class.model_type in _ALIBI_MODEL_TYPES or fields.flag("alibi", default=False):
        refuse("it adds a bias to attention (ALiBi)")
    if config_class.sub_configs:
        refuse("it is multimodal")
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse("Transformers has no causal language model of it")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if getattr(model_class, "_is_stateful", False):
        refuse("it has layers that keep a recurrent state")
    if not getattr(model_class, "_supports_attention_backend", False):
        refuse("its code in Transformers does not let attention be replaced")


def _check_config(config: Any, architecture: str) -> None:
    """Refuse what the configuration shows to be no plain decoder."""

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModelError(architecture, reason)

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if getattr(config, "alibi", False):
        refuse("it adds a bias to attention (ALiBi)")
    if config.get_text_config() is not config:
        refuse("it is multimodal")
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    if others:
        refuse(f"it has layers of type {', '.join(sorted(map(str, others)))}")
    if getattr(config, "attn_temperature_tuning", False):
        refuse("it scales attention by a token's row in the batch (attn_temperature_tuning)")


def _check_sizes(config_class: Any, fields: Fields) -> None:
    """Check the sizes that all architectures have, and the extent of all other whole numbers.

    Raises:
        ConfigError: one of them is out of bounds, or they do not fit together.
    """
    stored_names = {name: config_class.attribute_map.get(name, name) for name in _BOUNDS}
    for name, bounds in _BOUNDS.items():
        for stored_name in {name, stored_names[name]}:
            if stored_name in fields:
                fields.integer(stored_name, *bounds)
    heads, kv_heads = (stored_names[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    if heads in fields and kv_heads in fields and fields.values[heads] % fields.values[kv_heads]:
        raise fields.error(kv_heads, f"a divisor of the {fields.values[heads]} heads ({heads})")
    for name, value in fields.values.items():
        default = getattr(config_class, name, 0.0)
        is_declared = default is None or type(default) is int
        if is_declared and type(value) is int and abs(value) > MOST_OTHER:
            raise fields.error(name, f"a whole number from {-MOST_OTHER} to {MOST_OTHER}")
