"""The fused element-wise kernels against the formulas in float64, outputs poisoned with NaN."""

from __future__ import annotations

import pytest
import torch

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.kernels.activation import (
    ACTIVATIONS,
    activate,
    activate_reference,
    sigmoid_mul,
    sigmoid_mul_reference,
    silu_mul,
    silu_mul_reference,
)
from aquifer.kernels.norm import (
    NormWeights,
    add_norm,
    add_norm_reference,
    add_rms_norm,
    add_rms_norm_reference,
    norm_heads,
    norm_reference,
    rms_norm,
    rms_norm_reference,
)
from aquifer.kernels.rotary import (
    qk_norm_rope_write,
    qk_norm_rope_write_reference,
    rotary,
    split_heads,
)

MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(MAX_ERROR)
EPS = 1e-5


def max_error(device: torch.device, dtype: torch.dtype) -> float:
    """Triton's interpreter cuts to bfloat16 where devices round, which doubles errors."""
    return MAX_ERROR[dtype] * (2 if device.type == "cpu" and dtype == torch.bfloat16 else 1)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    assert exact.dtype == torch.float64
    return float((result.double() - exact).norm() / exact.norm())


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def random(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (5, 96), (3, 4, 64), (2, 1000), (0, 16)], ids=str)
def test_rms_norm(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(generator, *shape, dtype=dtype) * 3
    weight = random(generator, shape[-1], dtype=dtype)
    result = rms_norm(x, weight, EPS)
    assert result.shape == x.shape
    assert result.dtype == dtype
    if x.numel():
        assert error(result, exact_norm(x, weight)) < max_error(generator.device, dtype)
        assert error(rms_norm_reference(x, weight, EPS), exact_norm(x, weight)) < max_error(
            generator.device, dtype
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "n"), [(1, 64), (6, 200), (2, 1024)])
def test_add_rms_norm(
    generator: torch.Generator, num_tokens: int, n: int, dtype: torch.dtype
) -> None:
    x = random(generator, num_tokens, n, dtype=dtype)
    wide = random(generator, num_tokens, 2 * n, dtype=dtype)  # rows that lie further apart
    weight = random(generator, n, dtype=dtype)
    before = wide.clone()
    result = add_rms_norm(x, wide[:, :n], weight, EPS)
    stored = wide[:, :n]  # rounded before it is normalised
    assert error(stored, x.double() + before[:, :n].double()) < max_error(generator.device, dtype)
    assert torch.equal(wide[:, n:], before[:, n:])
    assert error(result, exact_norm(stored, weight)) < max_error(generator.device, dtype)
    residual = before[:, :n].clone()
    reference = add_rms_norm_reference(x, residual, weight, EPS)
    assert torch.equal(residual, x + before[:, :n])
    assert error(reference, exact_norm(residual, weight)) < max_error(generator.device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "n"), [(1, 64), (5, 100), (2, 1500)])
def test_silu_mul(generator: torch.Generator, num_tokens: int, n: int, dtype: torch.dtype) -> None:
    gate_up = random(generator, num_tokens, 2 * n, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    exact = gate / (1 + (-gate).exp()) * up
    assert error(silu_mul(gate_up), exact) < max_error(generator.device, dtype)
    assert error(silu_mul_reference(gate_up), exact) < max_error(generator.device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "n"), [(0, 16), (1, 64), (5, 100), (2, 1500)])
def test_sigmoid_mul(
    generator: torch.Generator, num_tokens: int, n: int, dtype: torch.dtype
) -> None:
    wide = random(generator, num_tokens, 2 * n + 1, dtype=dtype) * 4
    gate, x = wide[:, :n], wide[:, n + 1 :]
    for operation in (sigmoid_mul, sigmoid_mul_reference):
        result = operation(x, gate)
        assert result.shape == x.shape
        if num_tokens:
            exact = x.double() / (1 + (-gate.double()).exp())
            assert error(result, exact) < 2 * max_error(generator.device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_second", [16, 5], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "has_norm"),
    [(4, 2, 32, True), (14, 1, 24, False), (9, 9, 16, True)],
)
def test_qk_norm_rope_write(
    generator: torch.Generator,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    has_norm: bool,
    num_second: int,
    dtype: torch.dtype,
) -> None:
    """K and V of the second of two layers; all else in the cache stays as it was."""
    device = generator.device
    num_tokens, num_first = 6, 4
    width = (num_heads + 2 * num_kv_heads) * dim
    qkv = random(generator, num_tokens, width + 8, dtype=dtype)[:, :width]
    q_weight = random(generator, dim, dtype=dtype) if has_norm else None
    k_weight = random(generator, dim, dtype=dtype) if has_norm else None
    # Angles that every dtype has exactly: rounding them is not what is tested.
    cos = random(generator, num_tokens, dim // 2).bfloat16().half().float()
    sin = random(generator, num_tokens, dim // 2).bfloat16().half().float()
    places = torch.randperm(num_first * num_second, generator=generator, device=device)[:num_tokens]
    row_first, row_second = places // num_second, places % num_second
    row_first[2] = -1
    row_second[2] = 1 << 40
    layout = KVLayout((LayerKV(num_kv_heads, dim, dim),) * 2, dtype)

    heads = qkv.double().unflatten(1, (-1, dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = exact_norm(q, q_weight), exact_norm(k, k_weight)
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    q, k = (
        torch.cat([(turned := torch.complex(*x.chunk(2, dim=-1)) * turn).real, turned.imag], -1)
        for x in (q, k)
    )
    for operation in (qk_norm_rope_write, qk_norm_rope_write_reference):
        cache = torch.full(
            (num_first, num_second, layout.token_elements), torch.nan, dtype=dtype, device=device
        )
        keys, values = layout.split(cache)[1]
        query = torch.full((num_tokens, num_heads, dim), torch.nan, dtype=dtype, device=device)
        operation(
            qkv, q_weight, k_weight, cos, sin, query, keys, values, row_first, row_second, eps=EPS
        )
        written = row_first >= 0
        first, second = row_first[written], row_second[written]
        assert error(query, q) < max_error(generator.device, dtype)
        assert error(keys[first, second], k[written]) < max_error(generator.device, dtype)
        assert torch.equal(values[first, second].double(), v[written])
        num_written = int(written.sum()) * 2 * num_kv_heads * dim
        assert int(cache.isfinite().sum()) == num_written


# --- what families other than Llama need -----------------------------------------------------

NORMS = ["rms", "plus one", "rms with bias", "layer", "layer with bias", "layer plus one with bias"]


def norm_of(
    generator: torch.Generator, kind: str, *shape: int, dtype: torch.dtype = torch.float32
) -> NormWeights:
    """Random weights of a norm."""
    return NormWeights(
        random(generator, *shape, dtype=dtype),
        random(generator, shape[-1], dtype=dtype) if "bias" in kind else None,
        EPS,
        centred="layer" in kind,
        plus_one="plus one" in kind,
    )


def exact(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    """A norm in float64."""
    x, weight = x.double(), norm.weight.double()
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + int(norm.plus_one))
    return x if norm.bias is None else x + norm.bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [None, *NORMS])
@pytest.mark.parametrize(
    ("num_deltas", "after"), [(0, None), (2, None), *((1, after) for after in (None, *NORMS))]
)
def test_add_norm(
    generator: torch.Generator,
    num_deltas: int,
    after: str | None,
    before: str | None,
    dtype: torch.dtype,
) -> None:
    num_tokens, n, scale = 3, 72, 0.25
    residual = random(generator, num_tokens, n, dtype=dtype)
    deltas = [random(generator, num_tokens, n, dtype=dtype) for _ in range(num_deltas)]
    after_norm = None if after is None else norm_of(generator, after, n, dtype=dtype)
    before_norm = None if before is None else norm_of(generator, before, n, dtype=dtype)
    total = residual.double()
    for delta in deltas:
        total = total + scale * (delta.double() if after_norm is None else exact(delta, after_norm))
    for operation in (add_norm, add_norm_reference):
        stream = residual.clone()
        normed, stored = operation(stream, deltas, after_norm, before_norm, scale)
        assert error(stored, total) < 2 * max_error(generator.device, dtype)
        if before_norm is None:
            assert normed is stored
        else:
            assert error(normed, exact(stored, before_norm)) < max_error(generator.device, dtype)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("is_per_head", [False, True])
def test_norm_heads(generator: torch.Generator, kind: str, is_per_head: bool) -> None:
    """In place, in a part of a wider row."""
    num_tokens, num_heads, dim = 3, 5, 24
    norm = norm_of(generator, kind, *((num_heads, dim) if is_per_head else (dim,)))
    wide = random(generator, num_tokens, (num_heads + 2) * dim)
    before = wide.clone()
    heads = wide[:, dim : (num_heads + 1) * dim].unflatten(1, (num_heads, dim))
    expected = exact(heads, norm)
    assert error(norm_reference(heads, norm), expected) < MAX_ERROR[torch.float32]
    norm_heads(heads, norm)
    assert error(heads, expected) < MAX_ERROR[torch.float32]
    assert torch.equal(wide[:, :dim], before[:, :dim])
    assert torch.equal(wide[:, -dim:], before[:, -dim:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activate(
    generator: torch.Generator, name: str, is_gated: bool, dtype: torch.dtype
) -> None:
    x = random(generator, 3, 1100, dtype=dtype) * 3
    expected = activate_reference(x.double(), name, is_gated=is_gated)
    for operation in (activate, activate_reference):
        result = operation(x, name, is_gated=is_gated)
        assert result.shape == expected.shape
        assert error(result, expected) < max_error(generator.device, dtype)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_rotated", [0, 8, 24])
@pytest.mark.parametrize("norm", [None, "rms", "plus one"])
def test_rotations_of_all_kinds(
    generator: torch.Generator,
    norm: str | None,
    num_rotated: int,
    is_interleaved: bool,
    is_grouped: bool,
) -> None:
    num_tokens, num_heads, num_kv_heads, dim = 4, 6, 2, 24
    device = generator.device
    qkv = random(generator, num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    q_weight = None if norm is None else random(generator, dim)
    k_weight = None if norm is None else random(generator, dim)
    angles = random(generator, num_tokens, num_rotated // 2)
    cos, sin = (angles.cos(), angles.sin()) if num_rotated else (None, None)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads, is_grouped=is_grouped)
    own = []
    for heads, weight in ((q.double(), q_weight), (k.double(), k_weight)):
        if weight is not None:
            kind = NormWeights(weight, None, EPS, plus_one=norm == "plus one")
            heads = exact(heads, kind)
        if cos is not None and sin is not None:
            turn = cos.double(), sin.double()
            heads = rotary(heads, *turn, is_interleaved=is_interleaved)
        own.append(heads)
    rows = torch.arange(num_tokens, device=device)
    for operation in (qk_norm_rope_write, qk_norm_rope_write_reference):
        query = torch.full((num_tokens, num_heads, dim), torch.nan, device=device)
        keys, values = torch.full((2, num_tokens, 1, num_kv_heads, dim), torch.nan, device=device)
        operation(
            qkv, q_weight, k_weight, cos, sin, query, keys, values, rows, torch.zeros_like(rows),
            eps=EPS, plus_one=norm == "plus one", is_interleaved=is_interleaved,
            is_grouped=is_grouped,
        )  # fmt: skip
        assert error(query, own[0]) < MAX_ERROR[torch.float32]
        assert error(keys[:, 0], own[1]) < MAX_ERROR[torch.float32]
        assert torch.equal(values[:, 0], v)


def test_rotary_turns_pairs_of_two_kinds() -> None:
    """By a quarter, (1, 2) becomes (-2, 1)."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 5)
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    assert rotary(x, cos, sin).flatten().tolist() == [-3, -4, 1, 2, 5]
    assert rotary(x, cos, sin, is_interleaved=True).flatten().tolist() == [-2, 1, -4, 3, 5]


def test_heads_that_are_stored_by_kv_head() -> None:
    qkv = torch.arange(8.0).view(1, 8)  # heads of one dimension
    q, k, v = split_heads(qkv, 4, 2, is_grouped=True)
    assert [part.flatten().tolist() for part in (q, k, v)] == [[0, 1, 4, 5], [2, 6], [3, 7]]
