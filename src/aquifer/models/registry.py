"""Choice of the implementation that serves a checkpoint, by its model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from aquifer.errors import UnsupportedModelError
from aquifer.models.base import ModelPlan
from aquifer.weights.checkpoint import Checkpoint

Planner: TypeAlias = Callable[[Checkpoint, torch.dtype | None], ModelPlan]
"""Makes the plan of a checkpoint's model, like `plan_model`.

To serve models that this package does not know, give the engine a planner that recognises them and
calls `plan_model` for all others. It raises what `plan_model` raises.
"""


def plan_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> ModelPlan:
    """Plan a checkpoint's model; its implementation is imported only when needed.

    Args:
        checkpoint: an opened checkpoint.
        dtype: dtype of weights and KV; None means the checkpoint's own.

    Raises:
        UnsupportedModelError: no implementation can serve the architecture.
        ConfigError: a field of the configuration is missing or impossible.
    """
    from aquifer.models.families import FAMILIES

    family = FAMILIES.get(checkpoint.fields.text("model_type"))
    own: UnsupportedModelError | None = None
    if family is not None:
        from aquifer.models.decoder_plan import DecoderPlan

        try:
            spec = family(checkpoint.fields, checkpoint.architecture)
            return DecoderPlan(spec, checkpoint, dtype)
        except UnsupportedModelError as error:  # what our decoder lacks, Transformers may have
            own = error
    from aquifer.models.transformers import TransformersPlan

    try:
        return TransformersPlan(checkpoint, dtype)
    except UnsupportedModelError as error:
        if own is None or own.reason == error.reason:
            raise
        reason = f"{own.reason}; and the code of Transformers cannot be used, as {error.reason}"
        raise UnsupportedModelError(checkpoint.architecture, reason) from error
