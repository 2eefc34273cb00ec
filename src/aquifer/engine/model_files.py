"""What is known of a model before any of its weights is read: its checkpoint and its plan."""

from __future__ import annotations

import torch

from aquifer.config import EngineConfig, ModelSpec
from aquifer.models import ModelPlan, Planner
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.parameters import check_sources


def read_model(
    spec: ModelSpec, planner: Planner, config: EngineConfig
) -> tuple[Checkpoint, ModelPlan]:
    """Read a model's configuration and the headers of its weights; takes no memory.

    Raises:
        ConfigError: the checkpoint cannot be used: a field of its configuration is missing or
            impossible, or a tensor is missing or has another shape.
    """
    is_dummy = config.load_format == "dummy"
    checkpoint = (Checkpoint.without_tensors if is_dummy else Checkpoint.open)(spec.path)
    plan = planner(checkpoint, dtype_named(config.dtype))
    if not is_dummy:
        check_sources(checkpoint, plan.parameters)
    return checkpoint, plan


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype that an option names; None for "auto"."""
    dtype: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return dtype
