"""Records by number against a dictionary: in ranges, in lists, across chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from aquifer.memory.records import Records


def numbers_of(random: Random) -> Sequence[int]:
    """A range of either step, or a list that may name a number twice."""
    start = random.choice([-5, 0, 100, 2040, 2048, 4090])
    count = random.choice([0, 1, 2, 7, 20, 40, 3000])
    kind = random.randrange(4)
    if kind == 0:
        return [start + random.randrange(40) for _ in range(min(count, 20))]
    run = range(start, start + count)
    return run[::-1] if kind == 1 else run


@pytest.mark.parametrize("seed", range(6))
def test_against_a_dictionary(seed):
    random = Random(seed)
    records: Records[int] = Records()
    expected: dict[int, int] = {}
    for _ in range(300):
        numbers = numbers_of(random)
        act = random.randrange(5)
        if act == 4 and isinstance(numbers, range):
            new = [random.choice([None, 1, 2]) for _ in numbers]
            records.assign(numbers, new)
            expected |= {number: record or 0 for number, record in zip(numbers, new, strict=True)}
        elif act == 0:
            record = random.choice([None, 1, 2])
            records.fill(numbers, record)
            for number in numbers:
                expected[number] = record or 0
        elif act == 1:
            # Of equal stretches the first number is given, and None stands for no record.
            changed = list(
                records.change(numbers, lambda _number, before: ((before or 0) + 1) % 4 or None)
            )
            assert [n for _, _, run in changed for n in run] == list(numbers)
            for before, after, run in changed:
                for number in run:
                    assert (expected.get(number) or None) == before
                    expected[number] = after or 0
        elif act == 2:
            stretches = list(records.stretches(numbers))
            assert [n for _, run in stretches for n in run] == list(numbers)
            for record, run in stretches:
                assert all((expected.get(number) or None) == record for number in run)
            assert all(one[0] != two[0] for one, two in pairwise(stretches))
        else:
            assert records.values_of(numbers) == [expected.get(n) or None for n in numbers]
            assert list(records.present(numbers)) == [n for n in numbers if expected.get(n)]
        expected = {number: record for number, record in expected.items() if record}
        assert len(records) == len(expected)
    assert list(records.items()) == sorted(expected.items())
    assert all(number in records for number in expected)
    assert 10**9 not in records


@pytest.mark.parametrize("make", [list, lambda numbers: numbers])
def test_an_error_leaves_what_comes_after_it(make):
    records: Records[str] = Records()
    records.fill(range(30), "a")
    records.fill(range(20, 30), "b")

    def change(number: int, before: str | None) -> str:
        if before == "b":
            raise ValueError(number)
        return "c"

    done: list[object] = []
    with pytest.raises(ValueError, match="20"):
        done += records.change(make(range(10, 30)), change)
    assert records.values_of(range(30)) == ["a"] * 10 + ["c"] * 10 + ["b"] * 10


def test_numbers_that_ascend_for_ever_take_no_memory_for_those_that_are_gone():
    records: Records[str] = Records()
    records.fill([3], "old")
    for first in range(0, 4_000_000, 10_000):
        records.fill(range(first + 10, first + 5000), "new")
        records.fill(range(first + 10, first + 5000), None)
    assert list(records.items()) == [(3, "old")]
    assert records.num_chunks < 40
