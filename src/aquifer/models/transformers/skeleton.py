"""A model of Transformers without weights: parameters on the meta device, buffers with values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoModelForCausalLM

from aquifer.models import limits
from aquifer.models.transformers.model import SERVE
from aquifer.models.transformers.parts import EXPERTS
from aquifer.sizes import format_size


def make_skeleton(config: Any, dtype: torch.dtype) -> Any:
    """Build a model with parameters that take no memory, and buffers that have their values.

    The model is built on the meta device, so that weights take no memory. Buffers are then
    allocated again and filled by the model's own initialisation, as `from_pretrained` does.

    Raises:
        ValueError: the model would be larger than any there is.
        Exception: anything that its own code raises for a configuration that it cannot handle.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    with torch.device("meta"), _bounded_construction():
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=SERVE,
            experts_implementation=EXPERTS,
            dtype=dtype,
            trust_remote_code=False,
        )
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if buffer_bytes > limits.MOST_CONSTANT_BYTES:
        raise ValueError(
            f"its sizes call for constants of {format_size(buffer_bytes)}, and at most "
            f"{format_size(limits.MOST_CONSTANT_BYTES)} are allowed"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        # The flag by which Transformers skips a parameter in `initialize_weights`.
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    model.initialize_weights()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # GPT-2 searches the ids for padding to warn about, which would wait for the device.
            module.warn_if_padding_and_no_attention_mask = _warn_of_nothing
        if hasattr(module, "rope_type"):
            # Contexts end before any scaling that depends on the batch begins (plan.py), so the
            # check for it has nothing to find, and would wait for the device.
            module.rope_type = _static_rope_type(module.rope_type)
    return model.eval()


@contextmanager
def _bounded_construction() -> Iterator[None]:
    """Refuse to register more than `limits.MOST_PARTS` modules, parameters and buffers.

    Constructors loop over numbers of the configuration, and each has other names for them.
    """
    num_registered = 0

    def count(module: Any, name: str, registered: Any) -> None:
        nonlocal num_registered
        num_registered += 1
        if num_registered > limits.MOST_PARTS:
            raise ValueError(
                f"its sizes call for more than {limits.MOST_PARTS} modules and parameters, the "
                f"last of them {name!r} of a {type(module).__name__}"
            )

    with ExitStack() as hooks:
        for register in (
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
        ):
            hooks.callback(register(count).remove)
        yield


def _warn_of_nothing(input_ids: torch.Tensor, attention_mask: None) -> None:
    pass


def _static_rope_type(rope_type: Any) -> Any:
    if isinstance(rope_type, dict):
        return {layer: _static_rope_type(kind) for layer, kind in rope_type.items()}
    return "default" if rope_type == "longrope" or "dynamic" in rope_type else rope_type


def set_tensor(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter or a persistent buffer by its name; no copy is made."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    is_buffer = leaf in dict(module.named_buffers(recurse=False))
    setattr(module, leaf, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
