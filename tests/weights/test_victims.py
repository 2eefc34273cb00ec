"""Weights of idle models as victims of the eviction rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from aquifer.memory.driver.host import HostDriver
from aquifer.memory.eviction_log import EvictionLog
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer
from aquifer.memory.use_rate import expected_uses
from aquifer.weights.host_cache import HostCache
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.store import WeightStore
from aquifer.weights.victims import IdleWeights

PAGE = 4096
SIZES = {"embed": 3, "up": 2, "down": 1, "head": 4}  # in pages
NOW_S = 1000.0


class Model:
    """A model's weights, and what it does.

    Those of models of one `origin` are the same, but for `own`.
    """

    def __init__(
        self,
        pool: PagePool,
        reuse: ReuseStore,
        name: str,
        bytes_per_s: float = 1e6,
        sensitivity: float = 1.0,
        p: float = 0.5,
        origin: str = "",
        own: tuple[str, ...] = (),
    ) -> None:
        self.pool = pool
        parameters = [
            Parameter(name, (pages * PAGE // 4,), torch.float32, ())
            for name, pages in SIZES.items()
        ]
        norm = Parameter("norm", (8,), torch.float32, ())
        self.store = WeightStore(pool, Owner(name, Kind.WEIGHTS), [*parameters, norm])
        self.is_idle, self.p, self.sensitivity = True, p, sensitivity
        self.byte_s = 1 / bytes_per_s
        self.num_evictions = 0
        self.log = EvictionLog()
        keys = {
            group: f"{name if group.names[0] in own else origin or name} {group.names}"
            for group in self.store.groups
        }
        self.member = reuse.register(self.store, self, {}, keys)
        self.victims = IdleWeights(
            reuse,
            self.member,
            lambda group: self.byte_s,
            self.log.losses_of(self.store.owner),
        )
        self.reuse = reuse
        self.load()

    def load(self) -> None:
        """Fill what nobody has, each group with its number among those of this model."""
        was_idle, self.is_idle = self.is_idle, False
        to_fill = self.reuse.populate(self.member)
        self.is_idle = was_idle
        assert to_fill is not None
        for group in to_fill:
            for name in group.names:
                self.store.tensors[name].fill_(hash((self.member.keys[group], name)) % 1000)
        self.reuse.filled(self.member, to_fill)

    @property
    def costs_version(self) -> object:
        return self.byte_s

    def probability(self, now_s: float) -> float:
        assert now_s == NOW_S
        return self.p

    def on_evict(self) -> None:
        self.num_evictions += 1

    @property
    def left(self) -> list[str]:
        """Parameters that are resident, in the order of their use."""
        return [name for group in self.store.by_use for name in group.names if self._has(group)]

    @property
    def own_pages(self) -> int:
        """Pages that are accounted to it."""
        return self.pool.owned_bytes(self.store.owner) // PAGE

    def check(self) -> None:
        """Each parameter that is left has its contents."""
        for group in self.store.resident:
            for name in group.names:
                expected = hash((self.member.keys[group], name)) % 1000
                assert (self.store.tensors[name] == expected).all()

    def _has(self, group: object) -> bool:
        return group in self.store.resident


@pytest.fixture
def make() -> Iterator[Callable[..., Model]]:
    with ExitStack() as resources:
        driver = HostDriver()
        resources.callback(driver.close)
        pool = PagePool(driver, 100 * PAGE, PAGE)
        resources.callback(pool.close)
        host = HostCache(0, driver.device)
        reuse = ReuseStore(host, Path("nowhere"))

        def make_it(name: str, **options: Any) -> Model:
            model = Model(pool, reuse, name, **options)
            resources.callback(model.store.close)
            resources.callback(reuse.evict, model.member)
            return model

        yield make_it
        pool.check()


def test_what_a_step_uses_last_goes_first(make: Callable[..., Model]):
    """And no more than is asked for, up to the last group."""
    model = make("a")
    assert model.left == ["norm", "embed", "up", "down", "head"]
    assert model.victims.evictable_bytes == 11 * PAGE
    assert model.victims.evict(PAGE, NOW_S) == 4 * PAGE
    assert model.left == ["norm", "embed", "up", "down"]
    assert model.victims.evict(3 * PAGE, NOW_S) == 3 * PAGE
    assert model.left == ["norm", "embed"]
    assert model.num_evictions == 2
    assert model.victims.evict(100 * PAGE, NOW_S) == 4 * PAGE
    assert (model.left, model.victims.cheapest(NOW_S)) == ([], None)
    assert model.victims.evict(PAGE, NOW_S) == 0
    assert model.num_evictions == 3


def test_the_log_has_the_regret_of_what_went(make: Callable[..., Model]):
    model = make("logged", bytes_per_s=1e6, sensitivity=2.0, p=0.3)
    model.log.begin(Owner("b", Kind.KV), NOW_S)
    assert model.victims.evict(5 * PAGE, NOW_S) == 5 * PAGE
    entry = model.log.latest[-1]
    assert (entry.loser, entry.asker) == (Owner("logged", Kind.WEIGHTS), Owner("b", Kind.KV))
    assert (entry.num_items, entry.num_bytes) == (2, 5 * PAGE)
    assert entry.expected_s == pytest.approx(expected_uses(0.3) * 2.0 * 5 * PAGE / 1e6)


def test_what_is_in_use_stays(make: Callable[..., Model]):
    model = make("a")
    model.is_idle = False
    victims = model.victims
    assert (victims.evictable_bytes, victims.cheapest(NOW_S), victims.evict(1, NOW_S)) == (
        0,
        None,
        0,
    )
    assert victims.evictable_below(PAGE, NOW_S, 1e9) == 0
    assert len(model.left) == 5
    assert model.num_evictions == 0


def test_regret_is_that_of_equation_2_for_each_byte(make: Callable[..., Model]):
    """Uses x (s / b) x alpha, by size: the same for all groups of a model."""
    model = make("a", bytes_per_s=2e6, sensitivity=0.5, p=0.25)
    expected = expected_uses(0.25) / 2e6 * 0.5
    assert model.victims.cheapest(NOW_S) == pytest.approx(expected)
    model.victims.evict(4 * PAGE, NOW_S)
    assert model.victims.cheapest(NOW_S) == pytest.approx(expected)
    model.p = 1.0
    assert model.victims.cheapest(NOW_S) == pytest.approx(expected_uses(1.0) / 2e6 * 0.5)
    assert model.victims.evictable_below(100 * PAGE, NOW_S, 0.4 / 2e6) == 0
    assert model.victims.evictable_below(2 * PAGE, NOW_S, 1.0) == 3 * PAGE


def test_uses_are_expected_of_busy_models_that_p_does_not_tell_apart():
    assert expected_uses(1e-9) == pytest.approx(1e-9)
    assert expected_uses(1 - math.exp(-3)) == pytest.approx(3)
    assert expected_uses(0.999999) == expected_uses(1.0) == 5


def test_models_go_in_the_order_of_equation_2(make: Callable[..., Model]):
    """Models of one speed and equal tensors are evicted in ascending order of p x alpha."""
    weights = {"a": (0.4, 1.0), "b": (0.4, 0.3), "c": (0.1, 1.0), "d": (0.4, 2.0)}
    models = {name: make(name, p=p, sensitivity=alpha) for name, (p, alpha) in weights.items()}
    reclaimer = Reclaimer(lambda: NOW_S)
    for model in models.values():
        reclaimer.register(model.victims)
    gone: list[str] = []
    while reclaimer.reclaim(PAGE, Owner("asker", Kind.KV)):
        gone += [name for name, model in models.items() if not model.left and name not in gone]
    assert gone == sorted(weights, key=lambda name: weights[name][0] * weights[name][1])


def test_it_stops_where_another_tenant_is_cheaper(make: Callable[..., Model]):
    model = make("a")
    regret = model.victims.cheapest(NOW_S)
    assert regret is not None
    assert model.victims.evict(100 * PAGE, NOW_S, regret / 2) == 4 * PAGE  # the first in any case
    assert model.victims.evict(100 * PAGE, NOW_S, 1.01 * regret) == 7 * PAGE


def test_what_is_restored_sooner_goes_first(make: Callable[..., Model]):
    model = make("a")
    (up,) = [group for group in model.store.groups if group.names == ("up",)]
    losses = model.log.losses_of(model.store.owner)
    victims = IdleWeights(
        model.reuse, model.member, lambda group: 1e-7 if group is up else 1e-6, losses
    )
    assert victims.evict(PAGE, NOW_S) == 2 * PAGE
    assert model.left == ["norm", "embed", "down", "head"]


def test_the_order_follows_what_it_takes_to_restore_groups(make: Callable[..., Model]):
    """It is kept between evictions, while neither the costs nor what is there changes."""
    model = make("a")
    slow = {"up"}

    def byte_s(group: ParameterGroup) -> float:
        return 1e-6 if slow & set(group.names) else 1e-7

    losses = model.log.losses_of(model.store.owner)
    victims = IdleWeights(model.reuse, model.member, byte_s, losses)
    assert victims.evict(PAGE, NOW_S) == 4 * PAGE
    assert model.left == ["norm", "embed", "up", "down"]
    slow.add("down")
    model.byte_s /= 2  # its costs have changed
    assert victims.evict(PAGE, NOW_S) == 3 * PAGE
    assert model.left == ["norm", "up", "down"]
    model.load()
    slow.clear()
    model.byte_s /= 2
    assert victims.evict(PAGE, NOW_S) == 4 * PAGE
    assert model.left == ["norm", "embed", "up", "down"]


def test_an_eviction_of_a_busy_model_keeps_no_order(make: Callable[..., Model]):
    model = make("a")
    assert model.victims.evict(PAGE, NOW_S) == 4 * PAGE
    model.load()
    model.is_idle = False
    assert model.victims.evict(PAGE, NOW_S) == 0
    model.is_idle = True
    assert model.victims.evict(PAGE, NOW_S) == 4 * PAGE
    assert model.left == ["norm", "embed", "up", "down"]


# --- weights that several models share ---------------------------------------------------------


def test_equal_groups_take_their_pages_once(make: Callable[..., Model]):
    base = make("base", origin="x")
    tuned = make("tuned", origin="x", own=("up",))
    same = make("same", origin="x")
    assert [model.own_pages for model in (base, tuned, same)] == [11, 2, 0]
    for model in (base, tuned, same):
        assert len(model.left) == 5
        model.check()
    members = [model.member for model in (base, tuned, same)]
    assert base.reuse.distinct_bytes(members) == 13 * PAGE
    assert base.reuse.distinct_bytes(members[1:]) == 13 * PAGE


def test_a_shared_group_stays_while_any_model_uses_it(make: Callable[..., Model]):
    """And what the others hold of it is accounted to one of them."""
    base = make("base", origin="x")
    tuned = make("tuned", origin="x", own=("up",))
    tuned.is_idle = False
    assert base.victims.evictable_bytes == 2 * PAGE
    assert base.victims.evict(100 * PAGE, NOW_S) == 2 * PAGE
    assert base.left == ["norm", "embed", "down", "head"]
    base.reuse.evict(base.member)
    assert (base.left, len(tuned.left)) == ([], 5)
    assert (base.own_pages, tuned.own_pages) == (0, 11)
    tuned.check()
    base.load()
    base.check()
    assert (base.own_pages, tuned.own_pages) == (2, 11)


def test_a_shared_group_goes_from_all_at_once(make: Callable[..., Model]):
    """At a regret that is that of either of them being needed; the bytes count once."""
    base = make("base", origin="x", p=0.5)
    tuned = make("tuned", origin="x", own=("up",), p=0.2)
    victims = [base.victims, tuned.victims]
    assert [each.evictable_bytes for each in victims] == [11 * PAGE, 2 * PAGE]
    assert tuned.victims.cheapest(NOW_S) == pytest.approx(expected_uses(0.2) / 1e6)
    assert base.victims.cheapest(NOW_S) == pytest.approx(expected_uses(0.5) / 1e6)  # its own one
    assert base.victims.evict(3 * PAGE, NOW_S) == 6 * PAGE
    assert (base.left, tuned.left) == (["norm", "embed", "down"], ["norm", "embed", "up", "down"])
    assert base.victims.cheapest(NOW_S) == pytest.approx(
        (expected_uses(0.5) + expected_uses(0.2)) / 1e6
    )
    assert (base.num_evictions, tuned.num_evictions) == (1, 1)
    assert [each.evictable_bytes for each in victims] == [5 * PAGE, 2 * PAGE]
    tuned.load()
    base.load()
    assert [model.own_pages for model in (base, tuned)] == [7, 6]
    assert [each.evictable_bytes for each in victims] == [7 * PAGE, 6 * PAGE]
    base.check()
    tuned.check()


def test_a_load_does_not_evict_what_it_is_about_to_share(make: Callable[..., Model]):
    """A short pool takes a group that the model to be loaded has of its own."""
    base = make("base", origin="x")
    reclaimer = Reclaimer(lambda: NOW_S)
    reclaimer.register(base.victims)
    base.pool.on_short = reclaimer.reclaim
    rest = base.pool.acquire(Owner("rest", Kind.KV), 89)
    assert rest is not None
    tuned = make("tuned", origin="x", own=("embed",))
    assert (base.left, len(tuned.left)) == (["norm", "up", "down", "head"], 5)
    assert (base.own_pages, tuned.own_pages) == (8, 3)
    base.pool.on_short = None
    base.check()
    tuned.check()
    base.reuse.evict(base.member)
    assert (base.own_pages, tuned.own_pages) == (0, 11)
    base.pool.release(rest)


def test_a_load_without_room_leaves_shared_groups_as_they_were(make: Callable[..., Model]):
    base = make("base", origin="x")
    base.is_idle = False
    tuned = make("tuned", origin="x", own=("head",))
    tuned.reuse.evict(tuned.member)
    rest = base.pool.acquire(Owner("rest", Kind.KV), 86)
    assert rest is not None
    assert tuned.reuse.populate(tuned.member) is None
    assert not tuned.reuse.has_shared
    assert (base.own_pages, tuned.own_pages, tuned.left) == (11, 0, [])
    base.pool.release(rest)
    tuned.load()
    assert (base.own_pages, tuned.own_pages) == (11, 4)
