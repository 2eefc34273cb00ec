"""Products of 2 to 16 tokens with a weight of up to 128 MiB, on Hopper and later.

Such a product takes as long as its weight takes to read, or, if that is small, as long as kernels
take to wait for each other. `skinny_linear.cu` is made for both:

- **A thread** has the hardware copy tiles of the weight (TMA) as far ahead as shared memory has
  room, and begins before the kernel waits for the one that computes the tokens (rules 4 and 5 of
  `_triton.py`). A block has less than half of an SM's shared memory, so that the kernel before it
  and its own are on an SM at once.
- **Rows of the weight** are divided equally among blocks, in units of eight, so that no block waits
  for another. Warps of a block share rows and columns, and add up their sums in shared memory.
- **Tokens** are the side of 16 of a tensor core's product, rows of the weight that of eight.

A gated activation is computed in registers: a warp has a unit of the gate's rows and the one that
it multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from aquifer.kernels._cuda import CudaKernel, has_large_blocks, is_usable
from aquifer.kernels._tensor_map import can_multiply, tensor_map
from aquifer.kernels._triton import count_multiprocessors, launch

MAX_TOKENS = 16
"""Tokens that the kernel has room for."""

_TOKENS = range(2, MAX_TOKENS + 1)
"""Numbers of tokens with which this kernel is faster; measured."""

_MOST_WEIGHT_BYTES = 128 << 20
"""Larger weights are read as fast by `linear.py`'s kernels; measured."""

_WAVE_ROWS = 128
"""Rows of the weight that an SM has at once by `linear.py`'s kernel."""

_LEAST_WAVES_LOST = 1.5
"""Gated products are faster by this kernel where that one takes so many times the waves that its
programs would fill; measured."""

_LEAST_LOAD = 0.7
"""Blocks have tiles of rows in rounds. At least this share of them has one, in the mean."""

_FILE = "skinny_linear.cu"

# As in the kernel.
_UNIT = 8
_CHUNK = 64
_ROW_BYTES = 128
_SLICES = 4
_WARP = 32
_ALIGNED_BYTES = 1024

_MOST_UNITS = 8
_MOST_CHUNKS = 8
_MOST_WARPS = 12
_MOST_SHARES = 4
_MOST_TILE_BYTES = 24 << 10
_SHARED_BYTES = 104 << 10
"""Dynamic shared memory of a block: there is room for two, and for blocks of small kernels."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided among blocks, and in them."""

    units: int  # of eight rows of the weight, of a tile; of the gate's rows, if gated
    chunks: int  # of 64 columns, of a tile
    gated: bool

    @property
    def row_warps(self) -> int:
        """Warps that share the rows of a tile."""
        if self.gated:
            return self.units
        return 1 if self.units % 2 else self.units // 2

    @property
    def shares(self) -> int:
        """Warps that share the columns of a tile, a power of two."""
        most = min(_MOST_WARPS // self.row_warps, _SLICES * self.chunks, _MOST_SHARES)
        return 1 << (max(most, 1).bit_length() - 1)

    @property
    def num_threads(self) -> int:
        """Threads of a block: those that multiply, and two warps that load."""
        return _WARP * (self.row_warps * self.shares + 2)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of the weight and one of tokens."""
        rows = _UNIT * self.units * (2 if self.gated else 1)
        return self.chunks * (rows + MAX_TOKENS) * _ROW_BYTES

    @property
    def num_stages(self) -> int:
        """Such tiles in shared memory."""
        units = self.units * (2 if self.gated else 1)
        sums = (self.shares - 1) * units * _UNIT * MAX_TOKENS
        return (_SHARED_BYTES - _ALIGNED_BYTES - 4 * sums) // self.tile_bytes


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
        len(x) in _TOKENS
        and weight.nbytes <= _MOST_WEIGHT_BYTES
        and has_large_blocks(x.device)
        and can_multiply(x, weight, bias)
        and num_out % _UNIT == 0
        and x.shape[1] % _CHUNK == 0
        and _is_faster(len(weight), count_multiprocessors(x.device), gated=gated)
        and is_usable(_FILE, x.device)
    )


def _is_faster(num_rows: int, multiprocessors: int, *, gated: bool) -> bool:
    """Whether products with a weight of so many rows are, by measurement on an H200."""
    if gated:
        waves = num_rows / (_WAVE_ROWS * multiprocessors)
        return math.ceil(waves) >= _LEAST_WAVES_LOST * waves and waves > 1
    num_tiles = -(-num_rows // (_UNIT * _count_units(num_rows, multiprocessors)))
    num_rounds = -(-num_tiles // multiprocessors)
    return num_tiles >= _LEAST_LOAD * num_rounds * multiprocessors


def _count_units(num_out: int, multiprocessors: int) -> int:
    """Units of eight rows of a tile: as few as there are rounds for."""
    num_units = -(-num_out // _UNIT)
    num_rounds = -(-num_units // (multiprocessors * _MOST_UNITS))
    return -(-num_units // (multiprocessors * num_rounds))


def tiling(num_out: int, num_in: int, multiprocessors: int, *, gated: bool) -> Tiling:
    """How a product is divided.

    Args:
        num_out: columns of the result.
        num_in: columns of the weight.
        multiprocessors: of the device.
        gated: whether the gated activation of the product is wanted.
    """
    of = Tiling(_count_units(num_out, multiprocessors), 1, gated)
    most = min(_MOST_TILE_BYTES // of.tile_bytes, num_in // _CHUNK, _MOST_CHUNKS)
    return replace(of, chunks=1 << (max(most, 1).bit_length() - 1))


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False
) -> torch.Tensor:
    """Compute x @ weight.T + bias, or `silu_mul` of it; see `linear.linear`.

    Pre-condition: `fits`, but for the number of tokens.

    Args:
        x: [tokens, in], 1 to `MAX_TOKENS` tokens.
        weight: [out, in]; [2 out, in] if `gated`, gate before up.
        bias: [out], or [2 out] if `gated`; or None.
        gated: whether the gated activation of the product is wanted, rounded as `silu_mul`.

    Returns:
        [tokens, out], contiguous.
    """
    num_tokens, num_in = x.shape
    num_out = len(weight) // (2 if gated else 1)
    multiprocessors = count_multiprocessors(x.device)
    of = tiling(num_out, num_in, multiprocessors, gated=gated)
    num_tiles = -(-num_out // (of.units * _UNIT))
    out = x.new_empty(num_tokens, num_out)
    launch(
        _kernel(of, x.dtype == torch.float16, x.device),
        (min(num_tiles, multiprocessors),),
        tensor_map(_by_chunks(weight), (of.chunks, of.units * _UNIT, _CHUNK)),
        # Rows that there are none of would take hardware longer than others.
        tensor_map(_by_chunks(x), (of.chunks, num_tokens, _CHUNK)),
        0 if bias is None else bias,
        out,
        num_tokens,
        num_out,
        num_in // _CHUNK,
    )
    return out


def _by_chunks(rows: torch.Tensor) -> torch.Tensor:
    """[rows, columns] as [chunks, rows, columns of a chunk]."""
    return rows.view(len(rows), -1, _CHUNK).transpose(0, 1)


@cache
def _kernel(of: Tiling, is_half: bool, device: torch.device) -> CudaKernel:
    macros = {
        "UNITS": of.units,
        "CHUNKS": of.chunks,
        "ROW_WARPS": of.row_warps,
        "SHARES": of.shares,
        "STAGES": of.num_stages,
        "IS_GATED": int(of.gated),
        "IS_HALF": int(is_half),
    }
    return CudaKernel(
        _FILE,
        macros,
        device,
        num_threads=of.num_threads,
        cluster=1,
        shared_bytes=_SHARED_BYTES,
    )
