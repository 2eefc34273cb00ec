"""Models, and the registry that finds the implementation of a checkpoint.

A model comes to life in two stages, each with its own type: a `ModelPlan` knows its parameters
and KV layout from the configuration alone, so that memory can be sized and bad checkpoints
refused before a byte is read; `ModelPlan.build` then makes a `Model` over the loaded tensors.
"""

from __future__ import annotations

from aquifer.models.base import Model, ModelInput, ModelPlan
from aquifer.models.registry import plan_model

__all__ = ["Model", "ModelInput", "ModelPlan", "plan_model"]
