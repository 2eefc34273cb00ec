"""Stretches in lists of numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from aquifer.memory.runs import (
    are_equal,
    as_array,
    as_numbers,
    as_run,
    is_run,
    join,
    num_equal,
    runs,
    shift,
)


@pytest.mark.parametrize(
    ("numbers", "step", "expected"),
    [
        ([], 1, []),
        ([7], 1, [(0, 1)]),
        ([4, 5, 9], 1, [(0, 2), (2, 3)]),
        ([3, 2, 1], 1, [(0, 1), (1, 2), (2, 3)]),
        ([0, 8, 16, 17], 8, [(0, 3), (3, 4)]),
    ],
)
def test_runs(numbers, step, expected):
    assert runs(numbers, step) == expected


@pytest.mark.parametrize("step", [1, 8])
def test_runs_of_many_numbers_are_those_of_few(step):
    numbers = np.cumsum(np.random.default_rng(0).choice([step, step, step, -3, 0], 500)).tolist()
    ends = [i for i in range(1, 500) if numbers[i] != numbers[i - 1] + step]
    expected = list(pairwise([0, *ends, 500]))
    assert runs(numbers, step) == expected
    one_by_one = [runs(numbers[start:end], step) for start, end in expected]
    assert one_by_one == [[(0, end - start)] for start, end in expected]


@pytest.mark.parametrize("make", [list, lambda numbers: np.array(numbers, np.int32)])
@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([], [], 0), ([], [1], 0), ([4, 5, 9], [4, 5], 2), ([1, 2], [3, 2], 0), ([1, 2], [1, 3], 1)],
)
def test_num_equal(make, left, right, expected):
    assert num_equal(make(left), make(right)) == expected
    assert num_equal(make(right), make(left)) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], []),
        ([range(3, 5)], range(3, 5)),
        ([range(3, 5), range(5, 9)], range(3, 9)),
        ([range(9, 4, -1), range(4, -1, -1)], range(9, -1, -1)),
        ([range(3, 5), range(6, 9)], [3, 4, 6, 7, 8]),
        ([range(3, 5), [5, 6]], [3, 4, 5, 6]),
        ([[1], [7, 8]], [1, 7, 8]),
    ],
)
def test_join(parts, expected):
    assert join(parts) == expected


def test_a_run_is_a_range():
    for numbers in ([], [4], [4, 6], [4, 6, 5, 7], [7, 6, 5], [4, 4, 6]):
        assert as_run(numbers) == numbers
        assert is_run(np.array(numbers, np.int64)) == (numbers == [4])
        assert list(as_numbers(np.array(numbers, np.int64))) == numbers
    for numbers in ([4, 5], [4, 5, 6, 7]):
        run = range(4, 4 + len(numbers))
        assert as_run(numbers) == as_numbers(np.array(numbers)) == run
        assert as_array(run).tolist() == as_array(numbers).tolist() == numbers
        assert shift(run, 3) == range(7, 7 + len(run))
        assert shift(numbers, 3) == list(shift(run, 3))
        assert are_equal(run, numbers)
        assert not are_equal(run, numbers[::-1])
