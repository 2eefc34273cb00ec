"""Hopper's prefill kernel against the reference in float64, over KV that is NaN if unwritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from tests.kernels.prefill_cases import Case, check, make_case

from aquifer.kernels import Recording, prefill_attention
from aquifer.kernels.hopper_prefill import fits, hopper_prefill
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.prefill_work import NOTHING, Tiling, Work

pytestmark = pytest.mark.gpu

CHUNKS = {
    "a tile": [(0, 128)],
    "one token": [(0, 1)],
    "one token after others": [(1023, 1)],
    "several rounds": [(0, 17), (3, 1), (300, 500), (1000, 65)],
    "tails and none": [(0, 1000), (1000, 24), (128, 128), (897, 127)],
}
# Llama-3-8B, Qwen3-0.6B, Qwen2.5-0.5B (7 heads), GPT-2, Phi-3-mini, Phi-2, and 32 heads of one.
SHAPES = [
    (32, 8, 128),
    (16, 8, 128),
    (14, 2, 64),
    (12, 12, 64),
    (32, 32, 96),
    (10, 2, 80),
    (32, 1, 128),
]


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return device


def make(
    device: torch.device,
    chunks: list[tuple[int, int]],
    shape: tuple[int, int, int] = (32, 8, 128),
    **options,
) -> Case:
    num_heads, num_kv_heads, head_dim = shape
    return make_case(
        device,
        chunks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        **{"dtype": torch.bfloat16, "max_tokens": 1100, **options},
    )


def run(case: Case, **options) -> torch.Tensor:
    out = torch.full_like(case.query, torch.nan)
    assert fits(case.query, case.keys, case.values, out)
    hopper_prefill(case.query, case.keys, case.values, case.spans, out, **options)
    return out


def check_with(case: Case, num_splits: int | None = None, **options) -> None:
    """`check`, but with so many splits."""

    class OfHopper(Case):
        def run(self, *_, num_splits: int | None = None, **options) -> torch.Tensor:
            return run(self, num_splits=num_splits, **options)

    check(OfHopper(**vars(case)), num_splits=num_splits, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
def test_models(device, chunks, shape):
    for dtype in (torch.bfloat16, torch.float16):
        check_with(make(device, chunks, shape, dtype=dtype), scale=shape[2] ** -0.5)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_splits(device, chunks, num_splits):
    check_with(make(device, chunks), num_splits)
    check_with(make(device, chunks, (7, 1, 80)), num_splits, window_tokens=300)


@pytest.mark.parametrize("window_tokens", [1, 127, 128, 129, 200, 1000, 5000])
def test_windows(device, window_tokens):
    for chunks in CHUNKS.values():
        check_with(make(device, chunks), window_tokens=window_tokens)


@pytest.mark.parametrize("num_splits", [None, 3])
def test_nothing_is_read_before_the_window(device, num_splits):
    chunks = [(400, 10), (500, 140), (0, 20), (450, 1)]
    case, complete = make(device, chunks), make(device, chunks)
    for slot, start in zip(case.spans.slots, case.spans.starts, strict=True):
        first = max(start + 1 - 100, 0)
        case.keys[slot, :first] = case.values[slot, :first] = torch.nan
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    found, expected = (
        run(each, scale=0.1, window_tokens=100, num_splits=num_splits)[rows]
        for each in (case, complete)
    )
    assert torch.equal(found, expected)


def test_large_scores_do_not_overflow(device):
    case = make(device, [(0, 300), (10, 5)], dtype=torch.float16)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    out, expected = run(case, scale=30.0)[rows], case.reference(scale=30.0)[rows]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("longest", [60, 160, 900])
def test_many_rounds(device, longest):
    """More work than multiprocessors several times over, of very different lengths; some blocks
    have one tile, and of these some end behind the last token."""
    random = torch.Generator().manual_seed(0)
    for seed in range(3):
        counts = torch.randint(1, longest, (20_000 // longest,), generator=random).tolist()
        counts[::5] = [128] * len(counts[::5])
        check_with(make(device, [(0, count) for count in counts], seed=seed), scale=0.08)


def test_chunks_that_share_a_slot(device):
    case = make(device, [(0, 600)])
    whole = run(case, scale=0.1)
    slot, first = case.spans.slots[0], case.spans.offsets[0]
    starts = [0, 100, 228, 600]
    spans = PrefillSpans.of(
        [slot] * 3, starts[:3], [first + start for start in starts], case.query.device
    )
    rows = slice(first, first + 600)
    parts = run(replace(case, spans=spans), scale=0.1)
    torch.testing.assert_close(parts[rows], whole[rows], rtol=2e-2, atol=2e-2)


def test_prefill_attention_takes_it(device):
    case = make(device, CHUNKS["several rounds"])
    out = torch.full_like(case.query, torch.nan)
    kv = case.keys, case.values, None
    prefill_attention.prefill_attention(case.query, *kv, case.spans, out, scale=0.1)
    rows = slice(case.spans.offsets[0], case.spans.offsets[-1])
    assert torch.equal(out[rows], run(case, scale=0.1)[rows])


def test_what_does_not_fit(device):
    case = make(device, [(0, 9)])
    query, keys, values = case.query, case.keys, case.values
    assert fits(query, keys, values, query)
    assert not fits(query.float(), keys.float(), values.float(), query.float())
    assert not fits(query, keys, values.transpose(1, 2).contiguous().transpose(1, 2), query)
    assert not fits(query[..., :100], keys[..., :100], values[..., :100], query[..., :100])
    assert not fits(query, keys, values[..., :64], query[..., :64])
    padded = torch.empty(len(query), 32, 132, dtype=query.dtype, device=device)
    assert not fits(query, keys, values, padded[..., :128])
    assert not fits(query[..., 1:121], keys[..., 1:121], values[..., 1:121], query[..., :120])


def test_a_recorded_launch_is_repeated_for_another_layer(device):
    first, second = (
        make(device, CHUNKS["several rounds"]),
        make(device, CHUNKS["several rounds"], seed=1, slots=None),
    )
    second.spans = first.spans
    second.keys.copy_(first.keys.flip(2))
    second.values.copy_(first.values.flip(2))
    expected = run(second, scale=0.1)
    out, again = (torch.full_like(first.query, torch.nan) for _ in range(2))
    with Recording(first.query, first.keys, out, first.values) as recording:
        hopper_prefill(first.query, first.keys, first.values, first.spans, out, scale=0.1)
    before = run(first, scale=0.1)
    tensors = second.query, second.keys, again, second.values
    assert recording.fits(*tensors)
    recording.repeat(*tensors)
    rows = slice(first.spans.offsets[0], first.spans.offsets[-1])
    assert torch.equal(again[rows], expected[rows])
    assert torch.equal(out[rows], before[rows])


class Other(NamedTuple):
    """Chunks with other lists than their own."""

    of: PrefillSpans
    change: Callable[[Work], Work]

    @property
    def device_slots(self) -> torch.Tensor:
        return self.of.device_slots

    @property
    def device_starts(self) -> torch.Tensor:
        return self.of.device_starts

    @property
    def device_offsets(self) -> torch.Tensor:
        return self.of.device_offsets

    def work(self, tiling: Tiling) -> Work:
        return self.change(self.of.work(tiling))


def check_other_lists(device: torch.device, change: Callable[[Work], Work]) -> None:
    """Results are the same, to the bit, with lists that are changed so."""
    for chunks in (*CHUNKS.values(), [(700, 20)]):
        case = make(device, chunks)
        expected, out = run(case, scale=0.1), torch.full_like(case.query, torch.nan)
        spans = Other(case.spans, change)
        hopper_prefill(case.query, case.keys, case.values, spans, out, scale=0.1)
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_lists_may_end_with_nothing(device):
    """As those of a step that is captured whole."""

    def lengthen(work: Work) -> Work:
        nothing = work.programs.new_full((300, 4), NOTHING)
        return work._replace(programs=torch.cat((work.programs, nothing)), band=1)

    check_other_lists(device, lengthen)


@pytest.mark.parametrize("band", [1, 2, 7, 30, 1000])
def test_bands(device, band):
    check_other_lists(device, lambda work: work._replace(band=band))
