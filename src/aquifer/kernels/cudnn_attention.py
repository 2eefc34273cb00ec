"""Prefill attention by cuDNN, whose kernel is the fastest for large chunks on Hopper.

cuDNN builds a plan for every new shape, for tens of milliseconds. So a chunk of `count` tokens
after `start` others is computed in calls of few shapes:

1. The chunk over itself, causal. Chunks without a prefix, of equal length and in consecutive slots,
   share one call.
2. The chunk over its prefix, without mask. Its rows are cut into pieces of few lengths, and the
   keys into parts of few lengths (`CALL_KEYS`), with one call for each piece and part.

    rows    | piece | piece | piece |     the last piece may overlap the one before

    keys    | part       | part | part |  rest  | chunk     |
            0                       `keys_of`   start       start + count

What cuDNN does not take of a chunk is left to our own kernel (`prefill_attention.py`): the rest of
the prefix, shorter than the shortest part, and the chunk if `count` is not round. All results are
merged by their log-sum-exp.

Only contiguous KV, 16-bit types, head dimensions of at most 128, no softcap, no sinks, no ALiBi,
and no window that excludes any key.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from aquifer.kernels._triton import (
    constexpr,
    jit,
    jit_once,
    launch,
    not_recorded,
    pow2,
    runs_triton,
    tensor,
    tl,
)

COUNT_MULTIPLE = 256
"""Tokens. A chunk over itself goes to cuDNN if its length is a multiple."""

MIN_COUNT = 512
"""Tokens. Shorter chunks do not fill the device alone, and share one launch of our own kernel."""

CALL_KEYS = {2048: (32768, 8192, 6144, 4096, 2048), 512: (8192, 2048)}
"""Shapes of calls over a prefix: for each number of rows, the numbers of keys; both descending.

512 rows with 32 heads fill the device. What is left of a prefix after parts of 8192 keys is one
part for 2048 rows: two short calls would take longer."""

_LEAST_USE = 0.8
"""The least share of a chunk's pieces that may be rows of its own, each counted once. With half as
many, our own kernel would be as fast."""

MAX_MERGED = 5
"""Results that are merged in one launch. So at most four are in memory beside the merged one."""

_MAX_DIM = 128
_ALIGN_BYTES = 16
_MERGE_ELEMENTS = 4096
"""Elements of a result that a program of the merge holds."""

Result = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys, [tokens, heads, value_dim], and its log-sum-exp, [heads, tokens]."""


def is_round(count: int) -> bool:
    """Whether cuDNN may attend from a chunk of that many tokens to itself."""
    return count >= MIN_COUNT and count % COUNT_MULTIPLE == 0


def keys_of(start: int, count: int, counts: Container[int] | None = None) -> int:
    """Number of keys, from the sequence's first, that cuDNN attends to for a chunk.

    Args:
        start: tokens before the chunk.
        count: tokens of the chunk.
        counts: lengths of chunks that may go to cuDNN; None for all round ones.

    Returns:
        `start + count` for everything; else the keys of whole parts of the prefix, or 0.
    """
    keys = _prefix_keys(start, count)
    if keys == start and (is_round(count) if counts is None else count in counts):
        return start + count
    return keys


def _prefix_keys(start: int, count: int) -> int:
    """Keys of the prefix that are in whole parts, if cuDNN is faster for these."""
    pieces = row_pieces(count)
    if start == 0 or not pieces or count < _LEAST_USE * sum(rows for _, rows in pieces):
        return 0
    largest = max(CALL_KEYS)
    if any(rows == largest for _, rows in pieces):
        part = min(CALL_KEYS[largest])
    else:
        # The host takes longer to launch a call of few rows and keys than the device to run it.
        part = max(CALL_KEYS[min(CALL_KEYS)])
    return start // part * part


def row_pieces(count: int) -> list[tuple[int, int]]:
    """Cut a chunk's rows into pieces, (first row, rows); none if the chunk is shorter than a piece.

    The last piece may overlap the one before it.
    """
    large, small = CALL_KEYS
    if count < small:
        return []
    rest = count % large
    pieces = [(begin, large) for begin in range(0, count - rest, large)]
    if pieces and rest > large - small:
        pieces.append((count - large, large))
    else:
        firsts = range(count - rest, count, small)
        pieces += [(min(first, count - small), small) for first in firsts]
    return pieces


def key_parts(num_keys: int, rows: int) -> Iterator[tuple[int, int]]:
    """Cut the keys for a piece of that many rows into parts, (first key, keys)."""
    begin = 0
    for keys in CALL_KEYS[rows]:
        while begin + keys <= num_keys:
            yield begin, keys
            begin += keys
    assert begin == num_keys, "the keys are not in whole parts"


@dataclass(frozen=True, slots=True)
class Call:
    """A chunk, or `num_seqs` neighbouring ones without a prefix and of equal length, in
    consecutive slots."""

    first_row: int
    slot: int
    start: int
    count: int
    num_seqs: int
    keys: int  # keys that cuDNN attends to, see `keys_of`

    @property
    def is_whole(self) -> bool:
        """Whether cuDNN attends to all keys."""
        return self.keys == self.start + self.count

    @property
    def rows(self) -> slice:
        """Rows of queries and outputs."""
        return slice(self.first_row, self.first_row + self.num_seqs * self.count)


def calls_of(
    slots: Sequence[int],
    starts: Sequence[int],
    offsets: Sequence[int],
    keys: Sequence[int],
    window_tokens: int | None,
    *,
    is_batchable: bool,
) -> Iterator[Call]:
    """Group the chunks of a step; those that cuDNN can take together are one call.

    Args:
        slots: [n], the slot of each chunk's sequence.
        starts: [n], tokens before it.
        offsets: [n + 1], its rows.
        keys: [n], see `keys_of`.
        window_tokens: as in `prefill_attention`; a chunk is cuDNN's only if its window has all.
        is_batchable: whether several slots may be in one call, see `has_own_plans`.
    """
    pending: Call | None = None
    rows = itertools.pairwise(offsets)
    for slot, start, (begin, end), taken in zip(slots, starts, rows, keys, strict=True):
        count = end - begin
        sees_all = window_tokens is None or start + count <= window_tokens
        num_keys = taken if sees_all else 0
        num_before = 0
        if pending is not None:
            if (
                is_batchable
                and start == pending.start == 0
                and num_keys == pending.keys == count == pending.count
                and slot == pending.slot + pending.num_seqs
            ):
                num_before = pending.num_seqs
            else:
                yield pending
        first_row = begin - num_before * count
        pending = Call(first_row, slot - num_before, start, count, num_before + 1, num_keys)
    if pending is not None:
        yield pending


_batch_strides: dict[int, int] = {}
"""The strides from slot to slot that calls have had, by their lowest 32 bits."""


def has_own_plans(*strides: int) -> bool:
    """Whether cuDNN's plans for these strides from slot to slot are for no others.

    PyTorch caches plans by strides truncated to 32 bits. The stride of long slots is longer, and
    two models could share a plan that is valid for only one of them. So the first stride keeps it.
    """
    return all(_batch_strides.setdefault(each % (1 << 32), each) == each for each in strides)


def cudnn_takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether cuDNN has a kernel for these dtypes, head dimensions and strides."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and all(t.shape[-1] <= _MAX_DIM for t in (keys, values))
        and all(_is_aligned(t) for t in (query, keys, values))
        and has_cudnn(query.device)
    )


def _is_aligned(t: torch.Tensor) -> bool:
    """Whether each head starts at a multiple of 16 bytes and is a multiple of 16 bytes long."""
    elements = _ALIGN_BYTES // t.dtype.itemsize
    lengths = (t.shape[-1], *t.stride()[:-1])
    return t.data_ptr() % _ALIGN_BYTES == 0 and all(n % elements == 0 for n in lengths)


@cache
def has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention runs on that device and is the fastest there."""
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device)[0] >= 9


def run_cudnn(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    row_lse: torch.Tensor,
    call: Call,
    scale: float,
) -> None:
    """Write the output rows of one call.

    Args:
        query: [tokens, heads, key_dim].
        keys: [slots, max_tokens, kv_heads, key_dim].
        values: likewise, with value_dim.
        out: [tokens, heads, value_dim]. The rows of a call that is not whole have the result of
            our own kernel for the keys that cuDNN does not take.
        row_lse: [heads, tokens] float32, natural log of the sum of exp(score) over these keys.
            Overwritten in the rows of the call.
        call: which rows.
        scale: factor on the dot products.
    """
    if call.is_whole and call.start == 0:
        out[call.rows] = run_cudnn_once(query, keys, values, call, scale)
        return
    query, out, row_lse = query[call.rows], out[call.rows], row_lse[:, call.rows]
    keys, values = keys[call.slot], values[call.slot]
    first, first_lse = out, row_lse
    if call.is_whole:
        end = call.start + call.count
        own = keys[call.start : end], values[call.start : end]
        first, first_lse = _attend(query, *own, scale, is_causal=True)
    num_keys = min(call.keys, call.start)
    done = 0
    for begin, rows in row_pieces(call.count):
        fresh = slice(done, begin + rows)  # rows that no earlier piece has written
        done = fresh.stop
        target = out[fresh], row_lse[:, fresh]
        results = [(first[fresh], first_lse[:, fresh])]
        for first_key, count in key_parts(num_keys, rows):
            if len(results) == MAX_MERGED:
                merge(results, *target)
                results = [target]
            part = slice(first_key, first_key + count)
            piece = query[begin : begin + rows]
            result, lse = _attend(piece, keys[part], values[part], scale, is_causal=False)
            repeated = slice(fresh.start - begin, None)
            results.append((result[repeated], lse[:, repeated]))
        merge(results, *target)


def run_cudnn_once(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, scale: float
) -> torch.Tensor:
    """Compute the rows of a whole call without a prefix, [num_seqs * count, heads, value_dim]."""
    # [num_seqs, heads, count, key_dim]
    q = query[call.rows].unflatten(0, (call.num_seqs, call.count)).transpose(1, 2)
    if call.num_seqs == 1:
        # Without the unused stride from slot to slot, which would be part of the plan's key.
        k, v = (_heads_first(t[call.slot, : call.count]) for t in (keys, values))
    else:
        slots = slice(call.slot, call.slot + call.num_seqs)
        k, v = (t[slots, : call.count].transpose(1, 2) for t in (keys, values))
    result, _ = cudnn_attention(q, k, v, scale, is_causal=True, with_lse=False)
    # The result has the query's layout, so this is a view.
    return result.transpose(1, 2).flatten(0, 1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> Result:
    """Attend from rows of one sequence to some of its keys.

    All arguments are [tokens, heads, dim].
    """
    q, k, v = (_heads_first(t) for t in (query, keys, values))
    result, lse = cudnn_attention(q, k, v, scale, is_causal=is_causal, with_lse=True)
    return result[0].transpose(0, 1), lse.view(-1, len(query))


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    """View of [tokens, heads, dim] as [1, heads, tokens, dim]."""
    return t.unsqueeze(0).transpose(1, 2)


def cudnn_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    is_causal: bool,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [num_seqs, heads, count, value_dim], log-sum-exp [num_seqs, heads, count, 1].

    cuDNN supports grouped-query attention: `keys` and `values` may have fewer heads.
    """
    not_recorded()
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, with_lse, 0.0, is_causal, False, scale=scale
    )
    return result[0], result[1]


def merge_reference(results: Sequence[Result], out: torch.Tensor, lse: torch.Tensor) -> None:
    """`merge` in plain torch. Same arguments."""
    logs = torch.stack([part_lse for _, part_lse in results])  # [results, heads, tokens]
    weights = logs.softmax(0).transpose(1, 2).unsqueeze(-1)  # [results, tokens, heads, 1]
    merged = (torch.stack([part for part, _ in results]) * weights).sum(0)
    lse.copy_(logs.logsumexp(0))
    out.copy_(merged)


def merge(results: Sequence[Result], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge attention over several sets of keys by their log-sum-exp.

    Args:
        results: two to `MAX_MERGED`. Of each, the attention is [tokens, heads, value_dim], with
            last stride 1, and the log-sum-exp [heads, tokens] float32, natural, last stride 1. One
            result may be `out` and `lse`; no other may overlap them.
        out: [tokens, heads, value_dim], last stride 1, overwritten.
        lse: [heads, tokens] float32, last stride 1, overwritten: that of all keys.
    """
    assert 2 <= len(results) <= MAX_MERGED
    for each, each_lse in (*results, (out, lse)):
        assert each.shape == out.shape
        assert each_lse.shape == lse.shape == (out.shape[1], out.shape[0])
        assert each.stride(-1) == each_lse.stride(-1) == 1
    if not runs_triton(out):
        merge_reference(results, out, lse)
        return
    num_tokens, num_heads, value_dim = out.shape
    value_dim_pow2 = pow2(value_dim)
    heads_per_program = min(pow2(num_heads), max(_MERGE_ELEMENTS // value_dim_pow2, 1))
    padded = [*results, *[results[0]] * (MAX_MERGED - len(results))]
    addresses: list[torch.Tensor | int] = []
    for each, each_lse in padded:
        addresses += [each, each_lse, each.stride(0), each.stride(1), each_lse.stride(0)]
    launch(
        _merge_kernel,
        (num_tokens, -(-num_heads // heads_per_program)),
        *addresses,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        len(results),
        num_heads=num_heads,
        value_dim=value_dim,
        value_dim_pow2=value_dim_pow2,
        heads_per_program=heads_per_program,
        num_warps=4,
    )


@jit
def _add_result(
    part: tensor,
    part_lse: tensor,
    row_stride: tensor,
    head_stride: tensor,
    lse_stride: tensor,
    num_heads: tensor,
    row: tensor,
    head: tensor,
    acc: tensor,
    total: tensor,
    top: tensor,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
) -> tensor:
    """Add a result of `num_heads` heads to `acc` [heads, value_dim], `total` and `top` [heads]."""
    dim = tl.arange(0, value_dim_pow2)
    is_read = head < num_heads
    log = tl.load(part_lse + head * lse_stride + row, mask=is_read, other=float("-inf"))
    # [heads, value_dim]
    values = tl.load(
        part + row * row_stride + head[:, None] * head_stride + dim[None, :],
        mask=is_read[:, None] & (dim < value_dim)[None, :],
        other=0.0,
    ).to(tl.float32)
    new_top = tl.maximum(top, log)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    log2_e: constexpr = 1.4426950408889634
    weight = tl.exp2((log - base) * log2_e)
    decay = tl.exp2((top - base) * log2_e)
    return acc * decay[:, None] + values * weight[:, None], total * decay + weight, new_top


_LSE_STRIDES = tuple(f"lse_stride_{i}" for i in range(MAX_MERGED))
"""Parameters of the kernel that are numbers of tokens."""


@jit_once(
    counts=("num_results", "lse_stride", *_LSE_STRIDES),
    indices=("lse", *(f"lse_{i}" for i in range(MAX_MERGED))),
)
def _merge_kernel(
    part_0: tensor,
    lse_0: tensor,
    row_stride_0: tensor,
    head_stride_0: tensor,
    lse_stride_0: tensor,
    part_1: tensor,
    lse_1: tensor,
    row_stride_1: tensor,
    head_stride_1: tensor,
    lse_stride_1: tensor,
    part_2: tensor,
    lse_2: tensor,
    row_stride_2: tensor,
    head_stride_2: tensor,
    lse_stride_2: tensor,
    part_3: tensor,
    lse_3: tensor,
    row_stride_3: tensor,
    head_stride_3: tensor,
    lse_stride_3: tensor,
    part_4: tensor,
    lse_4: tensor,
    row_stride_4: tensor,
    head_stride_4: tensor,
    lse_stride_4: tensor,
    out: tensor,
    lse: tensor,
    out_row_stride: tensor,
    out_head_stride: tensor,
    lse_stride: tensor,
    num_results: tensor,
    num_heads: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    heads_per_program: constexpr,
) -> None:
    """Merge one token's results for some heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_per_program + tl.arange(0, heads_per_program)
    dim = tl.arange(0, value_dim_pow2)
    acc = tl.zeros([heads_per_program, value_dim_pow2], tl.float32)
    total = tl.zeros([heads_per_program], tl.float32)
    top = tl.full([heads_per_program], float("-inf"), tl.float32)
    # Of a result that is missing, no head is read.
    acc, total, top = _add_result(
        part_0, lse_0, row_stride_0, head_stride_0, lse_stride_0,
        tl.where(num_results > 0, num_heads, 0),
        row, head, acc, total, top, value_dim, value_dim_pow2,
    )  # fmt: skip
    acc, total, top = _add_result(
        part_1, lse_1, row_stride_1, head_stride_1, lse_stride_1,
        tl.where(num_results > 1, num_heads, 0),
        row, head, acc, total, top, value_dim, value_dim_pow2,
    )  # fmt: skip
    acc, total, top = _add_result(
        part_2, lse_2, row_stride_2, head_stride_2, lse_stride_2,
        tl.where(num_results > 2, num_heads, 0),
        row, head, acc, total, top, value_dim, value_dim_pow2,
    )  # fmt: skip
    acc, total, top = _add_result(
        part_3, lse_3, row_stride_3, head_stride_3, lse_stride_3,
        tl.where(num_results > 3, num_heads, 0),
        row, head, acc, total, top, value_dim, value_dim_pow2,
    )  # fmt: skip
    acc, total, top = _add_result(
        part_4, lse_4, row_stride_4, head_stride_4, lse_stride_4,
        tl.where(num_results > 4, num_heads, 0),
        row, head, acc, total, top, value_dim, value_dim_pow2,
    )  # fmt: skip
    is_head = head < num_heads
    total = tl.where(total > 0, total, 1.0)
    # All threads have read the row before one writes it: its results may be where it is written.
    tl.debug_barrier()
    ln_2: constexpr = 0.6931471805599453
    tl.store(lse + head * lse_stride + row, top + tl.log2(total) * ln_2, mask=is_head)
    tl.store(
        out + row * out_row_stride + head[:, None] * out_head_stride + dim[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=is_head[:, None] & (dim < value_dim)[None, :],
    )
