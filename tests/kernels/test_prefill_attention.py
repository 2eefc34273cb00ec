"""Prefill attention against its reference in float64, over KV that is NaN wherever unwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.cases import EVERY_KERNEL_CASE, covering
from tests.kernels.attention_kv import make_sinks
from tests.kernels.prefill_cases import MAX_TOKENS, SMALL, check, make_case

from aquifer.kernels import prefill_attention as module
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.prefill_attention import default_config, prefill_attention_triton

RAGGED = [(0, 17), (5, 1), (30, 20), (0, 16), (40, 3)]
SHARED = [(0, 5), (5, 1), (30, 4)]  # where seven heads share a program
BLOCK_SIZES = (None, 16)


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
        config = default_config(head_dim, head_dim, dtype, paged=block_size is not None)
        check(case, config, **options, window_tokens=300)
