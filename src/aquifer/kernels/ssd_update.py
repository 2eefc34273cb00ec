"""The recurrence of Mamba-2 for one token of each sequence, with a state written every few tokens.

The recurrence is that of `ssd.py`. A token adds an outer product to the state h, so an update that
writes it back moves as many bytes as one that reads it. The inputs of a token are a hundredth of
that. So they are kept beside the state, and the state is written once for every K tokens. With
those that are not in it, at most K - 1, and the row's own as a chunk:

    y  = exp(cs) h c + d x + sum of (c . b[s]) exp(cs - cs[s]) dt[s] x[s]
    h' = exp(cs) h + sum of exp(cs - cs[s]) dt[s] x[s] b[s]^T             where K - 1 are pending

Of K = 7 tokens, the state is read seven times and written once: 58 % of the bytes, with what the
inputs take. A state of 16 bits is rounded a seventh as often.

A token at position p has place p mod K among the pending ones. Of head h, (p + h) mod K tokens
before it are pending, as far as there are so many; where that is K - 1, it writes the state. So
each token writes the states of a K-th of the heads, and all steps take as long. That follows from
positions alone: a step stays one launch, which a CUDA graph can hold. The first token of a sequence
writes all of its state, and so do chunks, wherever they end; a dt of 0 marks what is in it.

Shapes as in `ssd.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    MIN_DOT,
    await_predecessor,
    constexpr,
    count_multiprocessors,
    jit,
    jit_once,
    launch,
    launch_options,
    pow2,
    release_successor,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.activation import softplus
from aquifer.kernels.span_chunks import read_states, wide_dtype


@dataclass(frozen=True, slots=True)
class _Config:
    """A program's share of the work, and how it is done."""

    tile: int  # numbers of the state of a head
    written: int  # numbers that it writes at a time
    num_warps: int
    num_stages: int  # the states of one head less are on their way while one is updated
    releases_early: bool


_CONFIG = _Config(8192, 2048, 1, 2, releases_early=False)
_FEW_CONFIG = _Config(4096, 2048, 1, 1, releases_early=True)
_ONE_CONFIG = _Config(4096, 4096, 4, 1, releases_early=True)
"""By measurement on an H200, for many rows, for few and for one or two."""

_FEW_ROWS, _ONE_ROWS = 8, 2
"""Up to so many rows are few: each head has programs of its own, as otherwise the device is not
full."""

_RESIDENT = 8
"""Programs with many rows that an SM holds: 16-bit states take 25 KiB of its shared memory."""

_LEAST_FILL = 0.85
"""The least part of the device that programs with many heads must fill."""

_COLUMNS = 8
"""The least width of a matrix product; one column is used."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Inputs of tokens that are not in the state yet, K places for each slot; in and out.

    The first stride of each is any. In places that are not pending, any bits.
    """

    x: torch.Tensor  # [slots, K, H, P] of x's dtype
    b: torch.Tensor  # [slots, K, G, N] of b's dtype
    steps: torch.Tensor  # [slots, K, H] float32: dt as it is used; 0: the token is in the state

    @property
    def num_places(self) -> int:
        """K. With 1, each token writes the state."""
        return self.steps.shape[1]

    def check(self, x: torch.Tensor, b: torch.Tensor) -> None:
        """Check the shapes against those of the inputs."""
        places = self.num_places
        assert self.x.shape[1:] == (places, *x.shape[1:])
        assert self.b.shape[1:] == (places, *b.shape[1:])
        assert self.steps.shape[2:] == x.shape[1:2]
        assert (self.x.dtype, self.b.dtype, self.steps.dtype) == (x.dtype, b.dtype, torch.float32)
        assert all(each[0].is_contiguous() for each in (self.x, self.b, self.steps))

    def weigh(
        self, a_log: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What sequences are to add to their states; in plain torch.

        Args:
            a_log: [H].
            slots: [rows].
            positions: [rows], tokens of each sequence.

        Returns:
            decay of the state [rows, H]; each token's x by its dt and its decay since [rows, K, H,
            P]; its b, repeated for each head [rows, K, H, N]. Float32 or wider.
        """
        wide = wide_dtype(self.x)
        num_places, num_heads = self.steps.shape[1:]
        heads_per_group = num_heads // self.b.shape[2]
        order = torch.arange(num_places, device=slots.device)
        places = (positions[:, None] + order) % num_places  # [rows, K], the latest token last
        counts = self.counts(positions)
        steps = self.steps[slots[:, None], places].to(wide)
        is_pending = (order[:, None] >= num_places - counts[:, None]) & (steps > 0)
        steps = steps.where(is_pending, 0)  # [rows, K, H]
        exponents = steps * -a_log.to(wide).exp()
        total = exponents.sum(1)
        weights = steps * (total[:, None] - exponents.cumsum(1)).exp()
        is_pending = is_pending[..., None]
        x = self.x[slots[:, None], places].to(wide).where(is_pending, 0) * weights[..., None]
        b = self.b[slots[:, None], places].to(wide).repeat_interleave(heads_per_group, 2)
        return total.exp(), x, b.where(is_pending, 0)

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """`turn_of` all heads, [rows, H]."""
        head = torch.arange(self.steps.shape[2], device=positions.device)
        return (positions[:, None] + head) % self.num_places

    def counts(self, positions: torch.Tensor) -> torch.Tensor:
        """`count_pending` of all heads, [rows, H]."""
        return torch.minimum(self.turns(positions), positions[:, None])


def time_steps(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """clamp(softplus(dt + dt_bias)), in float32 or wider."""
    wide = dt.to(wide_dtype(dt))
    step = F.softplus(wide if dt_bias is None else wide + dt_bias.to(wide.dtype))
    return step.clamp(*dt_limit)


def state_update_reference(
    state: torch.Tensor,
    pending: Pending,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    gate: torch.Tensor | None = None,
) -> None:
    """`state_update` in plain torch."""
    out[slots < 0] = 0
    (kept,) = torch.nonzero(slots >= 0, as_tuple=True)
    slots, positions = slots[kept], positions[kept]
    wide = wide_dtype(x)
    place = positions % pending.num_places
    is_last = pending.turns(positions) == pending.num_places - 1
    is_written = is_last | (positions == 0)[:, None]  # [rows, H]
    step = time_steps(dt[kept], dt_bias, dt_limit)
    decay, others_x, others_b = pending.weigh(a_log, slots, positions)
    pending.x[slots, place] = x[kept]
    pending.b[slots, place] = b[kept]
    pending.steps[slots, place] = step.where(~is_written, 0).float()
    own_x, own_b, own_c = (each[kept].to(wide) for each in (x, b, c))
    heads_per_group = x.shape[1] // b.shape[1]
    own_b, own_c = (each.repeat_interleave(heads_per_group, 1) for each in (own_b, own_c))
    own_decay = torch.exp(step * -a_log.to(wide).exp())
    decay, others_x = decay * own_decay, others_x * own_decay[:, None, :, None]
    added_x = torch.cat((others_x, (step[..., None] * own_x)[:, None]), 1)  # [rows, K + 1, H, P]
    added_b = torch.cat((others_b, own_b[:, None]), 1)
    h = read_states(state, slots, positions)
    y = torch.einsum("rhpn,rhn->rhp", h, own_c) * decay[..., None]
    y += torch.einsum("rkhp,rkhn,rhn->rhp", added_x, added_b, own_c)
    if d is not None:
        y += d.to(wide)[:, None] * own_x
    if gate is not None:
        y *= F.silu(gate[kept].to(wide))
    out[kept] = y.to(out.dtype)
    row, head = torch.nonzero(is_written, as_tuple=True)
    written = torch.einsum("wkp,wkn->wpn", added_x[row, :, head], added_b[row, :, head])
    written += h[row, head] * decay[row, head][:, None, None]
    state[slots[row], head] = written.to(state.dtype)


def state_update(
    state: torch.Tensor,
    pending: Pending,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    gate: torch.Tensor | None = None,
) -> None:
    """Update states by one token each.

    Args:
        state: [slots, H, P, N] float32 or the dtype of x; in and out.
        pending: tokens that are not in `state` yet; in and out.
        x: [rows, H, P].
        dt: [rows, H], before bias and softplus.
        a_log: [H] float32.
        b: [rows, G, N].
        c: [rows, G, N].
        d: [H] float32, or None.
        dt_bias: [H] float32, or None.
        slots: [rows] int64, the row's sequence; -1 for padding, which changes no state and gets a
            finite result.
        positions: [rows] int64; at position 0 the state begins as 0, and is not read.
        out: [rows, H, P] of x's dtype, overwritten.
        dt_limit: bounds of a step, of which the lower one is at least 0.
        gate: [rows, H, P], results are multiplied by silu(gate); None for no gate.
    """
    if not runs_triton(x):
        state_update_reference(
            state, pending, x, dt, a_log, b, c, d, dt_bias, slots, positions, out,
            dt_limit=dt_limit, gate=gate,
        )  # fmt: skip
        return
    check_inputs(state, pending, x, dt, a_log, b, c, d, dt_bias, out, gate)
    num_rows, num_heads, head_dim = x.shape
    if not num_rows:
        return
    size_pow2 = pow2(b.shape[2], MIN_DOT)
    num_groups = b.shape[1]
    config, heads = _CONFIG, 1
    if num_rows <= _FEW_ROWS:
        config = _ONE_CONFIG if num_rows <= _ONE_ROWS else _FEW_CONFIG
    block = max(min(config.tile // size_pow2, pow2(head_dim)), MIN_DOT)
    num_blocks = -(-head_dim // block)
    if num_rows > _FEW_ROWS:
        resident = _RESIDENT * count_multiprocessors(x.device)
        heads = heads_at_a_time(
            num_heads // num_groups, num_rows * num_groups * num_blocks, resident
        )
    # A state of 16 bits is as exact as a product of 16 bits.
    is_narrow = state.dtype == x.dtype and x.dtype.itemsize == 2
    launch(
        _update_kernel,
        (num_blocks, num_heads // heads, num_rows),
        state,
        pending.x,
        pending.b,
        pending.steps,
        x,
        dt,
        a_log,
        b,
        c,
        d,
        dt_bias,
        gate,
        slots,
        positions,
        out,
        state.stride(0),
        pending.x.stride(0),
        pending.b.stride(0),
        pending.steps.stride(0),
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        0 if gate is None else gate.stride(0),
        out.stride(0),
        dt_limit[0],
        dt_limit[1],
        num_heads=num_heads,
        head_dim=head_dim,
        size=b.shape[2],
        size_pow2=size_pow2,
        heads_per_group=num_heads // num_groups,
        heads=heads,
        is_alone=num_rows <= _FEW_ROWS,
        num_places=pending.num_places,
        block=block,
        n_written=max(min(size_pow2, config.written // block), MIN_DOT),
        dot_places=pow2(pending.num_places, MIN_DOT),
        columns=_COLUMNS,
        is_narrow=is_narrow,
        precision="ieee" if x.dtype == torch.float32 else "tf32x3",
        num_stages=config.num_stages,
        has_d=d is not None,
        has_bias=dt_bias is not None,
        has_gate=gate is not None,
        releases_early=config.releases_early,
        num_warps=config.num_warps,
        **launch_options(x.device),
    )


def heads_at_a_time(heads_per_group: int, num_programs: int, resident: int) -> int:
    """How many heads of a group a program updates, one after the other.

    The more they are, the less often it computes what they have in common. But programs should fill
    the device to the end: it runs them in waves. There are three choices, each a kernel to compile:
    all heads, up to six, or up to three.

    Args:
        heads_per_group: heads of a group.
        num_programs: programs that update all heads of a group.
        resident: programs that the device runs at a time.
    """
    waves = num_programs / resident
    if waves >= _LEAST_FILL * math.ceil(waves):
        return heads_per_group
    several, few = (
        max(heads for heads in range(1, most + 1) if heads_per_group % heads == 0)
        for most in (6, 3)
    )
    return several if waves * (heads_per_group // several) >= _LEAST_FILL else few


def check_inputs(
    state: torch.Tensor,
    pending: Pending,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor,
    gate: torch.Tensor | None,
) -> None:
    """Check the shapes of an update's tensors, or of a scan's."""
    num_rows, num_heads, head_dim = x.shape
    assert state.shape[1:] == (num_heads, head_dim, b.shape[2])
    assert state[0].is_contiguous()
    pending.check(x, b)
    assert dt.shape == (num_rows, num_heads)
    assert out.shape == x.shape
    assert b.shape == c.shape
    assert len(b) == num_rows
    assert num_heads % b.shape[1] == 0
    assert gate is None or gate.shape == x.shape
    rows = (x, dt, b, c, out) if gate is None else (x, dt, b, c, out, gate)
    assert all(each[0].is_contiguous() for each in rows if len(each))
    for each in (a_log, d, dt_bias):
        assert each is None or (each.shape == (num_heads,) and each.is_contiguous())


@jit_once(indices=["slots", "positions", "x", "dt", "b", "c", "gate"])
def _update_kernel(
    state: tensor,
    pending_x: tensor,
    pending_b: tensor,
    pending_steps: tensor,
    x: tensor,
    dt: tensor,
    a_log: tensor,
    b: tensor,
    c: tensor,
    d: tensor,
    dt_bias: tensor,
    gate: tensor,
    slots: tensor,
    positions: tensor,
    out: tensor,
    state_stride: tensor,
    pending_x_stride: tensor,
    pending_b_stride: tensor,
    pending_steps_stride: tensor,
    x_stride: tensor,
    dt_stride: tensor,
    b_stride: tensor,
    c_stride: tensor,
    gate_stride: tensor,
    out_stride: tensor,
    least_step: tensor,
    most_step: tensor,
    num_heads: constexpr,
    head_dim: constexpr,
    size: constexpr,
    size_pow2: constexpr,
    heads_per_group: constexpr,
    heads: constexpr,
    is_alone: constexpr,
    num_places: constexpr,
    block: constexpr,
    n_written: constexpr,
    dot_places: constexpr,
    columns: constexpr,
    is_narrow: constexpr,
    precision: constexpr,
    num_stages: constexpr,
    has_d: constexpr,
    has_bias: constexpr,
    has_gate: constexpr,
    releases_early: constexpr,
    overlaps: constexpr,
) -> None:
    """A program computes `block` results of some heads of one sequence, and updates their states.

    The heads are of one group. While the state of one is updated, that of the next is read.
    `is_alone` is for one head.
    """
    num_groups: constexpr = num_heads // heads_per_group
    dot_dtype: constexpr = x.dtype.element_ty if is_narrow else tl.float32
    # Places of one head are so many elements apart.
    x_step: constexpr = num_heads * head_dim
    b_step: constexpr = num_groups * size
    first_head = tl.program_id(1) * heads
    group = first_head // heads_per_group
    row = tl.program_id(2).to(tl.int64)
    p_first = tl.program_id(0) * block
    own_p = tl.arange(0, block)
    p = p_first + own_p
    n = tl.arange(0, size_pow2)
    is_n = n < size
    await_predecessor(overlaps)
    if releases_early:
        release_successor(overlaps)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    own_place = (position % num_places).to(tl.int32)
    # Triton's interpreter has no mask of a vector and a number.
    is_kept = p < tl.where(slot >= 0, head_dim, 0)
    is_read = p < tl.where((slot >= 0) & (position > 0), head_dim, 0)
    # Tokens are in the order of their positions. The first is the row's own: what was in its place
    # is pending for no head.
    token = tl.arange(0, dot_places)
    is_own = token == 0
    places = (own_place + token) % num_places
    is_other = (token > 0) & (token < tl.where(slot >= 0, num_places, 0))
    all_b = pending_b + slot * pending_b_stride + group * size
    row_b = b + row * b_stride + group * size
    own_b = tl.load(row_b + n, mask=is_n, other=0.0)
    own_c = tl.load(c + row * c_stride + group * size + n, mask=is_n, other=0.0)
    # Matrix products are faster than sums, though all columns but one are 0.
    wide_c = tl.where((tl.arange(0, columns) == 0)[None, :], own_c[:, None], 0.0)
    own_score = tl.sum(own_b.to(tl.float32) * own_c.to(tl.float32), axis=0)
    scores = tl.zeros([dot_places], tl.float32)
    if not is_alone:
        scores = _scores(all_b, places * b_step, is_other, n, is_n, wide_c, precision)

    for head in tl.range(first_head, first_head + heads, num_stages=num_stages):
        count = count_pending(position, head, num_places)
        # Not the count: of a sequence's first tokens, fewer are pending when it is a head's turn.
        is_written = (turn_of(position, head, num_places) == num_places - 1) | (position == 0)
        own_state = state + slot * state_stride + (head * head_dim + p_first) * size
        h = tl.load(
            own_state + (own_p[:, None] * size + n[None, :]),
            mask=is_read[:, None] & is_n[None, :],
            other=0.0,
        )
        if is_alone:  # while the state is on its way
            scores = _scores(all_b, places * b_step, is_other, n, is_n, wide_c, precision)
        is_counted = is_other & (token >= num_places - count)
        all_steps = pending_steps + slot * pending_steps_stride + head
        steps = tl.load(all_steps + places * num_heads, mask=is_counted, other=0.0)
        all_x = pending_x + slot * pending_x_stride + head * head_dim + p
        other_x = tl.load(
            all_x[None, :] + places[:, None] * x_step,
            mask=is_counted[:, None] & is_kept[None, :],
            other=0.0,
        )
        own_x = tl.load(x + row * x_stride + head * head_dim + p, mask=is_kept, other=0.0)
        bias = tl.load(dt_bias + head).to(tl.float32) if has_bias else 0.0
        step = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
        weights, decay = _weigh(steps, step, rate)
        is_pending = weights > 0
        weighed_x = tl.where(is_pending[:, None], other_x.to(tl.float32) * weights[:, None], 0.0)
        products = tl.dot(h.to(dot_dtype), wide_c.to(dot_dtype), input_precision=precision)
        y = decay * tl.sum(products, axis=1)
        y += tl.sum(tl.where(is_pending[:, None], weighed_x * scores[:, None], 0.0), axis=0)
        skip = tl.load(d + head).to(tl.float32) if has_d else 0.0
        y += (step * own_score + skip) * own_x.to(tl.float32)
        if has_gate:
            own_gate = gate + row * gate_stride + head * head_dim + p
            gates = tl.load(own_gate, mask=is_kept, other=0.0).to(tl.float32)
            y *= gates * tl.sigmoid(gates)
        # A row of padding has a result of 0.
        y = tl.where(is_kept, y, 0.0)
        own_out = out + row * out_stride + head * head_dim + p
        tl.store(own_out, y.to(out.dtype.element_ty), mask=p < head_dim)

        if is_written:
            # The state is read a second time, from the L2 cache.
            added_x = tl.where(is_own[:, None], own_x.to(tl.float32)[None, :] * step, weighed_x)
            added_x = tl.trans(added_x.to(dot_dtype))
            for n_first in tl.range(0, size, n_written):
                some_n = n_first + tl.arange(0, n_written)
                is_some = some_n < size
                place = own_p[:, None] * size + some_n[None, :]
                old = tl.load(
                    own_state + place, mask=is_read[:, None] & is_some[None, :], other=0.0
                )
                added_b = tl.load(
                    all_b + places[:, None] * b_step + some_n[None, :],
                    mask=is_pending[:, None] & is_some[None, :],
                    other=0.0,
                )
                some_b = tl.load(row_b + some_n, mask=is_some, other=0.0)
                added_b = tl.where(is_own[:, None], some_b[None, :], added_b).to(dot_dtype)
                new = decay * old.to(tl.float32)
                new = tl.dot(added_x, added_b, new, input_precision=precision)
                tl.store(
                    own_state + place,
                    new.to(state.dtype.element_ty),
                    mask=is_kept[:, None] & is_some[None, :],
                )
        else:
            tl.store(all_x + own_place * x_step, own_x, mask=is_kept)
        # One program of a head keeps the step, and one of a group keeps b. None reads that place.
        is_first = (tl.program_id(0) == 0) & (slot >= 0)
        tl.store(all_steps + own_place * num_heads, tl.where(is_written, 0.0, step), mask=is_first)
    is_kept_b = (tl.program_id(0) == 0) & (slot >= 0) & (first_head % heads_per_group == 0)
    tl.store(all_b + own_place * b_step + n, own_b, mask=n < tl.where(is_kept_b, size, 0))
    if not releases_early:
        release_successor(overlaps)


@jit
def _scores(
    all_b: tensor,
    places: tensor,
    is_read: tensor,
    n: tensor,
    is_n: tensor,
    wide_c: tensor,
    precision: constexpr,
) -> tensor:
    """c by the b of each token before the row's own, [tokens]; any bits where none is pending.

    Args:
        all_b: the first place of the sequence's group.
        places: [tokens], elements from there.
        is_read: [tokens], which to read.
        n: [size_pow2], the numbers of b and of c.
        is_n: [size_pow2], which of them there are.
        wide_c: [size_pow2, columns], of which all but the first are 0.
        precision: of the product.
    """
    other_b = tl.load(
        all_b + places[:, None] + n[None, :], mask=is_read[:, None] & is_n[None, :], other=0.0
    )
    return tl.sum(tl.dot(other_b, wide_c, input_precision=precision), axis=1)


@jit
def turn_of(position: tensor, head: tensor, num_places: constexpr) -> tensor:
    """Which of K turns a head has at a position; in the last one it writes its state."""
    return (position + head) % num_places


@jit
def count_pending(position: tensor, head: tensor, num_places: constexpr) -> tensor:
    """Tokens of a head before a position that are not in the state, unless their dt is 0."""
    return tl.minimum(turn_of(position, head, num_places), position).to(tl.int32)


@jit
def _weigh(steps: tensor, step: tensor, rate: tensor) -> tuple[tensor, tensor]:
    """Each pending token's dt by its decay until the row's own, [places]; the state's decay.

    What is in the state already, or was never written, has the weight 0. The rest of it may be NaN.
    """
    exponents = steps * rate
    total = tl.sum(exponents, axis=0)
    own_decay = tl.exp(step * rate)
    weights = steps * tl.exp(total - tl.cumsum(exponents, axis=0)) * own_decay
    return weights, tl.exp(total) * own_decay
