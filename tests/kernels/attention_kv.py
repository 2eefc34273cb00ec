"""KV for the tests of attention kernels, laid out as the cache managers do it, and sinks."""

from __future__ import annotations

import torch


def place_kv(
    kv: torch.Tensor,
    num_kv_heads: int,
    key_dim: int,
    block_size: int | None,
    random: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Place the second of three layers, contiguous or in shuffled blocks.

    Args:
        kv: [slots, tokens, 3, num_kv_heads * (key_dim + value_dim)], token-major KV on the host.
        num_kv_heads: heads of keys and of values.
        key_dim: elements of a key.
        block_size: tokens of a block, which divides those of a slot; None for contiguous KV.
        random: shuffles the blocks.
        device: where the results are.
        dtype: dtype of keys and values.
        index_dtype: dtype of the block tables.

    Returns:
        keys and values, [slots or blocks, tokens, num_kv_heads, dim], and the block tables
        [slots, blocks of a slot]; None for contiguous KV.
    """
    tables = None
    if block_size is not None:
        num_slots, max_tokens = kv.shape[:2]
        assert max_tokens % block_size == 0
        blocks = kv.view(-1, block_size, *kv.shape[2:])
        places = torch.randperm(len(blocks), generator=random)
        kv = torch.empty_like(blocks)
        kv[places] = blocks
        tables = places.view(num_slots, -1).to(device, index_dtype)
    kv = kv.to(device, dtype)[..., 1, :]
    split = num_kv_heads * key_dim
    keys, values = (t.unflatten(-1, (num_kv_heads, -1)) for t in (kv[..., :split], kv[..., split:]))
    return keys, values, tables


def make_sinks(num_heads: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Sinks [num_heads] that leave between almost nothing and almost all to the keys."""
    random = torch.Generator().manual_seed(5)
    return (4 * torch.randn(num_heads, generator=random)).to(device, dtype)
