"""The buddy system: stretches of a power of two, split and merged by halves.

It is what a server that keeps each sequence's KV contiguous places its reservations with
(PagedAttention, section 6.1), and it wastes in two ways: a request is rounded up to a power of two,
and what is free may lie in pieces that are too small. It counts in units and knows nothing of what
they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from aquifer.errors import InvariantError


class BuddyAllocator:
    """Places stretches in [0, num_units).

    A stretch of 2**k units begins at a multiple of 2**k. Its buddy is the other half of the stretch
    of 2**(k + 1) that it is a half of; two free buddies are always merged. Where `num_units` is no
    power of two, the largest powers that it is a sum of come one after the other, and are never
    merged with each other.

    Args:
        num_units: size of the arena.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._taken: dict[int, int] = {}  # first unit -> k
        # For each k the first units of the free stretches, ascending.
        self._free: list[list[int]] = [[] for _ in range(num_units.bit_length())]
        first = 0
        for order in reversed(range(num_units.bit_length())):
            if num_units >> order & 1:
                self._free[order].append(first)
                first += 1 << order

    @property
    def free_units(self) -> int:
        """Units in no stretch that was allocated."""
        return sum(len(firsts) << order for order, firsts in enumerate(self._free))

    @property
    def largest_free_units(self) -> int:
        """The most that one call could get; 0 if there is nothing."""
        return max((1 << order for order, firsts in enumerate(self._free) if firsts), default=0)

    @staticmethod
    def rounded(num_units: int) -> int:
        """What a request of that many units takes: the next power of two."""
        return 1 << (num_units - 1).bit_length()

    def allocate(self, num_units: int) -> range | None:
        """Take `rounded(num_units)` units, from the smallest free stretch that is large enough.

        Of several the lowest. None if there is no such stretch; then nothing has changed.

        Args:
            num_units: at least 1.
        """
        if num_units < 1:
            raise InvariantError(f"a stretch of {num_units} units")
        wanted = (num_units - 1).bit_length()
        for order in range(wanted, len(self._free)):
            if self._free[order]:
                break
        else:
            return None
        first = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free[order], first + (1 << order))
        self._taken[first] = wanted
        return range(first, first + (1 << wanted))

    def release(self, first: int) -> None:
        """Give back the stretch that begins there, and merge it as far as its buddies are free.

        Raises:
            InvariantError: no stretch begins there.
        """
        order = self._taken.pop(first, None)
        if order is None:
            raise InvariantError(f"no stretch begins at unit {first}")
        while True:
            firsts = self._free[order]
            buddy = first ^ (1 << order)
            index = bisect_left(firsts, buddy)
            if index == len(firsts) or firsts[index] != buddy:
                break
            del firsts[index]
            first = min(first, buddy)
            order += 1
        insort(firsts, first)

    def check(self) -> None:
        """Verify that the stretches cover the arena once, are aligned, and are merged.

        Raises:
            InvariantError: they do not.
        """
        free = [(first, order) for order, firsts in enumerate(self._free) for first in firsts]
        end = 0
        for first, order in sorted([*free, *self._taken.items()]):
            if first != end or first % (1 << order):
                raise InvariantError(f"a stretch of 2**{order} units at {first}, after {end}")
            end = first + (1 << order)
        if end != self.num_units:
            raise InvariantError(f"the stretches end at {end}, the arena at {self.num_units}")
        for first, order in free:
            if (first ^ (1 << order), order) in free:
                raise InvariantError(f"two free buddies of 2**{order} units at {first}")
