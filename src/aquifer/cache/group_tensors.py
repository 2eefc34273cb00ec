"""The device's half of a cache of several parts: that of each part, and the layers in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aquifer.cache.group_view import GroupedView
from aquifer.cache.journal import InPart, KVOp, PartOp
from aquifer.cache.layout import LayerGroup
from aquifer.cache.part_tensors import PartTensors
from aquifer.cache.spans import Rows
from aquifer.cache.state_tensors import StateShape, StateTensors
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.cache.view import Workspaces
from aquifer.errors import InvariantError


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Addresses of the caches of several groups of layers, and of recurrent state.

    Attributes:
        parts: those of each group.
        groups: the groups.
        state: those of the state; None if no layer has any.
    """

    parts: tuple[KVShape, ...]
    groups: tuple[LayerGroup, ...]
    state: StateShape | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each layer, the index of its group, and its own index in that group."""
        places = {
            layer: (part, index)
            for part, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return [places[layer] for layer in range(len(places))]


class GroupedTensors:
    """The `DeviceCache` of several groups of layers, and of recurrent state.

    Each group has addresses, pages and tables of its own, and so has the state. Changes of all are
    recorded in their common order, so that a follower never needs more pages than the leader has.

    Args:
        parts: the device's half of each group.
        groups: the groups.
        state: the device's half of the state; None if no layer has any.

    Attributes:
        parts: those given, the state's last.
        shape: shape of the addresses.
    """

    def __init__(
        self,
        parts: Sequence[KVTensors],
        groups: Sequence[LayerGroup],
        state: StateTensors | None = None,
    ) -> None:
        self.parts: tuple[PartTensors, ...] = tuple(parts) if state is None else (*parts, state)
        self.shape = GroupedShape(
            tuple(part.shape for part in parts),
            tuple(groups),
            None if state is None else state.shape,
        )
        self._kv = tuple(parts)
        self._state = state
        self._places = self.shape.places
        # One for all groups, which attend one after the other.
        self._workspaces = Workspaces()
        self._journal: list[KVOp] | None = None
        self._note: Callable[[KVOp], None] | None = None  # called with each change

    def open(self) -> bool:
        """Take the anchors' pages, before any others; False means that the pool is short."""
        return all(part.open() for part in self.parts)

    def vacate(self) -> None:
        """See `PartTensors.vacate`."""
        for part in self.parts:
            part.vacate()

    def record(self, note: Callable[[KVOp], None] | None = None) -> None:
        """Begin to record all changes. Pre-condition: no page has been mapped yet.

        Args:
            note: called with each change, in place of keeping it for `take_journal`.
        """
        self._journal = []
        self._note = note or self._journal.append
        for index, part in enumerate(self.parts):
            part.record(partial(self._note_of, index))

    def take_journal(self) -> tuple[KVOp, ...]:
        """All changes since recording began, or since the last call, in order."""
        if self._journal is None:
            raise InvariantError("nothing was recorded")
        ops = tuple(self._journal)
        self._journal.clear()
        return ops

    def rehearse(self) -> None:
        """See `KVTensors.rehearse`."""
        for part in self.parts:
            part.rehearse()

    def view(self, rows: Rows) -> GroupedView:
        """See `KVTensors.view`."""
        views = [part.view(rows, self._workspaces) for part in self._kv]
        state = None if self._state is None else self._state.view(rows)
        return GroupedView(views, self._places, state)

    def _note_of(self, part: int, op: PartOp) -> None:
        assert self._note is not None
        self._note(InPart(part, op))
