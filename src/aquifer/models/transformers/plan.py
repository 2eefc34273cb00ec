"""Plan of a Transformers model: whether it can be served, its parameters and its layouts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from aquifer.errors import ConfigError, UnsupportedModelError
from aquifer.models.base import StateLayout, num_elements
from aquifer.models.transformers.layout import read_kv_layout
from aquifer.models.transformers.mapping import map_parameters, tied_names
from aquifer.models.transformers.model import TransformersModel
from aquifer.models.transformers.probe import probe
from aquifer.models.transformers.skeleton import FOREIGN_ERRORS, make_skeleton, set_tensor
from aquifer.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt"})  # their configurations do not say so
_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


class TransformersPlan:
    """`ModelPlan` of an architecture that Transformers implements.

    The names and shapes of the parameters come from Transformers' own modules, which are built once
    on the meta device: no configuration states them. The vocabulary and the KV layout are read
    from the same modules.

    Args:
        checkpoint: an opened checkpoint, with tensor names of the hub or of `save_pretrained`.
        dtype: dtype of weights and KV; None means that of the configuration, or else of the
            largest stored tensor.

    Raises:
        UnsupportedModelError: the architecture cannot be served; the message says why.
        ConfigError: the configuration is invalid, or a tensor is missing.
    """

    state_layout: StateLayout | None = None  # recurrent architectures are refused

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._architecture = _architecture(checkpoint)
        self._config = _load_config(checkpoint, self._architecture)
        _check_class(self._config, self._architecture)
        self._dtype = dtype or _own_dtype(self._config, checkpoint)
        self.max_model_len = _max_model_len(self._config, checkpoint)
        skeleton = make_skeleton(self._config, self._dtype, self._architecture)
        _check_modules(skeleton, self._architecture)
        self.vocab_size = int(skeleton.get_input_embeddings().weight.shape[0])
        self.kv_layout = read_kv_layout(skeleton, self._dtype, self._architecture)
        self._tied_names = tied_names(skeleton)
        self.parameters = map_parameters(skeleton, self._tied_names, checkpoint, self._architecture)
        self.num_parameters = num_elements(self.parameters)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> TransformersModel:
        """Make the model over loaded parameters, given by name; it keeps references, no copies.

        Pre-condition: the parameters hold their values, because the probe compares results.

        Raises:
            UnsupportedModelError: the probe found that the model cannot be served, or that it has
                another KV layout than the plan.
        """
        model = make_skeleton(self._config, self._dtype, self._architecture)
        for parameter in self.parameters:
            for name in self._tied_names[parameter.name]:
                set_tensor(model, name, tensors[parameter.name])
        device = next(iter(tensors.values())).device
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        return probe(
            model,
            self._architecture,
            kv_layout=self.kv_layout,
            vocab_size=self.vocab_size,
            max_tokens=self.max_model_len,
            device=device,
        )


def _architecture(checkpoint: Checkpoint) -> str:
    """Name of the architecture in the configuration, for messages."""
    names = checkpoint.config.get("architectures")
    return str(names[0] if names else checkpoint.config.get("model_type"))


def _load_config(checkpoint: Checkpoint, architecture: str) -> Any:
    raw = checkpoint.config
    if raw.get("quantization_config"):
        raise UnsupportedModelError(architecture, "its weights are quantised")
    model_type = raw.get("model_type")
    if model_type is None:
        raise ConfigError(f"{checkpoint.path / 'config.json'} lacks model_type")
    if model_type not in CONFIG_MAPPING:
        custom = ", and code that comes with a checkpoint is never run" if "auto_map" in raw else ""
        raise UnsupportedModelError(
            architecture, f"this version of Transformers does not know {model_type!r}{custom}"
        )
    try:
        return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"{checkpoint.path / 'config.json'} is not a valid {model_type} configuration: {error}"
        ) from error


def _check_class(config: Any, architecture: str) -> None:
    """Refuse models that the configuration or the class shows to be no plain decoder."""

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModelError(architecture, reason)

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if config.model_type in _ALIBI_MODEL_TYPES or getattr(config, "alibi", False):
        refuse("it adds a bias to attention (ALiBi)")
    if config.sub_configs or config.get_text_config() is not config:
        refuse("it is multimodal")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse("Transformers has no causal language model of it")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        refuse("it has layers that keep a recurrent state")
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    if others:
        refuse(f"it has layers of type {', '.join(sorted(others))}")
    if getattr(config, "attn_temperature_tuning", False):
        refuse("it scales attention by a token's row in the batch (attn_temperature_tuning)")
    if not getattr(model_class, "_supports_attention_backend", False):
        refuse("its code in Transformers does not let attention be replaced")


def _check_modules(model: Any, architecture: str) -> None:
    """Refuse properties that only the modules show."""
    for module in model.modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(architecture, "its attention is not causal")
    for name in model.state_dict():
        if re.search(r"(^|[._])sinks?($|[._])", name):
            raise UnsupportedModelError(architecture, "it uses attention sinks")


def _own_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    largest = max(checkpoint.tensors.values(), key=lambda stored: stored.num_bytes, default=None)
    return torch.float32 if largest is None else largest.dtype


def _max_model_len(config: Any, checkpoint: Checkpoint) -> int:
    """Longest context in tokens for which the rotary embedding does not depend on the batch.

    "longrope" and "dynamic" scaling change with the longest position in a batch, so one request
    would change the results of another. Contexts end where that would begin: for "longrope" at the
    original length, for "dynamic" at the configured one.
    """
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
    lengths = [getattr(config, name, None) for name in names]
    longest = next((int(length) for length in lengths if length), None)
    if longest is None:
        raise ConfigError(f"{checkpoint.path / 'config.json'} lacks max_position_embeddings")
    static = [
        int(rope["original_max_position_embeddings"])
        for rope in _rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    result = min([longest, *static])
    if result < longest:
        _log.warning(
            "%s: contexts are limited to %d of %d tokens, because in longer ones the rotary "
            "scaling depends on the other requests in the batch",
            checkpoint.path,
            result,
            longest,
        )
    return result


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Rotary settings: one for the whole model, or one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]
