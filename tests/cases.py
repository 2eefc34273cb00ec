"""Test cases that are too many to run each time: all with EVERY_CASE=1, else some of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import torch

EVERY_CASE = os.environ.get("EVERY_CASE") == "1"
"""Whether every case runs: `make test-families`."""

EVERY_KERNEL_CASE = EVERY_CASE or torch.cuda.is_available()
"""Whether every case of a kernel runs: on a GPU too, for only Triton's interpreter is slow."""


def tries(count: int) -> int:
    """How many seeds of random operations are tried: a third of them, or all with EVERY_CASE=1."""
    return count if EVERY_CASE else (count + 2) // 3


_Part = tuple[tuple[int, int], ...]
"""Some numbers of a case, each with its place."""


def covering(
    *parameters: Iterable[Any], strength: int, every: bool = EVERY_CASE
) -> list[tuple[Any, ...]]:
    """A covering array: tuples of values in which all values of any `strength` parameters meet.

    With a strength of 1, each value is in one of the tuples; with 2, each pair of values of two
    parameters is.

    Args:
        parameters: the values of each parameter.
        strength: how many parameters are covered together.
        every: whether to return all tuples, the product of the parameters.
    """
    values = [list(each) for each in parameters]
    # Each case as the numbers of its values.
    cases = list(product(*(range(len(each)) for each in values)))
    if not every and strength < len(values):
        cases = _cover(cases, strength)
    return [tuple(values[i][number] for i, number in enumerate(case)) for case in cases]


def _cover(cases: list[tuple[int, ...]], strength: int) -> list[tuple[int, ...]]:
    """Some of the cases, in their order, that have all parts of that size; chosen greedily."""
    size = len(cases[0])
    parts = {
        case: [_parts(case, count) for count in range(1, size)]  # by their size, less 1
        for case in cases
    }
    missing = set().union(*(parts[case][strength - 1] for case in cases))
    used, found = Counter[_Part](), set()
    while missing:
        # The case with the most missing parts; of several, the one whose parts were used the least.
        best = max(
            cases,
            key=lambda case: (
                len(parts[case][strength - 1] & missing),
                -sum(used[part] for some in parts[case] for part in some),
            ),
        )
        missing -= parts[best][strength - 1]
        for some in parts[best]:
            used.update(some)
        found.add(best)
    return [case for case in cases if case in found]


def _parts(case: tuple[int, ...], count: int) -> set[_Part]:
    """All choices of `count` numbers of the case, each with its place."""
    return set(combinations(enumerate(case), count))
