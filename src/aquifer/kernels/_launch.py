"""Launches that are repeated with other addresses, for the layers of a model.

A step that reads prompts launches some kernels for each layer, which differ in addresses alone.
Through Triton's launcher that takes the host 9 to 14 us each, more than some of them run. So the
parameters of a repeated launch stay where the driver reads them, and a repetition changes the
addresses among them: 6 to 7 us.

Where a kernel's parameters lie in a way that is not known here, Triton's launcher is used.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from aquifer.kernels._tensor_map import TensorMap

_INTEGERS = {"i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"}
"""Triton's names of parameters that are read as integers, and "*" begins that of an address."""

_MOST_PARAMETERS = 256
_WARP = 32


class LaunchError(RuntimeError):
    """The driver refused a launch."""


class Repeatable(Protocol):
    """A launch whose arguments can be changed."""

    def put(self, index: int, address: int) -> None:
        """Replace the argument at this index by an address, or the address in a tensor map."""

    def run(self, stream: int) -> None:
        """Launch it on a stream, by its handle."""


class ThroughLauncher:
    """A launch by Triton's launcher, on the current stream.

    Args:
        launcher: launches the kernel with arguments.
        values: the arguments, addresses in place of tensors.
    """

    def __init__(self, launcher: Callable[..., object], values: list[Any]) -> None:
        self._launcher = launcher
        self._values = values

    def put(self, index: int, address: int) -> None:
        """See `Repeatable.put`."""
        self._values[index] = address

    def run(self, stream: int) -> None:
        """See `Repeatable.run`."""
        self._launcher(*self._values)


class Blocks(NamedTuple):
    """What all launches of a kernel have in common."""

    num_threads: int
    shared_bytes: int
    cluster: int = 1  # blocks that are neighbours in the grid's first dimension
    overlaps: bool = False  # see `_triton.py`


class LoadedKernel:
    """A kernel that the driver has loaded, for one thread.

    Args:
        function: its handle.
        blocks: what all launches have in common.
    """

    def __init__(self, function: Any, blocks: Blocks) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._function = function
        self._config = _config(blocks)
        self._grid: tuple[int, int, int] | None = None
        self._stream = 0

    def launch(self, grid: tuple[int, int, int], stream: int, parameters: int) -> None:
        """Launch it.

        Args:
            grid: number of blocks.
            stream: a stream's handle.
            parameters: address of the addresses of the parameters.

        Raises:
            LaunchError: the driver refused.
        """
        config = self._config
        if grid != self._grid:
            config.gridDimX, config.gridDimY, config.gridDimZ = self._grid = grid
        if stream != self._stream:
            config.hStream = self._driver.CUstream(stream)
            self._stream = stream
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, parameters, 0)
        if int(status):
            raise LaunchError(f"cuLaunchKernelEx: {status}")


class DirectLaunch:
    """A launch by the driver.

    Args:
        kernel: the kernel.
        grid: number of blocks, in one to three dimensions.
        parameters: the parameters, each as the integer that has their bytes, or a tensor map of
            this launch alone.
        places: the parameter of each argument; None for an argument that is compiled in.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, ...],
        parameters: Sequence[int | TensorMap],
        places: Sequence[int | None],
    ) -> None:
        self._kernel = kernel
        self._grid = _three(grid)
        self._maps = {
            place: value for place, value in enumerate(parameters) if isinstance(value, TensorMap)
        }
        self._parameters = (ctypes.c_uint64 * len(parameters))(
            *(0 if isinstance(value, TensorMap) else value for value in parameters)
        )
        first = ctypes.addressof(self._parameters)
        addresses = [*range(first, first + 8 * len(parameters), 8)]
        for place, map_ in self._maps.items():
            addresses[place] = map_.pointer
        self._pointers = (ctypes.c_void_p * len(parameters))(*addresses)
        self._pointer = ctypes.addressof(self._pointers)
        self._places = places

    def put(self, index: int, address: int) -> None:
        """See `Repeatable.put`; nothing where the argument is compiled in."""
        place = self._places[index]
        if place in self._maps:
            self._maps[place].move(address)
        elif place is not None:
            self._parameters[place] = address

    def run(self, stream: int) -> None:
        """See `Repeatable.run`; without blocks, nothing is launched.

        Raises:
            LaunchError: the driver refused.
        """
        if all(self._grid):
            self._kernel.launch(self._grid, stream, self._pointer)


def repeatable(compiled: Any, grid: tuple[int, ...], values: list[Any]) -> Repeatable:
    """The launch of a kernel that has been launched before.

    Args:
        compiled: what `kernel[grid](...)` returned: Triton's kernel, or a `_cuda.CudaKernel`.
        grid: number of programs.
        values: all of the kernel's arguments, addresses in place of tensors; tensor maps are kept.
    """
    prepared = getattr(compiled, "prepared", None)
    if prepared is not None:
        launch: Repeatable = prepared(grid, values)
        return launch
    layout = _layout_of(compiled)
    if layout is None:
        return ThroughLauncher(compiled[_three(grid)], values)
    parameters = [0] * layout.num_parameters
    for place, kind, value in zip(layout.places, layout.kinds, values, strict=True):
        if place is not None:
            parameters[place] = bits(value, is_float=kind == "fp32")
    kernel = _kernel_of(compiled, threading.get_ident())
    return DirectLaunch(kernel, grid, parameters, layout.places)


def bits(value: float, *, is_float: bool) -> int:
    """The integer that has the bytes of a parameter: of a number of 32 bits, or of an integer."""
    if is_float:
        (number,) = struct.unpack("<I", struct.pack("<f", value))
        return int(number)
    return int(value) & 0xFFFF_FFFF_FFFF_FFFF


class _Layout(NamedTuple):
    """Where the parameters of one of Triton's kernels lie."""

    places: tuple[int | None, ...]  # by argument
    kinds: tuple[str, ...]  # likewise, Triton's names
    num_parameters: int  # the last ones are addresses of memory that the kernel does not use


@lru_cache(maxsize=1024)
def _kernel_of(compiled: Any, _thread: int) -> LoadedKernel:
    """A kernel that Triton has loaded, for a thread."""
    metadata = compiled.metadata
    blocks = Blocks(_WARP * metadata.num_warps, metadata.shared, overlaps=bool(metadata.launch_pdl))
    return LoadedKernel(compiled.function, blocks)


@lru_cache(maxsize=1024)
def _layout_of(compiled: Any) -> _Layout | None:
    """The parameters of a kernel that Triton has loaded; None if they are not as expected.

    They are the arguments that are not compiled in, and then addresses of scratch memory, which a
    kernel may need. The driver says how many there are, and how long.
    """
    try:
        kinds = tuple(map(str, compiled.src.signature.values()))
        metadata = compiled.metadata
        needs_more = (
            metadata.num_ctas != 1
            or metadata.launch_cooperative_grid
            or metadata.global_scratch_size
            or metadata.profile_scratch_size
        )
        sizes = _parameter_bytes(compiled.function)
    except (AttributeError, ImportError):
        return None
    if needs_more or sizes is None:
        return None
    places: list[int | None] = []
    own_bytes: list[int] = []
    for kind in kinds:
        if kind == "constexpr":
            places.append(None)
            continue
        if kind.startswith("*"):
            num_bytes = 8
        elif kind == "fp32":
            num_bytes = 4
        elif kind in _INTEGERS:
            num_bytes = max(int(kind[1:]) // 8, 1)
        else:
            return None
        places.append(len(own_bytes))
        own_bytes.append(num_bytes)
    scratch_bytes = sizes[len(own_bytes) :]
    if sizes[: len(own_bytes)] != own_bytes or any(size != 8 for size in scratch_bytes):
        return None
    return _Layout(tuple(places), kinds, len(sizes))


def _parameter_bytes(function: Any) -> list[int] | None:
    """The bytes of each of a kernel's parameters; None where the driver does not tell."""
    from cuda.bindings import driver

    found: list[int] = []
    while len(found) < _MOST_PARAMETERS:
        status, _, num_bytes = driver.cuFuncGetParamInfo(function, len(found))
        if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE and found:
            return found
        if int(status):
            return None
        found.append(int(num_bytes))
    return None


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def _config(blocks: Blocks) -> Any:
    """The driver's description of launches, without grid and stream."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = blocks.num_threads, 1, 1
    config.sharedMemBytes = blocks.shared_bytes
    kinds = driver.CUlaunchAttributeID
    attributes = []
    if blocks.cluster != 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = driver.CUlaunchAttributeValue()
        size.clusterDim.x, size.clusterDim.y, size.clusterDim.z = blocks.cluster, 1, 1
        cluster.value = size
        attributes.append(cluster)
    if blocks.overlaps:
        early = driver.CUlaunchAttribute()
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        allowed = driver.CUlaunchAttributeValue()
        allowed.programmaticStreamSerializationAllowed = 1
        early.value = allowed
        attributes.append(early)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
