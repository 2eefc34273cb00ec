"""Weights of idle models as victims of the eviction rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from aquifer.memory.driver.host import HostDriver
from aquifer.memory.eviction_log import EvictionLog
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer, ReuseModel
from aquifer.weights.store import Parameter, WeightStore
from aquifer.weights.victims import IdleWeights

PAGE = 4096
SIZES = {"embed": 3, "up": 2, "down": 1, "head": 4}  # in pages
NOW_S = 1000.0


class Model:
    """A model's weights, and what it does."""

    def __init__(
        self, pool: PagePool, name: str, bytes_per_s: float = 1e6, sensitivity: float = 1.0
    ) -> None:
        parameters = [
            Parameter(name, (pages * PAGE // 4,), torch.float32, ())
            for name, pages in SIZES.items()
        ]
        norm = Parameter("norm", (8,), torch.float32, ())
        self.store = WeightStore(pool, Owner(name, Kind.WEIGHTS), [*parameters, norm])
        self.is_idle, self.is_wanted = True, False
        self.num_evictions = 0
        self.log = EvictionLog()
        self.victims = IdleWeights(
            self.store,
            lambda num_bytes: num_bytes / bytes_per_s,
            lambda: self.is_idle,
            lambda: self.is_wanted,
            self._evicted,
            sensitivity=sensitivity,
            losses=self.log.losses_of(Owner(name, Kind.WEIGHTS)),
        )
        self.victims.last_used_s = NOW_S - 100
        assert self.store.populate()

    def _evicted(self) -> None:
        self.num_evictions += 1

    @property
    def left(self) -> list[str]:
        """Parameters that are resident, in the order of their use."""
        return [name for group in self.store.by_use for name in group.names if self._has(group)]

    def _has(self, group: object) -> bool:
        return group in self.store.resident


@pytest.fixture
def make() -> Iterator[Callable[..., Model]]:
    with ExitStack() as resources:
        driver = HostDriver()
        resources.callback(driver.close)
        pool = PagePool(driver, 100 * PAGE, PAGE)
        resources.callback(pool.close)

        def make_it(name: str, **options: float) -> Model:
            model = Model(pool, name, **options)
            resources.callback(model.store.close)
            return model

        yield make_it


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
    model = make("logged", bytes_per_s=1e6, sensitivity=2.0)
    model.log.begin(Owner("b", Kind.KV), NOW_S)
    assert model.victims.evict(5 * PAGE, NOW_S) == 5 * PAGE
    entry = model.log.latest[-1]
    assert (entry.loser, entry.asker) == (Owner("logged", Kind.WEIGHTS), Owner("b", Kind.KV))
    assert (entry.num_items, entry.num_bytes) == (2, 5 * PAGE)
    probability = ReuseModel().probability(100, 0)
    assert entry.expected_s == pytest.approx(probability * 2.0 * 5 * PAGE / 1e6)


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
    """p x (s / b) x alpha, by size: the same for all groups of a model."""
    model = make("a", bytes_per_s=2e6, sensitivity=0.5)
    model.victims.num_uses = 3
    expected = ReuseModel().probability(100.0, 3) / 2e6 * 0.5
    assert model.victims.cheapest(NOW_S) == pytest.approx(expected)
    model.victims.evict(4 * PAGE, NOW_S)
    assert model.victims.cheapest(NOW_S) == pytest.approx(expected)
    model.is_wanted = True
    assert model.victims.cheapest(NOW_S) == pytest.approx(1 / 2e6 * 0.5)
    assert model.victims.evictable_below(100 * PAGE, NOW_S, 0.4 / 2e6) == 0
    assert model.victims.evictable_below(2 * PAGE, NOW_S, 1.0) == 3 * PAGE


def test_models_go_in_the_order_of_equation_2(make: Callable[..., Model]):
    """Models of one speed and equal tensors are evicted in ascending order of p x alpha."""
    models = {
        name: make(name, sensitivity=sensitivity)
        for name, sensitivity in (("a", 1.0), ("b", 0.3), ("c", 1.0), ("d", 2.0))
    }
    for name, age_s, num_uses in (("a", 50, 4), ("b", 50, 4), ("c", 400, 1), ("d", 50, 4)):
        models[name].victims.last_used_s = NOW_S - age_s
        models[name].victims.num_uses = num_uses
    reuse = ReuseModel()
    costs = {
        name: reuse.probability(NOW_S - model.victims.last_used_s, model.victims.num_uses)
        * sensitivity
        for (name, model), sensitivity in zip(models.items(), (1.0, 0.3, 1.0, 2.0), strict=True)
    }
    reclaimer = Reclaimer(lambda: NOW_S)
    for model in models.values():
        reclaimer.register(model.victims)
    gone: list[str] = []
    while reclaimer.reclaim(PAGE, Owner("asker", Kind.KV)):
        gone += [name for name, model in models.items() if not model.left and name not in gone]
    assert gone == sorted(costs, key=lambda name: costs[name])


def test_it_stops_where_another_tenant_is_cheaper(make: Callable[..., Model]):
    model = make("a")
    regret = model.victims.cheapest(NOW_S)
    assert regret is not None
    assert model.victims.evict(100 * PAGE, NOW_S, regret / 2) == 4 * PAGE  # the first in any case
    assert model.victims.evict(100 * PAGE, NOW_S, 1.01 * regret) == 7 * PAGE
