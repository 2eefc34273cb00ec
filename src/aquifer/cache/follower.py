"""Follower: a KV cache without a manager that executes the journal of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from aquifer.cache.group_tensors import GroupedShape, GroupedTensors
from aquifer.cache.group_view import GroupedView
from aquifer.cache.journal import CopiedIn, CopiedOut, Copies, Entered, InPart, KVOp
from aquifer.cache.part_tensors import PartTensors
from aquifer.cache.spans import Rows
from aquifer.cache.state_tensors import StateTensors
from aquifer.cache.swap_memory import SwapMemory
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.cache.view import StepView
from aquifer.errors import InvariantError
from aquifer.memory.pages import Page
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.residency import (
    Abandoned,
    Aliased,
    Begun,
    GivenUp,
    Mapped,
    PendingPages,
    Released,
    Residency,
    Shared,
)
from aquifer.memory.runs import runs


class _Coming:
    """Pages that are being mapped in the background.

    Args:
        residency: of the range.
        pending: what is under way there.
    """

    def __init__(self, residency: Residency, pending: PendingPages) -> None:
        self._residency = residency
        self._pending = pending
        self._are_there: bool | None = None

    def arrive(self) -> bool:
        """Wait for them; False if the device has refused."""
        if self._are_there is None:
            self._are_there = self._residency.settle(self._pending)
        return self._are_there


class PartFollower:
    """Executes the journal of a part of a leader's cache on a range and pages of its own.

    A runner in another process, or another rank of a tensor-parallel group, follows the plans of
    one scheduler in this way: it executes what was recorded before a step, then runs the step.

    Args:
        tensors: the device's half, of a pool that has room for all pages of the leader.

    Attributes:
        tensors: as given.
    """

    def __init__(self, tensors: PartTensors) -> None:
        self.tensors = tensors
        self._own: dict[Page, Page] = {}  # the leader's pages in use -> this follower's
        self._references: Counter[Page] = Counter()  # of the leader's pages: places and holds
        self._at: dict[int, Page] = {}  # the leader's page at each place that was not given up
        self._holds: Counter[Page] = Counter()  # the part of `_references` without a place
        self._coming: dict[int, _Coming] = {}  # by place: pages that the leader has begun to map

    def open(self) -> None:
        """Take the anchor's pages, before any others.

        Raises:
            InvariantError: the pool is short.
        """
        if not self.tensors.open():
            raise InvariantError("the follower's pool has no room for the leader's pages")

    def execute(self, ops: Iterable[KVOp], host_memory: SwapMemory | None = None) -> None:
        """Execute recorded changes, in order.

        Args:
            ops: as `KVTensors.take_journal` returned them; none may be left out.
            host_memory: where this process keeps what is copied out.

        Raises:
            DriverError: the device refused. The follower cannot be used any more.
            InvariantError: the pool is short.
        """
        self.open()
        for op in ops:
            self.follow(op, host_memory)
        self.tensors.flush()

    def rehearse(self) -> None:
        """Launch the kernels that `execute` may launch over nothing, to compile or load them."""
        self.tensors.rehearse()

    def close(self) -> None:
        """Give up all pages and the addresses."""
        residency = self.tensors.pages
        self._abandon(list(self._coming))
        residency.release([self._own[page] for page in self._holds.elements()])
        residency.give_up(sorted(self._at))
        self.tensors.close()

    def follow(self, op: KVOp, host_memory: SwapMemory | None) -> None:
        """Execute one change; see `execute`. New table entries are not sent to the device."""
        tensors, residency = self.tensors, self.tensors.pages
        match op:
            case Mapped(index, pages, units):
                indices = range(index, index + len(pages) * units)
                places = list(indices[::units])
                self._populate(indices, units)
                self._own.update(zip(pages, tensors.range.pages_at(places), strict=True))
                self._at.update(zip(places, pages, strict=True))
                self._references.update(pages)
            case Begun(stretches):
                self._begin(stretches)
            case Abandoned(stretches):
                self._abandon(list(chain.from_iterable(stretches)))
            case Aliased(index, pages):
                own = [self._own[page] for page in pages]
                residency.alias(index, own)
                self._at.update(zip(residency.places(index, own), pages, strict=True))
                self._holds.subtract(pages)
            case GivenUp(indices):
                residency.give_up(indices)
                self._forget([self._at.pop(index) for index in indices])
            case Shared(pages):
                residency.share([self._own[page] for page in pages])
                self._references.update(pages)
                self._holds.update(pages)
            case Released(pages):
                residency.release([self._own[page] for page in pages])
                self._holds.subtract(pages)
                self._forget(pages)
            case Entered():
                self._enter(op)
            case Copies(pieces):
                for piece in pieces:
                    tensors.copy(*piece)
                tensors.make_copies()
            case CopiedOut(offset_bytes, host_bytes, num_bytes):
                part = _part(host_memory, host_bytes, num_bytes)
                tensors.copy_out(offset_bytes, part)
            case CopiedIn(offset_bytes, host_bytes, num_bytes):
                part = _part(host_memory, host_bytes, num_bytes)
                tensors.copy_in(offset_bytes, part)

    def _begin(self, stretches: Sequence[range]) -> None:
        """Begin to map pages as the leader has, where that takes no call of the driver here.

        What is not begun is mapped when the leader has its pages.
        """
        residency = self.tensors.pages
        if any(residency.left_at(stretch) for stretch in stretches):
            return
        pending = residency.populate_later(stretches)
        if pending is not None:
            coming = _Coming(residency, pending)
            self._coming.update(dict.fromkeys(chain.from_iterable(stretches), coming))

    def _populate(self, indices: range, units: int) -> None:
        """Put pages under places, some of which may be on their way."""
        missing = [indices]
        if not self._coming.keys().isdisjoint(indices):
            coming = [(index, self._coming.pop(index, None)) for index in indices]
            left = [index for index, pages in coming if pages is None or not pages.arrive()]
            missing = [range(left[start], left[end - 1] + 1) for start, end in runs(left)]
        if missing and not self.tensors.pages.populate(missing, units=units):
            raise InvariantError("the follower's pool has no room for the leader's pages")

    def _abandon(self, places: Sequence[int]) -> None:
        """Give up what is on its way to places."""
        coming = [(place, self._coming.pop(place, None)) for place in places]
        self.tensors.pages.give_up(
            [place for place, pages in coming if pages is not None and pages.arrive()],
            is_untouched=True,
        )

    def _enter(self, op: Entered) -> None:
        raise InvariantError(f"{op} is of no part with a table")

    def _forget(self, pages: Sequence[Page]) -> None:
        """Remove one reference from each of the leader's pages."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page], self._own[page], self._holds[page]


class KVFollower(PartFollower):
    """The follower of KV.

    Args:
        pool: where pages come from; it must have room for all pages of the leader.
        owner: the pages' owner.
        shape: the leader's (`KVTensors.shape`).
    """

    tensors: KVTensors

    def __init__(self, pool: PagePool, owner: Owner, shape: KVShape) -> None:
        super().__init__(KVTensors(pool, owner, shape))

    def view(self, rows: Rows) -> StepView:
        """The addresses of one step."""
        return self.tensors.view(rows)

    def _enter(self, op: Entered) -> None:
        self.tensors.enter(np.array(op.slots), np.array(op.indices), np.array(op.blocks))


class GroupedFollower:
    """The `KVFollower` of a cache of several parts (`aquifer.cache.group_tensors`).

    Args:
        pool: where pages come from; it must have room for all pages of the leader.
        owner: the pages' owner.
        shape: the leader's (`GroupedTensors.shape`).

    Attributes:
        parts: the follower of each part.
    """

    def __init__(self, pool: PagePool, owner: Owner, shape: GroupedShape) -> None:
        kv = [KVFollower(pool, owner, part) for part in shape.parts]
        self.parts: list[PartFollower] = [*kv]
        state: StateTensors | None = None
        if shape.state is not None:
            state = StateTensors(pool, Owner(owner.model, Kind.STATE), shape.state)
            self.parts.append(PartFollower(state))
        self._tensors = GroupedTensors([part.tensors for part in kv], shape.groups, state)

    def execute(self, ops: Iterable[KVOp], host_memory: SwapMemory | None = None) -> None:
        """See `KVFollower.execute`."""
        for part in self.parts:
            part.open()
        for op in ops:
            if not isinstance(op, InPart):
                raise InvariantError(f"{op} is of no part")
            self.parts[op.part].follow(op.op, host_memory)
        for part in self.parts:
            part.tensors.flush()

    def view(self, rows: Rows) -> GroupedView:
        """The addresses of one step."""
        return self._tensors.view(rows)

    def rehearse(self) -> None:
        """See `KVFollower.rehearse`."""
        self._tensors.rehearse()

    def close(self) -> None:
        """Give up all pages and the addresses."""
        for part in self.parts:
            part.close()


def kv_follower(
    pool: PagePool, owner: Owner, shape: KVShape | GroupedShape
) -> KVFollower | GroupedFollower:
    """The follower of a leader with this shape (`DeviceCache.shape`)."""
    if isinstance(shape, GroupedShape):
        return GroupedFollower(pool, owner, shape)
    return KVFollower(pool, owner, shape)


def _part(host_memory: SwapMemory | None, start: int, num_bytes: int) -> torch.Tensor:
    if host_memory is None:
        raise InvariantError("a journal with swapping needs host memory")
    return host_memory.part(start, num_bytes)
