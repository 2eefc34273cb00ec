"""Keys and values of a step's tokens written into the cache."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels.kv_write import kv_write, kv_write_reference

SLOTS, TOKENS = 5, 7


def some(generator: torch.Generator, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device)


@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim"), [(2, 16, 16), (3, 24, 12), (1, 80, 80), (40, 192, 128)]
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_kv_write(
    device: torch.device, num_heads: int, key_dim: int, value_dim: int, is_transposed: bool
) -> None:
    """Every row is where it belongs, rows of padding are nowhere, and nothing else has changed."""
    generator = torch.Generator().manual_seed(0)
    first = torch.tensor([4, -1, 0, 4, -1, 2])
    second = torch.tensor([6, 3, 0, 5, 0, 1])
    count = len(first)
    # As Transformers' models hand them on: the heads before the tokens, or after them.
    shape = (num_heads, count) if is_transposed else (count, num_heads)
    key, value = (some(generator, device, *shape, dim) for dim in (key_dim, value_dim))
    if is_transposed:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    # K and V of a token are neighbours, as in a cache.
    for operation in (kv_write, kv_write_reference):
        stored = some(generator, device, SLOTS, TOKENS, num_heads * (key_dim + value_dim))
        keys, values = stored.split((num_heads * key_dim, num_heads * value_dim), dim=-1)
        keys, values = keys.unflatten(-1, (num_heads, -1)), values.unflatten(-1, (num_heads, -1))
        expected_keys, expected_values = keys.clone(), values.clone()
        for row, (slot, position) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
            if slot >= 0:
                expected_keys[slot, position] = key[row]
                expected_values[slot, position] = value[row]
        operation(key, value, keys, values, first.to(device), second.to(device))
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)


def test_no_rows(device: torch.device) -> None:
    key = torch.zeros(0, 2, 16, device=device)
    stored = torch.ones(SLOTS, TOKENS, 2, 16, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    kv_write(key, key, stored, stored, none, none)
    assert (stored == 1).all()
