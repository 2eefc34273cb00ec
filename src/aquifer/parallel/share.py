"""The share that one rank has of things that are divided among all: heads, columns, rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aquifer.weights.parameters import Parameter
from aquifer.weights.shards import Shard

Range: TypeAlias = tuple[int, int]
"""[start, stop) of the indices of a whole parameter."""


class CannotSplitError(ValueError):
    """A decoder cannot be split over so many ranks; the message says why."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank.

    Args:
        rank: the rank.
        size: number of ranks.
    """

    rank: int
    size: int

    def count(self, whole: int, what: str) -> int:
        """How many a rank has.

        Args:
            whole: how many there are.
            what: what they are, for the error.

        Raises:
            CannotSplitError: they cannot be divided evenly.
        """
        if whole % self.size:
            raise CannotSplitError(f"{what}: {whole}")
        return whole // self.size

    def count_or_one(self, whole: int, what: str) -> int:
        """How many a rank has where several ranks may have the same one; else as `count`."""
        if whole % self.size and self.size % whole:
            raise CannotSplitError(f"{what}: {whole}")
        return max(whole // self.size, 1)

    def even(self, whole: int, begin: int = 0) -> Range:
        """The rank's share of so many neighbouring indices, from `begin` on."""
        own = whole // self.size
        return begin + self.rank * own, begin + (self.rank + 1) * own

    def some(self, whole: int, width: int, begin: int = 0) -> Range:
        """The rank's share of some heads of a width; one, if there are fewer than ranks."""
        own = max(whole // self.size, 1)
        first = self.rank * whole // self.size
        return begin + first * width, begin + (first + own) * width

    def in_turn(self, *parts: tuple[int, int]) -> list[Range]:
        """The rank's share of each of several parts, which lie one after the other.

        Args:
            parts: (heads, width of one) of each; see `some`.
        """
        ranges, begin = [], 0
        for whole, width in parts:
            ranges.append(self.some(whole, width, begin))
            begin += whole * width
        return ranges

    def of_rank_0(self, parameter: Parameter, dim: int) -> Parameter:
        """What rank 0 adds for all: all of it there, and zeros on the other ranks."""
        if self.rank == 0:
            return parameter
        size = parameter.shape[dim]
        return parameter.sharded(Shard(dim, size, (), size))


def part_of(parameter: Parameter, dim: int, ranges: Sequence[Range]) -> Parameter:
    """The part of a parameter with these indices of a dimension."""
    size = sum(stop - start for start, stop in ranges)
    return parameter.sharded(Shard(dim, parameter.shape[dim], tuple(ranges), size))
