"""AVMP's allocators as managers of the engine: they decide how many sequences run at once.

A model's memory is divided by one of the allocators, which knows nothing of pages: a slot of its KV
store is a block of `aquifer.cache.paged`, and a slot of its state store the state of a sequence.

blocks of KV    numbered as the slots that the handles resolve to; kernels read them from block
                tables
states          at the address of the sequence's slot in the engine, since kernels find them by it;
                the state store counts them
pages           mapped under blocks and states while these are in use, and never more than a store
                has slots for: to move slots to the other store moves no byte, and what the stores
                have together is never more than the pool had free when the first sequence began

All layers of a token lie side by side here, so a slot holds what AVMP keeps in one for each layer.
Its batch of 128 slots is therefore divided by the number of layers.

Nothing is evicted: where a store has too few slots the scheduler lets requests wait, or preempts
one. Tokens behind a window are kept, and no prefixes are retained, since blocks that are only held
would take slots that nobody could take back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from aquifer.cache.avmp.allocators import DynamicPools, FixedDual, HybridAllocator, PaddedUnified
from aquifer.cache.avmp.handles import Store
from aquifer.cache.avmp.slots import SlotSizes
from aquifer.cache.base import IntArray, KVLayout, KVPart, StateLayout
from aquifer.cache.free_blocks import FreeBlocks
from aquifer.cache.groups import GroupedCache
from aquifer.cache.paged import PagedCache
from aquifer.cache.state import StateCache
from aquifer.cache.virtual import VirtualCache
from aquifer.errors import ConfigError
from aquifer.memory.pool import Owner, PagePool

_BATCH = 128
"""Slots of one layer that AVMP moves at a time, of states."""

MakeStores = Callable[[SlotSizes, int, float, tuple[int, int]], HybridAllocator]
"""Makes an allocator, given sizes, bytes, the part of them for states, and what is moved at a time:
slots of KV, and slots of states."""


def _dynamic(
    sizes: SlotSizes, num_bytes: int, state_share: float, batch: tuple[int, int]
) -> HybridAllocator:
    return DynamicPools(sizes, num_bytes, state_share, "never", batch=batch)


def _fixed(
    sizes: SlotSizes, num_bytes: int, state_share: float, _: tuple[int, int]
) -> HybridAllocator:
    return FixedDual(sizes, num_bytes, state_share, "never")


def _padded(sizes: SlotSizes, num_bytes: int, _: float, __: tuple[int, int]) -> HybridAllocator:
    return PaddedUnified(sizes, num_bytes, "never", has_unique_ids=True)


VARIANTS: dict[str, MakeStores] = {"avmp": _dynamic, "avmp-fixed": _fixed, "avmp-padded": _padded}
"""The allocators by the names of the managers."""


class SlotsTakenError(Exception):
    """A store has too few slots."""


class Stores:
    """The slots of one model.

    They are made when the first is taken: then the model's weights are in their places, and the
    stores divide what the pool has left.

    Args:
        make: makes the allocator.
        pool: the memory.
        block_bytes: KV of a block in all layers; 0 if the model has no KV.
        state: layout of a sequence's state; None if the model has none.
    """

    def __init__(
        self, make: MakeStores, pool: PagePool, block_bytes: int, state: StateLayout | None
    ) -> None:
        self._make = make
        self._pool = pool
        self._block_bytes = block_bytes
        self._state = state
        self._allocator: HybridAllocator | None = None
        self._requests = count()
        # What each slot was taken as: the number of its request, and its id.
        self._taken: dict[tuple[Store, int], tuple[int, int]] = {}

    @property
    def allocator(self) -> HybridAllocator:
        """The allocator. To it, each slot is a request: a sequence gives them back one by one."""
        if self._allocator is None:
            num_bytes = self._pool.free_bytes
            state_bytes = 0 if self._state is None else self._state.num_bytes
            # What the model does not have gets no slots.
            share = 0.5 if state_bytes and self._block_bytes else float(state_bytes > 0)
            sizes = SlotSizes(max(self._block_bytes, 1), max(state_bytes, 1))
            self._allocator = self._make(sizes, num_bytes, share, self._batches(state_bytes))
        return self._allocator

    def take(self, store: Store, num_slots: int) -> list[int]:
        """Take slots of a store, all or none.

        Returns: their numbers.

        Raises:
            SlotsTakenError: there are too few; nothing was taken, though slots may have been moved
                to this store.
        """
        taken: list[int] = []
        with ExitStack() as undo:
            for _ in range(num_slots):
                request = next(self._requests)
                ids = self.allocator.allocate(request, store, 1)
                if ids is None:
                    raise SlotsTakenError
                slot = self.allocator.slot_of(ids[0])
                self._taken[store, slot] = request, ids[0]
                taken.append(slot)
                undo.callback(self.give, store, slot)
            undo.pop_all()
        return taken

    def give(self, store: Store, slot: int) -> None:
        """Give back a slot that was taken."""
        request, taken_id = self._taken.pop((store, slot))
        self.allocator.end(request, [taken_id])

    def _batches(self, state_bytes: int) -> tuple[int, int]:
        """Slots of KV, and of states, that are moved at a time: about the same bytes."""
        if self._state is None or not self._block_bytes:
            return 1, 1
        of_states = max(_BATCH // len(self._state.layers), 1)
        return -(-of_states * state_bytes // self._block_bytes), of_states


class StoreBlocks(FreeBlocks):
    """Blocks that are the slots of a KV store.

    Args:
        stores: the slots.
        first: the block of slot 0.
    """

    def __init__(self, stores: Stores, first: int) -> None:
        super().__init__(first, first)
        self._stores = stores
        self._first = first

    def take(self, count: int) -> IntArray:
        """Take blocks.

        Raises:
            SlotsTakenError: the store has too few slots; nothing has changed.
        """
        return np.array(self._stores.take(Store.KV, count), np.int64) + self._first

    def put(self, blocks: IntArray) -> None:
        """Give blocks back."""
        for slot in (blocks - self._first).tolist():
            self._stores.give(Store.KV, slot)


class StoredKV(PagedCache):
    """A paged cache whose blocks are the slots of a KV store.

    Args:
        stores: the slots.
        block_size: tokens of a block.
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token; it has layers.
        max_seqs: number of slots of the engine.
        max_tokens: length of the longest sequence.
    """

    def __init__(
        self,
        stores: Stores,
        block_size: int,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
    ) -> None:
        super().__init__(pool, owner, layout, max_seqs, max_tokens, block_size=block_size)
        self._free = StoreBlocks(stores, self.tensors.shape.first_row)

    def _try_claim(self, count: int) -> IntArray | None:
        """One attempt, which also fails where the store has too few slots."""
        try:
            return super()._try_claim(count)
        except SlotsTakenError:
            return None


class StoredStates(StateCache):
    """States, of which no more have a place at once than their store has slots.

    Args:
        stores: the slots.
        pool: where pages come from.
        owner: owner of the KV of the same sequences.
        layout: layout of one sequence's state.
        max_seqs: number of slots of the engine.
        max_tokens: length of the longest sequence.
    """

    def __init__(
        self,
        stores: Stores,
        pool: PagePool,
        owner: Owner,
        layout: StateLayout,
        max_seqs: int,
        max_tokens: int,
    ) -> None:
        super().__init__(pool, owner, layout, max_seqs, max_tokens)
        self._stores = stores
        self._slots: dict[int, int] = {}  # slot of the store, by slot of the engine

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Take slots of the store for sequences that have none yet, and map their pages."""
        new = [
            slot
            for slot in slots[(num_tokens > 0) & (self.ends(slots) == 0)].tolist()
            if slot not in self._slots
        ]
        try:
            taken = self._stores.take(Store.STATE, len(new))
        except SlotsTakenError:
            return False
        with ExitStack() as undo:
            for place in taken:
                undo.callback(self._stores.give, Store.STATE, place)
            if not super().reserve(slots, num_tokens):
                return False
            undo.pop_all()
        self._slots.update(zip(new, taken, strict=True))
        return True

    def _leave(self, slot: int) -> None:
        """Give up the slot's pages, and its slot of the store."""
        super()._leave(slot)
        self._stores.give(Store.STATE, self._slots.pop(slot))


class AvmpCache(GroupedCache):
    """The `SequenceCache` of KV and states in the slots of an allocator.

    Args:
        variant: one of `VARIANTS`.
        block_size: tokens of a block.
        max_step_tokens: tokens of the largest step; None for as many as a sequence may have.
        pool: where pages come from.
        owner: the pages' owner.
        layout: layout of one token's KV. Tokens behind windows are kept.
        max_seqs: number of slots of the engine, which are numbered from 1.
        max_tokens: length of the longest sequence.
        state: layout of one sequence's recurrent state; None if no layer has any.

    Attributes:
        can_share: no blocks are retained, so there is no prefix cache.
        stores: the slots.

    Raises:
        ConfigError: there is no such variant.
    """

    can_share = False

    def __init__(
        self,
        variant: str,
        block_size: int,
        max_step_tokens: int | None,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        state: StateLayout | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise ConfigError(f"unknown variant {variant!r}; choose one of {', '.join(VARIANTS)}")
        layers = tuple(replace(layer, window_tokens=None) for layer in layout.layers)
        kept = KVLayout(layers, layout.dtype)
        self.stores = Stores(VARIANTS[variant], pool, block_size * kept.token_bytes, state)
        super().__init__(
            partial(_kv, self.stores, block_size),
            pool,
            owner,
            kept,
            max_seqs,
            max_tokens,
            max_step_tokens,
            state,
            make_state=partial(StoredStates, self.stores),
        )

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Share the parent's blocks, in place of those that the child was given to begin with."""
        self.release(child)
        return super().fork(parent, child, num_tokens)


def _kv(
    stores: Stores,
    block_size: int,
    pool: PagePool,
    owner: Owner,
    layout: KVLayout,
    max_seqs: int,
    max_tokens: int,
) -> KVPart:
    """A `StoredKV`; without KV a `VirtualCache`, since blocks would have no bytes."""
    if not layout.token_bytes:
        return VirtualCache(pool, owner, layout, max_seqs, max_tokens)
    return StoredKV(stores, block_size, pool, owner, layout, max_seqs, max_tokens)
