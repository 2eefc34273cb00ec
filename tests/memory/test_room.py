"""Room in a pool: free pages, and what tenants of different regret could give up."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory.page_tenant import PageTenant

from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer
from aquifer.memory.room import Room

PAGE = 4096
KV = Owner("c", Kind.KV)


@pytest.fixture
def pool() -> Iterator[PagePool]:
    pool = PagePool(HostDriver(), 10 * PAGE, PAGE)
    yield pool
    pool.driver.close()


def test_two_tenants_of_different_regret(pool: PagePool):
    room = Room(pool, Reclaimer(lambda: 0.0))
    prefixes = PageTenant(pool, Owner("a", Kind.PREFIX), [1.0, 1.0, 4.0])
    weights = PageTenant(pool, Owner("b", Kind.WEIGHTS), [2.0, 3.0])
    assert (room.free_pages, room.reachable_pages) == (5, 5)
    assert room.has(5)
    assert not room.has(6), "no tenant is registered"
    room.reclaimer.register(prefixes)
    assert room.reachable_pages == 8
    room.reclaimer.register(weights)
    assert (room.free_pages, room.reachable_pages) == (5, 10)
    # So many pages there are at less than this regret.
    for at_regret, num_pages in ((0.5, 5), (1.0, 5), (1.5, 7), (2.5, 8), (3.5, 9), (math.inf, 10)):
        assert room.has(num_pages, at_regret)
        assert not room.has(num_pages + 1, at_regret)
    assert room.has(0)
    assert room.has(-3, 0.0)


def test_only_a_finite_regret_walks_victims_and_no_more_than_needed(pool: PagePool):
    room = Room(pool, Reclaimer(lambda: 0.0))
    tenant = PageTenant(pool, KV, [1.0] * 8)
    room.reclaimer.register(tenant)
    assert room.has(10)
    assert not room.has(11)
    assert room.has(2, 5.0), "free pages suffice"
    assert tenant.num_walked == 0
    assert room.has(5, 5.0)
    assert tenant.num_walked == 3


@given(
    regrets=st.lists(st.lists(st.integers(0, 9).map(float), max_size=5), min_size=1, max_size=3),
    num_pages=st.integers(0, 12),
    at_regret=st.integers(0, 10).map(float) | st.just(math.inf),
)
@settings(deadline=None, database=None, derandomize=True)
def test_what_there_is_room_for_can_be_acquired(
    regrets: list[list[float]], num_pages: int, at_regret: float
):
    pool = PagePool(HostDriver(), 16 * PAGE, PAGE)
    # The reclaimer's batch is less than a page, so only as much is evicted as is needed.
    room = Room.of(pool, lambda: 0.0)
    kinds = (Kind.PREFIX, Kind.WEIGHTS, Kind.STATE)
    tenants = [
        PageTenant(pool, Owner("a", kind), victims)
        for kind, victims in zip(kinds, regrets, strict=False)
    ]
    for tenant in tenants:
        room.reclaimer.register(tenant)
    victims = sorted(regret for tenant in regrets for regret in tenant)
    num_below = sum(regret < at_regret for regret in victims)
    assert room.has(num_pages, at_regret) == (num_pages <= 16 - len(victims) + num_below)
    if room.has(num_pages, at_regret):
        handles = pool.acquire(KV, num_pages)
        assert handles is not None
        left = sorted(regret for tenant in tenants for regret, _ in tenant.pages)
        assert left == victims[len(victims) - len(left) :], "the cheapest went"
        assert all(regret < at_regret for regret in victims[: len(victims) - len(left)])
    pool.driver.close()


def test_pages_beside_other_bytes(pool: PagePool):
    room = Room.of(pool, lambda: 0.0)
    assert room.budget_pages() == 10
    assert room.budget_pages(PAGE + 1) == 8
    assert room.budget_pages(11 * PAGE) == 0
