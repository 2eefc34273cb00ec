"""The inputs of a decode step, what it leaves behind, and the angles of rotation."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels.rotary import rotary_angles, rotary_angles_reference
from aquifer.kernels.step import (
    advance,
    advance_reference,
    decode_inputs,
    decode_inputs_reference,
)

NUM_SLOTS = 400


def columns(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt lengths, computed tokens, last tokens; the last row is padding's."""
    generator = torch.Generator().manual_seed(0)
    result = torch.randint(1, 10**6, (3, NUM_SLOTS + 1), generator=generator)
    result[:, -1] = 0
    num_prompt, num_computed, last_token = result.to(device)
    return num_prompt, num_computed, last_token


def some_slots(n: int, device: torch.device) -> torch.Tensor:
    """In any order, a few of them padding."""
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:n]
    slots[n - n // 4 :] = -1
    return slots.to(device)


@pytest.mark.parametrize("n", [1, 8, 128, 130])
def test_decode_inputs(device: torch.device, n: int) -> None:
    num_prompt, num_computed, last_token = columns(device)
    slots = some_slots(n, device)
    expected = []
    for slot in slots.tolist():
        if slot < 0:
            expected.append((0, 0, 0, 0))
            continue
        length = int(num_computed[slot]) + 1
        context = max(int(num_prompt[slot]), length)
        expected.append((int(last_token[slot]), length - 1, length, context))
    for operation in (decode_inputs, decode_inputs_reference):
        lengths = torch.full_like(slots, -1)
        token_ids, *rest = operation(slots, num_prompt, num_computed, last_token, lengths)
        actual = torch.stack((token_ids, rest[0], lengths, rest[1]), 1)
        assert actual.tolist() == [list(row) for row in expected]


@pytest.mark.parametrize("n", [1, 130])
def test_advance(device: torch.device, n: int) -> None:
    slots = some_slots(n, device)
    lengths = torch.arange(n, device=device) + 7
    tokens = torch.arange(n, device=device) + 10**6
    for operation in (advance, advance_reference):
        _, num_computed, last_token = columns(device)
        before = num_computed.clone(), last_token.clone()
        reports = torch.full((2, 144), -1, pin_memory=device.type == "cuda")
        next_report = torch.ones(1, dtype=torch.int64, device=device)
        operation(slots, lengths, tokens, num_computed, last_token, reports, next_report)
        expected = torch.full((2, 144), -1)
        expected[1, :n] = torch.where(slots >= 0, tokens, -1)
        assert torch.equal(reports, expected)
        assert next_report.tolist() == [0]
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                before[0][slot] = lengths[row]
                before[1][slot] = tokens[row]
        assert torch.equal(num_computed, before[0])
        assert torch.equal(last_token, before[1])


@pytest.mark.parametrize("half", [64, 20])
@pytest.mark.parametrize("is_own", [False, True])
def test_rotary_angles(device: torch.device, half: int, is_own: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 1, 2, 3, 1000, 40959, 131071] * 5).to(device)
    shape = (len(positions), half) if is_own else (half,)
    frequencies = torch.rand(shape, generator=generator).to(device)
    # The product is rounded to float32 by specification, as Transformers does; from there exact.
    angles = (positions.float()[:, None] * frequencies).double()
    for operation in (rotary_angles, rotary_angles_reference):
        cos, sin = operation(positions, frequencies, 1.25)
        assert cos.shape == sin.shape == (len(positions), half)
        torch.testing.assert_close(cos.double(), angles.cos() * 1.25, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin.double(), angles.sin() * 1.25, rtol=0, atol=1e-6)
    empty = rotary_angles(positions[:0], frequencies[:0] if is_own else frequencies, 1.0)
    assert empty[0].shape == (0, half)
