"""Linear layers, norms and experts of models of Transformers, computed by our kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.architectures import GQA
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeExperts
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from aquifer.kernels.experts import experts
from aquifer.kernels.linear import linear
from aquifer.kernels.norm import add_norm
from aquifer.models.transformers import parts

WIDTH = 48


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def with_random_parameters(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "centred", "plus_one"),
    [
        (LlamaRMSNorm(WIDTH, eps=1e-5), False, False),
        (HeliumRMSNorm(WIDTH), False, False),
        (GemmaRMSNorm(WIDTH), False, True),
        (nn.LayerNorm(WIDTH), True, False),
        (NemotronLayerNorm1P(WIDTH), True, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
@torch.no_grad()
def test_norms(
    norm: nn.Module,
    centred: bool,
    plus_one: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm = with_random_parameters(copy.deepcopy(norm), dtype)
    found = parts.find_norm(norm)
    assert found is not None
    assert (found.centred, found.plus_one) == (centred, plus_one)
    x = torch.randn(1, 5, 3, WIDTH, dtype=dtype).transpose(1, 2)
    expected = norm(x)
    parts.use_own_parts(norm)
    calls: list[torch.dtype] = []

    def noted(rows: torch.Tensor, *others: Any) -> Any:
        calls.append(rows.dtype)
        return add_norm(rows, *others)

    monkeypatch.setattr(f"{parts.__name__}.add_norm", noted)
    ours = norm(x)
    assert calls == [dtype]
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, expected, rtol=2 * ulp, atol=max(ulp, 1e-5))


class SomeNorm(nn.Module):
    """The parameters of an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6


class SumNorm(SomeNorm):
    """A norm by the sum of squares."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        sums = hidden_states.pow(2).sum(-1, keepdim=True)
        return self.weight * hidden_states * sums.rsqrt()


class LaterEpsNorm(SomeNorm):
    """An RMSNorm that adds its epsilon after the root."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


class RootNorm(SomeNorm):
    """An RMSNorm."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(square + self.variance_epsilon)


class GatedNorm(SomeNorm):
    """A norm that needs another input."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        return gate * self.weight * hidden_states * torch.rsqrt(square + self.variance_epsilon)


class ScaledNorm(RootNorm):
    """An RMSNorm with another parameter."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(()))


def test_a_norm_of_an_unknown_class() -> None:
    norm = with_random_parameters(RootNorm(WIDTH))
    found = parts.find_norm(norm)
    assert found is not None
    assert found.is_plain_rms


@pytest.mark.parametrize("norm", [SumNorm, LaterEpsNorm, GatedNorm, ScaledNorm])
def test_what_only_looks_like_a_norm(norm: Any) -> None:
    module = with_random_parameters(norm(WIDTH))
    assert parts.find_norm(module) is None
    parts.use_own_parts(module)
    assert type(module) is norm


class OtherLinear(nn.Linear):
    """Another function, with the parameters of a linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        return 2 * super().forward(input)


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_linear_layers(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 20, bias=has_bias), OtherLinear(20, 4))
    inputs = [
        torch.randn(1, 7, WIDTH),
        torch.randn(WIDTH, 7).T,  # of another stride
        torch.randn(2, 3, 5, WIDTH),
    ]
    expected = [model(x) for x in inputs]
    parts.use_own_parts(model)
    shapes: list[Any] = []

    def noted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return linear(x, *others)

    monkeypatch.setattr(f"{parts.__name__}.linear", noted)
    for x, result in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), result)
    assert shapes == [(7, WIDTH), (7, WIDTH), (30, WIDTH)]
    assert type(model[1]) is OtherLinear


def granite_experts(activation: str) -> Any:
    config = transformers.GraniteMoeConfig(
        **GQA, num_local_experts=5, num_experts_per_tok=2, hidden_act=activation
    )
    return config, with_random_parameters(GraniteMoeExperts(config))


def gpt_oss_experts() -> Any:
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=5, num_experts_per_tok=2
    )
    return config, with_random_parameters(GptOssExperts(config))


@pytest.mark.parametrize(
    ("make", "is_ours"),
    [
        (lambda: granite_experts("silu"), True),
        (lambda: granite_experts("gelu_pytorch_tanh"), True),
        (lambda: granite_experts("relu"), False),
        (gpt_oss_experts, False),
    ],
    ids=["silu", "gelu_tanh", "relu", "biases and a gate of its own"],
)
@torch.no_grad()
def test_experts(make: Any, is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours where they are the same function, else Transformers'."""
    config, module = make()
    x = torch.randn(6, 64)
    weights, ids = torch.randn(6, 5).softmax(-1).topk(2)
    config._experts_implementation = "eager"
    expected = module(x, ids, weights)
    used: list[Any] = []

    def noted(*args: Any) -> torch.Tensor:
        used.append(args)
        return experts(*args)

    monkeypatch.setattr(f"{parts.__name__}.experts", noted)
    config._experts_implementation = parts.EXPERTS
    torch.testing.assert_close(module(x, ids, weights), expected, rtol=1e-4, atol=1e-4)
    assert bool(used) == is_ours
