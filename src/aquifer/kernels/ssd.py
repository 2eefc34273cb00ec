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
chunks, and y. Between them, states are in the dtype of x: 100 MB for 8192 tokens, 24 heads, P 128
and N 256. One launch in which programs keep their part of the state in registers along a span took
845 us in place of 500 for 4 x 2048 tokens of that shape, on an H200.

Single tokens (`ssd_update.py`) write the state every few tokens only. Chunks begin with what those
before them left pending, and leave a state that has all tokens.

Shapes throughout: `state` [slots, H, P, N], of which the first stride is any; x and out [rows, H,
P], b and c [rows, G, N], and dt [rows, H], of which only the first stride is any: they may be
columns of one tensor. Head h reads group h // (H / G) of b and c. `a_log`, `d` and `dt_bias` are
[H].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    MIN_DOT,
    constexpr,
    jit,
    jit_once,
    launch,
    pow2,
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

_OUT_WARPS, _OUT_STAGES = 8, 2
"""Warps and stages of the programs of the third launch, for 16-bit types."""

_PASS_TILE = 256


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
    # exp of the sum over the whole chunk.
    decays = torch.empty(num_chunks, num_heads, dtype=torch.float32, device=x.device)
    shapes = {
        "head_dim": head_dim,
        "size": size,
        "heads_per_group": num_heads // num_groups,
        "num_heads": num_heads,
        "tokens": tokens,
        "has_bias": dt_bias is not None,
        "precision": "ieee" if is_wide else "tf32",
    }
    inputs = (
        x,
        dt,
        a_log,
        b,
        dt_bias,
        spans.device_offsets,
        states,
        decays,
        num_spans,
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        dt_limit[0],
        dt_limit[1],
    )
    p_block = min(pow2(head_dim, MIN_DOT), 32 if is_wide else 128)
    n_block = min(pow2(size, MIN_DOT), 32 if is_wide else 256)
    launch(
        _added_kernel,
        (-(-head_dim // p_block) * -(-size // n_block), num_heads, num_chunks),
        *inputs,
        **shapes,
        p_block=p_block,
        n_block=n_block,
        num_warps=4 if is_wide else 8,
        num_stages=1,
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
        decays,
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
        num_warps=4,
    )
    launch(
        _out_kernel,
        (-(-head_dim // p_block), num_heads, num_chunks),
        *inputs,
        c,
        d,
        gate,
        out,
        spans.device_slots,
        pending.steps,
        c.stride(0),
        0 if gate is None else gate.stride(0),
        out.stride(0),
        pending.steps.stride(0),
        num_places=pending.num_places,
        places_pow2=pow2(pending.num_places),
        has_d=d is not None,
        has_gate=gate is not None,
        **shapes,
        p_block=p_block,
        n_block=min(n_block, 64),
        num_warps=4 if is_wide else _OUT_WARPS,
        num_stages=_OUT_STAGES,
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


@jit_once(counts=["num_spans"], indices=["offsets", "x", "dt", "b"])
def _added_kernel(
    x: tensor,
    dt: tensor,
    a_log: tensor,
    b: tensor,
    dt_bias: tensor,
    offsets: tensor,
    states: tensor,
    decays: tensor,
    num_spans: tensor,
    x_stride: tensor,
    dt_stride: tensor,
    b_stride: tensor,
    least_step: tensor,
    most_step: tensor,
    head_dim: constexpr,
    size: constexpr,
    heads_per_group: constexpr,
    num_heads: constexpr,
    tokens: constexpr,
    has_bias: constexpr,
    p_block: constexpr,
    n_block: constexpr,
    precision: constexpr,
) -> None:
    """A program computes a tile of what a chunk adds to the state of one head."""
    chunk = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    span, index = find_chunk(offsets, num_spans, tokens, tl.program_id(2))
    end = tl.load(offsets + span + 1)
    first = tl.load(offsets + span) + index.to(tl.int64) * tokens
    if first < end:
        n_blocks: tl.constexpr = (size + n_block - 1) // n_block
        p = tl.program_id(0) // n_blocks * p_block + tl.arange(0, p_block)
        n = tl.program_id(0) % n_blocks * n_block + tl.arange(0, n_block)
        row = first + tl.arange(0, tokens)
        is_row = row < end
        step, total = _chunk_steps(
            dt, a_log, dt_bias, dt_stride, least_step, most_step, row, is_row, head, has_bias
        )
        whole = tl.sum(tl.where(tl.arange(0, tokens) == tokens - 1, total, 0.0), axis=0)
        own_x = tl.load(
            x + row[None, :] * x_stride + head * head_dim + p[:, None],
            mask=is_row[None, :] & (p < head_dim)[:, None],
            other=0.0,
        )
        own_b = tl.load(
            b + row[:, None] * b_stride + head // heads_per_group * size + n[None, :],
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
            tl.store(decays + chunk * num_heads + head, tl.exp(whole))


@jit_once(indices=["span_slots", "starts", "offsets"])
def _pass_kernel(
    state: tensor,
    pending_x: tensor,
    pending_b: tensor,
    pending_steps: tensor,
    a_log: tensor,
    states: tensor,
    decays: tensor,
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

    What each chunk adds is replaced by the state before it. What the next chunk adds is read before
    that, since reading takes longer than the rest.
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
    own_decays = decays + chunk * num_heads + head
    added = tl.load(own, mask=inside, other=0.0)
    decay = tl.load(own_decays)

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
        has_next = done < count
        next_own = own + num_heads * numbers
        own_decays += num_heads
        next_added = tl.load(next_own, mask=place < tl.where(has_next, numbers, 0), other=0.0)
        next_decay = tl.load(own_decays, mask=has_next, other=0.0)
        tl.store(own, h.to(states.dtype.element_ty), mask=inside)
        h = decay * h + added.to(tl.float32)
        own, added, decay = next_own, next_added, next_decay
    tl.store(own_state, h.to(state.dtype.element_ty), mask=inside)


@jit_once(counts=["num_spans"], indices=["offsets", "span_slots", "x", "dt", "b", "c", "gate"])
def _out_kernel(
    x: tensor,
    dt: tensor,
    a_log: tensor,
    b: tensor,
    dt_bias: tensor,
    offsets: tensor,
    states: tensor,
    decays: tensor,
    num_spans: tensor,
    x_stride: tensor,
    dt_stride: tensor,
    b_stride: tensor,
    least_step: tensor,
    most_step: tensor,
    c: tensor,
    d: tensor,
    gate: tensor,
    out: tensor,
    span_slots: tensor,
    pending_steps: tensor,
    c_stride: tensor,
    gate_stride: tensor,
    out_stride: tensor,
    pending_steps_stride: tensor,
    num_places: constexpr,
    places_pow2: constexpr,
    has_d: constexpr,
    has_gate: constexpr,
    head_dim: constexpr,
    size: constexpr,
    heads_per_group: constexpr,
    num_heads: constexpr,
    tokens: constexpr,
    has_bias: constexpr,
    p_block: constexpr,
    n_block: constexpr,
    precision: constexpr,
) -> None:
    """A program computes the results of a chunk for `p_block` dimensions of one head."""
    chunk = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    span, index = find_chunk(offsets, num_spans, tokens, tl.program_id(2))
    end = tl.load(offsets + span + 1)
    first = tl.load(offsets + span) + index.to(tl.int64) * tokens
    if first < end:
        if (index == 0) & (tl.program_id(0) == 0):  # the launch before this one has read them
            slot = tl.load(span_slots + span)
            place = tl.arange(0, places_pow2)
            steps = pending_steps + slot * pending_steps_stride + place * num_heads + head
            tl.store(steps, tl.zeros([places_pow2], tl.float32), mask=place < num_places)
        p = tl.program_id(0) * p_block + tl.arange(0, p_block)
        is_p = p < head_dim
        token = tl.arange(0, tokens)
        row = first + token
        is_row = row < end
        step, total = _chunk_steps(
            dt, a_log, dt_bias, dt_stride, least_step, most_step, row, is_row, head, has_bias
        )
        group = head // heads_per_group * size
        scores = tl.zeros([tokens, tokens], tl.float32)
        own_c = c + row[:, None] * c_stride + group
        for n_first in range(0, size, n_block):
            n = n_first + tl.arange(0, n_block)
            is_n = n < size
            some_c = tl.load(own_c + n[None, :], mask=is_row[:, None] & is_n[None, :], other=0.0)
            some_b = tl.load(
                b + row[None, :] * b_stride + group + n[:, None],
                mask=is_row[None, :] & is_n[:, None],
                other=0.0,
            )
            scores = tl.dot(some_c, some_b, scores, input_precision=precision)
        is_past = token[:, None] >= token[None, :]
        between = tl.where(is_past, total[:, None] - total[None, :], 0.0)
        scores = tl.where(is_past, scores * tl.exp(between) * step[None, :], 0.0)
        weights = scores.to(x.dtype.element_ty)
        # The scores are narrow before the results take registers.
        y = tl.zeros([tokens, p_block], tl.float32)
        for n_first in range(0, size, n_block):
            n = n_first + tl.arange(0, n_block)
            is_n = n < size
            some_c = tl.load(own_c + n[None, :], mask=is_row[:, None] & is_n[None, :], other=0.0)
            place = ((chunk * num_heads + head) * head_dim + p)[None, :] * size + n[:, None]
            h = tl.load(states + place, mask=is_p[None, :] & is_n[:, None], other=0.0)
            y = tl.dot(some_c, h.to(some_c.dtype), y, input_precision=precision)
        y *= tl.exp(total)[:, None]
        own_x = tl.load(
            x + row[:, None] * x_stride + head * head_dim + p[None, :],
            mask=is_row[:, None] & is_p[None, :],
            other=0.0,
        )
        y = tl.dot(weights, own_x, y, input_precision=precision)
        if has_d:
            y += tl.load(d + head).to(tl.float32) * own_x.to(tl.float32)
        if has_gate:
            gates = tl.load(
                gate + row[:, None] * gate_stride + head * head_dim + p[None, :],
                mask=is_row[:, None] & is_p[None, :],
                other=0.0,
            ).to(tl.float32)
            y *= gates * tl.sigmoid(gates)
        tl.store(
            out + row[:, None] * out_stride + head * head_dim + p[None, :],
            y.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_p[None, :],
        )
