"""Linear layers, norms and experts of a model of Transformers, computed by our kernels.

They take fewer launches than Transformers' code and, for few tokens, less time than torch's
kernels. Those of a mixture of experts can be captured in CUDA graphs. The probe compares the model
that uses them with its own code.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from aquifer.kernels.experts import Activation, experts
from aquifer.kernels.linear import MAX_NORM_COLUMNS, linear
from aquifer.kernels.norm import NormWeights, add_norm, norm_reference

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

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        """[..., in] -> [..., out]."""
        if input.dtype != self.weight.dtype:
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return linear(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class _Norm(_Base):
    """First base class of a norm that our kernels compute; the other one is the norm's own."""

    own_norm: NormWeights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., n] -> [..., n]."""
        norm = self.own_norm
        if len(args) != 1 or kwargs or args[0].dtype != norm.weight.dtype:
            return super().forward(*args, **kwargs)
        rows = args[0].reshape(-1, len(norm.weight)).contiguous()
        normed, _ = add_norm(rows, (), None, norm)
        return normed.view(args[0].shape)


@cache
def _class_with_own_norm(of: Any) -> Any:
    return type(of.__name__, (_Norm, of), {})


def use_own_parts(model: Any) -> None:
    """Have our kernels compute linear layers and norms of a model, which keeps its parameters.

    Linear layers are those of exactly torch's class: a class that is derived from it may compute
    something else. Norms have a class for each architecture, so what one computes is found out.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif "Norm" in type(module).__name__:
            norm = find_norm(module)
            if norm is not None:
                own_class: Any = type(module)
                module.own_norm = norm
                module.__class__ = _class_with_own_norm(own_class)


@torch.no_grad()
def find_norm(module: nn.Module) -> NormWeights | None:
    """Our description of a norm that computes the same for random rows; None if there is none."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    names = ("variance_epsilon", "eps", "epsilon", "norm_eps")
    eps = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    is_other = bool(parameters) or any(True for _ in module.children())
    if is_other or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(weight) > MAX_NORM_COLUMNS or (bias is not None and bias.shape != weight.shape):
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NORM_ROWS, len(weight), generator=generator)
    # The first half shows where the epsilon is added, the second whether the mean is subtracted.
    rows[: _NORM_ROWS // 2] *= eps**0.5
    rows[_NORM_ROWS // 2 :] += 1.0
    x = rows.to(weight.device, weight.dtype)
    try:
        expected = module(x[None])[0]
    except Exception:  # the module's own code may raise anything for an input of this form
        return None
    for centred, plus_one in itertools.product((False, True), repeat=2):
        norm = NormWeights(weight, bias, eps, centred, plus_one)
        if _are_alike(norm_reference(x, norm), expected):
            return norm
    return None


_NORM_ROWS = 8


def _are_alike(actual: torch.Tensor, expected: Any) -> bool:
    """Whether rows [n, width] are equal up to rounding."""
    if not isinstance(expected, torch.Tensor) or expected.shape != actual.shape:
        return False
    if expected.dtype != actual.dtype:
        return False
    tolerance = max(4 * torch.finfo(actual.dtype).eps, 1e-5)
    error = (actual.double() - expected.double()).norm(dim=1)
    return bool((error <= tolerance * expected.double().norm(dim=1)).all())


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
    # What `use_experts_implementation` sets; versions before the last two had neither of them.
    form = {
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
    }
    later = ("has_post_expert_norm", "_is_expert_parallel")
    if any(getattr(module, name, None) is not value for name, value in form.items()):
        return None
    if any(getattr(module, name, False) is not False for name in later):
        return None
    # Experts with a gate of their own, such as a clamped one, replace this method.
    gate = inspect.getattr_static(module, "_apply_gate", None)
    if getattr(gate, "__qualname__", None) != "_default_apply_gate":
        return None
    return _ACTIVATIONS.get(type(module.act_fn))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
