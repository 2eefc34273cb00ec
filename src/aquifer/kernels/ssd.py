"""State space duality, the recurrence of Mamba-2 (Dao and Gu, 2024, sections 3 and 6).

For a token and a head with input x of P numbers, step dt, and vectors b and c of N numbers:

    dt <- clamp(softplus(dt + dt_bias), dt_limit)
    h <- exp(-dt exp(a_log)) h + dt x b^T                 [P, N]
    y = h c + d x

Chunks of several tokens are computed by matrix products (section 6). With cs the sum of
-dt exp(a_log) from the beginning of a chunk of L tokens, and h the state before it:

    y[l] = exp(cs[l]) h c[l] + d x[l]
           + sum over s <= l of (c[l] . b[s]) exp(cs[l] - cs[s]) dt[s] x[s]
    h'   = exp(cs[L - 1]) h + sum over s of exp(cs[L - 1] - cs[s]) dt[s] x[s] b[s]^T

in three launches: what all chunks add to the state (the second term of h'), the states before all
chunks, and y. The first one computes c[l] . b[s] too, once for all heads of a group. Between them,
states are in the dtype of x: 100 MB for 8192 tokens, 24 heads, P 128 and N 256. One launch in which
programs keep their part of the state in registers along a span took 845 us in place of 500 for
4 x 2048 tokens of that shape, on an H200.

Single tokens (`ssd_update.py`) write the state every few tokens only. Chunks begin with what those
before them left pending, and leave a state that has all tokens.

Shapes throughout: `state` [slots, H, P, N], of which the first stride is any; x and out [rows, H,
P], b and c [rows, G, N], and dt [rows, H], of which only the first stride is any: they may be
columns of one tensor. Head h reads group h // (H / G) of b and c. `a_log`, `d` and `dt_bias` are
[H].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    MIN_DOT,
    constexpr,
    jit,
    jit_once,
    launch,
    pow2,
    row_unit,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.activation import softplus
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.span_chunks import SortedSpans, count_chunks, find_chunk, wide_dtype
from aquifer.kernels.ssd_update import Pending, check_inputs, count_pending, time_steps

_CHUNK_TOKENS = 128
"""Tokens of a chunk, for 16-bit types. With half of them, there are twice as many states."""


@dataclass(frozen=True, slots=True)
class _Config:
    """Tiles of a launch, for 16-bit types: dimensions of a head, and numbers of a row of the state
    that are read at a time; warps and stages."""

    p_block: int
    n_block: int
    num_warps: int
    num_stages: int


_ADDED = _Config(128, 128, 4, 1)
_OUT, _OUT_TOKENS = _Config(128, 64, 8, 3), 64
_PASS_TILE, _PASS_WARPS = 1024, 4
_SCORE_NUMBERS = 64  # of b and c that are in shared memory at a time, for c[l] . b[s]


def scan_chunks_reference(
    state: torch.Tensor,
    pending: Pending,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    gate: torch.Tensor | None = None,
) -> None:
    """`scan_chunks` in plain torch."""
    if not spans.slots:
        return
    wide = wide_dtype(x)
    num_heads, heads_per_group = x.shape[1], x.shape[1] // b.shape[1]
    rates = -a_log.to(wide).exp()
    sorted_spans = SortedSpans(spans, x.device)
    h = sorted_spans.read(state)  # [spans, H, P, N]
    decay, pending_x, pending_b = pending.weigh(a_log, sorted_spans.slots, sorted_spans.starts)
    h = h * decay[..., None, None] + torch.einsum("skhp,skhn->shpn", pending_x, pending_b)
    for block in sorted_spans.blocks(num_heads * max(x.shape[2], b.shape[2], 32), max_tokens=32):
        inside = block.is_token[..., None]
        own_x = x[block.rows].to(wide)  # [spans, tokens, H, P]
        own_b, own_c = (
            each[block.rows].to(wide).repeat_interleave(heads_per_group, 2) for each in (b, c)
        )
        # A step of 0 leaves the state as it is.
        step = time_steps(dt[block.rows], dt_bias, dt_limit) * inside  # [spans, tokens, H]
        total = (step * rates).cumsum(1)
        # Decay from token s to token l, 0 for later ones: [spans, l, s, H].
        length = total.shape[1]
        is_later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        between = total[:, :, None] - total[:, None]
        between = between.masked_fill(is_later[:, :, None], -torch.inf).exp()
        last = h[: block.num_spans]
        scores = torch.einsum("slhn,sthn->slth", own_c, own_b) * between
        steps_x = step[..., None] * own_x
        y = torch.einsum("slth,sthp->slhp", scores, steps_x)
        y += torch.einsum("shpn,slhn->slhp", last, own_c) * total.exp()[..., None]
        if d is not None:
            y += d.to(wide)[:, None] * own_x
        if gate is not None:
            y *= F.silu(gate[block.rows].to(wide))
        to_end = (total[:, -1:] - total).exp()
        added = torch.einsum("sthp,sthn->shpn", to_end[..., None] * steps_x, own_b)
        h[: block.num_spans] = last * total[:, -1].exp()[..., None, None] + added
        out[block.rows[block.is_token]] = y[block.is_token].to(out.dtype)
    state[sorted_spans.slots] = h.to(state.dtype)
    pending.steps[sorted_spans.slots] = 0


def scan_chunks(
    state: torch.Tensor,
    pending: Pending,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    gate: torch.Tensor | None = None,
) -> None:
    """Update states by chunks of several tokens.

    Args:
        state: this and the next ones as in `state_update`, with the rows of the whole step.
        pending: likewise; none of the tokens are pending after it.
        x: likewise.
        dt: likewise.
        a_log: likewise.
        b: likewise.
        c: likewise.
        d: likewise.
        dt_bias: likewise.
        spans: the chunks; where one starts at 0, the state begins as 0, and is not read.
        out: [rows, H, P]; only the rows of the chunks are overwritten.
        dt_limit: bounds of a step.
        gate: as in `state_update`.
    """
    if not spans.slots:
        return
    if not runs_triton(x):
        scan_chunks_reference(
            state, pending, x, dt, a_log, b, c, d, dt_bias, spans, out, dt_limit=dt_limit, gate=gate
        )
        return
    check_inputs(state, pending, x, dt, a_log, b, c, d, dt_bias, out, gate)
    num_heads, head_dim = x.shape[1:]
    num_groups, size = b.shape[1:]
    is_wide = x.dtype == torch.float32
    num_spans = len(spans.slots)
    tokens = 32 if is_wide else _CHUNK_TOKENS
    num_chunks = count_chunks(spans, tokens)
    states = x.new_empty(num_chunks, num_heads, head_dim, size)
    # Of each chunk: steps, sums of their exponents, and c[l] . b[s].
    steps = x.new_empty(num_chunks, num_heads, tokens, dtype=torch.float32)
    totals = torch.empty_like(steps)
    scores = x.new_empty(num_chunks, num_groups, tokens, tokens, dtype=torch.float32)
    shapes = {
        "head_dim": head_dim,
        "size": size,
        "heads_per_group": num_heads // num_groups,
        "num_heads": num_heads,
        "tokens": tokens,
        "precision": "ieee" if is_wide else "tf32",
    }
    chunks = (x, c, states, steps, totals, scores, spans.device_offsets, num_spans)
    p_block = min(pow2(head_dim, MIN_DOT), 32 if is_wide else _ADDED.p_block)
    n_block = min(pow2(size, MIN_DOT), 32 if is_wide else _ADDED.n_block)
    launch(
        _added_kernel,
        (-(-head_dim // p_block) * -(-size // n_block), num_heads, num_chunks),
        *chunks,
        b,
        dt,
        dt_bias,
        a_log,
        x.stride(0),
        c.stride(0),
        b.stride(0),
        dt.stride(0),
        dt_limit[0],
        dt_limit[1],
        has_bias=dt_bias is not None,
        **shapes,
        p_block=p_block,
        n_block=n_block,
        m_block=min(n_block, _SCORE_NUMBERS),
        num_warps=4 if is_wide else _ADDED.num_warps,
        num_stages=_ADDED.num_stages,
    )
    tile = min(_PASS_TILE, pow2(head_dim * size))
    launch(
        _pass_kernel,
        (-(-head_dim * size // tile), num_heads, num_spans),
        state,
        pending.x,
        pending.b,
        pending.steps,
        a_log,
        states,
        totals,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        state.stride(0),
        pending.x.stride(0),
        pending.b.stride(0),
        pending.steps.stride(0),
        num_heads=num_heads,
        head_dim=head_dim,
        size=size,
        heads_per_group=num_heads // num_groups,
        num_places=pending.num_places,
        tokens=tokens,
        tile=tile,
        num_warps=_PASS_WARPS,
    )
    p_block = min(pow2(head_dim, MIN_DOT), 32 if is_wide else _OUT.p_block)
    t_block = tokens if is_wide else _OUT_TOKENS
    gate_unit = 1 if gate is None else row_unit(gate)
    launch(
        _out_kernel,
        (-(-head_dim // p_block) * (tokens // t_block), num_heads, num_chunks),
        *chunks,
        d,
        gate,
        out,
        spans.device_slots,
        pending.steps,
        x.stride(0),
        c.stride(0),
        0 if gate is None else gate.stride(0) // gate_unit,
        out.stride(0),
        pending.steps.stride(0),
        gate_unit=gate_unit,
        num_places=pending.num_places,
        places_pow2=pow2(pending.num_places),
        has_d=d is not None,
        has_gate=gate is not None,
        **shapes,
        t_block=t_block,
        p_block=p_block,
        n_block=min(pow2(size, MIN_DOT), 32 if is_wide else _OUT.n_block),
        num_warps=4 if is_wide else _OUT.num_warps,
        num_stages=_OUT.num_stages,
    )


@jit
def _chunk_steps(
    dt: tensor,
    a_log: tensor,
    dt_bias: tensor,
    dt_stride: tensor,
    least_step: tensor,
    most_step: tensor,
    row: tensor,
    is_row: tensor,
    head: tensor,
    has_bias: constexpr,
) -> tuple[tensor, tensor]:
    """Steps of a chunk's tokens, 0 behind its end, and the sums of their exponents, [tokens]."""
    step = tl.load(dt + row * dt_stride + head, mask=is_row, other=0.0).to(tl.float32)
    if has_bias:
        step += tl.load(dt_bias + head).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step), least_step), most_step)
    step = tl.where(is_row, step, 0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    return step, tl.cumsum(step * rate, axis=0)


@jit_once(counts=["num_spans"], indices=["offsets"])
def _added_kernel(
    x: tensor,
    c: tensor,
    states: tensor,
    steps: tensor,
    totals: tensor,
    scores: tensor,
    offsets: tensor,
    num_spans: tensor,
    b: tensor,
    dt: tensor,
    dt_bias: tensor,
    a_log: tensor,
    x_stride: tensor,
    c_stride: tensor,
    b_stride: tensor,
    dt_stride: tensor,
    least_step: tensor,
    most_step: tensor,
    has_bias: constexpr,
    head_dim: constexpr,
    size: constexpr,
    heads_per_group: constexpr,
    num_heads: constexpr,
    tokens: constexpr,
    precision: constexpr,
    p_block: constexpr,
    n_block: constexpr,
    m_block: constexpr,
) -> None:
    """A program computes a tile of what a chunk adds to the state of one head.

    One program of a head keeps its steps, and one of a group what the group's heads have in common.
    """
    chunk = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    span, index = find_chunk(offsets, num_spans, tokens, tl.program_id(2))
    end = tl.load(offsets + span + 1)
    first = tl.load(offsets + span) + index.to(tl.int64) * tokens
    if first < end:
        n_blocks: tl.constexpr = (size + n_block - 1) // n_block
        num_groups: tl.constexpr = num_heads // heads_per_group
        p = tl.program_id(0) // n_blocks * p_block + tl.arange(0, p_block)
        n = tl.program_id(0) % n_blocks * n_block + tl.arange(0, n_block)
        token = tl.arange(0, tokens)
        row = first + token
        is_row = row < end
        step, total = _chunk_steps(
            dt, a_log, dt_bias, dt_stride, least_step, most_step, row, is_row, head, has_bias
        )
        whole = tl.sum(tl.where(token == tokens - 1, total, 0.0), axis=0)
        own_x = tl.load(
            x + row[None, :] * x_stride + head * head_dim + p[:, None],
            mask=is_row[None, :] & (p < head_dim)[:, None],
            other=0.0,
        )
        group_b = b + head // heads_per_group * size
        own_b = tl.load(
            group_b + row[:, None] * b_stride + n[None, :],
            mask=is_row[:, None] & (n < size)[None, :],
            other=0.0,
        )
        weighed = own_x.to(tl.float32) * (tl.exp(whole - total) * step)[None, :]
        added = tl.dot(weighed.to(own_b.dtype), own_b, input_precision=precision)
        place = ((chunk * num_heads + head) * head_dim + p)[:, None] * size + n[None, :]
        tl.store(
            states + place,
            added.to(states.dtype.element_ty),
            mask=(p < head_dim)[:, None] & (n < size)[None, :],
        )
        if tl.program_id(0) == 0:
            own = (chunk * num_heads + head) * tokens + token
            tl.store(steps + own, step)
            tl.store(totals + own, total)
            if head % heads_per_group == 0:
                group = head // heads_per_group
                own_c = c + row[:, None] * c_stride + group * size
                products = tl.zeros([tokens, tokens], tl.float32)
                for m_first in range(0, size, m_block):
                    m = m_first + tl.arange(0, m_block)
                    is_read = is_row[:, None] & (m < size)[None, :]
                    some_c = tl.load(own_c + m[None, :], mask=is_read, other=0.0)
                    some_b = tl.load(
                        group_b + row[:, None] * b_stride + m[None, :], mask=is_read, other=0.0
                    )
                    products = tl.dot(some_c, tl.trans(some_b), products, input_precision=precision)
                chunk_scores = scores + (chunk * num_groups + group) * (tokens * tokens)
                tl.store(chunk_scores + token[:, None] * tokens + token[None, :], products)


@jit_once(indices=["span_slots", "starts", "offsets"])
def _pass_kernel(
    state: tensor,
    pending_x: tensor,
    pending_b: tensor,
    pending_steps: tensor,
    a_log: tensor,
    states: tensor,
    totals: tensor,
    span_slots: tensor,
    starts: tensor,
    offsets: tensor,
    state_stride: tensor,
    pending_x_stride: tensor,
    pending_b_stride: tensor,
    pending_steps_stride: tensor,
    num_heads: constexpr,
    head_dim: constexpr,
    size: constexpr,
    heads_per_group: constexpr,
    num_places: constexpr,
    tokens: constexpr,
    tile: constexpr,
) -> None:
    """A program passes `tile` numbers of the state of one head along the chunks of a span.

    What each chunk adds is replaced by the state before it. What the next two chunks add is read
    before that, since reading takes longer than the rest.
    """
    numbers: constexpr = head_dim * size
    span = tl.program_id(2)
    head = tl.program_id(1)
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = place < numbers
    begin = tl.load(offsets + span)
    count = tl.load(offsets + span + 1) - begin
    chunk = ((begin - tl.load(offsets)) // tokens + span).to(tl.int64)
    slot = tl.load(span_slots + span)
    start = tl.load(starts + span)
    own_state = state + slot * state_stride + head * numbers + place
    is_read = place < tl.where(start > 0, numbers, 0)
    h = tl.load(own_state, mask=is_read, other=0.0).to(tl.float32)
    own = states + (chunk * num_heads + head) * numbers + place
    # The sum of a whole chunk is that of its last token, or of places behind it.
    own_total = totals + (chunk * num_heads + head) * tokens + tokens - 1
    added = tl.load(own, mask=inside, other=0.0)
    total = tl.load(own_total)
    # Behind the last chunk, it is read once more.
    ahead = tl.where(count > tokens, 1, 0).to(tl.int64)
    next_added = tl.load(own + ahead * num_heads * numbers, mask=inside, other=0.0)
    next_total = tl.load(own_total + ahead * num_heads * tokens)

    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    own_steps = pending_steps + slot * pending_steps_stride + head
    own_x = pending_x + slot * pending_x_stride + head * head_dim + place // size
    own_b = pending_b + slot * pending_b_stride + head // heads_per_group * size + place % size
    for age in range(-count_pending(start, head, num_places), 0):
        token = (start + age) % num_places
        step = tl.load(own_steps + token * num_heads)
        is_added = inside & (place < tl.where(step > 0, numbers, 0))
        one_x = tl.load(own_x + token * (num_heads * head_dim), mask=is_added, other=0.0)
        b_place = token * (num_heads // heads_per_group * size)
        one_b = tl.load(own_b + b_place, mask=is_added, other=0.0)
        h = tl.exp(step * rate) * h + step * one_x.to(tl.float32) * one_b.to(tl.float32)

    for done in range(tokens, count + tokens, tokens):
        ahead = tl.where(done + tokens < count, 2, 0).to(tl.int64)
        later_added = tl.load(own + ahead * num_heads * numbers, mask=inside, other=0.0)
        later_total = tl.load(own_total + ahead * num_heads * tokens)
        tl.store(own, h.to(states.dtype.element_ty), mask=inside)
        h = tl.exp(total) * h + added.to(tl.float32)
        added, total = next_added, next_total
        next_added, next_total = later_added, later_total
        own += num_heads * numbers
        own_total += num_heads * tokens
    tl.store(own_state, h.to(state.dtype.element_ty), mask=inside)


@jit_once(counts=["num_spans"], indices=["offsets", "span_slots"])
def _out_kernel(
    x: tensor,
    c: tensor,
    states: tensor,
    steps: tensor,
    totals: tensor,
    scores: tensor,
    offsets: tensor,
    num_spans: tensor,
    d: tensor,
    gate: tensor,
    out: tensor,
    span_slots: tensor,
    pending_steps: tensor,
    x_stride: tensor,
    c_stride: tensor,
    gate_units: tensor,
    out_stride: tensor,
    pending_steps_stride: tensor,
    gate_unit: constexpr,
    num_places: constexpr,
    places_pow2: constexpr,
    has_d: constexpr,
    has_gate: constexpr,
    head_dim: constexpr,
    size: constexpr,
    heads_per_group: constexpr,
    num_heads: constexpr,
    tokens: constexpr,
    precision: constexpr,
    t_block: constexpr,
    p_block: constexpr,
    n_block: constexpr,
) -> None:
    """A program computes `p_block` dimensions of one head of `t_block` results of a chunk."""
    chunk = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    span, index = find_chunk(offsets, num_spans, tokens, tl.program_id(2))
    end = tl.load(offsets + span + 1)
    first = tl.load(offsets + span) + index.to(tl.int64) * tokens
    if first < end:
        if (index == 0) & (tl.program_id(0) == 0):  # the launch before this one has read them
            slot = tl.load(span_slots + span)
            place = tl.arange(0, places_pow2)
            read = pending_steps + slot * pending_steps_stride + place * num_heads + head
            tl.store(read, tl.zeros([places_pow2], tl.float32), mask=place < num_places)
        t_blocks: tl.constexpr = tokens // t_block
        num_groups: tl.constexpr = num_heads // heads_per_group
        p = tl.program_id(0) // t_blocks * p_block + tl.arange(0, p_block)
        is_p = p < head_dim
        own_token = tl.program_id(0) % t_blocks * t_block + tl.arange(0, t_block)
        token = tl.arange(0, tokens)
        own_row, row = first + own_token, first + token
        is_own, is_row = own_row < end, row < end
        is_result = is_own[:, None] & is_p[None, :]
        group = head // heads_per_group
        places = (chunk * num_heads + head) * tokens
        step = tl.load(steps + places + token)
        total = tl.load(totals + places + token)
        own_total = tl.load(totals + places + own_token)
        chunk_scores = scores + (chunk * num_groups + group) * (tokens * tokens)
        weights = tl.load(chunk_scores + own_token[:, None] * tokens + token[None, :])
        is_past = own_token[:, None] >= token[None, :]
        between = tl.where(is_past, own_total[:, None] - total[None, :], 0.0)
        weights = tl.where(is_past, weights * tl.exp(between) * step[None, :], 0.0)
        # They are narrow before the results take registers.
        weights = weights.to(x.dtype.element_ty)
        own_c = c + own_row[:, None] * c_stride + group * size
        own_h = states + ((chunk * num_heads + head) * head_dim + p)[None, :] * size
        y = tl.zeros([t_block, p_block], tl.float32)
        for n_first in range(0, size, n_block):
            n = n_first + tl.arange(0, n_block)
            is_n = n < size
            some_c = tl.load(own_c + n[None, :], mask=is_own[:, None] & is_n[None, :], other=0.0)
            h = tl.load(own_h + n[:, None], mask=is_p[None, :] & is_n[:, None], other=0.0)
            y = tl.dot(some_c, h.to(some_c.dtype), y, input_precision=precision)
        y *= tl.exp(own_total)[:, None]
        head_x = x + head * head_dim + p[None, :]
        all_x = tl.load(
            head_x + row[:, None] * x_stride, mask=is_row[:, None] & is_p[None, :], other=0.0
        )
        y = tl.dot(weights, all_x, y, input_precision=precision)
        if has_d:
            own_x = all_x
            if t_block < tokens:
                own_x = tl.load(head_x + own_row[:, None] * x_stride, mask=is_result, other=0.0)
            y += tl.load(d + head).to(tl.float32) * own_x.to(tl.float32)
        if has_gate:
            gates = tl.load(
                gate + own_row[:, None] * (gate_units * gate_unit) + head * head_dim + p[None, :],
                mask=is_result,
                other=0.0,
            ).to(tl.float32)
            y *= gates * tl.sigmoid(gates)
        tl.store(
            out + own_row[:, None] * out_stride + head * head_dim + p[None, :],
            y.to(out.dtype.element_ty),
            mask=is_result,
        )
