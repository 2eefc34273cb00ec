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

Chunks take two launches. `_prepare_kernel` computes, for all chunks at once, what does not depend
on the state: (1 + A)^-1 beta and scale (D * Q K^T), in the dtype of q, and the factors of rows. A
program of `_carry_kernel` has some columns of one head's state in registers, and takes them through
the chunks of one span. The workspace has 2 * 64 numbers for each token and value head, 64 MiB for
8192 tokens, 32 heads and 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aquifer.kernels._triton import (
    MIN_DOT,
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

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""

_CHUNK = 64
"""Tokens that are computed together."""

_WIDE_CHUNK = 16
"""The same for float32 on a GPU, whose products take no tensor cores, and many registers."""

_PRECISIONS = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "tf32"}
"""How the products are computed that make the inverse: errors well below that of its rounding."""

_UPDATE_COLUMNS = 32
_CARRY_COLUMNS = 32
"""Columns of a head's state that a program has: 32 heads of 128 of one sequence fill a device."""

_NUM_WARPS = 4


def delta_gates_reference(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_gates` in plain torch."""
    wide = wide_dtype(a)
    return -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide)), b.sigmoid()


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and learning rate of each row and value head.

    Args:
        a: [rows, HV]; the last stride is 1.
        b: [rows, HV] of a's dtype; the last stride is 1.
        a_log: [HV] float32, contiguous.
        dt_bias: [HV] float32, contiguous.

    Returns:
        (g, beta), both [rows, HV]: -exp(a_log) softplus(a + dt_bias) in float32, and sigmoid(b) in
        b's dtype.
    """
    if not runs_triton(a):
        return delta_gates_reference(a, b, a_log, dt_bias)
    num_rows, num_heads = a.shape
    assert b.shape == a.shape
    assert a.stride(1) == b.stride(1) == 1
    assert a_log.shape == dt_bias.shape == (num_heads,)
    g = torch.empty(num_rows, num_heads, dtype=torch.float32, device=a.device)
    beta = b.new_empty(num_rows, num_heads)
    if num_rows:
        launch(
            _gates_kernel,
            (num_rows,),
            a,
            b,
            a_log,
            dt_bias,
            g,
            beta,
            a.stride(0),
            b.stride(0),
            num_heads=num_heads,
            num_heads_pow2=pow2(num_heads),
            num_warps=1,
            **launch_options(a.device),
        )
    return g, beta


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
    if not runs_triton(q):
        delta_update_reference(state, q, k, v, g, beta, slots, positions, out, scale=scale)
        return
    _check(state, q, k, v, g, beta, out)
    num_rows, num_heads, value_dim = v.shape
    key_dim = k.shape[2]
    assert slots.shape == positions.shape == (num_rows,)
    if not num_rows:
        return
    columns = min(_UPDATE_COLUMNS, pow2(value_dim))
    launch(
        _update_kernel,
        (-(-value_dim // columns), num_heads, num_rows),
        state,
        q,
        k,
        v,
        g,
        beta,
        slots,
        positions,
        out,
        scale,
        state.stride(0),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        g.stride(0),
        beta.stride(0),
        *out.stride()[:2],
        group=num_heads // k.shape[1],
        key_dim=key_dim,
        key_dim_pow2=pow2(key_dim),
        value_dim=value_dim,
        columns=columns,
        eps=NORM_EPS,
        num_warps=_NUM_WARPS,
        **launch_options(q.device),
    )


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
    if not spans.slots:
        return
    if not runs_triton(q):
        delta_chunks_reference(state, q, k, v, g, beta, spans, out, scale=scale)
        return
    _check(state, q, k, v, g, beta, out)
    num_heads, value_dim = v.shape[1:]
    num_spans = len(spans.slots)
    assert spans.offsets[-1] <= len(q)
    size = _CHUNK if q.dtype.itemsize == 2 else _WIDE_CHUNK
    num_chunks = count_chunks(spans, size)
    shared = {
        "group": num_heads // k.shape[1],
        "num_heads": num_heads,
        "key_dim": k.shape[2],
        "key_dim_pow2": pow2(k.shape[2], MIN_DOT),
        "size": size,
        "num_warps": _NUM_WARPS,
    }
    inverse, weights = q.new_empty(2, num_chunks, num_heads, size, size)
    factors = torch.empty(num_chunks, num_heads, 4, size, dtype=torch.float32, device=q.device)
    launch(
        _prepare_kernel,
        (num_chunks, num_heads),
        q,
        k,
        g,
        beta,
        spans.device_offsets,
        inverse,
        weights,
        factors,
        num_spans,
        scale,
        *q.stride()[:2],
        *k.stride()[:2],
        g.stride(0),
        beta.stride(0),
        precision=_PRECISIONS[q.dtype],
        eps=NORM_EPS,
        num_stages=1,
        **shared,
    )
    columns = min(_CARRY_COLUMNS, pow2(value_dim, MIN_DOT))
    launch(
        _carry_kernel,
        (-(-value_dim // columns), num_heads, num_spans),
        state,
        q,
        k,
        v,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        inverse,
        weights,
        factors,
        out,
        state.stride(0),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        value_dim=value_dim,
        columns=columns,
        num_stages=1 if q.dtype == torch.float32 else 2,
        **shared,
    )


def _check(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_rows, num_heads, value_dim = v.shape
    assert q.shape == k.shape
    assert len(q) == num_rows
    assert num_heads % k.shape[1] == 0
    assert state.shape[1:] == (num_heads, k.shape[2], value_dim)
    assert state[0].is_contiguous()
    assert out.shape == v.shape
    assert g.shape == beta.shape == (num_rows, num_heads)
    assert q.dtype == k.dtype == v.dtype
    assert all(each.stride(-1) == 1 for each in (q, k, v, g, beta, out))


@jit
def _gates_kernel(
    a: tensor,
    b: tensor,
    a_log: tensor,
    dt_bias: tensor,
    g: tensor,
    beta: tensor,
    a_stride: tensor,
    b_stride: tensor,
    num_heads: constexpr,
    num_heads_pow2: constexpr,
    overlaps: constexpr,
) -> None:
    """A program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, num_heads_pow2)
    inside = head < num_heads
    rates = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    await_predecessor(overlaps)
    release_successor(overlaps)
    own_a = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    own_b = tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    place = row * num_heads + head
    tl.store(g + place, -rates * softplus(own_a + bias), mask=inside)
    tl.store(beta + place, tl.sigmoid(own_b).to(beta.dtype.element_ty), mask=inside)


@jit_once(indices=["slots", "positions"])
def _update_kernel(
    state: tensor,
    q: tensor,
    k: tensor,
    v: tensor,
    g: tensor,
    beta: tensor,
    slots: tensor,
    positions: tensor,
    out: tensor,
    scale: tensor,
    state_stride: tensor,
    q_stride: tensor,
    q_head_stride: tensor,
    k_stride: tensor,
    k_head_stride: tensor,
    v_stride: tensor,
    v_head_stride: tensor,
    g_stride: tensor,
    beta_stride: tensor,
    out_stride: tensor,
    out_head_stride: tensor,
    group: constexpr,
    key_dim: constexpr,
    key_dim_pow2: constexpr,
    value_dim: constexpr,
    columns: constexpr,
    eps: constexpr,
    overlaps: constexpr,
) -> None:
    """A program updates `columns` columns of one head's state of one row."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key_head = head // group
    i = tl.arange(0, key_dim_pow2)
    place = (head * key_dim + i)[:, None] * value_dim + column
    await_predecessor(overlaps)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    # Triton's interpreter has no mask of a vector and a number. A row of padding has a result of 0.
    is_column = column < tl.where(slot >= 0, value_dim, 0)
    is_read = column < tl.where((slot >= 0) & (position > 0), value_dim, 0)
    is_key = i < tl.where(slot >= 0, key_dim, 0)
    own_state = state + slot * state_stride + place
    s = tl.load(own_state, mask=(i < key_dim)[:, None] & is_read, other=0.0).to(tl.float32)
    own_q = _unit(q + row * q_stride + key_head * q_head_stride + i, is_key, eps)
    own_k = _unit(k + row * k_stride + key_head * k_head_stride + i, is_key, eps)
    own_v = tl.load(v + row * v_stride + head * v_head_stride + column, mask=is_column, other=0.0)
    decay = tl.exp(tl.load(g + row * g_stride + head, mask=slot >= 0, other=0.0).to(tl.float32))
    rate = tl.load(beta + row * beta_stride + head, mask=slot >= 0, other=0.0).to(tl.float32)
    s *= decay
    # Both sums over the old state, so that the result does not wait for the new one.
    predicted = tl.sum(s * own_k[:, None], axis=0)
    found = tl.sum(s * own_q[:, None], axis=0)
    change = rate * (own_v.to(tl.float32) - predicted)
    s += own_k[:, None] * change
    tl.store(own_state, s.to(state.dtype.element_ty), mask=is_key[:, None] & is_column)
    release_successor(overlaps)
    y = scale * (found + tl.sum(own_q * own_k, axis=0) * change)
    tl.store(
        out + row * out_stride + head * out_head_stride + column,
        y.to(out.dtype.element_ty),
        mask=column < value_dim,
    )


@jit
def _unit(place: tensor, inside: tensor, eps: constexpr) -> tensor:
    """A vector at these pointers, in float32 and divided by its length."""
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@jit_once(counts=["num_spans"], indices=["offsets"])
def _prepare_kernel(
    q: tensor,
    k: tensor,
    g: tensor,
    beta: tensor,
    offsets: tensor,
    inverse: tensor,
    weights: tensor,
    factors: tensor,
    num_spans: tensor,
    scale: tensor,
    q_stride: tensor,
    q_head_stride: tensor,
    k_stride: tensor,
    k_head_stride: tensor,
    g_stride: tensor,
    beta_stride: tensor,
    group: constexpr,
    num_heads: constexpr,
    key_dim: constexpr,
    key_dim_pow2: constexpr,
    size: constexpr,
    precision: constexpr,
    eps: constexpr,
) -> None:
    """A program handles one chunk of one value head.

    Stored are, with rows that are no tokens as zeros or decays of 1: `inverse` and `weights`
    [chunks, heads, size, size], which the changes and the results are made with; and `factors`
    [chunks, heads, 4, size], of the rows of K S, of Q S and of U, and exp(G[last]).
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    span, index = find_chunk(offsets, num_spans, size, number)
    begin = tl.load(offsets + span) + index * size
    count = tl.load(offsets + span + 1) - begin
    if count > 0:
        i = tl.arange(0, size)
        dim = tl.arange(0, key_dim_pow2)
        is_token = i < count
        rows = begin + i
        inside = is_token[:, None] & (dim < key_dim)
        key_place = k + (head // group) * k_head_stride + rows[:, None] * k_stride + dim
        query_place = q + (head // group) * q_head_stride + rows[:, None] * q_stride + dim
        keys = tl.load(key_place, mask=inside, other=0.0)
        queries = tl.load(query_place, mask=inside, other=0.0)
        key_scale = _inverse_lengths(keys, eps)
        query_scale = scale * _inverse_lengths(queries, eps)
        decay = tl.load(g + rows * g_stride + head, mask=is_token, other=0.0).to(tl.float32)
        rate = tl.load(beta + rows * beta_stride + head, mask=is_token, other=0.0).to(tl.float32)

        # since[i, j] is the sum of the decays after j up to i. The difference of two running sums
        # would be less accurate where these are large.
        is_later = i[:, None] > i
        since = tl.cumsum(tl.where(is_later, decay[:, None], 0.0), axis=0)
        decays = tl.where(i[:, None] >= i, tl.exp(since), 0.0) * key_scale
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        own_weights = products * decays * query_scale[:, None]
        chunk = number * num_heads + head
        place = chunk * (size * size) + i[:, None] * size + i
        tl.store(weights + place, own_weights.to(weights.dtype.element_ty))
        own_factors = factors + chunk * (4 * size) + i
        left = tl.exp(tl.cumsum(decay, axis=0))
        last = tl.sum(tl.where(i[:, None] == size - 1, since, 0.0), axis=0)
        tl.store(own_factors, left * key_scale)
        tl.store(own_factors + size, left * query_scale)
        tl.store(own_factors + 2 * size, tl.exp(last) * key_scale)
        tl.store(own_factors + 3 * size, left, mask=i == size - 1)
        products = tl.dot(keys, tl.trans(keys), input_precision="ieee")
        system = products * decays * (rate * key_scale)[:, None]

        # The inverse of 1 + the strictly lower part of the system, first for blocks of 2 on the
        # diagonal; each pass doubles them: [X 0; L Y]^-1 = [X^-1 0; -Y^-1 L X^-1, Y^-1].
        differs = i[:, None] ^ i
        result = tl.where(differs == 0, 1.0, 0.0)
        result -= tl.where(is_later & (differs == 1), system, 0.0)
        block = 2
        while block < size:
            lower = tl.where(is_later & (differs >= block) & (differs < 2 * block), system, 0.0)
            between = tl.dot(result, lower, input_precision=precision)
            result -= tl.dot(between, result, input_precision=precision)
            block *= 2

        tl.store(inverse + place, (result * rate).to(inverse.dtype.element_ty))


@jit
def _inverse_lengths(x: tensor, eps: constexpr) -> tensor:
    """1 / the length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)


@jit_once(indices=["slots", "starts", "offsets"])
def _carry_kernel(
    state: tensor,
    q: tensor,
    k: tensor,
    v: tensor,
    slots: tensor,
    starts: tensor,
    offsets: tensor,
    inverse: tensor,
    weights: tensor,
    factors: tensor,
    out: tensor,
    state_stride: tensor,
    q_stride: tensor,
    q_head_stride: tensor,
    k_stride: tensor,
    k_head_stride: tensor,
    v_stride: tensor,
    v_head_stride: tensor,
    out_stride: tensor,
    out_head_stride: tensor,
    group: constexpr,
    num_heads: constexpr,
    key_dim: constexpr,
    key_dim_pow2: constexpr,
    value_dim: constexpr,
    columns: constexpr,
    size: constexpr,
) -> None:
    """A program takes `columns` columns of one head's state through the chunks of one span."""
    head = tl.program_id(1)
    span = tl.program_id(2)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    is_column = column < value_dim
    i = tl.arange(0, size)
    dim = tl.arange(0, key_dim_pow2)
    is_dim = dim < key_dim
    begin = tl.load(offsets + span)
    end = tl.load(offsets + span + 1)
    number = (begin - tl.load(offsets)) // size + span  # of the first chunk, as in `find_chunk`
    own_state = state + tl.load(slots + span) * state_stride
    own_state += (head * key_dim + dim)[:, None] * value_dim + column
    is_read = column < tl.where(tl.load(starts + span) > 0, value_dim, 0)
    s = tl.load(own_state, mask=is_dim[:, None] & is_read, other=0.0).to(tl.float32)
    own_k = k + (head // group) * k_head_stride
    own_q = q + (head // group) * q_head_stride
    own_v = v + head * v_head_stride
    own_out = out + head * out_head_stride
    for index in range(((end - begin + size - 1) // size).to(tl.int32)):
        rows = begin + index * size + i
        is_token = rows < end
        inside = is_token[:, None] & is_dim
        chunk = (number + index) * num_heads + head
        square = chunk * (size * size) + i[:, None] * size + i
        own_factors = factors + chunk * (4 * size)
        keys = tl.load(own_k + rows[:, None] * k_stride + dim, mask=inside, other=0.0)
        queries = tl.load(own_q + rows[:, None] * q_stride + dim, mask=inside, other=0.0)
        values = tl.load(
            own_v + rows[:, None] * v_stride + column, mask=is_token[:, None] & is_column, other=0.0
        )
        own_inverse = tl.load(inverse + square)
        own_weights = tl.load(weights + square)
        of_predicted = tl.load(own_factors + i)
        of_found = tl.load(own_factors + size + i)
        of_changes = tl.load(own_factors + 2 * size + i)
        total = tl.load(own_factors + 4 * size - 1)
        narrow = s.to(keys.dtype)
        predicted = tl.dot(keys, narrow, input_precision="ieee") * of_predicted[:, None]
        missing = (values.to(tl.float32) - predicted).to(keys.dtype)
        changes = tl.dot(own_inverse, missing, input_precision="ieee")
        y = tl.dot(queries, narrow, input_precision="ieee") * of_found[:, None]
        y += tl.dot(own_weights, changes.to(keys.dtype), input_precision="ieee")
        tl.store(
            own_out + rows[:, None] * out_stride + column,
            y.to(out.dtype.element_ty),
            mask=is_token[:, None] & is_column,
        )
        added = (changes * of_changes[:, None]).to(keys.dtype)
        s = s * total + tl.dot(tl.trans(keys), added, input_precision="ieee")
    tl.store(own_state, s.to(state.dtype.element_ty), mask=is_dim[:, None] & is_column)
