"""What is captured, and what cuDNN is prepared for: the parts that need no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aquifer.cache.spans import Spans
from aquifer.engine.chunk_graphs import ChunkInputs, chunk_sizes
from aquifer.engine.graphs import StepBuffers, padded_size, padded_sizes
from aquifer.engine.in_flight import InFlight
from aquifer.engine.round_prompts import RoundPrompts
from aquifer.kernels.cudnn_attention import key_parts, row_pieces
from aquifer.kernels.step import advance


@pytest.mark.parametrize("max_seqs", [1, 5, 256, 1000])
def test_every_batch_has_a_captured_size(max_seqs: int) -> None:
    sizes = padded_sizes(max_seqs)
    assert sizes == sorted(set(sizes))
    for num_seqs in range(1, max_seqs + 1):
        assert padded_size(num_seqs) == min(size for size in sizes if size >= num_seqs)


@pytest.mark.parametrize("max_tokens", [1, 16, 100, 256, 2048, 8192, 10_000])
def test_steps_that_read_prompts_are_padded_by_a_quarter_at_most(max_tokens: int) -> None:
    sizes = chunk_sizes(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_tokens
    for num_tokens in range(256, max_tokens + 1):
        size = min(size for size in sizes if size >= num_tokens)
        assert size <= 1.25 * num_tokens


def test_padding_is_of_no_slot_at_a_position_that_every_model_has() -> None:
    """Position embeddings are looked up for padding too."""
    inputs = ChunkInputs(64, 8, 4, torch.device("cpu"))
    for size in (64, 16):
        inputs.flat.fill_(7)
        inputs.clear(size)
        of_step = inputs.of(size)
        assert (of_step.slots == -1).all()
        assert not any(part.any() for part in of_step._replace(slots=of_step.chunks))


def test_inputs_lie_where_a_step_reads_them() -> None:
    inputs = ChunkInputs(64, 8, 4, torch.device("cpu"))
    columns = [np.arange(10) + 100 * number for number in range(4)]
    last = [np.arange(3) + 1000 * number for number in range(3)]
    chunks = [np.array([1, 2]), np.array([3, 4]), np.array([5, 6, 7])]
    packed = inputs.packed(16, columns, last, chunks)
    inputs.flat[: len(packed)] = torch.from_numpy(packed)
    of_step = inputs.of(16)
    for tensor, values, padding in zip(of_step[:4], columns, (0, 0, -1, 0), strict=True):
        assert tensor.tolist() == values.tolist() + [padding] * 6
    for tensor, values in zip(of_step[4:7], last, strict=True):
        assert tensor.tolist() == values.tolist() + [0] * 5
    assert of_step.chunks[:7].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_the_host_finds_the_tokens_of_the_latest_steps() -> None:
    """Also after steps that nothing asked for; what was read stays as more steps come."""
    device = torch.device("cpu")
    buffers = StepBuffers(5, device)
    slots = torch.tensor([3, 1, -1])
    num_computed, last_token = torch.zeros(2, 6, dtype=torch.int64)

    def step(number: int) -> None:
        tokens = 100 * number + torch.arange(3)
        lengths, place = torch.ones_like(slots), buffers.next_report
        advance(slots, lengths, tokens, num_computed, last_token, buffers.reports, place)

    for number in range(3):
        step(number)
    buffers.restart_reports()
    outputs = []
    for number in range(3 * len(buffers.reports)):
        step(number)
        launched = InFlight(np.ones(2, np.int64), buffers.report()[:2], None, np.zeros(0, np.int64))
        outputs.append(launched.wait())
    for number, output in enumerate(outputs):
        assert output.tokens.tolist() == [[100 * number], [100 * number + 1]]


def _spans(*chunks: tuple[int, int]) -> Spans:
    starts, counts = np.array(chunks).T
    return Spans.make(np.arange(1, len(chunks) + 1), starts, counts)


def test_what_cudnn_computes_of_prompts() -> None:
    prompts = RoundPrompts(8192, 200_000)

    def keys(*chunks: tuple[int, int]) -> list[int]:
        found: list[int] = prompts.keys(_spans(*chunks)).tolist()
        return found

    assert keys((0, 2048), (0, 2048), (0, 500), (300, 77)) == [2048, 2048, 0, 0]
    assert keys((0, 8192), (0, 512), (0, 6144), (50, 1)) == [8192, 0, 0, 0]
    assert keys((16384, 8192), (122_880, 8192), (6144, 2048)) == [24576, 131_072, 8192]
    assert keys((122_880, 8120), (6144, 6000)) == [122_880, 6144]  # our own kernel takes the rest
    assert keys((5000, 2048), (2000, 4096), (70_000, 512)) == [4096, 0, 65_536]
    assert RoundPrompts(0, 0).keys(_spans((0, 2048))).tolist() == [0]


def _calls(start: int, count: int, keys: int) -> set[tuple[int, int, bool]]:
    """Calls of cuDNN for a chunk after a prefix: rows, keys, and whether it is causal."""
    pieces = row_pieces(count)
    parts = {rows: list(key_parts(min(start, keys), rows)) for _, rows in pieces}
    calls = {(rows, length, False) for rows, some in parts.items() for _, length in some}
    return calls | ({(count, count, True)} if keys == start + count else set())


@pytest.mark.parametrize(
    ("max_batched_tokens", "max_tokens"),
    [(8192, 131_072), (8192, 12_000), (5000, 40_000), (2500, 4300), (2048, 8192)],
)
def test_every_call_after_a_prefix_is_prepared(max_batched_tokens: int, max_tokens: int) -> None:
    prompts = RoundPrompts(max_batched_tokens, max_tokens)
    prepared = set()
    for spans in prompts.steps():
        if spans.starts[0]:
            (start,), (count,) = spans.starts.tolist(), spans.counts.tolist()
            prepared |= _calls(start, count, int(prompts.keys(spans)[0]))
    assert bool(prepared) == (max_tokens >= 4096)
    random = np.random.default_rng(0)
    for multiple in (1, 256, 2048):
        for _ in range(300):
            count = int(random.integers(1, max_batched_tokens + 1))
            start = int(random.integers(0, max_tokens - count)) // multiple * multiple
            count = max(count // multiple * multiple, 1)
            (keys,) = prompts.keys(_spans((start, count))).tolist()
            if start and keys:
                assert _calls(start, count, keys) <= prepared, (start, count)


@pytest.mark.parametrize(
    ("max_batched_tokens", "max_tokens"),
    [(8192, 100_000), (8192, 8192), (8192, 3000), (5000, 40_000), (2048, 8192), (512, 8192)],
)
def test_every_such_step_is_prepared_and_has_room(max_batched_tokens: int, max_tokens: int) -> None:
    prompts = RoundPrompts(max_batched_tokens, max_tokens)
    lengths, steps = prompts.lengths(), prompts.steps()
    assert bool(lengths) == bool(steps)
    for spans in steps:
        assert prompts.keys(spans).all()
        assert spans.num_tokens <= max_batched_tokens
        ends = spans.starts + spans.counts
        assert (ends <= np.array(lengths)[spans.slots - 1]).all()
        assert ends.max() <= max_tokens
    # As many prompts of a length as a step can have, which attention joins.
    for count in {int(spans.counts[0]) for spans in steps if not spans.starts.any()}:
        numbers = {len(s.slots) for s in steps if s.counts[0] == count and not s.starts.any()}
        assert numbers == set(range(1, max_batched_tokens // count + 1))
