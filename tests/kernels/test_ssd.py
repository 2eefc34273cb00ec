"""The recurrence of Mamba-2 against its definition in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

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
from aquifer.kernels.ssd import scan_chunks, scan_chunks_reference
from aquifer.kernels.ssd_update import (
    Pending,
    heads_at_a_time,
    state_update,
    state_update_reference,
)

MAX_ERROR = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
CHUNKS = [scan_chunks, scan_chunks_reference]
UPDATES = [state_update, state_update_reference]
RAGGED = [(0, 5), (7, 1), (0, 70), (3, 33)]


def pending_tensors(pending: Pending) -> list[torch.Tensor]:
    return [getattr(pending, each.name) for each in fields(pending)]


@dataclass
class Case:
    """Inputs of a step, of which the rows outside of the chunks are NaN."""

    state: torch.Tensor
    pending: Pending
    x: torch.Tensor
    dt: torch.Tensor
    a_log: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor | None
    dt_bias: torch.Tensor | None
    spans: PrefillSpans
    dt_limit: tuple[float, float]

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        return self.x, self.dt, self.a_log, self.b, self.c, self.d, self.dt_bias

    def full_states(self, slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """The states of slots with so many tokens, with what is pending: [slots, H, P, N]."""
        repeats = self.x.shape[1] // self.b.shape[1]
        rates = -self.a_log.double().exp()
        states = []
        for slot, position in zip(slots, positions, strict=True):
            h = first_state(self.state, slot, position)
            places = self.pending.num_places
            for other in range(max(position - places + 1, 0), position):
                place = other % places
                for head, rate in enumerate(rates):
                    step = self.pending.steps[slot, place, head].double()
                    if step == 0 or position - other > (position + head) % places:
                        continue
                    x = self.pending.x[slot, place, head].double()
                    b = self.pending.b[slot, place, head // repeats].double()
                    h[head] = torch.exp(step * rate) * h[head] + step * x[:, None] * b
            states.append(h)
        return torch.stack(states)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(results, states), of all chunks in turn and of the chunks."""
        results, states = [], []
        spans = self.spans
        repeats = self.x.shape[1] // self.b.shape[1]
        for i, h in enumerate(self.full_states(spans.slots, spans.starts)):
            for row in range(spans.offsets[i], spans.offsets[i + 1]):
                x, dt, b, c = (each[row].double() for each in (self.x, self.dt, self.b, self.c))
                b, c = b.repeat_interleave(repeats, 0), c.repeat_interleave(repeats, 0)
                step = F.softplus(dt if self.dt_bias is None else dt + self.dt_bias.double())
                step = step.clamp(*self.dt_limit)
                h = torch.exp(-step * self.a_log.double().exp())[:, None, None] * h
                h = h + (step[:, None] * x)[:, :, None] * b[:, None]
                skip = 0 if self.d is None else self.d.double()[:, None] * x
                results.append(torch.einsum("hpn,hn->hp", h, c) + skip)
            states.append(h)
        return torch.stack(results), torch.stack(states)

    def copy(self) -> Case:
        """The same, with states of its own."""
        pending = Pending(*(copy_of_state(each) for each in pending_tensors(self.pending)))
        return replace(self, state=copy_of_state(self.state), pending=pending)

    def run(self, operation) -> tuple[torch.Tensor, torch.Tensor]:
        """(results of the chunks' rows, states of all slots after, with none pending)."""
        after = self.copy()
        out = torch.full_like(self.x, torch.nan)
        operation(after.state, after.pending, *self.inputs, self.spans, out, dt_limit=self.dt_limit)
        assert (after.pending.steps[self.spans.device_slots] == 0).all()
        state = after.state
        begin, end = self.spans.offsets[0], self.spans.offsets[-1]
        assert out[:begin].isnan().all()
        assert out[end:].isnan().all()
        return out[begin:end], state


def make_case(
    device: torch.device,
    chunks: list[tuple[int, int]],
    *,
    heads: int = 4,
    head_dim: int = 8,
    groups: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    has_options: bool = True,
    slots: list[int] | None = None,
    places: int = 4,
) -> Case:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    spans = make_spans(chunks, device, slots=slots)
    num_rows = spans.offsets[-1] + 2
    # Columns of one tensor, as a convolution gives them.
    widths = (heads * head_dim, groups * size, groups * size, 3)
    wide = random(num_rows, sum(widths)).to(dtype)
    wide_dt = (2 * random(num_rows, heads + 5)).to(dtype)
    for each in (wide, wide_dt):
        each[: spans.offsets[0]] = torch.nan
        each[spans.offsets[-1] :] = torch.nan
    x, b, c, _ = wide.split(widths, dim=1)
    pending = Pending(
        make_state((places, heads, head_dim), spans, generator, dtype),
        make_state((places, groups, size), spans, generator, dtype),
        make_state((places, heads), spans, generator),
    )
    pending.steps.abs_()
    # One that is in the state already, of which the rest may be anything.
    pending.steps[:, 0] = 0
    pending.x[:, 0] = torch.nan
    pending.b[:, 0] = torch.nan
    return Case(
        make_state((heads, head_dim, size), spans, generator, state_dtype),
        pending,
        x.unflatten(1, (heads, head_dim)),
        wide_dt[:, 5:],
        random(heads),
        b.unflatten(1, (groups, size)),
        c.unflatten(1, (groups, size)),
        random(heads) if has_options else None,
        random(heads) if has_options else None,
        spans,
        (0.1, 2.0) if has_options else (0.0, float("inf")),
    )


def check(case: Case, operation, max_error: float | None = None) -> None:
    max_error = MAX_ERROR[case.x.dtype] if max_error is None else max_error
    out, state = case.run(operation)
    results, states = case.exact()
    assert relative_error(out, results) < max_error
    assert relative_error(state[case.spans.device_slots], states) < max_error
    others = [slot for slot in range(len(state)) if slot not in case.spans.slots]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "size", "has_options"),
    [(4, 8, 2, 16, True), (3, 5, 1, 7, False), (2, 40, 2, 33, True)],
)
def test_ragged_chunks(device, heads, head_dim, groups, size, has_options, operation):
    case = make_case(
        device,
        RAGGED,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        size=size,
        has_options=has_options,
    )
    check(case, operation)


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("operation", CHUNKS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_chunks_in_16_bits(device, dtype, state_dtype, operation):
    case = make_case(device, [(0, 9), (2, 150)], dtype=dtype, state_dtype=state_dtype or dtype)
    check(case, operation)


@pytest.mark.parametrize("operation", CHUNKS)
def test_chunks_split_anywhere(device, operation):
    """The parts of a sequence, each after the one before, are the sequence."""
    count = 75
    whole = make_case(device, [(0, count)], slots=[1])
    results, states = whole.exact()
    for parts in ([1, 74], [32, 43], [30, 1, 1, 43]):
        own = whole.copy()
        out = torch.full_like(whole.x, torch.nan)
        begin, done = whole.spans.offsets[0], 0
        for part in parts:
            spans = PrefillSpans.of([1], [done], [begin + done, begin + done + part], device)
            operation(own.state, own.pending, *own.inputs, spans, out, dt_limit=own.dt_limit)
            done += part
        assert relative_error(out[begin : begin + count], results) < MAX_ERROR[torch.float32]
        assert relative_error(own.state[[1]], states) < MAX_ERROR[torch.float32]


@pytest.mark.parametrize(("update", "scan"), list(zip(UPDATES, CHUNKS, strict=True)))
@pytest.mark.parametrize(("places", "heads"), [(1, 2), (2, 4), (7, 8)])
def test_single_tokens_between_chunks(device, update, scan, places, heads):
    """Sequences computed by a token or by several at a time, in any turn, are the sequences.

    There are heads for each turn of writing the state, also before it has had as many tokens.
    """
    counts, slots = [23, 30, 19], [3, 1, 4]
    chunks = [(0, count) for count in counts]
    whole = make_case(device, chunks, slots=slots, places=places, heads=heads)
    results, states = whole.exact()
    first, *ends = whole.spans.offsets
    begins = [first, *ends[:-1]]
    own, out = whole.copy(), torch.full_like(whole.x, torch.nan)
    done = [0, 0, 0]
    turns = [(0, 1, 2, 3), (1, 7, 1, 7), (9, 1, 1, 1)]  # tokens at a time
    for turn in range(max(counts)):
        parts = [
            min(of[turn % 4] or 1, count - was)
            for of, count, was in zip(turns, counts, done, strict=True)
        ]
        several = [i for i, part in enumerate(parts) if part > 1]
        single = [i for i, part in enumerate(parts) if part == 1]
        for i in several:
            begin = begins[i] + done[i]
            spans = PrefillSpans.of([slots[i]], [done[i]], [begin, begin + parts[i]], device)
            scan(own.state, own.pending, *own.inputs, spans, out, dt_limit=own.dt_limit)
        if single:
            rows = torch.tensor([begins[i] + done[i] for i in single], device=device)
            inputs = [
                each[rows] if each is not None and len(each) == len(own.x) else each
                for each in own.inputs
            ]
            own_out = torch.empty_like(out[rows])
            update(
                own.state,
                own.pending,
                *inputs,
                torch.tensor([slots[i] for i in single], device=device),
                torch.tensor([done[i] for i in single], device=device),
                own_out,
                dt_limit=own.dt_limit,
            )
            out[rows] = own_out
        done = [was + part for was, part in zip(done, parts, strict=True)]
    assert done == counts
    assert relative_error(out[first : ends[-1]], results) < MAX_ERROR[torch.float32]
    assert relative_error(own.full_states(slots, counts), states) < MAX_ERROR[torch.float32]


@pytest.mark.parametrize("operation", UPDATES)
@pytest.mark.parametrize(
    ("head_dim", "size", "dtype"),
    [(8, 16, torch.float32), (5, 7, torch.float32), (64, 128, torch.float16)],
)
def test_updates(device, head_dim, size, dtype, operation):
    """Rows of one token each, with padding between them, are chunks of one token."""
    case = make_case(
        device,
        [(4, 1), (0, 1), (9, 1), (0, 1), (7, 1)],
        head_dim=head_dim,
        size=size,
        dtype=dtype,
        has_options=dtype == torch.float32,
    )
    results, states = case.exact()
    first = case.spans.offsets[0]
    # The rows before and after the chunks are NaN; they are padding here, of finite numbers.
    rows = torch.tensor([first, first + 1, 0, first + 2, first + 3, 1, first + 4], device=device)
    is_padding = rows < first
    slots = torch.full((7,), -1, device=device)
    positions = torch.zeros(7, dtype=torch.int64, device=device)
    slots[~is_padding] = case.spans.device_slots
    positions[~is_padding] = case.spans.device_starts
    inputs = [
        each[rows].nan_to_num() if each is not None and each.shape[0] == len(case.x) else each
        for each in case.inputs
    ]
    after, out = case.copy(), torch.full_like(case.x[rows], torch.nan)
    operation(after.state, after.pending, *inputs, slots, positions, out, dt_limit=case.dt_limit)
    assert out.isfinite().all()
    assert relative_error(out[~is_padding], results) < MAX_ERROR[dtype]
    ends = [start + 1 for start in case.spans.starts]
    assert (
        relative_error(after.full_states(case.spans.slots, ends), states) < MAX_ERROR[torch.float32]
    )
    others = [slot for slot in range(len(case.state)) if slot not in case.spans.slots]
    assert torch.equal(after.state[others], case.state[others])
    # One of four tokens writes the state of a head, and so does the first of a sequence.
    for slot, start in zip(case.spans.slots, case.spans.starts, strict=True):
        for head, (ours, before) in enumerate(
            zip(after.state[slot], case.state[slot], strict=True)
        ):
            assert torch.equal(ours, before) == ((start + head) % 4 != 3 and start > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operation", CHUNKS)
def test_gated_chunks(device, operation, dtype):
    """The gate has the row stride of a tensor of which it is a part."""
    case = make_case(device, RAGGED, dtype=dtype)
    results, _ = case.exact()
    gate = 4 * torch.randn(len(case.x), 2 * case.x[0].numel(), device=device)
    gate = gate.to(dtype)[:, case.x[0].numel() :].unflatten(1, case.x.shape[1:])
    own, out = case.copy(), torch.full_like(case.x, torch.nan)
    operation(own.state, own.pending, *own.inputs, own.spans, out, dt_limit=own.dt_limit, gate=gate)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    expected = results * F.silu(gate[rows].double())
    assert relative_error(out[rows], expected) < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operation", UPDATES)
@pytest.mark.parametrize("count", [3, 9])
def test_gated_updates(device, operation, dtype, count):
    """Few rows and more of them; one is padding, and its gate may be anything."""
    case = make_case(device, [(7 * index % 5, 1) for index in range(count)], dtype=dtype)
    results, _ = case.exact()
    first = case.spans.offsets[0]
    rows = torch.arange(first, first + count, device=device)
    gate = 4 * torch.randn(count, *case.x.shape[1:], device=device).to(dtype)
    gate[1] = torch.nan
    slots, positions = case.spans.device_slots.clone(), case.spans.device_starts
    slots[1] = -1
    inputs = [
        each[rows] if each is not None and len(each) == len(case.x) else each
        for each in case.inputs
    ]
    own, out = case.copy(), torch.full_like(case.x[rows], torch.nan)
    operation(
        own.state, own.pending, *inputs, slots, positions, out, dt_limit=case.dt_limit, gate=gate
    )
    expected = results * F.silu(gate.double())
    kept = slots >= 0
    assert out.isfinite().all()
    assert relative_error(out[kept], expected[kept]) < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operation", UPDATES)
@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 1, 16), (8, 2, 40)])
def test_many_updates(device, operation, dtype, heads, groups, size):
    """With so many rows a program updates several heads of a group, one after the other."""
    count = 12
    case = make_case(
        device,
        [(5 * index % 7, 1) for index in range(count)],
        heads=heads,
        groups=groups,
        size=size,
        dtype=dtype,
        state_dtype=dtype,
        places=4,
    )
    results, states = case.exact()
    first = case.spans.offsets[0]
    inputs = [
        each[first : first + count] if each is not None and len(each) == len(case.x) else each
        for each in case.inputs
    ]
    after, out = case.copy(), torch.full_like(case.x[:count], torch.nan)
    slots, positions = case.spans.device_slots, case.spans.device_starts
    operation(after.state, after.pending, *inputs, slots, positions, out, dt_limit=case.dt_limit)
    assert relative_error(out, results) < MAX_ERROR[dtype]
    ends = [start + 1 for start in case.spans.starts]
    assert relative_error(after.full_states(case.spans.slots, ends), states) < MAX_ERROR[dtype]


@pytest.mark.parametrize(
    ("num_programs", "heads"),
    [
        (256 * 4, 24),  # all heads at once, and the device is full
        (300 * 4, 6),  # of two waves of these, the second would be nearly empty
        (500 * 4, 24),  # both are full
        (192 * 4, 6),  # a quarter of the device would be idle
        (64 * 4, 6),
        (32 * 4, 3),
        (4, 3),
    ],
)
def test_heads_fill_the_device(num_programs, heads):
    assert heads_at_a_time(24, num_programs, 8 * 132) == heads


def test_heads_are_a_part_of_their_group():
    for heads_per_group in range(1, 130):
        for num_programs in (1, 10, 100, 1000, 10_000):
            heads = heads_at_a_time(heads_per_group, num_programs, 8 * 132)
            assert heads_per_group % heads == 0
