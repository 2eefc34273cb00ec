"""The device's half of recurrent state: addresses of all slots' states and of checkpoints.

address of a slot's state    first_byte + slot * num_bytes         packed, so they share pages
places of checkpoints        behind the slots, each on pages of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from aquifer.cache.layout import StateLayout
from aquifer.cache.part_tensors import PartTensors
from aquifer.cache.spans import Rows
from aquifer.cache.state_view import StateView
from aquifer.cache.tensors import check_addresses
from aquifer.memory.pool import Owner, PagePool

_MOST_CHECKPOINTS = 1 << 16


@dataclass(frozen=True, slots=True)
class StateShape:
    """Addresses of the states of all slots, and of checkpoints.

    Slot 0 is the anchor's (`aquifer.cache.tensors.KVShape`): kernels get the addresses of its
    tensors. On a GPU one page is mapped under all of it.
    """

    layout: StateLayout
    page_bytes: int
    num_slots: int
    num_checkpoints: int
    num_anchor_pages: int

    @classmethod
    def of(cls, pool: PagePool, layout: StateLayout, max_seqs: int, max_tokens: int) -> StateShape:
        """Places for `max_seqs` slots, and for as many checkpoints as the pool could hold.

        Raises:
            ConfigError: there are not so many addresses.
        """
        page_bytes = pool.page_bytes
        pages = -(-layout.num_bytes // page_bytes)
        num_checkpoints = min(pool.budget_bytes // (pages * page_bytes) + 1, _MOST_CHECKPOINTS)
        is_gpu = pool.driver.device.type == "cuda"
        shape = cls(layout, page_bytes, max_seqs + 1, num_checkpoints, pages if is_gpu else 0)
        check_addresses(shape.num_bytes, max_seqs, max_tokens)
        return shape

    @property
    def place_pages(self) -> int:
        """Pages of a checkpoint, and of slot 0."""
        return -(-self.layout.num_bytes // self.page_bytes)

    @property
    def first_byte(self) -> int:
        """Address of slot 0 in the range. Slot 1 begins where a page does."""
        return self.place_pages * self.page_bytes - self.layout.num_bytes

    @property
    def num_slot_pages(self) -> int:
        """Pages of all slots together."""
        return -(-(self.first_byte + self.num_slots * self.layout.num_bytes) // self.page_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of all addresses."""
        return (self.num_slot_pages + self.num_checkpoints * self.place_pages) * self.page_bytes

    def byte_of(self, place: int) -> int:
        """Where a place begins: that of a slot, or of a checkpoint, counted from `num_slots` on."""
        if place < self.num_slots:
            return self.first_byte + place * self.layout.num_bytes
        return self.pages_of(place).start * self.page_bytes

    def pages_of(self, place: int) -> range:
        """The pages under a place."""
        if place >= self.num_slots:
            first = self.num_slot_pages + (place - self.num_slots) * self.place_pages
            return range(first, first + self.place_pages)
        begin = self.byte_of(place)
        end = begin + self.layout.num_bytes
        return range(begin // self.page_bytes, -(-end // self.page_bytes))


class StateTensors(PartTensors):
    """Addresses and pages of states, as kernels see them.

    Args:
        pool: where pages come from.
        owner: owner of the pages of slots.
        shape: shape of the addresses.

    Attributes:
        shape: as given.
        layers: the tensors of each layer, [slots, *shape].
    """

    def __init__(self, pool: PagePool, owner: Owner, shape: StateShape) -> None:
        layout = shape.layout
        super().__init__(pool, owner, shape.num_bytes, layout.num_bytes, shape.num_anchor_pages)
        self.shape = shape
        self.layers = [
            [
                self.range.tensor(
                    (shape.num_slots, *each.shape),
                    each.dtype,
                    shape.first_byte + offset,
                    (layout.num_bytes // each.dtype.itemsize, *_strides(each.shape)),
                )
                for each, offset in zip(layer, offsets, strict=True)
            ]
            for layer, offsets in zip(layout.layers, layout.offsets(), strict=True)
        ]

    def view(self, rows: Rows) -> StateView:
        """The states of one step's sequences."""
        return StateView(self.layers, rows)

    def _map_anchor(self) -> bool:
        """Map one page under all of slot 0, which no kernel reads or writes."""
        if not self._anchor.populate([range(1)]):
            return False
        page = self.range.page(0)
        with ExitStack() as undo:
            undo.callback(self._anchor.give_up, [0])
            for index in range(1, self._num_anchor_pages):
                self._anchor.share([page])
                with ExitStack() as undo_share:
                    undo_share.callback(self._anchor.release, [page])
                    self._anchor.alias(index, [page])
                    undo_share.pop_all()
                undo.callback(self._anchor.give_up, [index])
            undo.pop_all()
        return True


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
