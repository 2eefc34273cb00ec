"""All-reduce over memory that ranks write to directly: what all receive is the sum of all parts."""

from __future__ import annotations

import pytest
import torch
from tests.cases import EVERY_KERNEL_CASE, covering

from aquifer.kernels.all_reduce import (
    DATA_SLICE_WORDS,
    SLICE_WORDS,
    PeerInboxes,
    all_reduce,
    all_reduce_reference,
    compile_all_reduce,
)

MESSAGES, DATA = (5, 0), (0, 3)
"""Slices of the largest tensor that is sent as messages, and as data."""
BOTH = 2, 3

WAYS = {
    MESSAGES: [(1, 6), (1, 2 * SLICE_WORDS), (3, 700), (0, 8), (1, 5 * SLICE_WORDS)],
    DATA: [(1, 8), (1, DATA_SLICE_WORDS), (2, 1032), (0, 8), (1, 3 * DATA_SLICE_WORDS)],
    BOTH: [(1, 6), (1, 3 * SLICE_WORDS), (1, 2 * SLICE_WORDS), (3, 2 * SLICE_WORDS)],
}
"""Ways to send, and shapes of tensors that are sent so."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait in vain end at once where they are to stop."""
    monkeypatch.setattr("aquifer.kernels.all_reduce._PATIENCE", 1)


def inboxes_of(
    size: int, device: torch.device, slices: tuple[int, int] = MESSAGES
) -> list[PeerInboxes]:
    """As the ranks of a group have them, all on one device."""
    num_words = PeerInboxes.inbox_bytes(size, *slices) // 8
    inboxes = [torch.zeros(num_words, dtype=torch.int64, device=device) for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    return [
        PeerInboxes(
            rank,
            inbox,
            addresses,
            torch.zeros(slices[0], dtype=torch.int32, device=device),
            torch.zeros(slices[1], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        for rank, inbox in enumerate(inboxes)
    ]


def send(peers: PeerInboxes, values: torch.Tensor) -> None:
    """Let a rank send, and not wait for what others have not sent yet."""
    peers.stop.fill_(1)
    all_reduce(values.clone().to(peers.stop.device), peers)
    peers.stop.zero_()


def parts_of(
    size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """The tensor of each rank: numbers of which all sums are exact in each dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-16, 17, shape, generator=generator) / 4).to(dtype) for _ in range(size)]


@pytest.mark.parametrize(
    ("slices", "size", "dtype"),
    covering(
        WAYS,
        [2, 3],
        [torch.bfloat16, torch.float16, torch.float32],
        strength=2,
        every=EVERY_KERNEL_CASE,
    ),
    ids=str,
)
def test_each_rank_gets_the_sum(
    device: torch.device, slices: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    """One rank after the other: first all send, and are told not to wait for what has not come;
    then each repeats it and receives. Epochs are odd and even, and shapes differ."""
    peers = inboxes_of(size, device, slices)
    for seed, shape in enumerate(WAYS[slices] * 2):
        parts = parts_of(size, shape, dtype, seed)
        expected = all_reduce_reference(parts)
        assert torch.equal(expected, torch.stack(parts).sum(0))
        for of_rank, part in zip(peers, parts, strict=True):
            epochs = of_rank.message_epochs.clone(), of_rank.data_epochs.clone()
            send(of_rank, part)
            of_rank.message_epochs.copy_(epochs[0])
            of_rank.data_epochs.copy_(epochs[1])
        for of_rank, part in zip(peers, parts, strict=True):
            values = part.clone().to(device)
            all_reduce(values, of_rank)
            assert torch.equal(values.cpu(), expected)


@pytest.mark.parametrize("slices", [MESSAGES, DATA])
def test_a_rank_does_not_take_old_numbers_for_new_ones(
    device: torch.device, slices: tuple[int, int]
) -> None:
    """Numbers of two epochs ago are still in the memory that new ones come to."""
    peers = inboxes_of(2, device, slices)
    parts = parts_of(2, (1, 64), torch.bfloat16, 0)
    for _ in range(3):
        send(peers[1], parts[1])
        values = parts[0].clone().to(device)
        all_reduce(values, peers[0])
        assert torch.equal(values.cpu(), all_reduce_reference(parts))
    # Rank 1 sends nothing, so rank 0 waits until it is told to stop: the sum is wrong then.
    inbox = peers[0].inbox.clone()
    send(peers[0], torch.zeros(1, 64, dtype=torch.bfloat16))
    assert torch.equal(peers[0].inbox, inbox)
    epochs = [peer.message_epochs if slices == MESSAGES else peer.data_epochs for peer in peers]
    assert [int(epoch[0]) for epoch in epochs] == [4, 3]


@pytest.mark.parametrize("slices", [MESSAGES, DATA])
def test_epochs_begin_again_after_the_largest(
    device: torch.device, slices: tuple[int, int]
) -> None:
    """Which they reach after two days of decoding."""
    peers = inboxes_of(2, device, slices)
    before = peers[0].inbox.clone()
    for of_rank in peers:
        of_rank.message_epochs.fill_(2**31 - 3)
        of_rank.data_epochs.fill_(2**31 - 3)
    for seed in range(5):
        parts = parts_of(2, (1, 64), torch.bfloat16, seed)
        send(peers[1], parts[1])
        values = parts[0].clone().to(device)
        all_reduce(values, peers[0])
        assert torch.equal(values.cpu(), all_reduce_reference(parts))
    epochs = peers[0].message_epochs if slices == MESSAGES else peers[0].data_epochs
    assert epochs[0] == -(2**31) + 2
    # Odd epochs are received behind the even ones; 32 words in each, and a flag behind data.
    inbox, changed = peers[0].inbox, peers[0].inbox != before
    if slices == MESSAGES:
        where = [0, inbox.numel() // 2]
        assert all(changed[begin : begin + 32].all() for begin in where)
        assert changed.sum() == 64
    else:
        words = changed.nonzero().flatten()
        odd = DATA[1] * DATA_SLICE_WORDS // 2
        assert set(words.tolist()) <= {*range(16), *range(odd, odd + 16), 2 * odd, 2 * odd + 1}
        flags = inbox.view(torch.int32)[4 * odd :].tolist()
        assert flags == [-(2**31) + 2, 0, 0, -(2**31) + 1, 0, 0]


@pytest.mark.parametrize(
    ("values", "as_messages", "as_data"),
    [
        (torch.zeros(2 * SLICE_WORDS), True, True),
        (torch.zeros(2 * SLICE_WORDS + 4), False, True),
        (torch.zeros(2 * SLICE_WORDS + 1), False, False),
        (torch.zeros(6, dtype=torch.float16), True, False),
        (torch.zeros(3 * DATA_SLICE_WORDS * 2, dtype=torch.bfloat16), False, True),
        (torch.zeros(3 * DATA_SLICE_WORDS * 2 + 8, dtype=torch.bfloat16), False, False),
        (torch.zeros(3, dtype=torch.bfloat16), False, False),
        (torch.zeros(4, dtype=torch.int64), False, False),
        (torch.zeros(4, 4).T, False, False),
        (torch.zeros(4, 4)[1:3], True, True),
        (torch.zeros(4, 3)[1:], True, False),
    ],
)
def test_what_is_sent(values: torch.Tensor, as_messages: bool, as_data: bool) -> None:
    peers = inboxes_of(2, torch.device("cpu"), BOTH)[0]
    assert peers.sends_messages(values) == as_messages
    assert peers.sends_data(values) == as_data
    assert peers.fits(values) == (as_messages or as_data)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slices", WAYS)
def test_ranks_that_run_at_the_same_time(device: torch.device, slices: tuple[int, int]) -> None:
    """On streams of one GPU, many times, without a pause between: none overtakes another."""
    size, times = 2, 200
    peers = inboxes_of(size, device, slices)
    streams = [torch.cuda.Stream() for _ in range(size)]
    shapes = [WAYS[slices][seed % 3] for seed in range(times)]
    parts = [parts_of(size, shape, torch.bfloat16, seed) for seed, shape in enumerate(shapes)]
    moved = [[part.to(device) for part in each] for each in parts]
    for of_rank in peers:  # compiled before any waits
        compile_all_reduce(of_rank, device)
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
