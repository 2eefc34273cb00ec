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
Its batch of 128 slots is therefore divided by the number of layers. Where KV and states have slots
of the same size, a block or a state has one for each layer.

Nothing is evicted: where a store has too few slots the scheduler lets requests wait, or preempts
one. Tokens behind a window are kept, and no prefixes are retained, since blocks that are only held
would take slots that nobody could take back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

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


class Division(NamedTuple):
    """What an allocator is made for.

    Args:
        sizes: of a slot for KV, and of one for states.
        num_bytes: of all memory.
        state_share: the part of it for states, where it is split.
        batch: slots of KV, and of states, that are moved at a time.
    """

    sizes: SlotSizes
    num_bytes: int
    state_share: float
    batch: tuple[int, int]


class Variant(NamedTuple):
    """A way to divide memory.

    Args:
        make: makes the allocator.
        by_layer: whether a slot is for one layer. So it is where KV and states are padded to the
            same size, which would be that of all layers' states otherwise.
    """

    make: Callable[[Division], HybridAllocator]
    by_layer: bool = False


VARIANTS = {
    "avmp": Variant(
        lambda of: DynamicPools(of.sizes, of.num_bytes, of.state_share, "never", batch=of.batch)
    ),
    "avmp-fixed": Variant(lambda of: FixedDual(of.sizes, of.num_bytes, of.state_share, "never")),
    "avmp-padded": Variant(
        lambda of: PaddedUnified(of.sizes, of.num_bytes, "never", has_unique_ids=True),
        by_layer=True,
    ),
}
"""The allocators by the names of the managers."""


class SlotsTakenError(Exception):
    """A store has too few slots."""


class Taken(NamedTuple):
    """The slots of a block of KV, or of a sequence's state.

    Args:
        request: the number of the call that took them, to the allocator.
        ids: what it gave: one, or one for each layer.
    """

    request: int
    ids: Sequence[int]


class Stores:
    """The slots of one model.

    They are made when the first is taken: then the model's weights are in their places, and the
    stores divide what the pool has left.

    Args:
        variant: how memory is divided.
        pool: the memory.
        layout: layout of one token's KV.
        block_size: tokens of a block.
        state: layout of a sequence's state; None if the model has none.

    Attributes:
        by_layer: whether a block or a state has a slot for each layer.
    """

    def __init__(
        self,
        variant: Variant,
        pool: PagePool,
        layout: KVLayout,
        block_size: int,
        state: StateLayout | None,
    ) -> None:
        self.by_layer = variant.by_layer
        self._make = variant.make
        self._pool = pool
        self._block_bytes = block_size * layout.token_bytes
        self._state_bytes = 0 if state is None else state.num_bytes
        num_state_layers = 0 if state is None else len(state.layers)
        self._batch_states = max(_BATCH // max(num_state_layers, 1), 1)
        # Slots of a block, and of a state.
        self._units = (1, 1)
        if variant.by_layer:
            self._units = (max(len(layout.layers), 1), max(num_state_layers, 1))
        self._allocator: HybridAllocator | None = None
        self._requests = count()

    @property
    def allocator(self) -> HybridAllocator:
        """The allocator. To it, what is taken at once is a request, which ends slot by slot."""
        if self._allocator is None:
            kv_bytes, state_bytes = self._block_bytes, self._state_bytes
            sizes = SlotSizes(
                max(-(-kv_bytes // self._units[Store.KV]), 1),
                max(-(-state_bytes // self._units[Store.STATE]), 1),
            )
            # What the model does not have gets no slots. Batches have about the same bytes.
            share = 0.5 if state_bytes and kv_bytes else float(state_bytes > 0)
            batch_kv = -(-self._batch_states * state_bytes // kv_bytes) if kv_bytes else 1
            self._allocator = self._make(
                Division(
                    sizes, self._pool.free_bytes, share, (max(batch_kv, 1), self._batch_states)
                )
            )
        return self._allocator

    def take(self, store: Store, number: int) -> list[Taken]:
        """Take the slots of blocks or states, of all or of none.

        Raises:
            SlotsTakenError: there are too few; nothing was taken, though slots may have been moved
                to this store.
        """
        if not number:
            return []
        allocator, request, units = self.allocator, next(self._requests), self._units[store]
        while True:
            num_moves = allocator.num_moves
            ids = allocator.allocate(request, store, number * units)
            if ids is not None:
                return [
                    Taken(request, ids[start : start + units])
                    for start in range(0, len(ids), units)
                ]
            if allocator.num_moves == num_moves:
                raise SlotsTakenError

    def give(self, store: Store, taken: Taken) -> None:
        """Give back the slots of a block or of a state."""
        for given in taken.ids:
            self.allocator.end_one(taken.request, store, given)

    def slot_of(self, taken: Taken) -> int:
        """The slot, where it is one."""
        (given,) = taken.ids
        return self.allocator.slot_of(given)


class StoreBlocks(FreeBlocks):
    """Blocks with slots of a KV store, and the numbers of these slots.

    Where each layer has a slot, the lowest free blocks are taken.

    Args:
        stores: the slots.
        first: the first block: that of slot 0.
        end: number of blocks.
    """

    def __init__(self, stores: Stores, first: int, end: int) -> None:
        super().__init__(first, end)
        self._stores = stores
        self._first = first
        self._taken: dict[int, Taken] = {}  # by block

    def take(self, count: int) -> IntArray:
        """Take blocks.

        Raises:
            SlotsTakenError: the store has too few slots; nothing has changed.
        """
        taken = self._stores.take(Store.KV, count)
        if self._stores.by_layer:
            blocks = super().take(count)
        else:
            blocks = np.array([self._stores.slot_of(each) for each in taken], np.int64)
            blocks += self._first
        self._taken.update(zip(blocks.tolist(), taken, strict=True))
        return blocks

    def put(self, blocks: IntArray) -> None:
        """Give blocks back."""
        for block in blocks.tolist():
            self._stores.give(Store.KV, self._taken.pop(block))
        if self._stores.by_layer:
            super().put(blocks)


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
        shape = self.tensors.shape
        self._free = StoreBlocks(stores, shape.first_row, shape.num_rows)

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
        self._taken: dict[int, Taken] = {}  # by slot of the engine

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Take slots of the store for sequences that have none yet, and map their pages."""
        new = [
            slot
            for slot in slots[(num_tokens > 0) & (self.ends(slots) == 0)].tolist()
            if slot not in self._taken
        ]
        try:
            taken = self._stores.take(Store.STATE, len(new))
        except SlotsTakenError:
            return False
        with ExitStack() as undo:
            for each in taken:
                undo.callback(self._stores.give, Store.STATE, each)
            if not super().reserve(slots, num_tokens):
                return False
            undo.pop_all()
        self._taken.update(zip(new, taken, strict=True))
        return True

    def _leave(self, slot: int) -> None:
        """Give up the slot's pages, and its slot of the store."""
        super()._leave(slot)
        self._stores.give(Store.STATE, self._taken.pop(slot))


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
        self.stores = Stores(VARIANTS[variant], pool, kept, block_size, state)
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
