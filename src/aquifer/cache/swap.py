"""Sequences moved to host memory and back (PagedAttention, section 4.5).

KV that several sequences of a group share is moved once, with the first of them. The others move
only what follows, and share again when they come back. A sequence of a virtual cache moves in one
long copy, one of a paged cache in a copy for each run of neighbouring blocks.

Of layers with a window, each sequence moves all that it still has. It shares none of that: the
sequences go on, and what they have in common is soon behind their windows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from aquifer.cache.base import CachePart, SequenceCache
from aquifer.cache.swap_memory import SwapMemory
from aquifer.memory.regions import RegionList
from aquifer.memory.runs import num_equal
from aquifer.sizes import format_size

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwappedPart:
    """The KV of one sequence on the host, of one part of its cache.

    Tokens [0, num_shared) are those of sequence number `parent` in the list that was swapped out;
    `tokens` are at `start` of the space, and are all that follow. Where the part has a window,
    nothing is shared, and what comes before `tokens` is not kept.
    """

    tokens: range
    parent: int
    num_shared: int
    start: int | None  # None where there is nothing to copy
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """The KV of one sequence on the host.

    Attributes:
        num_tokens: tokens of the sequence.
        parts: for each part of its cache.
    """

    num_tokens: int
    parts: tuple[SwappedPart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that were copied for this sequence."""
        return sum(part.num_bytes for part in self.parts)


class SwapSpace:
    """A bounded part of host memory that preempted sequences are moved to.

    No memory is taken before the first sequence is to be swapped. On a GPU a thread takes it then,
    from its beginning on (`SwapMemory`); sequences are swapped to what is there.

    Args:
        num_bytes: the bound, rounded down to whole regions; 0 for no swapping at all.
        device: device of the KV.
        bytes_per_s: speed of a copy to or from the host, until it is measured.
        on_begin: called when the memory is about to be taken.

    Attributes:
        num_bytes: the bound; less if the host has refused memory, and 0 if it has refused all.
        memory: what copies are in.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        bytes_per_s: float = 10e9,
        on_begin: Callable[[], None] | None = None,
    ) -> None:
        self._regions = RegionList(num_bytes)
        self.num_bytes = self._regions.num_bytes
        self._bytes_per_s = bytes_per_s
        self._on_begin = on_begin
        self.memory = SwapMemory(self.num_bytes, device)
        # What is not there yet, or never will be, is a region of its own at the end.
        self._there_bytes = 0
        if self.num_bytes:
            self._regions.acquire_at(0, self.num_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in use by sequences."""
        return self._regions.used_bytes - (self._regions.num_bytes - self._there_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that are there and not in use, as far as `prepare` has seen."""
        return self._regions.free_bytes

    @property
    def bytes_per_s(self) -> float:
        """Speed of a copy to or from the host; measured when the memory is taken."""
        return self.memory.bytes_per_s or self._bytes_per_s

    def prepare(self) -> bool:
        """Take the memory, if that was not done before; returns whether any of it is there.

        If the host refuses the memory, it is not asked again.
        """
        if not self.num_bytes:
            return False
        if not self.memory.is_begun:
            if self._on_begin is not None:
                self._on_begin()
            self.memory.begin()
        self._count()
        return self._there_bytes > 0

    def wait_for_more(self) -> bool:
        """Wait until more of the memory is there; False if no more comes. After `prepare`."""
        before_bytes = self._there_bytes
        if before_bytes < self.num_bytes:
            self.memory.wait(before_bytes + 1)
            self._count()
        return self._there_bytes > before_bytes

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()

    def swap_out(
        self, cache: SequenceCache, slots: Sequence[int], num_tokens: Sequence[int]
    ) -> list[SwappedKV] | None:
        """Copy the KV of a group's sequences to the host. They keep their slots.

        All or nothing: None if there is no room, and nothing has changed.

        Args:
            cache: manager of the sequences' KV.
            slots: the slot of each sequence.
            num_tokens: tokens of each sequence with written KV; may be 0.
        """
        if not self.prepare():
            return None
        cache.advance(np.array(slots), np.array(num_tokens))
        with ExitStack() as undo:
            parts = [self._place(part, slots, num_tokens, undo) for part in cache.parts]
            if not all(parts):
                return None
            undo.pop_all()
        cache.upload()
        for part, moved in zip(cache.parts, parts, strict=True):
            for slot, kv in zip(slots, moved, strict=True):
                if kv.start is not None:
                    part.cache.copy_out(slot, kv.tokens, self._part(kv))
        return [
            SwappedKV(count, of_parts)
            for count, of_parts in zip(num_tokens, zip(*parts, strict=True), strict=True)
        ]

    def _place(
        self,
        part: CachePart,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        undo: ExitStack,
    ) -> list[SwappedPart]:
        """Decide what to copy of each sequence, and where to; empty if there is no room."""
        cache = part.cache
        blocks = [cache.blocks(slot, n) for slot, n in zip(slots, num_tokens, strict=True)]
        placed: list[SwappedPart] = []
        for i, count in enumerate(num_tokens):
            parent = num_shared = 0
            if part.window_tokens is None:
                # A token that begins in a shared page was there when it came to be shared.
                shared = [
                    min(
                        cache.tokens_touching(num_equal(blocks[i], blocks[j])),
                        num_tokens[j],
                        count,
                    )
                    for j in range(i)
                ]
                parent = int(np.argmax(shared)) if shared else 0
                num_shared = shared[parent] if shared else 0
            tokens = range(min(max(num_shared, cache.num_forgotten(slots[i])), count), count)
            start = None
            num_bytes = cache.footprint.kv_bytes(len(tokens))
            if num_bytes:
                start = self._regions.acquire(num_bytes)
                if start is None:
                    return []
                undo.callback(self._regions.release, start)
            placed.append(SwappedPart(tokens, parent, num_shared, start, num_bytes))
        return placed

    def swap_in(
        self, cache: SequenceCache, slots: Sequence[int], swapped: Sequence[SwappedKV]
    ) -> bool:
        """Bring sequences back to empty slots, and release their copies.

        All or nothing: False if the pool is short, and nothing has changed.
        """
        with ExitStack() as undo:
            for slot in slots:
                undo.callback(cache.release, slot)
            for slot, kv in zip(slots, swapped, strict=True):
                slot_array = np.array([slot])
                for part, moved in zip(cache.parts, kv.parts, strict=True):
                    if part.window_tokens is not None:
                        part.cache.forget(slot_array, np.array([moved.tokens.start]))
                    elif moved.num_shared and not part.cache.fork(
                        slots[moved.parent], slot, moved.num_shared
                    ):
                        return False
                if not cache.reserve(slot_array, np.array([kv.num_tokens])):
                    return False
                # In order, since a fork copies what its parent has by then.
                cache.upload()
                for part, moved in zip(cache.parts, kv.parts, strict=True):
                    if moved.start is not None:
                        part.cache.copy_in(slot, moved.tokens, self._part(moved))
            undo.pop_all()
        self.discard(swapped)
        return True

    def discard(self, swapped: Sequence[SwappedKV]) -> None:
        """Release copies. Later copies to these bytes come later in the device's order of work."""
        for kv in swapped:
            for part in kv.parts:
                if part.start is not None:
                    self._regions.release(part.start)

    def _count(self) -> None:
        """Let sequences have what has come since the last time."""
        error, there_bytes = self.memory.error, self.memory.there_bytes  # in this order
        if there_bytes > self._there_bytes:
            self._regions.release(self._there_bytes)
            self._there_bytes = there_bytes
            if there_bytes < self._regions.num_bytes:
                self._regions.acquire_at(there_bytes, self._regions.num_bytes - there_bytes)
        if error is not None and self.num_bytes > there_bytes:
            _log.warning(
                "could not take more than %s of %s of host memory (%s); preempted KV is computed "
                "again when it is full. Give a smaller --swap-space",
                format_size(there_bytes),
                format_size(self.num_bytes),
                error,
            )
            self.num_bytes = there_bytes

    def _part(self, kv: SwappedPart) -> torch.Tensor:
        assert kv.start is not None
        return self.memory.part(kv.start, kv.num_bytes)
