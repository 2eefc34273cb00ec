"""Sequences moved to host memory and back (PagedAttention, section 4.5).

KV that several sequences of a group share is moved once, with the first of them. The others move
only what follows, and share again when they come back. A sequence of a virtual cache moves in one
long copy, one of a paged cache in a copy for each run of neighbouring blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from aquifer.cache.base import SequenceCache
from aquifer.memory.regions import RegionList
from aquifer.memory.runs import num_equal
from aquifer.sizes import format_size

_log = logging.getLogger(__name__)

_SAMPLE_BYTES = 16 << 20
"""Size of the copy that measures the bandwidth."""


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """The KV of one sequence on the host.

    Tokens [0, num_shared) are those of sequence number `parent` in the list that was swapped out;
    [num_shared, num_tokens) are at `start` of the space.
    """

    num_tokens: int
    parent: int
    num_shared: int
    start: int | None  # None where there is nothing to copy

    @property
    def num_copied(self) -> int:
        """Tokens that are not shared, and were copied for this sequence."""
        return self.num_tokens - self.num_shared


class SwapSpace:
    """A bounded part of host memory that preempted sequences are moved to.

    No memory is taken before the first sequence is to be swapped. On a GPU the memory is then
    page-locked, which takes about a second for a few GiB. A thread does that; until it is done,
    nothing can be swapped.

    Args:
        num_bytes: the bound, rounded down to whole regions; 0 for no swapping at all.
        device: device of the KV.
        bytes_per_s: speed of a copy to or from the host, until it is measured.

    Attributes:
        num_bytes: the bound; 0 if nothing can be swapped, also where the host refused the memory.
        bytes_per_s: speed of a copy; measured when the memory is taken.
    """

    def __init__(self, num_bytes: int, device: torch.device, bytes_per_s: float = 10e9) -> None:
        self._device = device
        self._regions = RegionList(num_bytes)
        self.num_bytes = self._regions.num_bytes
        self._memory: torch.Tensor | None = None
        self.bytes_per_s = bytes_per_s
        self._thread = threading.Thread(target=self._allocate, name="aquifer-swap", daemon=True)

    @property
    def used_bytes(self) -> int:
        """Bytes in use by sequences."""
        return self._regions.used_bytes

    def prepare(self, *, wait: bool = False) -> bool:
        """Take the memory, if that was not done before; returns whether it is available.

        If the host refuses the memory, it is not asked again.

        Args:
            wait: wait until it is.
        """
        if self.num_bytes and self._memory is None:
            if self._device.type != "cuda":  # it costs nothing before it is touched
                self._allocate()
            elif self._thread.ident is None:
                self._thread.start()
            if wait:
                self._join()
        return self._memory is not None

    def close(self) -> None:
        """Join the thread and release the memory."""
        self._join()
        self._memory = None

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
        blocks = [cache.blocks(slot, n) for slot, n in zip(slots, num_tokens, strict=True)]
        swapped: list[SwappedKV] = []
        with ExitStack() as undo:
            for i, count in enumerate(num_tokens):
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
                start = None
                if num_bytes := cache.footprint.kv_bytes(count - num_shared):
                    start = self._regions.acquire(num_bytes)
                    if start is None:
                        return None
                    undo.callback(self._regions.release, start)
                swapped.append(SwappedKV(count, parent, num_shared, start))
            undo.pop_all()
        cache.upload()
        for slot, kv in zip(slots, swapped, strict=True):
            if kv.start is not None:
                tokens = range(kv.num_shared, kv.num_tokens)
                cache.copy_out(slot, tokens, self._part(cache, kv))
        return swapped

    def swap_in(
        self, cache: SequenceCache, slots: Sequence[int], swapped: Sequence[SwappedKV]
    ) -> bool:
        """Bring sequences back to empty slots, and release their copies.

        All or nothing: False if the pool is short, and nothing has changed.
        """
        with ExitStack() as undo:
            for slot, kv in zip(slots, swapped, strict=True):
                undo.callback(cache.release, slot)
                if kv.num_shared and not cache.fork(slots[kv.parent], slot, kv.num_shared):
                    return False
                if not cache.reserve(np.array([slot]), np.array([kv.num_tokens])):
                    return False
                # In order, since a fork copies what its parent has by then.
                cache.upload()
                if kv.start is not None:
                    tokens = range(kv.num_shared, kv.num_tokens)
                    cache.copy_in(slot, tokens, self._part(cache, kv))
            undo.pop_all()
        self.discard(swapped)
        return True

    def discard(self, swapped: Sequence[SwappedKV]) -> None:
        """Release copies. Later copies to these bytes come later in the device's order of work."""
        for kv in swapped:
            if kv.start is not None:
                self._regions.release(kv.start)

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _part(self, cache: SequenceCache, kv: SwappedKV) -> torch.Tensor:
        assert self._memory is not None
        assert kv.start is not None
        return self._memory[kv.start : kv.start + cache.footprint.kv_bytes(kv.num_copied)]

    def _allocate(self) -> None:
        is_pinned, is_modelled = self._device.type == "cuda", self._device.type == "meta"
        try:
            memory = torch.empty(
                self.num_bytes,
                dtype=torch.uint8,
                device="meta" if is_modelled else "cpu",
                pin_memory=is_pinned,
            )
            if not is_modelled:
                self.bytes_per_s = _copy_rate(memory[:_SAMPLE_BYTES], self._device)
        except RuntimeError as error:  # torch has no narrower one for host memory
            _log.warning(
                "could not take %s of host memory (%s); preempted KV is computed again. Give a "
                "smaller --swap-space",
                format_size(self.num_bytes),
                error,
            )
            self.num_bytes = 0
            return
        self._memory = memory


def _copy_rate(part: torch.Tensor, device: torch.device) -> float:
    """Bytes per second from host memory to the device, the faster of two copies."""
    target = torch.empty_like(part, device=device)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        target.copy_(part)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        seconds.append(time.perf_counter() - start)
    return part.numel() / min(seconds)
