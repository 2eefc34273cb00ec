"""The inputs of steps that are captured whole, and attention that reads them on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.interpreter import interpret
from tests.kernels.prefill_cases import Case, make_case

from aquifer.cache.layout import KVLayout, LayerKV
from aquifer.cache.spans import Rows, Spans
from aquifer.cache.view import AttentionOptions, StepView, Workspaces
from aquifer.engine.graphs import ChunkStep
from aquifer.engine.whole_graphs import (
    MOST_CHUNKS,
    FixedSpans,
    StepLayout,
)
from aquifer.kernels.prefill_work import NOTHING, Tiling

TILING = Tiling(block_tokens=16, num_running=8, num_groups=1, least_keys=16)


def spans_of(chunks: list[tuple[int, int, int]]) -> Spans:
    """From (slot, start, count) of each."""
    slots, starts, counts = np.array(chunks, np.int64).T
    return Spans.make(slots, starts, counts)


def packed(layout: StepLayout, spans: Spans, num_decodes: int, sampled: list[int]) -> torch.Tensor:
    tokens = np.arange(spans.num_tokens)
    rows = np.array(sampled, np.int64)
    sampling = np.stack((rows + 1, rows + 2, rows + 3))
    step = ChunkStep(spans, num_decodes, 100 + tokens, 200 + tokens, rows, sampling)
    return torch.from_numpy(layout.pack(step))


def test_inputs_lie_where_a_step_reads_them():
    layout = StepLayout(16, 4, (TILING,))
    spans = spans_of([(5, 9, 1), (3, 20, 1), (7, 0, 4), (2, 50, 3)])
    inputs, works = layout.split(packed(layout, spans, 2, [0, 1, 3]))
    assert inputs.token_ids.tolist() == [*range(100, 109), *[0] * 7]
    assert inputs.context_lengths.tolist() == [*range(200, 209), *[0] * 7]
    assert inputs.positions.tolist() == [9, 20, 0, 1, 2, 3, 50, 51, 52, *[0] * 7]
    assert inputs.slots.tolist() == [5, 3, 7, 7, 7, 7, 2, 2, 2, *[-1] * 7]
    assert inputs.last_rows.tolist() == [0, 1, 8, 0]
    assert inputs.last_slots.tolist() == [5, 3, 2, 0]
    assert inputs.last_positions.tolist() == [9, 20, 52, 0]
    assert inputs.last_lengths.tolist() == [10, 21, 53, 0]
    assert inputs.decode_lengths.tolist() == [10, 21, 0, 0]
    assert inputs.chunk_slots.tolist() == [7, 2, *[0] * (MOST_CHUNKS - 2)]
    assert inputs.chunk_starts.tolist() == [0, 50, *[0] * (MOST_CHUNKS - 2)]
    assert inputs.chunk_offsets.tolist() == [2, 6, 9, *[0] * (MOST_CHUNKS - 2)]
    assert inputs.sampling.view(3, -1).tolist() == [[1, 2, 4, -1], [2, 3, 5, -1], [3, 4, 6, -1]]
    work = works[TILING]
    assert work.programs.tolist()[:5] == [[1, 0, 0, 3], [1, 0, 1, 3], [1, 0, 2, 3], [0, 0, 0, 1],
                                          [NOTHING] * 4]  # fmt: skip
    assert work.merges.tolist() == [0, *[NOTHING] * 3]


def test_a_step_without_tokens_is_padding():
    layout = StepLayout(16, 8, (TILING,))
    inputs, works = layout.split(torch.from_numpy(layout.padding()))
    assert (inputs.slots == -1).all()
    assert (inputs.sampling == -1).all()
    zeros = inputs._replace(slots=inputs.positions, sampling=inputs.positions)
    assert not any(part.any() for part in zeros)
    assert (works[TILING].programs == NOTHING).all()
    assert (works[TILING].merges == NOTHING).all()


def test_the_largest_steps_fit():
    layout = StepLayout(64, 64, (TILING,))
    for chunks in ([(1, 0, 64)], [(1, 4000, 64)], [(slot, 0, 2) for slot in range(32)]):
        assert len(packed(layout, spans_of(chunks), 0, [])) == layout.num_elements
    packed(layout, spans_of([(slot, 7, 1) for slot in range(64)]), 64, list(range(64)))


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("window_tokens", [None, 13])
def test_attention_to_rows_that_the_device_alone_knows(
    monkeypatch: pytest.MonkeyPatch, block_size: int | None, window_tokens: int | None
):
    """Two sequences decode and three read chunks, in a step that is captured for more of both."""
    interpret(monkeypatch)
    chunks = [(17, 1), (40, 1), (0, 17), (30, 20), (5, 4)]
    case = make_case(torch.device("cpu"), chunks, block_size=block_size, first_row=0)
    spans = spans_of([(slot, *chunk) for slot, chunk in zip(case.spans.slots, chunks, strict=True)])
    out = attend(case, spans, 2, window_tokens)
    expected = case.reference(scale=0.2, window_tokens=window_tokens)
    num_tokens = spans.num_tokens
    torch.testing.assert_close(
        out[:num_tokens].double(), expected[:num_tokens], rtol=1e-4, atol=1e-5
    )


def attend(case: Case, spans: Spans, num_decodes: int, window_tokens: int | None) -> torch.Tensor:
    """What a step of 64 tokens attends to, of which up to 8 decode."""
    num_heads, key_dim = case.query.shape[1:]
    layer = LayerKV(case.keys.shape[2], key_dim, case.values.shape[3])
    size, max_rows = 64, 8
    tilings: dict[Tiling, None] = {}
    query = torch.zeros(size, num_heads, key_dim)
    query[: spans.num_tokens] = case.query[: spans.num_tokens]
    for _ in range(2):  # what the launches need is known after the first time
        layout = StepLayout(size, max_rows, tuple(tilings))
        inputs, works = layout.split(packed(layout, spans, num_decodes, []))

        def work(tiling: Tiling, layout=layout, works=works):
            tilings[tiling] = None
            if tiling in works:
                return works[tiling]
            rest = StepLayout(size, max_rows, (tiling,))
            return rest.split(torch.from_numpy(rest.padding()))[1][tiling]

        fixed = FixedSpans(inputs.chunk_slots, inputs.chunk_starts, inputs.chunk_offsets, work)
        rows = Rows(inputs.slots, inputs.positions, inputs.decode_lengths, None, fixed)
        view = StepView(
            KVLayout((layer,), torch.float32),
            [(case.keys, case.values)],
            rows,
            case.tables,
            Workspaces(),
        )
        assert view.decoding is None
        out = view.attend(0, query, AttentionOptions(0.2, window_tokens))
    return out
