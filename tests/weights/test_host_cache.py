"""Copies of weights in host memory: bounded, found by key, kept by worth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aquifer.weights.host_cache import HostCache

SIZE = 1000


class Model:
    """A model that is needed again with some probability."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self) -> float:
        return self.p


@pytest.fixture
def cache() -> Iterator[HostCache]:
    """Room for three entries."""
    cache = HostCache(3 * SIZE + 10, torch.device("cpu"))
    yield cache
    cache.close()
    assert cache.used_bytes == 0


def contents(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8)


def value(cache: HostCache, key: str) -> int | None:
    """What an entry is filled with; None if there is none."""
    with cache.lease(key) as kept:
        if kept is None:
            assert not cache.has(key)
            return None
        assert cache.has(key)
        assert kept.shape == (SIZE,)
        (only,) = set(kept.tolist())
        return int(only)


def test_what_is_worth_least_goes(cache: HostCache):
    models = [Model(p) for p in (0.5, 0.1, 0.3)]
    for number, model in enumerate(models):
        assert cache.keep(str(number), contents(number), model)
    assert cache.used_bytes == 3 * SIZE
    assert cache.keep("new", contents(9), Model(0.4))
    assert [value(cache, key) for key in ("0", "1", "2", "new")] == [0, None, 2, 9]
    models[0].p = 0.0
    assert cache.keep("newer", contents(8), Model(0.1))
    assert [value(cache, key) for key in ("0", "2", "new", "newer")] == [None, 2, 9, 8]


def test_nothing_goes_for_what_is_worth_no_more(cache: HostCache):
    model = Model(0.2)
    for number in range(3):
        assert cache.keep(str(number), contents(number), model)
    assert not cache.keep("new", contents(9), Model(0.2))
    assert not cache.keep("large", torch.zeros(4 * SIZE, dtype=torch.uint8), Model(1.0))
    assert [value(cache, str(number)) for number in range(3)] == [0, 1, 2]
    assert cache.used_bytes == 3 * SIZE


def test_models_have_an_entry_together(cache: HostCache):
    first, second = Model(0.2), Model(0.2)
    assert cache.keep("x", contents(1), first)
    assert cache.keep("x", contents(1), second)
    assert cache.used_bytes == SIZE
    for number in range(2):
        assert cache.keep(str(number), contents(2), Model(0.3))
    assert cache.keep("new", contents(9), Model(0.35))  # 0.4 together is worth more than 0.3
    assert value(cache, "x") == 1
    cache.forget(first)
    assert value(cache, "x") == 1
    cache.forget(second)
    assert value(cache, "x") is None
    assert cache.used_bytes == 2 * SIZE


def test_what_is_copied_from_stays(cache: HostCache):
    """Its bytes are there until the end of the lease, also if its model is removed."""
    model = Model(0.0)
    assert cache.keep("x", contents(1), model)
    with cache.lease("x") as kept:
        assert kept is not None
        for number in range(2):
            assert cache.keep(str(number), contents(2), Model(0.5))
        assert not cache.keep("new", contents(3), Model(0.4))
        cache.forget(model)
        assert not cache.has("x")
        assert cache.keep("new", contents(3), Model(0.4))
        assert (kept == 1).all()
    assert cache.used_bytes == 3 * SIZE


def test_an_entry_may_get_another_key(cache: HostCache):
    first, second = Model(0.2), Model(0.3)
    assert cache.keep("x", contents(1), first)
    cache.rename("x", "y")
    assert (value(cache, "x"), value(cache, "y")) == (None, 1)
    assert cache.keep("z", contents(1), second)
    cache.rename("z", "y")
    cache.rename("nothing", "y")
    assert cache.used_bytes == SIZE
    cache.forget(first)
    assert value(cache, "y") == 1


def test_without_room_nothing_is_kept():
    cache = HostCache(0, torch.device("cpu"))
    assert not cache.keep("x", contents(1), Model(1.0))
    assert value(cache, "x") is None
    cache.close()
