"""KV layout of a model of Transformers, read from its configuration and its attention modules.

The configuration alone is not enough: every architecture has its own names for the number and the
size of heads, and some change them from layer to layer. The attention modules of the skeleton,
which exists anyway because it alone names the parameters, hold the final values. Nothing is run:
the probe later compares this layout with what attention is really called with.
"""

from __future__ import annotations

from typing import Any

import torch

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.errors import UnsupportedModelError


def read_kv_layout(skeleton: Any, dtype: torch.dtype, architecture: str) -> KVLayout:
    """One entry for each decoder layer, in the order of `layer_idx`.

    Args:
        skeleton: the model, with or without weights.
        dtype: of the KV.
        architecture: for messages.

    Raises:
        UnsupportedModelError: not every layer has attention with KV of its own, or the size of
            its heads cannot be found.
    """
    layers: dict[int, LayerKV] = {}
    for module in skeleton.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None and hasattr(module, "is_causal"):  # decoder layers have an index too
            layers[layer] = _layer_kv(module, skeleton.config, architecture)
    num_layers = skeleton.config.num_hidden_layers
    if sorted(layers) != list(range(num_layers)):
        raise UnsupportedModelError(
            architecture, f"{len(layers)} of its {num_layers} layers have attention of a known form"
        )
    return KVLayout(tuple(layers[layer] for layer in range(num_layers)), dtype)


def _layer_kv(module: Any, config: Any, architecture: str) -> LayerKV:
    # Multi-head latent attention has other names, and calls its rotated part `head_dim`.
    key_dim = _first(module, "qk_head_dim", "head_dim", "head_size")
    if key_dim is None:
        raise UnsupportedModelError(architecture, "the size of its attention heads is unknown")
    num_heads = _first(module, "num_heads", "num_attention_heads") or config.num_attention_heads
    # How often attention repeats each KV head; without the attribute, it does not repeat any.
    group = _first(module, "num_key_value_groups") or 1
    return LayerKV(num_heads // group, key_dim, _first(module, "v_head_dim") or key_dim)


def _first(owner: Any, *names: str) -> int | None:
    """The first of these attributes that is set."""
    values = (getattr(owner, name, None) for name in names)
    return next((int(value) for value in values if value is not None), None)
