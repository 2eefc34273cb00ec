"""What latent attention writes to the cache, and the products of its heads, against plain torch."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels.latent import (
    head_products,
    head_products_reference,
    latent_rope_write,
    latent_rope_write_reference,
)

HEADS = 16 if torch.cuda.is_available() else 2
"""Heads where each is as large as in DeepSeek's models; in the interpreter they take turns."""
MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def test_queries_are_rotated_in_place(device):
    random = torch.Generator().manual_seed(1)
    query = torch.randn(3, 20, 24, generator=random).to(device)[..., 16:]
    row, angles = torch.randn(3, 24, generator=random).to(device), torch.rand(3, 4).to(device)
    keys, places = torch.zeros(3, 1, 1, 24, device=device), torch.arange(3, device=device)
    rest = row, row[0, :16], angles.cos(), angles.sin()
    target = keys, places, 0 * places
    expected = torch.zeros_like(query)
    for rotated in (expected, query):
        latent_rope_write(query, *rest, rotated, *target, eps=1e-6, is_interleaved=True)
    assert torch.equal(query, expected)


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "nope_dim", "latent_dim", "rope_dim"),
    [(4, 16, 24, 8), (16, 8, 512, 64), (20, 4, 32, 12), (1, 1, 8, 2)],
)
def test_row_and_rotated_queries(
    device, is_interleaved, dtype, num_heads, nope_dim, latent_dim, rope_dim
):
    random = torch.Generator().manual_seed(0)
    head, row = nope_dim + rope_dim, latent_dim + rope_dim
    # One projection of queries and rows, as the model gives it.
    product = torch.randn(5, num_heads * head + row, generator=random).to(device, dtype)
    weight = (1 + torch.randn(latent_dim, generator=random)).to(device, dtype)
    angles = torch.randn(5, rope_dim // 2, generator=random).to(device)
    cos, sin = 1.1 * angles.cos(), 1.1 * angles.sin()
    first = torch.tensor([3, -1, 0, 3, 1], device=device)  # the second row is padding
    second = torch.tensor([0, 5, 6, 2, 4], device=device)
    query = product[:, : num_heads * head].unflatten(1, (num_heads, head))[..., nope_dim:]

    def run(operation) -> tuple[torch.Tensor, torch.Tensor]:
        absorbed = torch.full((5, num_heads, row), torch.nan, dtype=dtype, device=device)
        layers = torch.full((4, 7, 3, row), torch.nan, dtype=dtype, device=device)
        keys = layers[:, :, 1:2]
        operation(
            query, product[:, num_heads * head :], weight, cos, sin, absorbed[..., latent_dim:],
            keys, first, second, eps=1e-3, is_interleaved=is_interleaved,
        )  # fmt: skip
        assert absorbed[..., :latent_dim].isnan().all()
        assert layers[:, :, ::2].isnan().all()
        return absorbed[..., latent_dim:], keys

    rotated, keys = run(latent_rope_write)
    expected_rotated, expected_keys = run(latent_rope_write_reference)
    torch.testing.assert_close(rotated, expected_rotated)
    torch.testing.assert_close(keys, expected_keys, equal_nan=True)
    assert keys.isnan().all(-1).sum() == 4 * 7 - 4


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 65])
@pytest.mark.parametrize(
    ("num_heads", "n", "m", "is_transposed"),
    [(4, 16, 24, False), (HEADS, 128, 512, False), (HEADS, 512, 128, True), (3, 24, 12, True)],
)
def test_products_of_heads(device, dtype, num_tokens, num_heads, n, m, is_transposed):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, num_heads, n + 8, generator=random).to(device, dtype)[..., :n]
    # A part of a matrix in which each head has rows of two kinds.
    shape = (num_heads, m + 4, n) if is_transposed else (num_heads, n + 4, m)
    both = (torch.randn(shape, generator=random) * n**-0.5).to(device, dtype)
    weight = both[:, 4:].transpose(1, 2) if is_transposed else both[:, 4:]
    outs = [torch.full((num_tokens, num_heads, m + 8), torch.nan) for _ in range(2)]
    out, expected = (whole.to(device, dtype)[..., :m] for whole in outs)
    head_products(x, weight, out)
    head_products_reference(x, weight, expected)
    exact = torch.einsum("thn,hnm->thm", x.double(), weight.double())
    for result in (out, expected):
        error = (result.double() - exact).norm()
        assert error <= MAX_ERROR[dtype] * exact.norm()
