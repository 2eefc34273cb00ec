"""A model of Transformers without weights: parameters that take no memory, buffers as they are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM

from aquifer.errors import UnsupportedModelError
from aquifer.models.transformers.model import SERVE

FOREIGN_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    StrictDataclassError,
)
"""What a model's own code raises when it is asked for something it cannot do."""


def make_skeleton(config: Any, dtype: torch.dtype, architecture: str) -> Any:
    """The model with parameters that have no memory, and buffers with their true values.

    Construction happens on the meta device, so that no weight ever takes memory. Buffers are then
    made anew and filled by the model's own initialisation, as `from_pretrained` does it.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=SERVE, dtype=dtype, trust_remote_code=False
            )
    except FOREIGN_ERRORS as error:
        raise UnsupportedModelError(architecture, f"it cannot be constructed: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    model.initialize_weights()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # GPT-2 looks for padding in the ids to warn of it, which would wait for the device.
            module.warn_if_padding_and_no_attention_mask = _warn_of_nothing
        if hasattr(module, "rope_type"):
            # Contexts end where a scaling that looks at the batch would begin (plan.py):
            # there is nothing left to look for, and looking would wait for the device.
            module.rope_type = _static_rope_type(module.rope_type)
    return model.eval()


def _warn_of_nothing(input_ids: torch.Tensor, attention_mask: None) -> None:
    pass


def _static_rope_type(rope_type: Any) -> Any:
    if isinstance(rope_type, dict):
        return {layer: _static_rope_type(kind) for layer, kind in rope_type.items()}
    return "default" if rope_type == "longrope" or "dynamic" in rope_type else rope_type


def set_tensor(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Put a parameter, or a persistent buffer, in its place; no copy is made."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    is_buffer = leaf in module._buffers
    setattr(module, leaf, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
