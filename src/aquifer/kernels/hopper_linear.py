"""Products of 33 to 256 tokens with a large weight, on Hopper.

Such a product takes about as long to read its weight as to compute, so both have to run all the
time, side by side. `hopper_linear.cu` has what Triton has no means for, on these GPUs:

- **Two threads** have the hardware copy tiles (TMA), one those of the weight and one those of the
  tokens, as far ahead as shared memory has room. Those of the weight are copied before the kernel
  waits for the one that computes the tokens (rules 4 and 5 of `_triton.py`).
- **Two warpgroups** compute (WGMMA). The weight is the left factor, so that its rows fill the
  tensor cores and tokens are the short side. Each has half of a block's 128 rows and all tokens, so
  that it reads little from shared memory; if a block has 64 rows, each has half of the tokens.

A block has all columns of some rows of the weight, or, where rows are few, a share of the columns
(split-K). Blocks that share rows then wait for each other, and each adds up the sums of some of the
tokens, always in the same order. All blocks read the same columns at about the same time, so that
the tokens' tiles are in the L2 cache. With shares of rows and columns that are as equal as possible
(stream-K, Osama et al. 2023) they would not, and take longer.

With a gated activation, one warpgroup has rows of the gate and the other those that they multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from aquifer.kernels._cuda import CudaKernel, has_warpgroup_products, is_usable
from aquifer.kernels._tensor_map import ALIGNMENT_BYTES, can_multiply, tensor_map
from aquifer.kernels._triton import count_multiprocessors, launch
from aquifer.kernels.beside import lane

_LEAST_TOKENS = 33
_MOST_TOKENS, _MOST_TOKENS_OF_FEW_ROWS = 256, 224
"""Numbers of tokens with which this kernel is faster, and if blocks have few rows; measured."""

_MOST_TOKENS_OF_MANY_TILES = 64
"""Up to here it is faster for weights of more rows than all blocks have at once, without a gate."""

_LEAST_LOAD = 0.75
"""Blocks take tiles of rows in rounds. At least this share of them has one, in the mean."""

_LEAST_WEIGHT_BYTES = 24 << 20
"""The kernels for smaller weights are as fast (`linear.py`)."""

_MOST_SPLITS = 8
_LEAST_STEPS = 8
"""Tiles of the columns of a share, at least."""

_LEAST_SHARE = 4608
"""Tiles of the columns times tokens that a block has at least, where columns are divided once more
although nearly all blocks have rows already: to add up the sums costs as much as so many."""

_LEAST_WIDE_TOKENS, _LEAST_WIDE_SHARE = 193, 10240
"""With so many tokens, and if so much of that is left for each, blocks have twice as many rows and
half of the columns: a block then reads the tokens less often."""

_FEW_ROWS, _MANY_ROWS = 64, 128
"""Rows of a block: where all blocks have some at once, and otherwise."""

_FILE = "hopper_linear.cu"

# As in the kernel.
_TILE_COLUMNS = 64
_ROW_BYTES = 128
_NUM_THREADS = 384
_NUM_WARPGROUPS = 2
_STORED_TOKENS = 64
_ALIGNED_BYTES = 1024

_SHARED_BYTES = 210 << 10
"""Dynamic shared memory of a block: it leaves room for blocks of small kernels."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided among blocks, and in them."""

    rows: int  # of the weight, for a block
    tokens: int  # that there is room for
    num_splits: int = 1  # blocks that have a share of the columns each; a power of two

    @property
    def stage_bytes(self) -> int:
        """Bytes of a tile of the weight and one of tokens."""
        return (self.rows + self.tokens) * _ROW_BYTES

    @property
    def num_stages(self) -> int:
        """Such tiles in shared memory."""
        results_bytes = _NUM_WARPGROUPS * _STORED_TOKENS * _ROW_BYTES
        return (_SHARED_BYTES - _ALIGNED_BYTES - results_bytes) // self.stage_bytes


def fits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False
) -> bool:
    """Whether a product is faster so than by `linear.py`'s other ways, and can be computed so.

    Args:
        x: [tokens, in].
        weight: [out, in]; [2 out, in] if `gated`, gate before up.
        bias: [out], or [2 out] if `gated`; or None.
        gated: whether the gated activation of the product is wanted.
    """
    num_out = len(weight) // (2 if gated else 1)
    return (
        _is_faster(len(x), *weight.shape, gated=gated, device=x.device)
        and weight.nbytes >= _LEAST_WEIGHT_BYTES
        and can_multiply(x, weight, bias)
        and num_out * x.itemsize % ALIGNMENT_BYTES == 0
        and is_usable(_FILE, x.device)
    )


def _is_faster(
    num_tokens: int, num_rows: int, num_in: int, *, gated: bool, device: torch.device
) -> bool:
    """Whether products with a large weight of such a shape are, by measurement on an H200."""
    if not _LEAST_TOKENS <= num_tokens <= _MOST_TOKENS or not has_warpgroup_products(device):
        return False
    multiprocessors = count_multiprocessors(device)
    if not gated and -(-num_rows // _FEW_ROWS) <= multiprocessors:
        how = tiling(num_tokens, num_rows, num_in, multiprocessors, gated=False)
        return num_tokens <= _MOST_TOKENS_OF_FEW_ROWS or how.rows == _MANY_ROWS
    num_tiles = -(-num_rows // _MANY_ROWS)
    num_rounds = -(-num_tiles // multiprocessors)
    has_load = num_tiles >= _LEAST_LOAD * num_rounds * multiprocessors
    return has_load and (gated or num_tokens <= _MOST_TOKENS_OF_MANY_TILES)


def tiling(
    num_tokens: int, num_rows: int, num_in: int, multiprocessors: int, *, gated: bool
) -> Tiling:
    """How a product is divided, by measurement (benchmarks/gpu).

    Args:
        num_tokens: up to 256.
        num_rows: rows of the weight.
        num_in: columns of the weight.
        multiprocessors: of the device.
        gated: whether the gated activation of the product is wanted.
    """
    num_tiles = -(-num_rows // _FEW_ROWS)
    if gated or num_tiles > multiprocessors:
        # With few tokens the bytes of the weight count, and not the operations.
        return Tiling(_MANY_ROWS, _room(num_tokens, 32 if num_tokens <= 128 else 16))
    num_steps = -(-num_in // _TILE_COLUMNS)
    most_splits = min(multiprocessors // num_tiles, num_steps // _LEAST_STEPS, _MOST_SPLITS)
    num_splits = 1 << (max(most_splits, 1).bit_length() - 1)
    work = num_steps * num_tokens
    is_wide = num_tokens >= _LEAST_WIDE_TOKENS and work >= 2 * num_splits * _LEAST_WIDE_SHARE
    if is_wide and 2 * num_splits <= _MOST_SPLITS:
        return Tiling(_MANY_ROWS, _room(num_tokens, 16), 2 * num_splits)
    has_load = num_tiles * num_splits >= _LEAST_LOAD * multiprocessors
    if num_splits > 1 and has_load and work < num_splits * _LEAST_SHARE:
        num_splits //= 2
    return Tiling(_FEW_ROWS, _room(num_tokens, 32), num_splits)


def _room(num_tokens: int, unit: int) -> int:
    """The number of tokens that there is room for, a multiple of a unit."""
    return max(-(-num_tokens // unit) * unit, 64)


def hopper_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    how: Tiling | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T + bias, or `silu_mul` of it; see `linear.linear`.

    Pre-condition: `fits`, but for the number of tokens and the size of the weight.

    Args:
        x: [tokens, in], 1 to 256 tokens.
        weight: [out, in]; [2 out, in] if `gated`, gate before up.
        bias: [out], or [2 out] if `gated`; or None.
        gated: whether the gated activation of the product is wanted, rounded as `silu_mul`.
        how: replaces the one chosen by measurement; for benchmarks and tests.

    Returns:
        [tokens, out], contiguous.
    """
    num_tokens, num_in = x.shape
    num_rows = len(weight)
    num_out = num_rows // (2 if gated else 1)
    multiprocessors = count_multiprocessors(x.device)
    of = how or tiling(num_tokens, num_rows, num_in, multiprocessors, gated=gated)
    num_items = -(-num_rows // of.rows) * of.num_splits
    num_blocks = min(multiprocessors, num_items)
    num_steps = -(-num_in // _TILE_COLUMNS)
    # Blocks wait for those that they share rows with, and each has columns.
    assert of.num_splits == 1 or num_blocks == num_items, f"{num_items} blocks do not run at once"
    assert of.num_splits <= num_steps, f"{of.num_splits} shares of {num_in} columns"
    counters = _counters(x.device)[lane()]
    out = x.new_empty(num_tokens, num_out)
    num_partials = num_items * of.rows * of.tokens if of.num_splits > 1 else 0
    partials = x.new_empty(num_partials, dtype=torch.float32)
    weight_rows = of.rows // 2 if gated else of.rows
    launch(
        _kernel(of, gated, x.dtype == torch.float16, x.device),
        (num_blocks,),
        tensor_map(weight, (weight_rows, _TILE_COLUMNS)),
        # Rows that there are none of would take hardware longer than others.
        tensor_map(x, (num_tokens, _TILE_COLUMNS)),
        0 if bias is None else bias,
        out,
        partials,
        counters[of.num_splits.bit_length() - 1],
        num_tokens,
        num_out,
        num_steps,
        num_items,
    )
    return out


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Atomic counters of blocks that have written partial sums, [2, 4, n].

    Those for 1, 2, 4 and 8 splits are multiples of that before and after a kernel. CUDA graphs
    refer to the tensor, so it is never freed. Kernels of each of two branches (`beside.py`) have
    their own.
    """
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "run a product once before it is captured"
    num_counters = _NUM_WARPGROUPS * count_multiprocessors(device)
    return torch.zeros(2, _MOST_SPLITS.bit_length(), num_counters, dtype=torch.int32, device=device)


@cache
def _kernel(of: Tiling, gated: bool, is_half: bool, device: torch.device) -> CudaKernel:
    macros = {
        "ROWS": of.rows,
        "TOKENS": of.tokens,
        "IS_GATED": int(gated),
        "SPLITS": of.num_splits,
        "STAGES": of.num_stages,
        "IS_HALF": int(is_half),
    }
    return CudaKernel(
        _FILE,
        macros,
        device,
        num_threads=_NUM_THREADS,
        cluster=1,
        shared_bytes=_SHARED_BYTES,
        of_this_alone=True,
    )
