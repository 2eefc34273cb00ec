"""All-reduce over memory that ranks write to directly: what all receive is the sum of all parts."""

from __future__ import annotations

import pytest
import torch

from aquifer.kernels.all_reduce import (
    SLICE_WORDS,
    PeerInboxes,
    all_reduce,
    all_reduce_reference,
)

MOST_BYTES = 5 * SLICE_WORDS * 4
SHAPES = [(1, 6), (1, 2 * SLICE_WORDS), (3, 700), (0, 8)]
SHAPES += [(1, MOST_BYTES // 4)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait in vain end at once where they are to stop."""
    monkeypatch.setattr("aquifer.kernels.all_reduce._PATIENCE", 1)


def inboxes_of(size: int, device: torch.device) -> list[PeerInboxes]:
    """As the ranks of a group have them, all on one device."""
    num_messages = PeerInboxes.inbox_bytes(size, MOST_BYTES) // 8
    inboxes = [torch.zeros(num_messages, dtype=torch.int64, device=device) for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    return [
        PeerInboxes(
            rank,
            inbox,
            addresses,
            torch.zeros(MOST_BYTES // (SLICE_WORDS * 4), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        for rank, inbox in enumerate(inboxes)
    ]


def parts_of(
    size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """The tensor of each rank: numbers of which all sums are exact in each dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-16, 17, shape, generator=generator) / 4).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_the_sum(device: torch.device, size: int, dtype: torch.dtype) -> None:
    """One rank after the other: first all send, and are told not to wait for what has not come;
    then each repeats it and receives. Epochs are odd and even, and shapes differ."""
    peers = inboxes_of(size, device)
    shapes = [shape for shape in SHAPES if torch.Size(shape).numel() * dtype.itemsize <= MOST_BYTES]
    for seed, shape in enumerate(shapes * 2):
        parts = parts_of(size, shape, dtype, seed)
        expected = all_reduce_reference(parts)
        assert torch.equal(expected, torch.stack(parts).sum(0))
        for of_rank, part in zip(peers, parts, strict=True):
            epochs = of_rank.epochs.clone()
            of_rank.stop.fill_(1)
            all_reduce(part.clone().to(device), of_rank)
            of_rank.stop.zero_()
            of_rank.epochs.copy_(epochs)
        for of_rank, part in zip(peers, parts, strict=True):
            values = part.clone().to(device)
            all_reduce(values, of_rank)
            assert torch.equal(values.cpu(), expected)


def test_a_rank_does_not_take_old_numbers_for_new_ones(device: torch.device) -> None:
    """Numbers of two epochs ago are still in the memory that new ones come to."""
    peers = inboxes_of(2, device)
    parts = parts_of(2, (1, 64), torch.bfloat16, 0)
    for _ in range(3):
        peers[1].stop.fill_(1)
        all_reduce(parts[1].clone().to(device), peers[1])
        values = parts[0].clone().to(device)
        all_reduce(values, peers[0])
        assert torch.equal(values.cpu(), all_reduce_reference(parts))
    # Rank 1 sends nothing, so rank 0 waits until it is told to stop: the sum is wrong then.
    peers[0].stop.fill_(1)
    inbox = peers[0].inbox.clone()
    values = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    all_reduce(values, peers[0])
    assert torch.equal(peers[0].inbox, inbox)
    assert peers[0].epochs[0] == 4
    assert peers[1].epochs[0] == 3


def test_epochs_begin_again_after_the_largest(device: torch.device) -> None:
    """Which they reach after two days of decoding."""
    peers = inboxes_of(2, device)
    guard = peers[0].inbox.clone()
    for of_rank in peers:
        of_rank.epochs.fill_(2**31 - 3)
    for seed in range(5):
        parts = parts_of(2, (1, 64), torch.bfloat16, seed)
        peers[1].stop.fill_(1)
        all_reduce(parts[1].clone().to(device), peers[1])
        values = parts[0].clone().to(device)
        all_reduce(values, peers[0])
        assert torch.equal(values.cpu(), all_reduce_reference(parts))
    assert peers[0].epochs[0] == -(2**31) + 2
    changed = (peers[0].inbox != guard).nonzero().flatten()
    assert changed.max() < MOST_BYTES // 4 + 32  # odd epochs are received behind the even ones


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        (torch.zeros(MOST_BYTES // 2, dtype=torch.float16), True),
        (torch.zeros(MOST_BYTES // 2 + 2, dtype=torch.float16), False),
        (torch.zeros(3, dtype=torch.bfloat16), False),
        (torch.zeros(4, dtype=torch.int64), False),
        (torch.zeros(4, 4).T, False),
        (torch.zeros(4, 4)[1:3], True),
    ],
)
def test_what_is_sent(values: torch.Tensor, fits: bool) -> None:
    assert inboxes_of(2, torch.device("cpu"))[0].fits(values) == fits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_that_run_at_the_same_time(device: torch.device) -> None:
    """On streams of one GPU, many times, without a pause between: none overtakes another."""
    size, times = 2, 200
    peers = inboxes_of(size, device)
    streams = [torch.cuda.Stream() for _ in range(size)]
    shapes = [SHAPES[seed % 3] for seed in range(times)]
    parts = [parts_of(size, shape, torch.bfloat16, seed) for seed, shape in enumerate(shapes)]
    moved = [[part.to(device) for part in each] for each in parts]
    for of_rank in peers:  # compiled before any waits
        all_reduce(torch.empty(0, dtype=torch.bfloat16, device=device), of_rank)
    torch.cuda.synchronize()
    for each in moved:
        for of_rank, stream in zip(peers, streams, strict=True):
            with torch.cuda.stream(stream):
                values = each[of_rank.rank]
                values.add_(0.0)  # a kernel between, as in a model
                all_reduce(values, of_rank)
    torch.cuda.synchronize()
    for given, found in zip(parts, moved, strict=True):
        expected = all_reduce_reference(given)
        assert all(torch.equal(values.cpu(), expected) for values in found)
