"""Prefill attention against its reference in float64, over KV that is NaN wherever unwritten."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from tests.cases import EVERY_KERNEL_CASE, covering
from tests.kernels.attention_kv import make_sinks, place_kv

from aquifer.kernels import prefill_attention as module
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.prefill_attention import (
    Config,
    PrefillSpans,
    default_config,
    prefill_attention,
    prefill_attention_reference,
    prefill_attention_triton,
)

SMALL = Config(block_rows=16, block_keys=16, num_warps=4, num_stages=2)
MAX_TOKENS = 64
# The largest relative error of thousands of rows. In float32, a score of 4 is right to 5e-7, and so
# is its exponential.
MAX_ERROR = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
RAGGED = [(0, 17), (5, 1), (30, 20), (0, 16), (40, 3)]
SHARED = [(0, 5), (5, 1), (30, 4)]  # where seven heads share a program
BLOCK_SIZES = (None, 16)


@dataclass
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor | None
    spans: PrefillSpans

    def run(
        self, config: Config | None = None, *, num_splits: int | None = None, **options
    ) -> torch.Tensor:
        """Run `prefill_attention`, or the Triton kernel with tiles of `config`."""
        out = self.query.new_full((*self.query.shape[:2], self.values.shape[-1]), torch.nan)
        arguments = self.query, self.keys, self.values, self.tables, self.spans, out
        if config is None:
            prefill_attention(*arguments, **options)
        else:
            prefill_attention_triton(*arguments, config=config, num_splits=num_splits, **options)
        return out

    def reference(self, **options) -> torch.Tensor:
        query = self.query.double()
        out = query.new_full((*query.shape[:2], self.values.shape[-1]), torch.nan)
        kv = self.keys, self.values, self.tables
        prefill_attention_reference(query, *kv, self.spans, out, **options)
        return out


def make_case(
    device: torch.device,
    chunks: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    max_tokens: int = MAX_TOKENS,
    slots: list[int] | None = None,
    first_row: int = 3,
    seed: int = 0,
) -> Case:
    """A case in the second of three layers, token-major; contiguous, or in shuffled blocks.

    `chunks` are (start, count). Rows before `first_row`, and two at the end, are of no span.
    """
    random = torch.Generator().manual_seed(seed)
    num_slots = len(chunks) + 2
    if slots is None:
        slots = torch.randperm(num_slots, generator=random)[: len(chunks)].tolist()
    layer = num_kv_heads * (key_dim + value_dim)
    kv = torch.full((num_slots, max_tokens, 3, layer), torch.nan)
    offsets = [first_row]
    for slot, (start, count) in zip(slots, chunks, strict=True):
        kv[slot, : start + count, 1] = torch.randn(start + count, layer, generator=random)
        offsets.append(offsets[-1] + count)
    # A view, as a fused projection of queries, keys and values gives it.
    num_rows = offsets[-1] + 2
    query = torch.full((num_rows, 2 * num_heads, key_dim), torch.nan)
    span_rows = slice(offsets[0], offsets[-1])
    query[span_rows, :num_heads] = 2 * torch.randn(
        offsets[-1] - offsets[0], num_heads, key_dim, generator=random
    )
    placed = place_kv(kv, num_kv_heads, key_dim, block_size, random, device, dtype, index_dtype)
    return Case(
        query.to(device, dtype)[:, :num_heads],
        *placed,
        PrefillSpans.of(slots, [start for start, _ in chunks], offsets, device),
    )


def check(
    case: Case, config: Config | None = None, *, num_splits: int | None = None, **options
) -> None:
    options = {"scale": 0.2, **options}
    out, expected = case.run(config, num_splits=num_splits, **options), case.reference(**options)
    begin, end = case.spans.offsets[0], case.spans.offsets[-1]
    assert out[:begin].isnan().all()
    assert out[end:].isnan().all()
    out, expected = out[begin:end].double(), expected[begin:end]
    assert torch.isfinite(out).all()
    errors = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert (errors < MAX_ERROR[case.query.dtype]).all(), f"largest error {errors.max():.2e}"


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("config", [None, SMALL, replace(SMALL, block_rows=32, block_keys=32)])
def test_ragged_batch(device, block_size, config):
    check(make_case(device, RAGGED, block_size=block_size), config)


@pytest.mark.parametrize("block_size", [None, 8])
def test_random_batches(device, block_size):
    random = torch.Generator().manual_seed(0)
    for seed in range(2):
        chunks = []
        for _ in range(3):
            start = int(torch.randint(0, 40, (), generator=random))
            chunks.append((start, int(torch.randint(1, MAX_TOKENS - start, (), generator=random))))
        check(make_case(device, chunks, block_size=block_size, seed=seed), SMALL)


def test_no_spans(device):
    case = make_case(device, [])
    assert case.run(scale=1.0).isnan().all()
    assert case.run(SMALL, scale=1.0).isnan().all()


@pytest.mark.parametrize(
    ("group", "num_kv_heads"), [(1, 2), (4, 2), (7, 1), (6, 1), (17, 1), (32, 1)]
)
def test_groups(device, group, num_kv_heads):
    case = make_case(
        device, [(3, 10), (0, 9)], num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads
    )
    check(case, SMALL)


@pytest.mark.parametrize(
    ("block_size", "window_tokens"),
    covering(BLOCK_SIZES, (1, 13, 16, 40), strength=1, every=EVERY_KERNEL_CASE),
)
def test_window(device, block_size, window_tokens):
    case = make_case(device, RAGGED, block_size=block_size)
    check(case, SMALL, window_tokens=window_tokens)


def test_window_shorter_than_a_tile(device):
    config = replace(SMALL, block_rows=64, block_keys=32)
    check(make_case(device, RAGGED), config, window_tokens=5)


def test_nothing_is_needed_of_blocks_before_the_window(device):
    case = make_case(device, [(40, 10), (50, 14)], block_size=16)
    assert case.tables is not None
    for slot, start in zip(case.spans.slots, case.spans.starts, strict=True):
        unneeded = (start + 1 - 10) // 16
        before = case.tables[slot, :unneeded]
        case.keys[before] = case.values[before] = torch.nan
        case.tables[slot, :unneeded] = -1
    # The reference multiplies what it masks by 0: it must not meet NaN.
    complete = make_case(device, [(40, 10), (50, 14)], block_size=16)
    expected = complete.reference(scale=0.2, window_tokens=10)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    out = case.run(SMALL, scale=0.2, window_tokens=10)[rows]
    torch.testing.assert_close(out.double(), expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window_tokens", "num_splits"),
    covering((1, 10, 24), (1, 3), strength=1, every=EVERY_KERNEL_CASE),
)
def test_nothing_is_read_before_the_window_of_contiguous_kv(device, window_tokens, num_splits):
    """Pages before it are not mapped; they may end at any token, and within one."""
    chunks = [(40, 10), (50, 14), (0, 20), (45, 1)]
    case, complete = make_case(device, chunks), make_case(device, chunks)
    for slot, start in zip(case.spans.slots, case.spans.starts, strict=True):
        first = max(start + 1 - window_tokens, 0)
        case.keys[slot, :first] = case.values[slot, :first] = torch.nan
    expected = complete.reference(scale=0.2, window_tokens=window_tokens)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    for config in (SMALL, replace(SMALL, block_rows=64, block_keys=32)):
        out = case.run(config, num_splits=num_splits, scale=0.2, window_tokens=window_tokens)[rows]
        torch.testing.assert_close(out.double(), expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [None, 16])
def test_nothing_is_needed_of_blocks_after_the_chunk(device, block_size):
    """Tables end where a sequence ends, and so do the mapped pages of contiguous KV."""
    case = make_case(device, [(10, 10), (0, 31)], block_size=block_size, index_dtype=torch.int32)
    if case.tables is not None:
        ends = zip(case.spans.slots, case.spans.starts, [10, 31], strict=True)
        for slot, start, count in ends:
            case.tables[slot, -(-(start + count) // 16) :] = 1 << 30
    check(case, SMALL)
    check(case)


SPLITS = [
    (2, {}),
    (7, {}),
    (3, {"window_tokens": 13}),
    (7, {"window_tokens": 1}),
    (2, {"softcap": 30.0, "window_tokens": 40}),
]


@pytest.mark.parametrize(
    ("block_size", "splits"),
    covering(BLOCK_SIZES, SPLITS, strength=1, every=EVERY_KERNEL_CASE),
    ids=str,
)
def test_splits(device, monkeypatch, block_size, splits):
    """Several programs share the keys of one query; there may be more programs than keys."""
    num_splits, options = splits
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
    case = make_case(device, [(0, 17), (5, 1), (30, 20)], num_heads=2, block_size=block_size)
    check(case, SMALL, num_splits=num_splits, **options)


def test_splits_of_heads_that_share_a_program(device, monkeypatch):
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
    case = make_case(device, [(5, 1), (30, 20)], num_heads=7, num_kv_heads=1, value_dim=24)
    check(case, SMALL, num_splits=3)


def test_short_chunks_after_long_prefixes_are_split(device, monkeypatch):
    """As many splits as fill the device, but none with few keys; round spans are left out."""
    assert module.choose_num_splits(8, 8192, torch.device("cpu")) == 1
    monkeypatch.setattr(module, "count_multiprocessors", lambda device: 132)
    assert module.choose_num_splits(8, 8192, device) == 32
    assert module.choose_num_splits(8, 1000, device) == 3
    assert module.choose_num_splits(100, 8192, device) == 2
    assert module.choose_num_splits(265, 8192, device) == 1
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(module, "CUDNN_MULTIPLE", 8)
    monkeypatch.setattr(module, "CUDNN_MIN_TOKENS", 16)
    monkeypatch.setattr(module, "cudnn_takes", lambda *tensors: True)
    monkeypatch.setattr(module, "run_cudnn", lambda *arguments: None)
    case = make_case(device, [(0, 16), (40, 3), (16, 24), (8, 17)])
    out, expected = case.run(scale=0.2), case.reference(scale=0.2)
    offsets = case.spans.offsets
    for index, is_round in enumerate((True, False, True, False)):
        rows = slice(offsets[index], offsets[index + 1])
        if is_round:
            assert out[rows].isnan().all()
        else:
            torch.testing.assert_close(out[rows].double(), expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(device, softcap):
    check(make_case(device, RAGGED), SMALL, softcap=softcap)
    check(make_case(device, RAGGED, block_size=16), SMALL, softcap=softcap, window_tokens=20)


@pytest.mark.parametrize(
    ("block_size", "options"),
    covering(
        BLOCK_SIZES,
        ({}, {"window_tokens": 13}, {"softcap": 5.0}),
        strength=1,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_sinks(device, block_size, options):
    case = make_case(device, RAGGED, block_size=block_size)
    check(case, SMALL, sinks=make_sinks(4, device, torch.float32), **options)


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize(("num_splits", "options"), [(2, {}), (7, {"window_tokens": 13})])
def test_sinks_count_once_where_keys_are_split(
    device, monkeypatch, block_size, num_splits, options
):
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
    case = make_case(device, SHARED, num_heads=7, num_kv_heads=1, block_size=block_size)
    sinks = make_sinks(7, device, torch.float16)
    check(case, SMALL, num_splits=num_splits, sinks=sinks, **options)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp", "ignore:invalid value")
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks_that_count_for_nothing_or_for_everything(device, monkeypatch, num_splits):
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
    case = make_case(device, [(0, 9), (30, 3)])
    check(case, SMALL, num_splits=num_splits, sinks=torch.full((4,), 14.0, device=device))
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])

    def run(sinks: torch.Tensor | None) -> torch.Tensor:
        return case.run(SMALL, num_splits=num_splits, scale=0.2, sinks=sinks)[rows]

    without = run(None)
    for least in (-1e4, -torch.inf):
        torch.testing.assert_close(run(torch.full((4,), least, device=device)), without)
    assert (run(torch.full((4,), 1e4, device=device)) == 0).all()


@pytest.mark.parametrize(
    ("block_size", "options"),
    covering(
        BLOCK_SIZES,
        ({}, {"window_tokens": 13}, {"softcap": 5.0}),
        strength=1,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_alibi(device, block_size, options):
    case = make_case(device, RAGGED, block_size=block_size)
    check(case, SMALL, slopes=alibi_slopes(4, device), **options)


@pytest.mark.parametrize("num_splits", [2, 7])
def test_alibi_where_keys_are_split(device, monkeypatch, num_splits):
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
    case = make_case(device, SHARED, num_heads=7, num_kv_heads=1)
    sinks = make_sinks(7, device, torch.float32)
    check(case, SMALL, num_splits=num_splits, slopes=alibi_slopes(7, device))
    check(case, SMALL, num_splits=num_splits, slopes=alibi_slopes(7, device), sinks=sinks)


def test_round_spans_with_alibi_do_not_go_to_cudnn(device, monkeypatch):
    monkeypatch.setattr(module, "CUDNN_MULTIPLE", 8)
    monkeypatch.setattr(module, "CUDNN_MIN_TOKENS", 16)
    monkeypatch.setattr(module, "cudnn_takes", lambda *tensors: True)
    check(make_case(device, [(0, 16), (16, 24)]), slopes=alibi_slopes(4, device))


def test_round_spans_with_sinks_do_not_go_to_cudnn(device, monkeypatch):
    monkeypatch.setattr(module, "CUDNN_MULTIPLE", 8)
    monkeypatch.setattr(module, "CUDNN_MIN_TOKENS", 16)
    monkeypatch.setattr(module, "cudnn_takes", lambda *tensors: True)
    check(make_case(device, [(0, 16), (16, 24)]), sinks=make_sinks(4, device, torch.float32))


@pytest.mark.parametrize("block_keys", [16, 32])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_tiles_and_blocks_of_different_sizes(device, block_keys, block_size):
    case = make_case(device, [(20, 15), (0, 33)], block_size=block_size, index_dtype=torch.int32)
    check(case, replace(SMALL, block_keys=block_keys))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(80, 80), (96, 64), (8, 24), (64, 128), (256, 256)]
)
def test_head_dims(device, key_dim, value_dim):
    case = make_case(device, [(5, 20), (0, 2)], key_dim=key_dim, value_dim=value_dim)
    check(case, SMALL)
    check(case)


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_half_precision(device, dtype):
    check(make_case(device, RAGGED, dtype=dtype), SMALL)
    check(make_case(device, RAGGED, dtype=dtype, block_size=16), SMALL, window_tokens=20)


def test_large_scores_do_not_overflow(device):
    # Scores of some thousands are right to 1e-4 in float32, and so are their exponentials.
    case = make_case(device, [(0, 33), (10, 5)])
    out, expected = case.run(SMALL, scale=300.0), case.reference(scale=300.0)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    torch.testing.assert_close(out[rows].double(), expected[rows], rtol=1e-3, atol=1e-3)


def test_layer_major_strides(device):
    case = make_case(device, RAGGED)
    case.keys, case.values = case.keys.contiguous(), case.values.transpose(1, 2).contiguous()
    case.values = case.values.transpose(1, 2)
    check(case, SMALL)


def test_out_may_be_a_view(device):
    case = make_case(device, [(0, 5), (7, 12)])
    whole = torch.full((len(case.query), 6, 20), 7.0, device=device)
    arguments = case.query, case.keys, case.values, None, case.spans, whole[:, 1:5, 2:18]
    prefill_attention_triton(*arguments, config=SMALL, scale=0.2)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    expected = torch.full_like(whole, 7.0)
    expected[rows, 1:5, 2:18] = case.run(SMALL, scale=0.2)[rows]
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("block_size", [None, 16])
def test_host_without_triton(block_size):
    case = make_case(torch.device("cpu"), RAGGED, block_size=block_size)
    check(case)
    check(case, window_tokens=20, softcap=30.0)
    check(case, window_tokens=20, sinks=make_sinks(4, torch.device("cpu"), torch.float32))


def test_reference_is_what_torch_calls_attention():
    case = make_case(torch.device("cpu"), [(0, 33)], first_row=0)
    slot = case.spans.slots[0]
    expected = F.scaled_dot_product_attention(
        case.query[:33].double().transpose(0, 1)[None],
        case.keys[slot, :33].double().transpose(0, 1)[None],
        case.values[slot, :33].double().transpose(0, 1)[None],
        scale=0.2,
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(case.reference(scale=0.2)[:33], expected[0].transpose(0, 1))


def test_reference_counts_sinks_in_the_denominator_alone():
    """The scale of the scores is not applied to the sink."""
    case = make_case(torch.device("cpu"), [(12, 21)], first_row=0)
    sinks = make_sinks(4, torch.device("cpu"), torch.float64)
    keys = case.keys[case.spans.slots[0], :33].double().repeat_interleave(2, 1)
    scores = torch.einsum("qhd,thd->qht", case.query[:21].double(), keys) * 0.2
    is_later = torch.arange(33) > torch.arange(12, 33)[:, None]
    sums = scores.masked_fill(is_later[:, None], -torch.inf).logsumexp(-1)
    expected = case.reference(scale=0.2)[:21] * torch.sigmoid(sums - sinks)[..., None]
    torch.testing.assert_close(case.reference(scale=0.2, sinks=sinks)[:21], expected)


def test_which_spans_go_to_cudnn_together():
    counts = [512, 512, 512, 768, 768, 512, 500, 512, 256, 768, 512]
    starts = [0, 0, 0, 0, 256, 256, 0, 100, 0, 0, 0]
    slots = [4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    offsets = [9]
    for count in counts:
        offsets.append(offsets[-1] + count)
    spans = PrefillSpans.of(slots, starts, offsets, torch.device("cpu"))

    def calls(window_tokens: int | None, max_batch_stride: int) -> list[tuple[int, ...]]:
        return [
            (call.first_row, call.slot, call.start, call.count, call.num_seqs)
            for call in module.calls_of(spans, window_tokens, max_batch_stride)
            if call.is_round
        ]

    far = [
        (9, 4, 0, 512, 1),
        (521, 5, 0, 512, 1),
        (1033, 7, 0, 512, 1),
        (1545, 8, 0, 768, 1),
        (2313, 9, 256, 768, 1),
        (3081, 10, 256, 512, 1),
        (4861, 14, 0, 768, 1),
        (5629, 15, 0, 512, 1),
    ]
    near = [(9, 4, 0, 512, 2), *far[2:]]
    assert calls(None, 1 << 31) == near
    assert calls(None, 1 << 32) == far
    assert calls(1024, 1 << 31) == near
    assert calls(1023, 1 << 31) == [call for call in near if call[2] + call[3] < 1023]
    assert calls(767, 1 << 31) == [near[0], near[1], near[-1]]
    assert sum(call.num_seqs for call in module.calls_of(spans, None, 1 << 31)) == len(slots)


@pytest.mark.parametrize("window_tokens", [None, 40])
def test_round_spans_are_left_out_on_the_device(device, monkeypatch, window_tokens):
    """The host and the kernel decide alike which spans are cuDNN's."""
    monkeypatch.setattr(module, "CUDNN_MULTIPLE", 8)
    monkeypatch.setattr(module, "CUDNN_MIN_TOKENS", 16)
    monkeypatch.setattr(module, "cudnn_takes", lambda *tensors: True)
    taken = []
    monkeypatch.setattr(module, "run_cudnn", lambda *arguments: taken.append(arguments[4]))
    chunks = [(0, 16), (0, 24), (16, 32), (8, 8), (8, 20), (3, 16), (0, 17), (8, 40), (0, 24)]
    case = make_case(device, chunks)
    out = case.run(scale=0.2, window_tokens=window_tokens)
    expected = case.reference(scale=0.2, window_tokens=window_tokens)
    for call in taken:
        rows = slice(call.first_row, call.first_row + call.num_seqs * call.count)
        assert out[rows].isnan().all()
        out[rows] = expected[rows].to(out.dtype)
    assert sum(call.num_seqs for call in taken) == (5 if window_tokens is None else 3)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    torch.testing.assert_close(out[rows].double(), expected[rows], rtol=1e-4, atol=1e-5)


def test_calls_of_cudnn_get_the_right_rows_and_keys(device, monkeypatch):
    """With plain torch in place of cuDNN: neighbours in one call, prefixes merged, ragged rest."""
    monkeypatch.setattr(module, "CUDNN_MULTIPLE", 8)
    monkeypatch.setattr(module, "CUDNN_MIN_TOKENS", 16)
    monkeypatch.setattr(module, "cudnn_takes", lambda *tensors: True)
    shapes = []

    def attend(query, keys, values, scale, *, is_causal, with_lse):
        assert with_lse or is_causal
        shapes.append((len(query), query.shape[2], keys.shape[2]))
        group = query.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
        scores = query @ keys.transpose(2, 3) * scale
        if is_causal:
            is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(is_later, -torch.inf)
        # As cuDNN does, tokens first in memory.
        result = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        result.copy_(scores.softmax(-1) @ values)
        return result, scores.logsumexp(-1, keepdim=True)

    monkeypatch.setattr(module, "cudnn_attention", attend)
    chunks = [(0, 16), (0, 16), (0, 16), (16, 24), (3, 5), (8, 16), (0, 24)]
    check(make_case(device, chunks, slots=[1, 2, 4, 5, 6, 8, 0]))
    assert shapes == [
        (2, 16, 16),
        (1, 16, 16),
        (1, 24, 16),
        (1, 24, 24),
        (1, 16, 8),
        (1, 16, 16),
        (1, 24, 24),
    ]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("num_heads", "value_dim"), [(6, 24), (3, 128), (70, 128)])
def test_merge(device, num_heads, value_dim):
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(5, num_heads, 12, generator=random) * 40
    values = torch.randn(5, num_heads, 12, value_dim, generator=random)
    parts, sums = [], []
    for some in (slice(0, 7), slice(7, 12)):
        weights = scores[..., some].softmax(-1)
        parts.append((weights[..., None] * values[:, :, some]).sum(-2).to(device))
        sums.append(scores[..., some].logsumexp(-1).t().contiguous().to(device))
    sums[0][0, 0], sums[1][0, 0] = -200.0, 200.0  # one of the two counts for nothing
    sums[0][1, 0], sums[1][1, 0] = 200.0, -200.0
    out = torch.full((5, num_heads, value_dim), torch.nan, device=device)
    module.merge(parts[0], sums[0], parts[1], sums[1], out)
    expected = (scores.softmax(-1)[..., None] * values).sum(-2)
    expected[0, 0], expected[0, 1] = parts[1][0, 0].cpu(), parts[0][0, 1].cpu()
    torch.testing.assert_close(out.cpu(), expected)


# Llama-3-8B, Qwen3-0.6B, Qwen2.5-0.5B, Phi-2, Gemma-2-9B and a model of one KV head
@pytest.mark.parametrize(
    ("block_size", "shape"),
    covering(
        BLOCK_SIZES,
        [(32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 32, 80), (16, 8, 256), (48, 1, 128)],
        strength=1,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_default_config_on_models(device, block_size, shape):
    num_heads, num_kv_heads, head_dim = shape
    if device.type == "cuda":
        dtypes = [torch.bfloat16, torch.float16, torch.float32]
        chunks, max_tokens = [(0, 1000), (100, 37), (512, 512), (1, 1), (0, 1024)], 1024
    else:
        dtypes, chunks, max_tokens = [torch.float32], [(10, 3)], 16
    for dtype in dtypes:
        case = make_case(
            device,
            chunks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            max_tokens=max_tokens,
        )
        options = {"scale": head_dim**-0.5}
        check(case, **options)
        check(case, default_config(head_dim, head_dim, dtype), **options, window_tokens=300)


# The tests below need cuDNN's own kernels.


@pytest.fixture
def cudnn_device(device, monkeypatch) -> torch.device:
    """A GPU on which round spans go to cuDNN; a span that goes elsewhere is an error."""
    if not module.has_cudnn(torch.device("cuda", 0)):
        pytest.skip("cuDNN's attention needs a Hopper GPU, or a later one")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a round span went to Triton")

    monkeypatch.setattr(module, "run_triton", refuse)
    return torch.device("cuda", 0)


def make_large_case(device: torch.device, chunks: list[tuple[int, int]], **options) -> Case:
    options = {"num_heads": 8, "key_dim": 128, "value_dim": 128, "max_tokens": 2048, **options}
    return make_case(device, chunks, **{"dtype": torch.bfloat16, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (64, 64), (80, 80), (128, 64)])
def test_cudnn_from_the_start(cudnn_device, dtype, key_dim, value_dim):
    dims = {"key_dim": key_dim, "value_dim": value_dim}
    check(make_large_case(cudnn_device, [(0, 512), (0, 1280)], dtype=dtype, **dims), scale=0.1)


@pytest.mark.gpu
def test_cudnn_after_a_prefix(cudnn_device):
    chunks = [(256, 512), (1536, 512), (512, 1024)]
    check(make_large_case(cudnn_device, chunks), scale=0.1)
    check(make_large_case(cudnn_device, chunks, num_kv_heads=8), scale=0.1, window_tokens=2048)


@pytest.mark.gpu
def test_cudnn_on_neighbours_in_one_call(cudnn_device, monkeypatch):
    num_seqs = []
    run = module.run_cudnn

    def note(*arguments) -> None:
        num_seqs.append(arguments[4].num_seqs)
        run(*arguments)

    monkeypatch.setattr(module, "run_cudnn", note)
    chunks = [(0, 512), (0, 512), (0, 512), (0, 768), (0, 768)]
    check(make_large_case(cudnn_device, chunks, slots=[1, 2, 3, 4, 6]), scale=0.1)
    assert num_seqs == [3, 1, 1]


@pytest.mark.gpu
def test_cudnn_on_slots_that_are_far_apart(cudnn_device):
    """The stride from slot to slot exceeds 31 bits, as with long sequences."""
    num_tokens, stride = 512, (1 << 31) + (1 << 20)
    if torch.cuda.mem_get_info()[0] < 4 * stride:
        pytest.skip("too little memory")
    case = make_large_case(cudnn_device, [(0, 512), (0, 512)], slots=[0, 1])
    storage = torch.empty(stride + (1 << 20), dtype=torch.bfloat16, device=cudnn_device)
    # [slots, tokens, K and V, kv_heads, dim]
    far = storage.as_strided((2, num_tokens, 2, 2, 128), (stride, 512, 256, 128, 1))
    far[:, :, 0] = case.keys[:2, :num_tokens]
    far[:, :, 1] = case.values[:2, :num_tokens]
    case.keys, case.values = far.unbind(2)
    check(case, scale=0.1)


@pytest.mark.gpu
def test_cudnn_and_triton_share_a_batch(device):
    chunks = [(0, 512), (0, 512), (3, 512), (256, 768), (0, 100), (1000, 1), (0, 1024)]
    case = make_large_case(device, chunks, slots=[0, 1, 2, 3, 4, 5, 6])
    check(case, scale=0.1)
    check(case, scale=0.1, window_tokens=1000)
    check(case, scale=0.1, softcap=20.0)
    check(case, scale=0.1, sinks=make_sinks(8, device, torch.bfloat16))


@pytest.mark.gpu
def test_unaligned_heads_do_not_go_to_cudnn(device):
    check(make_large_case(device, [(0, 512), (256, 512)], key_dim=60, value_dim=60), scale=0.1)
    check(make_large_case(device, [(0, 512)], num_heads=2, key_dim=256, value_dim=256), scale=0.1)
