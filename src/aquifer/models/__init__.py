"""Models, and the registry that chooses the implementation of a checkpoint.

A model is made in two stages, each with its own type. A `ModelPlan` knows parameters, vocabulary,
KV layout and state layout from the configuration alone, so that memory can be sized and an
unsuitable checkpoint refused before any weight is read. `ModelPlan.build` then makes a `Model` over
the loaded tensors.
"""

from __future__ import annotations

from aquifer.models.base import Model, ModelInput, ModelPlan, Wanted
from aquifer.models.registry import Planner, plan_model

__all__ = [
    "Model",
    "ModelInput",
    "ModelPlan",
    "Planner",
    "Wanted",
    "plan_model",
]
