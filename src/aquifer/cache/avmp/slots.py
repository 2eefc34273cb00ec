"""Slots of one size, who has them, and whose are taken when there are too few (AVMP, section 3.1).

A store keeps a stack of free slot numbers: at first the lowest number is on top, and what is freed
goes on top in the order in which it is freed. Each request that has slots is in the store's ledger,
in order of its last successful allocation there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

SLAB_ALIGNMENT = 128
"""Each slot takes a multiple of this many bytes."""

EvictionRule = Literal["once", "until it fits", "never"]
"""What is done for a request that finds too few slots: the slots of the request that was touched
longest ago are taken, and it is tried again once (as in the paper's program), or until it fits or
nothing is left, or nothing is taken."""


class SlotSizes(NamedTuple):
    """Sizes of what a hybrid model keeps.

    Args:
        kv_page_bytes: KV of a page of tokens in one attention layer.
        state_bytes: state of a sequence in one recurrent layer.
    """

    kv_page_bytes: int
    state_bytes: int


def aligned(num_bytes: int) -> int:
    """The bytes that a slot of so many bytes takes."""
    return -(-num_bytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


class SlotStore:
    """Slots of one size, with a ledger of the requests that have them.

    Args:
        slot_bytes: size of a slot; it is rounded up.
        num_bytes: bytes of all slots.
        rule: what is done when there are too few.
        takes_singly: whether slots are taken one by one, and put back if there are too few. That
            reverses the stack of the free ones.

    Attributes:
        slot_bytes: size of a slot.
        num_slots: number of slots, free or not.
        free: the free slots, the next one last.
        ledger: slots of each request in order of allocation; the request that was touched longest
            ago is first.
        lost: requests of which slots were evicted, or freed by others, since they began.
        num_evictions: how often a request has lost its slots to another one.
        on_freed: called with slots that are freed or evicted.
    """

    def __init__(
        self,
        slot_bytes: int,
        num_bytes: int,
        rule: EvictionRule = "once",
        *,
        takes_singly: bool = False,
    ) -> None:
        self.slot_bytes = aligned(slot_bytes)
        self.num_slots = num_bytes // self.slot_bytes
        self.free = list(range(self.num_slots - 1, -1, -1))
        self.ledger: OrderedDict[int, dict[int, None]] = OrderedDict()
        self.lost: set[int] = set()
        self.num_evictions = 0
        self.on_freed: Callable[[Collection[int]], None] = lambda _: None
        self._rule = rule
        self._takes_singly = takes_singly

    def allocate(self, request: int, count: int) -> list[int] | None:
        """Take slots for a request, all or none; evicts others by the rule.

        Returns: the slots; None if there are too few. What was evicted stays evicted then.
        """
        slots = self.take(request, count)
        if slots is not None or self._rule == "never":
            return slots
        self.evict()
        slots = self.take(request, count)
        while slots is None and self._rule == "until it fits" and self.evict():
            slots = self.take(request, count)
        return slots

    def take(self, request: int, count: int) -> list[int] | None:
        """Take free slots for a request, all or none; None if there are too few."""
        if count > len(self.free):
            if self._takes_singly:
                self.free.reverse()
            return None
        slots = self.free[: -count - 1 : -1]
        del self.free[-count:]
        self.ledger.setdefault(request, {}).update(dict.fromkeys(slots))
        self.ledger.move_to_end(request)
        return slots

    def evict(self) -> bool:
        """Take all slots of the request that was touched longest ago; False if there is none."""
        if not self.ledger:
            return False
        request, slots = self.ledger.popitem(last=False)
        self.free.extend(slots)
        self.on_freed(slots)
        self.lost.add(request)
        self.num_evictions += 1
        return True

    def release(self, request: int) -> None:
        """Free all slots that a request still has, in order of their allocation."""
        slots = self.ledger.pop(request, {})
        self.free.extend(slots)
        self.on_freed(slots)

    def free_one(self, request: int, slot: int) -> None:
        """Free one of the slots that a request has."""
        left = self.ledger[request]
        del left[slot]
        if not left:
            del self.ledger[request]
        self.free.append(slot)
        self.on_freed((slot,))

    def can_give(self, count: int) -> bool:
        """Whether the highest slots exist and are free."""
        first = self.num_slots - count
        if first < 0 or len(self.free) < count:
            return False
        return not any(slot >= first for slots in self.ledger.values() for slot in slots)

    def shrink(self, count: int) -> None:
        """Give up the highest slots. Pre-condition: `can_give`."""
        self.num_slots -= count
        self.free = [slot for slot in self.free if slot < self.num_slots]

    def grow(self, count: int) -> None:
        """Add slots after the highest one; the last one of them is the next to be taken."""
        self.free.extend(range(self.num_slots, self.num_slots + count))
        self.num_slots += count


class SharedSlotStore(SlotStore):
    """Slots that are freed by number, whoever has them by then.

    A request that lost its slots frees the same numbers when it ends, and so takes them from their
    new owner.

    Attributes:
        num_stale: slots that were freed though another request had them.
    """

    def __init__(self, slot_bytes: int, num_bytes: int, rule: EvictionRule = "once") -> None:
        super().__init__(slot_bytes, num_bytes, rule)
        self.num_stale = 0
        self._owners: dict[int, int] = {}

    def take(self, request: int, count: int) -> list[int] | None:
        """See `SlotStore`."""
        slots = super().take(request, count)
        if slots is not None:
            self._owners.update(dict.fromkeys(slots, request))
        return slots

    def evict(self) -> bool:
        """See `SlotStore`."""
        if self.ledger:
            for slot in next(iter(self.ledger.values())):
                del self._owners[slot]
        return super().evict()

    def free_numbers(self, request: int, slots: Sequence[int]) -> None:
        """Free slots by number, for a request that ends.

        Args:
            request: the request.
            slots: what it was ever given; what nobody has is ignored.
        """
        for slot in dict.fromkeys(slots):
            owner = self._owners.pop(slot, None)
            if owner is None:
                continue
            if owner != request:
                self.num_stale += 1
                self.lost.add(owner)
            left = self.ledger[owner]
            del left[slot]
            if not left:
                del self.ledger[owner]
            self.free.append(slot)
