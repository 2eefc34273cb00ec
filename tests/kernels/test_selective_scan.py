"""The selective scan against its recurrence in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.recurrent_cases import (
    copy_of_state,
    first_state,
    make_spans,
    make_state,
    relative_error,
)

from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.selective_scan import (
    selective_chunks,
    selective_chunks_reference,
    selective_update,
    selective_update_reference,
)

MAX_ERROR = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CHUNKS = [selective_chunks, selective_chunks_reference]
UPDATES = [selective_update, selective_update_reference]
RAGGED = [(0, 5), (7, 1), (0, 70), (3, 33)]


@dataclass
class Case:
    """Inputs of a step, of which the rows outside of the chunks are NaN."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    a_log: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor | None
    spans: PrefillSpans

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        return self.x, self.dt, self.a_log, self.b, self.c, self.d, self.dt_bias

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(results, states), of all chunks in turn and of the chunks."""
        results, states = [], []
        spans = self.spans
        for i, (slot, start) in enumerate(zip(spans.slots, spans.starts, strict=True)):
            h = first_state(self.state, slot, start)
            for row in range(spans.offsets[i], spans.offsets[i + 1]):
                x, dt, b, c = (each[row].double() for each in (self.x, self.dt, self.b, self.c))
                step = F.softplus(dt if self.dt_bias is None else dt + self.dt_bias.double())
                h = torch.exp(-step[:, None] * self.a_log.double().exp()) * h
                h = h + (step * x)[:, None] * b
                results.append(h @ c + self.d.double() * x)
            states.append(h)
        return torch.stack(results), torch.stack(states)

    def run(self, operation) -> tuple[torch.Tensor, torch.Tensor]:
        """(results of the chunks' rows, states of all slots after)."""
        state = copy_of_state(self.state)
        out = torch.full_like(self.x, torch.nan)
        operation(state, *self.inputs, self.spans, out)
        begin, end = self.spans.offsets[0], self.spans.offsets[-1]
        assert out[:begin].isnan().all()
        assert out[end:].isnan().all()
        return out[begin:end], state


def make_case(
    device: torch.device,
    chunks: list[tuple[int, int]],
    *,
    num_channels: int = 20,
    state_size: int = 16,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
    slots: list[int] | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    spans = make_spans(chunks, device, slots=slots)
    num_rows = spans.offsets[-1] + 2
    # Columns of wider rows, as the model's products give them.
    wide_x = random(num_rows, num_channels + 3).to(dtype)
    wide_dt = 2 * random(num_rows, num_channels + 5)
    wide_b = random(num_rows, 2 * state_size + 1).to(dtype)
    for each in (wide_x, wide_dt, wide_b):
        each[: spans.offsets[0]] = torch.nan
        each[spans.offsets[-1] :] = torch.nan
    return Case(
        make_state((num_channels, state_size), spans, generator, state_dtype),
        wide_x[:, :num_channels],
        wide_dt.to(dtype)[:, 5:],
        random(num_channels, state_size),
        wide_b[:, 1 : state_size + 1],
        wide_b[:, state_size + 1 :],
        random(num_channels),
        random(num_channels) if has_bias else None,
        spans,
    )


def check(case: Case, operation, max_error: float | None = None) -> None:
    max_error = MAX_ERROR[case.x.dtype] if max_error is None else max_error
    out, state = case.run(operation)
    results, states = case.exact()
    assert relative_error(out, results) < max_error
    written = case.spans.device_slots
    state_error = max(max_error, MAX_ERROR[state.dtype])
    assert relative_error(state[written], states) < state_error
    others = [slot for slot in range(len(state)) if slot not in case.spans.slots]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize(
    ("num_channels", "state_size", "has_bias"), [(20, 16, True), (7, 5, False), (130, 3, True)]
)
def test_ragged_chunks(device, num_channels, state_size, has_bias, operation):
    case = make_case(
        device, RAGGED, num_channels=num_channels, state_size=state_size, has_bias=has_bias
    )
    check(case, operation)


@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_chunks_in_16_bits(device, dtype, state_dtype, operation):
    case = make_case(device, [(0, 9), (2, 21)], dtype=dtype, state_dtype=state_dtype or dtype)
    # Triton's interpreter cuts to bfloat16 where devices round.
    check(case, operation, 2 * MAX_ERROR[dtype])


@pytest.mark.parametrize("operation", CHUNKS)
def test_no_chunks(device, operation):
    case = make_case(device, [])
    out, state = case.run(operation)
    assert not len(out)
    assert torch.equal(state, case.state)


@pytest.mark.parametrize("operation", CHUNKS)
def test_chunks_split_anywhere(device, operation):
    """The parts of a sequence, each after the one before, are the sequence."""
    count = 75
    whole = make_case(device, [(0, count)], slots=[1])
    results, states = whole.exact()
    for parts in ([1, 74], [64, 11], [30, 1, 1, 43]):
        state = copy_of_state(whole.state)
        out = torch.full_like(whole.x, torch.nan)
        begin = whole.spans.offsets[0]
        done = 0
        for part in parts:
            spans = PrefillSpans.of([1], [done], [begin + done, begin + done + part], device)
            operation(state, *whole.inputs, spans, out)
            done += part
        assert relative_error(out[begin : begin + count], results) < MAX_ERROR[torch.float32]
        assert relative_error(state[[1]], states) < MAX_ERROR[torch.float32]


@pytest.mark.parametrize("operation", UPDATES)
@pytest.mark.parametrize(
    ("num_channels", "state_size", "dtype"),
    [(20, 16, torch.float32), (300, 5, torch.float32), (70, 16, torch.float16)],
)
def test_updates(device, num_channels, state_size, dtype, operation):
    """Rows of one token each, with padding between them, are chunks of one token."""
    case = make_case(
        device,
        [(4, 1), (0, 1), (9, 1), (0, 1)],
        num_channels=num_channels,
        state_size=state_size,
        dtype=dtype,
        has_bias=dtype == torch.float32,
    )
    results, states = case.exact()
    first = case.spans.offsets[0]
    # The rows before and after the chunks are NaN; they are padding here, of finite numbers.
    rows = torch.tensor([first, first + 1, 0, first + 2, first + 3, 1], device=device)
    is_padding = rows < first
    slots = torch.full((6,), -1, device=device)
    positions = torch.zeros(6, dtype=torch.int64, device=device)
    slots[~is_padding] = case.spans.device_slots
    positions[~is_padding] = case.spans.device_starts
    inputs = [
        each[rows].nan_to_num() if each is not None and each.shape[0] == len(case.x) else each
        for each in case.inputs
    ]
    state, out = copy_of_state(case.state), torch.full_like(case.x[rows], torch.nan)
    operation(state, *inputs, slots, positions, out)
    assert out.isfinite().all()
    assert relative_error(out[~is_padding], results) < MAX_ERROR[dtype]
    assert relative_error(state[case.spans.device_slots], states) < MAX_ERROR[torch.float32]
    others = [slot for slot in range(len(state)) if slot not in case.spans.slots]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize("operation", UPDATES)
def test_no_updates(device, operation):
    case = make_case(device, [])
    none = torch.zeros(0, dtype=torch.int64, device=device)
    inputs = [
        each[:0] if each is not None and each.shape[0] == len(case.x) else each
        for each in case.inputs
    ]
    state = copy_of_state(case.state)
    operation(state, *inputs, none, none, torch.empty_like(case.x[:0]))
    assert torch.equal(state, case.state)
