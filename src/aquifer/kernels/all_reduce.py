"""All-reduce of tensors over memory that the ranks' GPUs write to directly.

Each rank sends its numbers to all others and adds up what it has received: one kernel, one way over
the link. There are two ways to tell the receiver that numbers have come.

Messages, for small tensors: what takes time in an all-reduce of them is how often the GPUs wait for
each other. Each 8 bytes sent are 4 bytes of numbers and 4 bytes of an epoch, which are written at
once, so the receiver sees by the epoch that the numbers have come, and neither a fence nor a flag
has to follow them (the LL protocol of NCCL). That doubles the bytes.

Data, for larger ones: numbers as they are, and when a slice of them has been written, a flag with
the epoch. A slice's flag waits until the slice has arrived; meanwhile the slice before is added up.

A tensor is cut into slices. Each has an epoch of its own, which counts the operations that had that
slice, on each rank alike; even and odd ones are received in different memory. So a rank writes over
numbers of epoch e when it sends those of e + 2. It does that after it has received all of e + 1,
which the other rank has sent when its kernel of epoch e was complete. Messages and data have
memory and epochs of their own: numbers could look like an epoch.

All ranks add up in the order of the ranks, in float32, and so get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    compiled_together,
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
"""Words of 4 bytes in a slice of messages: two for each thread."""

DATA_SLICE_WORDS = 2048
"""Words of 4 bytes in a slice of data: 16 for each thread."""

_MESSAGE_WARPS = 8
_DATA_WARPS = 4

_MESSAGE_PROGRAMS = 2
_DATA_PROGRAMS = 4
"""Programs per SM, all of which must be able to run at once: they wait for those of other ranks."""

_MESSAGE_BYTES = 8
"""Size of a message: a word of 4 bytes and its epoch."""

_VECTOR_WORDS = 4
"""Words that a thread sends at once as data."""

_PATIENCE = 1 << 16
"""How often a program looks for numbers before it asks whether it is to stop: for some 50 ms.

The answer is in host memory, and to read it took 55 ms where pages were being mapped (measured on a
virtual machine). So what waits as long as is usual never asks.
"""

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of tensors that `all_reduce` takes."""


@dataclass(frozen=True, slots=True)
class PeerInboxes:
    """Memory in which ranks receive numbers, as one of them sees it.

    An inbox has three parts, each by sender, without the rank itself, and by whether the epoch is
    odd: messages, [size - 1, 2, words] of 8 bytes; data, [size - 1, 2, words] of 4 bytes; and
    the flags of data, [size - 1, 2, slices] int32. All are zero at first.

    Attributes:
        rank: number of this one.
        inbox: this rank's own, int64 (`inbox_bytes`).
        addresses: [size] int64, where the inbox of each rank is mapped here.
        message_epochs: [slices of messages] int32, zero at first.
        data_epochs: [slices of data] int32, zero at first.
        stop: [1] int32 that kernels can read and the host can write; 0, or 1 if they are to wait
            for nothing any more, and so return wrong numbers: a rank is gone.
    """

    rank: int
    inbox: torch.Tensor
    addresses: torch.Tensor
    message_epochs: torch.Tensor
    data_epochs: torch.Tensor
    stop: torch.Tensor

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)

    @property
    def message_words(self) -> int:
        """Words of the largest tensor that is sent as messages."""
        return len(self.message_epochs) * SLICE_WORDS

    @property
    def data_words(self) -> int:
        """Words of the largest tensor that is sent as data."""
        return len(self.data_epochs) * DATA_SLICE_WORDS

    @staticmethod
    def inbox_bytes(size: int, message_slices: int, data_slices: int) -> int:
        """Size of an inbox, a multiple of 8.

        Args:
            size: number of ranks.
            message_slices: slices of the largest tensor that is sent as messages.
            data_slices: the same for data.
        """
        slice_bytes = message_slices * SLICE_WORDS * _MESSAGE_BYTES
        slice_bytes += data_slices * (DATA_SLICE_WORDS + 1) * 4
        return (size - 1) * 2 * slice_bytes

    def fits(self, values: torch.Tensor) -> bool:
        """Whether `all_reduce` takes this tensor; the same on all ranks."""
        return self.sends_messages(values) or self.sends_data(values)

    def sends_messages(self, values: torch.Tensor) -> bool:
        """Whether it is small enough for messages, and can be sent."""
        num_bytes = values.numel() * values.itemsize
        return _is_sent(values) and num_bytes % 4 == 0 and num_bytes <= self.message_words * 4

    def sends_data(self, values: torch.Tensor) -> bool:
        """Whether it can be sent as data."""
        num_bytes = values.numel() * values.itemsize
        # The address is such a multiple on all ranks or on none: they allocate and slice alike.
        is_aligned = (num_bytes | values.data_ptr()) % (_VECTOR_WORDS * 4) == 0
        return _is_sent(values) and is_aligned and num_bytes <= self.data_words * 4


def _is_sent(values: torch.Tensor) -> bool:
    """Whether a tensor of that kind can be sent."""
    return values.dtype in DTYPES and values.is_contiguous()


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
    if peers.sends_messages(values):
        _launch_messages(values, peers)
    else:
        assert peers.sends_data(values), "too large, or of a dtype or shape that is not sent"
        _launch_data(values, peers)


def compile_all_reduce(peers: PeerInboxes, device: torch.device) -> None:
    """Compile all that `all_reduce` launches; nothing is sent.

    Without it, a kernel that one rank has, and another one not, would be launched by the first in a
    step that is run to compile kernels (`compiled_together`), and would wait for the other.
    """
    with compiled_together(device):
        for dtype in DTYPES:
            nothing = torch.empty(0, dtype=dtype, device=device)
            _launch_messages(nothing, peers)
            _launch_data(nothing, peers)


def _launch_messages(values: torch.Tensor, peers: PeerInboxes) -> None:
    num_words = values.numel() * values.itemsize // 4
    launch(
        _all_reduce_messages_kernel,
        _grid(values, SLICE_WORDS, _MESSAGE_PROGRAMS),
        values,
        peers.inbox,
        peers.addresses,
        peers.message_epochs,
        peers.stop,
        num_words,
        message_words=peers.message_words,
        rank=peers.rank,
        size=peers.size,
        slice_words=SLICE_WORDS,
        patience=_PATIENCE,
        is_interpreted=not values.is_cuda,
        num_warps=_MESSAGE_WARPS,
        **launch_options(values.device),
    )


def _launch_data(values: torch.Tensor, peers: PeerInboxes) -> None:
    num_words = values.numel() * values.itemsize // 4
    launch(
        _all_reduce_data_kernel,
        _grid(values, DATA_SLICE_WORDS, _DATA_PROGRAMS),
        values,
        peers.inbox,
        peers.addresses,
        peers.data_epochs,
        peers.stop,
        num_words,
        message_words=peers.message_words,
        data_words=peers.data_words,
        vector_words=_VECTOR_WORDS,
        rank=peers.rank,
        size=peers.size,
        slice_words=DATA_SLICE_WORDS,
        patience=_PATIENCE,
        is_interpreted=not values.is_cuda,
        num_warps=_DATA_WARPS,
        **launch_options(values.device),
    )


def _grid(values: torch.Tensor, slice_words: int, per_multiprocessor: int) -> tuple[int]:
    """A program for each slice, if so many can run at once."""
    num_slices = -(-values.numel() * values.itemsize // (slice_words * 4))
    most = count_multiprocessors(values.device) * per_multiprocessor
    return (max(min(num_slices, most), 1),)


@jit_once(counts=("num_words",), indices=("values",))
def _all_reduce_messages_kernel(
    values: tensor,
    inbox: tensor,
    addresses: tensor,
    epochs: tensor,
    stop: tensor,
    num_words: tensor,
    message_words: constexpr,
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
                target += (sender * 2 + (epoch & 1)) * message_words
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
                source = inbox + (sender * 2 + (epoch & 1)) * message_words + word
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
            low, high = _added(low, high, received, values.dtype.element_ty)
        total = _packed(low, high, values.dtype.element_ty)
        tl.store(words + word, total, mask=is_word)
        tl.debug_barrier()  # every thread has read the epoch
        tl.store(epochs + number, epoch)


@jit_once(counts=("num_words",))
def _all_reduce_data_kernel(
    values: tensor,
    inbox: tensor,
    addresses: tensor,
    epochs: tensor,
    stop: tensor,
    num_words: tensor,
    message_words: constexpr,
    data_words: constexpr,
    vector_words: constexpr,
    rank: constexpr,
    size: constexpr,
    slice_words: constexpr,
    patience: constexpr,
    is_interpreted: constexpr,
    overlaps: constexpr,
) -> None:
    """The same for data; a slice is added up after the next one has been sent."""
    num_slices = tl.cdiv(num_words, slice_words)
    slices: constexpr = data_words // slice_words
    data_begin: constexpr = (size - 1) * 2 * message_words * 2  # in words
    flags_begin: constexpr = data_begin + (size - 1) * 2 * data_words
    words = values.to(tl.pointer_type(tl.int32), bitcast=True)
    vector = tl.arange(0, slice_words // vector_words)[:, None]
    in_slice = vector * vector_words + tl.arange(0, vector_words)[None, :]
    first = tl.program_id(0)
    step = tl.num_programs(0)
    stopped = 0
    await_predecessor(overlaps)
    for number in range(first, num_slices + step, step):
        if number < num_slices:
            # Compared by vectors, so the compiler sees that each is sent whole or not at all.
            num_vectors = (num_words - number * slice_words) // vector_words
            is_word = tl.broadcast_to(vector < num_vectors, in_slice.shape)
            word = number * slice_words + in_slice
            epoch = tl.load(epochs + number, cache_modifier=".cg") + 1
            own = tl.load(words + word, mask=is_word, other=0)
            for other in tl.static_range(size):
                if other != rank:
                    sender = rank - (1 if rank > other else 0)
                    target = tl.load(addresses + other).to(tl.pointer_type(tl.int32))
                    target += data_begin + (sender * 2 + (epoch & 1)) * data_words
                    tl.store(tl.multiple_of(target, 16) + word, own, mask=is_word)
            tl.debug_barrier()  # all threads have written
            for other in tl.static_range(size):
                if other != rank:
                    sender = rank - (1 if rank > other else 0)
                    target = tl.load(addresses + other).to(tl.pointer_type(tl.int32))
                    target += flags_begin + (sender * 2 + (epoch & 1)) * slices
                    _raise_flag(target + number, epoch, is_interpreted)
        else:
            release_successor(overlaps)
        done = number - step
        if done >= 0:
            num_vectors = (num_words - done * slice_words) // vector_words
            is_word = tl.broadcast_to(vector < num_vectors, in_slice.shape)
            word = done * slice_words + in_slice
            epoch = tl.load(epochs + done, cache_modifier=".cg") + 1
            low = tl.zeros(in_slice.shape, tl.float32)
            high = tl.zeros(in_slice.shape, tl.float32)
            for other in tl.static_range(size):
                if other == rank:
                    received = tl.load(words + word, mask=is_word, other=0)
                else:
                    sender = other - (1 if other > rank else 0)
                    box = sender * 2 + (epoch & 1)
                    flags = inbox.to(tl.pointer_type(tl.int32), bitcast=True)
                    flag = flags + flags_begin + box * slices + done
                    times = 0
                    while (_read_flag(flag, is_interpreted) != epoch) & (stopped == 0):
                        times += 1
                        if times % patience == 0:
                            stopped = tl.load(stop, volatile=True)
                    source = inbox.to(tl.pointer_type(tl.int32), bitcast=True)
                    source = tl.multiple_of(source + data_begin + box * data_words, 16)
                    received = tl.load(source + word, mask=is_word, other=0, cache_modifier=".cg")
                low, high = _added(low, high, received, values.dtype.element_ty)
            total = _packed(low, high, values.dtype.element_ty)
            tl.store(words + word, total, mask=is_word)
            tl.debug_barrier()  # every thread has read the epoch
            tl.store(epochs + done, epoch)


@jit
def _raise_flag(address: tensor, epoch: tensor, is_interpreted: constexpr) -> None:
    """Set a flag after all that the program's threads have written. Call: after a barrier."""
    if is_interpreted:
        tl.store(address, epoch)
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred is_first;
                .reg .u32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 is_first, thread, 0;
                @is_first st.release.sys.global.b32 [$1], $2;
                mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [address, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _read_flag(address: tensor, is_interpreted: constexpr) -> tensor:
    """A flag; what was written before it was set can be read after."""
    if is_interpreted:
        flag = tl.load(address)
    else:
        flag = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return flag


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
def _added(low: tensor, high: tensor, received: tensor, dtype: constexpr) -> tuple[tensor, tensor]:
    """Sums of the numbers in words and of what was received: of the low and the high halves, or of
    whole words in the first alone."""
    if dtype.primitive_bitwidth == 16:
        low += _half(received & 0xFFFF, dtype)
        high += _half((received >> 16) & 0xFFFF, dtype)
    else:
        low += received.to(tl.float32, bitcast=True)
    return low, high


@jit
def _packed(low: tensor, high: tensor, dtype: constexpr) -> tensor:
    """The words of such sums."""
    if dtype.primitive_bitwidth == 16:
        words = _bits(low, dtype) | (_bits(high, dtype) << 16)
    else:
        words = low.to(tl.int32, bitcast=True)
    return words


@jit
def _half(bits: tensor, dtype: constexpr) -> tensor:
    """The number of 16 bits."""
    return bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@jit
def _bits(number: tensor, dtype: constexpr) -> tensor:
    """The 16 bits of a number."""
    return number.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
