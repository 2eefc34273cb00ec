"""The eviction rule: regret orders victims, and the cheapest of all tenants are evicted first."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory.page_tenant import PageTenant

from aquifer.errors import InvariantError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer, ReuseModel, regret_per_byte

reproducible = settings(deadline=None, database=None, derandomize=True)

ASKER = Owner("asker", Kind.KV)

ages = st.floats(0, 1e7)
reuses = st.integers(0, 50)
models = st.builds(
    ReuseModel,
    horizon_s=st.floats(1, 1e4),
    scale_s=st.floats(1, 1e3),
    first_shape=st.floats(0.1, 3),
    reuse_shape=st.floats(0.1, 3),
    max_reuses=st.integers(1, 20),
)


@given(model=models, age_s=ages, later_s=st.floats(1, 1e6), count=reuses)
@reproducible
def test_probability_falls_with_age(model: ReuseModel, age_s: float, later_s: float, count: int):
    now = model.probability(age_s, count)
    later = model.probability(age_s + later_s, count)
    assert 0 < later <= now <= 1
    if later_s > 0.01 * (age_s + model.scale_s) and now < 1:
        assert later < now


@given(model=models, age_s=ages, count=reuses)
@reproducible
def test_probability_rises_with_reuse_up_to_a_limit(model: ReuseModel, age_s: float, count: int):
    fewer, more = (model.probability(age_s, n) for n in (count, count + 1))
    if count >= model.max_reuses:
        assert more == fewer
    elif more < 1:
        assert more > fewer


def test_probability_is_the_lomax_tail():
    model = ReuseModel(horizon_s=60, scale_s=20, first_shape=0.5, reuse_shape=1.0, max_reuses=4)
    # 1 - (age + scale) / (age + scale + horizon) to the power of 0.5 + sqrt(reuses)
    assert model.probability(0.0, 0) == pytest.approx(1 - (20 / 80) ** 0.5)
    assert model.probability(0.0, 4) == pytest.approx(1 - (20 / 80) ** 2.5)
    assert model.probability(100.0, 1) == pytest.approx(1 - (120 / 180) ** 1.5)
    assert model.probability(100.0, 99) == model.probability(100.0, 4)
    assert model.probability(-5.0, 0) == model.probability(0.0, 0)
    # Small ones keep their digits: shape x horizon / age, nearly.
    assert model.probability(1e15, 0) == pytest.approx(0.5 * 60 / 1e15)


positive = st.floats(1e-6, 1e6)


@given(p=st.floats(1e-6, 1), seconds=positive, weight=positive, size=st.integers(1, 1 << 40))
@reproducible
def test_regret_is_delay_per_byte(p: float, seconds: float, weight: float, size: int):
    regret = regret_per_byte(p, seconds, size, weight)
    assert regret > 0
    assert regret_per_byte(p, 2 * seconds, size, weight) == pytest.approx(2 * regret)
    assert regret_per_byte(p, seconds, size, 2 * weight) == pytest.approx(2 * regret)
    assert regret_per_byte(p / 2, seconds, size, weight) == pytest.approx(regret / 2)
    assert regret_per_byte(p, seconds, 2 * size, weight) == pytest.approx(regret / 2)


class Shelf:
    """Victims of given (regret per byte, bytes), kept in order of regret."""

    def __init__(self, victims: list[tuple[float, int]], log: list[tuple[float, int]]):
        self.victims = sorted(victims)
        self.log = log
        self.now_s: list[float] = []

    @property
    def evictable_bytes(self) -> int:
        return sum(size for _, size in self.victims)

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        self.now_s.append(now_s)
        return sum(size for regret, size in self.victims if regret < limit)

    def cheapest(self, now_s: float) -> float | None:
        self.now_s.append(now_s)
        return self.victims[0][0] if self.victims else None

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        self.now_s.append(now_s)
        dropped = 0
        while self.victims and dropped < num_bytes and (not dropped or self.victims[0][0] <= limit):
            self.log.append(self.victims.pop(0))
            dropped += self.log[-1][1]
        return dropped


def reclaimer_of(*shelves: Shelf) -> Reclaimer:
    reclaimer = Reclaimer(lambda: 12.5)
    for shelf in shelves:
        reclaimer.register(shelf)
    return reclaimer


shelves = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6), max_size=4
)


@given(contents=shelves, wanted=st.integers(1, 60))
@reproducible
def test_the_least_regret_of_all_tenants_goes_first(
    contents: list[list[tuple[float, int]]], wanted: int
):
    log: list[tuple[float, int]] = []
    reclaimer = reclaimer_of(*(Shelf(victims, log) for victims in contents))
    everything = sorted(victim for victims in contents for victim in victims)
    total = sum(size for _, size in everything)
    assert reclaimer.evictable_bytes == total
    assert reclaimer.reclaim(wanted, ASKER) == bool(everything)
    regrets = [regret for regret, _ in log]
    assert regrets == [regret for regret, _ in everything[: len(log)]], "cheapest first"
    dropped = sum(size for _, size in log)
    assert dropped >= min(wanted, total), "enough is dropped"
    assert dropped - (log[-1][1] if log else 0) < wanted, "and no more than that"
    assert reclaimer.evictable_bytes == total - dropped


@given(contents=shelves, wanted=st.integers(1, 60), limit=st.integers(0, 10))
@reproducible
def test_evictable_bytes_below_a_regret(
    contents: list[list[tuple[float, int]]], wanted: int, limit: int
):
    log: list[tuple[float, int]] = []
    reclaimer = reclaimer_of(*(Shelf(victims, log) for victims in contents))
    everything = [victim for victims in contents for victim in victims]
    below = sum(size for regret, size in everything if regret < limit)
    found = reclaimer.evictable_below(wanted, limit)
    assert min(found, wanted) == min(below, wanted)
    assert found <= below
    assert reclaimer.evictable_below(wanted) == reclaimer.evictable_bytes
    assert not log, "nothing was evicted"


def test_tenants_are_asked_for_one_moment():
    shelf = Shelf([(1.0, 1), (2.0, 1)], [])
    reclaimer = reclaimer_of(shelf)
    reclaimer.evictable_below(2, 1.5)
    reclaimer.reclaim(2, ASKER)
    assert set(shelf.now_s) == {12.5}


def test_a_tenant_that_offers_but_gives_nothing_does_not_hold_up_others():
    class Stubborn(Shelf):
        def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
            return 0

    log: list[tuple[float, int]] = []
    assert reclaimer_of(Stubborn([(0.0, 9)], log), Shelf([(1.0, 3)], log)).reclaim(5, ASKER)
    assert log == [(1.0, 3)]
    assert not reclaimer_of(Stubborn([(0.0, 9)], log)).reclaim(5, ASKER)


def test_of_equals_the_first_registered_goes():
    log: list[tuple[float, int]] = []
    first, second = Shelf([(1.0, 1)], log), Shelf([(1.0, 2)], log)
    reclaimer_of(first, second).reclaim(1, ASKER)
    assert log == [(1.0, 1)]


def test_an_unregistered_tenant_keeps_its_victims():
    shelf = Shelf([(1.0, 1)], [])
    reclaimer = reclaimer_of(shelf)
    reclaimer.unregister(shelf)
    assert not reclaimer.reclaim(1, ASKER)
    assert shelf.victims
    with pytest.raises(InvariantError, match="never was registered"):
        reclaimer.unregister(shelf)


def test_a_pool_that_is_short_takes_from_the_cheapest_tenants():
    pool = PagePool(HostDriver(), 6 * 4096, 4096)
    one = PageTenant(pool, Owner("a", Kind.PREFIX), [1.0, 4.0, 5.0])
    two = PageTenant(pool, Owner("b", Kind.WEIGHTS), [2.0, 3.0, 6.0])
    reclaimer = reclaimer_of()
    pool.on_short = reclaimer.reclaim
    owner = Owner("c", Kind.KV)
    assert pool.acquire(owner, 1) is None, "no tenant is registered yet"
    reclaimer.register(one)
    reclaimer.register(two)
    taken = pool.acquire(owner, 4)
    assert taken is not None
    assert [regret for regret, _ in one.pages + two.pages] == [5.0, 6.0]
    pool.check()
    assert pool.acquire(owner, 3) is None, "more than there is"
    assert reclaimer.evictable_bytes == 0, "what was given up for it stays given up"
    assert pool.free_bytes == 2 * 4096
    pool.release(taken)
    pool.close()
    pool.driver.close()
