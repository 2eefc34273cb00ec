"""Attention over latent KV: multi-head latent attention (DeepSeek-V2), for either cache layout.

The KV of a token is one row for all heads, `[latent, rotated key]`, such as 512 and 64 elements.
Expanded, head h's key is `[K_h latent, rotated key]` and its value `V_h latent`, with matrices K_h
and V_h of the model. Nothing is expanded here (the absorbed form): the caller multiplies each
head's query by K_h, and the result by V_h, so that all heads attend to the same rows:

    score = [K_h^T query, rotated query] . row * scale     result = sum of weight * row's latent

A row is read once for its key and its value. Scores are two products, of the latent and of the
rotated part, so that nothing is padded to a power of two between 576 and 1024.

- **Rows that decode**: the tokens of the batch are cut into equal shares, and partial results are
  merged, as `decode_attention.py` describes. A program handles `block_heads` heads: all 16 of
  DeepSeek-V2-Lite, or 64 of DeepSeek-V3's 128, whose two programs read the same rows at the same
  time, the second time from the L2 cache. A partial result, in float32, takes as many bytes as the
  KV of some tens of tokens, so a share has at least `least_tiles` tiles.
- **Chunks of prompts**: a program handles the heads of a few tokens, as in `prefill_attention.py`.
  For a pair of tokens this takes 2 * (576 + 512) operations a head, where expanded keys and values
  of 192 and 128 elements take 2 * (192 + 128): 3.4 times as many. In exchange nothing is expanded,
  whose cost grows with the prefix for every chunk, and no memory is taken for it. Long prompts
  without a prefix are expanded and do not come here (`models/latent.py`).

Shapes throughout: `keys` are [blocks, block_size, 1, value_dim + rope_dim]; the last stride is 1,
the others are any. Paged: `tables` [slots, max_blocks] are the block tables, a slot's blocks in
order. Contiguous: `tables` is None, and a slot is one block, as long as the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
from aquifer.kernels.decode_attention import (
    FEW_ROWS,
    Workspace,
    _length_of,
    _merged,
    _products,
    _row_tiles,
    _slot_of,
    counted_rows,
    decode_attention_reference,
    launch_merge,
)
from aquifer.kernels.prefill_attention import (
    PrefillSpans,
    prefill_attention,
    prefill_attention_reference,
)
from aquifer.kernels.prefill_merge import DeviceSpans, make_partials, merge_partials
from aquifer.kernels.prefill_work import MIN_SPLIT_KEYS, PROGRAM_COLUMNS, Tiling

_LOG2_E = 1.4426950408889634

_MERGE_ELEMENTS = 8192
"""Elements that a program of the decode kernel holds at once when it merges."""

_LEAST_SHARE_TOKENS = 64
"""The fewest tokens of a share: their KV has about twice the bytes of a partial result of 16 heads,
which is written and read in the L2 cache."""

_MOST_SELF_MERGED = 4
"""Where rows of equal length have up to so many partial results, the last of their programs merges
them. A kernel of its own does that with more programs, but has to be launched."""

_MOST_HEADS = 64
"""The most heads of a program that decodes: their sums take half of its registers."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Partition of the work of rows that decode; which one is fast depends on shape and device.

    There are `ceil(heads / block_heads) * num_shares` programs.
    """

    block_heads: int  # heads of a program; a power of two, at least 16
    block_tokens: int  # tokens of a tile; a power of two, at least 16
    num_shares: int
    least_tiles: int  # of a share
    num_warps: int
    num_stages: int
    merges_itself: bool = True  # False: a second kernel merges


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiling of the work of chunks."""

    block_rows: int  # queries of a program, over all its heads; a power of two, at least 16
    block_keys: int  # tokens of a tile; a power of two, at least 16
    num_warps: int
    num_stages: int


def default_decode_config(
    batch: int, num_heads: int, dtype: torch.dtype, num_multiprocessors: int, *, paged: bool
) -> DecodeConfig:
    """Choose a config by shape.

    Args:
        batch: rows of the step.
        num_heads: query heads.
        dtype: dtype of KV.
        num_multiprocessors: number of SMs of the device.
        paged: whether KV is found through block tables.
    """
    # Chosen by registers and shared memory of the compiled kernels; not measured yet. One program
    # per SM, since it needs most registers, and with tiles of at least 64 KiB on their way to
    # shared memory while one is used. Where the compiler has to look up blocks, it prefetches a
    # single tile, whatever `num_stages` is. The products of 64 heads use WGMMA, which is bound by
    # reading the queries from shared memory unless tiles have 64 tokens.
    block_heads = min(pow2(num_heads, MIN_DOT), _MOST_HEADS)
    block_tokens, num_stages = (64, 2) if paged or block_heads == _MOST_HEADS else (32, 4)
    if dtype.itemsize > 2:
        block_heads, block_tokens, num_stages = MIN_DOT, MIN_DOT, 1
    shares = max(num_multiprocessors // -(-num_heads // block_heads), 1)
    shares = 1 << (shares.bit_length() - 1)  # with equal lengths shares often begin where rows do
    return DecodeConfig(
        block_heads=block_heads,
        block_tokens=block_tokens,
        num_shares=shares,
        least_tiles=max(_LEAST_SHARE_TOKENS // block_tokens, 1),
        num_warps=8,
        num_stages=num_stages,
        # Merging would need more registers than there are beside 64 heads.
        merges_itself=block_heads < _MOST_HEADS and shares <= _MOST_SELF_MERGED * batch,
    )


def default_prefill_config(dtype: torch.dtype) -> PrefillConfig:
    """Choose a config by the dtype of KV."""
    if dtype.itemsize > 2:
        return PrefillConfig(block_rows=16, block_keys=16, num_warps=8, num_stages=1)
    return PrefillConfig(block_rows=64, block_keys=64, num_warps=8, num_stages=2)  # 216 KiB


def _workspace_sizes(config: DecodeConfig, num_heads: int, value_dim: int) -> tuple[int, int]:
    """Elements of `partials` (two results with log-sum-exp per share) and of `counters`."""
    head_tiles = -(-num_heads // config.block_heads)
    return config.num_shares * 2 * num_heads * (value_dim + 1), config.num_shares * head_tiles


def empty_workspace(
    configs: Iterable[DecodeConfig], num_heads: int, value_dim: int, device: torch.device
) -> Workspace:
    """Allocate a workspace large enough for each of these configs."""
    sizes = [_workspace_sizes(config, num_heads, value_dim) for config in configs]
    return Workspace(
        torch.empty(max(size for size, _ in sizes), dtype=torch.float32, device=device),
        torch.zeros(max(size for _, size in sizes), dtype=torch.int32, device=device),
    )


class LatentWorkspaces:
    """Cache of configs and workspaces by the shapes of a call, created on first use.

    CUDA graphs refer to workspaces, so all are kept as long as this object.
    """

    def __init__(self) -> None:
        self._workspaces: dict[tuple[object, ...], Workspace] = {}
        self._found: dict[tuple[object, ...], tuple[Workspace, DecodeConfig]] = {}

    def get(
        self, query: torch.Tensor, value_dim: int, *, paged: bool
    ) -> tuple[Workspace, DecodeConfig]:
        """Return workspace and config for a `latent_decode_attention` call with these shapes.

        The first call for a shape must come before a CUDA graph with it is captured.
        """
        key = (query.shape, value_dim, query.dtype, query.device, paged)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._make(query, value_dim, paged=paged)
        return found

    def _make(
        self, query: torch.Tensor, value_dim: int, *, paged: bool
    ) -> tuple[Workspace, DecodeConfig]:
        batch, num_heads, _ = query.shape
        device = query.device
        config = default_decode_config(
            batch, num_heads, query.dtype, count_multiprocessors(device), paged=paged
        )
        sizes = (device, *_workspace_sizes(config, num_heads, value_dim))
        workspace = self._workspaces.get(sizes)
        if workspace is None:
            is_capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
            assert not is_capturing, "run decode attention once before capturing a CUDA graph"
            workspace = empty_workspace([config], num_heads, value_dim, device)
            self._workspaces[sizes] = workspace
        return workspace, config


def latent_decode_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """`latent_decode_attention` in plain torch. Same arguments; computes in `query`'s dtype."""
    values = keys[..., : out.shape[2]]
    decode_attention_reference(query, keys, values, tables, slots, lengths, out, scale=scale)


def latent_decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    config: DecodeConfig,
    *,
    scale: float,
) -> None:
    """Attend over all latent KV of each row's sequence. Reads only tokens that it attends to.

    `slots` and `lengths` are read before the previous kernel on the stream is complete (rule 4 of
    `_triton.py`), so that kernel must not write them. This holds in every model, because kernels
    that write the row's own KV and its query come between.

    Args:
        query: [B, heads, value_dim + rope_dim], absorbed and rotated.
        keys: [blocks, block_size, 1, value_dim + rope_dim]; contiguous: [slots, max_tokens, ...].
        tables: [slots, max_blocks] int32 or int64, block tables; None: KV is contiguous.
        slots: [B] int32 or int64, slot of each row's sequence.
        lengths: [B] int32 or int64, tokens in KV, the row's own included. 0 for padding of the
            batch: zeros are written and the slot is ignored.
        out: [B, heads, value_dim], overwritten.
        workspace: made for this config, among others.
        config: partition of the work.
        scale: factor on the dot products, positive.
    """
    batch, num_heads, _ = query.shape
    value_dim = out.shape[2]
    _check(query, keys, out, scale)
    assert slots.shape == lengths.shape == (batch,)
    if not runs_triton(query):
        latent_decode_attention_reference(query, keys, tables, slots, lengths, out, scale=scale)
        return
    if batch == 0:
        return
    # partials: [shares, 2, heads, value_dim], lse: [shares, 2, heads]
    num_lse = config.num_shares * 2 * num_heads
    needed, num_counters = _workspace_sizes(config, num_heads, value_dim)
    numel = workspace.partials.numel()
    assert numel >= needed, f"workspace has {numel} of {needed} elements"
    assert workspace.counters.numel() >= num_counters, "workspace has too few counters"
    lse = workspace.partials[num_lse * value_dim : needed]
    merge_heads = min(max(_MERGE_ELEMENTS // pow2(value_dim), 1), config.block_heads)
    launch(
        _latent_decode_kernel,
        (-(-num_heads // config.block_heads), config.num_shares),
        query,
        keys,
        tables,
        slots,
        lengths,
        out,
        workspace.partials,
        lse,
        workspace.counters,
        scale * _LOG2_E,
        batch,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        0 if tables is None else tables.stride(0),
        out.stride(0),
        out.stride(1),
        batch_pow2=counted_rows(batch),
        num_heads=num_heads,
        block_heads=config.block_heads,
        block_tokens=config.block_tokens,
        block_size=None if tables is None else keys.shape[1],
        value_dim=value_dim,
        value_dim_pow2=pow2(value_dim, MIN_DOT),
        rope_dim=keys.shape[3] - value_dim,
        rope_dim_pow2=pow2(keys.shape[3] - value_dim, MIN_DOT),
        least_tiles=config.least_tiles,
        merge_heads=merge_heads,
        merges_itself=config.merges_itself,
        releases_early=batch <= FEW_ROWS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(query.device),
    )
    if not config.merges_itself:
        launch_merge(
            lengths,
            None,
            out,
            workspace.partials,
            lse,
            num_shares=config.num_shares,
            block_tokens=config.block_tokens,
            least_tiles=config.least_tiles,
            window_tokens=None,
        )


def latent_prefill_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """`latent_prefill_attention` in plain torch. Same arguments; computes in `query`'s dtype."""
    values = keys[..., : out.shape[2]]
    prefill_attention_reference(query, keys, values, tables, spans, out, scale=scale)


def latent_prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    spans: PrefillSpans,
    out: torch.Tensor,
    *,
    scale: float,
    config: PrefillConfig | None = None,
    num_splits: int | None = None,
) -> None:
    """Attend causally from each chunk to all latent KV of its sequence.

    Reads no token of a sequence at or after the end of its chunk.

    Args:
        query: [tokens, heads, value_dim + rope_dim], absorbed and rotated.
        keys: as in `latent_decode_attention`.
        tables: likewise.
        spans: the chunks.
        out: [tokens, heads, value_dim]; only the rows of the spans are overwritten.
        scale: factor on the dot products, positive.
        config: tiling, for tests and benchmarks; None for the default.
        num_splits: programs that share the keys of a query; None for as many as fill the device.
    """
    value_dim = out.shape[2]
    _check(query, keys, out, scale)
    assert len(spans.slots) == len(spans.starts) == len(spans.offsets) - 1
    assert spans.offsets[-1] <= len(query)
    if not spans.slots:
        return
    if not runs_triton(query):
        values = keys[..., :value_dim]
        prefill_attention(query, keys, values, tables, spans, out, scale=scale)
        return
    _run_prefill(query, keys, tables, spans, out, scale, config, num_splits)


def latent_prefill_attention_fixed(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    spans: DeviceSpans,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """`latent_prefill_attention` of chunks that only the device knows. Not on a CPU."""
    _check(query, keys, out, scale)
    _run_prefill(query, keys, tables, spans, out, scale)


def _run_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    spans: DeviceSpans,
    out: torch.Tensor,
    scale: float,
    config: PrefillConfig | None = None,
    num_splits: int | None = None,
) -> None:
    if config is None:
        config = default_prefill_config(query.dtype)
    num_heads, key_dim = query.shape[1:]
    value_dim = out.shape[2]
    heads_per_program = max(n for n in range(1, config.block_rows + 1) if num_heads % n == 0)
    num_groups = num_heads // heads_per_program
    work = spans.work(
        Tiling(
            block_tokens=config.block_rows // heads_per_program,
            num_running=count_multiprocessors(query.device),
            num_groups=num_groups,
            least_keys=MIN_SPLIT_KEYS,
            num_splits=num_splits,
        )
    )
    partials = make_partials(work, num_groups, config.block_rows, out)
    # Neighbouring programs read the same tokens.
    launch(
        _latent_prefill_kernel,
        (num_groups, len(work.programs)),
        query,
        keys,
        tables,
        work.programs,
        spans.device_slots,
        spans.device_starts,
        spans.device_offsets,
        out,
        partials.sums,
        partials.lse,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        0 if tables is None else tables.stride(0),
        out.stride(0),
        out.stride(1),
        heads_per_program=heads_per_program,
        block_rows=config.block_rows,
        block_keys=config.block_keys,
        block_size=None if tables is None else keys.shape[1],
        value_dim=value_dim,
        value_dim_pow2=pow2(value_dim, MIN_DOT),
        rope_dim=key_dim - value_dim,
        rope_dim_pow2=pow2(key_dim - value_dim, MIN_DOT),
        min_split_keys=max(MIN_SPLIT_KEYS, config.block_keys),
        num_columns=PROGRAM_COLUMNS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_partials(work, partials, spans, None, out, heads_per_program=heads_per_program)


def _check(query: torch.Tensor, keys: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    assert keys.shape[2:] == (1, query.shape[2]), "query and keys disagree"
    assert out.shape[:2] == query.shape[:2]
    assert out.shape[2] < query.shape[2]
    assert query.dtype == keys.dtype
    assert all(t.stride(-1) == 1 for t in (query, keys, out))
    assert scale > 0, "scale is multiplied after the maximum is taken"


@jit
def _attend_tiles(
    q_latent: tensor,
    q_rope: tensor,
    keys: tensor,
    tables: tensor,
    slot: tensor,
    position: tensor,
    first_key: tensor,
    last_key: tensor,
    end_key: tensor,
    factor: tensor,
    block_stride: tensor,
    token_stride: tensor,
    table_stride: tensor,
    block_keys: constexpr,
    block_size: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    rope_dim: constexpr,
    rope_dim_pow2: constexpr,
) -> tensor:
    """Attend to the tiles that begin in [first_key, last_key), with an online softmax.

    q_latent: [rows, value_dim], q_rope: [rows, rope_dim], position: [rows]. Returns acc [rows,
    value_dim], total [rows] and top [rows], in powers of two. Keys at or after `end_key` are not
    read. With a loop of their own for tiles that need no mask, both loops would spill registers.
    """
    rows: constexpr = q_latent.shape[0]
    acc = tl.zeros([rows, value_dim_pow2], tl.float32)
    total = tl.zeros([rows], tl.float32)
    top = tl.full([rows], float("-inf"), tl.float32)
    dim_v = tl.arange(0, value_dim_pow2)
    dim_r = tl.arange(0, rope_dim_pow2)
    column = tl.arange(0, block_keys)
    for tile_key in range(first_key, last_key, block_keys):
        token = tile_key + column
        if block_size is None:
            block = slot
            place = token
        elif block_size % block_keys == 0:  # the whole tile is in one block
            block = tl.load(tables + slot * table_stride + tile_key // block_size)
            place = token % block_size
        else:
            entry = tables + slot * table_stride + token // block_size
            block = tl.load(entry, mask=token < end_key, other=0)
            place = token % block_size
        from_row = keys + (block.to(tl.int64) * block_stride + place.to(tl.int64) * token_stride)
        latent_from = from_row[:, None] + dim_v[None, :]
        rope_from = from_row[:, None] + (value_dim + dim_r)[None, :]
        is_token = (token < end_key)[:, None]
        latent = tl.load(latent_from, mask=is_token & (dim_v < value_dim)[None, :], other=0.0)
        rope = tl.load(rope_from, mask=is_token & (dim_r < rope_dim)[None, :], other=0.0)

        scores = _products(q_latent, latent, value_dim_pow2)  # [rows, keys]
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        # The factor is applied together with the subtraction, as one fused multiply-add.
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
        top = new_top
    return acc, total, top


@jit
def _load_queries(
    query_rows: tensor,
    is_row: tensor,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    rope_dim: constexpr,
    rope_dim_pow2: constexpr,
) -> tensor:
    """Load the queries at addresses [rows]: (latent [rows, value_dim], rope [rows, rope_dim])."""
    dim_v = tl.arange(0, value_dim_pow2)
    dim_r = tl.arange(0, rope_dim_pow2)
    q_latent = tl.load(
        query_rows[:, None] + dim_v[None, :],
        mask=is_row[:, None] & (dim_v < value_dim)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        query_rows[:, None] + (value_dim + dim_r)[None, :],
        mask=is_row[:, None] & (dim_r < rope_dim)[None, :],
        other=0.0,
    )
    return q_latent, q_rope


@jit_once(counts=("batch",), indices=("slots", "lengths"))
def _latent_decode_kernel(
    query: tensor,
    keys: tensor,
    tables: tensor,
    slots: tensor,
    lengths: tensor,
    out: tensor,
    partials: tensor,
    lse: tensor,
    tickets: tensor,
    factor: tensor,
    batch: tensor,
    query_row_stride: tensor,
    query_head_stride: tensor,
    block_stride: tensor,
    token_stride: tensor,
    table_stride: tensor,
    out_row_stride: tensor,
    out_head_stride: tensor,
    batch_pow2: constexpr,
    num_heads: constexpr,
    block_heads: constexpr,
    block_tokens: constexpr,
    block_size: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    rope_dim: constexpr,
    rope_dim_pow2: constexpr,
    least_tiles: constexpr,
    merge_heads: constexpr,
    merges_itself: constexpr,
    releases_early: constexpr,
    overlaps: constexpr,
) -> None:
    # Neighbouring programs read the same tokens. `tickets` are the atomic counters of `Workspace`.
    first_head = tl.program_id(0) * block_heads
    share = tl.program_id(1)

    # Tiles are numbered through the batch; this share is [begin, end) of them.
    tiles = _row_tiles(lengths, batch, batch_pow2, block_tokens, None)
    row_ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    share_tiles = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(1)), least_tiles)
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

    head = first_head + tl.arange(0, block_heads)
    is_head = head < num_heads
    dim_v = tl.arange(0, value_dim_pow2)
    is_stored = is_head[:, None] & (dim_v < value_dim)[None, :]

    await_predecessor(overlaps)
    if releases_early:
        release_successor(overlaps)

    for row in range(first_row, last_row + 1):
        next_length = _length_of(row + 1, lengths, batch)
        next_slot = _slot_of(row + 1, slots, batch)
        row_end = row_begin + tl.cdiv(length, block_tokens)
        # This share's tiles of the row are [tile_begin, tile_end), counted from its token 0.
        tile_begin = tl.maximum(begin, row_begin) - row_begin
        tile_end = tl.minimum(end, row_end) - row_begin

        q_latent, q_rope = _load_queries(
            query + row * query_row_stride + head * query_head_stride,
            is_head, value_dim, value_dim_pow2, rope_dim, rope_dim_pow2,
        )  # fmt: skip
        position = tl.zeros([block_heads], tl.int32) + (length - 1)
        acc, total, top = _attend_tiles(
            q_latent, q_rope, keys, tables, slot.to(tl.int64), position,
            tile_begin * block_tokens, tile_end * block_tokens, length, factor,
            block_stride, token_stride, table_stride, block_tokens, block_size,
            value_dim, value_dim_pow2, rope_dim, rope_dim_pow2,
        )  # fmt: skip

        if not releases_early and row == last_row:
            release_successor(overlaps)
        # A row of padding between others has a total of 0.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
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
            tl.store(lse + partial, top + tl.log2(total), mask=is_head)
            if merges_itself:
                first_share = row_begin // share_tiles
                last_share = (row_end - 1) // share_tiles
                # In one share, at most one row begins that does not end there.
                ticket = tickets + first_share * tl.num_programs(0) + tl.program_id(0)
                tl.debug_barrier()  # all threads have stored before one increments the counter
                drawn = tl.atomic_add(ticket, 1, sem="acq_rel")
                if drawn == last_share - first_share:
                    tl.store(ticket, 0)  # for the next call: all programs have counted
                    for first_merged in range(0, block_heads, merge_heads):
                        merged_head = first_head + first_merged + tl.arange(0, merge_heads)
                        is_merged = merged_head < num_heads
                        merged = _merged(
                            lse, partials, lse, first_share, last_share, merged_head, is_merged,
                            num_heads, value_dim, value_dim_pow2, merge_heads, 1, False,
                        )  # fmt: skip
                        tl.store(
                            out
                            + row * out_row_stride
                            + merged_head[:, None] * out_head_stride
                            + dim_v[None, :],
                            merged.to(out.dtype.element_ty),
                            mask=is_merged[:, None] & (dim_v < value_dim)[None, :],
                        )
        row_begin = row_end
        length = next_length
        slot = next_slot

    # Padding within a share was handled above, but padding between shares was not.
    if merges_itself and num_empty > 0:
        zeros = tl.zeros([block_heads, value_dim_pow2], tl.float32)
        for row in range(share, batch, tl.num_programs(1)):
            if tl.load(lengths + row) == 0:
                tl.store(
                    out + row * out_row_stride + head[:, None] * out_head_stride + dim_v[None, :],
                    zeros.to(out.dtype.element_ty),
                    mask=is_stored,
                )


@jit_once(indices=("programs", "slots", "starts", "offsets"))
def _latent_prefill_kernel(
    query: tensor,
    keys: tensor,
    tables: tensor,
    programs: tensor,
    slots: tensor,
    starts: tensor,
    offsets: tensor,
    out: tensor,
    partials: tensor,
    lse: tensor,
    factor: tensor,
    query_row_stride: tensor,
    query_head_stride: tensor,
    block_stride: tensor,
    token_stride: tensor,
    table_stride: tensor,
    out_row_stride: tensor,
    out_head_stride: tensor,
    heads_per_program: constexpr,
    block_rows: constexpr,
    block_keys: constexpr,
    block_size: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    rope_dim: constexpr,
    rope_dim_pow2: constexpr,
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

    # Rows of the products: token 0: head 0, head 1, ...; token 1: ...
    row = tl.arange(0, block_rows)
    token = first_token + row // heads_per_program
    head = first_head + row % heads_per_program
    is_row = (row < block_tokens * heads_per_program) & (token < count)
    position = start + token
    q_latent, q_rope = _load_queries(
        query + ((first_row + token) * query_row_stride + head * query_head_stride),
        is_row, value_dim, value_dim_pow2, rope_dim, rope_dim_pow2,
    )  # fmt: skip

    # Queries of the program see keys [0, end_key). This split's are [first_key, stop_key).
    end_key = start + tl.minimum(first_token + block_tokens, count)
    split_keys = tl.cdiv(tl.cdiv(end_key, num_splits), block_keys) * block_keys
    split_keys = tl.maximum(split_keys, min_split_keys)
    first_key = split * split_keys
    stop_key = tl.minimum(first_key + split_keys, end_key)
    acc, total, top = _attend_tiles(
        q_latent, q_rope, keys, tables, slot, position, first_key, stop_key, end_key, factor,
        block_stride, token_stride, table_stride, block_keys, block_size,
        value_dim, value_dim_pow2, rope_dim, rope_dim_pow2,
    )  # fmt: skip

    # Rows that are not stored may have seen no key, and so may rows of a split.
    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    acc = acc / total[:, None]
    dim_v = tl.arange(0, value_dim_pow2)
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
