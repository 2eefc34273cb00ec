"""Attention over latent KV against its reference in float64, over KV that is NaN wherever
unwritten."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.cases import EVERY_KERNEL_CASE, covering
from tests.kernels.attention_kv import place_kv

from aquifer.cache.base import AttentionOptions, KVLayout, LayerKV, Rows, Spans
from aquifer.cache.view import StepView, Workspaces
from aquifer.kernels import latent_attention
from aquifer.kernels.latent_attention import (
    DecodeConfig,
    LatentWorkspaces,
    PrefillConfig,
    default_decode_config,
    empty_workspace,
    latent_decode_attention,
    latent_decode_attention_reference,
    latent_prefill_attention,
    latent_prefill_attention_reference,
)
from aquifer.kernels.prefill_attention import PrefillSpans

SMALL = DecodeConfig(
    block_heads=16, block_tokens=16, num_shares=3, least_tiles=1, num_warps=4, num_stages=2
)
SMALL_CHUNK = PrefillConfig(block_rows=16, block_keys=16, num_warps=4, num_stages=2)
MAX_TOKENS = 64
SCALE = 0.2
MAX_ERROR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Triton's interpreter multiplies the bits of bfloat16 as integers.
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FAR_SLOT = 1 << 40  # slot of padding rows: an address that must not be read
LENGTHS = [0, 33, 0, 1, 16, 0, 15, 64, 17, 0, 0]


@dataclass
class KV:
    """Latent KV of some slots in the second of three layers, and queries."""

    query: torch.Tensor
    keys: torch.Tensor
    tables: torch.Tensor | None
    slots: torch.Tensor
    lengths: torch.Tensor
    value_dim: int

    def out(self) -> torch.Tensor:
        return self.query.new_full((*self.query.shape[:2], self.value_dim), torch.nan)

    def decode(self, config: DecodeConfig) -> torch.Tensor:
        out = self.out()
        workspace = empty_workspace([config], out.shape[1], self.value_dim, out.device)
        workspace.partials.fill_(torch.nan)
        latent_decode_attention(
            self.query, self.keys, self.tables, self.slots, self.lengths, out, workspace, config,
            scale=SCALE,
        )  # fmt: skip
        assert not workspace.counters.any()
        return out

    def decode_reference(self) -> torch.Tensor:
        out = self.out().double()
        latent_decode_attention_reference(
            self.query.double(), self.keys, self.tables, self.slots, self.lengths, out, scale=SCALE
        )
        return out


def make_kv(
    device: torch.device,
    lengths: list[int],
    *,
    num_queries: int | None = None,
    num_heads: int = 4,
    value_dim: int = 32,
    rope_dim: int = 16,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
) -> KV:
    random = torch.Generator().manual_seed(seed)
    num_slots, dim = len(lengths) + 2, value_dim + rope_dim
    # Whatever stands behind a row is not read either.
    kv = torch.full((num_slots, max_tokens, 3, dim + 8), torch.nan)
    slots = torch.randperm(num_slots, generator=random)[: len(lengths)]
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        kv[slot, :length, 1, :dim] = torch.randn(length, dim, generator=random)
    query = torch.full((num_queries or len(lengths), num_heads, dim + 8), torch.nan)
    query[..., :dim] = 2 * torch.randn(len(query), num_heads, dim, generator=random)
    keys, _, tables = place_kv(kv, 1, dim, block_size, random, device, dtype, index_dtype)
    is_padding = torch.tensor(lengths) == 0
    far = FAR_SLOT if index_dtype == torch.int64 else -1
    return KV(
        query.to(device, dtype)[..., :dim],
        keys,
        tables,
        slots.masked_fill(is_padding, far).to(device, index_dtype),
        torch.tensor(lengths, device=device, dtype=index_dtype),
        value_dim,
    )


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Each row's relative error is small."""
    assert torch.isfinite(out).all()
    squares = (out.double() - expected).square().flatten(1).sum(1)
    errors = (squares / expected.square().flatten(1).sum(1)).sqrt()
    assert (errors < MAX_ERROR[out.dtype]).all()


def check_decode(kv: KV, config: DecodeConfig) -> None:
    out, expected = kv.decode(config), kv.decode_reference()
    is_padding = kv.lengths == 0
    assert (out[is_padding] == 0).all()
    assert_close(out[~is_padding], expected[~is_padding])


def check_chunks(
    kv: KV,
    starts: list[int],
    counts: list[int],
    config: PrefillConfig | None = SMALL_CHUNK,
    num_splits: int | None = None,
    first_row: int = 0,
) -> None:
    """A chunk of each slot, ending with its last token."""
    offsets = [first_row]
    for count in counts:
        offsets.append(offsets[-1] + count)
    spans = PrefillSpans.of(kv.slots.tolist(), starts, offsets, kv.query.device)
    out, expected = kv.out(), kv.out().double()
    latent_prefill_attention(
        kv.query, kv.keys, kv.tables, spans, out, scale=SCALE, config=config, num_splits=num_splits
    )
    latent_prefill_attention_reference(
        kv.query.double(), kv.keys, kv.tables, spans, expected, scale=SCALE
    )
    rows = slice(offsets[0], offsets[-1])
    assert_close(out[rows], expected[rows])
    assert out[:first_row].isnan().all()
    assert out[offsets[-1] :].isnan().all()


@pytest.mark.parametrize(
    ("block_size", "num_shares", "merges_itself", "least_tiles"),
    covering((None, 16), (1, 3, 40), (True, False), (1, 2), strength=2, every=EVERY_KERNEL_CASE),
)
def test_rows_of_all_lengths_in_any_number_of_shares(
    device, block_size, num_shares, merges_itself, least_tiles
):
    kv = make_kv(device, LENGTHS, block_size=block_size)
    config = replace(
        SMALL, num_shares=num_shares, merges_itself=merges_itself, least_tiles=least_tiles
    )
    check_decode(kv, config)


@pytest.mark.parametrize("merges_itself", [True, False])
def test_batch_of_padding(device, merges_itself):
    check_decode(make_kv(device, [0, 0]), replace(SMALL, merges_itself=merges_itself))


def test_empty_batch(device):
    kv = make_kv(device, [3])
    empty = replace(kv, query=kv.query[:0], slots=kv.slots[:0], lengths=kv.lengths[:0])
    assert empty.decode(SMALL).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("block_size", "heads", "merges_itself"),
    covering(
        (None, 8),
        [(1, 16), (16, 16), (20, 32), (40, 16), (128, 64)],
        (True, False),
        strength=2,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_numbers_of_heads(device, block_size, heads, merges_itself):
    num_heads, block_heads = heads
    kv = make_kv(device, [33, 20], num_heads=num_heads, block_size=block_size)
    check_decode(kv, replace(SMALL, block_heads=block_heads, merges_itself=merges_itself))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("num_heads", "block_size"), [(16, 16), (128, None)])
def test_rows_of_deepseek(device, dtype, num_heads, block_size):
    """512 elements of latent and 64 of key, with the default config."""
    options = {"num_heads": num_heads, "block_size": block_size, "dtype": dtype}
    kv = make_kv(device, [70, 129], value_dim=512, rope_dim=64, max_tokens=144, **options)
    _, config = LatentWorkspaces().get(kv.query, 512, paged=block_size is not None)
    check_decode(kv, config)


def test_merging_in_groups_of_heads(device, monkeypatch):
    """A program holds fewer heads at once when it merges than when it attends."""
    monkeypatch.setattr(latent_attention, "_MERGE_ELEMENTS", 4 * 32)
    check_decode(make_kv(device, [64, 5, 60], num_heads=10), replace(SMALL, num_shares=9))


@pytest.mark.parametrize(("value_dim", "rope_dim"), [(24, 8), (16, 16), (48, 12), (64, 2)])
@pytest.mark.parametrize("block_size", [None, 16])
def test_dims(device, value_dim, rope_dim, block_size):
    sizes = {"value_dim": value_dim, "rope_dim": rope_dim, "block_size": block_size}
    check_decode(make_kv(device, [33, 0, 5], **sizes), SMALL)
    kv = make_kv(device, [33, 5], num_queries=12, **sizes)
    check_chunks(kv, [26, 0], [7, 5])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_tiles_and_blocks_of_different_sizes(device, index_dtype, block_size):
    options = {"block_size": block_size, "index_dtype": index_dtype}
    check_decode(make_kv(device, LENGTHS, **options), SMALL)
    check_decode(make_kv(device, LENGTHS, **options), replace(SMALL, block_tokens=32))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(device, dtype):
    check_decode(make_kv(device, LENGTHS, dtype=dtype), SMALL)
    check_chunks(make_kv(device, [33, 16], num_queries=20, dtype=dtype), [29, 0], [4, 16])


@pytest.mark.parametrize(
    ("block_size", "num_heads"),
    covering((None, 8, 16), (1, 3, 4, 16, 20, 128), strength=1, every=EVERY_KERNEL_CASE),
)
def test_chunks(device, block_size, num_heads):
    """A first chunk, one after a prefix, and one of a single token."""
    kv = make_kv(device, [5, 37, 20], num_queries=14, num_heads=num_heads, block_size=block_size)
    check_chunks(kv, [0, 32, 19], [5, 5, 1], first_row=2)


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("num_splits", [2, 5])
def test_splits(device, monkeypatch, block_size, num_splits):
    monkeypatch.setattr(latent_attention, "MIN_SPLIT_KEYS", 16)
    kv = make_kv(device, [64, 20, 3], num_queries=16, block_size=block_size)
    check_chunks(kv, [57, 14, 0], [7, 6, 3], num_splits=num_splits)


def test_default_config_of_chunks(device):
    kv = make_kv(device, [100, 70], num_queries=130, num_heads=16, max_tokens=112)
    check_chunks(kv, [30, 10], [70, 60], config=None)


def test_no_chunks(device):
    kv = make_kv(device, [3])
    check_chunks(replace(kv, slots=kv.slots[:0]), [], [])


def test_large_scores_do_not_overflow(device):
    kv = make_kv(device, [33, 16], num_heads=2)
    kv.query.mul_(1e3)
    check_decode(kv, SMALL)


def test_workspaces_are_made_once_and_shared(device):
    kv, workspaces = make_kv(device, [30] * 5), LatentWorkspaces()
    first, config = workspaces.get(kv.query, 32, paged=False)
    again, _ = workspaces.get(kv.query, 32, paged=False)
    assert first is again
    out = kv.out()
    rows = kv.query, kv.keys, None, kv.slots, kv.lengths, out
    latent_decode_attention(*rows, first, config, scale=SCALE)
    torch.testing.assert_close(out, kv.decode_reference().float())


@pytest.mark.parametrize("batch", [1, 4, 32, 256])
@pytest.mark.parametrize("num_heads", [4, 16, 20, 128])
@pytest.mark.parametrize("paged", [True, False])
def test_default_configs_fill_the_device_once(batch, num_heads, paged):
    config = default_decode_config(batch, num_heads, torch.bfloat16, 132, paged=paged)
    programs = -(-num_heads // config.block_heads) * config.num_shares
    assert 66 < programs <= 132
    assert config.least_tiles * config.block_tokens >= 64


def test_host_without_triton():
    """On the host the result is that of torch's own attention."""
    kv = make_kv(torch.device("cpu"), [40], num_queries=40)
    (slot,) = kv.slots.tolist()
    rows = kv.keys[slot, :40, 0]
    spans = PrefillSpans.of([slot], [0], [0, 40], rows.device)
    out = kv.out()
    latent_prefill_attention(kv.query, kv.keys, None, spans, out, scale=SCALE)
    expected = F.scaled_dot_product_attention(
        kv.query.transpose(0, 1), rows, rows[:, :32], is_causal=True, scale=SCALE
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
    last = kv.out()[:1]
    workspace, config = LatentWorkspaces().get(kv.query[:1], 32, paged=False)
    lengths = torch.tensor([40])
    latent_decode_attention(
        kv.query[39:], kv.keys, None, kv.slots, lengths, last, workspace, config, scale=SCALE
    )
    torch.testing.assert_close(last[0], expected[:, 39])


@pytest.mark.parametrize("block_size", [None, 16])
def test_steps_of_decodes_and_chunks_by_a_view(device, block_size):
    """A `StepView` runs both kernels over a layer with latent KV, and again for the next layer."""
    counts, starts = [1, 1, 6, 3], [33, 4, 17, 0]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    first = make_kv(device, lengths, num_queries=11, block_size=block_size)
    layers = [first, replace(first, query=-2 * first.query, keys=first.keys.clone())]
    slots, tables = first.slots, first.tables
    spans = Spans.make(slots.cpu().numpy(), np.array(starts), np.array(counts))
    all_slots, positions = (torch.from_numpy(part).to(device) for part in spans.rows())
    chunks = PrefillSpans.of(slots.tolist()[2:], starts[2:], spans.offsets.tolist()[2:], device)
    rows = Rows(all_slots, positions, positions[:2] + 1, chunks)
    layout = KVLayout((LayerKV(1, 48, 32, is_latent=True),) * 2, torch.float32)
    pairs = [(kv.keys, kv.keys[..., :32]) for kv in layers]
    view = StepView(layout, pairs, rows, tables, Workspaces())
    for index, kv in enumerate(layers):
        everything = PrefillSpans.of(slots.tolist(), starts, spans.offsets.tolist(), device)
        expected = kv.out().double()
        latent_prefill_attention_reference(
            kv.query.double(), kv.keys, tables, everything, expected, scale=SCALE
        )
        how = AttentionOptions(SCALE)
        assert_close(view.attend(index, kv.query, how), expected)
        out = torch.full((16, 4, 32), torch.nan, device=device)
        query = torch.zeros(16, 4, 56, device=device)[..., :48]  # padded to a captured size
        query[:11] = kv.query
        view.attend_into(index, query, out, how)
        assert_close(out[:11], expected)
        assert out[11:].isnan().all()
    with pytest.raises(AssertionError, match="neither window"):
        view.attend(0, layers[0].query, AttentionOptions(SCALE, window_tokens=3))
