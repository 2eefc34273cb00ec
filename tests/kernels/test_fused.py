"""The fused element-wise kernels against the formulas in float64, outputs poisoned with NaN."""

from __future__ import annotations

import pytest
import torch

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.kernels.activation import silu_mul, silu_mul_reference
from aquifer.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from aquifer.kernels.rotary import qk_norm_rope_write, qk_norm_rope_write_reference

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
