"""Stretches of consecutive numbers, such as neighbouring pages that one call can map."""

from __future__ import annotations

from collections.abc import Sequence


def runs(numbers: Sequence[int], step: int = 1) -> list[tuple[int, int]]:
    """Positions [start, end) of each stretch in which every number is the one before plus `step`.

    The stretches cover all positions, in order: `runs([4, 5, 9]) == [(0, 2), (2, 3)]`.
    """
    found = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + step:
            found.append((start, end))
            start = end
    return found
