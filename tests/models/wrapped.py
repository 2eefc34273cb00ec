"""Plans of models that a test watches or breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tests.models.tiny import plan_tiny

from aquifer.cache.base import KVView
from aquifer.models import Model, ModelInput, ModelPlan, Planner
from aquifer.weights.checkpoint import Checkpoint


class WrappedModel:
    """A model that does what another one does; runs kernel by kernel."""

    is_capturable = False

    def __init__(self, model: Model) -> None:
        self.kv_layout = model.kv_layout
        self.vocab_size = model.vocab_size
        self.inner = model

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        return self.inner.forward(batch, kv)

    def rehearsal(self) -> WrappedModel:
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


class _WrappedPlan:
    def __init__(self, plan: ModelPlan, wrap: Callable[[Model], Model]) -> None:
        self.parameters = plan.parameters
        self.num_parameters = plan.num_parameters
        self.vocab_size = plan.vocab_size
        self.kv_limits = plan.kv_limits
        self.has_reusable_kv = plan.has_reusable_kv
        self.max_model_len = plan.max_model_len
        self.kv_layout = plan.kv_layout
        self.state_layout = plan.state_layout
        self._plan = plan
        self._wrap = wrap

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Model:
        return self._wrap(self._plan.build(tensors))


def plan_wrapped(wrap: Callable[[Model], Model]) -> Planner:
    """A planner of the tiny models, of which each is wrapped when it is built."""

    def plan(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> ModelPlan:
        return _WrappedPlan(plan_tiny(checkpoint, dtype), wrap)

    return plan
