"""What is captured: the parts that need no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aquifer.engine.chunk_graphs import ChunkInputs, chunk_sizes
from aquifer.engine.graphs import StepBuffers, padded_size, padded_sizes
from aquifer.engine.in_flight import InFlight
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
