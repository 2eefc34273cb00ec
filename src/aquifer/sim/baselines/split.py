"""A pool with two rules: a fixed part for weights, the rest for KV and prefixes.

Each part evicts its own victims by the pool's rule, and takes nothing of the other. What weights do
not use of their part is held outside of the pool, so that nothing else can have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aquifer.engine.assembly import Assembly
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.reclaim import Reclaimer
from aquifer.sim.driver import ModelledDriver
from aquifer.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class WeightShare:
    """The part of a pool that weights have for themselves.

    Args:
        num_bytes: its size, whole pages.
        pool: the pool.
        reclaimer: evicts idle weights within it.
        driver: of the device; it holds what the pool must not have.

    Attributes:
        stores: all weights.
    """

    num_bytes: int
    pool: PagePool
    reclaimer: Reclaimer
    driver: ModelledDriver
    stores: list[WeightStore] = field(default_factory=list)

    @classmethod
    def of(cls, assembly: Assembly, share: float, driver: ModelledDriver) -> WeightShare:
        """A share of a pool's budget, from 0 to 1, rounded down to whole pages."""
        pool = assembly.pool
        num_pages = int(share * pool.budget_bytes) // pool.page_bytes
        part = cls(num_pages * pool.page_bytes, pool, Reclaimer(assembly.clock_s), driver)
        part.settle()
        return part

    @property
    def free_bytes(self) -> int:
        """Bytes of it that hold no weights."""
        return self.num_bytes - sum(store.resident_bytes for store in self.stores)

    def make_room(self, num_bytes: int, asker: Owner) -> bool:
        """Evict idle weights until so many bytes are free, and let the pool have these.

        Args:
            num_bytes: how many.
            asker: the owner that they are for.

        Returns: False if there are not so many; then idle weights may be gone.
        """
        while (short_bytes := num_bytes - self.free_bytes) > 0:
            if not self.reclaimer.reclaim(short_bytes, asker):
                return False
        self._hold(self.free_bytes - num_bytes)
        return True

    def settle(self) -> None:
        """Hold what weights do not use. To be called when some have gone."""
        self._hold(self.free_bytes)

    def _hold(self, num_bytes: int) -> None:
        self.driver.held_bytes = num_bytes
        self.pool.account_overhead(self.driver.overhead_bytes())
