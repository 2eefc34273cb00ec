"""All-reduce of small tensors over memory that the ranks' GPUs write to directly.

The tensors of a decode step are small: what takes time in an all-reduce of them is how often the
GPUs wait for each other. Here they do once. Each rank sends its numbers to all others and adds up
what it has received: one kernel, one way over the link. Each 8 bytes sent are 4 bytes of numbers
and 4 bytes of an epoch, which are written at once, so the receiver sees by the epoch that the
numbers have come, and neither a fence nor a flag has to follow them (the LL protocol of NCCL; one
shot, as all numbers go to all ranks). That doubles the bytes, so large tensors are left to NCCL.

A tensor is cut into slices. Each has an epoch of its own, which counts the operations that had that
slice, on each rank alike; even and odd ones are received in different memory. So a rank writes over
numbers of epoch e when it sends those of e + 2. It does that after it has received all of e + 1,
which the other rank has sent when its kernel of epoch e was complete.

All ranks add up in the order of the ranks, in float32, and so get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    count_multiprocessors,
    jit,
    jit_once,
    launch,
    launch_options,
    release_successor,
    tensor,
    tl,
)

SLICE_WORDS = 512
"""Words of 4 bytes in a slice: two for each thread."""

_NUM_WARPS = 8
_PER_MULTIPROCESSOR = 2
"""Programs per SM, all of which must be able to run at once: they wait for those of other ranks."""

_MESSAGE_BYTES = 8
"""Size of a message: a word of 4 bytes and its epoch."""

_PATIENCE = 1 << 16
"""How often a program looks for numbers before it asks whether it is to stop: for some 50 ms.

The answer is in host memory, and to read it took 55 ms where pages were being mapped (measured on a
virtual machine). So what waits as long as is usual never asks.
"""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of tensors that `all_reduce` takes."""


@dataclass(frozen=True, slots=True)
class PeerInboxes:
    """Memory in which ranks receive numbers, as one of them sees it.

    An inbox is [size - 1, 2, capacity words] of messages: by sender, without the rank itself, and
    by whether the epoch is odd. All are zero at first.

    Attributes:
        rank: number of this one.
        inbox: this rank's own, int64.
        addresses: [size] int64, where the inbox of each rank is mapped here.
        epochs: [capacity slices] int32, zero at first.
        stop: [1] int32 that kernels can read and the host can write; 0, or 1 if they are to wait
            for nothing any more, and so return wrong numbers: a rank is gone.
    """

    rank: int
    inbox: torch.Tensor
    addresses: torch.Tensor
    epochs: torch.Tensor
    stop: torch.Tensor

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)

    @property
    def most_bytes(self) -> int:
        """Size of the largest tensor."""
        return len(self.epochs) * SLICE_WORDS * 4

    @staticmethod
    def inbox_bytes(size: int, most_bytes: int) -> int:
        """Size of an inbox.

        Args:
            size: number of ranks.
            most_bytes: size of the largest tensor, a multiple of that of a slice.
        """
        return (size - 1) * 2 * most_bytes // 4 * _MESSAGE_BYTES

    def fits(self, values: torch.Tensor) -> bool:
        """Whether `all_reduce` takes this tensor; the same on all ranks."""
        num_bytes = values.numel() * values.itemsize
        return (
            values.dtype in DTYPES
            and values.is_contiguous()
            and num_bytes % 4 == 0
            and num_bytes <= self.most_bytes
        )


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the tensors of all ranks, in their order, add up to."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce(values: torch.Tensor, peers: PeerInboxes) -> None:
    """Overwrite values with what those of all ranks add up to.

    All ranks call it in the same order with tensors of the same shape.

    Args:
        values: of any shape; `peers.fits`.
        peers: the inboxes of all ranks.
    """
    assert peers.fits(values), "too large, or of a dtype or shape that is not sent"
    words = values.numel() * values.itemsize // 4
    num_slices = -(-words // SLICE_WORDS)
    most = count_multiprocessors(values.device) * _PER_MULTIPROCESSOR
    launch(
        _all_reduce_kernel,
        (max(min(num_slices, most), 1),),
        values,
        peers.inbox,
        peers.addresses,
        peers.epochs,
        peers.stop,
        words,
        capacity=len(peers.epochs) * SLICE_WORDS,
        rank=peers.rank,
        size=peers.size,
        slice_words=SLICE_WORDS,
        patience=_PATIENCE,
        is_interpreted=not values.is_cuda,
        num_warps=_NUM_WARPS,
        **launch_options(values.device),
    )


@jit_once(counts=("num_words",), indices=("values",))
def _all_reduce_kernel(
    values: tensor,
    inbox: tensor,
    addresses: tensor,
    epochs: tensor,
    stop: tensor,
    num_words: tensor,
    capacity: constexpr,
    rank: constexpr,
    size: constexpr,
    slice_words: constexpr,
    patience: constexpr,
    is_interpreted: constexpr,
    overlaps: constexpr,
) -> None:
    """Each program sends some of the slices to all ranks, and receives and adds up the same."""
    num_slices = tl.cdiv(num_words, slice_words)
    words = values.to(tl.pointer_type(tl.int32), bitcast=True)
    is_pair: constexpr = values.dtype.element_ty.primitive_bitwidth == 16
    await_predecessor(overlaps)
    for number in range(tl.program_id(0), num_slices, tl.num_programs(0)):
        word = number * slice_words + tl.arange(0, slice_words)
        is_word = word < num_words
        epoch = tl.load(epochs + number, cache_modifier=".cg") + 1
        own = tl.load(words + word, mask=is_word, other=0)
        message = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
        for other in tl.static_range(size):
            if other != rank:
                sender = rank - (1 if rank > other else 0)
                target = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
                target += (sender * 2 + (epoch & 1)) * capacity
                _send(target + word, message, is_word, is_interpreted)
    release_successor(overlaps)
    stopped = 0
    for number in range(tl.program_id(0), num_slices, tl.num_programs(0)):
        word = number * slice_words + tl.arange(0, slice_words)
        is_word = word < num_words
        epoch = tl.load(epochs + number, cache_modifier=".cg") + 1
        low = tl.zeros([slice_words], tl.float32)
        high = tl.zeros([slice_words], tl.float32)
        for other in tl.static_range(size):
            if other == rank:
                received = tl.load(words + word, mask=is_word, other=0)
            else:
                sender = other - (1 if other > rank else 0)
                source = inbox + (sender * 2 + (epoch & 1)) * capacity + word
                message = tl.load(source, mask=is_word, other=0, volatile=True)
                missing = _num_missing(message, epoch, is_word)
                times = 0
                while (missing > 0) & (stopped == 0):
                    message = tl.load(source, mask=is_word, other=0, volatile=True)
                    missing = _num_missing(message, epoch, is_word)
                    times += 1
                    if times % patience == 0:
                        stopped = tl.load(stop, volatile=True)
                received = message.to(tl.int32)
            if is_pair:
                low += _half(received & 0xFFFF, values.dtype.element_ty)
                high += _half((received >> 16) & 0xFFFF, values.dtype.element_ty)
            else:
                low += received.to(tl.float32, bitcast=True)
        if is_pair:
            total = _bits(low, values.dtype.element_ty) | (
                _bits(high, values.dtype.element_ty) << 16
            )
        else:
            total = low.to(tl.int32, bitcast=True)
        tl.store(words + word, total, mask=is_word)
        tl.debug_barrier()  # every thread has read the epoch
        tl.store(epochs + number, epoch)


@jit
def _send(address: tensor, message: tensor, is_sent: tensor, is_interpreted: constexpr) -> None:
    """Store messages so that another GPU sees them soon.

    A plain store may stay within this GPU for as long as the program runs, and that waits for what
    the other one sends when it has seen the message: pauses of milliseconds to a second were
    measured.
    """
    if is_interpreted:
        tl.store(address, message, mask=is_sent)
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred is_sent;
                setp.ne.b32 is_sent, $3, 0;
                @is_sent st.relaxed.sys.global.b64 [$1], $2;
                mov.b32 $0, 0;
            }""",
            "=r,l,l,r",
            [address, message, is_sent.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _num_missing(message: tensor, epoch: tensor, is_word: tensor) -> tensor:
    """How many messages are not of the epoch."""
    is_missing = ((message >> 32).to(tl.int32) != epoch) & is_word
    return tl.sum(is_missing.to(tl.int32), 0)


@jit
def _half(bits: tensor, dtype: constexpr) -> tensor:
    """The number of 16 bits."""
    return bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@jit
def _bits(number: tensor, dtype: constexpr) -> tensor:
    """The 16 bits of a number."""
    return number.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
