"""Virtual handles and the table that resolves them (AVMP, section 3.1, Fig. 1).

A handle is a number of 32 bits: the highest bit says which store it is of, the others number the
handles. A number comes again after all others, unless it is that of a live handle. The table has
the slot of each live handle, so that a handle of an evicted slot finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

_NUM_BITS = 31


class Store(IntEnum):
    """The two stores, with pages and blocks of different sizes."""

    KV = 0
    STATE = 1


def store_of(handle: int) -> Store:
    """The store that a handle is of."""
    return Store(handle >> _NUM_BITS)


class VirtualPageTable:
    """The slots of live handles, of both stores: a table with two resolutions.

    Args:
        slot_bytes: size of a slot of each store.
    """

    def __init__(self, slot_bytes: Sequence[int]) -> None:
        self._slot_bytes = tuple(slot_bytes)
        self._slots: dict[int, int] = {}
        self._handles: tuple[dict[int, int], dict[int, int]] = ({}, {})  # by slot
        self._next = 0
        self._is_first_round = True

    def __len__(self) -> int:
        """Live handles."""
        return len(self._slots)

    def add(self, store: Store, slots: Sequence[int]) -> list[int]:
        """Make handles of slots that were allocated."""
        first = (store << _NUM_BITS) | self._next
        if self._is_first_round and self._next + len(slots) <= 1 << _NUM_BITS:
            handles = list(range(first, first + len(slots)))
            self._next += len(slots)
        else:
            self._is_first_round = False
            handles = [self._free_handle(store) for _ in slots]
        self._slots.update(zip(handles, slots, strict=True))
        self._handles[store].update(zip(slots, handles, strict=True))
        return handles

    def _free_handle(self, store: Store) -> int:
        """The next handle that is not live."""
        while True:
            number = self._next % (1 << _NUM_BITS)
            self._next = number + 1
            handle = (store << _NUM_BITS) | number
            if handle not in self._slots:
                return handle

    def remove(self, store: Store, slots: Iterable[int]) -> None:
        """Forget the handles of slots that are freed or evicted."""
        handles = self._handles[store]
        for slot in slots:
            del self._slots[handles.pop(slot)]

    def resolve(self, handle: int) -> tuple[Store, int] | None:
        """The store of a handle and the offset of its slot there in bytes; None if it is dead."""
        slot = self._slots.get(handle)
        if slot is None:
            return None
        store = store_of(handle)
        return store, slot * self._slot_bytes[store]
