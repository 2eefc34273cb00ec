"""Kernels in CUDA C++, compiled by NVRTC at first use, for what Triton cannot express.

That is blocks of a cluster that read each other's shared memory, copies to shared memory that are
begun before a kernel waits for its predecessor, and warps of one block with different work. Such a
kernel keeps the rules of `_triton.py`, is launched with `_triton.launch`, and is compiled with the
others by `compiled_together`. What was compiled is kept on disk, in the folder where Triton keeps
what it compiles.

NVRTC comes with PyTorch for CUDA. Sources are files of this package, which include others of it
alone. Where a kernel cannot be compiled or loaded, such as by a driver older than NVRTC, its
source is used no more (`is_usable`), and the kernels in Triton or cuBLAS serve.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from aquifer.kernels._launch import Blocks, DirectLaunch, LoadedKernel, bits
from aquifer.kernels._tensor_map import TensorMap
from aquifer.kernels._triton import (
    compilations,
    compile_later,
    is_hopper,
    kernel_folder,
    launch_options,
)

_log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size

_HEADERS = ("common.cuh", "hopper.cuh", "products.cuh", "token_product.cuh")
"""What sources may include."""

MOST_SHARED_BYTES = 227 << 10
"""Shared memory that a block may have, on Hopper and on Blackwell's data centre GPUs."""


_refused: set[tuple[str, torch.device]] = set()
"""Sources of which a kernel could not be compiled or loaded for a device."""


class CudaError(RuntimeError):
    """NVRTC or the driver refused a kernel."""


@cache
def has_large_blocks(device: torch.device) -> bool:
    """Whether kernels with clusters, and with blocks that have `MOST_SHARED_BYTES`, can be compiled
    for a device: Hopper and later.

    A warning is logged where that fails only for want of NVRTC.
    """
    if not is_hopper(device):
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    if properties.shared_memory_per_block_optin < MOST_SHARED_BYTES:
        return False
    try:
        from cuda.bindings import nvrtc

        known = _call(nvrtc.nvrtcGetSupportedArchs)
    except (ImportError, RuntimeError) as error:
        _log.warning("some kernels are slower, for want of NVRTC: %s", error)
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor in known


@cache
def has_warpgroup_products(device: torch.device) -> bool:
    """Whether kernels with matrix products of a warpgroup (WGMMA) can be compiled for a device:
    instructions of Hopper alone."""
    return has_large_blocks(device) and torch.cuda.get_device_capability(device) == (9, 0)


def is_usable(file: str, device: torch.device) -> bool:
    """Whether no kernel of a source has failed to be compiled or loaded for a device."""
    return (file, device) not in _refused


class CudaKernel:
    """A function of a source file with macros, on one device.

    Args:
        file: name of the source file in this package.
        macros: macros that it is compiled with.
        device: the device.
        num_threads: threads of a block.
        cluster: blocks of a cluster, neighbours in the grid's first dimension.
        shared_bytes: dynamic shared memory of a block.
        of_this_alone: whether it has instructions of this compute capability alone, and of no later
            one.

    The function's name is that of the file. Pointers and integers are 64 bits wide, other numbers
    are floats, and tensor maps are passed by value.
    """

    def __init__(
        self,
        file: str,
        macros: Mapping[str, int],
        device: torch.device,
        *,
        num_threads: int,
        cluster: int,
        shared_bytes: int,
        of_this_alone: bool = False,
    ) -> None:
        self._file = file
        self._options = tuple(f"--define-macro={name}={value}" for name, value in macros.items())
        self._device = device
        self._num_threads = num_threads
        self._cluster = cluster
        self._shared_bytes = shared_bytes
        self._suffix = "a" if of_this_alone else ""
        self._function: Any = None
        self._building = threading.Lock()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CudaKernel | None]:
        """What launches the kernel with this grid: a function of its arguments.

        It returns the kernel, or None if `compiled_together` is to compile it first.
        """

        def run(*arguments: Any) -> CudaKernel | None:
            if self._function is None:
                if compile_later(f"{self._file} {self._options}", self._build):
                    return None
                self._build()
            values = [
                argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
                for argument in arguments
            ]
            launch = self.prepared(grid, values)
            launch.run(torch.cuda.current_stream(self._device).cuda_stream)
            return self

        return run

    def prepared(self, grid: tuple[int, ...], values: Sequence[float | TensorMap]) -> DirectLaunch:
        """A launch with this grid and these arguments, addresses in place of tensors.

        Pre-condition: it has been launched before.
        """
        overlaps = launch_options(self._device)["overlaps"]
        kernel = self._loaded(overlaps, threading.get_ident())
        parameters = [
            value
            if isinstance(value, TensorMap)
            else bits(value, is_float=isinstance(value, float))
            for value in values
        ]
        return DirectLaunch(kernel, grid, parameters, range(len(parameters)))

    @lru_cache(maxsize=64)  # noqa: B019 - kernels are never dropped
    def _loaded(self, overlaps: bool, _thread: int) -> LoadedKernel:
        blocks = Blocks(self._num_threads, self._shared_bytes, self._cluster, overlaps)
        return LoadedKernel(self._function, blocks)

    def _build(self) -> None:
        """Compile and load the kernel, or load it from disk.

        Raises:
            CudaError: that failed; the source is not usable any more.
        """
        with self._building:
            if self._function is not None:
                return
            compilations.count += 1
            try:
                self._function = self._load()
            except CudaError as error:
                if is_usable(self._file, self._device):
                    _refused.add((self._file, self._device))
                    _log.warning("some kernels are slower, since one cannot be used: %s", error)
                raise

    def _load(self) -> Any:
        """Compile and load the kernel, or load it from disk; returns the driver's function."""
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability(self._device)
        options = (
            f"--gpu-architecture=sm_{major}{minor}{self._suffix}",
            "--std=c++17",
            *self._options,
        )
        with torch.cuda.device(self._device):
            module = _call(driver.cuModuleLoadData, compiled(self._file, options))
        name = self._file.partition(".")[0].encode()
        function = _call(driver.cuModuleGetFunction, module, name)
        shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, function, shared, self._shared_bytes)
        return function


def compiled(file: str, options: tuple[str, ...]) -> bytes:
    """The machine code of a source file, from disk if it was compiled before.

    A file on disk has the SHA-256 of the code and then the code, so that a damaged one is found.
    """
    from cuda.bindings import nvrtc

    source, *headers = _sources(file)
    parts = (source, *headers, *options, *map(str, _call(nvrtc.nvrtcVersion)))
    key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    path = Path(kernel_folder()) / f"aquifer-{key[:32]}.kernel"
    try:
        kept = path.read_bytes()
        digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
        _log.warning("%s is damaged, so its kernel is compiled again", path)
    except OSError:
        pass  # nothing is kept yet
    code = _compile(file, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_bytes(hashlib.sha256(code).digest() + code)
        unfinished.replace(path)
    except OSError as error:
        _log.warning("cannot keep a compiled kernel in %s: %s", path.parent, error)
    return code


def _sources(file: str) -> list[bytes]:
    """A source file, and all that it may include."""
    sources = files("aquifer.kernels")
    return [sources.joinpath(each).read_bytes() for each in (file, *_HEADERS)]


def _compile(file: str, options: tuple[str, ...]) -> bytes:
    """Compile a source.

    Raises:
        CudaError: it has errors.
    """
    from cuda.bindings import nvrtc

    source, *headers = _sources(file)
    names = [name.encode() for name in _HEADERS]
    program = _call(nvrtc.nvrtcCreateProgram, source, file.encode(), len(headers), headers, names)
    encoded = [option.encode() for option in options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(result):
        log = bytes(_call(nvrtc.nvrtcGetProgramLogSize, program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"NVRTC cannot compile {file}:\n{log.decode(errors='replace')}")
    code = bytes(_call(nvrtc.nvrtcGetCUBINSize, program))
    _call(nvrtc.nvrtcGetCUBIN, program, code)
    return code


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call NVRTC or the driver; returns what comes after the status: a value, several, or None.

    Raises:
        CudaError: it refused.
    """
    status, *values = function(*arguments)
    if int(status):
        raise CudaError(f"{function.__name__}: {status}")
    return values[0] if len(values) == 1 else values or None
