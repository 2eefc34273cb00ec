"""Tangram's Algorithm 1, line by line as in the paper: slow, to compare with the packing of memory.

`aquifer.memory.packing.partitioned_gain_packing` names what the listing leaves open or contradicts,
and how that is decided. Here the test of line 21 can be either that of the text or the printed one.
"""

from __future__ import annotations

from collections.abc import Sequence

from aquifer.memory.packing import FreeSpace

Pair = tuple[int, int, list[int]]
"""A subspace, as its first and its last free region, and the sizes of its tensors."""


def algorithm_1(space: FreeSpace, sizes: Sequence[int], *, is_printed: bool = False) -> list[Pair]:
    """Allocation set of Algorithm 1, in address order. Nothing is pinned.

    Args:
        space: free regions and what lies between them.
        sizes: of the tensors, no more in all than is free.
        is_printed: whether a tensor fits as line 21 is printed (`size >= min(C1, C2)` is a failure)
            and not as the text says (it is one if the tensor does not fit in the part chosen).
    """
    assert not any(space.is_fixed)
    pending: list[Pair] = [(0, len(space.sizes) - 1, sorted(sizes, reverse=True))]
    allocated: list[Pair] = []
    while pending:
        first, last, tensors = pending.pop()
        for point in sorted(range(first, last), key=lambda i: (-space.walls[i], i)):
            capacities = [
                sum(space.sizes[first : point + 1]),
                sum(space.sizes[point + 1 : last + 1]),
            ]
            packed = _try_packing(tensors, capacities, is_printed)
            if packed is not None and tensors:
                pending += [(first, point, packed[0]), (point + 1, last, packed[1])]
                break
        else:
            allocated.append((first, last, tensors))
    return sorted(allocated)


def merged_bytes(space: FreeSpace, allocated: Sequence[Pair]) -> int:
    """The overall merge cost M, without subspaces that have no tensors."""
    return sum(sum(space.walls[first:last]) for first, last, tensors in allocated if tensors)


def _try_packing(
    sizes: Sequence[int], capacities: list[int], is_printed: bool
) -> tuple[list[int], list[int]] | None:
    parts: tuple[list[int], list[int]] = ([], [])
    left = list(capacities)
    for size in sizes:
        if size >= min(left) if is_printed else size > max(left):
            return None
        chosen = 0 if left[0] >= left[1] else 1
        parts[chosen].append(size)
        left[chosen] -= size
    return parts
