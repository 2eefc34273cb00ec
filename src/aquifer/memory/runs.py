"""Stretches of numbers: consecutive ones (neighbouring pages), and equal beginnings.

Where numbers are one run, each the one before plus 1, they are passed on as a `range`: it takes the
same time to hand on, cut or compare, however many these are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

N = TypeVar("N", bound=int)

_MANY = 64
"""Numbers from which on an array operation is faster than a loop."""


def runs(numbers: Sequence[int], step: int = 1) -> list[tuple[int, int]]:
    """Positions [start, end) of each stretch in which every number is the one before plus `step`.

    The stretches cover all positions, in order: `runs([4, 5, 9]) == [(0, 2), (2, 3)]`.
    """
    if isinstance(numbers, range) and numbers.step == step:
        return [(0, len(numbers))] if numbers else []
    if len(numbers) > _MANY:
        # By way of an `array`, in half the time that numpy takes for a list.
        values = np.frombuffer(array("q", numbers), np.int64)
        (ends,) = (values[1:] - values[:-1] != step).nonzero()
        return list(pairwise([0, *(ends + 1).tolist(), len(numbers)]))
    found = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + step:
            found.append((start, end))
            start = end
    return found


def num_equal(
    left: Sequence[int] | npt.NDArray[np.int32], right: Sequence[int] | npt.NDArray[np.int32]
) -> int:
    """How many of the first numbers are the same in both: `num_equal([4, 5, 9], [4, 5]) == 2`."""
    count = min(len(left), len(right))
    differs = np.flatnonzero(np.asarray(left[:count]) != np.asarray(right[:count]))
    return int(differs[0]) if len(differs) else count


def join(parts: Sequence[Sequence[N]]) -> Sequence[N]:
    """All parts in turn; a range where they are ranges that continue each other.

    Pre-condition: all parts that are ranges have the same step.
    """
    if len(parts) == 1:
        return parts[0]
    stop = None
    for part in parts:
        if not isinstance(part, range) or stop not in (None, part.start):
            return list(chain.from_iterable(parts))
        stop = part.stop
    if stop is None or not isinstance(first := parts[0], range):
        return []
    return cast(Sequence[N], range(first.start, stop, first.step))


def shift(numbers: Sequence[int], offset: int) -> Sequence[int]:
    """Each number plus the offset; a range if the numbers are one."""
    if isinstance(numbers, range):
        return range(numbers.start + offset, numbers.stop + offset, numbers.step)
    return [number + offset for number in numbers]


def as_run(numbers: Sequence[N]) -> Sequence[N]:
    """The same numbers, as a range if each is the one before plus 1."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        run = range(numbers[0], numbers[-1] + 1)
        if numbers == list(run):
            return cast(Sequence[N], run)
    return numbers


def are_equal(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether both are the same numbers in the same order, be they ranges or lists."""
    return left == right if type(left) is type(right) else list(left) == list(right)


def as_array(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """The numbers as an array."""
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, numbers.step)
    return np.array(numbers, np.int64)


def as_numbers(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Sequence[int]:
    """The entries of an array: a range if each is the one before plus 1, else a list."""
    if is_run(array):
        return range(int(array[0]), int(array[-1]) + 1)
    numbers: list[int] = array.tolist()
    return numbers


def is_run(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> bool:
    """Whether an array has entries, and each is the one before plus 1."""
    count = len(array)
    if not count or array[-1] - array[0] != count - 1:
        return False
    return count < 3 or bool((array[1:] - array[:-1] == 1).all())


def add_at(counts: npt.NDArray[np.int32], places: npt.NDArray[np.int64], change: int) -> None:
    """Add to the counts at these places, as often as each occurs."""
    if is_run(places):
        counts[places[0] : places[-1] + 1] += change
    else:
        np.add.at(counts, places, change)


def unique(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers in ascending order, each once."""
    return numbers if is_run(numbers) else np.unique(numbers)
