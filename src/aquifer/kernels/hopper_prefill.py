"""Prefill attention on Hopper, over contiguous KV, at two thirds of the rate of its tensor cores.

`hopper_prefill.cu` has what Triton has no means for, on these GPUs: warps of a block that do
different things (FlashAttention-3, Shah et al. 2024, sections 3.1 and 3.2). A block has 12 warps:

- **Eight** in two warpgroups compute: 64 rows of queries each, in tiles of 128 keys. Products of a
  warpgroup run by themselves (WGMMA), with tiles in shared memory: while one warpgroup computes
  the weights of its scores, the products of the other one run. In one warpgroup, the scores of a
  tile are computed before the values of the tile before it are summed up.
- **One** has the hardware copy tiles of keys and values (TMA), up to two of each ahead.
- **Two** copy queries, and the last tile of a sequence: behind its end, pages may not be mapped.
- **One** looks up what comes next.

Each multiprocessor has one block, which takes one entry of the list of work after another
(`prefill_work.py`). So the loads that an entry begins with run beside the products of the one
before it. Where that leaves no multiprocessor idle, all take entries of one KV head at a time: its
keys and values come out of the L2 cache then. That saves power, which long prompts have as a higher
clock. Rows are arranged as in `prefill_attention.py`: heads that share a KV head are neighbours.
Sums are multiplied only where a row's maximum grows by more than 2^8.

cuDNN's attention is slower for all shapes measured, has a plan for each, which takes tens of
milliseconds to build, and has no causal mask for a chunk after a prefix. So it is not used;
benchmarks/gpu/prefill_attention.py measures both, and benchmarks/gpu/README.md has what was tried.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from aquifer.kernels._cuda import CudaKernel, has_warpgroup_products, is_usable
from aquifer.kernels._tensor_map import is_aligned, tensor_map
from aquifer.kernels._triton import MIN_DOT, count_multiprocessors, launch
from aquifer.kernels.prefill_merge import DeviceSpans, make_partials, merge_partials
from aquifer.kernels.prefill_work import MIN_SPLIT_KEYS, Tiling

_DTYPES = torch.bfloat16, torch.float16
_MOST_DIM = 128

_FILE = "hopper_prefill.cu"

# As in the kernel.
_BLOCK_ROWS = 128
_TILE_KEYS = 128
_TILE_DIM = 64
_NUM_STAGES = 2
_NUM_THREADS = 384
_ALIGNED_BYTES = 1024

_LOG2_E = math.log2(math.e)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether contiguous KV of these shapes can be attended to so.

    Args:
        query: [tokens, heads, dim].
        keys: [slots, max_tokens, kv_heads, dim].
        values: likewise.
        out: [tokens, heads, dim].
    """
    head_dim = query.shape[2]
    return (
        query.dtype in _DTYPES
        and query.dtype == keys.dtype == values.dtype == out.dtype
        and head_dim <= _MOST_DIM
        and head_dim == keys.shape[3] == values.shape[3]
        and has_warpgroup_products(query.device)
        and keys.stride() == values.stride()
        and all(map(is_aligned, (query, keys, values, out)))
        and is_usable(_FILE, query.device)
    )


def hopper_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: DeviceSpans,
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None = None,
    num_splits: int | None = None,
) -> None:
    """Attend causally from each chunk to all KV of its sequence.

    Reads no token of a sequence at or after the end of its chunk, nor before its window.
    Pre-condition: `fits`.

    Args:
        query: [tokens, heads, dim].
        keys: [slots, max_tokens, kv_heads, dim].
        values: likewise.
        spans: the chunks.
        out: [tokens, heads, dim]; the rows of the spans are overwritten.
        scale: factor on the dot products, positive.
        window_tokens: attend only to this many latest tokens, the own one included.
        num_splits: programs that share the keys of a query; None for as many as fill the device.
    """
    num_heads, head_dim = query.shape[1:]
    group = num_heads // keys.shape[2]
    heads_per_program = max(n for n in range(1, MIN_DOT + 1) if group % n == 0)
    num_groups = num_heads // heads_per_program
    num_blocks = count_multiprocessors(query.device)
    work = spans.work(
        Tiling(
            block_tokens=_BLOCK_ROWS // heads_per_program,
            num_running=num_blocks,
            num_groups=num_groups,
            least_keys=MIN_SPLIT_KEYS,
            window_tokens=window_tokens,
            num_splits=num_splits,
            has_bands=True,
        )
    )
    partials = make_partials(work, num_groups, _BLOCK_ROWS, out)
    num_entries = len(work.programs)
    is_half = query.dtype == torch.float16
    tile = 1, _TILE_KEYS, 1, _TILE_DIM
    launch(
        _kernel(head_dim, group, heads_per_program, is_half, query.device),
        (min(num_blocks, num_entries * num_groups),),
        tensor_map(keys, tile),
        tensor_map(values, tile),
        query,
        keys,
        values,
        work.programs,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        out,
        partials.sums,
        partials.lse,
        scale * _LOG2_E,
        num_entries,
        num_groups,
        work.band,
        window_tokens or 0,
        query.stride(0),
        query.stride(1),
        keys.stride(0) * keys.itemsize,
        keys.stride(1) * keys.itemsize,
        keys.stride(2) * keys.itemsize,
        out.stride(0),
        out.stride(1),
    )
    merge_partials(work, partials, spans, None, out, heads_per_program=heads_per_program)


@cache
def _kernel(
    head_dim: int, group: int, heads_per_program: int, is_half: bool, device: torch.device
) -> CudaKernel:
    macros = {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "HEADS": heads_per_program,
        "LEAST_KEYS": MIN_SPLIT_KEYS,
        "IS_HALF": int(is_half),
    }
    # Of queries, of results, and of each stage's keys and values.
    num_tiles = 2 + 2 * _NUM_STAGES
    padded_dim = -(-head_dim // _TILE_DIM) * _TILE_DIM
    return CudaKernel(
        _FILE,
        macros,
        device,
        num_threads=_NUM_THREADS,
        cluster=1,
        shared_bytes=_ALIGNED_BYTES + num_tiles * _TILE_KEYS * padded_dim * 2,
        of_this_alone=True,
    )
