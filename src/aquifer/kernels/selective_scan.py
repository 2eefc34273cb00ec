"""Selective scan of Mamba (Gu and Dao, 2023, algorithm 2): a state of N numbers for each channel.

For a token with input x, step dt, and vectors b and c of N numbers:

    dt <- softplus(dt + dt_bias)
    h[i, :] <- exp(-dt[i] exp(a_log[i, :])) h[i, :] + dt[i] x[i] b[:]
    y[i] = h[i, :] . c + d[i] x[i]

Shapes throughout: `state` [slots, I, N], of which the first stride is any; x, dt and out [rows, I],
b and c [rows, N], of which the last stride is 1 and the first is any. `a_log` [I, N], `d` [I] and
`dt_bias` [I] are contiguous. Everything is computed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.span_blocks import SortedSpans, read_states, wide_dtype


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
    selective_update_reference(state, x, dt, a_log, b, c, d, dt_bias, slots, positions, out)


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
    selective_chunks_reference(state, x, dt, a_log, b, c, d, dt_bias, spans, out)
