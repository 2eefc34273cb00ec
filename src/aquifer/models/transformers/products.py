"""Matrix products of a model of Transformers, computed by our kernels.

For few tokens ours take less time than torch's, and CUDA graphs can capture those of a mixture of
experts. The probe compares the model that uses them with its own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from aquifer.kernels.experts import Activation, experts
from aquifer.kernels.linear import linear

EXPERTS = "aquifer"
"""Name of our entry in the registry of experts' implementations."""

_OTHER_EXPERTS = "grouped_mm"
"""The implementation of Transformers for experts that our kernel does not compute."""

_ACTIVATIONS: dict[type, Activation] = {
    nn.SiLU: "silu",
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


class _Linear(nn.Linear):
    """`nn.Linear` by our kernels."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if input.dtype != self.weight.dtype:
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return linear(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def use_own_linear(model: nn.Module) -> None:
    """Have our kernels compute the linear layers of a model, which keeps its parameters.

    Classes derived from `nn.Linear` stay as they are: they may compute something else.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear


def _experts(
    module: Any,
    hidden_states: torch.Tensor,  # [tokens, hidden]
    top_k_index: torch.Tensor,  # [tokens, top_k]
    top_k_weights: torch.Tensor,  # [tokens, top_k]
) -> torch.Tensor:
    """Entry of the registry of experts' implementations; returns [tokens, hidden]."""
    activation = _activation(module)
    if activation is None or hidden_states.dtype != module.down_proj.dtype:
        other = ALL_EXPERTS_FUNCTIONS[_OTHER_EXPERTS]
        result: torch.Tensor = other(module, hidden_states, top_k_index, top_k_weights)
        return result
    return experts(
        hidden_states.contiguous(),
        module.gate_up_proj,
        module.down_proj,
        top_k_index.to(torch.int32).contiguous(),
        top_k_weights.to(torch.float32).contiguous(),
        activation,
    )


def _activation(module: Any) -> Activation | None:
    """Activation of experts that our kernel computes; None for experts that it does not."""
    # What `use_experts_implementation` sets; where one is missing, it is another version's.
    form = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": False,
    }
    if any(getattr(module, name, None) is not value for name, value in form.items()):
        return None
    # Experts with a gate of their own, such as a clamped one, replace this method.
    if type(module)._apply_gate.__qualname__ != "_default_apply_gate":
        return None
    return _ACTIVATIONS.get(type(module.act_fn))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
