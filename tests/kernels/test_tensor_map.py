"""Tensor maps as far as no GPU is needed: what the driver is asked for, and where they are."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aquifer.kernels import _tensor_map
from aquifer.kernels._launch import DirectLaunch
from aquifer.kernels._tensor_map import TensorMap, TensorMapError, tensor_map

HALF, BFLOAT = 6, 9
TILE = (1, 128, 1, 64)


class FakeDriver:
    """Writes a map's address where the map is, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.status = 0
        self.asked: list[tuple[Any, ...]] = []

    def function(self, name: str) -> Callable[..., int]:
        functions: dict[str, Callable[..., int]] = {
            "cuTensorMapEncodeTiled": self.encode,
            "cuTensorMapReplaceAddress": self.replace,
        }
        return functions[name]

    def encode(self, pointer: Any, kind: int, *asked: Any) -> int:
        rank, address = asked[0].value, asked[1].value
        lists = [[*each] for each in asked[2:6]]
        self.asked.append((kind, rank, *lists))
        ctypes.c_uint64.from_address(pointer.value).value = address
        return self.status

    def replace(self, pointer: Any, address: Any) -> int:
        ctypes.c_uint64.from_address(pointer.value).value = address.value
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    kinds = SimpleNamespace(
        CU_TENSOR_MAP_DATA_TYPE_FLOAT16=HALF, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16=BFLOAT
    )
    names = SimpleNamespace(
        CUtensorMapDataType=kinds,
        CUtensorMapInterleave=SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0),
        CUtensorMapSwizzle=SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B=3),
        CUtensorMapL2promotion=SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3),
        CUtensorMapFloatOOBfill=SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0),
    )
    bindings = SimpleNamespace(driver=names)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(_tensor_map, "_function", fake.function)
    monkeypatch.setattr(_tensor_map, "_kept", cache(TensorMap))  # of this test alone
    return fake


def keys(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Keys of the second of three layers, [2 slots, 32 tokens, 4 heads, 128]."""
    return torch.zeros(2, 32, 3, 2, 4, 128, dtype=dtype)[:, :, 1, 0]


def address_in(pointer: int) -> int:
    return ctypes.c_uint64.from_address(pointer).value


def test_dimensions_are_counted_from_the_last(driver: FakeDriver) -> None:
    tensor = keys()
    found = tensor_map(tensor, TILE)
    token_bytes = 3 * 2 * 4 * 128 * 2
    assert driver.asked == [
        (
            BFLOAT,
            4,
            [128, 4, 32, 2],
            [256, token_bytes, 32 * token_bytes],
            [64, 1, 128, 1],
            [1, 1, 1, 1],
        )
    ]
    assert found.pointer % 64 == 0
    assert address_in(found.pointer) == found.address == tensor.data_ptr()


def test_equal_tensors_at_one_address_have_one_map(driver: FakeDriver) -> None:
    tensor = keys(torch.float16)
    first = tensor_map(tensor, TILE)
    assert tensor_map(tensor.view_as(tensor), TILE) is first
    assert tensor_map(tensor[:, :16], TILE) is not first
    assert tensor_map(tensor.view(torch.bfloat16), TILE) is not first
    assert [kind for kind, *_ in driver.asked] == [HALF, HALF, BFLOAT]


def test_a_launch_moves_its_own_map(driver: FakeDriver) -> None:
    tensor = keys()
    kept = tensor_map(tensor, TILE)
    own = kept.copy()
    launched: list[tuple[int, int]] = []

    class Kernel:
        def launch(self, _grid: object, _stream: int, parameters: int) -> None:
            pointers = (ctypes.c_uint64 * 2).from_address(parameters)
            launched.append((address_in(pointers[0]), address_in(pointers[1])))

    launch = DirectLaunch(Kernel(), (1,), [own, 7], [0, 1])  # type: ignore[arg-type]
    launch.run(0)
    launch.put(0, 4096)
    launch.put(1, 8)
    launch.run(0)
    assert launched == [(tensor.data_ptr(), 7), (4096, 8)]
    assert own.address == 4096
    assert address_in(kept.pointer) == kept.address == tensor.data_ptr()


def test_what_the_driver_refuses_is_told(driver: FakeDriver) -> None:
    driver.status = 1
    with pytest.raises(TensorMapError, match="cuTensorMapEncodeTiled: error 1"):
        tensor_map(keys(), TILE)
