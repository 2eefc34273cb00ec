"""Records of pages or places by number: stretches of equal ones are read and written at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, Generic, TypeVar

N = TypeVar("N", bound=int)
R = TypeVar("R")

_CHUNK = 2048
"""Numbers of a chunk, a power of two."""

_FEW = 8
"""Numbers up to which a loop is faster than slices of lists."""

_NONE_YET: Any = object()
_NO_RECORDS: Any = [None] * _CHUNK  # read-only


class Records(Generic[R]):
    """The record of each number that has one: a value, which all numbers in the same state share.

    Hundreds of pages come at once, in stretches whose records are equal. So what happens to them is
    decided once for each stretch. Where their numbers are a `range` too, records are read, compared
    and written as slices of lists: about 2 us for 512 numbers. Other numbers take 0.1 us each.

    There is a list for each _CHUNK numbers of which some have records. Numbers may be negative.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, list[R | None]] = {}  # by the first number
        self._num_records = 0
        self._sweep_at = 16  # chunks at which empty ones are dropped

    def __len__(self) -> int:
        return self._num_records

    def __contains__(self, number: int) -> bool:
        return self.get(number) is not None

    @property
    def num_chunks(self) -> int:
        """Lists that exist."""
        return len(self._chunks)

    def get(self, number: int) -> R | None:
        """The record of a number; None if it has none."""
        chunk = self._chunks.get(number & -_CHUNK)
        return None if chunk is None else chunk[number & (_CHUNK - 1)]

    def items(self) -> Iterator[tuple[int, R]]:
        """All numbers with their records, in ascending order."""
        for first in sorted(self._chunks):
            for number, record in enumerate(self._chunks[first], first):
                if record is not None:
                    yield number, record

    def values_of(self, numbers: Sequence[int]) -> list[R | None]:
        """The record of each number, or None."""
        if not isinstance(numbers, range) or not numbers:
            return self._values_of_each(numbers)
        found: list[R | None] = []
        for part in _pieces(numbers):
            first = part[0] if part.step == 1 else part[-1]
            place, count = first & (_CHUNK - 1), len(part)
            chunk = self._chunks.get(first - place)
            records = [None] * count if chunk is None else chunk[place : place + count]
            found += records if part.step == 1 else records[::-1]
        return found

    def present(self, numbers: Sequence[N]) -> Sequence[N]:
        """Those of the numbers that have a record."""
        records = self.values_of(numbers)
        if None not in records:
            return numbers
        return [i for i, record in zip(numbers, records, strict=True) if record is not None]

    def _values_of_each(self, numbers: Sequence[int]) -> list[R | None]:
        """`values_of`, number by number."""
        found: list[R | None] = []
        chunk: list[R | None] = []
        first = size = 0
        for number in numbers:
            place = number - first
            if not 0 <= place < size:
                first, size = number & -_CHUNK, _CHUNK
                chunk = self._chunks.get(first, _NO_RECORDS)
                place = number - first
            found.append(chunk[place])
        return found

    def stretches(self, numbers: Sequence[N]) -> Iterator[tuple[R | None, Sequence[N]]]:
        """Yields (record or None, numbers) of each stretch with equal records, in order."""
        records = self.values_of(numbers)
        for start, end in _equal_runs(records):
            yield records[start], numbers if end - start == len(numbers) else numbers[start:end]

    def fill(self, numbers: Sequence[int], record: R | None) -> None:
        """Give all numbers this record, or none if it is None."""
        if len(numbers) == 1:
            self.put(numbers[0], record)
            return
        if isinstance(numbers, range):
            self.assign(numbers, [record] * len(numbers))
            return
        first = size = num_before = 0
        for number in numbers:
            place = number - first
            if not 0 <= place < size:
                first, size = number & -_CHUNK, _CHUNK
                chunk = self._chunk(first)
                place = number - first
            num_before += chunk[place] is not None
            chunk[place] = record
        self._num_records += (record is not None) * len(numbers) - num_before

    def put(self, number: int, record: R | None) -> None:
        """Give one number this record, or none if it is None."""
        first = number & -_CHUNK
        chunk = self._chunks.get(first) or self._chunk(first)
        place = number - first
        self._num_records += (record is not None) - (chunk[place] is not None)
        chunk[place] = record

    def assign(self, numbers: range, records: list[R | None]) -> None:
        """Give each number, of a range of step 1 or -1, its own record, or none."""
        done = 0
        for part in _pieces(numbers) if records else ():
            count = len(part)
            new = records if count == len(records) else records[done : done + count]
            done += count
            place = part[0] & (_CHUNK - 1)
            if part.step == -1:
                place, new = place - count + 1, new[::-1]
            chunk = self._chunk(part[0] & -_CHUNK)
            self._num_records += chunk[place : place + count].count(None) - new.count(None)
            chunk[place : place + count] = new

    def change(
        self, numbers: Sequence[N], change: Callable[[N, R | None], R | None]
    ) -> Iterable[tuple[R | None, R | None, Sequence[N]]]:
        """Replace the records of numbers, stretch by stretch: to be iterated to its end.

        Nothing else may change the records until then. A number may be named twice; the second time
        it has the new record.

        Args:
            numbers: the numbers.
            change: returns the new record, given the first number of a stretch and the old record
                of all its numbers; None stands for none. If it raises an error, the stretches
                before it are changed, and no others.

        Yields: (old record, new record, numbers) of each stretch; neighbours may be equal.
        """
        if len(numbers) == 1:  # nothing but a shorter way, for growing sequences
            number = numbers[0]
            chunk = self._chunk(number & -_CHUNK)
            place = number & (_CHUNK - 1)
            before = chunk[place]
            chunk[place] = after = change(number, before)
            if before is None or after is None:
                self._num_records += (before is None) - (after is None)
            return ((before, after, numbers),)
        run: Any = numbers
        if not isinstance(run, range) or len(run) <= _FEW:
            return self._change_each(numbers, change)
        first = run[0] if run.step == 1 else run[-1]
        place, count = first & (_CHUNK - 1), len(numbers)
        end = place + count
        if end > _CHUNK:
            parts: Any = _pieces(run)
            return chain.from_iterable(self.change(part, change) for part in parts)
        chunk = self._chunk(first - place)
        records = chunk[place:end]
        before = records[0]
        if records.count(before) < count:
            return self._change_stretches(numbers, chunk, records, change)
        after = change(numbers[0], before)
        chunk[place:end] = [after] * count
        if before is None or after is None:
            self._num_records += count * ((before is None) - (after is None))
        return ((before, after, numbers),)

    def _change_stretches(
        self,
        numbers: Sequence[N],
        chunk: list[R | None],
        records: list[R | None],
        change: Callable[[N, R | None], R | None],
    ) -> Iterator[tuple[R | None, R | None, Sequence[N]]]:
        """`change`, for a range in one chunk whose records, in ascending order, are not equal."""
        is_ascending = numbers[0] < numbers[-1]
        if not is_ascending:
            records.reverse()
        for start, end in _equal_runs(records):
            before, run, count = records[start], numbers[start:end], end - start
            after = change(run[0], before)
            place = run[0 if is_ascending else -1] & (_CHUNK - 1)
            chunk[place : place + count] = [after] * count
            if before is None or after is None:
                self._num_records += count * ((before is None) - (after is None))
            yield before, after, run

    def _change_each(
        self, numbers: Sequence[N], change: Callable[[N, R | None], R | None]
    ) -> Iterator[tuple[R | None, R | None, Sequence[N]]]:
        """`change`, number by number."""
        before: Any = _NONE_YET
        after: R | None = None
        chunk: list[R | None] = []
        first = size = start = end = 0
        for number in numbers:
            place = number - first
            if not 0 <= place < size:
                first, size = number & -_CHUNK, _CHUNK
                chunk = self._chunk(first)
                place = number - first
            record = chunk[place]
            if record is not before and record != before:
                if end > start:
                    self._count(before, after, end - start)
                    yield before, after, numbers[start:end]
                start, before = end, record
                after = change(number, record)
            chunk[place] = after
            end += 1
        if end > start:
            self._count(before, after, end - start)
            yield before, after, numbers[start:end]

    def _count(self, before: R | None, after: R | None, count: int) -> None:
        self._num_records += count * ((after is not None) - (before is not None))

    def _chunk(self, first: int) -> list[R | None]:
        """The records of _CHUNK numbers from the first on."""
        chunk = self._chunks.get(first)
        if chunk is None:
            if len(self._chunks) >= self._sweep_at:
                self._chunks = {
                    each: records
                    for each, records in self._chunks.items()
                    if records.count(None) < _CHUNK
                }
                self._sweep_at = 2 * len(self._chunks) + 16
            chunk = self._chunks[first] = [None] * _CHUNK
        return chunk


def _equal_runs(records: list[Any]) -> Iterator[tuple[int, int]]:
    """Positions [start, end) of stretches of equal records, which cover all, in order."""
    start, rest = 0, records
    for _ in range(_FEW):
        if not rest:
            return
        first = rest[0]
        # Mostly all that are equal to the first one come first.
        count = rest.count(first)
        if count < len(rest) and rest[:count].count(first) < count:
            break
        yield start, start + count
        start += count
        rest = rest[count:]
    for _, group in groupby(rest):
        end = start + len(list(group))
        yield start, end
        start = end


def _pieces(numbers: range) -> Sequence[range]:
    """The parts of a range, of step 1 or -1, that lie in one chunk each."""
    if (numbers[0] ^ numbers[-1]) & -_CHUNK == 0:
        return (numbers,)
    parts = []
    start, step = numbers.start, numbers.step
    while start != numbers.stop:
        if step == 1:
            stop = min((start & -_CHUNK) + _CHUNK, numbers.stop)
        else:
            stop = max((start & -_CHUNK) - 1, numbers.stop)
        parts.append(range(start, stop, step))
        start = stop
    return parts
