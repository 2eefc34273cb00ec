"""Prefill attention by cuDNN: which calls there are, and that their results are merged right.

In most tests, plain torch is in place of cuDNN, and shapes are small.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.kernels.attention_kv import make_sinks
from tests.kernels.prefill_cases import SMALL, Case, check, make_case

from aquifer.kernels import cudnn_attention, prefill_attention, prefill_work
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.cudnn_attention import (
    CALL_KEYS,
    MAX_MERGED,
    calls_of,
    has_own_plans,
    key_parts,
    keys_of,
    merge,
    merge_reference,
    row_pieces,
)

Shape = tuple[int, int, int, bool]
"""Sequences, rows, keys, and whether the call is causal."""


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes of calls that plain torch computes in place of cuDNN, as if it were fast for few
    tokens."""
    monkeypatch.setattr(cudnn_attention, "COUNT_MULTIPLE", 8)
    monkeypatch.setattr(cudnn_attention, "MIN_COUNT", 8)
    monkeypatch.setattr(cudnn_attention, "CALL_KEYS", {32: (128, 64, 32), 8: (64, 32)})
    monkeypatch.setattr(prefill_attention, "cudnn_takes", lambda *tensors: True)
    found: list[Shape] = []

    def attend(query, keys, values, scale, *, is_causal, with_lse):
        found.append((len(query), query.shape[2], keys.shape[2], is_causal))
        group = query.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
        scores = query @ keys.transpose(2, 3) * scale
        if is_causal:
            is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(is_later, -torch.inf)
        # As cuDNN does, tokens first in memory.
        result = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        result.copy_(scores.softmax(-1) @ values)
        lse = scores.logsumexp(-1, keepdim=True)
        return result, lse if with_lse else query.new_empty(0)

    monkeypatch.setattr(cudnn_attention, "cudnn_attention", attend)
    return found


@pytest.mark.parametrize(
    ("start", "count", "keys"),
    [
        (0, 512, 512),
        (0, 500, 0),
        (0, 256, 0),
        (6144, 2048, 8192),
        (122_880, 8192, 131_072),
        (122_880, 8120, 122_880),  # a chunk that is not round, over itself
        (122_900, 8192, 122_880),  # the rest of the prefix, and the chunk
        (6000, 2048, 4096),
        (1000, 8192, 0),  # shorter than a part
        (16_384, 512, 16_896),
        (10_000, 1000, 8192),  # short pieces have long parts
        (16_384, 600, 0),  # 1024 rows would be computed
        (16_384, 2049, 16_384),
        (6144, 2049, 6144),
        (6144, 300, 0),
        (16_384, 511, 0),  # no piece is so short
        (8192, 1, 0),
    ],
)
def test_keys_that_cudnn_takes(start: int, count: int, keys: int) -> None:
    assert keys_of(start, count) == keys


def test_lengths_of_chunks_may_be_limited() -> None:
    assert keys_of(0, 512, [2048]) == 0
    assert keys_of(2048, 4096, [2048]) == 2048
    assert keys_of(2048, 2048, [2048]) == 4096


@pytest.mark.parametrize(
    ("count", "pieces"),
    [
        (511, []),
        (512, [(0, 512)]),
        (1300, [(0, 512), (512, 512), (788, 512)]),
        (2000, [(0, 512), (512, 512), (1024, 512), (1488, 512)]),
        (2048, [(0, 2048)]),
        (2500, [(0, 2048), (1988, 512)]),
        (3900, [(0, 2048), (1852, 2048)]),
        (8120, [(0, 2048), (2048, 2048), (4096, 2048), (6072, 2048)]),
    ],
)
def test_rows_are_cut_into_pieces_of_two_lengths(count: int, pieces: list[tuple[int, int]]) -> None:
    assert row_pieces(count) == pieces
    rows = {row for first, length in pieces for row in range(first, first + length)}
    assert not pieces or rows == set(range(count))


def test_keys_are_cut_into_parts_of_few_lengths() -> None:
    assert list(key_parts(12_288, 2048)) == [(0, 8192), (8192, 4096)]
    assert list(key_parts(6144, 512)) == [(0, 2048), (2048, 2048), (4096, 2048)]
    assert [keys for _, keys in key_parts(122_880, 2048)] == [32_768] * 3 + [8192] * 3
    for rows, lengths in CALL_KEYS.items():
        parts = list(key_parts(30 * 8192, rows))
        assert {keys for _, keys in parts} <= set(lengths)
        assert [begin for begin, _ in parts] == [
            0,
            *itertools.accumulate(keys for _, keys in parts[:-1]),
        ]


def test_which_chunks_share_a_call() -> None:
    counts = [512, 512, 512, 768, 768, 512, 500, 512, 256, 768, 512]
    starts = [0, 0, 0, 0, 8192, 8192, 0, 100, 0, 0, 0]
    slots = [4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    offsets = [*itertools.accumulate(counts, initial=9)]
    keys = [keys_of(*chunk) for chunk in zip(starts, counts, strict=True)]

    def calls(window_tokens: int | None, is_batchable: bool = True) -> list[tuple[int, ...]]:
        found = calls_of(slots, starts, offsets, keys, window_tokens, is_batchable=is_batchable)
        return [(call.first_row, call.slot, call.keys, call.count, call.num_seqs) for call in found]

    far = [
        (9, 4, 512, 512, 1),
        (521, 5, 512, 512, 1),
        (1033, 7, 512, 512, 1),
        (1545, 8, 768, 768, 1),
        (2313, 9, 0, 768, 1),  # 1024 rows would be computed
        (3081, 10, 8704, 512, 1),
        (3593, 11, 0, 500, 1),
        (4093, 12, 0, 512, 1),
        (4605, 13, 0, 256, 1),
        (4861, 14, 768, 768, 1),
        (5629, 15, 512, 512, 1),
    ]
    near = [(9, 4, 512, 512, 2), *far[2:]]
    assert calls(None) == near
    assert calls(None, is_batchable=False) == far
    assert calls(8704) == near
    beyond = [call[2] for call in calls(8703)]
    assert beyond == [0 if call[2] == 8704 else call[2] for call in near]
    assert calls(511) == [(*call[:2], 0, *call[3:]) for call in far]


def test_a_plan_is_for_one_stride_from_slot_to_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention, "_batch_strides", {})
    long = 11 << 29  # its lowest 32 bits are 3 << 29
    assert has_own_plans(long, long)
    assert has_own_plans(1 << 20, long)
    assert not has_own_plans(3 << 29)
    assert not has_own_plans(long, 3 << 29)
    assert has_own_plans(long)


CHUNKS = [(0, 16), (0, 24), (32, 32), (8, 8), (32, 34), (70, 16), (0, 17), (64, 40), (70, 9)]


@pytest.mark.parametrize("window_tokens", [None, 90])
def test_our_kernel_leaves_keys_to_cudnn(device, monkeypatch, shapes, window_tokens):
    """Rows of which cuDNN takes all keys are not written."""
    taken = []
    monkeypatch.setattr(prefill_attention, "run_cudnn", lambda *some: taken.append(some[5]))
    case = make_case(device, CHUNKS, max_tokens=128)
    out = case.run(scale=0.2, window_tokens=window_tokens)
    expected = case.reference(scale=0.2, window_tokens=window_tokens)
    whole = {call.first_row: call for call in taken if call.is_whole}
    partial = [call.first_row for call in taken if not call.is_whole]
    ends = [start + count for start, count in CHUNKS]
    for index, (start, count) in enumerate(CHUNKS):
        first = case.spans.offsets[index]
        rows = slice(first, first + count)
        if first in whole:
            assert out[rows].isnan().all()
        elif first not in partial:
            torch.testing.assert_close(out[rows].double(), expected[rows], rtol=1e-4, atol=1e-5)
        assert window_tokens is None or ends[index] <= window_tokens or first not in whole, start
    assert (len(whole), len(partial)) == (4 if window_tokens is None else 3, 2)


def test_calls_get_the_right_rows_and_keys(device, shapes):
    """Neighbours in one call, prefixes in parts, and the rest by our own kernel."""
    chunks = [(0, 16), (0, 16), (0, 16), (32, 40), (3, 5), (69, 34), (0, 24), (134, 16)]
    check(make_case(device, chunks, max_tokens=160, slots=[1, 2, 4, 5, 6, 8, 0, 3]))
    assert shapes == [
        (2, 16, 16, True),
        (1, 16, 16, True),
        (1, 40, 40, True),
        (1, 32, 32, False),
        (1, 8, 32, False),
        (1, 32, 64, False),
        (1, 8, 64, False),
        (1, 24, 24, True),
        *[(1, 8, 64, False)] * 4,
    ]


def test_more_parts_than_are_merged_at_once(device, shapes):
    chunks = [(608, 32), (615, 32)]
    assert len(list(key_parts(608, 32))) == 6 > MAX_MERGED
    check(make_case(device, chunks, max_tokens=672, num_heads=2, num_kv_heads=1))
    assert len(shapes) == 2 * 6 + 1


def test_our_kernel_splits_the_keys_that_cudnn_leaves(device, monkeypatch, shapes):
    monkeypatch.setattr(prefill_attention, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(
        prefill_work, "choose_num_splits", lambda num_keys, tiling: np.full_like(num_keys, 3)
    )
    check(make_case(device, [(55, 40), (5, 20), (0, 24)], max_tokens=96))
    assert shapes == [(1, 32, 32, False), (1, 8, 32, False), (1, 24, 24, True)]


@pytest.mark.parametrize(("window_tokens", "num_calls"), [(40, 1), (70, 3), (87, 6)])
def test_windows(device, shapes, window_tokens, num_calls):
    """Within a window that has all keys, cuDNN takes part; else our kernel computes all."""
    chunks = [(32, 32), (64, 23), (0, 24)]
    check(make_case(device, chunks, max_tokens=96), window_tokens=window_tokens)
    assert len(shapes) == num_calls


def test_what_cudnn_does_not_know(device, shapes):
    case = make_case(device, [(0, 16), (32, 32)])
    check(case, slopes=alibi_slopes(4, device))
    check(case, sinks=make_sinks(4, device, torch.float32))
    check(case, softcap=20.0)
    check(make_case(device, [(0, 16), (32, 32)], block_size=16))
    check(case, SMALL)
    assert not shapes


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("num_heads", "value_dim", "cuts"),
    [(6, 24, [7]), (3, 128, [2, 5, 6, 11]), (40, 128, [4, 8])],
)
def test_merge(device, num_heads, value_dim, cuts):
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(5, num_heads, 12, generator=random, dtype=torch.float64) * 40
    values = torch.randn(5, num_heads, 12, value_dim, generator=random, dtype=torch.float64)
    results = []
    for begin, end in itertools.pairwise([0, *cuts, 12]):
        weights = scores[..., begin:end].softmax(-1)
        part = (weights[..., None] * values[:, :, begin:end]).sum(-2)
        log = scores[..., begin:end].logsumexp(-1).t()
        results.append((part, log.contiguous()))
    results[0][1][0, 0], results[1][1][0, 0] = -200.0, 200.0  # one of the two counts for nothing
    results[0][1][1, 0], results[1][1][1, 0] = 200.0, -200.0
    expected, expected_lse = torch.empty_like(results[0][0]), torch.empty_like(results[0][1])
    merge_reference(results, expected, expected_lse)
    whole = (scores.softmax(-1)[..., None] * values).sum(-2)
    torch.testing.assert_close(expected[1:], whole[1:])
    torch.testing.assert_close(expected_lse[:, 1:], scores[1:].logsumexp(-1).t())
    on_device = [(part.to(device, torch.float32), log.float().to(device)) for part, log in results]
    # Views, as of some rows of a step; the first result is where the merged one belongs.
    out = torch.full((8, num_heads, value_dim), torch.nan, device=device)
    lse = torch.full((num_heads, 8), torch.nan, device=device)
    out[2:7], lse[:, 2:7] = on_device[0]
    merge([(out[2:7], lse[:, 2:7]), *on_device[1:]], out[2:7], lse[:, 2:7])
    torch.testing.assert_close(out[2:7].cpu().double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[:, 2:7].cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert out[[0, 1, 7]].isnan().all()
    assert lse[:, [0, 1, 7]].isnan().all()


# The tests below need cuDNN's own kernels.


@pytest.fixture
def cudnn_device(device, monkeypatch) -> torch.device:
    """A GPU on which round spans go to cuDNN; a key that goes elsewhere is an error."""
    if not cudnn_attention.has_cudnn(torch.device("cuda", 0)):
        pytest.skip("cuDNN's attention needs a Hopper GPU, or a later one")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a round span went to Triton")

    monkeypatch.setattr(prefill_attention, "run_triton", refuse)
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
    case = make_large_case(cudnn_device, [(6144, 2048), (8192, 512)], max_tokens=8704)
    check(case, scale=0.1)
    check(case, scale=0.1, window_tokens=8704)


@pytest.mark.gpu
def test_cudnn_in_more_parts_than_are_merged_at_once(cudnn_device):
    chunk = (5 * 8192 + 4096 + 2048, 2048)
    check(make_large_case(cudnn_device, [chunk], max_tokens=sum(chunk), num_heads=2), scale=0.1)


@pytest.mark.gpu
def test_cudnn_beside_our_kernel_after_a_prefix(device):
    """A prefix that is not round, and a chunk that is not."""
    chunks = [(6144, 2000), (4500, 2048), (8200, 512), (5000, 3), (0, 77)]
    check(make_large_case(device, chunks, max_tokens=8960, num_kv_heads=2), scale=0.1)


@pytest.mark.gpu
def test_cudnn_on_neighbours_in_one_call(cudnn_device, monkeypatch):
    num_seqs = []
    run = cudnn_attention.run_cudnn

    def note(*arguments) -> None:
        num_seqs.append(arguments[5].num_seqs)
        run(*arguments)

    monkeypatch.setattr(prefill_attention, "run_cudnn", note)
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
