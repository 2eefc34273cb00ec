"""Selective scan of Mamba (Gu and Dao, 2023, algorithm 2): a state of N numbers for each channel.

For a token with input x, step dt, and vectors b and c of N numbers:

    dt <- softplus(dt + dt_bias)
    h[i, :] <- exp(-dt[i] exp(a_log[i, :])) h[i, :] + dt[i] x[i] b[:]
    y[i] = h[i, :] . c + d[i] x[i]

Shapes throughout: `state` [slots, I, N], of which the first stride is any; x, dt and out [rows, I],
b and c [rows, N], of which the last stride is 1 and the first is any. `a_log` [I, N], `d` [I] and
`dt_bias` [I] are contiguous. Everything is computed in float32.

The kernels keep the state of some channels in registers, and take the tokens one by one. What
bounds them is the exponential of each of I N numbers for each token. A long span is cut into chunks
that are computed at the same time, in three launches:

1. `_chunks_kernel`, with state 0 before each chunk but the last of a span: the state after it, and
   the sum of the steps dt, which gives the decay over the chunk.
2. `_pass_kernel`: with these, the state before each chunk.
3. `_chunks_kernel` once more, from the right state: the results, and the state after the span.

There are at most `_MAX_CHUNKS` intermediate states, however many tokens the step has: 32 MiB with
8192 channels of 16 numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
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
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.span_chunks import (
    SortedSpans,
    count_chunks,
    find_chunk,
    read_states,
    wide_dtype,
)

_MAX_CHUNKS = 64
"""Chunks of a step that are not the last of their span."""

_MIN_CHUNK_TOKENS = 32

_TILE = 512
"""Numbers of the state that a program has in registers."""

_TILE_WARPS = 1

_UPDATE_TILE = 2048
_UPDATE_WARPS = 4
_UPDATE_ROWS = 4
"""Rows of a program where there are many; it reads `a_log` once for them."""

_MANY_ROWS = 64


def selective_update_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`selective_update` in plain torch."""
    out[slots < 0] = 0
    (kept,) = torch.nonzero(slots >= 0, as_tuple=True)
    slots = slots[kept]
    wide = wide_dtype(x)
    x, b, c = (each[kept].to(wide) for each in (x, b, c))
    step = _steps(dt[kept], dt_bias)
    decay = torch.exp(step.unsqueeze(2) * -a_log.to(wide).exp())  # [rows, I, N]
    h = read_states(state, slots, positions[kept])
    h = torch.addcmul((step * x).unsqueeze(2) * b.unsqueeze(1), decay, h)
    state[slots] = h.to(state.dtype)
    y = torch.einsum("rin,rn->ri", h, c) + x * d
    out[kept] = y.to(out.dtype)


def selective_chunks_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
) -> None:
    """`selective_chunks` in plain torch."""
    if not spans.slots:
        return
    wide = wide_dtype(x)
    rates = -a_log.to(wide).exp()
    sorted_spans = SortedSpans(spans, x.device)
    h = sorted_spans.read(state)  # [spans, I, N]
    for block in sorted_spans.blocks(a_log.numel(), max_tokens=64):
        inside = block.is_token.unsqueeze(2)
        own_x, own_b, own_c = (each[block.rows].to(wide) for each in (x, b, c))
        # A step of 0 leaves the state as it is.
        step = _steps(dt[block.rows], dt_bias) * inside  # [spans, tokens, I]
        decays = torch.exp(step.unsqueeze(3) * rates)  # [spans, tokens, I, N]
        states = (step * own_x).unsqueeze(3) * own_b.unsqueeze(2)
        last = h[: block.num_spans]
        for token in range(states.shape[1]):
            last = states[:, token].addcmul_(decays[:, token], last)
        h[: block.num_spans] = last
        y = torch.einsum("stin,stn->sti", states, own_c) + own_x * d
        out[block.rows[block.is_token]] = y[block.is_token].to(out.dtype)
    state[sorted_spans.slots] = h.to(state.dtype)


def _steps(dt: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """softplus(dt + dt_bias), in float32 or wider."""
    dt = dt.to(wide_dtype(dt))
    return F.softplus(dt if dt_bias is None else dt + dt_bias)


def selective_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Update states by one token each.

    Args:
        state: [slots, I, N] float32 or the dtype of x; in and out.
        x: [rows, I].
        dt: [rows, I], before bias and softplus.
        a_log: [I, N] float32.
        b: [rows, N].
        c: [rows, N].
        d: [I] float32.
        dt_bias: [I] float32, or None.
        slots: [rows] int64, the row's sequence; -1 for padding, which changes no state and gets a
            finite result.
        positions: [rows] int64; at position 0 the state begins as 0, and is not read.
        out: [rows, I] of x's dtype, overwritten.
    """
    if not runs_triton(x):
        selective_update_reference(state, x, dt, a_log, b, c, d, dt_bias, slots, positions, out)
        return
    _check(state, x, dt, a_log, b, c, d, dt_bias, out)
    num_rows, num_channels = x.shape
    assert slots.shape == positions.shape == (num_rows,)
    if not num_rows:
        return
    size_pow2 = pow2(a_log.shape[1])
    channels = max(_UPDATE_TILE // size_pow2, 1)
    rows = _UPDATE_ROWS if num_rows >= _MANY_ROWS else 1
    launch(
        _update_kernel,
        (-(-num_channels // channels), -(-num_rows // rows)),
        state,
        x,
        dt,
        a_log,
        b,
        c,
        d,
        dt_bias,
        slots,
        positions,
        out,
        num_rows,
        state.stride(0),
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        out.stride(0),
        num_channels=num_channels,
        size=a_log.shape[1],
        size_pow2=size_pow2,
        channels=channels,
        rows=rows,
        has_bias=dt_bias is not None,
        num_warps=_UPDATE_WARPS,
        **launch_options(x.device),
    )


def selective_chunks(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
) -> None:
    """Update states by chunks of several tokens.

    Args:
        state: this and the next ones as in `selective_update`, with the rows of the whole step.
        x: likewise.
        dt: likewise.
        a_log: likewise.
        b: likewise.
        c: likewise.
        d: likewise.
        dt_bias: likewise.
        spans: the chunks; where one starts at 0, the state begins as 0, and is not read.
        out: [rows, I]; only the rows of the chunks are overwritten.
    """
    if not spans.slots:
        return
    if not runs_triton(x):
        selective_chunks_reference(state, x, dt, a_log, b, c, d, dt_bias, spans, out)
        return
    _check(state, x, dt, a_log, b, c, d, dt_bias, out)
    assert spans.offsets[-1] <= len(x)
    num_tokens = spans.offsets[-1] - spans.offsets[0]
    chunk_tokens = max(pow2(-(-num_tokens // _MAX_CHUNKS)), _MIN_CHUNK_TOKENS)
    num_channels, size = a_log.shape
    num_spans = len(spans.slots)
    num_kept = num_tokens // chunk_tokens
    # The states after chunks, and the sums of their steps; see `_kept_index`.
    states = torch.empty(num_kept, num_channels, size, dtype=torch.float32, device=x.device)
    steps = torch.empty(num_kept, num_channels, dtype=torch.float32, device=x.device)
    size_pow2 = pow2(size)
    channels = max(_TILE // size_pow2, 1)

    def run(*, is_local: bool) -> None:
        launch(
            _chunks_kernel,
            (-(-num_channels // channels), count_chunks(spans, chunk_tokens)),
            state,
            x,
            dt,
            a_log,
            b,
            c,
            d,
            dt_bias,
            spans.device_slots,
            spans.device_starts,
            spans.device_offsets,
            states,
            steps,
            out,
            num_spans,
            chunk_tokens,
            state.stride(0),
            x.stride(0),
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            out.stride(0),
            num_channels=num_channels,
            size=size,
            size_pow2=size_pow2,
            channels=channels,
            has_bias=dt_bias is not None,
            is_local=is_local,
            num_warps=_TILE_WARPS,
        )

    # The first two have nothing to do where each span is one chunk. They are launched all the same,
    # so that the first prompt of a model, however short, is what compiles all of them.
    run(is_local=True)
    launch(
        _pass_kernel,
        (-(-num_channels * size // _TILE), num_spans),
        state,
        a_log,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        states,
        steps,
        chunk_tokens,
        state.stride(0),
        num_channels=num_channels,
        size=size,
        tile=_TILE,
        num_warps=_TILE_WARPS,
    )
    run(is_local=False)


def _check(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_rows, num_channels = x.shape
    size = a_log.shape[1]
    assert state.shape[1:] == a_log.shape == (num_channels, size)
    assert state[0].is_contiguous()
    assert dt.shape == out.shape == x.shape
    assert b.shape == c.shape == (num_rows, size)
    assert all(each.stride(1) == 1 for each in (x, dt, b, c, out))
    weights = (a_log, d) if dt_bias is None else (a_log, d, dt_bias)
    assert all(each.is_contiguous() for each in weights)
    assert all(each.shape == (num_channels,) for each in weights[1:])


@jit_once(counts=["num_rows"], indices=["slots", "positions"])
def _update_kernel(
    state: tensor,
    x: tensor,
    dt: tensor,
    a_log: tensor,
    b: tensor,
    c: tensor,
    d: tensor,
    dt_bias: tensor,
    slots: tensor,
    positions: tensor,
    out: tensor,
    num_rows: tensor,
    state_stride: tensor,
    x_stride: tensor,
    dt_stride: tensor,
    b_stride: tensor,
    c_stride: tensor,
    out_stride: tensor,
    num_channels: constexpr,
    size: constexpr,
    size_pow2: constexpr,
    channels: constexpr,
    rows: constexpr,
    has_bias: constexpr,
    overlaps: constexpr,
) -> None:
    """A program updates `channels` channels of `rows` rows."""
    channel = tl.program_id(0) * channels + tl.arange(0, channels)
    is_channel = channel < num_channels
    n = tl.arange(0, size_pow2)
    is_n = n < size
    place = channel[:, None] * size + n
    inside = is_channel[:, None] & is_n
    rates = _rates(a_log, place, inside)
    skip = tl.load(d + channel, mask=is_channel, other=0.0).to(tl.float32)
    bias = tl.zeros([channels], tl.float32)
    if has_bias:
        bias += tl.load(dt_bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    await_predecessor(overlaps)
    first = tl.program_id(1).to(tl.int64) * rows
    for index in tl.static_range(rows):
        row = first + index
        slot = tl.load(slots + row, mask=row < num_rows, other=-1)
        position = tl.load(positions + row, mask=row < num_rows, other=0)
        # Triton's interpreter has no mask of a vector and a number.
        is_read = channel < tl.where((slot >= 0) & (position > 0), num_channels, 0)
        has_channel = channel < tl.where(slot >= 0, num_channels, 0)
        has_n = n < tl.where(slot >= 0, size, 0)
        own_state = state + slot * state_stride + place
        h = tl.load(own_state, mask=is_read[:, None] & is_n, other=0.0).to(tl.float32)
        own_x = tl.load(x + row * x_stride + channel, mask=has_channel, other=0.0).to(tl.float32)
        own_dt = tl.load(dt + row * dt_stride + channel, mask=has_channel, other=0.0)
        own_b = tl.load(b + row * b_stride + n, mask=has_n, other=0.0).to(tl.float32)
        own_c = tl.load(c + row * c_stride + n, mask=has_n, other=0.0).to(tl.float32)
        step = softplus(own_dt.to(tl.float32) + bias)
        h = tl.exp2(step[:, None] * rates) * h + (step * own_x)[:, None] * own_b
        tl.store(own_state, h.to(state.dtype.element_ty), mask=has_channel[:, None] & is_n)
        y = tl.sum(h * own_c, axis=1) + skip * own_x
        # A row of padding has a result of 0.
        own_out = out + row * out_stride + channel
        is_stored = channel < tl.where(row < num_rows, num_channels, 0)
        tl.store(own_out, y.to(out.dtype.element_ty), mask=is_stored)
    release_successor(overlaps)


@jit_once(counts=["num_spans", "chunk_tokens"], indices=["slots", "starts", "offsets"])
def _chunks_kernel(
    state: tensor,
    x: tensor,
    dt: tensor,
    a_log: tensor,
    b: tensor,
    c: tensor,
    d: tensor,
    dt_bias: tensor,
    slots: tensor,
    starts: tensor,
    offsets: tensor,
    states: tensor,
    steps: tensor,
    out: tensor,
    num_spans: tensor,
    chunk_tokens: tensor,
    state_stride: tensor,
    x_stride: tensor,
    dt_stride: tensor,
    b_stride: tensor,
    c_stride: tensor,
    out_stride: tensor,
    num_channels: constexpr,
    size: constexpr,
    size_pow2: constexpr,
    channels: constexpr,
    has_bias: constexpr,
    is_local: constexpr,
) -> None:
    """A program takes the tokens of one chunk through `channels` channels.

    If `is_local`, the state before is 0, and the state after the chunk and the sum of the steps are
    stored. Else the results are stored, and by the last chunk of a span the state.
    """
    span, index = find_chunk(offsets, num_spans, chunk_tokens, tl.program_id(1))
    span_begin = tl.load(offsets + span)
    span_end = tl.load(offsets + span + 1)
    begin = span_begin + index * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, span_end)
    is_last = end == span_end
    kept = _kept_index(offsets, span_begin, chunk_tokens) + index
    has_work = begin < span_end
    if is_local:
        has_work = has_work & (end < span_end)
    if has_work:
        channel = tl.program_id(0) * channels + tl.arange(0, channels)
        is_channel = channel < num_channels
        n = tl.arange(0, size_pow2)
        is_n = n < size
        place = channel[:, None] * size + n
        inside = is_channel[:, None] & is_n
        rates = _rates(a_log, place, inside)
        skip = tl.load(d + channel, mask=is_channel, other=0.0).to(tl.float32)
        bias = tl.zeros([channels], tl.float32)
        if has_bias:
            bias += tl.load(dt_bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        slot = tl.load(slots + span)
        own_state = state + slot * state_stride + place
        h = tl.zeros([channels, size_pow2], tl.float32)
        if not is_local:
            if index == 0:
                is_read = channel < tl.where(tl.load(starts + span) > 0, num_channels, 0)
                h += tl.load(own_state, mask=is_read[:, None] & is_n, other=0.0).to(tl.float32)
            else:
                h += tl.load(
                    states + (kept - 1) * (num_channels * size) + place, mask=inside, other=0.0
                )
        total = tl.zeros([channels], tl.float32)
        # What a token needs is read one token ahead. Moving pointers take fewer instructions than
        # products of rows and strides.
        x_at = x + begin * x_stride + channel
        dt_at = dt + begin * dt_stride + channel
        b_at = b + begin * b_stride + n
        c_at = c + begin * c_stride + n
        out_at = out + begin * out_stride + channel
        next_x = tl.load(x_at, mask=is_channel, other=0.0)
        next_dt = tl.load(dt_at, mask=is_channel, other=0.0)
        next_b = tl.load(b_at, mask=is_n, other=0.0)
        next_c = tl.load(c_at, mask=is_n, other=0.0)
        for after in range(1, (end - begin).to(tl.int32) + 1):
            own_x, own_dt = next_x.to(tl.float32), next_dt.to(tl.float32)
            own_b, own_c = next_b.to(tl.float32), next_c.to(tl.float32)
            if begin + after < end:
                x_at += x_stride
                dt_at += dt_stride
                b_at += b_stride
                c_at += c_stride
                next_x = tl.load(x_at, mask=is_channel, other=0.0)
                next_dt = tl.load(dt_at, mask=is_channel, other=0.0)
                next_b = tl.load(b_at, mask=is_n, other=0.0)
                next_c = tl.load(c_at, mask=is_n, other=0.0)
            step = softplus(own_dt + bias)
            h = tl.exp2(step[:, None] * rates) * h + (step * own_x)[:, None] * own_b
            if is_local:
                total += step
            else:
                y = tl.sum(h * own_c, axis=1) + skip * own_x
                tl.store(out_at, y.to(out.dtype.element_ty), mask=is_channel)
                out_at += out_stride
        if is_local:
            tl.store(states + kept * (num_channels * size) + place, h, mask=inside)
            tl.store(steps + kept * num_channels + channel, total, mask=is_channel)
        elif is_last:
            tl.store(own_state, h.to(state.dtype.element_ty), mask=inside)


@jit_once(counts=["chunk_tokens"], indices=["slots", "starts", "offsets"])
def _pass_kernel(
    state: tensor,
    a_log: tensor,
    slots: tensor,
    starts: tensor,
    offsets: tensor,
    states: tensor,
    steps: tensor,
    chunk_tokens: tensor,
    state_stride: tensor,
    num_channels: constexpr,
    size: constexpr,
    tile: constexpr,
) -> None:
    """A program passes `tile` numbers of a span's state from chunk to chunk.

    The states after the chunks, which began with 0, are replaced by those that follow from the
    state before the span.
    """
    span = tl.program_id(1)
    span_begin = tl.load(offsets + span)
    num_kept = (tl.load(offsets + span + 1) - span_begin - 1) // chunk_tokens
    if num_kept > 0:
        place = tl.program_id(0) * tile + tl.arange(0, tile)
        inside = place < num_channels * size
        rates = _rates(a_log, place, inside)
        is_read = place < tl.where(tl.load(starts + span) > 0, num_channels * size, 0)
        slot = tl.load(slots + span)
        h = tl.load(state + slot * state_stride + place, mask=is_read, other=0.0).to(tl.float32)
        first = _kept_index(offsets, span_begin, chunk_tokens)
        own_states = states + first * (num_channels * size) + place
        own_steps = steps + first * num_channels + place // size
        # What a chunk needs is read one chunk ahead.
        next_state = tl.load(own_states, mask=inside, other=0.0)
        next_step = tl.load(own_steps, mask=inside, other=0.0)
        for index in range(num_kept):
            h = tl.exp2(next_step * rates) * h + next_state
            after = tl.minimum(index + 1, num_kept - 1)
            next_state = tl.load(own_states + after * (num_channels * size), mask=inside, other=0.0)
            next_step = tl.load(own_steps + after * num_channels, mask=inside, other=0.0)
            tl.store(own_states + index * (num_channels * size), h, mask=inside)


@jit
def _kept_index(offsets: tensor, span_begin: tensor, chunk_tokens: tensor) -> tensor:
    """Where the state after a span's first chunk is among the states after chunks.

    The last chunk of a span has none there, so that a span of n tokens takes at most
    n // chunk_tokens places, and the spans before it at most their tokens // chunk_tokens.
    """
    return (span_begin - tl.load(offsets)) // chunk_tokens


@jit
def _rates(a_log: tensor, place: tensor, inside: tensor) -> tensor:
    """The log of the decay for a step of 1, as a power of two."""
    return -1.4426950408889634 * tl.exp(
        tl.load(a_log + place, mask=inside, other=0.0).to(tl.float32)
    )
