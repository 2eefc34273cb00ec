"""Many pieces copied in one launch, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels.block_copy import block_copy, block_copy_reference


def pieces_of(*pieces: tuple[int, int, int]) -> torch.Tensor:
    """[3, num_pieces] of (source, destination, count) each."""
    return torch.tensor(pieces, dtype=torch.int64).view(-1, 3).T.contiguous()


CASES = {
    "none": pieces_of(),
    "one": pieces_of((3, 40000, 17)),
    "empty": pieces_of((0, 100, 0), (7, 50, 1)),
    "long": pieces_of((1, 20001, 4096), (5000, 30003, 9001)),
    "of all sizes": pieces_of((0, 33000, 1), (9, 34001, 4097), (20000, 5000, 8191), (0, 4999, 1)),
    "one source for many": pieces_of(*((11, 30000 + 200 * i, 150 + i) for i in range(40))),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("name", CASES)
def test_block_copy(device: torch.device, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randint(0, 256, (45000,), generator=generator).to(dtype)
    expected = before.clone()
    for source, destination, count in CASES[name].T.tolist():
        expected[destination : destination + count] = before[source : source + count]
    pieces = CASES[name].to(device)
    max_count = int(CASES[name][2].max()) if pieces.numel() else 0
    memory = before.to(device)
    block_copy(memory, pieces, max_count)
    assert torch.equal(memory.cpu(), expected)
    memory = before.to(device)
    block_copy_reference(memory, pieces)
    assert torch.equal(memory.cpu(), expected)


def test_the_bound_need_not_be_met(device: torch.device) -> None:
    memory = torch.arange(100, device=device)
    block_copy(memory, pieces_of((0, 50, 5), (10, 60, 7)).to(device), 5000)
    expected = list(range(100))
    expected[50:55] = range(5)
    expected[60:67] = range(10, 17)
    assert memory.tolist() == expected
