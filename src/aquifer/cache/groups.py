"""KV of layers with windows, KV of layers without, and recurrent state, each for itself.

A layer with a window of W tokens attends to the latest W tokens alone. Such layers are a part of
their own: a cache manager with its own addresses, tables and pages, which gives back what is behind
the window as a sequence grows. Layers that attend to all tokens are another part, the first one;
a model in which all layers slide has none of these.

    position of the next row             p
    tokens that layers without a window keep                  [0, p)
    tokens that layers with a window keep   [max(p + 1 - W, 0), p), in whole blocks
    recurrent layers keep                   one state, that after p tokens

While a prompt is read, a part with a window has the tokens of a step beside those. What rows of a
step in flight still read is given back as everything is: pages stay mapped until the step is done,
and a block is written to only by later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import ceil

import numpy as np

from aquifer.cache.base import (
    CachePart,
    CacheStats,
    GroupFactory,
    IntArray,
    Kept,
    KVLayout,
    KVPart,
    StateLayout,
)
from aquifer.cache.footprint import Footprint, GroupedFootprint, PartFootprint
from aquifer.cache.group_tensors import GroupedTensors
from aquifer.cache.state import WINDOW_TOKENS, StateCache
from aquifer.memory.pool import Owner, PagePool
from aquifer.predict.lengths import Forecast

StateFactory = Callable[[PagePool, Owner, StateLayout, int, int], StateCache]
"""Builds a manager of states; arguments as for `StateCache`."""


class GroupedCache:
    """The `SequenceCache` of one manager for each group of layers, and one for recurrent state.

    Args:
        make: makes the managers.
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token's KV, with windows.
        max_seqs: number of slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
        max_step_tokens: tokens of the largest step; None for as many as a sequence may have.
        state: layout of one sequence's recurrent state; None if no layer has any.
        make_state: makes the manager of it.

    Attributes:
        parts: the managers, with their windows.
        tensors: the device's half.
        footprint: pages and bytes that tokens take.
    """

    can_share = True
    stuck_slot = None

    def __init__(
        self,
        make: GroupFactory,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        max_step_tokens: int | None = None,
        state: StateLayout | None = None,
        make_state: StateFactory = StateCache,
    ) -> None:
        groups = layout.groups()
        state_cache: StateCache | None = None
        with ExitStack() as undo:
            caches: list[KVPart] = []
            for group in groups:
                caches.append(make(pool, owner, group.layout, max_seqs, max_tokens))
                undo.callback(caches[-1].close)
            if state is not None:
                state_cache = make_state(pool, owner, state, max_seqs, max_tokens)
            undo.pop_all()
        parts = [
            CachePart(cache, group.window_tokens)
            for cache, group in zip(caches, groups, strict=True)
        ]
        if state_cache is not None:
            parts.append(CachePart(state_cache, WINDOW_TOKENS, keeps_state=True))
        self.parts = tuple(parts)
        self._first = parts[0].cache
        self._step_tokens = min(max_step_tokens or max_tokens, max_tokens)
        self._positions = np.zeros(max_seqs + 1, np.int64)  # as told by `advance`, of each slot
        self._keeps_checkpoints = False
        self.tensors = GroupedTensors(
            [cache.tensors for cache in caches],
            groups,
            None if state_cache is None else state_cache.tensors,
        )
        self.footprint: Footprint = self._footprint()

    def keep_checkpoints(self) -> None:
        """See `SequenceCache.keep_checkpoints`."""
        self._keeps_checkpoints = True
        self.footprint = self._footprint()

    # --- blocks of the first part ------------------------------------------------------------

    def tokens_in(self, num_blocks: int) -> int:
        """Number of tokens that end in the first blocks of the first part."""
        return self._first.tokens_in(num_blocks)

    def tokens_touching(self, num_blocks: int) -> int:
        """Number of tokens that have any byte in the first blocks of the first part."""
        return self._first.tokens_touching(num_blocks)

    def blocks(self, slot: int, num_tokens: int) -> Sequence[int]:
        """The blocks of a slot's first tokens in the first part, but for those given back."""
        return self._first.blocks(slot, num_tokens)

    def slot_blocks(self, slot: int) -> Sequence[int]:
        """All blocks of a slot in the first part."""
        return self._first.slot_blocks(slot)

    def retain(self, blocks: Sequence[int]) -> None:
        """Hold blocks of the first part."""
        self._first.retain(blocks)

    def unretain(self, blocks: Sequence[int]) -> None:
        """Drop blocks of the first part."""
        self._first.unretain(blocks)

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """The slot that suits the first part, which keeps most."""
        return self._first.preferred_slot(blocks, free_slots)

    # --- sequences ---------------------------------------------------------------------------

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Announce a sequence to all parts."""
        for part in self.parts:
            part.cache.expect(slot, num_prompt, num_total, forecast)

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Reserve all tokens, or with a window those that it needs at once while they are run.

        So a prompt that was admitted finds room for each of its chunks: a part with a window gives
        back as much before each as the chunk takes.
        """
        slots = np.array([slot])
        position = int(self._positions[slot])
        counts = []
        for part in self.parts:
            end = num_tokens
            if part.window_tokens is not None:
                first = part.first_needed(position)
                end = min(num_tokens, first + part.window_tokens - 1 + self._step_tokens)
            counts.append(np.array([end]))
        return self._reserve(slots, counts)

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Reserve these tokens in all parts, or in none."""
        return self._reserve(slots, [num_tokens] * len(self.parts))

    def advance(self, slots: IntArray, positions: IntArray) -> None:
        """Give back what is behind the windows."""
        self._positions[slots] = positions
        next_rows = of_state = positions + 1
        if self._keeps_checkpoints and self._first.footprint.token_bytes:
            first = self._first.footprint
            whole_bytes = positions * first.token_bytes // first.block_bytes * first.block_bytes
            next_rows = whole_bytes // first.token_bytes
        for part in self.parts:
            if part.window_tokens is not None:
                ends = of_state if part.keeps_state else next_rows
                part.cache.forget(slots, np.maximum(ends - part.window_tokens, 0))

    def learn(self, num_total: int) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.cache.learn(num_total)

    def release(self, slot: int) -> None:
        """Release the slot in all parts."""
        self._positions[slot] = 0
        for part in self.parts:
            part.cache.release(slot)

    def resume(self, slot: int, kept: Sequence[Kept], num_tokens: int) -> bool:
        """Share or copy the blocks of all parts, or of none."""
        with ExitStack() as undo:
            for part, each in zip(self.parts, kept, strict=True):
                if not part.cache.adopt(slot, each.blocks, num_tokens, each.first):
                    return False
                undo.callback(part.cache.release, slot)
            undo.pop_all()
        self._positions[slot] = num_tokens
        return True

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether all windows before the next token are there."""
        return all(
            part.cache.num_forgotten(parent) <= part.first_needed(num_tokens) for part in self.parts
        )

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Fork in all parts, or in none."""
        with ExitStack() as undo:
            for part in self.parts:
                if not part.cache.fork(parent, child, num_tokens):
                    return False
                undo.callback(part.cache.release, child)
            undo.pop_all()
        self._positions[child] = num_tokens
        return True

    def mark(self, slot: int, num_tokens: int) -> None:
        """Copy the state."""
        for part in self.parts:
            part.cache.mark(slot, num_tokens)

    def upload(self) -> None:
        """Send the changes of all parts."""
        for part in self.parts:
            part.cache.upload()

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """The sum over all parts with KV; what was given back does not count as written.

        Recurrent state has an owner of its own in the pool, and no waste but the ends of pages.

        Args:
            written_tokens: of each slot, [slots]. A total will do while nothing is given back.
        """
        total = int(np.sum(written_tokens))
        found = []
        for part in self.parts:
            if part.keeps_state:
                continue
            kept = total
            if isinstance(written_tokens, np.ndarray) and part.window_tokens is not None:
                slots = written_tokens.nonzero()[0].tolist()
                forgotten = [part.cache.num_forgotten(slot) for slot in slots]
                kept = int(np.maximum(written_tokens[slots] - forgotten, 0).sum())
            found.append(part.cache.stats(kept))
        return CacheStats(
            total,
            sum(stats.written_bytes for stats in found),
            sum(stats.mapped_bytes for stats in found),
            sum(stats.shared_bytes for stats in found),
        )

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.cache.close()

    def _reserve(self, slots: IntArray, counts: Sequence[IntArray]) -> bool:
        """Reserve room for a number of tokens in each part; all or nothing."""
        with ExitStack() as undo:
            for part, num_tokens in zip(self.parts, counts, strict=True):
                ends = part.cache.ends(slots)
                if not part.cache.reserve(slots, num_tokens):
                    return False
                undo.callback(part.cache.shrink, slots, ends)
            undo.pop_all()
        return True

    def _footprint(self) -> GroupedFootprint:
        first = self._first.footprint
        # Beside the window, tokens behind the last whole block, and the one before the window.
        more = ceil(first.block_tokens) + 2 if self._keeps_checkpoints else 0
        parts = tuple(
            PartFootprint(
                part.cache.footprint,
                None if part.window_tokens is None else part.window_tokens - 1,
                self._step_tokens,
                part.cache.ahead_tokens,
                more,
            )
            for part in self.parts
        )
        return GroupedFootprint(
            first.token_bytes, first.block_bytes, first.page_bytes, first.shares, parts=parts
        )
