"""Prefill attention: causal attention of prompt chunks over all KV, for either KV layout.

A span is a chunk: `count` new tokens of one sequence, after `start` earlier ones. Their keys and
values are in the KV cache already. All spans of a step are computed in one launch, of one of two
kernels:

1. **On Hopper, over contiguous KV**, a kernel in CUDA C++ (`hopper_prefill.py`), for heads of up to
   128 elements in 16-bit types, without softcap, sinks and ALiBi.
2. **A Triton kernel** (FlashAttention-2) for all else.

A program handles the queries of a few tokens and of `heads_per_program` heads that share a KV head:

    rows of a program   token 0: head 0, head 1, ...   token 1: head 0, head 1, ...   ...

so that K and V are read once for all of them, and short chunks still fill a matrix product. It
iterates over the keys in tiles; only tiles on the diagonal and at the window's edge need a mask:

    keys     | before the window | edge | seen by every query | diagonal |
             0                                                            start + count

Which program takes which tokens is in lists that the host makes (`prefill_work.py`). A short chunk
after a long prefix, such as the next turn of a conversation, has few programs with many keys each.
Their keys are then split over several programs, and a second kernel merges the partial results by
their log-sum-exp (`prefill_merge.py`).

Shapes throughout: `keys` and `values` are [blocks, block_size, kv_heads, dim]; the last stride is
1, the others are any. Paged: `tables` [slots, max_blocks] are the block tables, a slot's blocks in
order. Contiguous: `tables` is None, and a slot is one block, as long as the longest sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from aquifer.kernels._triton import (
    MIN_DOT,
    constexpr,
    count_multiprocessors,
    jit,
    jit_once,
    launch,
    pow2,
    runs_triton,
    tensor,
    tl,
)
from aquifer.kernels.alibi import load_slopes, with_alibi
from aquifer.kernels.attention import attention_contiguous, attention_paged
from aquifer.kernels.hopper_prefill import fits, hopper_prefill
from aquifer.kernels.prefill_merge import DeviceSpans, make_partials, merge_partials
from aquifer.kernels.prefill_work import (
    MIN_SPLIT_KEYS,
    PROGRAM_COLUMNS,
    Tiling,
    Work,
    choose_band,
    plan_work,
)
from aquifer.kernels.sinks import load_sinks, softmax_with_sinks
from aquifer.memory.transfer import upload

_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Programs of the Triton kernel resident on an SM, at the default configs for 16-bit types."""

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillSpans:
    """The chunks of one step, as lists for the host and as tensors for kernels.

    Chunk i is rows [offsets[i], offsets[i + 1]) of queries and outputs, and tokens [starts[i],
    starts[i] + its count) of the sequence in `slots[i]`. Each has at least one token. Rows before
    `offsets[0]` are not prefill rows.
    """

    slots: list[int]  # [n]
    starts: list[int]  # [n], tokens before the chunk
    offsets: list[int]  # [n + 1]
    device_slots: torch.Tensor  # [n] int64
    device_starts: torch.Tensor  # [n] int64
    device_offsets: torch.Tensor  # [n + 1] int64
    _works: dict[Tiling, Work] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, slots: list[int], starts: list[int], offsets: list[int], device: torch.device
    ) -> PrefillSpans:
        """The chunks in these lists, copied to a device."""
        lists = slots, starts, offsets
        on_device = [torch.tensor(part, dtype=torch.int64, device=device) for part in lists]
        return cls(*lists, *on_device)

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest chunk."""
        return min(end - begin for begin, end in _pairs(self.offsets))

    def work(self, tiling: Tiling) -> Work:
        """The lists of a launch; made, and copied to the device, for the first one of a kind."""
        work = self._works.get(tiling)
        if work is None:
            plan = plan_work(np.array(self.starts), np.diff(self.offsets), tiling)
            programs, merges, num_keys = plan
            both = upload(np.concatenate((programs.ravel(), merges)), self.device_slots.device)
            on_device = both.split([programs.size, merges.size])
            num_partials = len(programs) if len(merges) else 0
            band = choose_band(num_keys, tiling)
            work = Work(on_device[0].view(programs.shape), on_device[1], num_partials, band)
            self._works[tiling] = work
        return work

    def alone(self, index: int) -> PrefillSpans:
        """One of the chunks, without earlier tokens, as if its sequence were in slot 0."""
        assert self.starts[index] == 0
        zero = self.device_starts[index : index + 1]
        return PrefillSpans(
            slots=[0],
            starts=[0],
            offsets=self.offsets[index : index + 2],
            device_slots=zero,
            device_starts=zero,
            device_offsets=self.device_offsets[index : index + 2],
        )


@dataclass(frozen=True, slots=True)
class Config:
    """Tiling of the Triton kernel; which one is fast depends on dimensions and device."""

    block_rows: int  # queries of a program, over all its heads; a power of two, at least 16
    block_keys: int  # keys of a tile; a power of two, at least 16
    num_warps: int
    num_stages: int


def default_config(key_dim: int, value_dim: int, dtype: torch.dtype, *, paged: bool) -> Config:
    """Choose a config by shape.

    Args:
        key_dim: elements of a head's key.
        value_dim: elements of a head's value.
        dtype: dtype of queries, keys and values.
        paged: whether KV is found through block tables.
    """
    dim = pow2(max(key_dim, value_dim), MIN_DOT)
    # The largest tiles without register spills on Hopper, or nearly without.
    if dtype.itemsize > 2:
        if dim <= 128:
            return Config(block_rows=32, block_keys=32, num_warps=8, num_stages=2)
        if dim <= 256:
            return Config(block_rows=16, block_keys=16, num_warps=4, num_stages=2)
        return Config(block_rows=16, block_keys=16, num_warps=8, num_stages=1)
    if dim <= 128:
        # Half the rows read keys twice as often, from the L2 cache, but fill the device with half
        # the queries. By measurement, for heads of 128: 10 to 35 % faster for short chunks, 6 %
        # faster to 6 % slower for long ones, and through tables up to 5 % slower; for heads of 64,
        # 5 to 8 % slower for long chunks, and through tables 20 to 30 % faster.
        rows, warps = (64, 4) if paged == (dim <= 64) else (128, 8)
        return Config(block_rows=rows, block_keys=64, num_warps=warps, num_stages=3)
    if dim <= 256:
        # The sums take fewer registers where only keys are that long, as in latent attention.
        block_keys = 64 if value_dim <= 128 else 32
        return Config(block_rows=128, block_keys=block_keys, num_warps=8, num_stages=3)
    if dim <= 512:
        return Config(block_rows=64, block_keys=16, num_warps=8, num_stages=2)
    return Config(block_rows=16, block_keys=16, num_warps=8, num_stages=1)


def prefill_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """`prefill_attention` in plain torch. Same arguments; computes in the dtype of `query`."""
    block_size = keys.shape[1]
    num_kv_heads = keys.shape[2]
    for slot, start, rows in zip(spans.slots, spans.starts, _pairs(spans.offsets), strict=True):
        begin, end = rows
        position = torch.arange(start, start + end - begin, device=query.device)
        token = torch.arange(start + end - begin, device=query.device)
        if tables is None:
            k, v = keys[slot, token], values[slot, token]
        else:
            blocks = tables[slot, token // block_size].long()
            k, v = keys[blocks, token % block_size], values[blocks, token % block_size]
        q = query[begin:end].unflatten(1, (num_kv_heads, -1))  # [count, kv_heads, group, key_dim]
        scores = torch.einsum("qhgd,thd->hgqt", q, k.to(q.dtype)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = with_alibi(scores, slopes, position, token)
        distance = position[:, None] - token
        is_visible = distance >= 0
        if window_tokens is not None:
            is_visible &= distance < window_tokens
        scores = scores.masked_fill(~is_visible, -torch.inf)
        weights = softmax_with_sinks(scores, sinks)
        # [count, heads, value_dim]
        out[begin:end] = torch.einsum("hgqt,thd->qhgd", weights, v.to(q.dtype)).flatten(1, 2)


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor | None = None,
    *,
    scale: float,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally from each chunk to all KV of its sequence.

    Reads no token of a sequence at or after the end of its chunk.

    Args:
        query: [tokens, heads, key_dim].
        keys: [blocks, block_size, kv_heads, key_dim]; contiguous: [slots, max_tokens, ...]. Query
            head h reads KV head h // (heads / kv_heads).
        values: likewise, with value_dim.
        tables: [slots, max_blocks] int32 or int64, block tables; None: KV is contiguous.
        spans: the chunks.
        out: [tokens, heads, value_dim]; only the rows of the spans are overwritten. None for a new
            tensor.
        scale: factor on the dot products, positive.
        window_tokens: attend only to this many latest tokens, the own one included.
        softcap: limit scores to (-softcap, softcap) with tanh before the softmax.
        sinks: [heads], contiguous, see `kernels/sinks.py`; None for none.
        slopes: [heads] float32, contiguous, see `kernels/alibi.py`; None for none.

    Returns:
        `out`, or a new tensor, in which rows outside the spans are undefined.
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], values.shape[3])
    _check(query, keys, values, spans, out, scale, sinks, slopes)
    if not spans.slots:
        return out
    run = _run if runs_triton(query) else _on_cpu
    run(query, keys, values, tables, spans, out, scale, window_tokens, softcap, sinks, slopes)
    return out


def prefill_attention_fixed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: DeviceSpans,
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """`prefill_attention` of chunks that only the device knows.

    Not on a CPU, where the host is the device.
    """
    _run(query, keys, values, tables, spans, out, scale, window_tokens, softcap, sinks, slopes)


def prefill_attention_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    config: Config,
    num_splits: int | None = None,
    scale: float,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """`prefill_attention` with all spans in the Triton kernel, by `config` and `num_splits`."""
    _check(query, keys, values, spans, out, scale, sinks, slopes)
    if spans.slots:
        _run_triton(
            query,
            keys,
            values,
            tables,
            spans,
            out,
            config=config,
            num_splits=num_splits,
            scale=scale,
            window_tokens=window_tokens,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: PrefillSpans,
    out: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    num_tokens, num_heads, key_dim = query.shape
    assert keys.shape == (*values.shape[:3], key_dim), "query, keys and values disagree"
    assert out.shape == (num_tokens, num_heads, values.shape[3])
    assert num_heads % keys.shape[2] == 0
    assert query.dtype == keys.dtype == values.dtype
    assert all(t.stride(-1) == 1 for t in (query, keys, values, out))
    assert len(spans.slots) == len(spans.starts) == len(spans.offsets) - 1
    assert spans.offsets[-1] <= num_tokens
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    assert slopes is None or (slopes.shape == (num_heads,) and slopes.is_contiguous())
    assert scale > 0, "scale is multiplied after the maximum is taken"


def _on_cpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    places = spans.slots, spans.starts, spans.offsets
    if tables is None:
        attention_contiguous(
            query,
            keys,
            values,
            *places,
            out,
            scale=scale,
            window_tokens=window_tokens,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
    else:
        attention_paged(
            query,
            keys,
            values,
            tables,
            *places,
            out,
            scale=scale,
            window_tokens=window_tokens,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )


def _run(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: DeviceSpans,
    out: torch.Tensor,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    """Write the rows of all spans, with the fastest kernel for them."""
    is_plain = tables is None and softcap is None and sinks is None and slopes is None
    if is_plain and fits(query, keys, values, out):
        hopper_prefill(query, keys, values, spans, out, scale=scale, window_tokens=window_tokens)
        return
    _run_triton(
        query,
        keys,
        values,
        tables,
        spans,
        out,
        config=default_config(query.shape[2], out.shape[2], query.dtype, paged=tables is not None),
        scale=scale,
        window_tokens=window_tokens,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
    )


def _run_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    spans: DeviceSpans,
    out: torch.Tensor,
    *,
    config: Config,
    num_splits: int | None = None,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    """Write the rows of all spans with the Triton kernel."""
    num_heads, key_dim = query.shape[1:]
    _, block_size, num_kv_heads, value_dim = values.shape
    group = num_heads // num_kv_heads
    heads_per_program = max(n for n in range(1, MIN_DOT + 1) if group % n == 0)
    num_groups = num_heads // heads_per_program
    num_resident = _PROGRAMS_PER_MULTIPROCESSOR * count_multiprocessors(query.device)
    work = spans.work(
        Tiling(
            block_tokens=config.block_rows // heads_per_program,
            num_running=num_resident,
            num_groups=num_groups,
            least_keys=MIN_SPLIT_KEYS,
            window_tokens=window_tokens,
            num_splits=num_splits,
        )
    )
    partials = make_partials(work, num_groups, config.block_rows, out)
    # Neighbouring programs read the same tokens.
    launch(
        _prefill_attention_kernel,
        (num_groups, len(work.programs)),
        query,
        keys,
        values,
        tables,
        work.programs,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        sinks,
        slopes,
        out,
        partials.sums,
        partials.lse,
        # Scores are in powers of two, except with a softcap, which needs the score itself.
        scale if softcap is not None else scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        0 if tables is None else tables.stride(0),
        out.stride(0),
        out.stride(1),
        group=group,
        heads_per_program=heads_per_program,
        block_rows=config.block_rows,
        block_keys=config.block_keys,
        block_size=None if tables is None else block_size,
        key_dim=key_dim,
        key_dim_pow2=pow2(key_dim, MIN_DOT),
        value_dim=value_dim,
        value_dim_pow2=pow2(value_dim, MIN_DOT),
        softcap=softcap,
        has_slopes=slopes is not None,
        min_split_keys=max(MIN_SPLIT_KEYS, config.block_keys),
        window_tokens=window_tokens,
        has_sinks=sinks is not None,
        num_columns=PROGRAM_COLUMNS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_partials(work, partials, spans, sinks, out, heads_per_program=heads_per_program)


def _pairs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(offsets)


@jit
def _attend_tiles(
    query: tensor,
    keys: tensor,
    values: tensor,
    tables: tensor,
    slot: tensor,
    acc: tensor,
    total: tensor,
    top: tensor,
    position: tensor,
    slope: tensor,
    first_tile: tensor,
    last_tile: tensor,
    begin_key: tensor,
    end_key: tensor,
    factor: tensor,
    key_block_stride: tensor,
    key_token_stride: tensor,
    value_block_stride: tensor,
    value_token_stride: tensor,
    table_stride: tensor,
    block_keys: constexpr,
    block_size: constexpr,
    key_dim: constexpr,
    key_dim_pow2: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    window_tokens: constexpr,
    softcap: constexpr,
    has_slopes: constexpr,
    is_masked: constexpr,
    sees_some: constexpr,
) -> tensor:
    """Continue the online softmax over tiles [first_tile, last_tile), in keys.

    query: [rows, key_dim]. keys, values: of the KV head. Returns acc [rows, value_dim], total
    [rows] and top [rows], in powers of two. slope: [rows], if has_slopes, likewise.
    is_masked: no key outside [begin_key, end_key) is read. sees_some: whether each query sees a key
    of the first tile, or has seen one.
    """
    dim_k = tl.arange(0, key_dim_pow2)
    dim_v = tl.arange(0, value_dim_pow2)
    column = tl.arange(0, block_keys)
    log2_e: constexpr = 1.4426950408889634

    for first_key in range(first_tile, last_tile, block_keys):
        # Tokens of the tile are at `first_place + place` of their block. If the tile is in one
        # block, `first_place` is one 64-bit number and `place` has 32 bits: fewer registers.
        token = first_key + column
        place = column
        if block_size is None:
            block = slot
            first_place = first_key
        elif block_size % block_keys == 0:
            block = tl.load(tables + slot * table_stride + first_key // block_size)
            first_place = first_key % block_size
        else:
            entry = tables + slot * table_stride + token // block_size
            if is_masked:
                is_token = (token >= begin_key) & (token < end_key)
                block = tl.load(entry, mask=is_token, other=0)
            else:
                block = tl.load(entry)
            first_place = 0
            place = token % block_size
        block = block.to(tl.int64)
        first_place = tl.cast(first_place, tl.int64)
        key_rows = block * key_block_stride + first_place * key_token_stride
        key_rows = key_rows + place * key_token_stride
        value_rows = block * value_block_stride + first_place * value_token_stride
        value_rows = value_rows + place * value_token_stride
        k_from = keys + key_rows[:, None] + dim_k[None, :]
        v_from = values + value_rows[:, None] + dim_v[None, :]
        if is_masked:
            is_token = ((token >= begin_key) & (token < end_key))[:, None]
            k = tl.load(k_from, mask=is_token & (dim_k < key_dim)[None, :], other=0.0)
            v = tl.load(v_from, mask=is_token & (dim_v < value_dim)[None, :], other=0.0)
        else:
            if key_dim == key_dim_pow2:
                k = tl.load(k_from)
            else:
                k = tl.load(k_from, mask=(dim_k < key_dim)[None, :], other=0.0)
            if value_dim == value_dim_pow2:
                v = tl.load(v_from)
            else:
                v = tl.load(v_from, mask=(dim_v < value_dim)[None, :], other=0.0)

        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if softcap is not None:
            # tanh(x) = 1 - 2 / (e^2x + 1), also correct where e^2x is 0 or infinite
            capped = 1 - 2 / (tl.exp2(scores * (factor * (2 * log2_e / softcap))) + 1)
            scores = capped * (softcap * log2_e)
        elif has_slopes:
            scores = scores * factor
        if has_slopes:
            scores += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
        if is_masked:
            is_visible = token[None, :] <= position[:, None]
            if window_tokens is not None:
                is_visible &= token[None, :] > position[:, None] - window_tokens
            scores = tl.where(is_visible, scores, float("-inf"))
        # The factor is applied together with the subtraction, as one fused multiply-add.
        if softcap is None and not has_slopes:
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if not sees_some:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if softcap is None and not has_slopes:
            weights = tl.exp2(scores * factor - base[:, None])
        else:
            weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, total, top


@jit_once(indices=("programs", "slots", "starts", "offsets"))
def _prefill_attention_kernel(
    query: tensor,
    keys: tensor,
    values: tensor,
    tables: tensor,
    programs: tensor,
    slots: tensor,
    starts: tensor,
    offsets: tensor,
    sinks: tensor,
    slopes: tensor,
    out: tensor,
    partials: tensor,
    lse: tensor,
    factor: tensor,
    query_row_stride: tensor,
    query_head_stride: tensor,
    key_block_stride: tensor,
    key_token_stride: tensor,
    key_head_stride: tensor,
    value_block_stride: tensor,
    value_token_stride: tensor,
    value_head_stride: tensor,
    table_stride: tensor,
    out_row_stride: tensor,
    out_head_stride: tensor,
    group: constexpr,
    heads_per_program: constexpr,
    block_rows: constexpr,
    block_keys: constexpr,
    block_size: constexpr,
    key_dim: constexpr,
    key_dim_pow2: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    window_tokens: constexpr,
    softcap: constexpr,
    has_sinks: constexpr,
    has_slopes: constexpr,
    min_split_keys: constexpr,
    num_columns: constexpr,
) -> None:
    first_head = tl.program_id(0) * heads_per_program
    block_tokens: constexpr = block_rows // heads_per_program
    own = programs + tl.program_id(1) * num_columns
    span = tl.load(own).to(tl.int32)
    if span < 0:
        return
    first_token = tl.load(own + 1).to(tl.int32)
    split = tl.load(own + 2).to(tl.int32)
    num_splits = tl.load(own + 3).to(tl.int32)

    first_row = tl.load(offsets + span)
    count = (tl.load(offsets + span + 1) - first_row).to(tl.int32)
    start = tl.load(starts + span).to(tl.int32)
    slot = tl.load(slots + span).to(tl.int64)
    kv_head = (first_head // group).to(tl.int64)

    # Rows of the products, see the top of this file.
    row = tl.arange(0, block_rows)
    token = first_token + row // heads_per_program
    head = first_head + row % heads_per_program
    is_row = (row < block_tokens * heads_per_program) & (token < count)
    position = start + token
    dim_k = tl.arange(0, key_dim_pow2)
    dim_v = tl.arange(0, value_dim_pow2)
    query_rows = (first_row + token) * query_row_stride + head * query_head_stride
    q = tl.load(
        query + query_rows[:, None] + dim_k[None, :],
        mask=is_row[:, None] & (dim_k < key_dim)[None, :],
        other=0.0,
    )  # [block_rows, key_dim]

    # At least one query of the program sees each of keys [begin_key, end_key); all queries see
    # [full_begin, full_end).
    first_position = start + first_token
    end_key = start + tl.minimum(first_token + block_tokens, count)
    full_end = (first_position + 1) // block_keys * block_keys
    begin_key = start * 0
    first_tile = begin_key
    full_begin = begin_key
    if window_tokens is not None:
        begin_key = tl.maximum(first_position + 1 - window_tokens, 0)
        first_tile = begin_key // block_keys * block_keys
        full_begin = tl.maximum(end_key - window_tokens, 0)
        full_begin = tl.cdiv(full_begin, block_keys) * block_keys
        full_begin = tl.minimum(full_begin, full_end)

    # This split's keys are [first_tile, stop_key).
    split_keys = tl.cdiv(tl.cdiv(end_key - first_tile, num_splits), block_keys) * block_keys
    split_keys = tl.maximum(split_keys, min_split_keys)
    first_tile += split * split_keys
    stop_key = tl.minimum(first_tile + split_keys, end_key)
    full_begin = tl.maximum(full_begin, first_tile)
    diagonal_begin = tl.maximum(full_end, first_tile)
    full_end = tl.minimum(full_end, stop_key)

    acc = tl.zeros([block_rows, value_dim_pow2], tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    top = tl.full([block_rows], float("-inf"), tl.float32)
    slope = top  # of no use without slopes
    if has_slopes:
        slope = load_slopes(slopes, head, is_row)
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    if window_tokens is not None:
        acc, total, top = _attend_tiles(
            q, keys, values, tables, slot, acc, total, top, position, slope,
            first_tile, tl.minimum(full_begin, stop_key), begin_key, end_key, factor,
            key_block_stride, key_token_stride, value_block_stride, value_token_stride,
            table_stride, block_keys, block_size,
            key_dim, key_dim_pow2, value_dim, value_dim_pow2, window_tokens, softcap, has_slopes,
            is_masked=True, sees_some=False,
        )  # fmt: skip
    acc, total, top = _attend_tiles(
        q, keys, values, tables, slot, acc, total, top, position, slope,
        full_begin, full_end, begin_key, end_key, factor,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride,
        table_stride, block_keys, block_size,
        key_dim, key_dim_pow2, value_dim, value_dim_pow2, window_tokens, softcap, has_slopes,
        is_masked=False, sees_some=True,
    )  # fmt: skip
    acc, total, top = _attend_tiles(
        q, keys, values, tables, slot, acc, total, top, position, slope,
        diagonal_begin, stop_key, begin_key, end_key, factor,
        key_block_stride, key_token_stride, value_block_stride, value_token_stride,
        table_stride, block_keys, block_size,
        key_dim, key_dim_pow2, value_dim, value_dim_pow2, window_tokens, softcap, has_slopes,
        is_masked=True, sees_some=False,
    )  # fmt: skip

    if has_sinks:
        # Splits get it from the kernel that merges them.
        sink = load_sinks(sinks, head, is_row)
        total += tl.where(num_splits == 1, tl.exp2(sink - top), 0.0)
    # Rows that are not stored may have seen no key, and so may rows of a split.
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    acc = acc / total[:, None]
    is_stored = is_row[:, None] & (dim_v < value_dim)[None, :]
    if num_splits == 1:
        out_rows = (first_row + token) * out_row_stride + head * out_head_stride
        tl.store(
            out + out_rows[:, None] + dim_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_stored,
        )
    else:
        partial = tl.program_id(1).to(tl.int64)
        partial_row = (partial * tl.num_programs(0) + tl.program_id(0)) * block_rows + row
        tl.store(lse + partial_row, tl.where(has_seen, top + tl.log2(total), float("-inf")))
        tl.store(
            partials + partial_row[:, None] * value_dim + dim_v[None, :],
            acc,
            mask=is_stored & has_seen[:, None],
        )
