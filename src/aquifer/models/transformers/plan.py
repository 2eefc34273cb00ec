"""Plan of a Transformers model: whether it can be served, its parameters and its layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from aquifer.cache.base import StateLayout
from aquifer.errors import UnsupportedModelError, as_config_error
from aquifer.models.base import num_elements
from aquifer.models.transformers.config import load_config, read_max_model_len
from aquifer.models.transformers.layout import read_kv_layout
from aquifer.models.transformers.mapping import (
    find_sources,
    map_parameters,
    tied_names,
    untie,
)
from aquifer.models.transformers.model import TransformersModel
from aquifer.models.transformers.probe import probe
from aquifer.models.transformers.skeleton import make_skeleton, set_tensor
from aquifer.models.transformers.trial import can_be_captured, capture_on
from aquifer.weights.checkpoint import Checkpoint


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

    kv_limits: tuple[int, ...] = ()  # contexts end where KV would change
    has_reusable_kv = True  # for the same reason

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._architecture = checkpoint.architecture
        self._config = load_config(checkpoint)
        fields = checkpoint.fields
        with as_config_error(f"Transformers cannot make {self._architecture} from {fields.file}"):
            self._dtype = dtype or _own_dtype(self._config, checkpoint)
            self.max_model_len = read_max_model_len(self._config, fields)
            skeleton = make_skeleton(self._config, self._dtype)
            _check_modules(skeleton, self._architecture)
            self.vocab_size = int(skeleton.get_input_embeddings().weight.shape[0])
            self.kv_layout = read_kv_layout(skeleton, self._dtype, self._architecture)
            filled = find_sources(skeleton, checkpoint, self._architecture)
            self._tied_names = untie(tied_names(skeleton), filled, checkpoint)
            self.parameters = map_parameters(
                skeleton, self._tied_names, filled, checkpoint, self._architecture
            )
            self.num_parameters = num_elements(self.parameters)

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout | None:
        """None: recurrent architectures are refused."""
        return None

    def build(self, tensors: Mapping[str, torch.Tensor]) -> TransformersModel:
        """Make the model over loaded parameters, given by name; it keeps references, no copies.

        Pre-condition: the parameters hold their values, because the probe compares results.

        Raises:
            UnsupportedModelError: the probe found that the model cannot be served, or that it has
                another KV layout than the plan.
        """
        model = make_skeleton(self._config, self._dtype)
        for parameter in self.parameters:
            for name in self._tied_names[parameter.name]:
                set_tensor(model, name, tensors[parameter.name])
        device = next(iter(tensors.values())).device
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        served = probe(
            model,
            self._architecture,
            kv_layout=self.kv_layout,
            vocab_size=self.vocab_size,
            max_tokens=self.max_model_len,
            device=device,
        )
        if device.type == "cuda":
            with capture_on(device) as capture:
                served.is_capturable = can_be_captured(
                    served, self._architecture, self.max_model_len, device, capture
                )
        return served


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
