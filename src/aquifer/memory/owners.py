"""Owners of a pool's pages, and the split of its budget among them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a page is used for."""

    WEIGHTS = "weights"
    KV = "kv"
    STATE = "state"
    PREFIX = "prefix"
    OVERHEAD = "overhead"  # memory that holds no data of a model


class Owner(NamedTuple):
    """A tenant of the pool: one kind of data of one model."""

    model: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.model}/{self.kind}"


# No model has an empty name, so none of these is an owner that a model has.
PROCESS = Owner("", Kind.OVERHEAD)
"""Owner of device memory that is not in pages."""

UNKNOWN = Owner("", Kind.KV)
"""Last owner of idle pages with unknown contents; they are zeroed before they are handed out."""

UNTOUCHED = Owner("", Kind.WEIGHTS)
"""Last owner of idle pages fresh from the driver; they are zero and are handed out as they are."""

GUARD = Owner("", Kind.STATE)
"""Owner of the guard page (`aquifer.memory.guard`)."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Split of the budget at one moment. All figures in bytes.

    `budget_bytes + excess_bytes == sum(in_use_bytes.values()) + retired_bytes + idle_bytes +
    uncreated_bytes`, and where there is an excess, nothing is idle or uncreated.
    """

    budget_bytes: int
    in_use_bytes: dict[Owner, int]  # that of `PROCESS` included
    retired_bytes: int  # of pages out of use that are still mapped where they were used last
    idle_bytes: int
    uncreated_bytes: int
    excess_bytes: int  # by which overhead and pages that cannot go are more than the budget

    @property
    def overhead_bytes(self) -> int:
        """Device memory of the process that is not in pages, and pages that hold no data."""
        return sum(
            num_bytes
            for owner, num_bytes in self.in_use_bytes.items()
            if owner.kind == Kind.OVERHEAD or owner == GUARD
        )

    def of_kind(self, kind: Kind) -> int:
        """Bytes in use by owners of a kind."""
        return sum(n for owner, n in self.in_use_bytes.items() if owner.kind == kind)

    @property
    def free_bytes(self) -> int:
        """Bytes that could be acquired without taking any from an owner that uses them.

        Without an excess, this and what is in use are the budget.
        """
        return max(
            self.idle_bytes + self.uncreated_bytes + self.retired_bytes - self.excess_bytes, 0
        )
