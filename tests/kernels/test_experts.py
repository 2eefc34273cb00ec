"""Mixture of experts: the references against plain formulas and against Transformers' modules; the
kernels against the references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cases import EVERY_KERNEL_CASE, covering, tries

from aquifer.kernels import _triton
from aquifer.kernels import experts as module
from aquifer.kernels.experts import (
    Activation,
    ExpertTile,
    Routing,
    best_expert_tile,
    expert_tiles,
    experts,
    experts_reference,
    has_gate,
    route,
    route_reference,
)

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")
SORTED = ExpertTile(16, 32, 16, 2, 2)
SEARCHED = replace(SORTED, sorts=False)
TILES = {
    "vectors": ExpertTile(1, 16, 32, 2),
    "whole rows": ExpertTile(1, 32, 1024, 4),
    "searched": SEARCHED,
    "sorted": SORTED,
    "grouped": ExpertTile(16, 64, 32, 4, 2, group=3),
    "large": ExpertTile(32, 128, 64, 4, 2, group=8),
    "chosen": None,
}
ROUTINGS = {
    "softmax": Routing(),
    "softmax, normalised": Routing(normalise=True),
    "softmax of chosen": Routing("softmax_of_chosen"),
    "rounded": Routing(normalise=True, rounds_weights=True),
    "groups by best": Routing(num_groups=4, top_groups=2, scale=16.0),
    "groups by two": Routing(num_groups=4, top_groups=2, group_score="best_two"),
    "sigmoid": Routing("sigmoid", normalise=True, scale=2.5),
    "sigmoid, groups by two": Routing("sigmoid", True, 4, 2, "best_two", 2.5),
}


@pytest.fixture(
    params=[
        pytest.param(False, id="serial"),
        pytest.param(True, id="overlapping", marks=pytest.mark.gpu),
    ]
)
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "overlap", request.param)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())


class Layer:
    """Random weights of a layer of experts, and inputs of it."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        has_bias: bool = False,
        activation: Activation = "silu",
        seed: int = 0,
    ) -> None:
        up_rows = 2 * width if has_gate(activation) else width
        self._generator = torch.Generator().manual_seed(seed)
        self._device, self._dtype = device or torch.device("cpu"), dtype
        self.gate_up = self.random(num_experts, up_rows, hidden) * hidden**-0.5
        self.down = self.random(num_experts, hidden, width) * width**-0.5
        self.gate_up_bias = self.random(num_experts, up_rows) if has_bias else None
        self.down_bias = self.random(num_experts, hidden) if has_bias else None

    def random(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self._generator)
        return numbers.to(self._device, self._dtype)

    def tokens(self, num_tokens: int) -> torch.Tensor:
        """[tokens, hidden]; rows are padded with NaN."""
        hidden = self.down.shape[1]
        wide = torch.full((num_tokens, hidden + 8), torch.nan)
        wide[:, :hidden] = self.random(num_tokens, hidden)
        return wide.to(self._device, self._dtype)[:, :hidden]

    def choice(self, num_tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random ids, distinct for each token, and weights."""
        num_experts = len(self.down)
        scores = torch.rand(num_tokens, num_experts, generator=self._generator)
        ids = scores.argsort(1)[:, :top_k].to(torch.int32)
        weights = torch.rand(num_tokens, top_k, generator=self._generator)
        return ids.to(self._device), weights.to(self._device)

    def exact(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: Activation,
        *,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """The formula, in float64, token by token."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        num_experts = len(self.down)
        for token, chosen in enumerate(ids.tolist()):
            for choice, expert in enumerate(chosen):
                if not 0 <= expert < num_experts:
                    continue
                both = self.gate_up[expert].double() @ x[token].double()
                if self.gate_up_bias is not None:
                    both += self.gate_up_bias[expert].double()
                gate, up = (both[::2], both[1::2]) if interleaved else both.tensor_split(2)
                if activation == "relu2":
                    inner = both.clamp(min=0.0).square()
                elif activation == "silu":
                    inner = gate * gate.sigmoid() * up
                elif activation == "gelu_tanh":
                    inner = F.gelu(gate, approximate="tanh") * up
                else:
                    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                    inner = gate * (1.702 * gate).sigmoid() * (up + 1)
                product = self.down[expert].double() @ inner
                if self.down_bias is not None:
                    product += self.down_bias[expert].double()
                out[token] += weights[token, choice].double() * product
        return out

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: Activation = "silu",
        *,
        interleaved: bool = False,
        tile: ExpertTile | None = None,
    ) -> torch.Tensor:
        return experts(
            x, self.gate_up, self.down, ids, weights, activation, self.gate_up_bias,
            self.down_bias, interleaved=interleaved, tile=tile,
        )  # fmt: skip


# The references


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_experts_reference(
    num_tokens: int, has_bias: bool, interleaved: bool, activation: Activation
) -> None:
    layer = Layer(6, 24, 10, has_bias=has_bias, activation=activation)
    x = layer.tokens(num_tokens) * (8 if has_gate(activation) else 1)  # so that some are clamped
    ids, weights = layer.choice(num_tokens, 3)
    ids[num_tokens // 2 :, 1] = -1
    result = experts_reference(
        x, layer.gate_up, layer.down, ids, weights, activation, layer.gate_up_bias,
        layer.down_bias, interleaved=interleaved,
    )  # fmt: skip
    exact = layer.exact(x, ids, weights, activation, interleaved=interleaved)
    assert result.shape == x.shape
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


def test_equal_scores_choose_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 6])
    for options in (
        Routing(),
        Routing("softmax_of_chosen"),
        Routing("sigmoid"),
        Routing(num_groups=3, top_groups=3),
        Routing("sigmoid", num_groups=3, top_groups=3, group_score="best_two"),
    ):
        ids, _ = route_reference(logits, 4, options)
        assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


# Transformers


def router_output(router: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logits, ids in ascending order, weights in the same order) of Transformers' router."""
    with torch.no_grad():
        logits, weights, ids = router(x)
    order = ids.argsort(1)
    return logits, ids.gather(1, order), weights.gather(1, order)


def check_route(
    router: torch.nn.Module,
    x: torch.Tensor,
    top_k: int,
    options: Routing,
    bias: torch.Tensor | None = None,
) -> None:
    logits, expected_ids, expected_weights = router_output(router, x)
    ids, weights = route_reference(logits, top_k, options, bias)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    order = ids.argsort(1)
    assert torch.equal(ids.gather(1, order).long(), expected_ids)
    expected_weights = expected_weights.float()
    torch.testing.assert_close(weights.gather(1, order), expected_weights, rtol=1e-6, atol=0)


def randomise(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    """Give a module random weights and buffers."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.normal_(std=0.3, generator=generator)
    return module.to(dtype).eval()


def mixtral() -> tuple[Any, Routing]:
    from transformers.models.mixtral import modeling_mixtral as modeling

    config = modeling.MixtralConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2
    )
    return modeling.MixtralSparseMoeBlock(config), Routing(normalise=True)


def qwen2_moe() -> tuple[Any, Routing]:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as modeling

    config = modeling.Qwen2MoeConfig(
        hidden_size=32,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=4,
        shared_expert_intermediate_size=16,
    )
    options = Routing(normalise=config.norm_topk_prob, rounds_weights=True)
    return modeling.Qwen2MoeSparseMoeBlock(config), options


def qwen3_moe() -> tuple[Any, Routing]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    config = modeling.Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    options = Routing(normalise=True, rounds_weights=True)
    return modeling.Qwen3MoeSparseMoeBlock(config), options


def olmoe() -> tuple[Any, Routing]:
    from transformers.models.olmoe import modeling_olmoe as modeling

    config = modeling.OlmoeConfig(
        hidden_size=32, intermediate_size=24, num_experts=8, num_experts_per_tok=4
    )
    assert not config.norm_topk_prob
    return modeling.OlmoeSparseMoeBlock(config), Routing(rounds_weights=True)


BLOCKS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe, "olmoe": olmoe}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_routers_with_softmax(name: str, dtype: torch.dtype) -> None:
    block, options = BLOCKS[name]()
    randomise(block, dtype)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype == torch.bfloat16:
        # Of equal logits, Transformers does not choose those of the lowest ids.
        logits, _, _ = router_output(block.gate, x)
        x = x[[len(row.unique()) == len(row) for row in logits]]
        assert len(x) > 10
    check_route(block.gate, x, block.gate.top_k, options)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    block, options = BLOCKS[name]()
    randomise(block)
    x = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = block(x)[0]
        if name == "qwen2_moe":
            shared = block.shared_expert(x[0]) * block.shared_expert_gate(x[0]).sigmoid()
            expected = expected - shared
    logits = F.linear(x[0], block.gate.weight.data)
    ids, weights = route_reference(logits, block.gate.top_k, options)
    gate_up, down = block.experts.gate_up_proj.data, block.experts.down_proj.data
    result = experts_reference(x[0], gate_up, down, ids, weights, "silu")
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_gpt_oss() -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss as modeling

    config = modeling.GptOssConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=4
    )
    block = randomise(modeling.GptOssMLP(config))
    x = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(0)) * 5
    options = Routing("softmax_of_chosen", rounds_weights=True)
    check_route(block.router, x[0], 4, options)
    with torch.no_grad():
        expected = block(x)[0][0]
        logits, _, _ = block.router(x[0])
    both = F.linear(x[0], block.experts.gate_up_proj.data[0].T)
    assert both.max() > 7.0  # so that some are clamped
    ids, weights = route_reference(logits, 4, options)
    result = experts_reference(
        x[0],
        block.experts.gate_up_proj.data.transpose(1, 2).contiguous(),
        block.experts.down_proj.data.transpose(1, 2).contiguous(),
        ids,
        weights,
        "clamped_swiglu",
        block.experts.gate_up_proj_bias.data,
        block.experts.down_proj_bias.data,
        interleaved=True,
    )
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_groups", [1, 4])
def test_deepseek_v2(num_groups: int, dtype: torch.dtype) -> None:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

    config = modeling.DeepseekV2Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=12,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=num_groups,
        topk_group=(num_groups + 1) // 2,
        topk_method="greedy" if num_groups == 1 else "group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    block = randomise(modeling.DeepseekV2Moe(config), dtype)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = Routing(num_groups=num_groups, top_groups=(num_groups + 1) // 2, scale=16.0)
    check_route(block.gate, x, 3, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("normalise", [False, True])
def test_deepseek_v3(num_groups: int, normalise: bool, dtype: torch.dtype) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    config = modeling.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=num_groups,
        topk_group=(num_groups + 1) // 2,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )
    block = randomise(modeling.DeepseekV3MoE(config), dtype)
    bias = block.gate.e_score_correction_bias
    assert bias.abs().max() > 0.1
    block.gate.e_score_correction_bias = bias = bias.float()
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    top_groups = (num_groups + 1) // 2
    options = Routing("sigmoid", normalise, num_groups, top_groups, "best_two", 2.5)
    check_route(block.gate, x, 3, options, bias)
    if dtype == torch.float32:
        with torch.no_grad():
            expected = block(x[None])[0] - block.shared_experts(x)
            ids, weights = route_reference(block.gate(x)[0], 3, options, bias)
        gate_up, down = block.experts.gate_up_proj.data, block.experts.down_proj.data
        result = experts_reference(x, gate_up, down, ids, weights, "silu")
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


# The kernels


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("dtype", list(MAX_ERROR), ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 16, 4), (1, 128, 8), (5, 12, 3), (3, 160, 6)]
)
def test_route(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    name: str,
    dtype: torch.dtype,
) -> None:
    options = ROUTINGS[name]
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((num_tokens, num_experts + 3), torch.nan)
    # Distinct in each row, in any dtype.
    ranks = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    wide[:, :num_experts] = (ranks - num_experts / 2) / 16
    logits = wide.to(device, dtype)[:, :num_experts]
    bias = None
    if options.scoring == "sigmoid":
        bias = torch.randn(num_experts, generator=generator).to(device)
    ids, weights = route(logits, top_k, options, bias)
    expected_ids, expected_weights = route_reference(logits, top_k, options, bias)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    tolerance = MAX_ERROR[dtype] if options.rounds_weights else 1e-6
    torch.testing.assert_close(weights, expected_weights, rtol=tolerance, atol=0)


@pytest.mark.usefixtures("overlap")
def test_rows_of_padding_choose_no_experts(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 12, generator=generator).to(device)
    lengths = torch.tensor([-5, 3, 1, 0, 20, 0, 1 << 40, 0], device=device)[1:]
    logits[4] = torch.nan
    for options in ROUTINGS.values():
        ids, weights = route(logits, 3, options, lengths=lengths)
        expected_ids, expected_weights = route(logits, 3, options)
        is_padding = lengths == 0
        assert (ids[is_padding] == -1).all()
        assert torch.equal(ids[~is_padding], expected_ids[~is_padding])
        assert torch.equal(weights[~is_padding], expected_weights[~is_padding])
        assert torch.equal(ids, route_reference(logits, 3, options, lengths=lengths)[0])


@pytest.mark.parametrize("num_groups", [1, 3])
def test_route_of_equal_scores(device: torch.device, num_groups: int) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 6], device=device)
    for scoring in ("softmax", "softmax_of_chosen", "sigmoid"):
        options = Routing(scoring, num_groups=num_groups, top_groups=num_groups)
        ids, _ = route(logits, 4, options)
        assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_ids_are_valid_whatever_the_logits(device: torch.device) -> None:
    logits = torch.zeros(4, 20, device=device)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    for options in (Routing(), Routing("sigmoid", False, 4, 2, "best_two")):
        ids, _ = route(logits, 6, options)
        assert int(ids.min()) >= 0
        assert int(ids.max()) < 20
        assert all(len(set(row)) == 6 for row in ids.tolist())


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_of_infinite_logits_are_chosen_once(device: torch.device, name: str) -> None:
    """With fewer others than a token has experts; those have no weight."""
    logits = torch.full((3, 12), -torch.inf, device=device)
    logits[0, 0] = 2.0
    logits[1, 7:9] = torch.tensor([1.0, 3.0], device=device)
    logits[2, 4:7] = 1.0
    ids, weights = route(logits, 5, ROUTINGS[name])
    expected_ids, expected_weights = route_reference(logits, 5, ROUTINGS[name])
    assert torch.equal(ids, expected_ids)
    assert all(len(set(row)) == 5 for row in ids.tolist())
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)


def tile_cases() -> list[Any]:
    """(tile, shape, dtype): each tile with each shape, in all dtypes or in one in turn."""
    found: list[Any] = []
    for number, (name, tile) in enumerate(TILES.items()):
        for turn, shape in enumerate([(0, 4, 2), (1, 8, 2), (3, 5, 5), (12, 8, 2)], number):
            # Triton's interpreter has no products of bfloat16, only sums for vectors.
            is_sum = tile is not None and tile.pairs == 1
            dtypes = [*MAX_ERROR] if is_sum else [torch.float32, torch.float16]
            if not EVERY_KERNEL_CASE:
                dtypes = [dtypes[turn % len(dtypes)]]
            found += [(name, shape, dtype) for dtype in dtypes]
            if not is_sum:
                found.append(pytest.param(name, shape, torch.bfloat16, marks=pytest.mark.gpu))
    return found


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize(("name", "shape", "dtype"), tile_cases(), ids=str)
def test_experts(
    device: torch.device, name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_tokens, num_experts, top_k = shape
    layer = Layer(num_experts, 72, 40, dtype=dtype, device=device)
    x, (ids, weights) = layer.tokens(num_tokens), layer.choice(num_tokens, top_k)
    result = layer.run(x, ids, weights, tile=TILES[name])
    assert result.shape == x.shape
    assert result.dtype == dtype
    assert result.is_contiguous()
    if num_tokens:
        exact = layer.exact(x, ids, weights, "silu")
        limit = MAX_ERROR[dtype] * (2 if device.type == "cpu" else 1)
        assert error(result, exact) < limit


@pytest.mark.parametrize(
    ("name", "has_bias", "interleaved", "activation"),
    covering(
        ("vectors", "sorted"),
        (False, True),
        (False, True),
        ACTIVATIONS,
        strength=2,
        every=EVERY_KERNEL_CASE,
    ),
)
def test_activations(
    device: torch.device, name: str, has_bias: bool, interleaved: bool, activation: Activation
) -> None:
    layer = Layer(4, 72, 40, device=device, has_bias=has_bias, activation=activation)
    x, (ids, weights) = layer.tokens(5) * 8, layer.choice(5, 2)
    result = layer.run(x, ids, weights, activation, interleaved=interleaved, tile=TILES[name])
    exact = layer.exact(x, ids, weights, activation, interleaved=interleaved)
    assert error(result, exact) < 1e-6


@pytest.mark.parametrize("name", TILES)
def test_padding_takes_no_part(device: torch.device, name: str) -> None:
    layer = Layer(4, 72, 40, device=device, has_bias=True)
    x, (ids, weights) = layer.tokens(12), layer.choice(12, 2)
    ids[1] = ids[9:] = -1
    ids[3, 0], ids[4, 1] = -1, 4
    weights = weights.where((ids >= 0) & (ids < 4), torch.nan)
    x[1] = x[9:] = torch.nan
    result = layer.run(x, ids, weights, tile=TILES[name])
    assert not result[1].any()
    assert not result[9:].any()
    assert error(result, layer.exact(x, ids, weights, "silu")) < 1e-6
    assert not layer.run(x, torch.full_like(ids, -1), weights, tile=TILES[name]).any()


@pytest.mark.parametrize(
    ("expert", "name"), covering((0, 5), TILES, strength=1, every=EVERY_KERNEL_CASE)
)
def test_one_expert_has_all_tokens(device: torch.device, expert: int, name: str) -> None:
    layer = Layer(6, 24, 16, device=device)
    x, (ids, weights) = layer.tokens(50), layer.choice(50, 1)
    ids.fill_(expert)
    result = layer.run(x, ids, weights, tile=TILES[name])
    assert error(result, layer.exact(x, ids, weights, "silu")) < 1e-6


@pytest.mark.parametrize("tile", [SORTED, SEARCHED], ids=["sorted", "searched"])
def test_an_expert_chosen_twice_by_a_token_counts_twice(
    device: torch.device, tile: ExpertTile
) -> None:
    layer = Layer(3, 24, 16, device=device)
    x, (_, weights) = layer.tokens(4), layer.choice(4, 2)
    ids = torch.tensor([[1, 1], [0, 1], [2, 2], [1, 0]], dtype=torch.int32, device=device)
    result = layer.run(x, ids, weights, tile=tile)
    assert error(result, layer.exact(x, ids, weights, "silu")) < 1e-6


@pytest.mark.parametrize("num_tokens", [1250, 2250, pytest.param(20000, marks=pytest.mark.gpu)])
def test_many_pairs_are_sorted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """More than one block of pairs, then more than one share of them, then both."""
    if device.type == "cpu":  # where each token takes long
        monkeypatch.setattr(module, "_SORT_BLOCK", 256)
        num_tokens //= 8
    layer = Layer(5, 8, 8, device=device)
    x, (ids, weights) = layer.tokens(num_tokens), layer.choice(num_tokens, 4)
    ids[::7] = -1
    pairs = 128 if device.type == "cpu" else 64
    result = layer.run(x, ids, weights, tile=ExpertTile(pairs, 32, 16, 4, 2))
    expected = experts_reference(x, layer.gate_up, layer.down, ids, weights, "silu")
    assert error(result, expected) < 1e-6


@settings(
    max_examples=tries(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_experts_of_random_shapes(device: torch.device, data: st.DataObject) -> None:
    """Any choice, with any tile, against the reference."""
    draw = data.draw
    num_experts, num_tokens = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    top_k = draw(st.integers(1, min(num_experts, 3)))
    activation, interleaved = draw(st.sampled_from(ACTIVATIONS)), draw(st.booleans())
    layer = Layer(
        num_experts,
        draw(st.sampled_from([8, 16, 24, 40])),
        draw(st.sampled_from([8, 17, 32])),
        has_bias=draw(st.booleans()),
        activation=activation,
        seed=draw(st.integers(0, 100)),
        device=device,
    )
    row = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    chosen = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    ids = torch.tensor(chosen, dtype=torch.int32, device=device)
    x, (_, weights) = layer.tokens(num_tokens), layer.choice(num_tokens, top_k)
    tile = draw(st.sampled_from(list(TILES.values())))
    result = layer.run(x, ids, weights, activation, interleaved=interleaved, tile=tile)
    expected = experts_reference(
        x, layer.gate_up, layer.down, ids, weights, activation, layer.gate_up_bias,
        layer.down_bias, interleaved=interleaved,
    )  # fmt: skip
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vectors", "searched", "sorted"])
def test_results_are_always_the_same(device: torch.device, name: str) -> None:
    layer = Layer(4, 40, 32, dtype=torch.float16, device=device)
    x, (ids, weights) = layer.tokens(4), layer.choice(4, 2)
    first = layer.run(x, ids, weights, tile=TILES[name])
    for _ in range(2):
        assert torch.equal(layer.run(x, ids, weights, tile=TILES[name]), first)


# Tiles


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (32, 4), (64, 6), (128, 8), (256, 8)])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 17, 32, 64, 128, 1000, 8192, 40000])
def test_best_tiles(num_tokens: int, num_experts: int, top_k: int) -> None:
    best = best_expert_tile(num_tokens, top_k, num_experts)
    assert best in expert_tiles(num_tokens, top_k, num_experts)
    assert (best.pairs == 1) >= (num_tokens == 1)
    num_pairs = num_tokens * top_k
    if best.pairs > 1:
        assert 128 >= best.pairs >= min(128, 1.5 * num_pairs / num_experts)
        assert best.sorts or best.pairs * num_pairs <= 4096


@pytest.mark.gpu  # for graphs are CUDA's
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("num_tokens", [1, 4, 32, 700])
def test_captured_layers(device: torch.device, num_tokens: int) -> None:
    """Layers one after the other, replayed; every replay chooses other experts."""
    hidden, width, num_experts, top_k, num_layers = 512, 384, 32, 4, 6
    layers = [
        Layer(num_experts, hidden, width, dtype=torch.bfloat16, device=device, seed=seed)
        for seed in range(num_layers)
    ]
    routers = [layer.random(num_experts, hidden) * hidden**-0.5 for layer in layers]
    embedded = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    options = Routing(normalise=True)

    def forward() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        stream, choices = embedded, []
        for layer, router in zip(layers, routers, strict=True):
            choices.append(route(F.linear(stream, router), top_k, options))
            stream = layer.run(stream, *choices[-1]) + stream
        return stream, choices

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, choices = forward()
    for seed in range(10):
        embedded.copy_(Layer(1, hidden, 1, seed=seed).tokens(num_tokens))
        out.fill_(torch.nan)
        graph.replay()
        stream = embedded
        for layer, (ids, weights) in zip(layers, choices, strict=True):
            stream = stream + experts_reference(
                stream, layer.gate_up, layer.down, ids, weights, "silu"
            )
        assert error(out, stream) < 2e-2
