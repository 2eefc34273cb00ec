"""Decode attention of two to eight rows by clusters of blocks, on Hopper and later.

With few rows, reading KV takes a few microseconds, and as long again goes by before the first of
it arrives and until partial results are merged. `cluster_attention.cu` is faster than
`decode_attention.py` there, for two reasons that Triton has no means for:

- Each warp begins to copy its first tiles before it waits for the kernel that computes the query
  (programmatic dependent launch, rule 4 of `_triton.py`): all KV but that of the row's own token
  was written by earlier steps.
- Partial results are merged within a cluster, two blocks that read each other's shared memory. A
  row is divided among several clusters only if it is long. Then they merge in global memory, as
  in `decode_attention.py`.

There is one block for each SM. The clusters of a head get whole rows in turn; where that would
leave much more to one than to another, equal shares of all tiles, row after row. Both are worked
out on the device from the lengths, so a captured graph stays valid. Blocks without work end at
once, so that blocks of the next kernel can begin to copy.

Larger clusters are faster for short rows (4.1 us in place of 4.7 for one of 512 tokens), but not
all that a device has SMs for run at once: a cluster lies in one part of an H200, where 32 clusters
of four blocks take a second turn. With more rows than clusters, one block has a row.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from aquifer.kernels._cuda import MOST_SHARED_BYTES, CudaKernel, has_large_blocks, is_usable
from aquifer.kernels._triton import count_multiprocessors, launch

ROWS = range(2, 9)
"""Rows of calls that are faster so, in steps as a whole. The products around one row read their
weights ahead, for which this kernel leaves no room; with more rows, long ones lose more than short
ones gain. It is right for up to 32: each lane of a warp has the length of a row."""

MOST_KV_HEADS = 16
"""With more, each head would have few clusters, and rows of different lengths take turns."""

MOST_COUNTERS = 2 * ROWS[-1] * MOST_KV_HEADS
"""Counters of the largest call that `fits`."""

_FILE = "cluster_attention.cu"
_HEAD_DIMS = 64, 128
_MOST_GROUP = 8
_DTYPES = torch.bfloat16, torch.float16
_WARPS = 8
_MOST_STAGES = 6
_TILE_TOKENS = 16
_SHARED_BYTES = MOST_SHARED_BYTES - (2 << 10)
"""Dynamic shared memory that a block may have, beside that of fixed size."""

_ALIGNMENT_BYTES = 16
_LOG2_E = math.log2(math.e)


def fits(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether contiguous KV of these shapes can be attended to by clusters.

    Args:
        query: [B, heads, dim].
        values: [slots, max_tokens, kv_heads, dim].
    """
    batch, num_heads, head_dim = query.shape
    num_kv_heads = values.shape[2]
    return (
        batch in ROWS
        and num_kv_heads <= MOST_KV_HEADS
        and num_heads <= _MOST_GROUP * num_kv_heads
        and head_dim == values.shape[3]
        and head_dim in _HEAD_DIMS
        and query.dtype == values.dtype
        and query.dtype in _DTYPES
        and has_large_blocks(query.device)
    )


def can_read(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel is usable, keys and values are laid out alike, and all rows begin at
    multiples of 16 bytes."""
    return (
        is_usable(_FILE, query.device)
        and keys.stride() == values.stride()
        and all(
            tensor.data_ptr() % _ALIGNMENT_BYTES == 0
            and all(step * tensor.itemsize % _ALIGNMENT_BYTES == 0 for step in tensor.stride()[:-1])
            for tensor in (query, keys, values)
        )
    )


def cluster_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attend over all KV of each row's sequence; see `decode_attention.decode_attention`.

    Pre-conditions: `fits`, but for the number of rows, and `can_read`. `slots` and `lengths`
    have one dtype.

    Args:
        query: [B, heads, dim].
        keys: [slots, max_tokens, kv_heads, dim].
        values: likewise.
        slots: [B] int32 or int64.
        lengths: [B] likewise.
        out: [B, heads, dim], overwritten; the last stride is 1.
        partials: float32, for each cluster of each KV head two results of `group` heads, with
            maxima and sums: dim + 2 elements each.
        counters: int32, two for each row and KV head; zero before and after.
        scale: factor on the dot products.
    """
    batch, num_heads, head_dim = query.shape
    num_kv_heads = values.shape[2]
    group = num_heads // num_kv_heads
    # One block a row reads more evenly where there are more rows than clusters of two.
    num_blocks = max(count_multiprocessors(query.device) // num_kv_heads, 1)
    cluster_blocks = 2 if batch <= num_blocks // 2 else 1
    num_clusters = num_blocks // cluster_blocks
    num_partials = 2 * num_clusters * num_kv_heads * group * (head_dim + 2)
    assert partials.numel() >= num_partials, f"{partials.numel()} of {num_partials} elements"
    assert counters.numel() >= cluster_blocks * batch * num_kv_heads, "too few counters"
    assert slots.dtype == lengths.dtype
    kernel = _kernel(head_dim, group, cluster_blocks, query.dtype == torch.float16, query.device)
    launch(
        kernel,
        (cluster_blocks * num_clusters, num_kv_heads),
        query,
        keys,
        values,
        slots,
        lengths,
        out,
        partials,
        counters,
        scale * _LOG2_E,
        batch,
        slots.itemsize,
        query.stride(0),
        query.stride(1),
        keys.stride(0) * keys.itemsize,
        keys.stride(1) * keys.itemsize,
        keys.stride(2) * keys.itemsize,
        out.stride(0),
        out.stride(1),
    )


@cache
def _kernel(
    head_dim: int, group: int, cluster_blocks: int, is_half: bool, device: torch.device
) -> CudaKernel:
    """The kernel for such heads, with as many tiles in shared memory as it has room for."""
    merged_bytes = (_WARPS + 1) * group * head_dim * 4
    stage_bytes = _WARPS * 2 * _TILE_TOKENS * (head_dim * 2 + _ALIGNMENT_BYTES)
    num_stages = min((_SHARED_BYTES - merged_bytes) // stage_bytes, _MOST_STAGES)
    macros = {
        "DIM": head_dim,
        "GROUP": group,
        "RANKS": cluster_blocks,
        "WARPS": _WARPS,
        "STAGES": num_stages,
        "IS_HALF": int(is_half),
    }
    return CudaKernel(
        _FILE,
        macros,
        device,
        num_threads=_WARPS * 32,
        cluster=cluster_blocks,
        shared_bytes=merged_bytes + num_stages * stage_bytes,
    )
