"""Room for new tensors in a list of regions: what to evict, what to move, where they go.

`plan` decides, in the two stages of Tangram (section 3.2.2), and touches nothing. `execute` carries
a plan out, on the list of regions and on the memory itself.

Under virtual memory none of this is needed: a tensor is contiguous in addresses, whatever pages it
has, so pages of any victims will do, and nothing is ever moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from aquifer.errors import InvariantError
from aquifer.memory.packing import (
    FreeSpace,
    Groups,
    Subspace,
    best_fit,
    groups_of,
    partitioned_gain_packing,
    total_bytes,
)
from aquifer.memory.regions import Layout, RegionList

Pack = Callable[[FreeSpace, Groups], list[Subspace] | None]
"""`partitioned_gain_packing` or `global_merge`."""

Bytes = npt.NDArray[np.int64]

SCRATCH_BYTES = 16 << 20
"""Scratch memory for regions that move by a shorter distance, and by less than their size."""

_TRIAL_S = 0.2e-3
"""Time that it takes to try another number of victims. Less than that is not worth saving."""

_MOST_TRIALS = 4
"""Numbers of victims that are tried to save moves; the plan of a load is to take a millisecond."""


Move = tuple[int, int, int]
"""Start of a region, the lower address at which it is to begin, and its bytes. (A plan may have a
thousand of them, and plain tuples are made ten times as fast as objects with names.)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How room is made for new tensors. It holds for the layout that it was made from.

    Args:
        evictions: starts of regions to release, first of all.
        moves: regions to move, one after the other: when its turn comes, the target of a move is
            free, but for bytes of the region itself.
        starts: address of each new tensor, in the order in which they were given.
        sizes: bytes of their regions.
    """

    evictions: tuple[int, ...]
    moves: tuple[Move, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def merged_bytes(self) -> int:
        """Bytes that are copied within the memory."""
        return sum(num_bytes for _, _, num_bytes in self.moves)


def eviction_costs_s(
    probabilities: npt.NDArray[np.float64],
    num_bytes: Bytes,
    bytes_per_s: float,
    sensitivities: npt.NDArray[np.float64] | float = 1.0,
) -> npt.NDArray[np.float64]:
    """Expected delay in seconds of evicting each tensor: c_j of Tangram's equation 2.

    It is `aquifer.memory.reclaim.regret_per_byte` times the bytes. The paper evicts in ascending
    order of this cost, so small tensors go first; the pool goes by the regret per byte.

    Args:
        probabilities: that each is needed again, p_m; [n].
        num_bytes: sizes s_j; [n].
        bytes_per_s: loading bandwidth b_m.
        sensitivities: alpha_m; [n], or one for all.
    """
    return probabilities * (num_bytes / bytes_per_s) * sensitivities


@dataclass(frozen=True, slots=True)
class Weighing:
    """What evictions and moves cost, to weigh one against the other.

    Args:
        costs_s: cost of evicting each victim, in the order of the victims; [n].
        copy_bytes_per_s: bandwidth of a copy within the memory.
    """

    costs_s: npt.NDArray[np.float64]
    copy_bytes_per_s: float


def plan(
    layout: Layout,
    sizes: Sequence[int],
    victims: Sequence[int] | Bytes,
    pack: Pack = partitioned_gain_packing,
    weighing: Weighing | None = None,
) -> Plan | None:
    """Decide what to evict, what to move and where new tensors go.

    Stage 1 evicts victims in their order until the free bytes suffice. Stage 2 places the tensors
    by best fit without a copy if that is possible, and otherwise as `pack` says.

    Stage 1 leaves at most a victim's bytes to spare. So nearly every free region has to be filled
    to the last byte, and much has to be moved, however it is packed. With `weighing`, further
    victims are evicted if that costs less than the moves that it saves: the sum of both is the
    objective of the paper's equation 1, which its two stages do not look at together.

    Pinned regions may separate free regions so that the tensors fit in none of the parts. Then
    further victims are evicted too: as few as a search by bisection finds.

    Args:
        layout: the regions as they are.
        sizes: bytes of each new tensor.
        victims: starts of regions that may be evicted, in the order of eviction; none is pinned.
        pack: how to merge free regions.
        weighing: costs of evictions and moves; None for the paper's two stages.

    Returns:
        The plan; None if there is no room even when all victims are evicted.

    Raises:
        InvariantError: a victim is no region of the layout, or pinned.
    """
    align = layout.align_bytes
    num_units = np.maximum(-(-np.asarray(sizes, np.int64) // align), 1)
    aligned = (num_units * align).tolist()
    order = np.asarray(victims, np.int64)
    indices = np.searchsorted(layout.starts, order)
    if len(order) and (
        indices.max() >= len(layout.starts)
        or (layout.starts[indices] != order).any()
        or layout.is_pinned[indices].any()
    ):
        raise InvariantError("a victim is not a region of the layout that can be evicted")
    groups = groups_of(aligned)
    missing_bytes = total_bytes(groups) - layout.free_bytes
    released = np.cumsum(layout.sizes[indices])
    count = 0 if missing_bytes <= 0 else int(np.searchsorted(released, missing_bytes)) + 1
    if count > len(order):
        return None

    def placed(num_victims: int) -> Placed | None:
        return _placed(layout, indices[:num_victims], groups, pack)

    search = _fewest(placed, count, len(order))
    if search is None:
        return None
    count, found = search
    if weighing is not None:
        # Enough for one more new tensor, on average, is what is tried first.
        step_bytes = total_bytes(groups) // max(len(aligned), 1)
        count, found = _weighed(placed, count, found, weighing, released, step_bytes)
    rows, moves = found.rows_and_moves()
    evictions = tuple(order[:count].tolist())
    return Plan(evictions, tuple(moves), _starts(aligned, rows), tuple(aligned))


def execute(
    plan: Plan,
    regions: RegionList,
    owners: Sequence[Hashable],
    memory: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Carry a plan out: release, move and copy, allocate. Contents of new regions are not set.

    Args:
        plan: made from the layout that `regions` has now.
        regions: the book.
        owners: owner of each new region, in the order of the new tensors.
        memory: the bytes that the regions are of, uint8 [num_bytes], on any device. Copies are made
            in the order of its current stream. None to change the book only.
        scratch_bytes: see `copy_down`.
    """
    for start in plan.evictions:
        regions.release(start)
    for start, target, _ in plan.moves:
        regions.move(start, target)
    if memory is not None:
        copy_down(memory, plan.moves, scratch_bytes)
    for start, size, owner in zip(plan.starts, plan.sizes, owners, strict=True):
        regions.acquire_at(start, size, owner)


def copy_down(
    memory: torch.Tensor, moves: Sequence[Move], scratch_bytes: int = SCRATCH_BYTES
) -> None:
    """Copy regions to lower addresses within one tensor, one after the other.

    Neighbouring regions that move by the same distance are copied together. A copy onto itself is
    made in parts that do not overlap: parts as long as the distance, or parts that go through
    scratch memory where the distance is short.

    Args:
        memory: uint8 [num_bytes].
        moves: in the order in which they are to be made.
        scratch_bytes: a copy onto itself by a shorter distance goes through this much memory.

    Raises:
        InvariantError: a target is not a lower address.
    """
    scratch: torch.Tensor | None = None
    for start, target, num_bytes in _joined(moves):
        distance = start - target
        if distance <= 0:
            raise InvariantError(f"a move from {start} to {target} is not to a lower address")
        is_short = distance < min(num_bytes, scratch_bytes)
        if is_short and scratch is None:
            scratch = torch.empty(
                min(scratch_bytes, len(memory)), dtype=torch.uint8, device=memory.device
            )
        part_bytes = len(scratch) if is_short and scratch is not None else distance
        for offset in range(0, num_bytes, part_bytes):
            end = min(offset + part_bytes, num_bytes)
            part = memory[start + offset : start + end]
            if is_short and scratch is not None:
                part = scratch[: end - offset].copy_(part)
            memory[target + offset : target + end].copy_(part)


def _joined(moves: Sequence[Move]) -> list[tuple[int, int, int]]:
    """Moves as (start, target, bytes), neighbours that move by the same distance in one."""
    joined: list[tuple[int, int, int]] = []
    for start, target, num_bytes in moves:
        if joined:
            last_start, last_target, last_bytes = joined[-1]
            if last_start + last_bytes == start and last_target + last_bytes == target:
                joined[-1] = (last_start, last_target, last_bytes + num_bytes)
                continue
        joined.append((start, target, num_bytes))
    return joined


def _fewest(
    placed: Callable[[int], Placed | None], count: int, most: int
) -> tuple[int, Placed] | None:
    """The fewest victims from `count` on that make room, and what is placed where; None if none do.

    Twice as many more are tried until there is room, and then fewer again.
    """
    found = placed(count)
    if found is not None:
        return count, found
    fails, works = count, count
    while found is None:
        if works == most:
            return None
        fails, works = works, min(2 * works - count + 1, most)
        found = placed(works)
    while works - fails > 1:
        middle = (fails + works) // 2
        fewer = placed(middle)
        if fewer is None:
            fails = middle
        else:
            works, found = middle, fewer
    return works, found


def _weighed(
    placed: Callable[[int], Placed | None],
    count: int,
    found: Placed,
    weighing: Weighing,
    released: Bytes,
    step_bytes: int,
) -> tuple[int, Placed]:
    """A number of victims, `count` or more, at which evictions and moves together cost least.

    Victims of `step_bytes` more are tried, then of twice as many, until no move is left or the
    evictions alone cost as much as the best that was found; and then numbers between the best one
    and a smaller one. It ends after a few trials, and what moves cost does not always fall with the
    number of victims. So it may not be the best number of all.

    Args:
        placed: what a number of victims leads to.
        count: number of victims that suffices.
        found: what it leads to.
        weighing: costs.
        released: bytes of the first victims, for each number of them but 0; [n].
        step_bytes: the first step.
    """
    costs_s = np.cumsum(weighing.costs_s)
    before_s = float(costs_s[count - 1]) if count else 0.0
    best, best_s = count, found.moved_bytes / weighing.copy_bytes_per_s
    base_bytes = int(released[count - 1]) if count else 0
    most, below, extra_bytes, is_growing = count, count, step_bytes, True
    for _ in range(_MOST_TRIALS):
        if is_growing:
            number = int(np.searchsorted(released, base_bytes + extra_bytes)) + 1
            tried = min(number, len(costs_s))
            is_growing = (
                found.moved_bytes > 0
                and tried > most
                and float(costs_s[tried - 1]) - before_s < best_s
            )
            most, extra_bytes = tried, 2 * extra_bytes
        if not is_growing:
            tried = (best + below) // 2
        if best_s <= _TRIAL_S or tried == below:
            break
        other = placed(tried)
        total_s = math.inf
        if other is not None:
            total_s = float(costs_s[tried - 1]) - before_s
            total_s += other.moved_bytes / weighing.copy_bytes_per_s
        if other is not None and total_s < best_s:
            if is_growing:
                below = best
            best, best_s, found = tried, total_s, other
        elif not is_growing:
            below = tried
    return best, found


@dataclass(frozen=True, slots=True)
class Placed:
    """Where tensors go once some regions are released.

    Args:
        starts: addresses of the regions that are left, [n].
        sizes: their bytes, [n].
        gaps: for each free region, the number of regions before it.
        space: the free regions and what lies between them.
        subspaces: what is merged; None if `rows` has room without it.
        rows: rows of equal tensors, (address of the first one, size, number).
        moved_bytes: bytes of all moves.
    """

    starts: Bytes
    sizes: Bytes
    gaps: npt.NDArray[np.intp]
    space: FreeSpace
    subspaces: list[Subspace] | None
    rows: list[tuple[int, int, int]]
    moved_bytes: int = 0

    def rows_and_moves(self) -> tuple[list[tuple[int, int, int]], list[Move]]:
        """Rows of all tensors, and the moves to make before they are placed."""
        rows, moves = list(self.rows), list[Move]()
        for subspace in self.subspaces or ():
            if not subspace.groups:
                continue
            target = self.space.starts[subspace.first]
            if subspace.last > subspace.first:
                inside = slice(self.gaps[subspace.first], self.gaps[subspace.last])
                lengths = self.sizes[inside].tolist()
                targets = list(accumulate(lengths, initial=target))
                target = targets.pop()  # behind the last one
                moves += zip(self.starts[inside].tolist(), targets, lengths, strict=True)
            for size, count in subspace.groups:
                rows.append((target, size, count))
                target += size * count
        return rows, moves


def _placed(
    layout: Layout, evicted: npt.NDArray[np.intp], groups: Groups, pack: Pack
) -> Placed | None:
    """Place tensors once some regions are released; None if there is no room.

    Args:
        layout: the regions.
        evicted: indices of those that are released before.
        groups: the tensors.
        pack: how to merge free regions.
    """
    is_kept = np.ones(len(layout.starts), np.bool_)
    is_kept[evicted] = False
    starts, sizes = layout.starts[is_kept], layout.sizes[is_kept]
    # Before region i, and after the last one, there are gap_bytes[i] free bytes.
    begins = np.concatenate(([0], starts + sizes))
    gap_bytes = np.concatenate((starts, [layout.num_bytes])) - begins
    gaps = np.flatnonzero(gap_bytes)
    bytes_before = np.concatenate(([0], np.cumsum(sizes)))[gaps]
    num_pinned = np.concatenate(([0], np.cumsum(layout.is_pinned[is_kept])))[gaps]
    space = FreeSpace(
        begins[gaps].tolist(),
        gap_bytes[gaps].tolist(),
        (bytes_before[1:] - bytes_before[:-1]).tolist(),
        (num_pinned[1:] > num_pinned[:-1]).tolist(),
    )
    rows = best_fit(space.starts, space.sizes, groups)
    if rows is not None:
        return Placed(starts, sizes, gaps, space, None, rows)
    subspaces = pack(space, groups)
    if subspaces is None:
        return None
    moved_bytes = sum(subspace.merged_bytes(space) for subspace in subspaces)
    return Placed(starts, sizes, gaps, space, subspaces, [], moved_bytes)


def _starts(sizes: Sequence[int], rows: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Address of each tensor: equal tensors are taken in the order in which they were given."""
    starts: dict[int, list[int]] = {}
    for start, size, count in rows:
        starts.setdefault(size, []).extend(range(start, start + size * count, size))
    following = {size: iter(of) for size, of in starts.items()}
    return tuple(map(next, map(following.__getitem__, sizes)))
