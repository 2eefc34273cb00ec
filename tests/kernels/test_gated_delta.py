"""The gated delta rule against its recurrence in float64, token by token."""

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

from aquifer.kernels.gated_delta import (
    NORM_EPS,
    delta_chunks,
    delta_chunks_reference,
    delta_gates,
    delta_gates_reference,
    delta_update,
    delta_update_reference,
)
from aquifer.kernels.prefill_attention import PrefillSpans

MAX_ERROR = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CHUNKS = [delta_chunks, delta_chunks_reference]
UPDATES = [delta_update, delta_update_reference]
RAGGED = [(0, 5), (7, 1), (0, 70), (3, 33)]
SCALE = 0.3


@dataclass
class Case:
    """Inputs of a step, of which the rows outside of the chunks are NaN."""

    state: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    spans: PrefillSpans

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(results, states), of all chunks in turn and of the chunks."""
        results, states = [], []
        spans = self.spans
        group = self.v.shape[1] // self.k.shape[1]
        for i, (slot, start) in enumerate(zip(spans.slots, spans.starts, strict=True)):
            s = first_state(self.state, slot, start)
            for row in range(spans.offsets[i], spans.offsets[i + 1]):
                q, k, v, g, beta = (each[row].double() for each in self.inputs)
                q, k = (
                    (x / (x.square().sum(1, keepdim=True) + NORM_EPS).sqrt()).repeat_interleave(
                        group, 0
                    )
                    for x in (q, k)
                )
                s = g.exp()[:, None, None] * s
                change = beta[:, None] * (v - torch.einsum("hkv,hk->hv", s, k))
                s = s + k[:, :, None] * change[:, None]
                results.append(SCALE * torch.einsum("hkv,hk->hv", s, q))
            states.append(s)
        return torch.stack(results), torch.stack(states)

    def run(self, operation) -> tuple[torch.Tensor, torch.Tensor]:
        """(results of the chunks' rows, states of all slots after)."""
        state = copy_of_state(self.state)
        out = torch.full_like(self.v, torch.nan)
        operation(state, *self.inputs, self.spans, out, scale=SCALE)
        begin, end = self.spans.offsets[0], self.spans.offsets[-1]
        assert out[:begin].isnan().all()
        assert out[end:].isnan().all()
        return out[begin:end], state


def make_case(
    device: torch.device,
    chunks: list[tuple[int, int]],
    *,
    num_key_heads: int = 1,
    num_value_heads: int = 2,
    key_dim: int = 24,
    value_dim: int = 20,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    decay: float = 1.0,
    slots: list[int] | None = None,
    seed: int = 0,
) -> Case:
    """A case in which the log decay is up to about -5 * `decay`."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    spans = make_spans(chunks, device, slots=slots)
    num_rows = spans.offsets[-1] + 2
    # Columns of one wide row, as the convolution gives them. Keys are alike, so that they interact.
    sizes = (num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim)
    wide = (random(num_rows, sum(sizes) + 3) + 0.5).to(dtype)
    rates = random(num_rows, 2 * num_value_heads)
    for each in (wide, rates):
        each[: spans.offsets[0]] = torch.nan
        each[spans.offsets[-1] :] = torch.nan
    q, k, v = wide[:, 3:].split(sizes, dim=1)
    return Case(
        make_state((num_value_heads, key_dim, value_dim), spans, generator, state_dtype),
        q.unflatten(1, (num_key_heads, key_dim)),
        k.unflatten(1, (num_key_heads, key_dim)),
        v.unflatten(1, (num_value_heads, value_dim)),
        -decay * F.softplus(2 * rates[:, :num_value_heads]),
        (rates[:, num_value_heads:] + 1).sigmoid().to(dtype),
        spans,
    )


def check(case: Case, operation, max_error: float | None = None) -> None:
    max_error = MAX_ERROR[case.q.dtype] if max_error is None else max_error
    out, state = case.run(operation)
    results, states = case.exact()
    assert relative_error(out, results) < max_error
    state_error = max(max_error, MAX_ERROR[state.dtype])
    assert relative_error(state[case.spans.device_slots], states) < state_error
    others = [slot for slot in range(len(state)) if slot not in case.spans.slots]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize(
    ("num_key_heads", "num_value_heads", "key_dim", "value_dim"),
    [(1, 2, 24, 20), (2, 2, 16, 16), (2, 6, 7, 40)],
)
def test_ragged_chunks(device, num_key_heads, num_value_heads, key_dim, value_dim, operation):
    case = make_case(
        device,
        RAGGED,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    check(case, operation)


@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize("decay", [0.0, 0.01, 100.0])
def test_weak_and_strong_decay(device, decay, operation):
    """Also where a running sum of the log decay is far larger than its parts."""
    check(make_case(device, [(3, 66), (0, 40)], decay=decay), operation)


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_chunks_in_16_bits(device, dtype, state_dtype, operation):
    case = make_case(device, [(0, 9), (2, 70)], dtype=dtype, state_dtype=state_dtype or dtype)
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
        out = torch.full_like(whole.v, torch.nan)
        begin = whole.spans.offsets[0]
        done = 0
        for part in parts:
            spans = PrefillSpans.of([1], [done], [begin + done, begin + done + part], device)
            operation(state, *whole.inputs, spans, out, scale=SCALE)
            done += part
        assert relative_error(out[begin : begin + count], results) < MAX_ERROR[torch.float32]
        assert relative_error(state[[1]], states) < MAX_ERROR[torch.float32]


@pytest.mark.parametrize("operation", UPDATES)
@pytest.mark.parametrize(
    ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "dtype"),
    [(1, 2, 24, 20, torch.float32), (2, 6, 7, 40, torch.float32), (1, 1, 16, 16, torch.float16)],
)
def test_updates(device, num_key_heads, num_value_heads, key_dim, value_dim, dtype, operation):
    """Rows of one token each, with padding between them, are chunks of one token."""
    case = make_case(
        device,
        [(4, 1), (0, 1), (9, 1), (0, 1)],
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
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
    inputs = [each[rows].nan_to_num() for each in case.inputs]
    state, out = copy_of_state(case.state), torch.full_like(inputs[2], torch.nan)
    operation(state, *inputs, slots, positions, out, scale=SCALE)
    assert out.isfinite().all()
    assert relative_error(out[~is_padding], results) < MAX_ERROR[dtype]
    assert relative_error(state[case.spans.device_slots], states) < MAX_ERROR[torch.float32]
    others = [slot for slot in range(len(state)) if slot not in case.spans.slots]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize("operation", UPDATES)
def test_no_updates(device, operation):
    case = make_case(device, [])
    none = torch.zeros(0, dtype=torch.int64, device=device)
    inputs = [each[:0] for each in case.inputs]
    state = copy_of_state(case.state)
    operation(state, *inputs, none, none, torch.empty_like(inputs[2]), scale=SCALE)
    assert torch.equal(state, case.state)


@pytest.mark.parametrize("operation", [delta_gates, delta_gates_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_gates(device, num_rows, dtype, operation):
    """Also where softplus is far smaller than 1, or its argument itself."""
    generator = torch.Generator(device).manual_seed(0)
    num_heads = 6
    wide = 12 * torch.randn(num_rows, 2 * num_heads + 1, generator=generator, device=device)
    a, b = wide.to(dtype)[:, 1:].split(num_heads, dim=1)
    a_log, dt_bias = torch.randn(2, num_heads, generator=generator, device=device)
    g, beta = operation(a, b, a_log, dt_bias)
    assert g.dtype == torch.float32
    assert beta.dtype == dtype
    exact = -a_log.double().exp() * (a.double() + dt_bias.double()).exp().log1p()
    torch.testing.assert_close(g.double(), exact, rtol=5e-6, atol=0)
    assert relative_error(beta, b.double().sigmoid()) < MAX_ERROR[dtype]
