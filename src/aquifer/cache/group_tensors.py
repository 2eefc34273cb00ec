"""The device's half of a cache of several parts: that of each part, and the layers in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from aquifer.cache.journal import InPart, KVOp, PartOp
from aquifer.cache.layout import LayerGroup
from aquifer.cache.spans import Rows
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.cache.view import GroupedView, Workspaces
from aquifer.errors import InvariantError


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Addresses of the caches of several groups of layers.

    Attributes:
        parts: those of each group.
        groups: the groups.
    """

    parts: tuple[KVShape, ...]
    groups: tuple[LayerGroup, ...]

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
    """The `DeviceCache` of several groups of layers.

    Each group has addresses, pages and tables of its own. Changes of all groups are recorded in
    their common order, so that a follower never needs more pages than the leader has.

    Args:
        parts: the device's half of each group.
        groups: the groups.

    Attributes:
        parts: as given.
        shape: shape of the addresses.
    """

    def __init__(self, parts: Sequence[KVTensors], groups: Sequence[LayerGroup]) -> None:
        self.parts = tuple(parts)
        self.shape = GroupedShape(tuple(part.shape for part in parts), tuple(groups))
        self._places = self.shape.places
        # One for all groups, which attend one after the other.
        self._workspaces = Workspaces()
        self._journal: list[KVOp] | None = None

    def open(self) -> bool:
        """Take the anchors' pages, before any others; False means that the pool is short."""
        return all(part.open() for part in self.parts)

    def record(self) -> None:
        """Begin to record all changes. Pre-condition: no page has been mapped yet."""
        self._journal = []
        for index, part in enumerate(self.parts):
            part.record(partial(self._note, index))

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
        views = [part.view(rows, self._workspaces) for part in self.parts]
        return GroupedView(views, self._places)

    def _note(self, part: int, op: PartOp) -> None:
        assert self._journal is not None
        self._journal.append(InPart(part, op))
