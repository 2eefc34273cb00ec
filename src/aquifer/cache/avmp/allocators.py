"""Allocators of KV pages and state blocks: AVMP, the baselines of its paper, and shared pages.

All follow one rule (`SlotStore.allocate`), so that what differs is how bytes are divided:

- `PaddedUnified`: one store; a slot is as large as the larger of a KV page and a state block.
- `FixedDual`: a store for each, with a fixed split.
- `StaticPools`: the same behind virtual handles (AVMP without rebalancing).
- `DynamicPools`: AVMP; a store that is short gets slots of the other one.
- `SharedPages`: one pool of pages under both; a block of state is several pages. It is what virtual
  memory allows, since a block's addresses are contiguous whatever its pages are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial

from aquifer.cache.avmp.handles import Store, VirtualPageTable
from aquifer.cache.avmp.slots import EvictionRule, SharedSlotStore, SlotSizes, SlotStore
from aquifer.errors import InvariantError


class HybridAllocator(ABC):
    """Memory for the KV and the states of requests."""

    @abstractmethod
    def allocate(self, request: int, store: Store, count: int) -> Sequence[int] | None:
        """Allocate KV pages or state blocks, all or none.

        Args:
            request: the request's number.
            store: what for.
            count: number of pages or blocks; one at least.

        Returns: their ids; None if the allocator is out of memory.
        """

    @abstractmethod
    def end(self, request: int, ids: Sequence[int]) -> None:
        """Free all that a request still has.

        Args:
            request: the request's number.
            ids: all that it was ever given, in order.
        """

    def slot_of(self, given: int) -> int:
        """The slot that an id stands for."""
        return given

    def end_one(self, request: int, store: Store, given: int) -> None:
        """Free one page or block that a request still has.

        Args:
            request: the request's number.
            store: what it is.
            given: its id.
        """
        self.stores[min(store, len(self.stores) - 1)].free_one(request, self.slot_of(given))

    @property
    def num_moves(self) -> int:
        """How often slots were moved from a store to the other one."""
        return 0

    @property
    @abstractmethod
    def stores(self) -> Sequence[SlotStore]:
        """The stores of slots."""

    @property
    def lost(self) -> set[int]:
        """Requests that have lost memory."""
        return set().union(*(store.lost for store in self.stores))

    @property
    def num_evictions(self) -> int:
        """How often a request has lost its memory in a store to another one."""
        return sum(store.num_evictions for store in self.stores)


class PaddedUnified(HybridAllocator):
    """One store for pages and blocks, each padded to the larger of both.

    The paper's baseline gives out the numbers of slots themselves, which go to another request
    after an eviction; the first owner then frees them too.

    Args:
        sizes: of pages and blocks.
        num_bytes: of all memory.
        rule: what is done when there is too little.
        has_unique_ids: whether a slot that was evicted cannot be freed by its first owner.
    """

    def __init__(
        self,
        sizes: SlotSizes,
        num_bytes: int,
        rule: EvictionRule = "once",
        *,
        has_unique_ids: bool = False,
    ) -> None:
        kind = SlotStore if has_unique_ids else SharedSlotStore
        self._store = kind(max(sizes), num_bytes, rule)

    @property
    def stores(self) -> Sequence[SlotStore]:
        """See `HybridAllocator`."""
        return (self._store,)

    @property
    def num_stale(self) -> int:
        """Slots that were freed though another request had them."""
        return self._store.num_stale if isinstance(self._store, SharedSlotStore) else 0

    def allocate(self, request: int, store: Store, count: int) -> Sequence[int] | None:
        """See `HybridAllocator`. The ids are slots."""
        return self._store.allocate(request, count)

    def end(self, request: int, ids: Sequence[int]) -> None:
        """See `HybridAllocator`."""
        if isinstance(self._store, SharedSlotStore):
            self._store.free_numbers(request, ids)
        else:
            self._store.release(request)


class FixedDual(HybridAllocator):
    """A store for KV pages and one for state blocks, with a fixed split.

    Args:
        sizes: of pages and blocks.
        num_bytes: of all memory.
        state_share: the part of it for states, from 0 to 1.
        rule: what is done when a store has too little.
        takes_singly: see `SlotStore`.
    """

    def __init__(
        self,
        sizes: SlotSizes,
        num_bytes: int,
        state_share: float = 0.5,
        rule: EvictionRule = "once",
        *,
        takes_singly: bool = False,
    ) -> None:
        state_bytes = int(num_bytes * state_share)
        self._stores = (
            SlotStore(
                sizes.kv_page_bytes, num_bytes - state_bytes, rule, takes_singly=takes_singly
            ),
            SlotStore(sizes.state_bytes, state_bytes, rule, takes_singly=takes_singly),
        )

    @property
    def stores(self) -> Sequence[SlotStore]:
        """See `HybridAllocator`: that of KV pages, and that of state blocks."""
        return self._stores

    def allocate(self, request: int, store: Store, count: int) -> Sequence[int] | None:
        """See `HybridAllocator`. The ids are slots."""
        return self._stores[store].allocate(request, count)

    def end(self, request: int, ids: Sequence[int]) -> None:
        """See `HybridAllocator`."""
        for store in self._stores:
            store.release(request)


class StaticPools(FixedDual):
    """AVMP without rebalancing: two stores behind virtual handles.

    Args:
        sizes: of pages and blocks.
        num_bytes: of all memory.
        state_share: the part of it for states at the start, from 0 to 1.
        rule: what is done when a store has too little.

    Attributes:
        table: the slots of live handles.
    """

    def __init__(
        self,
        sizes: SlotSizes,
        num_bytes: int,
        state_share: float = 0.5,
        rule: EvictionRule = "once",
    ) -> None:
        super().__init__(sizes, num_bytes, state_share, rule, takes_singly=True)
        self.table = VirtualPageTable([store.slot_bytes for store in self._stores])
        for kind, store in zip(Store, self._stores, strict=True):
            store.on_freed = partial(self.table.remove, kind)

    def allocate(self, request: int, store: Store, count: int) -> Sequence[int] | None:
        """See `HybridAllocator`. The ids are handles."""
        slots = self._slots(request, store, count)
        return None if slots is None else self.table.add(store, slots)

    def slot_of(self, given: int) -> int:
        """See `HybridAllocator`: what the table has for a handle.

        Raises:
            InvariantError: the handle is dead.
        """
        found = self.table.resolve(given)
        if found is None:
            raise InvariantError(f"handle {given:#x} is dead")
        store, offset_bytes = found
        return offset_bytes // self._stores[store].slot_bytes

    def _slots(self, request: int, store: Store, count: int) -> list[int] | None:
        """Slots for a request, or None."""
        return self._stores[store].allocate(request, count)


class Pressure(Enum):
    """States of the rebalancing (AVMP, section 3.2, Fig. 2)."""

    BALANCED = auto()
    KV_PRESSURED = auto()
    STATE_PRESSURED = auto()
    REBALANCING = auto()


class DynamicPools(StaticPools):
    """AVMP: a store that has too little gets slots of the other one, in batches.

    The trigger is an allocation that fails, after what the rule evicts. The donor gives the highest
    of its slots, if no live one is among them: live data never moves. The paper's program looks at
    neither its thresholds nor its interval in that place; with `uses_thresholds` both count.

    Args:
        sizes: of pages and blocks.
        num_bytes: of all memory.
        state_share: the part of it for states at the start, from 0 to 1.
        rule: what is done when a store has too little, before it gets more.
        batch: slots that the donor gives at a time (`migration_batch_size`); of KV and of states,
            if these differ.
        uses_thresholds: whether the donor must have more than `threshold_high` of its slots free,
            the other store less than `threshold_low`, and enough calls have passed.
        threshold_low: a part of the slots, from 0 to 1.
        threshold_high: a part of the slots, from 0 to 1.
        min_interval_ops: calls of `allocate` and `end` between two migrations.

    Attributes:
        pressure: the state.
        num_rebalances: batches that were moved.
        num_refused: batches that could not be.
        migrated_bytes: of the donors' slots.
        wasted_bytes: what did not make a slot of the recipient.
    """

    def __init__(
        self,
        sizes: SlotSizes,
        num_bytes: int,
        state_share: float = 0.5,
        rule: EvictionRule = "once",
        *,
        batch: int | tuple[int, int] = 128,
        uses_thresholds: bool = False,
        threshold_low: float = 0.05,
        threshold_high: float = 0.30,
        min_interval_ops: int = 1000,
    ) -> None:
        super().__init__(sizes, num_bytes, state_share, rule)
        self.pressure = Pressure.BALANCED
        self.num_rebalances = self.num_refused = 0
        self.migrated_bytes = self.wasted_bytes = 0
        self._batches = (batch, batch) if isinstance(batch, int) else batch
        self._uses_thresholds = uses_thresholds
        self._threshold_low = threshold_low
        self._threshold_high = threshold_high
        self._min_interval_ops = min_interval_ops
        self._num_ops = 0  # the logical clock
        self._rebalanced_at: int | None = None

    @property
    def num_moves(self) -> int:
        """See `HybridAllocator`."""
        return self.num_rebalances

    def end(self, request: int, ids: Sequence[int]) -> None:
        """See `HybridAllocator`."""
        self._num_ops += 1
        super().end(request, ids)
        self.pressure = Pressure.BALANCED

    def end_one(self, request: int, store: Store, given: int) -> None:
        """See `HybridAllocator`."""
        self._num_ops += 1
        super().end_one(request, store, given)
        self.pressure = Pressure.BALANCED

    def _slots(self, request: int, store: Store, count: int) -> list[int] | None:
        self._num_ops += 1
        slots = super()._slots(request, store, count)
        if slots is not None:
            return slots
        self.pressure = Pressure.KV_PRESSURED if store is Store.KV else Pressure.STATE_PRESSURED
        if not self._rebalance(store):
            return None
        return self._stores[store].take(request, count)

    def _rebalance(self, store: Store) -> bool:
        """Move a batch of the other store's slots to this one; False, and no change, if refused."""
        donor, recipient = self._stores[1 - store], self._stores[store]
        batch = self._batches[1 - store]
        gained, wasted_bytes = divmod(batch * donor.slot_bytes, recipient.slot_bytes)
        if not (self._may_rebalance(donor, recipient) and donor.can_give(batch)):
            self.num_refused += 1
            return False
        self.pressure = Pressure.REBALANCING
        donor.shrink(batch)
        recipient.grow(gained)
        self.pressure = Pressure.BALANCED
        self.num_rebalances += 1
        self.migrated_bytes += batch * donor.slot_bytes
        self.wasted_bytes += wasted_bytes
        self._rebalanced_at = self._num_ops
        return True

    def _may_rebalance(self, donor: SlotStore, recipient: SlotStore) -> bool:
        """Whether thresholds and interval allow it, where they count."""
        if not self._uses_thresholds:
            return True
        if (
            self._rebalanced_at is not None
            and self._num_ops - self._rebalanced_at < self._min_interval_ops
        ):
            return False
        return (
            len(donor.free) > self._threshold_high * donor.num_slots
            and len(recipient.free) < self._threshold_low * recipient.num_slots
        )


class SharedPages(HybridAllocator):
    """One pool of pages under KV and states, without any split.

    Args:
        sizes: of pages and blocks. A page of the pool is a KV page; a block of state is as many
            pages as it needs.
        num_bytes: of all memory.
        rule: what is done when there is too little.
    """

    def __init__(self, sizes: SlotSizes, num_bytes: int, rule: EvictionRule = "once") -> None:
        self._store = SlotStore(sizes.kv_page_bytes, num_bytes, rule)
        self._pages = (1, -(-sizes.state_bytes // self._store.slot_bytes))

    @property
    def stores(self) -> Sequence[SlotStore]:
        """See `HybridAllocator`."""
        return (self._store,)

    def allocate(self, request: int, store: Store, count: int) -> Sequence[int] | None:
        """See `HybridAllocator`. The ids are pages."""
        return self._store.allocate(request, count * self._pages[store])

    def end(self, request: int, ids: Sequence[int]) -> None:
        """See `HybridAllocator`."""
        self._store.release(request)
