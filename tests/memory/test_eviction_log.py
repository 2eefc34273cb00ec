"""The eviction log: entries of a call of the reclaimer, sums, and what restoring has taken."""

from __future__ import annotations

import pytest

from aquifer.memory.driver.host import HostDriver
from aquifer.memory.eviction_log import Eviction, EvictionLog, EvictionTotals, Losses
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer

WEIGHTS = Owner("a", Kind.WEIGHTS)
PREFIX = Owner("b", Kind.PREFIX)
KV = Owner("c", Kind.KV)
PAGE = 4096


@pytest.fixture
def log() -> EvictionLog:
    return EvictionLog(lambda: 1000.0)


def test_what_a_tenant_loses_at_once_is_one_entry(log):
    weights, prefix = log.losses_of(WEIGHTS), log.losses_of(PREFIX)
    log.begin(KV, 5.0)
    weights.evicted(["layer 1"], 100, 0.5)
    prefix.evicted([1, 2], 20, 0.25)
    weights.evicted(["layer 0"], 50, 1.0)
    log.begin(WEIGHTS, 6.0)
    prefix.evicted([3], 10, 0.125)
    assert log.latest == (
        Eviction(1000.0, 5.0, WEIGHTS, KV, 2, 150, 1.5),
        Eviction(1000.0, 5.0, PREFIX, KV, 2, 20, 0.25),
        Eviction(1000.0, 6.0, PREFIX, WEIGHTS, 1, 10, 0.125),
    )
    assert log.totals == {
        WEIGHTS: EvictionTotals(1, 150, 1.5),
        PREFIX: EvictionTotals(2, 30, 0.375),
    }


def test_restoring_is_paid_once_and_by_the_latest_eviction(log):
    losses = log.losses_of(PREFIX)
    for clock_s in (1.0, 2.0):
        log.begin(KV, clock_s)
        losses.evicted([1, 2], 20, 1.0)
    losses.restored([7, 1, 8], lambda start, stop: sum([100.0, 0.5, 100.0][start:stop]))
    losses.restored([1], lambda start, stop: 100.0)
    first, second = log.latest
    assert (first.paid_s, first.num_restored) == (0.0, 0)
    assert (second.paid_s, second.num_restored) == (0.5, 1)
    assert log.totals[PREFIX].paid_s == 0.5
    assert len(losses) == 1


def test_what_was_given_up_for_another_reason_is_not_paid(log):
    losses = log.losses_of(WEIGHTS)
    log.begin(KV, 1.0)
    losses.evicted(["layer 0"], 20, 1.0)
    losses.forget()
    losses.restored(["layer 0"], lambda start, stop: 1.0)
    assert log.totals[WEIGHTS].paid_s == 0.0


def test_the_log_is_bounded_and_its_sums_are_not(log):
    losses = log.losses_of(PREFIX)
    num = 50_000
    for key in range(num):
        log.begin(KV, float(key))
        losses.evicted([key], 2, 1.0)
    latest = log.latest
    assert len(latest) < 1000
    assert latest[-1].clock_s == num - 1
    assert log.totals[PREFIX] == EvictionTotals(num, 2 * num, float(num))
    # The oldest keys are forgotten; an entry that has left the log is still paid for in the sums.
    num_known = len(losses)
    assert num_known < num
    losses.restored(range(num), lambda start, stop: stop - start)
    assert log.totals[PREFIX].paid_s == num_known
    assert len(losses) == 0


class Tenant:
    """A source of victims of a page each, which reports what it loses."""

    def __init__(self, pool: PagePool, owner: Owner, num_pages: int, losses: Losses) -> None:
        self.pool, self.losses = pool, losses
        self.pages = pool.acquire(owner, num_pages) or []

    @property
    def evictable_bytes(self) -> int:
        return len(self.pages) * PAGE

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        return self.evictable_bytes

    def cheapest(self, now_s: float) -> float | None:
        return 1.0 if self.pages else None

    def evict(self, num_bytes: int, now_s: float, limit: float = float("inf")) -> int:
        count = min(-(-num_bytes // PAGE), len(self.pages))
        gone, self.pages = self.pages[:count], self.pages[count:]
        self.pool.release(gone)
        self.losses.evicted(gone, count * PAGE, 1.0 * count * PAGE)
        return count * PAGE


def test_the_pool_tells_who_asked():
    pool = PagePool(HostDriver(), 8 * PAGE, PAGE)
    reclaimer = Reclaimer(lambda: 12.5)
    pool.on_short = reclaimer.reclaim
    reclaimer.register(Tenant(pool, PREFIX, 8, reclaimer.log.losses_of(PREFIX)))
    assert pool.acquire(KV, 3) is not None
    (entry,) = reclaimer.log.latest
    assert (entry.loser, entry.asker, entry.clock_s) == (PREFIX, KV, 12.5)
    assert (entry.num_items, entry.num_bytes, entry.expected_s) == (3, 3 * PAGE, 3.0 * PAGE)
