"""Gated delta rule (Yang et al., 2024, equation 10): for each head, a matrix from keys to values.

For a token with query q and key k of K numbers, both normalised to length 1, value v of V numbers,
log decay g and learning rate beta:

    S <- exp(g) S                       # S: [K, V]
    S <- S + k (beta (v - S^T k))^T     # what S has for this key moves towards v
    y = scale S^T q

Several tokens of a sequence are computed in chunks, with S as it was before the chunk (section 3.3
of the paper). With G[i] the sum of g up to token i of the chunk, and D[i, j] = exp(G[i] - G[j]) for
j <= i, 0 above:

    A = strictly lower part of (beta[i] D[i, j] k[i] . k[j])
    U = (1 + A)^-1 (beta (V - exp(G) K S))       # the changes of each token
    Y = scale (exp(G) Q S + (D * Q K^T) U)
    S <- exp(G[last]) S + (exp(G[last] - G) K)^T U

Shapes throughout: `state` [slots, HV, K, V], of which the first stride is any; q and k [rows, HK,
K], v and out [rows, HV, V], of which the last stride is 1 and the others are any; g and beta [rows,
HV], of which the last stride is 1. Value head h uses key head h // (HV / HK). All sums are float32.
"""

from __future__ import annotations

import torch

from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.span_chunks import SortedSpans, read_states, wide_dtype

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""

_CHUNK = 64
"""Tokens that are computed together."""


def delta_update_reference(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """`delta_update` in plain torch."""
    out[slots < 0] = 0
    (kept,) = torch.nonzero(slots >= 0, as_tuple=True)
    slots = slots[kept]
    wide = wide_dtype(q)
    group = v.shape[1] // k.shape[1]
    q, k = (_normalised(each[kept], group) for each in (q, k))  # [rows, HV, K]
    s = read_states(state, slots, positions[kept])  # [rows, HV, K, V]
    s = s * g[kept].to(wide).exp()[..., None, None]
    change = v[kept].to(wide) - torch.einsum("rhkv,rhk->rhv", s, k)
    change = change * beta[kept].to(wide).unsqueeze(2)
    s = s + k.unsqueeze(3) * change.unsqueeze(2)
    state[slots] = s.to(state.dtype)
    out[kept] = (torch.einsum("rhkv,rhk->rhv", s, q) * scale).to(out.dtype)


def delta_chunks_reference(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """`delta_chunks` in plain torch."""
    if not spans.slots:
        return
    wide = wide_dtype(q)
    group = v.shape[1] // k.shape[1]
    sorted_spans = SortedSpans(spans, q.device)
    s = sorted_spans.read(state)  # [spans, HV, K, V]
    for block in sorted_spans.blocks(v.shape[1] * (k.shape[2] + v.shape[2]), max_tokens=_CHUNK):
        inside = block.is_token.unsqueeze(2)
        # Padding neither decays nor changes the state. [spans, HV, tokens, ...] from here on.
        decay = (g[block.rows].to(wide) * inside).transpose(1, 2)
        rate = (beta[block.rows].to(wide) * inside).transpose(1, 2).unsqueeze(3)
        keys, queries = (_normalised(each[block.rows], group).transpose(1, 2) for each in (k, q))
        values = v[block.rows].to(wide).transpose(1, 2)
        since = _sums_between(decay)  # [spans, HV, tokens, tokens]
        decays = since.exp().tril()
        total = decay.cumsum(2).unsqueeze(3)
        left = total.exp()  # of the state before the block
        before = s[: block.num_spans]
        system = keys @ keys.transpose(2, 3) * decays * rate  # its diagonal is taken as 1
        changes = torch.linalg.solve_triangular(
            system, rate * (values - left * (keys @ before)), upper=False, unitriangular=True
        )
        y = left * (queries @ before) + (queries @ keys.transpose(2, 3) * decays) @ changes
        kept = keys * since[:, :, -1].exp().unsqueeze(3)
        s[: block.num_spans] = left[:, :, -1:] * before + kept.transpose(2, 3) @ changes
        y = (y * scale).transpose(1, 2)  # [spans, tokens, HV, V]
        out[block.rows[block.is_token]] = y[block.is_token].to(out.dtype)
    state[sorted_spans.slots] = s.to(state.dtype)


def _normalised(x: torch.Tensor, group: int) -> torch.Tensor:
    """Queries or keys of length 1, repeated for each value head, in float32 or wider.

    Args:
        x: [..., HK, K].
        group: value heads of a key head.
    """
    x = x.to(wide_dtype(x))
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x.repeat_interleave(group, dim=-2)


def _sums_between(x: torch.Tensor) -> torch.Tensor:
    """Sums of x[..., j + 1 : i + 1] for j <= i, [..., i, j]; 0 above the diagonal.

    Differences of one running sum would be less accurate: where it is large, its rounding is too.
    """
    n = x.shape[-1]
    is_later = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)
    return x.unsqueeze(-1).expand(*x.shape, n).masked_fill(~is_later, 0).cumsum(-2)


def delta_update(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Update states by one token each.

    Args:
        state: [slots, HV, K, V] float32 or the dtype of q; in and out.
        q: [rows, HK, K], not normalised.
        k: [rows, HK, K], not normalised.
        v: [rows, HV, V].
        g: [rows, HV] float32, log of the decay, at most 0.
        beta: [rows, HV], within [0, 1].
        slots: [rows] int64, the row's sequence; -1 for padding, which changes no state and gets a
            finite result.
        positions: [rows] int64; at position 0 the state begins as 0, and is not read.
        out: [rows, HV, V] of q's dtype, overwritten.
        scale: factor on the results.
    """
    delta_update_reference(state, q, k, v, g, beta, slots, positions, out, scale=scale)


def delta_chunks(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Update states by chunks of several tokens.

    Args:
        state: this and the next ones as in `delta_update`, with the rows of the whole step.
        q: likewise.
        k: likewise.
        v: likewise.
        g: likewise.
        beta: likewise.
        spans: the chunks; where one starts at 0, the state begins as 0, and is not read.
        out: [rows, HV, V]; only the rows of the chunks are overwritten.
        scale: factor on the results.
    """
    delta_chunks_reference(state, q, k, v, g, beta, spans, out, scale=scale)
