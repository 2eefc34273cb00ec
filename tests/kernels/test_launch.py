"""Repeated launches: by the driver on a GPU, and how their parameters are laid out."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.test_decode_attention import Case, make_case, max_error, row_errors

from aquifer.kernels import Recording, _launch
from aquifer.kernels._launch import DirectLaunch, ThroughLauncher, bits, repeatable
from aquifer.kernels.decode_attention import (
    DecodeWorkspaces,
    decode_attention,
)

SIGNATURE = {"x": "*bf16", "block": "constexpr", "n": "i32", "scale": "fp32"}


class Compiled:
    """A kernel as Triton returns it, of an address, a constant, an integer and a float."""

    def __init__(self, **changed: Any) -> None:
        metadata = {
            "num_warps": 4,
            "num_ctas": 1,
            "shared": 1024,
            "launch_pdl": True,
            "launch_cooperative_grid": False,
            "global_scratch_size": 0,
            "profile_scratch_size": 0,
        }
        self.src = SimpleNamespace(signature=changed.pop("signature", SIGNATURE))
        self.metadata = SimpleNamespace(**{**metadata, **changed})
        self.function = 7

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_: None


class Launched:
    """Takes the place of `DirectLaunch`."""

    def __init__(
        self,
        kernel: _launch.LoadedKernel,
        grid: tuple[int, ...],
        parameters: Sequence[int],
        places: Sequence[int | None],
    ) -> None:
        self.kernel, self.grid = kernel, grid
        self.parameters, self.places = list(parameters), list(places)


def test_parameters_are_the_arguments_that_are_not_compiled_in(monkeypatch):
    monkeypatch.setattr(_launch, "_parameter_bytes", lambda _: [8, 4, 4, 8, 8])
    monkeypatch.setattr(_launch, "DirectLaunch", Launched)
    monkeypatch.setattr(_launch, "LoadedKernel", lambda *loaded: loaded)
    launch: Any = repeatable(Compiled(), (5, 2), [4096, 128, -3, 0.5])
    assert launch.places == [0, None, 1, 2]
    (half,) = struct.unpack("<I", struct.pack("<f", 0.5))
    assert launch.parameters == [4096, 2**64 - 3, half, 0, 0]
    assert launch.grid == (5, 2)
    assert launch.kernel == (7, _launch.Blocks(128, 1024, overlaps=True))


@pytest.mark.parametrize(
    ("sizes", "changed"),
    [
        (None, {}),  # the driver does not tell
        ([8, 4], {}),  # fewer parameters
        ([8, 8, 4, 8, 8], {}),  # longer ones
        ([8, 4, 4, 8, 16], {}),  # more, which are no addresses
        ([8, 4, 4, 8, 8], {"num_ctas": 2}),
        ([8, 4, 4, 8, 8], {"launch_cooperative_grid": True}),
        ([8, 4, 4, 8, 8], {"global_scratch_size": 64}),
        ([8, 2], {"signature": {"x": "*bf16", "y": "fp16"}}),
    ],
)
def test_a_kernel_that_is_not_as_expected_goes_through_its_launcher(monkeypatch, sizes, changed):
    monkeypatch.setattr(_launch, "_parameter_bytes", lambda _: sizes)
    assert isinstance(repeatable(Compiled(**changed), (1,), [0, 128, 1, 0.5]), ThroughLauncher)


class Loaded:
    """Takes the place of `LoadedKernel`: reads the parameters as a kernel would."""

    def __init__(self, num_parameters: int) -> None:
        self.launches: list[tuple[object, ...]] = []
        self._count = num_parameters

    def launch(self, grid: tuple[int, int, int], stream: int, parameters: int) -> None:
        pointers = (ctypes.c_void_p * self._count).from_address(parameters)
        values = [ctypes.c_uint64.from_address(each or 0).value for each in pointers]
        self.launches.append((grid, stream, *values))


def test_a_launch_with_other_addresses():
    kernel: Any = Loaded(3)
    launch = DirectLaunch(kernel, (5, 2), [4096, 7, 0], [0, None, 1])
    launch.run(1)
    launch.put(0, 8192)
    launch.put(1, 64)  # compiled in
    launch.run(2)
    assert kernel.launches == [((5, 2, 1), 1, 4096, 7, 0), ((5, 2, 1), 2, 8192, 7, 0)]


def test_a_grid_without_blocks_is_not_launched():
    kernel: Any = Loaded(1)
    DirectLaunch(kernel, (0, 8), [1], [0]).run(0)
    assert not kernel.launches


def test_bytes_of_parameters():
    assert bits(-1, is_float=False) == 2**64 - 1
    assert bits(True, is_float=False) == 1
    assert struct.pack("<I", bits(-0.25, is_float=True)) == struct.pack("<f", -0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("lengths", [[300, 1, 577, 64], [2000] * 20, [40_000]], ids=str)
def test_attention_of_another_layer(block_size: int | None, lengths: list[int]):
    """With a few rows by clusters, with more by Triton's kernel; with long ones in two launches."""
    device = torch.device("cuda", 0)
    shape: dict[str, Any] = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "key_dim": 128,
        "value_dim": 128,
        "dtype": torch.bfloat16,
        "max_tokens": max(lengths) // 16 * 16 + 16,
        "block_size": block_size,
    }
    first, second = (make_case(device, lengths, **shape, seed=seed) for seed in range(2))
    outs = [torch.full_like(first.query, torch.nan) for _ in range(2)]
    cases = zip((first, second), outs, strict=True)
    tensors = [_tensors(case, out) for case, out in cases]
    workspace, config = DecodeWorkspaces().get(
        first.query, first.values, paged=block_size is not None
    )
    run = (first.query, first.keys, first.values, first.tables, first.slots, first.lengths)
    with Recording(*tensors[0]) as recording:
        decode_attention(*run, outs[0], workspace, config, scale=0.2)
    assert recording.launches
    assert all(isinstance(each, DirectLaunch) for each in recording.launches)
    assert recording.fits(*tensors[1])
    recording.repeat(*tensors[1])
    for case, out in zip((first, second), outs, strict=True):
        expected = case.reference(scale=0.2)
        assert (row_errors(out, expected) < max_error(case, expected)).all()


def _tensors(case: Case, out: torch.Tensor) -> list[torch.Tensor]:
    tables = [] if case.tables is None else [case.tables]
    return [case.query, case.keys, case.values, out, case.slots, case.lengths, *tables]
