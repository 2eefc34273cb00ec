"""Parameters in pool pages: their addresses, their pages and their contents.

Addresses stay for as long as the model is registered, while pages come and go, group by group
(`aquifer.weights.parameters`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import torch

from aquifer.errors import ConfigError
from aquifer.memory.pool import Owner, Page, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import Residency
from aquifer.sizes import format_size
from aquifer.weights.checkpoint import Checkpoint, StoredTensor
from aquifer.weights.dummy import fill_normal
from aquifer.weights.forms import Target
from aquifer.weights.loader import load_tensors, work_so_far
from aquifer.weights.parameters import (
    Parameter,
    ParameterGroup,
    Placement,
    check_sources,
    placed_bytes,
)

_ROOM_BYTES = 1 << 30  # what is evicted at a time: groups before are filled meanwhile
_FIRST_ROOM_BYTES = 64 << 20  # at first nothing is filled; each time twice as much


@dataclass(frozen=True, slots=True)
class Populated:
    """Groups of parameters, by number, that got pages.

    `same_as` has those that got the pages of other models: (group, name of the model, its group).
    """

    groups: tuple[int, ...]
    same_as: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Evicted:
    """Groups of parameters, by number, that lost their pages."""

    groups: tuple[int, ...]


WeightOp: TypeAlias = Populated | Evicted
"""What happened to the pages of parameters, for another process that does the same."""


class Filling(Protocol):
    """What fills groups of parameters that were given pages."""

    def begin(self, group: ParameterGroup) -> None:
        """A group has its pages, and may be written to from now on."""

    def cancel(self) -> None:
        """The groups are to lose their pages: nothing may write to them on return."""


class GroupPlace(NamedTuple):
    """A group of parameters of a store."""

    store: WeightStore
    group: ParameterGroup


class WeightStore:
    """The parameters of one model at addresses of their own, with pages of the pool under them.

    It holds no pages before `populate`. After `evict`, `populate` puts pages under the same
    addresses again, but without contents.

    Args:
        pool: where the pages come from.
        owner: the pages' owner.
        parameters: the model's parameters.

    Attributes:
        owner: as given.
        parameters: as given.
        placement: offsets of the parameters.
        groups: parameters that are resident or evicted as a whole.
        by_use: all groups in the order in which a step uses them first. The small parameters, which
            are the last group, are norms and biases of all layers.
        version: changes whenever groups get or lose their pages.
        record: called with each change of the pages, in order; None for no recording.

    Raises:
        DriverError: the addresses could not be reserved.
    """

    def __init__(self, pool: PagePool, owner: Owner, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.placement = placement = Placement.plan(parameters, pool.page_bytes)
        driver = pool.driver
        is_default = pool.page_bytes == driver.default_page_bytes  # else the size was chosen
        large_page_bytes = driver.large_page_bytes if is_default else pool.page_bytes
        self.groups = placement.groups(parameters, large_page_bytes)
        has_small = any(p.num_bytes < placement.page_bytes for p in parameters)
        self.by_use = (*self.groups[-1:], *self.groups[:-1]) if has_small else self.groups
        self._numbers = {group: number for number, group in enumerate(self.groups)}
        self.owner = owner
        self._pool = pool
        self._range = VirtualRange(pool.pages, placement.num_bytes, placement.page_bytes)
        ordinary = Residency(pool, owner, self._range)
        self._places = {
            group: [
                (ordinary, pages) if size == 1 else self._large_places(size, pages)
                for size, pages in group.stretches
            ]
            for group in self.groups
        }
        self.version = 0
        self.record: Callable[[WeightOp], None] | None = None
        self._resident: set[ParameterGroup] = set()
        self._num_resident_pages = 0  # of these
        self._missing: tuple[ParameterGroup, ...] | None = None  # the others, once asked for
        self._sizes_bytes = {p.name: p.num_bytes for p in self.parameters}

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by name; to be used only while they are resident."""
        return {
            p.name: self._range.tensor(p.shape, p.dtype, self.placement.offsets_bytes[p.name])
            for p in self.parameters
        }

    @property
    def resident(self) -> AbstractSet[ParameterGroup]:
        """Groups that have pages; it changes as they get and lose them."""
        return self._resident

    @property
    def is_resident(self) -> bool:
        """Whether all groups have pages."""
        return len(self._resident) == len(self.groups)

    @property
    def resident_bytes(self) -> int:
        """Bytes of pages of the groups that are resident."""
        return self._num_resident_pages * self.placement.page_bytes

    @property
    def missing(self) -> tuple[ParameterGroup, ...]:
        """Groups without pages, in the order in which a step uses them."""
        if self._missing is None:
            self._missing = tuple(group for group in self.by_use if group not in self._resident)
        return self._missing

    @property
    def missing_pages(self) -> int:
        """Number of ordinary pages that `populate` takes."""
        return self.placement.num_pages - self._num_resident_pages

    def populate(
        self,
        groups: Iterable[ParameterGroup] | None = None,
        same_as: Mapping[ParameterGroup, GroupPlace] | None = None,
        filling: Filling | None = None,
    ) -> bool:
        """Take pages for these groups, or for all; those that are resident stay as they are.

        All or nothing: False means that the pool is short, and nothing has changed. The caller then
        writes the contents with `load` or `fill_random`. Until then they are any bytes.

        Args:
            groups: the groups.
            same_as: groups of other stores with the same contents, of which the pages are mapped
                here too instead. Pre-condition: placed alike, and resident. None of the stores may
                write to them from now on.
            filling: begins to fill each new group while the next ones get their pages.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        missing = [
            g for g in (self.groups if groups is None else groups) if g not in self._resident
        ]
        same_as = same_as or {}
        with ExitStack() as undo, ExitStack() as stop:  # which comes first
            if filling is not None:
                stop.callback(filling.cancel)
            for group in missing:
                if group in same_as:
                    self._alias(group, same_as[group], undo)
            # Those with large pages first: while they are filled, the others get their many pages.
            new = [group for group in missing if group not in same_as]
            new.sort(key=lambda group: (-group.mean_page_units, group.num_pages))
            left_bytes = sum(group.num_pages for group in new) * self.placement.page_bytes
            room_bytes = _FIRST_ROOM_BYTES
            for group in new:
                group_bytes = group.num_pages * self.placement.page_bytes
                if self._pool.free_bytes < group_bytes:
                    self._pool.make_room(self.owner, max(min(left_bytes, room_bytes), group_bytes))
                    room_bytes = min(2 * room_bytes, _ROOM_BYTES)
                left_bytes -= group_bytes
                for residency, places in self.places(group):
                    if not residency.populate([places], is_overwritten=True):
                        return False
                    undo.callback(residency.give_up, places)
                if filling is not None:
                    filling.begin(group)
            stop.pop_all()
            undo.pop_all()
        for group in new:  # a page that was still here may have been another store's by the end
            self.own(group)
        self.version += 1
        self._missing = None
        self._resident.update(missing)
        self._num_resident_pages += sum(group.num_pages for group in missing)
        if self.record is not None and missing:
            shared = tuple(
                (self._numbers[group], other.store.owner.model, other.store.number_of(other.group))
                for group, other in same_as.items()
                if group in missing
            )
            self.record(Populated(tuple(self._numbers[group] for group in missing), shared))
        return True

    def number_of(self, group: ParameterGroup) -> int:
        """The index of a group in `groups`."""
        return self._numbers[group]

    def _alias(self, group: ParameterGroup, other: GroupPlace, undo: ExitStack) -> None:
        """Map the pages of a group of another store here."""
        for (residency, places), (theirs, their_places) in zip(
            self.places(group), other.store.places(other.group), strict=True
        ):
            pages = theirs.range.pages_at(their_places)
            residency.share(pages)
            try:
                residency.alias(places.start, pages)
            except BaseException:
                residency.release(pages)
                raise
            undo.callback(residency.give_up, places)

    def places(self, group: ParameterGroup) -> Sequence[tuple[Residency, range]]:
        """Where the pages of a group are, in order: large ones first."""
        return self._places[group]

    def _large_places(self, size: int, pages: range) -> tuple[Residency, range]:
        """Places of pages of several ordinary ones, under a part of the addresses."""
        page_bytes = self.placement.page_bytes
        address = self._range.address + pages.start * page_bytes
        part = VirtualRange(self._pool.pages, len(pages) * page_bytes, size * page_bytes, address)
        return Residency(self._pool, self.owner, part), range(part.num_pages)

    def parts(self, group: ParameterGroup) -> list[tuple[int, Sequence[Page]]]:
        """The pages of a group that is resident, in order: (their size in bytes, pages)."""
        return [
            (residency.range.page_bytes, residency.range.pages_at(places))
            for residency, places in self.places(group)
        ]

    def own(self, group: ParameterGroup) -> None:
        """Have the pages of a group accounted to this store, whichever they were accounted to."""
        for residency, places in self.places(group):
            self._pool.transfer(residency.range.pages_at(places), self.owner, is_shared=True)

    def bytes_of(self, group: ParameterGroup) -> torch.Tensor:
        """[n] uint8, the bytes of a group from its first parameter to its last; to be used only
        while it is resident."""
        return self._range.tensor((self.num_bytes_of(group),), torch.uint8, self._start_of(group))

    def num_bytes_of(self, group: ParameterGroup) -> int:
        """Bytes of a group from its first parameter to its last."""
        ends = (
            self.placement.offsets_bytes[name] + self._sizes_bytes[name] for name in group.names
        )
        return max(ends) - self._start_of(group)

    def _start_of(self, group: ParameterGroup) -> int:
        """Offset of a group among the addresses: that of its first page."""
        return group.first_page * self.placement.page_bytes

    def evict(self, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Give up the pages of these groups, or of all. Their addresses stay.

        The contents are lost, and the tensors must not be used before `populate`.
        """
        self.version += 1
        self._missing = None
        evicted: list[int] = []
        for group in self.groups if groups is None else groups:
            if group in self._resident:
                self._resident.remove(group)
                self._num_resident_pages -= group.num_pages
                for residency, places in self.places(group):
                    residency.give_up(places)
                evicted.append(self._numbers[group])
        if self.record is not None and evicted:
            self.record(Evicted(tuple(evicted)))

    def load(
        self,
        checkpoint: Checkpoint,
        on_bytes: Callable[[int], None] = lambda _: None,
        groups: Iterable[ParameterGroup] | None = None,
    ) -> None:
        """Read the parameters of these groups, or all, from disk in file order.

        May be called from another thread than the other methods; nothing else may use the groups.

        Args:
            checkpoint: the checkpoint.
            on_bytes: called after each stretch with its number of stored bytes.
            groups: with pages; None for all.

        Raises:
            ConfigError: a tensor is missing or has another shape; found before anything is read.
        """
        self._clear_padding(self.parameters_of(groups))
        load_tensors(self.jobs(checkpoint, groups), on_bytes)

    def jobs(
        self, checkpoint: Checkpoint, groups: Iterable[ParameterGroup] | None = None
    ) -> list[tuple[StoredTensor, Target]]:
        """Each stored tensor, or what is needed of it, and what that fills, in file order.

        Tensors that change what others have filled in come after these, wherever they are stored.

        Args:
            checkpoint: the checkpoint.
            groups: only those of these groups.

        Raises:
            ConfigError: a tensor is missing or has another shape.
        """
        parameters = self.parameters_of(groups)
        check_sources(checkpoint, parameters)
        placed: list[tuple[tuple[Path, int], StoredTensor, Target]] = []
        for parameter in parameters:
            latest = (Path(), 0)
            for source in parameter.sources:
                stored = checkpoint.tensors[source.name]
                at = (stored.file, stored.offset_bytes)
                if source.form.changes:
                    at = max(at, latest)
                latest = max(at, latest)
                tensor = self.tensors[parameter.name]
                placed += ((at, *job) for job in source.jobs(stored, parameter, tensor))
        placed.sort(key=lambda job: job[0])  # stable: at the same place, in the order of sources
        return [(stored, target) for _, stored, target in placed]

    def parameters_of(
        self, groups: Iterable[ParameterGroup] | None = None
    ) -> tuple[Parameter, ...]:
        """The parameters of these groups, or all, in the model's order."""
        if groups is None:
            return self.parameters
        names = {name for group in groups for name in group.names}
        return tuple(parameter for parameter in self.parameters if parameter.name in names)

    def fill_random(self, seed: int, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Fill parameters: vectors with 1 (norms) or 0 (biases), others with normal random numbers.

        With these, activations keep their magnitude from layer to layer, as in a real model. The
        numbers of a parameter depend on the seed and on its place among all: they are the same when
        it is filled again after an eviction. Those of a shard are the whole parameter's. They are
        there on return, also for copies on another stream.
        """
        places = {parameter.name: place for place, parameter in enumerate(self.parameters)}
        chosen = self.parameters_of(groups)
        for parameter in chosen:
            tensor = self.tensors[parameter.name]
            if tensor.dim() < 2:
                tensor.fill_(0 if parameter.name.endswith("bias") else 1)
                continue
            fill_normal(parameter, tensor, seed, places[parameter.name])
        self._clear_padding(chosen)
        filled = work_so_far(self._pool.driver.device)
        if filled is not None:
            filled.synchronize()

    def _clear_padding(self, parameters: Iterable[Parameter]) -> None:
        """Fill with zeros what nothing of a checkpoint fills."""
        for parameter in parameters:
            shard = parameter.shard
            if shard is not None and shard.padding:
                padding = slice(shard.size - shard.padding, shard.size)
                self.tensors[parameter.name].movedim(shard.dim, 0)[padding].zero_()

    def close(self) -> None:
        """Give pages and addresses back. The tensors must not be used any more."""
        self.tensors = {}
        self.evict()
        ranges = {residency.range for group in self.groups for residency, _ in self.places(group)}
        for range_ in (*(ranges - {self._range}), self._range):  # the whole after its parts
            self._pool.retired.settle(range_)
            range_.close()


def check_fits(pool: PagePool, model: str, parameters: Sequence[Parameter]) -> None:
    """Refuse weights that the whole pool could not hold, before they get addresses.

    Raises:
        ConfigError: they take more than its budget.
    """
    (weight_bytes,) = placed_bytes([parameters], pool.page_bytes)
    if weight_bytes > pool.budget_bytes:
        raise ConfigError(
            f"the weights of {model} take {format_size(weight_bytes)}, more than the "
            f"{format_size(pool.budget_bytes)} of the pool; raise --memory"
        )
