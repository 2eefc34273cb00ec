"""A tenant of a pool for tests: single pages, each with a regret of its own."""

from __future__ import annotations

import math

from aquifer.memory.pool import Owner, PagePool


class PageTenant:
    """Victims of given regrets, each a page of the pool; counts how often it is walked."""

    def __init__(self, pool: PagePool, owner: Owner, regrets: list[float]):
        self.pool = pool
        handles = pool.acquire(owner, len(regrets))
        assert handles is not None
        self.pages = list(zip(sorted(regrets), handles, strict=True))
        self.num_walked = 0

    @property
    def evictable_bytes(self) -> int:
        return len(self.pages) * self.pool.page_bytes

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        found_bytes = 0
        for regret, _ in self.pages:
            if found_bytes >= num_bytes or regret >= limit:
                break
            self.num_walked += 1
            found_bytes += self.pool.page_bytes
        return found_bytes

    def cheapest(self, now_s: float) -> float | None:
        return self.pages[0][0] if self.pages else None

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        count = 0
        while self.pages and count * self.pool.page_bytes < num_bytes:
            if count and self.pages[0][0] > limit:
                break
            self.pool.release([self.pages.pop(0)[1]])
            count += 1
        return count * self.pool.page_bytes
