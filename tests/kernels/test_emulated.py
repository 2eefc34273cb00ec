"""Kernels in CUDA C++ on the CPU (`emulation/emulated_kernel.py`), against their references in
float64. KV is NaN if unwritten, and so is shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.kernels.emulation.emulated_kernel import (
    COMPILER,
    SOURCES,
    EmulatedKernel,
    EmulatedMap,
    EmulationError,
)
from tests.kernels.interpreter import interpret
from tests.kernels.test_cluster_attention import make as make_decode
from tests.kernels.test_decode_attention import check as check_decode
from tests.kernels.test_hopper_prefill import check_with as check_prefill
from tests.kernels.test_hopper_prefill import make as make_prefill
from tests.kernels.test_linear import Factors, error

from aquifer.kernels import cluster_attention, hopper_linear, hopper_prefill, skinny_linear
from aquifer.kernels.decode_attention import default_config
from aquifer.kernels.hopper_linear import Tiling

CPU = torch.device("cpu")

Emulate = Callable[..., None]
"""Has a module's kernel emulated, on a device with so many multiprocessors."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled, each once for all processes of the tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(params=["at once", "late"])
def emulate(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Emulate:
    """What has kernels emulated. Their copies and matrix products are made at once, or late."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    pytest.importorskip("triton")
    interpret(monkeypatch)  # what comes before and after the kernel is in Triton

    def emulate(module: ModuleType, multiprocessors: int, sources: Path = SOURCES) -> None:
        # Blocks of the product wait for each other.
        together = module is hopper_linear
        kernel = partial(
            EmulatedKernel,
            folder=folder,
            sources=sources,
            together=together,
            late=request.param == "late",
        )
        changes = {
            "CudaKernel": kernel,
            "tensor_map": EmulatedMap,
            "count_multiprocessors": lambda _: multiprocessors,
            "has_warpgroup_products": lambda _: True,
        }
        for name, value in changes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        for name in ("_kernel", "_counters"):  # not those of other tests
            if hasattr(module, name):
                monkeypatch.setattr(module, name, cache(getattr(module, name).__wrapped__))

    return emulate


# ---- decode attention by clusters


def attend(lengths: list[int], multiprocessors: int = 8, **shape) -> None:
    shape = {"num_heads": 8, "num_kv_heads": 2, "key_dim": 64, **shape}
    case = make_decode(CPU, lengths, **shape)
    config = default_config(
        len(lengths),
        shape["num_heads"],
        shape["num_kv_heads"],
        shape["key_dim"],
        case.values.dtype,
        multiprocessors,
        paged=False,
    )
    # The workspace has room for the partial results of 132 multiprocessors.
    check_decode(case, replace(config, by_clusters=True, num_shares=64))


@pytest.mark.parametrize(
    "lengths",
    [
        [577],
        [15, 16, 17, 255, 1, 31],
        [300, 100, 128, 299],
        [900, *[40] * 7],
        [0, 70, 0, 300],
        [0, 0],
    ],
    ids=str,
)
def test_decode_attention(emulate: Emulate, lengths: list[int]) -> None:
    emulate(cluster_attention, 8)
    attend(lengths)


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(1, 128, torch.bfloat16), (7, 64, torch.float16), (8, 128, torch.bfloat16)],
)
def test_heads_of_decode_attention(
    emulate: Emulate, group: int, dim: int, dtype: torch.dtype
) -> None:
    emulate(cluster_attention, 8)
    attend([300, 12, 0, 77], num_heads=2 * group, key_dim=dim, dtype=dtype)


# ---- prefill attention


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 1, 80), torch.float16), ((2, 2, 128), torch.bfloat16)],
)
def test_prefill_attention(
    emulate: Emulate, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    emulate(hopper_prefill, 3)
    for chunks in ([(0, 70)], [(200, 1)], [(0, 17), (3, 1), (130, 30), (120, 12)]):
        case = make_prefill(CPU, chunks, shape, max_tokens=300, dtype=dtype)
        check_prefill(case, scale=shape[2] ** -0.5)


@pytest.mark.parametrize("options", [{"num_splits": 2}, {"window_tokens": 100}], ids=str)
def test_parts_of_the_keys(emulate: Emulate, options: dict[str, int]) -> None:
    emulate(hopper_prefill, 3)
    chunks = [(0, 17), (600, 1), (1000, 60)]
    check_prefill(make_prefill(CPU, chunks, (4, 1, 64), max_tokens=1100), **options)


# ---- products


def multiply(
    num_tokens: int,
    num_out: int,
    num_in: int,
    product: Callable[..., torch.Tensor],
    *,
    gated: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    shape = num_tokens, num_out, num_in
    x, weight, bias, exact = Factors.make(CPU, shape, dtype, gated=gated)
    result = product(x, weight, bias, gated=gated)
    assert error(result, exact) < {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]


@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_in", "how"),
    [
        (1, 8, 64, None),
        (100, 200, 136, None),
        (129, 904, 72, None),  # in several rounds
        (70, 128, 256, Tiling(64, 128, 2)),
        (200, 72, 64, Tiling(64, 224)),
        (33, 64, 512, Tiling(64, 64, 4)),
        (256, 128, 200, Tiling(128, 256, 2)),
        # Shares of the tokens that are not equal, and fewer than there are blocks.
        (150, 72, 256, Tiling(64, 160, 2)),
        (200, 120, 256, Tiling(128, 208, 4)),
        (70, 56, 256, Tiling(64, 96, 4)),
    ],
)
def test_products(
    emulate: Emulate, num_tokens: int, num_out: int, num_in: int, how: Tiling | None
) -> None:
    emulate(hopper_linear, 6)
    product = partial(hopper_linear.hopper_linear, how=how)
    multiply(num_tokens, num_out, num_in, product, gated=False)


@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_in", "dtype"),
    [
        (50, 104, 72, torch.bfloat16),
        (140, 40, 136, torch.bfloat16),
        (199, 200, 64, torch.bfloat16),
        (250, 512, 64, torch.float16),
    ],
)
def test_gated_products(
    emulate: Emulate, num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    emulate(hopper_linear, 6)
    product = hopper_linear.hopper_linear
    multiply(num_tokens, num_out, num_in, product, gated=True, dtype=dtype)


@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_in"),
    [(1, 8, 64), (2, 24, 1024), (8, 200, 192), (15, 904, 64), (9, 120, 320)],
)
@pytest.mark.parametrize("gated", [False, True], ids=["product", "gated"])
def test_skinny_products(
    emulate: Emulate, num_tokens: int, num_out: int, num_in: int, gated: bool
) -> None:
    emulate(skinny_linear, 6)
    dtype = torch.float16 if num_tokens == 8 else torch.bfloat16
    product = skinny_linear.skinny_linear
    multiply(num_tokens, num_out, num_in, product, gated=gated, dtype=dtype)


# ---- that errors are found


def decode() -> None:
    attend([300, 12])


def prefill() -> None:
    chunks = [(0, 5), (130, 20), (140, 9), (200, 3)]
    check_prefill(make_prefill(CPU, chunks, (2, 2, 64), max_tokens=300))


def product() -> None:
    how = Tiling(64, 128, 2)
    multiply(70, 128, 2048, partial(hopper_linear.hopper_linear, how=how), gated=False)


def skinny() -> None:
    multiply(7, 64, 512, skinny_linear.skinny_linear, gated=False)


NOW, LATE = "at once", "late"
WRONG = AssertionError
STOP = EmulationError
EITHER = AssertionError, EmulationError


@pytest.mark.parametrize(
    ("emulate", "module", "run", "before", "after", "error", "message"),
    [
        # Indices and layouts.
        (NOW, cluster_attention, decode, "(lane & 8) * 2;", "(lane & 8) * 4;", WRONG, None),
        (NOW, hopper_prefill, prefill, "ws = item.limit", "ws = 1 + item.limit", WRONG, None),
        (NOW, hopper_linear, product, "16 * 8 + lane % 8", "8 * 4 + lane % 8", WRONG, None),
        (NOW, hopper_linear, product, "turn.stage * (TILE_BYTES >> 4)", "0", WRONG, None),
        (NOW, skinny_linear, skinny, "column + weight_half", "column", WRONG, None),
        (NOW, skinny_linear, skinny, "* SUMS + i) * 32", "* SUMS + i) * 64", WRONG, None),
        # Waits that are missing.
        (LATE, cluster_attention, decode, '"n"(STAGES - 1)', '"n"(STAGES)', WRONG, None),
        (LATE, hopper_prefill, prefill, "cp.async.wait_all", "cp.async.commit_group", WRONG, None),
        (LATE, hopper_prefill, prefill, "await_products<1>();", "", WRONG, None),
        (LATE, hopper_linear, product, "await_products<1>();", "", WRONG, None),
        (LATE, hopper_linear, product, "await_phase(at.there", "(void)(at.there", EITHER, None),
        # Barriers and addresses.
        (NOW, cluster_attention, decode, "arrive_at_cluster();", "", STOP, "wait for each"),
        (NOW, hopper_prefill, prefill, "release(at.k", "(void)(at.k", STOP, "wait for each"),
        (NOW, hopper_linear, product, "== 0) arrive(read)", "> 31) arrive(read)", STOP, "wait"),
        (NOW, hopper_linear, product, "await_phase(at.read", "(void)(at.read", STOP, "more"),
        (NOW, hopper_linear, product, "tiles + STAGES * ", "tiles + 64 * ", STOP, "outside"),
        (NOW, hopper_linear, product, "1023) / 1024 * 1024", "127) / 128 * 128 + 128", STOP, "fit"),
    ],
    indirect=["emulate"],
)  # fmt: skip
def test_a_wrong_kernel_is_found(
    emulate: Emulate,
    tmp_path: Path,
    module: ModuleType,
    run: Callable[[], None],
    before: str,
    after: str,
    error: type[Exception] | tuple[type[Exception], ...],
    message: str | None,
) -> None:
    emulate(module, 4, _changed(tmp_path, module, before, after))
    with pytest.raises(error, match=message):
        run()


def _changed(folder: Path, module: ModuleType, before: str, after: str) -> Path:
    """The sources, with a change in that of a module or in what it includes."""
    name = module.__name__.rpartition(".")[2] + ".cu"
    is_changed = False
    for source in (SOURCES / name, *SOURCES.glob("*.cuh")):
        text = source.read_text()
        is_changed |= before in text
        (folder / source.name).write_text(text.replace(before, after))
    assert is_changed
    return folder
