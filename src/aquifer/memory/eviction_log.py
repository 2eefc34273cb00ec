"""The eviction log: which tenant lost what to whom, and the regret expected and paid.

An entry is what one tenant lost while the pool made room once. The expected regret is that of the
eviction rule (`aquifer.memory.reclaim`), times the bytes:

    expected regret = p(needed again) x seconds to restore x sensitivity

The regret paid is the time that it has taken since to restore what was evicted. So over a long time
the sums of both tell whether the rule's probabilities are right.

A tenant names each item that it loses by a key, and the same key when the item is restored. The
keys of what was lost are kept as long as it may come back, up to a bound; beyond that, the oldest
are forgotten, and what restoring them takes is not counted.

All of it is for the engine's loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from aquifer.memory.owners import PROCESS, Owner

_MOST_ENTRIES = 100
_MOST_KEYS = 1 << 15  # of one tenant


@dataclass(slots=True)
class Eviction:
    """What one tenant lost, while the pool made room once."""

    time_s: float  # since the epoch
    clock_s: float  # the same moment on the reclaimer's clock
    loser: Owner
    asker: Owner  # that the pool was short for
    num_items: int  # weights: groups of parameters; prefixes: blocks and checkpoints
    num_bytes: int
    expected_s: float  # regret
    paid_s: float = 0.0  # seconds that restoring some of it has taken since
    num_restored: int = 0  # items that have been restored


@dataclass(slots=True)
class EvictionTotals:
    """Sums over the evictions of one tenant since the start."""

    num_evictions: int = 0
    num_bytes: int = 0
    expected_s: float = 0.0
    paid_s: float = 0.0


class EvictionLog:
    """The latest evictions of all tenants, and sums over all of them.

    Args:
        wall_s: tells the time in seconds since the epoch.
    """

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._entries: deque[Eviction] = deque(maxlen=_MOST_ENTRIES)
        self._totals: dict[Owner, EvictionTotals] = {}
        # The present call of the reclaimer:
        self._asker, self._clock_s = PROCESS, 0.0
        self._open: dict[Owner, Eviction] = {}

    def begin(self, asker: Owner, clock_s: float) -> None:
        """The pool is short: what is evicted from now on makes room for `asker`."""
        self._asker, self._clock_s = asker, clock_s
        self._open.clear()

    def losses_of(self, loser: Owner) -> Losses:
        """Where a tenant reports what it loses and restores."""
        return Losses(self, loser)

    @property
    def latest(self) -> tuple[Eviction, ...]:
        """Copies of the latest entries, the oldest first."""
        return tuple(replace(entry) for entry in self._entries)

    @property
    def totals(self) -> Mapping[Owner, EvictionTotals]:
        """Copies of the sums, by the tenant that lost."""
        return {loser: replace(totals) for loser, totals in self._totals.items()}

    def add(self, loser: Owner, num_items: int, num_bytes: int, expected_s: float) -> Eviction:
        """Record an eviction; returns its entry. For `Losses`."""
        entry = self._open.get(loser)
        totals = self._totals.setdefault(loser, EvictionTotals())
        if entry is None:
            entry = Eviction(self._wall_s(), self._clock_s, loser, self._asker, 0, 0, 0.0)
            self._open[loser] = entry
            self._entries.append(entry)
            totals.num_evictions += 1
        entry.num_items += num_items
        entry.num_bytes += num_bytes
        entry.expected_s += expected_s
        totals.num_bytes += num_bytes
        totals.expected_s += expected_s
        return entry

    def pay(self, entry: Eviction, num_items: int, seconds: float) -> None:
        """Record that items of an entry were restored. For `Losses`."""
        entry.num_restored += num_items
        entry.paid_s += seconds
        self._totals[entry.loser].paid_s += seconds


class _Loss(NamedTuple):
    """Items that were evicted at once."""

    keys: Sequence[Hashable]
    entry: Eviction


class Losses:
    """What one tenant has lost and has not restored. Made by `EvictionLog.losses_of`.

    Args:
        log: the log.
        loser: the tenant.
    """

    def __init__(self, log: EvictionLog, loser: Owner) -> None:
        self._log = log
        self._loser = loser
        self._lost: dict[Hashable, _Loss] = {}
        self._losses: deque[_Loss] = deque()  # the oldest first
        self._num_keys = 0  # of all of them, restored or not

    def __len__(self) -> int:
        return len(self._lost)

    def evicted(self, keys: Sequence[Hashable], num_bytes: int, expected_s: float) -> None:
        """Record that items were evicted.

        Args:
            keys: of the items; not to be changed later.
            num_bytes: that were given back.
            expected_s: the regret of all of them together.
        """
        entry = self._log.add(self._loser, len(keys), num_bytes, expected_s)
        lost, loss = self._lost, _Loss(keys, entry)
        lost.update(dict.fromkeys(keys, loss))  # the latest loss of an item is the one paid for
        self._losses.append(loss)
        self._num_keys += len(keys)
        while self._num_keys > _MOST_KEYS:
            oldest = self._losses.popleft()
            self._num_keys -= len(oldest.keys)
            for key in oldest.keys:
                if lost.get(key) is oldest:
                    del lost[key]

    def restored(self, keys: Sequence[Hashable], seconds_of: Callable[[int, int], float]) -> None:
        """Record that items are there again; those that were not evicted are left out.

        Args:
            keys: of the items.
            seconds_of: the seconds that restoring the items at [start, stop) of `keys` has taken.
        """
        start = 0
        for _, group in groupby([self._lost.pop(key, None) for key in keys], id):
            losses = list(group)
            stop, loss = start + len(losses), losses[0]
            if loss is not None:
                self._log.pay(loss.entry, stop - start, seconds_of(start, stop))
            start = stop

    def forget(self) -> None:
        """Count no more what was lost: the tenant has given up all it had for another reason."""
        self._lost.clear()
        self._losses.clear()
        self._num_keys = 0
