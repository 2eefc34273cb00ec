"""Idle pages, kept because creating a page costs far more than handing one out again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aquifer.memory.owners import UNTOUCHED, Owner
from aquifer.memory.pages import Page


@dataclass(slots=True)
class IdlePages:
    """Idle pages of one size, by their last owner."""

    by_owner: dict[Owner, list[Page]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.by_owner.values()))

    def count(self, owner: Owner) -> int:
        """Pages that `owner` used last."""
        return len(self.by_owner.get(owner, ()))

    def take(self, owner: Owner, count: int) -> list[Page]:
        """Up to `count` pages that `owner` used last."""
        pages = self.by_owner.get(owner, [])
        cut = max(len(pages) - count, 0)
        taken = pages[cut:]
        del pages[cut:]
        return taken[::-1]

    def take_any(self, count: int) -> list[Page]:
        """Up to `count` pages, from the owner that has most idle; untouched ones last."""
        taken: list[Page] = []
        while len(taken) < count and self.by_owner:
            owner = max(self.by_owner, key=lambda o: (o != UNTOUCHED, len(self.by_owner[o])))
            taken += self.take(owner, count - len(taken))
            if not self.by_owner[owner]:
                del self.by_owner[owner]
        return taken

    def put(self, owner: Owner, pages: Sequence[Page]) -> None:
        """Keep pages; those of one call come out in ascending order, so that neighbours stay so."""
        self.by_owner.setdefault(owner, []).extend(sorted(pages, reverse=True))
