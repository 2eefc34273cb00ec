"""Decode attention: one new token per sequence over all of its KV, for either cache layout.

Decoding reads all KV once and computes little, so every SM must keep reading until the end,
whatever the lengths of the sequences. The tokens of the whole batch, row after row, are cut into
tiles of `block_tokens`, and the tiles into `num_shares` equal shares:

    row 0                 row 1     row 2
    |.....................|.........|.....................|
    |---- share 0 ----|---- share 1 ----|---- share 2 ----|

Each share is one program (for each group of KV heads), which processes the rows in its share. A
row within one share is finished there. A row in several shares has a partial result in each, and
these are merged by their log-sum-exp (FlashDecoding). The last program to store its partial result
merges; an atomic counter per split row tells which one is last. Lengths are read on the device
only, so a captured CUDA graph stays valid while sequences grow.

Token-major KV has all heads of a token side by side, so a program takes several KV heads of a tile
at once, which gives longer contiguous reads. A matrix product needs at least 16 rows; with the
queries of several KV heads in them, few are padding. Scores of a query with another head's keys
are masked.

Two to eight rows of contiguous KV have a kernel of their own on Hopper (`cluster_attention.py`).

Shapes throughout: B rows, one query token each. `keys` and `values` are [blocks, block_size,
kv_heads, dim]; the last stride is 1, the others are any. Paged: `tables` [slots, max_blocks] are
the block tables, a slot's blocks in order. Contiguous: `tables` is None, and a slot is one block,
as long as the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

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
from aquifer.kernels.alibi import load_slopes, with_alibi
from aquifer.kernels.cluster_attention import MOST_COUNTERS, can_read, cluster_attention, fits
from aquifer.kernels.sinks import load_sinks, softmax_with_sinks

_MERGE_ELEMENTS = 8192
"""Elements that a program of `_merge_kernel` holds at once: 32 registers per thread."""

_WARP_MERGE_ELEMENTS = 1024
"""Elements that a warp of the first kernel holds when it merges: 32 registers per thread."""

FEW_ROWS = 4
"""Up to this many rows, there is too little work for all programs, and merging dominates."""

_SOME_ROWS = 32
"""Up to this many rows, larger tiles of two KV heads are faster where there are few heads."""

_LEAST_COUNTED_ROWS = 64
"""Above `FEW_ROWS`, programs count the tiles of at least this many rows: one per thread."""


@dataclass(frozen=True, slots=True)
class Config:
    """Partition of the work; which one is fast depends on shape and device.

    There are `kv_heads / kv_heads_per_program * num_shares` programs. Each reads tiles of
    `block_tokens * kv_heads_per_program` keys and values, at least 16, and keeps
    `num_stages - 1` of them in shared memory; half as many for a paged cache.
    """

    kv_heads_per_program: int  # a power of two that divides kv_heads
    block_tokens: int  # a power of two
    num_shares: int
    num_warps: int
    num_stages: int
    merges_itself: bool = True  # False: a second kernel merges
    # Whether the next kernel may start before this one has read its keys, and not only when it has.
    releases_early: bool = False
    # Whether clusters of blocks attend, where no option is given that they do not know
    # (`cluster_attention.py`). The rest is then of no meaning.
    by_clusters: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory for partial results and atomic counters. One call at a time uses it."""

    partials: torch.Tensor  # float32; undefined between calls
    counters: torch.Tensor  # int32 atomic counters; zero between calls

    @classmethod
    def empty(
        cls,
        configs: Iterable[Config],
        num_heads: int,
        num_kv_heads: int,
        value_dim: int,
        device: torch.device,
    ) -> Workspace:
        """Allocate a workspace large enough for each of these configs."""
        sizes = [_workspace_sizes(config, num_heads, num_kv_heads, value_dim) for config in configs]
        return cls(
            torch.empty(max(size for size, _ in sizes), dtype=torch.float32, device=device),
            torch.zeros(max(size for _, size in sizes), dtype=torch.int32, device=device),
        )


def _workspace_sizes(
    config: Config, num_heads: int, num_kv_heads: int, value_dim: int
) -> tuple[int, int]:
    """Elements of `partials` (two results with log-sum-exp per share) and of `counters`."""
    groups = num_kv_heads // config.kv_heads_per_program
    num_counters = max(config.num_shares * groups, MOST_COUNTERS)
    return config.num_shares * 2 * num_heads * (value_dim + 1), num_counters


class DecodeWorkspaces:
    """Cache of configs and workspaces by the shapes of a call, created on first use.

    CUDA graphs refer to workspaces, so all are kept as long as this object.
    """

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, int, int], Workspace] = {}
        self._found: dict[tuple[object, ...], tuple[Workspace, Config]] = {}

    def get(
        self, query: torch.Tensor, values: torch.Tensor, *, paged: bool
    ) -> tuple[Workspace, Config]:
        """Return workspace and config for a `decode_attention` call with these shapes.

        The first call for a shape must come before a CUDA graph with it is captured.
        """
        key = (query.shape, values.shape[2:], values.dtype, values.device, paged)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._make(query, values, paged=paged)
        return found

    def _make(
        self, query: torch.Tensor, values: torch.Tensor, *, paged: bool
    ) -> tuple[Workspace, Config]:
        batch, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = values.shape[2:]
        config = default_config(
            batch,
            num_heads,
            num_kv_heads,
            max(key_dim, value_dim),
            values.dtype,
            count_multiprocessors(values.device),
            paged=paged,
        )
        config = replace(config, by_clusters=not paged and fits(query, values))
        sizes = _workspace_sizes(config, num_heads, num_kv_heads, value_dim)
        workspace = self._workspaces.get((values.device, *sizes))
        if workspace is None:
            is_capturing = values.is_cuda and torch.cuda.is_current_stream_capturing()
            assert not is_capturing, "run decode attention once before capturing a CUDA graph"
            workspace = Workspace.empty([config], num_heads, num_kv_heads, value_dim, values.device)
            self._workspaces[values.device, *sizes] = workspace
        return workspace, config


def default_config(
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_multiprocessors: int,
    *,
    paged: bool,
) -> Config:
    """Choose a config by shape.

    Args:
        batch: rows of the step.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: the larger of key_dim and value_dim.
        dtype: dtype of KV.
        num_multiprocessors: number of SMs of the device.
        paged: whether KV is found through block tables.
    """
    # The figures are the best of sweeps on an H200 (benchmarks/gpu). With block tables, the longer
    # reads of two KV heads per program pay for the table lookups. Without, two or four KV heads are
    # 1 % faster for many rows of equal length, and up to 4 % slower if lengths differ: then shares
    # begin and end within rows, and longer ones do so less often. Tiles of 4096 bytes are 5 %
    # faster for 16 rows of 576 tokens, and 4 to 6 % slower for most others. As many shares as can
    # run at once are up to 2.5 % faster than a power of two where lengths differ or are long, and
    # up to 4 % slower, with four KV heads 8 %, where all rows have equally many tiles.
    wanted, tile_bytes, num_warps = 1, 8192, 2
    # Several programs per SM, so that some read while others start or end. Fewer for few rows:
    # merging their many partial results would take longer than reading KV.
    per_multiprocessor = 2 if batch <= FEW_ROWS else 4
    if dtype.itemsize > 2 and pow2(head_dim) == 128:
        num_warps = 4  # with two, register spills: the compiler then uses hardly any registers
    elif paged:
        wanted = 2
    elif FEW_ROWS < batch <= _SOME_ROWS and num_kv_heads == 2 and num_heads <= MIN_DOT:
        wanted, tile_bytes, per_multiprocessor = 2, 16384, 2
    fits = num_kv_heads % wanted == 0 and wanted * num_heads // num_kv_heads <= MIN_DOT
    kv_heads = wanted if fits else 1
    if paged:
        tile_bytes *= kv_heads
    # A tile has at least the 16 columns that a matrix product needs.
    columns = max(tile_bytes // (pow2(head_dim) * dtype.itemsize), MIN_DOT)
    shares = max(num_multiprocessors * per_multiprocessor * kv_heads // num_kv_heads, 1)
    return Config(
        kv_heads_per_program=kv_heads,
        block_tokens=columns // kv_heads,
        num_shares=_even_shares(shares) if batch <= FEW_ROWS else shares,
        num_warps=num_warps,
        num_stages=2 if paged else 3,
        releases_early=batch <= FEW_ROWS,
    )


def _even_shares(most: int) -> int:
    """The largest power of two up to `most`, or one and a half times that.

    The shares of few rows are then of equal numbers of tiles more often.
    """
    power = 1 << (most.bit_length() - 1)
    return power * 3 // 2 if power > 1 and power * 3 // 2 <= most else power


def decode_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """`decode_attention` in plain torch. Same arguments; computes in the dtype of `query`."""
    block_size = keys.shape[1]
    num_kv_heads = keys.shape[2]
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            out[row] = 0
            continue
        first = 0 if window_tokens is None else max(length - window_tokens, 0)
        if tables is None:
            k, v = keys[slot, first:length], values[slot, first:length]
        else:
            tokens = torch.arange(first, length, device=tables.device)
            blocks = tables[slot, tokens // block_size].long()
            k, v = keys[blocks, tokens % block_size], values[blocks, tokens % block_size]
        q = query[row].unflatten(0, (num_kv_heads, -1))  # [kv_heads, group, key_dim]
        scores = torch.einsum("hgd,thd->hgt", q, k.to(q.dtype)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distances = torch.arange(first - length + 1, 1, device=scores.device)
        scores = with_alibi(scores[:, :, None], slopes, distances[-1:], distances)[:, :, 0]
        weights = softmax_with_sinks(scores, sinks)
        out[row] = torch.einsum("hgt,thd->hgd", weights, v.to(q.dtype)).flatten(0, 1)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    config: Config,
    *,
    scale: float,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    beside: bool = False,
) -> None:
    """Attend over all KV of each row's sequence. Reads only tokens that it attends to.

    `slots` and `lengths` are read before the previous kernel on the stream is complete (rule 4 of
    `_triton.py`), so that kernel must not write them. This holds in every model, because a kernel
    that writes the row's own K and V comes between.

    Args:
        query: [B, heads, key_dim].
        keys: [blocks, block_size, kv_heads, key_dim]; contiguous: [slots, max_tokens, ...].
        values: likewise, with value_dim.
        tables: [slots, max_blocks] int32 or int64, block tables; None: KV is contiguous.
        slots: [B] int32 or int64, slot of each row's sequence.
        lengths: [B] int32 or int64, tokens in KV, the row's own included. 0 for padding of the
            batch: zeros are written and the slot is ignored.
        out: [B, heads, value_dim], overwritten.
        workspace: made for this config, among others.
        config: partition of the work.
        scale: factor on the dot products.
        window_tokens: attend only to this many latest tokens, the own one included.
        softcap: limit scores to (-softcap, softcap) with tanh before the softmax.
        sinks: [heads], contiguous, see `kernels/sinks.py`; None for none.
        slopes: [heads] float32, contiguous, see `kernels/alibi.py`; None for none.
        beside: whether it may run at the same time as the kernel launched before (rule 6 of
            `_triton.py`): nothing that is read here was written by that one, it reads nothing that
            is written here, and it releases early. `out` was allocated before it was launched.
    """
    batch, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = values.shape
    group = num_heads // num_kv_heads
    assert keys.shape == (*values.shape[:3], key_dim), "query, keys and values disagree"
    assert out.shape == (batch, num_heads, value_dim)
    assert slots.shape == lengths.shape == (batch,)
    assert group * num_kv_heads == num_heads
    assert num_kv_heads % config.kv_heads_per_program == 0
    assert config.block_tokens * config.kv_heads_per_program >= MIN_DOT
    assert all(t.stride(-1) == 1 for t in (query, keys, values, out))
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    assert slopes is None or (slopes.shape == (num_heads,) and slopes.is_contiguous())
    if not runs_triton(query):
        decode_attention_reference(
            query,
            keys,
            values,
            tables,
            slots,
            lengths,
            out,
            scale=scale,
            window_tokens=window_tokens,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
        return
    if batch == 0:
        return
    options = window_tokens, softcap, sinks, slopes
    is_plain = not beside and all(option is None for option in options)
    if config.by_clusters and is_plain and can_read(query, keys, values):
        cluster_attention(
            query,
            keys,
            values,
            slots,
            lengths,
            out,
            workspace.partials,
            workspace.counters,
            scale=scale,
        )
        return
    # partials: [shares, 2, heads, value_dim], lse: [shares, 2, heads]
    num_lse = config.num_shares * 2 * num_heads
    needed, num_counters = _workspace_sizes(config, num_heads, num_kv_heads, value_dim)
    numel = workspace.partials.numel()
    assert numel >= needed, f"workspace has {numel} of {needed} elements"
    assert workspace.counters.numel() >= num_counters, "workspace has too few counters"
    lse = workspace.partials[num_lse * value_dim : needed]
    heads_pow2 = pow2(group * config.kv_heads_per_program)
    merge_elements = config.num_warps * _WARP_MERGE_ELEMENTS * (4 if batch <= FEW_ROWS else 1)
    merge_shares = merge_elements // (heads_pow2 * pow2(value_dim))
    launch(
        _decode_attention_kernel,
        (num_kv_heads // config.kv_heads_per_program, config.num_shares),
        query,
        keys,
        values,
        tables,
        slots,
        lengths,
        sinks,
        slopes,
        out,
        workspace.partials,
        lse,
        workspace.counters,
        scale,
        batch,
        int(beside),
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
        batch_pow2=counted_rows(batch),
        num_heads=num_heads,
        group=group,
        kv_heads=config.kv_heads_per_program,
        block_tokens=config.block_tokens,
        block_size=None if tables is None else block_size,
        same_strides=keys.stride() == values.stride(),
        key_dim=key_dim,
        key_dim_pow2=pow2(key_dim, MIN_DOT),
        value_dim=value_dim,
        value_dim_pow2=pow2(value_dim, MIN_DOT),
        query_rows=pow2(group * config.kv_heads_per_program, MIN_DOT),
        window_tokens=window_tokens,
        softcap=softcap,
        has_sinks=sinks is not None,
        has_slopes=slopes is not None,
        heads_pow2=heads_pow2,
        merge_shares=min(max(merge_shares, 1), pow2(config.num_shares)),
        merges_itself=config.merges_itself,
        releases_early=config.releases_early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(query.device),
    )
    if config.merges_itself:
        return
    launch_merge(
        lengths,
        sinks,
        out,
        workspace.partials,
        lse,
        num_shares=config.num_shares,
        block_tokens=config.block_tokens,
        least_tiles=1,
        window_tokens=window_tokens,
    )


def launch_merge(
    lengths: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    partials: torch.Tensor,
    lse: torch.Tensor,
    *,
    num_shares: int,
    block_tokens: int,
    least_tiles: int,
    window_tokens: int | None,
) -> None:
    """Merge the partial results of rows in several shares; rows of padding become zeros.

    Args:
        lengths: [B], as in `decode_attention`; likewise `sinks`, `out` and `window_tokens`.
        sinks: [heads] or None.
        out: [B, heads, value_dim].
        partials: [shares, 2, heads, value_dim] float32.
        lse: [shares, 2, heads] float32, log-sum-exp in powers of two.
        num_shares: shares of the batch.
        block_tokens: tokens of a tile.
        least_tiles: the fewest tiles of a share.
        window_tokens: see `decode_attention`.
    """
    batch, num_heads, value_dim = out.shape
    value_dim_pow2 = pow2(value_dim)
    merge_shares = min(pow2(num_shares // batch + 2), 64, max(_MERGE_ELEMENTS // value_dim_pow2, 1))
    merge_heads = max(_MERGE_ELEMENTS // (merge_shares * value_dim_pow2), 1)
    merge_heads = min(merge_heads, pow2(num_heads))
    launch(
        _merge_kernel,
        (-(-num_heads // merge_heads), batch),
        lengths,
        sinks,
        out,
        partials,
        lse,
        batch,
        out.stride(0),
        out.stride(1),
        batch_pow2=counted_rows(batch),
        num_shares=num_shares,
        num_shares_pow2=pow2(num_shares),
        num_heads=num_heads,
        block_tokens=block_tokens,
        least_tiles=least_tiles,
        value_dim=value_dim,
        value_dim_pow2=value_dim_pow2,
        merge_heads=merge_heads,
        merge_shares=merge_shares,
        window_tokens=window_tokens,
        has_sinks=sinks is not None,
        num_warps=8,
    )


def counted_rows(batch: int) -> int:
    """Rows whose tiles a program counts: a power of two, at least `batch`.

    Values are few: each takes a second to compile.

    For a single row the compiler removes all counting.
    """
    if batch <= FEW_ROWS:
        return 1 if batch == 1 else FEW_ROWS
    return max(pow2(batch), _LEAST_COUNTED_ROWS)


@jit
def _row_tiles(
    lengths: tensor,
    batch: tensor,
    batch_pow2: constexpr,
    block_tokens: constexpr,
    window_tokens: constexpr,
) -> tensor:
    """Count the tiles of each row, [batch_pow2], from the one with the window's first token."""
    rows = tl.arange(0, batch_pow2)
    # From the L2 cache, because it may be read before the kernel waits.
    length = tl.load(lengths + rows, mask=rows < batch, other=0, cache_modifier=".cg").to(tl.int32)
    tiles = tl.cdiv(length, block_tokens)
    if window_tokens is not None:
        tiles -= tl.maximum(length - window_tokens, 0) // block_tokens
    return tiles


@jit_once(counts=("batch", "waits_late"), indices=("slots", "lengths"))
def _decode_attention_kernel(
    query: tensor,
    keys: tensor,
    values: tensor,
    tables: tensor,
    slots: tensor,
    lengths: tensor,
    sinks: tensor,
    slopes: tensor,
    out: tensor,
    partials: tensor,
    lse: tensor,
    tickets: tensor,
    scale: tensor,
    batch: tensor,
    waits_late: tensor,
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
    batch_pow2: constexpr,
    num_heads: constexpr,
    group: constexpr,
    kv_heads: constexpr,
    block_tokens: constexpr,
    block_size: constexpr,
    same_strides: constexpr,
    key_dim: constexpr,
    key_dim_pow2: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    query_rows: constexpr,
    window_tokens: constexpr,
    softcap: constexpr,
    has_sinks: constexpr,
    has_slopes: constexpr,
    heads_pow2: constexpr,
    merge_shares: constexpr,
    merges_itself: constexpr,
    releases_early: constexpr,
    overlaps: constexpr,
) -> None:
    # Neighbouring programs read neighbouring heads of the same tokens. `tickets` are the atomic
    # counters of `Workspace`.
    first_kv_head = tl.program_id(0) * kv_heads
    share = tl.program_id(1)

    # Tiles are numbered through the batch; this share is [begin, end) of them.
    tiles = _row_tiles(lengths, batch, batch_pow2, block_tokens, window_tokens)
    row_ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    share_tiles = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = share * share_tiles
    end = tl.minimum(begin + share_tiles, num_tiles)
    first_row = tl.sum((row_ends <= begin).to(tl.int32), 0)
    last_row = tl.sum((row_ends < end).to(tl.int32), 0)
    last_row = tl.where(begin < end, last_row, first_row - 1)  # an empty share has no rows
    row_begin = tl.sum(tl.where(row_ends <= begin, tiles, 0), 0)
    # Length and slot of a row are prefetched one row ahead.
    length = _length_of(first_row, lengths, batch)
    slot = _slot_of(first_row, slots, batch)
    # Rows of padding, some of which are in no share.
    num_empty = tl.sum((tiles == 0).to(tl.int32), 0) - (batch_pow2 - batch)

    # Rows of the products: the query heads of KV heads [first_kv_head, first_kv_head + kv_heads).
    query_row = tl.arange(0, query_rows)
    is_query = query_row < group * kv_heads
    head = first_kv_head * group + query_row
    # Columns: the keys of a tile, all heads of a token side by side.
    column = tl.arange(0, block_tokens * kv_heads)
    column_token = column // kv_heads
    column_head = column % kv_heads
    same_head = ((query_row // group) % kv_heads)[:, None] == column_head[None, :]
    key_columns = (first_kv_head + column_head) * key_head_stride
    value_columns = (first_kv_head + column_head) * value_head_stride

    dim_k = tl.arange(0, key_dim_pow2)
    dim_v = tl.arange(0, value_dim_pow2)
    log2_e: constexpr = 1.4426950408889634
    if has_sinks:
        sink = load_sinks(sinks, head, is_query)
    if has_slopes:
        slope = load_slopes(slopes, head, is_query)

    if waits_late == 0:
        await_predecessor(overlaps)
    if releases_early:
        release_successor(overlaps)

    for row in range(first_row, last_row + 1):
        next_length = _length_of(row + 1, lengths, batch)
        next_slot = _slot_of(row + 1, slots, batch)
        first_token = 0
        if window_tokens is not None:
            first_token = tl.maximum(length - window_tokens, 0)
        first_tile = first_token // block_tokens
        row_end = row_begin + tl.cdiv(length, block_tokens) - first_tile
        # This share's tiles of the row are [tile_begin, tile_end), counted from the row's token 0.
        tile_begin = first_tile + tl.maximum(begin, row_begin) - row_begin
        tile_end = first_tile + tl.minimum(end, row_end) - row_begin

        q = tl.load(
            query + row * query_row_stride + head[:, None] * query_head_stride + dim_k[None, :],
            mask=is_query[:, None] & (dim_k < key_dim)[None, :],
            other=0.0,
            cache_modifier=".cg",  # as it may be read before the wait; likewise keys and values
        )  # [query_rows, key_dim]
        top = tl.full([query_rows], float("-inf"), tl.float32)
        total = tl.zeros([query_rows], tl.float32)
        acc = tl.zeros([query_rows, value_dim_pow2], tl.float32)

        for tile in range(tile_begin, tile_end):
            token = tile * block_tokens + column_token
            is_token = (token < length) & (token >= first_token)
            if block_size is None:
                block = slot
                place = token
            elif block_size % block_tokens == 0:  # the whole tile is in one block
                tiles_per_block: constexpr = block_size // block_tokens
                row_table = tables + slot.to(tl.int64) * table_stride
                block = tl.load(row_table + tile // tiles_per_block)
                place = (tile % tiles_per_block) * block_tokens + column_token
            else:
                entry = tables + slot.to(tl.int64) * table_stride + token // block_size
                block = tl.load(entry, mask=is_token, other=0)
                place = token % block_size
            block = block.to(tl.int64)
            place = place.to(tl.int64)  # the column's token within its block
            key_rows = block * key_block_stride + place * key_token_stride + key_columns
            value_rows = key_rows
            if not same_strides:
                value_rows = block * value_block_stride + place * value_token_stride + value_columns
            k = tl.load(
                keys + key_rows[:, None] + dim_k[None, :],
                mask=is_token[:, None] & (dim_k < key_dim)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [columns, key_dim]
            v = tl.load(
                values + value_rows[:, None] + dim_v[None, :],
                mask=is_token[:, None] & (dim_v < value_dim)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [columns, value_dim]

            scores = _products(q, k, key_dim_pow2) * scale  # [query_rows, columns]
            if softcap is not None:
                # tanh(x) = 1 - 2 / (e^2x + 1), also correct where e^2x is 0 or infinite
                scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * log2_e / softcap)) + 1)
            scores = scores * log2_e
            if has_slopes:
                distance = (token - (length - 1)).to(tl.float32)
                scores += slope[:, None] * distance[None, :]
            scores = tl.where(same_head & is_token[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))  # of at least one key of every tile
            weights = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            top = new_top

        if not releases_early and row == last_row:
            release_successor(overlaps)
        if has_sinks:
            # A row in several shares gets it from the program that merges.
            is_whole = (row_begin >= begin) & (row_end <= end)
            total += tl.where(is_whole, tl.exp2(sink - top), 0.0)
        # A row of padding between others has a total of 0.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        is_stored = is_query[:, None] & (dim_v < value_dim)[None, :]
        if (row_begin >= begin) & (row_end <= end):
            tl.store(
                out + row * out_row_stride + head[:, None] * out_head_stride + dim_v[None, :],
                acc.to(out.dtype.element_ty),
                mask=is_stored,
            )
        else:
            # At most one row continues from an earlier share, and at most one into the next.
            partial = (share * 2 + (row_begin >= begin).to(tl.int32)) * num_heads + head
            tl.store(partials + partial[:, None] * value_dim + dim_v[None, :], acc, mask=is_stored)
            tl.store(lse + partial, top + tl.log2(total), mask=is_query)
            if merges_itself:
                first_share = row_begin // share_tiles
                last_share = (row_end - 1) // share_tiles
                # In one share, at most one row begins that does not end there.
                ticket = tickets + first_share * tl.num_programs(0) + tl.program_id(0)
                tl.debug_barrier()  # all threads have stored before one increments the counter
                drawn = tl.atomic_add(ticket, 1, sem="acq_rel")
                if drawn == last_share - first_share:
                    tl.store(ticket, 0)  # for the next call: all programs have counted
                    merge_head = tl.arange(0, heads_pow2)
                    is_merged = merge_head < group * kv_heads
                    merge_head += first_kv_head * group
                    merged = _merged(
                        sinks,
                        partials,
                        lse,
                        first_share,
                        last_share,
                        merge_head,
                        is_merged,
                        num_heads,
                        value_dim,
                        value_dim_pow2,
                        heads_pow2,
                        merge_shares,
                        has_sinks,
                    )
                    tl.store(
                        out
                        + row * out_row_stride
                        + merge_head[:, None] * out_head_stride
                        + dim_v[None, :],
                        merged.to(out.dtype.element_ty),
                        mask=is_merged[:, None] & (dim_v < value_dim)[None, :],
                    )
        row_begin = row_end
        length = next_length
        slot = next_slot

    # Padding within a share was handled above, but padding between shares was not.
    if merges_itself and num_empty > 0:
        zeros = tl.zeros([query_rows, value_dim_pow2], tl.float32)
        for row in range(share, batch, tl.num_programs(1)):
            if tl.load(lengths + row) == 0:
                tl.store(
                    out + row * out_row_stride + head[:, None] * out_head_stride + dim_v[None, :],
                    zeros.to(out.dtype.element_ty),
                    mask=is_query[:, None] & (dim_v < value_dim)[None, :],
                )
    if waits_late != 0:
        await_predecessor(overlaps)


@jit
def _products(q: tensor, k: tensor, dim: constexpr) -> tensor:
    """Dot products of all rows, [rows of q, rows of k].

    In float32, hardware adds one product after the other. The error of a sum of 256 is then twice
    that of four sums of 64 added up, and an error of a score is a relative error of its weight.
    """
    part: constexpr = 64
    # No early return: the code after one would be compiled all the same.
    if q.dtype != tl.float32 or dim <= part:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        q_parts = tl.permute(tl.reshape(q, (q.shape[0], dim // part, part)), (1, 0, 2))
        k_parts = tl.permute(tl.reshape(k, (k.shape[0], dim // part, part)), (1, 2, 0))
        products = tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)
    return products


@jit
def _length_of(row: tensor, lengths: tensor, batch: tensor) -> tensor:
    """Length of a row, or of the last row if `row` is beyond it; loaded as in `_row_tiles`."""
    return tl.load(lengths + tl.minimum(row, batch - 1), cache_modifier=".cg").to(tl.int32)


@jit
def _slot_of(row: tensor, slots: tensor, batch: tensor) -> tensor:
    """Slot of a row, loaded likewise."""
    return tl.load(slots + tl.minimum(row, batch - 1), cache_modifier=".cg").to(tl.int32)


@jit
def _merged(
    sinks: tensor,
    partials: tensor,
    lse: tensor,
    first_share: tensor,
    last_share: tensor,
    head: tensor,
    is_head: tensor,
    num_heads: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    heads_pow2: constexpr,
    merge_shares: constexpr,
    has_sinks: constexpr,
) -> tensor:
    """Merge one row's partial results of [first_share, last_share]; returns [heads, value_dim].

    Loads bypass the L1 cache, which may be older than the other programs' stores.
    """
    dim = tl.arange(0, value_dim_pow2)
    top = tl.full([heads_pow2], float("-inf"), tl.float32)
    total = tl.zeros([heads_pow2], tl.float32)
    acc = tl.zeros([heads_pow2, value_dim_pow2], tl.float32)
    for next_share in range(first_share, last_share + 1, merge_shares):
        share = next_share + tl.arange(0, merge_shares)
        # The row's result is partial 1 of its first share and partial 0 of later ones.
        partial = (share * 2 + (share == first_share).to(tl.int32)) * num_heads
        index = partial[:, None] + head[None, :]  # [merge_shares, heads]
        is_partial = (share <= last_share)[:, None] & is_head[None, :]
        part_lse = tl.load(lse + index, mask=is_partial, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partials + index[:, :, None] * value_dim + dim[None, None, :],
            mask=is_partial[:, :, None] & (dim < value_dim)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [merge_shares, heads, value_dim]
        part_lse = tl.where(is_head[None, :], part_lse, 0.0)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        weights = tl.exp2(part_lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], 0)
        top = new_top
    if has_sinks:
        total += tl.exp2(load_sinks(sinks, head, is_head) - top)
    return acc / total[:, None]


@jit_once(counts=("batch",), indices=("lengths",))
def _merge_kernel(
    lengths: tensor,
    sinks: tensor,
    out: tensor,
    partials: tensor,
    lse: tensor,
    batch: tensor,
    out_row_stride: tensor,
    out_head_stride: tensor,
    batch_pow2: constexpr,
    num_shares: constexpr,
    num_shares_pow2: constexpr,
    num_heads: constexpr,
    block_tokens: constexpr,
    least_tiles: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    merge_heads: constexpr,
    merge_shares: constexpr,
    window_tokens: constexpr,
    has_sinks: constexpr,
) -> None:
    head = tl.program_id(0) * merge_heads + tl.arange(0, merge_heads)
    row = tl.program_id(1)
    dim = tl.arange(0, value_dim_pow2)
    is_head = head < num_heads
    is_stored = is_head[:, None] & (dim < value_dim)[None, :]  # [merge_heads, value_dim]
    target = out + row * out_row_stride
    target = target + head[:, None] * out_head_stride + dim[None, :]

    # The row's tiles are [begin, end).
    tiles = _row_tiles(lengths, batch, batch_pow2, block_tokens, window_tokens)
    rows = tl.arange(0, batch_pow2)
    begin = tl.sum(tl.where(rows < row, tiles, 0), 0)
    end = tl.sum(tl.where(rows <= row, tiles, 0), 0)
    if begin == end:
        zeros = tl.zeros([merge_heads, value_dim_pow2], tl.float32)
        tl.store(target, zeros.to(out.dtype.element_ty), mask=is_stored)
        return
    share_tiles = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_shares), least_tiles)
    first_share = begin // share_tiles
    last_share = (end - 1) // share_tiles
    if first_share == last_share:
        return  # finished by the share's program

    # The row's result is partial 1 of its first share and partial 0 of later ones.
    share = first_share + tl.arange(0, num_shares_pow2)
    partial = (share * 2 + (share == first_share).to(tl.int32)) * num_heads
    all_lse = tl.load(
        lse + partial[:, None] + head[None, :],
        mask=(share <= last_share)[:, None] & is_head[None, :],
        other=float("-inf"),
    )  # [num_shares, merge_heads]
    top = tl.max(all_lse, 0)
    top = tl.where(is_head, top, 0.0)
    total = tl.sum(tl.exp2(all_lse - top[None, :]), 0)
    if has_sinks:
        total += tl.exp2(load_sinks(sinks, head, is_head) - top)

    acc = tl.zeros([merge_heads, value_dim_pow2], tl.float32)
    for next_share in range(first_share, last_share + 1, merge_shares):
        some = next_share + tl.arange(0, merge_shares)
        some_partial = (some * 2 + (some == first_share).to(tl.int32)) * num_heads
        index = some_partial[:, None] + head[None, :]  # [merge_shares, merge_heads]
        is_partial = (some <= last_share)[:, None] & is_head[None, :]
        weights = tl.exp2(tl.load(lse + index, mask=is_partial, other=float("-inf")) - top[None, :])
        part = tl.load(
            partials + index[:, :, None] * value_dim + dim[None, None, :],
            mask=is_partial[:, :, None] & (dim < value_dim)[None, None, :],
            other=0.0,
        )  # [merge_shares, merge_heads, value_dim]
        acc += tl.sum(part * weights[:, :, None], 0)
    acc = acc / tl.where(is_head, total, 1.0)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_stored)
