"""Recurrent state of sequences: of fixed size, at addresses that slots give, beside their KV.

A sequence has one state, that after its latest token. Each step overwrites it, so nothing is shared
but by copying: a fork copies its parent's, and what a prefix is to begin with later is copied while
the sequence stands there (`StateCache.mark`).

In the words of `aquifer.cache.base`, the state after n tokens is the block of token n - 1, and a
part with states has a window of two tokens: a row attends to the state that the one before it left.
So states are reserved, given back, forked and moved to the host together with KV.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch

from aquifer.cache.base import CacheStats, IntArray, Kept
from aquifer.cache.footprint import StateFootprint
from aquifer.cache.keeps_all import KeepsAll
from aquifer.cache.layout import StateLayout
from aquifer.cache.state_tensors import StateShape, StateTensors
from aquifer.errors import InvariantError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.predict.lengths import Forecast

WINDOW_TOKENS = 2
"""Window of a part with states: the latest token, after which the state is, and the next one."""


class StateCache(KeepsAll):
    """The manager of the part with recurrent state.

    Args:
        pool: where pages come from.
        owner: owner of the KV of the same sequences.
        layout: layout of one sequence's state.
        max_seqs: number of slots, which are numbered from 1.
        max_tokens: length of the longest sequence.

    Attributes:
        footprint: pages and bytes that a state takes.
        tensors: the device's half.
    """

    can_share = True
    ahead_tokens = 0

    def __init__(
        self, pool: PagePool, owner: Owner, layout: StateLayout, max_seqs: int, max_tokens: int
    ) -> None:
        shape = StateShape.of(pool, layout, max_seqs, max_tokens)
        num_bytes = layout.num_bytes
        self.footprint = StateFootprint(num_bytes, num_bytes, pool.page_bytes, shares=False)
        self.tensors = StateTensors(pool, Owner(owner.model, Kind.STATE), shape)
        self._shape = shape
        self._prefix_owner = Owner(owner.model, Kind.PREFIX)
        self._residency = self.tensors.residency
        self._has_place = np.zeros(shape.num_slots, np.int64)  # 1 for a slot with pages
        self._page_users = np.zeros(shape.num_slot_pages, np.int64)
        self._num_forgotten = np.zeros(shape.num_slots, np.int64)
        # Checkpoints: a heap of free places, how often each other one is held, and those that each
        # slot has marked, by number of tokens.
        self._free = list(range(shape.num_slots, shape.num_slots + shape.num_checkpoints))
        self._holds: Counter[int] = Counter()
        self._marks: dict[int, dict[int, int]] = {}
        self._sources: set[int] = set()  # places that pending copies read
        self._targets: set[int] = set()  # and write

    # --- room --------------------------------------------------------------------------------

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Do nothing: the size is the same for all sequences."""

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Map the pages of slots that have none yet."""
        chosen = slots[(num_tokens > 0) & (self._has_place[slots] == 0)]
        if not len(chosen):
            return True
        if not self.tensors.open():
            return False
        taken = np.concatenate([np.array(self._shape.pages_of(slot)) for slot in chosen.tolist()])
        missing = np.unique(taken[self._page_users[taken] == 0])
        breaks = np.flatnonzero(np.diff(missing) > 1) + 1
        stretches = [
            range(int(run[0]), int(run[-1]) + 1) for run in np.split(missing, breaks) if len(run)
        ]
        if not self._residency.populate(stretches, is_overwritten=True):
            return False
        if self.tensors.guard is not None:  # what an earlier state left on a shared page
            for slot in chosen.tolist():
                self.tensors.guard.poison(self._shape.byte_of(slot), self._shape.layout.num_bytes)
        np.add.at(self._page_users, taken, 1)
        self._has_place[chosen] = 1
        return True

    def ends(self, slots: IntArray) -> IntArray:
        """1 for each slot that has a place."""
        return self._has_place[slots]

    def shrink(self, slots: IntArray, ends: IntArray) -> None:
        """Give up the pages of slots that had none before."""
        for slot in slots[self._has_place[slots] > ends].tolist():
            self._leave(slot)

    def forget(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Note which token each slot's state follows."""
        self._num_forgotten[slots] = num_tokens

    def num_forgotten(self, slot: int) -> int:
        """The token that the slot's state follows, as told by `forget`, `adopt` or `fork`."""
        return int(self._num_forgotten[slot])

    def release(self, slot: int) -> None:
        """Give up the slot's pages and its marks."""
        if slot in self._sources or slot in self._targets:
            self.upload()
        self.unretain(list(self._marks.pop(slot, {}).values()))
        self._num_forgotten[slot] = 0
        if self._has_place[slot]:
            self._leave(slot)

    # --- copies ------------------------------------------------------------------------------

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int, first: int = 0) -> bool:
        """Copy a checkpoint to the slot."""
        (place,) = blocks
        return self._begin_with(slot, place, num_tokens)

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Copy the parent's state. Pre-condition: it is that after `num_tokens` tokens."""
        return self._begin_with(child, parent, num_tokens)

    def mark(self, slot: int, num_tokens: int) -> None:
        """Copy a slot's state, so that it can be retained; if the pool is short, do nothing.

        The copy is the slot's until `release` or `unmark`; `retain` keeps it longer.

        Args:
            slot: a slot with a state.
            num_tokens: the tokens after which it is.
        """
        if not self._free or num_tokens in self._marks.get(slot, ()):
            return
        place = heapq.heappop(self._free)  # before room is made, which may add others
        with ExitStack() as undo:
            undo.callback(heapq.heappush, self._free, place)
            if not self._residency.populate([self._shape.pages_of(place)], is_overwritten=True):
                return
            undo.pop_all()
        self._holds[place] = 1
        self._marks.setdefault(slot, {})[num_tokens] = place
        self._copy(slot, place)

    def marked(self, slot: int) -> list[int] | None:
        """Numbers of tokens after which the slot has marked its state, ascending."""
        return sorted(self._marks.get(slot, ()))

    def kept_at(self, slot: int, num_tokens: int, window_tokens: int) -> Kept | None:
        """What was marked after so many tokens; None if nothing was."""
        place = self._marks.get(slot, {}).get(num_tokens)
        return None if place is None else Kept(num_tokens - 1, [place])

    def unmark(self, slot: int, num_tokens: int) -> None:
        """Drop a mark."""
        marks = self._marks.get(slot, {})
        if num_tokens in marks:
            self.unretain([marks.pop(num_tokens)])

    def retain(self, blocks: Sequence[int]) -> None:
        """Hold checkpoints, which are retained prefixes from then on."""
        for place in blocks:
            assert self._holds[place], "only checkpoints can be held"
            self._holds[place] += 1
            pages = self.tensors.range.pages_at(self._shape.pages_of(place))
            self._residency.transfer(pages, self._prefix_owner)

    def unretain(self, blocks: Sequence[int]) -> None:
        """Drop checkpoints; those that nothing holds are given up."""
        for place in blocks:
            if not self._holds[place]:
                raise InvariantError(f"checkpoint {place} is dropped, but not held")
            self._holds[place] -= 1
            if not self._holds[place]:
                if place in self._sources or place in self._targets:
                    self.upload()
                del self._holds[place]
                self._residency.give_up(self._shape.pages_of(place))
                heapq.heappush(self._free, place)

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Copy the slot's state."""
        self.tensors.copy_out(self._shape.byte_of(slot), target)

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """The opposite of `copy_out`."""
        self.tensors.copy_in(self._shape.byte_of(slot), source)

    def upload(self) -> None:
        """Launch the copies."""
        self.tensors.flush()
        self._sources.clear()
        self._targets.clear()

    # --- blocks ------------------------------------------------------------------------------

    def tokens_in(self, num_blocks: int) -> int:
        """A state follows one token."""
        return num_blocks

    def tokens_touching(self, num_blocks: int) -> int:
        """The same as `tokens_in`."""
        return num_blocks

    def blocks(self, slot: int, num_tokens: int) -> Sequence[int]:
        """The slot's place, if it has one."""
        return [slot] if num_tokens and self._has_place[slot] else []

    def slot_blocks(self, slot: int) -> Sequence[int]:
        """The same as `blocks`."""
        return self.blocks(slot, 1)

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """None: all slots cost the same."""
        return None

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Memory of the slots' states.

        Args:
            written_tokens: sequences that have begun.
        """
        written = min(int(np.sum(written_tokens)), int(self._has_place.sum()))
        num_pages = int(np.count_nonzero(self._page_users))
        written_bytes = written * self._shape.layout.num_bytes
        return CacheStats(written, written_bytes, num_pages * self._shape.page_bytes)

    def close(self) -> None:
        """Release all slots, then the addresses.

        Raises:
            InvariantError: checkpoints are held; they have to be dropped first.
        """
        for slot in [*np.flatnonzero(self._has_place).tolist(), *self._marks]:
            self.release(slot)
        if self._holds:
            raise InvariantError(f"{len(self._holds)} checkpoints are still held")
        self.tensors.close()

    def _begin_with(self, slot: int, source: int, num_tokens: int) -> bool:
        if not self.reserve(np.array([slot]), np.array([num_tokens])):
            return False
        self._num_forgotten[slot] = num_tokens - 1
        self._copy(source, slot)
        return True

    def _copy(self, source: int, target: int) -> None:
        """Request a copy; those of one launch do not depend on each other."""
        if source in self._targets or target in self._sources or target in self._targets:
            self.upload()
        shape = self._shape
        self.tensors.copy(shape.byte_of(source), shape.byte_of(target), shape.layout.num_bytes)
        self._sources.add(source)
        self._targets.add(target)

    def _leave(self, slot: int) -> None:
        """Give up pages that no other slot has."""
        pages = np.array(self._shape.pages_of(slot))
        self._page_users[pages] -= 1
        self._has_place[slot] = 0
        self._residency.give_up(pages[self._page_users[pages] == 0].tolist())
