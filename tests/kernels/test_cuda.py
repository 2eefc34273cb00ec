"""Kernels in CUDA C++ as far as no GPU is needed: what is compiled, when, and what is kept."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aquifer.kernels import (
    _cuda,
    _triton,
    cluster_attention,
    hopper_linear,
    hopper_prefill,
    skinny_linear,
)
from aquifer.kernels._cuda import CudaError, CudaKernel, has_large_blocks, is_usable
from aquifer.kernels._tensor_map import TensorMap
from aquifer.kernels.prefill_attention import PrefillSpans

FILE = "cluster_attention.cu"


class FakeNvrtc:
    """Compiles a source to nothing of seven bytes, unless an option is `bad`."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.nvrtcVersion = lambda: (0, 13, 0)
        self.nvrtcGetSupportedArchs = lambda: (0, [80, 90])
        self.nvrtcGetProgramLogSize = lambda _: (0, 20)
        self.nvrtcGetProgramLog = lambda _, log: (len(log) - 20,)
        self.nvrtcGetCUBINSize = lambda _: (0, 7)
        self.nvrtcGetCUBIN = lambda _, code: (len(code) - 7,)
        self.nvrtcCreateProgram = lambda source, *_: (0, source)
        self.nvrtcCompileProgram = self.compile

    def compile(self, program: bytes, count: int, options: list[bytes]) -> tuple[int]:
        assert b"__global__" in program
        assert len(options) == count
        self.num_compiled += 1
        return (6 if b"bad" in options else 0,)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    fake = FakeNvrtc()
    bindings = SimpleNamespace(nvrtc=fake)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(_cuda, "kernel_folder", lambda: str(tmp_path / "kernels"))
    return fake


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What torch says of a device; a test may change it."""
    device = SimpleNamespace(capability=(9, 0), shared=_cuda.MOST_SHARED_BYTES)
    monkeypatch.setattr(_cuda, "is_hopper", lambda _: device.capability >= (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device.capability)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(shared_memory_per_block_optin=device.shared),
    )
    has_large_blocks.cache_clear()
    yield device
    has_large_blocks.cache_clear()


def test_devices_that_have_clusters(hopper, nvrtc):
    def answer(**changes: object) -> bool:
        vars(hopper).update(changes)
        has_large_blocks.cache_clear()
        return has_large_blocks(torch.device("cuda", 0))

    assert answer()
    assert not answer(capability=(8, 0))
    assert not answer(capability=(13, 0))  # which this NVRTC does not know
    assert not answer(capability=(9, 0), shared=99 << 10)


def test_a_machine_without_nvrtc_is_told_once(hopper, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with caplog.at_level(logging.WARNING):
        assert not has_large_blocks(torch.device("cuda", 0))
        assert not has_large_blocks(torch.device("cuda", 0))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "some kernels are slower, for want of NVRTC"
    ]


def test_what_was_compiled_is_kept(nvrtc, tmp_path):
    first = _cuda.compiled(FILE, ("one",))
    assert _cuda.compiled(FILE, ("one",)) == first
    assert nvrtc.num_compiled == 1
    _cuda.compiled(FILE, ("other",))
    assert nvrtc.num_compiled == 2
    assert len(list((tmp_path / "kernels").iterdir())) == 2


@pytest.mark.parametrize("length", [0, 20, 38])
def test_a_damaged_file_is_compiled_again(nvrtc, tmp_path, caplog, length: int):
    first = _cuda.compiled(FILE, ())
    (kept,) = (tmp_path / "kernels").iterdir()
    kept.write_bytes(kept.read_bytes()[:length])
    assert _cuda.compiled(FILE, ()) == first
    assert "is damaged" in caplog.text
    assert _cuda.compiled(FILE, ()) == first
    assert nvrtc.num_compiled == 2


def test_a_folder_that_cannot_be_written_is_no_failure(nvrtc, tmp_path, caplog):
    (tmp_path / "kernels").write_text("a file")
    assert len(_cuda.compiled(FILE, ())) == 7
    assert "cannot keep a compiled kernel" in caplog.text


def test_an_error_of_the_compiler(nvrtc, tmp_path):
    with pytest.raises(CudaError, match=f"NVRTC cannot compile {FILE}"):
        _cuda.compiled(FILE, ("bad",))
    assert not (tmp_path / "kernels").exists()


def test_a_source_with_a_kernel_that_cannot_be_compiled_is_used_no_more(
    hopper, nvrtc, monkeypatch, caplog
):
    """So a model starts without it, and is told of once."""
    monkeypatch.setattr(_cuda, "_refused", set())
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    driver = SimpleNamespace(cuModuleLoadData=lambda _: (0, None))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", driver, raising=False)
    nvrtc.nvrtcCompileProgram = lambda *_: (6,)
    device = torch.device("cuda", 0)
    assert is_usable(FILE, device)
    for value in (1, 2):
        macros = {"FAILS": value}
        kernel = CudaKernel(FILE, macros, device, num_threads=32, cluster=1, shared_bytes=0)
        with pytest.raises(CudaError, match=f"NVRTC cannot compile {FILE}"):
            kernel[(1,)](torch.zeros(1))
    assert not is_usable(FILE, device)
    assert is_usable(FILE, torch.device("cuda", 1))
    assert is_usable("hopper_linear.cu", device)
    assert caplog.text.count("some kernels are slower, since one cannot be used") == 1
    rows = torch.zeros(2, 8, 64)
    assert cluster_attention.can_read(rows, rows[:, None], rows[:, None])  # on another device
    monkeypatch.setattr(cluster_attention, "is_usable", lambda file, _: is_usable(file, device))
    assert not cluster_attention.can_read(rows, rows[:, None], rows[:, None])


def test_a_kernel_is_not_launched_where_kernels_are_collected(monkeypatch):
    builds: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(_triton.collected, "builds", builds, raising=False)
    device = torch.device("cuda", 0)
    kernel = CudaKernel(FILE, {"DIM": 64}, device, num_threads=32, cluster=1, shared_bytes=0)
    assert kernel[(1,)](torch.zeros(1)) is None
    assert kernel[(2, 3)](torch.zeros(1)) is None
    assert len(builds) == 1


def test_nothing_is_collected_elsewhere():
    assert not _triton.compile_later("key", lambda: None)


def kinds_of(file: str) -> list[type]:
    """The arguments of a source's kernel: a tensor for each pointer, and so on."""
    source = files("aquifer.kernels").joinpath(file).read_text()
    name = file.removesuffix(".cu")
    (parameters,) = re.findall(rf"__launch_bounds__\(.*\)\n{name}\(([^)]*)\)", source)
    kinds: list[type] = []
    for parameter in parameters.split(","):
        if "*" in parameter:
            kinds.append(torch.Tensor)
        elif "TensorMap" in parameter:
            kinds.append(TensorMap)
        else:
            kinds.append(float if parameter.split()[0] == "float" else int)
    return kinds


def test_the_arguments_of_cluster_attention_are_those_of_its_source(monkeypatch):
    launched: list[Any] = []
    monkeypatch.setattr(cluster_attention, "launch", lambda *launch: launched.append(launch))
    query = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    kv = torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16)
    rows = torch.ones(2, dtype=torch.int64)
    cluster_attention.cluster_attention(
        query, kv, kv, rows, rows, query, torch.zeros(4096), rows.repeat(8), scale=1.0
    )
    ((_, grid, *arguments),) = launched
    assert len(grid) == 2
    assert [type(argument) for argument in arguments] == kinds_of(FILE)


def test_the_arguments_of_the_prefill_kernel_are_those_of_its_source(monkeypatch):
    launched: list[Any] = []
    monkeypatch.setattr(hopper_prefill, "launch", lambda *launch: launched.append(launch))
    monkeypatch.setattr(hopper_prefill, "tensor_map", lambda *_: TensorMap.__new__(TensorMap))
    query = torch.zeros(5, 8, 64, dtype=torch.bfloat16)
    kv = torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16)
    spans = PrefillSpans.of([1], [3], [0, 5], query.device)
    hopper_prefill.hopper_prefill(query, kv, kv, spans, query, scale=1.0)
    ((_, grid, *arguments),) = launched
    assert grid == (1,)
    assert [type(argument) for argument in arguments] == kinds_of("hopper_prefill.cu")


@pytest.mark.parametrize(
    ("module", "product", "num_tokens", "num_blocks"),
    [
        (hopper_linear, hopper_linear.hopper_linear, 40, 4),  # 64 rows each
        (skinny_linear, skinny_linear.skinny_linear, 5, 8),  # four units of eight rows each
    ],
)
def test_the_arguments_of_products_are_those_of_their_sources(
    monkeypatch, module, product, num_tokens, num_blocks
):
    launched: list[Any] = []
    monkeypatch.setattr(module, "launch", lambda *launch: launched.append(launch))
    monkeypatch.setattr(module, "tensor_map", lambda *_: TensorMap.__new__(TensorMap))
    monkeypatch.setattr(module, "count_multiprocessors", lambda _: 8)
    x, weight = torch.zeros(num_tokens, 1024), torch.zeros(256, 1024)
    product(x, weight, torch.zeros(256))
    ((_, grid, *arguments),) = launched
    assert grid == (num_blocks,)
    name = module.__name__.rpartition(".")[2]
    assert [type(argument) for argument in arguments] == kinds_of(f"{name}.cu")


def test_sources_include_what_is_there(nvrtc: FakeNvrtc) -> None:
    """Each header is one of those that the compiler is given."""
    sources = files("aquifer.kernels")
    folder = Path(str(sources))
    for file in {path.name for path in folder.glob("*.cu*")} - {"common.cuh", "token_product.cuh"}:
        included = re.findall(r'#include "(.*)"', sources.joinpath(file).read_text())
        assert included
        for name in included:
            assert sources.joinpath(name).is_file()
    given: list[Any] = []

    def create(source: bytes, *rest: Any) -> tuple[int, bytes]:
        given.extend(rest)
        return 0, source

    nvrtc.nvrtcCreateProgram = create
    _cuda.compiled(FILE, ("--gpu-architecture=sm_90",))
    _, count, headers, names = given
    assert count == len(headers) == len(names)
    assert names == [b"common.cuh", b"hopper.cuh", b"products.cuh", b"token_product.cuh"]
