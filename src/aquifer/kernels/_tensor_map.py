"""Tensor maps: what the hardware that copies tiles of tensors (TMA, Hopper and later) has to know.

A kernel gets a map as an argument by value, and copies a tile by its indices alone. Tiles that
reach over an edge of the tensor are filled with zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch

_DTYPES = torch.bfloat16, torch.float16
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_DRIVER_VERSION = 12000
"""CUDA's version that the functions are asked for in: the first that has them."""

MOST_STRIDE_BYTES = 1 << 40
"""Strides of a tensor are shorter."""

ALIGNMENT_BYTES = 16
"""Alignment of a tensor's address and of its strides."""


class TensorMapError(RuntimeError):
    """The driver refused a tensor map."""


class TensorMap:
    """A map for tiles of a tensor of 16-bit elements, with rows of 128 bytes that are swizzled.

    Args:
        address: of the tensor.
        shape: its shape.
        strides: its strides, in elements; the last is 1.
        dtype: float16 or bfloat16.
        tile: elements of a tile in each dimension; the last is 64.

    Attributes:
        address: of the tensor.
    """

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        tile: tuple[int, ...],
    ) -> None:
        from cuda.bindings import driver

        assert dtype.itemsize == 2, "other types have other swizzles"
        assert strides[-1] == 1
        kinds = driver.CUtensorMapDataType
        is_half = dtype == torch.float16
        kind = (
            kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
            if is_half
            else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        )
        self._of = shape, strides, dtype, tile
        rank = len(shape)
        stride_bytes = [stride * dtype.itemsize for stride in strides[:-1]]
        self.address = address
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        # Dimensions from the last to the first, as the driver counts them.
        _call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(self.pointer),
            int(kind),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * (rank - 1))(*reversed(stride_bytes)),
            (ctypes.c_uint32 * rank)(*reversed(tile)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
            int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )

    @property
    def pointer(self) -> int:
        """Where the map is, on the host."""
        begin = ctypes.addressof(self._memory)
        return -(-begin // _MAP_ALIGNMENT) * _MAP_ALIGNMENT

    def copy(self) -> TensorMap:
        """A map of the same tensor, which may be moved."""
        return TensorMap(self.address, *self._of)

    def move(self, address: int) -> None:
        """Change the tensor's address; all else stays."""
        if address != self.address:
            pointers = ctypes.c_void_p(self.pointer), ctypes.c_void_p(address)
            _call("cuTensorMapReplaceAddress", *pointers)
            self.address = address


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a map: rows begin at multiples of 16 bytes, and are as long."""
    elements = ALIGNMENT_BYTES // tensor.itemsize
    distances = tensor.shape[-1], *tensor.stride()[:-1]
    return (
        tensor.data_ptr() % ALIGNMENT_BYTES == 0
        and tensor.stride(-1) == 1
        and all(distance % elements == 0 for distance in distances)
        and max(distances) * tensor.itemsize < MOST_STRIDE_BYTES
    )


def can_multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether x @ weight.T + bias can be computed from maps of both: of 16-bit types, and aligned.

    Args:
        x: [tokens, in].
        weight: [out, in].
        bias: [out] or None.
    """
    return (
        x.dtype in _DTYPES
        and x.dtype == weight.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
        and weight.is_contiguous()
        and is_aligned(x)
        and is_aligned(weight)
    )


def tensor_map(tensor: torch.Tensor, tile: tuple[int, ...]) -> TensorMap:
    """The map of a tensor, kept for the next call; not to be moved. See `TensorMap`."""
    return _kept(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tile)


@lru_cache(maxsize=1024)
def _kept(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    tile: tuple[int, ...],
) -> TensorMap:
    return TensorMap(address, shape, strides, dtype, tile)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        TensorMapError: it refused.
    """
    status = _function(name)(*arguments)
    if status:
        raise TensorMapError(f"{name}: error {status} of the driver")


@cache
def _function(name: str) -> Callable[..., int]:
    """A function of the driver. cuda-bindings has them too, but for maps in its own memory, which
    is not aligned as the driver asks for."""
    from cuda.bindings import driver

    status, address, _ = driver.cuGetProcAddress(name.encode(), _DRIVER_VERSION, 0)
    if int(status) or not int(address):
        raise TensorMapError(f"the driver has no {name}: {status}")
    # As many arguments as the call has, each of the type that it is given.
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int)(int(address))
    return function
