"""Exact optima of small instances of Tangram's equation 1, to compare its heuristics with.

Equation 1 knows sizes and not addresses. So its optimum (`equation_1`) is a lower bound of what a
placement can cost; `with_placement` is the optimum of placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from benchmarks.tangram.stores import COPY_BYTES_PER_S, LOAD_BYTES_PER_S
from scipy.optimize import Bounds, LinearConstraint, milp

from aquifer.memory.packing import FreeSpace
from aquifer.memory.regions import RegionList


@dataclass(frozen=True, slots=True)
class Instance:
    """New tensors, and a memory with existing tensors. Costs are in units of moving one byte.

    Args:
        num_bytes: S, size of the memory.
        starts: address of each existing tensor, ascending.
        sizes: s'_j, its bytes; its merge cost m_j is the same number.
        eviction_costs: c_j.
        new_sizes: s_i.
    """

    num_bytes: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    eviction_costs: tuple[float, ...]
    new_sizes: tuple[int, ...]

    def regions(self) -> RegionList:
        """The list of regions before the load."""
        regions = RegionList(self.num_bytes, align_bytes=1)
        for start, size in zip(self.starts, self.sizes, strict=True):
            regions.acquire_at(start, size)
        return regions

    def victims(self, *, per_byte: bool = False) -> list[int]:
        """Existing tensors by cost, which is minimal-cost eviction, or by cost for each byte."""
        return sorted(
            range(len(self.sizes)),
            key=lambda j: self.eviction_costs[j] / (self.sizes[j] if per_byte else 1),
        )


def random_instance(random: np.random.Generator) -> Instance:
    """A memory of 64 bytes with 8 tensors of 1 to 9 bytes, and 2 to 5 new tensors of two sizes.

    Existing tensors are of three models, whose probabilities of use differ, and any bytes between
    them are free. Eviction is as expensive, compared with moving, as with the benchmark's
    bandwidths.
    """
    num_bytes, count = 64, 8
    sizes = random.integers(1, 10, count)
    free = num_bytes - int(sizes.sum()) if sizes.sum() < num_bytes else 0
    if not free:
        return random_instance(random)
    starts = np.sort(random.integers(0, free + 1, count)) + np.cumsum(sizes) - sizes
    probabilities = random.uniform(0.02, 0.5, 3)[random.integers(0, 3, count)]
    costs = probabilities * sizes * COPY_BYTES_PER_S / LOAD_BYTES_PER_S
    wanted = random.uniform(0.6, 1.0) * (free + 0.4 * int(sizes.sum()))
    choice = random.integers(3, 12, 2)
    new = random.choice(choice, 5)
    num_new = int((np.cumsum(new) <= wanted).sum())
    if num_new < 2:
        return random_instance(random)
    return Instance(
        num_bytes,
        tuple(starts.tolist()),
        tuple(sizes.tolist()),
        tuple(costs.tolist()),
        tuple(new[:num_new].tolist()),
    )


def equation_1(instance: Instance) -> float:
    """The optimum of equation 1 as it is printed, by SciPy's `milp` (HiGHS).

    Nothing in it asks for a move: no constraint makes any z_j equal to 1, so all are 0.
    """
    num_new, count = len(instance.new_sizes), len(instance.sizes)
    new, sizes = np.array(instance.new_sizes), np.array(instance.sizes)
    # x [num_new], y [count], z [count]
    objective = np.concatenate((np.zeros(num_new), instance.eviction_costs, sizes))
    room = np.concatenate((new, -sizes, np.zeros(count)))
    either = np.hstack((np.zeros((count, num_new)), np.eye(count), np.eye(count)))
    every = np.concatenate((np.ones(num_new), np.zeros(2 * count)))
    solution = milp(
        objective,
        integrality=np.ones(len(objective)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(room, -np.inf, instance.num_bytes - sizes.sum()),
            LinearConstraint(either, -np.inf, 1),
            LinearConstraint(every, num_new, num_new),
        ],
    )
    assert solution.success, solution.message
    return float(solution.fun)


def with_placement(instance: Instance, evicted: Sequence[int] | None = None) -> float:
    """The least cost with which all tensors can be placed.

    Each existing tensor stays, is evicted, or is moved anywhere. All combinations are tried in the
    order of their cost, until one is found in which the moved and the new tensors can be packed
    into what lies between those that stay. Whether the moves can be made one after the other, in
    place, is not asked, so an executable plan may cost more.

    Args:
        instance: of few tensors, as there are 3 ** number combinations.
        evicted: the tensors that are evicted, so that only moves are chosen and counted; None to
            choose them too.
    """
    count = len(instance.sizes)
    sizes, costs = np.array(instance.sizes), np.array(instance.eviction_costs)
    fates = np.stack(np.meshgrid(*[np.arange(3)] * count, indexing="ij"), -1).reshape(-1, count)
    is_moved, is_evicted = fates == 1, fates == 2
    cost = is_moved @ sizes
    if evicted is None:
        cost = cost + is_evicted @ costs
    else:
        fixed = np.isin(np.arange(count), evicted)
        is_moved, cost = (of[(is_evicted == fixed).all(1)] for of in (is_moved, cost))
        is_evicted = np.broadcast_to(fixed, is_moved.shape)
    used = sizes.sum() - is_evicted @ sizes + sum(instance.new_sizes)
    for index in np.argsort(cost, kind="stable"):
        if used[index] > instance.num_bytes:
            continue
        stays = np.flatnonzero(~is_moved[index] & ~is_evicted[index]).tolist()
        ends = [0, *(instance.starts[j] + instance.sizes[j] for j in stays)]
        begins = [*(instance.starts[j] for j in stays), instance.num_bytes]
        gaps = [begin - end for begin, end in zip(begins, ends, strict=True)]
        if fits(gaps, [*instance.new_sizes, *sizes[is_moved[index]].tolist()]):
            return float(cost[index])
    raise AssertionError("there is no room for the new tensors")


def best_partition(space: FreeSpace, new_sizes: Sequence[int]) -> int:
    """The least merge cost M of any division into subspaces: the optimum of Algorithm 1's search.

    A subset of the walls is moved; free regions with a moved wall between them become one.
    """
    walls = range(len(space.walls))
    subsets = [subset for n in range(len(walls) + 1) for subset in combinations(walls, n)]
    for moved in sorted(subsets, key=lambda subset: sum(space.walls[i] for i in subset)):
        kept = [i + 1 for i in walls if i not in moved]
        capacities = [
            sum(space.sizes[first:end]) for first, end in pairwise([0, *kept, len(space.sizes)])
        ]
        if fits(capacities, new_sizes):
            return sum(space.walls[i] for i in moved)
    raise AssertionError("there is no room for the new tensors")


def fits(bins: Sequence[int], items: Sequence[int]) -> bool:
    """Whether items can be packed into bins: exact."""
    failed: set[tuple[int, tuple[int, ...]]] = set()
    ordered = sorted(items, reverse=True)

    def place(index: int, left: tuple[int, ...]) -> bool:
        if index == len(ordered):
            return True
        if (index, left) in failed:
            return False
        if any(place(index + 1, rest) for rest in _placements(left, ordered[index])):
            return True
        failed.add((index, left))
        return False

    return sum(items) <= sum(bins) and place(0, tuple(sorted(bins)))


def _placements(left: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """What is left of the bins after an item is put in one of them; equal bins count once."""
    for capacity in sorted({capacity for capacity in left if capacity >= size}):
        rest = list(left)
        rest.remove(capacity)
        rest.append(capacity - size)
        yield tuple(sorted(rest))
