"""Ranks that are threads of one process, for the split of a model without an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

_T = TypeVar("_T")


class ThreadCollectives:
    """The `Collectives` of a thread.

    Args:
        rank: number of the thread.
        barrier: of all threads.
        given: a place for the tensor of each.
    """

    def __init__(self, rank: int, barrier: Barrier, given: list[torch.Tensor]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._given = given

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = own
        self._barrier.wait()
        found = [tensor.clone() for tensor in self._given]
        self._barrier.wait()
        return found

    def total(self, *partials: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.stack(self._all(torch.stack(partials).sum(0))).sum(0),)

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(part), dim=1)

    def agree(self, values: torch.Tensor) -> None:
        values.copy_(self._all(values)[0])


def in_ranks(size: int, run: Callable[[ThreadCollectives], _T]) -> list[_T]:
    """Run something in a thread for each rank; returns what each returned."""
    barrier, given = Barrier(size), [torch.empty(0)] * size

    def of_rank(rank: int) -> _T:
        try:
            return run(ThreadCollectives(rank, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))
