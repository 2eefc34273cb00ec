"""Causal convolution of each channel over the last K tokens, as recurrent layers begin with.

    out[t, c] = activation(bias[c] + sum over k of weight[c, k] * x[t - (K - 1) + k, c])

What comes before a step's first token of a sequence is its state: the last K - 1 inputs, the oldest
first; zeros before the sequence's first token.

Shapes throughout: `x` and `out` [rows, C], of which the last stride is 1 and the first is any;
`weight` [C, K] and `bias` [C], contiguous; `state` [slots, C, K - 1], of which the first stride is
any. Sums are computed in float32.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit_once,
    launch,
    launch_options,
    release_successor,
    row_unit,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.span_chunks import count_chunks, find_chunk, wide_dtype

Activation = Literal["silu"]

_UPDATE_CHANNELS = 256
_CHUNK_CHANNELS = 128
_CHUNK_TOKENS = 32


def conv_update_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: Activation | None,
) -> None:
    """`conv_update` in plain torch."""
    out[slots < 0] = 0
    (kept,) = torch.nonzero(slots >= 0, as_tuple=True)
    slots = slots[kept]
    before = state[slots]
    before[positions[kept] == 0] = 0
    window = torch.cat([before, x[kept].unsqueeze(2)], dim=2)
    state[slots] = window[:, :, 1:]
    out[kept] = _convolved(window, weight, bias, activation=activation).squeeze(2).to(out.dtype)


def conv_chunks_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    activation: Activation | None,
) -> None:
    """`conv_chunks` in plain torch."""
    ends = spans.offsets[1:]
    for slot, start, begin, end in zip(
        spans.slots, spans.starts, spans.offsets, ends, strict=False
    ):
        before = state[slot] if start else torch.zeros_like(state[slot])
        window = torch.cat([before, x[begin:end].T], dim=1)
        state[slot] = window[:, end - begin :]
        convolved = _convolved(window.unsqueeze(0), weight, bias, activation=activation)
        out[begin:end] = convolved.squeeze(0).T.to(out.dtype)


def _convolved(
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Activation | None,
) -> torch.Tensor:
    """[n, C, K - 1 + tokens] -> [n, C, tokens], in float32 or wider."""
    wide = wide_dtype(window)
    found = F.conv1d(
        window.to(wide),
        weight.to(wide).unsqueeze(1),
        None if bias is None else bias.to(wide),
        groups=len(weight),
    )
    return found if activation is None else F.silu(found)


def conv_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: Activation | None,
) -> None:
    """Convolve one token of each sequence.

    Args:
        x: [rows, C].
        weight: [C, K].
        bias: [C], or None.
        state: [slots, C, K - 1] of x's dtype; in and out.
        slots: [rows] int64, the row's sequence; -1 for padding, which changes no state and gets a
            finite result.
        positions: [rows] int64; at position 0 the state begins as 0, and is not read.
        out: [rows, C], overwritten.
        activation: what follows the convolution; None for nothing.
    """
    if not runs_triton(x):
        conv_update_reference(x, weight, bias, state, slots, positions, out, activation=activation)
        return
    _check(x, weight, bias, state, out)
    num_rows, num_channels = x.shape
    if not num_rows:
        return
    launch(
        _update_kernel,
        (num_rows, -(-num_channels // _UPDATE_CHANNELS)),
        x,
        weight,
        bias,
        state,
        slots,
        positions,
        out,
        x.stride(0),
        state.stride(0),
        out.stride(0),
        num_channels=num_channels,
        taps=weight.shape[1],
        block=_UPDATE_CHANNELS,
        has_bias=bias is not None,
        has_silu=activation is not None,
        num_warps=4,
        **launch_options(x.device),
    )


def conv_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    activation: Activation | None,
) -> None:
    """Convolve chunks of several tokens.

    Args:
        x: [rows, C], the rows of the whole step.
        weight: [C, K].
        bias: [C], or None.
        state: [slots, C, K - 1] of x's dtype; in and out.
        spans: the chunks; where one starts at 0, the state begins as 0, and is not read.
        out: [rows, C]; only the rows of the chunks are overwritten.
        activation: what follows the convolution; None for nothing.
    """
    if not spans.slots:
        return
    if not runs_triton(x):
        conv_chunks_reference(x, weight, bias, state, spans, out, activation=activation)
        return
    _check(x, weight, bias, state, out)
    num_channels, x_unit = x.shape[1], row_unit(x)
    grid = (count_chunks(spans, _CHUNK_TOKENS), -(-num_channels // _CHUNK_CHANNELS))
    arguments = (
        x,
        weight,
        bias,
        state,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        out,
        len(spans.slots),
        x.stride(0) // x_unit,
        state.stride(0),
        out.stride(0),
    )
    launch(
        _chunks_kernel,
        grid,
        *arguments,
        x_unit=x_unit,
        num_channels=num_channels,
        taps=weight.shape[1],
        tokens=_CHUNK_TOKENS,
        block=_CHUNK_CHANNELS,
        has_bias=bias is not None,
        has_silu=activation is not None,
        num_warps=4,
    )
    # The states are read by the first chunks of spans, so they change in a launch of their own.
    launch(
        _state_kernel,
        (len(spans.slots), -(-num_channels // _CHUNK_CHANNELS)),
        x,
        state,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        x.stride(0),
        state.stride(0),
        num_channels=num_channels,
        taps=weight.shape[1],
        block=_CHUNK_CHANNELS,
        num_warps=4,
    )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_channels, taps = weight.shape
    assert x.shape == out.shape
    assert x.shape[1] == num_channels
    assert state.shape[1:] == (num_channels, taps - 1)
    assert state[0].is_contiguous()
    assert weight.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1
    assert bias is None or (bias.shape == (num_channels,) and bias.is_contiguous())


@jit_once(indices=["slots", "positions"])
def _update_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    state: tensor,
    slots: tensor,
    positions: tensor,
    out: tensor,
    x_stride: tensor,
    state_stride: tensor,
    out_stride: tensor,
    num_channels: constexpr,
    taps: constexpr,
    block: constexpr,
    has_bias: constexpr,
    has_silu: constexpr,
    overlaps: constexpr,
) -> None:
    """A program convolves `block` channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < num_channels
    total = tl.zeros([block], tl.float32)
    if has_bias:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    await_predecessor(overlaps)
    release_successor(overlaps)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    # Triton's interpreter has no mask of a vector and a number.
    is_read = channel < tl.where((slot >= 0) & (position > 0), num_channels, 0)
    is_kept = channel < tl.where(slot >= 0, num_channels, 0)
    own_state = state + slot * state_stride + channel * (taps - 1)
    own_weight = weight + channel * taps
    for tap in tl.static_range(taps - 1):
        value = tl.load(own_state + tap, mask=is_read, other=0.0)
        factor = tl.load(own_weight + tap, mask=inside, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)
        if tap > 0:
            tl.store(own_state + tap - 1, value, mask=is_kept)
    value = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
    factor = tl.load(own_weight + taps - 1, mask=inside, other=0.0)
    total += value.to(tl.float32) * factor.to(tl.float32)
    if taps > 1:
        tl.store(own_state + taps - 2, value.to(state.dtype.element_ty), mask=is_kept)
    if has_silu:
        total = total * tl.sigmoid(total)
    tl.store(out + row * out_stride + channel, total.to(out.dtype.element_ty), mask=inside)


@jit_once(counts=["num_spans"], indices=["span_slots", "starts", "offsets"])
def _chunks_kernel(
    x: tensor,
    weight: tensor,
    bias: tensor,
    state: tensor,
    span_slots: tensor,
    starts: tensor,
    offsets: tensor,
    out: tensor,
    num_spans: tensor,
    x_units: tensor,
    state_stride: tensor,
    out_stride: tensor,
    x_unit: constexpr,
    num_channels: constexpr,
    taps: constexpr,
    tokens: constexpr,
    block: constexpr,
    has_bias: constexpr,
    has_silu: constexpr,
) -> None:
    """A program convolves `block` channels of one chunk of `tokens` tokens."""
    span, index = find_chunk(offsets, num_spans, tokens, tl.program_id(0))
    begin = tl.load(offsets + span)
    end = tl.load(offsets + span + 1)
    first = begin + index.to(tl.int64) * tokens
    if first < end:
        channel = tl.program_id(1) * block + tl.arange(0, block)
        inside = channel < num_channels
        slot = tl.load(span_slots + span)
        start = tl.load(starts + span)
        row = first + tl.arange(0, tokens)
        is_row = row < end
        total = tl.zeros([tokens, block], tl.float32)
        if has_bias:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(taps):
            factor = tl.load(weight + channel * taps + tap, mask=inside, other=0.0)
            source = row - (taps - 1) + tap
            is_own = is_row & (source >= begin)
            value = tl.load(
                x + source[:, None] * (x_units * x_unit) + channel[None, :],
                mask=is_own[:, None] & inside[None, :],
                other=0.0,
            )
            total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
            if (tap < taps - 1) & (index == 0) & (start > 0):
                # Tokens of earlier steps: input begin - j is the state's entry taps - 1 - j.
                entry = source - begin + taps - 1
                is_before = is_row & (source < begin)
                value = tl.load(
                    state + slot * state_stride + channel[None, :] * (taps - 1) + entry[:, None],
                    mask=is_before[:, None] & inside[None, :],
                    other=0.0,
                )
                total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
        if has_silu:
            total = total * tl.sigmoid(total)
        tl.store(
            out + row[:, None] * out_stride + channel[None, :],
            total.to(out.dtype.element_ty),
            mask=is_row[:, None] & inside[None, :],
        )


@jit_once(indices=["span_slots", "starts", "offsets"])
def _state_kernel(
    x: tensor,
    state: tensor,
    span_slots: tensor,
    starts: tensor,
    offsets: tensor,
    x_stride: tensor,
    state_stride: tensor,
    num_channels: constexpr,
    taps: constexpr,
    block: constexpr,
) -> None:
    """A program writes the state of `block` channels after a span; in ascending order, since an
    entry may be a later one of the old state."""
    span = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < num_channels
    begin = tl.load(offsets + span)
    end = tl.load(offsets + span + 1)
    slot = tl.load(span_slots + span)
    start = tl.load(starts + span)
    own_state = state + slot * state_stride + channel * (taps - 1)
    for tap in tl.static_range(taps - 1):
        source = end - (taps - 1) + tap
        is_own = channel < tl.where(source >= begin, num_channels, 0)
        value = tl.load(x + source * x_stride + channel, mask=is_own, other=0.0)
        entry = source - begin + taps - 1
        is_old = channel < tl.where((source < begin) & (start > 0), num_channels, 0)
        old = tl.load(own_state + entry, mask=is_old, other=0.0)
        value = tl.where(is_own, value, old.to(value.dtype))
        tl.store(own_state + tap, value.to(state.dtype.element_ty), mask=inside)
