"""Guard pages under the addresses of a cache: what no sequence has written reads as NaN.

Three things do this, where the pool has guards (`aquifer.memory.guard`):

- Pages that are put under places are filled with 0xFF, also those that an earlier sequence left
  there. So are parts of pages that a cache gives to another sequence while the page stays.
- The guard page is mapped at places where kernels have nothing to read: behind the last page of
  each slot, and under the block to which unused entries of tables point. There, a kernel that reads
  too far would otherwise end the process with a fault that names no kernel.
- Pages that are nowhere in use hold 0xFF, which the pool sees to.

Bytes are filled by the stream of the steps: after the work that may still read what was there, such
as a copy to host memory, and before the work that the place is given out for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from aquifer.errors import DriverError
from aquifer.memory.guard import POISON, GuardedPages
from aquifer.memory.owners import GUARD
from aquifer.memory.pages import Page
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.residency import PendingPages, Residency


class GuardedResidency(Residency):
    """A `Residency` whose pages read as NaN until they are written, with guards at other places.

    Guards are not recorded: they are the business of each process.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        range_: where they are mapped.
        guarded: the pool's pages.

    Attributes:
        guards: the places of the guard page.
    """

    def __init__(
        self, pool: PagePool, owner: Owner, range_: VirtualRange, guarded: GuardedPages
    ) -> None:
        super().__init__(pool, owner, range_)
        self.guards: set[int] = set()
        self._guard = guarded.guard
        self._of_guards = Residency(pool, GUARD, range_)

    # --- what is filled ----------------------------------------------------------------------

    def populate(
        self,
        stretches: Sequence[range],
        *,
        units: int | Sequence[int] = 1,
        may_reclaim: bool = True,
        is_overwritten: bool = False,
    ) -> bool:
        """See `Residency.populate`; the pages read as NaN."""
        self.lift(chain.from_iterable(stretches))
        if not super().populate(
            stretches, units=units, may_reclaim=may_reclaim, is_overwritten=is_overwritten
        ):
            return False
        for stretch in stretches:
            self._poison_places(stretch)
        return True

    def populate_later(
        self, stretches: Sequence[range], when_settled: Callable[[], None] | None = None
    ) -> PendingPages | None:
        """See `Residency.populate_later`."""
        self.lift(chain.from_iterable(stretches))
        return super().populate_later(stretches, when_settled)

    def settle(self, pending: PendingPages) -> bool:
        """See `Residency.settle`; the pages read as NaN."""
        is_done = super().settle(pending)
        for index, pages in pending.pieces if is_done else ():
            self._poison_places(range(index, index + len(pages)))
        return is_done

    def alias(self, index: int, pages: Sequence[Page]) -> None:
        """See `Residency.alias`."""
        self.lift(range(index, index + sum(map(self.range.num_places, pages))))
        super().alias(index, pages)

    def poison(self, offset_bytes: int, num_bytes: int) -> None:
        """Fill mapped bytes that were given to another sequence."""
        self.range.tensor((num_bytes,), torch.uint8, offset_bytes).fill_(POISON)

    # --- where the guard page is -------------------------------------------------------------

    def move_guards(self, places: Iterable[int]) -> None:
        """Have the guard page at these places, and at no others.

        Places are left without it where the device refuses: nothing depends on it.

        Args:
            places: places without a page in use.
        """
        wanted = set(places)
        self.lift(self.guards - wanted)
        for place in sorted(wanted - self.guards):
            self._of_guards.share([self._guard])
            try:
                self._of_guards.alias(place, [self._guard])
            except DriverError:
                self._of_guards.release([self._guard])
                return
            self.guards.add(place)

    def lift(self, places: Iterable[int]) -> None:
        """Unmap the guard page where it is at these places, once no work in flight can touch it.

        Pages may come to these places from now on. `move_guards` before the next step has it where
        it belongs then.
        """
        if not self.guards:
            return
        lifted = sorted(self.guards.intersection(places))
        self.guards.difference_update(lifted)
        self._of_guards.give_up(lifted)
        self._pool.retired.vacate(self.range, lifted)

    def _poison_places(self, places: range) -> None:
        if places:
            page_bytes = self.range.page_bytes
            self.poison(places.start * page_bytes, len(places) * page_bytes)
