"""Launches that are repeated for the next layer, with a stand-in for Triton's compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aquifer.cache import view
from aquifer.cache.base import AttentionOptions, KVLayout, LayerKV, Rows
from aquifer.cache.state_view import StateView
from aquifer.kernels import Recording
from aquifer.kernels._triton import launch


class Kernel:
    """Adds `number` to `source` and writes to `target`; counts the ways of launching it."""

    arg_names = ("source", "target", "number", "shift")

    def __init__(self) -> None:
        self.num_first = 0
        self.repeated: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Kernel]:
        def run(*arguments: Any, num_warps: int, **others: Any) -> Kernel:
            self.num_first += 1
            _compute(*arguments, *(others[name] for name in self.arg_names[len(arguments) :]))
            return _Compiled(self)  # type: ignore[return-value]

        return run


class _Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            self._kernel.repeated.append(grid)
            _compute(*arguments)

        return run


def _compute(
    source: torch.Tensor | int, target: torch.Tensor | int, number: int, shift: int
) -> None:
    """On 16 floats from each address."""
    source, target = (
        part.data_ptr() if isinstance(part, torch.Tensor) else part for part in (source, target)
    )
    read, written = ((ctypes.c_float * 16).from_address(part) for part in (source, target))
    written[:] = [value + number + shift for value in read]


def _record(kernel: Kernel, *tensors: torch.Tensor) -> Recording:
    with Recording(*tensors) as recording:
        launch(kernel, (3,), *tensors, 5, num_warps=4, shift=2)
    return recording


def test_a_launch_is_repeated_with_other_tensors():
    kernel = Kernel()
    first, second = torch.zeros(2, 16), torch.zeros(2, 16)
    recording = _record(kernel, first[0], first[1])
    assert first[1].eq(7).all()
    assert recording.fits(second[0], second[1])
    recording.repeat(second[0], second[1])
    assert second[1].eq(7).all()
    assert kernel.num_first == 1
    assert kernel.repeated == [(3, 1, 1)]


def test_tensors_of_the_operation_itself_stay():
    kernel = Kernel()
    first, second, own = torch.zeros(16), torch.zeros(16), torch.ones(16)
    with Recording(first) as recording:
        launch(kernel, (1, 2), own, first, 0, shift=0, num_warps=1)
    recording.repeat(second)
    assert second.eq(1).all()


def test_parts_of_a_tensor_from_its_start_are_replaced_too():
    kernel = Kernel()
    first, second, source = torch.zeros(8, 8), torch.zeros(8, 8), torch.ones(2, 8)
    with Recording(first) as recording:
        launch(kernel, (1,), source, first[:2], 0, shift=0, num_warps=1)
    # The kernel knows the part's shape; a repetition gives it the address alone.
    recording.repeat(second)
    assert second[:2].eq(1).all()


def test_columns_of_a_tensor_are_replaced_too():
    kernel = Kernel()
    first, second = (torch.zeros(4, 64)[:, 16:48] for _ in range(2))
    with Recording(first) as recording:
        launch(kernel, (1,), first, first[:2, 16:], 3, shift=0, num_warps=1)
    recording.repeat(second)
    assert second[0].tolist() == [0] * 16 + [3] * 16
    assert not second[1:].any()


def test_what_lies_between_the_rows_of_a_tensor_is_not_of_it():
    kernel = Kernel()
    whole, second, source = torch.zeros(4, 64), torch.zeros(4, 64), torch.ones(16)
    with Recording(whole[:, :32]) as recording:
        launch(kernel, (1,), source, whole[:, 32:], 0, shift=0, num_warps=1)
    recording.repeat(second[:, :32])
    assert not second.any()
    assert whole[0].tolist() == [0] * 32 + [1] * 16 + [0] * 16


def test_what_cannot_be_repeated():
    kernel = Kernel()
    tensors = torch.zeros(16), torch.zeros(16)
    recording = _record(kernel, *tensors)
    assert not recording.fits(tensors[0], torch.zeros(32)[::2])  # other strides
    assert not recording.fits(tensors[0], torch.zeros(17)[1:])  # not aligned as before
    with Recording(*tensors) as recording:
        pass  # nothing was launched, as on the host
    assert not recording.fits(*tensors)


def test_launches_outside_of_a_recording_are_not_recorded():
    kernel = Kernel()
    tensors = torch.zeros(16), torch.zeros(16)
    recording = _record(kernel, *tensors)
    launch(kernel, (1,), *tensors, 0, shift=0, num_warps=1)
    recording.repeat(*tensors)
    assert kernel.repeated == [(3, 1, 1)]


def test_layers_with_sinks_of_their_own_share_a_recording(monkeypatch: pytest.MonkeyPatch):
    kernel = Kernel()

    def attend(query: torch.Tensor, *others: Any, sinks: torch.Tensor | None, **_: Any) -> None:
        out = others[5]
        launch(kernel, (1,), query if sinks is None else sinks, out, 5, num_warps=4, shift=2)

    monkeypatch.setattr(view, "decode_attention", attend)
    layers = [(torch.zeros(1, 4, 2, 1), torch.zeros(1, 4, 2, 1)) for _ in range(3)]
    one = torch.zeros(1, dtype=torch.int64)
    layout = KVLayout((LayerKV(2, 1, 1),) * 3, torch.float32)
    rows = Rows(one, one, one + 1, None)
    step = view.StepView(layout, layers, rows, None, view.Workspaces())
    query, out = torch.full((1, 16, 1), 0.5), torch.zeros(1, 16, 1)

    def attended(layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        step.attend_into(layer, query, out, AttentionOptions(0.2, sinks=sinks))
        return out.flatten() - 7

    first, second = torch.arange(16.0), -torch.arange(16.0)
    assert torch.equal(attended(0, first), first)
    assert torch.equal(attended(1, second), second)
    assert (kernel.num_first, len(kernel.repeated)) == (1, 1)
    assert torch.equal(attended(2, None), query.flatten())
    assert (kernel.num_first, len(kernel.repeated)) == (2, 1)


def test_options_of_layers_differ_in_whether_they_have_sinks():
    with_sinks = AttentionOptions(0.2, sinks=torch.ones(4))
    assert with_sinks == AttentionOptions(0.2, sinks=torch.zeros(4))
    assert hash(with_sinks) == hash(AttentionOptions(0.2, sinks=torch.zeros(4)))
    assert with_sinks != AttentionOptions(0.2)


class Doubled:
    """A recurrence that adds 5 to its inputs, and to its weights if it has any."""

    kind = "doubled"
    out_columns = 16

    def __init__(self, kernel: Kernel, weight: torch.Tensor | None) -> None:
        self._kernel = kernel
        self._weight = weight
        self.weights = None if weight is None else [weight]

    def run(
        self, inputs: torch.Tensor, out: torch.Tensor, states: Sequence[torch.Tensor], rows: Rows
    ) -> None:
        (state,) = states
        launch(self._kernel, (1,), inputs[:, 16:], state, 5, num_warps=4, shift=0)
        source = inputs if self._weight is None else self._weight
        launch(self._kernel, (1,), source, out, 5, num_warps=4, shift=0)


@pytest.mark.parametrize(("has_weights", "num_first"), [(True, 2), (False, 6)])
def test_layers_with_states_and_weights_of_their_own_share_a_recording(
    has_weights: bool, num_first: int
) -> None:
    kernel = Kernel()
    one = torch.zeros(1, dtype=torch.int64)
    states = [[torch.zeros(1, 16)] for _ in range(3)]
    step = StateView(states, Rows(one, one, one + 1, None))
    for layer, (state,) in enumerate(states):
        weight = torch.full((16,), 0.5 + layer) if has_weights else None
        inputs, out = torch.full((1, 64), float(layer))[:, :32], torch.zeros(1, 16)
        step.recur_into(layer, inputs, out, Doubled(kernel, weight))
        assert state.eq(layer + 5).all()
        assert out.eq((0.5 + layer if has_weights else layer) + 5).all()
    assert kernel.num_first == num_first
