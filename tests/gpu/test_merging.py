"""Moves of regions within device memory: contents are those of the same moves on the host."""

from __future__ import annotations

import pytest
import torch

from aquifer.memory.merging import Move, copy_down

MIB = 1 << 20


@pytest.mark.parametrize("distance", [512, MIB, 24 * MIB, 96 * MIB])
def test_moves_that_overlap(distance: int) -> None:
    """Bytes move by less than the scratch memory, by more than it, and without overlap."""
    expected = torch.randint(0, 256, (192 * MIB,), dtype=torch.uint8)
    memory = expected.cuda()
    moves: list[Move] = [
        (start, start - distance, size)
        for start, size in ((96 * MIB, 60 * MIB), (156 * MIB, 4 * MIB), (170 * MIB, 22 * MIB))
    ]
    for start, target, size in moves:
        expected[target : target + size] = expected[start : start + size].clone()
    copy_down(memory, moves)
    assert torch.equal(memory.cpu(), expected)
