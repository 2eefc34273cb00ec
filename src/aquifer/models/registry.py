"""Which implementation serves which architecture."""

from __future__ import annotations

import torch

from aquifer.models.base import ModelPlan
from aquifer.weights.checkpoint import Checkpoint

_DECODER_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def plan_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> ModelPlan:
    """Find the implementation for a checkpoint; imported only when needed.

    Args:
        checkpoint: an opened checkpoint.
        dtype: what weights and KV are held in; None means the checkpoint's own.

    Raises:
        UnsupportedModelError: nothing here can serve that architecture.
        ConfigError: its configuration is incomplete.
    """
    if checkpoint.config.get("model_type") in _DECODER_MODEL_TYPES:
        from aquifer.models.decoder import DecoderPlan

        return DecoderPlan(checkpoint, dtype)
    from aquifer.models.transformers import TransformersPlan

    return TransformersPlan(checkpoint, dtype)
