"""Kernels in CUDA C++ on the CPU: compiled by the host's C++ compiler, and run thread by thread.

A source is changed in two places. Each asm statement becomes a call of a function that does what
its instructions do (`ptx.h`), and each variable in shared memory one of the block that runs
(`emulation.h`, which also says what is found so).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch

from aquifer.kernels._tensor_map import is_aligned

COMPILER = shutil.which("c++")
SOURCES = Path(str(files("aquifer.kernels")))
_FOLDER = Path(__file__).parent
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fpermissive", "-w", "-Wno-psabi")


class EmulationError(RuntimeError):
    """A kernel has done what it must not, or waits for ever."""


class EmulatedKernel:
    """Takes the place of `CudaKernel`, for tensors on the CPU. Same arguments, and:

    Args:
        folder: where to compile.
        sources: where the source is.
        together: whether all blocks run beside each other, since they wait for each other.
        late: whether copies and matrix products are made as late as they may be, not at once.
    """

    def __init__(
        self,
        file: str,
        macros: Mapping[str, int],
        _device: torch.device,
        *,
        num_threads: int,
        cluster: int,
        shared_bytes: int,
        of_this_alone: bool = False,
        folder: Path,
        sources: Path = SOURCES,
        together: bool = False,
        late: bool = False,
    ) -> None:
        self._run = _compiled(sources / file, tuple(macros.items()), folder)
        self._launch = num_threads, cluster, shared_bytes, together, late

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., EmulatedKernel]:
        """What runs the kernel with this grid: a function of its arguments.

        Raises:
            EmulationError: see there.
        """
        sizes = (ctypes.c_uint32 * 3)(*grid, *[1] * (3 - len(grid)))

        def run(*arguments: Any) -> EmulatedKernel:
            values = (ctypes.c_uint64 * len(arguments))(*map(_bits, arguments))
            failure = self._run(sizes, *self._launch, values)
            if failure is not None:
                raise EmulationError(failure.decode())
            return self

        return run


class EmulatedMap:
    """Takes the place of `TensorMap`: `Map` of `ptx.h`."""

    def __init__(self, tensor: torch.Tensor, tile: tuple[int, ...]) -> None:
        assert is_aligned(tensor)
        self.tensor = tensor
        strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
        sizes = [(tensor.shape, 5), (strides, 4), (tile, 5)]
        padded = [[*reversed(each), *[0] * (count - len(each))] for each, count in sizes]
        words = [tensor.data_ptr(), tensor.dim(), *chain.from_iterable(padded)]
        self.words = (ctypes.c_uint64 * len(words))(*words)


def _bits(argument: Any) -> int:
    """An argument as 64 bits."""
    if isinstance(argument, EmulatedMap):
        return ctypes.addressof(argument.words)
    if isinstance(argument, torch.Tensor):
        assert not argument.is_cuda
        return argument.data_ptr()
    if isinstance(argument, float):
        return ctypes.c_uint32.from_buffer(ctypes.c_float(argument)).value
    return int(argument)


@functools.cache
def _compiled(
    source: Path, macros: tuple[tuple[str, int], ...], folder: Path
) -> Callable[..., bytes | None]:
    """A function that runs a source's kernel, and returns why it failed, or None."""
    assert COMPILER is not None
    defined = [f"-D{name}={value}" for name, value in macros]
    expanded = subprocess.run(
        [COMPILER, "-E", "-P", "-x", "c++", *defined, str(source)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    translated = translate(expanded) + _entry(source.stem, expanded)
    key = hashlib.sha256(f"{translated}{macros}".encode()).hexdigest()[:32]
    library = folder / f"{key}.so"
    if not library.exists():  # another process may have made it
        unit, own = (folder / f"{key}-{os.getpid()}.{kind}" for kind in ("cc", "so"))
        unit.write_text(translated)
        command = [COMPILER, *_OPTIONS, *defined, f"-I{_FOLDER}", str(unit), "-o", str(own)]
        subprocess.run(command, check=True)
        own.replace(library)
    run: Any = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return cast(Callable[..., bytes | None], run)


def translate(source: str) -> str:
    """A source as the host's compiler takes it."""
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?char (\w+)\[\];",
        r"char* \1 = emulated::dynamic_shared();",
        source,
    )
    lines = source.split("\n")
    for number, line in enumerate(lines):
        lines[number] = re.sub(
            r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)((?:\[[^]]+\])*);",
            rf"auto& \2 = emulated::shared_variable<\1\3>({number});",
            line,
        )
    return '#include "ptx.h"\n' + _without_asm("\n".join(lines))


def _without_asm(source: str) -> str:
    """The source with a call for each asm statement."""
    parts: list[str] = []
    end = 0
    for found in re.finditer(r"\basm\s*(?:volatile\s*)?\(", source):
        if found.start() < end:
            continue
        parts.append(source[end : found.start()])
        last = _closing(source, found.end() - 1)
        parts.append(_call(source[found.end() : last]))
        end = last + 1
    return "".join([*parts, source[end:]])


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis is closed that is opened at a position."""
    depth = 0
    is_quoted = False
    for position in range(opening, len(text)):
        if text[position] == '"' and text[position - 1] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += {"(": 1, ")": -1}.get(text[position], 0)
            if not depth:
                return position
    raise ValueError("a parenthesis is not closed")


def _call(statement: str) -> str:
    """The call for the body of an asm statement."""
    literals = re.match(r'(?:\s*"(?:[^"\\]|\\.)*")*', statement)
    assert literals is not None
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals[0]))
    operands: list[str] = []
    position = literals.end()
    while found := re.compile(r'"[=+]?\w"\s*\(').search(statement, position):
        position = _closing(statement, found.end() - 1)
        operands.append(statement[found.end() : position])
    names = [_instruction_name(each) for each in re.split(r"\\n|;", code)]
    name = "__".join(filter(None, names))
    if not name:
        return "(void)0"
    # One function for all numbers of columns.
    if product := re.search(r"wgmma_mma_async_sync_aligned_m64n(\d+)k16", name):
        factors = "memory" if name.startswith("setp") else "registers"
        name = f"wgmma_of_{factors}<{product[1]}>"
    return f"ptx::{name}({', '.join(operands)})"


def _instruction_name(text: str) -> str:
    """The name of an instruction's function; none for a label, a register or a brace."""
    text = text.strip(" {}")
    text = re.sub(r"^@\w+ ", "", text)
    if not text or text.startswith(".reg") or text.endswith(":"):
        return ""
    name = re.sub(r"\.b?f16(?=\.|x2|$)", "", text.split()[0])
    return re.sub(r"\W", "_", name)


def _entry(name: str, source: str) -> str:
    """A function that runs the kernel with its arguments as 64 bits each."""
    (parameters,) = re.findall(rf"\b{name}\(([^)]*)\)\s*\{{", source)
    values: list[str] = []
    for number, parameter in enumerate(parameters.split(",")):
        kind = re.sub(r"\s*\b\w+$", "", parameter.replace("__grid_constant__", "").strip())
        values.append(f"argument<{kind}>({number})")
    return f"""
static const uint64_t* arguments;
template <class T> T argument(int number) {{
  T value;
  // A map is given by its address.
  const bool is_map = sizeof value > sizeof *arguments;
  memcpy(&value, is_map ? (const void*)arguments[number] : arguments + number, sizeof value);
  return value;
}}
static void body() {{ {name}({", ".join(values)}); }}
extern "C" const char* run(const uint32_t* grid, int num_threads, int cluster, int shared_bytes,
                           bool together, bool late, const uint64_t* values) {{
  arguments = values;
  const dim3 of = {{grid[0], grid[1], grid[2]}};
  return emulated::run_grid(body, of, num_threads, cluster, shared_bytes, together, late);
}}
"""
