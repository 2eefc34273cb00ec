"""Pages mapped while the engine idles, for the first sequences of a model."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.life import Case, Open, World, each_kv_cache, longest_prompt

from aquifer.errors import DriverError
from aquifer.memory.pool import Kind

MEMORY_BYTES = 16 << 20


def _prepared(world: World) -> int:
    """Have all done that is to be done; returns in how many slots."""
    count = 0
    while world.engine.prepare():
        count += 1
        world.check()
    usage = world.engine.pool.usage()
    assert all(owner.kind != Kind.KV for owner in usage.in_use_bytes)
    assert not count or 4 * usage.retired_bytes <= usage.free_bytes
    return count


def test_first_sequences_find_pages(open_world: Open, cases: dict[str, list[Case]]) -> None:
    options = {"is_behind": True, "num_ahead": 1, "guard_pages": False}
    world = open_world(MEMORY_BYTES, models={"a": "llama"}, **options)
    pages = world.engine.pool.pages
    assert _prepared(world) == len(world.engine.lanes["a"].slots.free)
    before = pages.num_foreground_calls
    for _ in range(3):
        world.send("a", longest_prompt(cases["llama"]))
    world.finish()
    assert pages.num_foreground_calls == before
    assert not world.engine.prepare()  # once is enough


@each_kv_cache
@pytest.mark.parametrize("checkpoint", ["llama", "sparse-kv", "no-kv"])
def test_any_model(
    open_world: Open, cases: dict[str, list[Case]], checkpoint: str, kv_cache: str
) -> None:
    world = open_world(
        MEMORY_BYTES, is_behind=True, num_ahead=1, models={"a": checkpoint}, kv_cache=kv_cache
    )
    _prepared(world)
    for case in cases[checkpoint]:
        world.send("a", case)
    world.finish()
    world.remove_model("a")
    world.step()


def test_running_sequences_are_left_alone(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world(MEMORY_BYTES, is_behind=True, num_ahead=1, models={"a": "llama"})
    for case in cases["llama"][:4]:
        world.send("a", case)
    while world.engine.has_work:
        world.step()
        world.engine.prepare()
        world.check()
    world.finish()


def test_little_memory(open_world: Open, sizes: dict[str, tuple[int, int]]) -> None:
    """Three quarters of what is free stay as they are."""
    weight_bytes, _ = sizes["llama"]
    world = open_world(2 * weight_bytes, is_behind=True, models={"a": "llama"})
    assert _prepared(world) < len(world.engine.lanes["a"].slots.free)


def test_a_device_that_refuses(
    open_world: Open, cases: dict[str, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", "there is none")

    world = open_world(MEMORY_BYTES, is_behind=True, models={"a": "llama"})
    with monkeypatch.context() as refusing:
        refusing.setattr(world.driver, "map", refuse)
        assert not world.engine.prepare()
        world.check()
    assert not world.engine.prepare()  # it is not tried again
    world.finished(world.send("a", cases["llama"][0]))


def test_models_of_one_name(open_world: Open) -> None:
    world = open_world(MEMORY_BYTES, is_behind=True, models={"a": "llama"})
    assert _prepared(world)
    world.remove_model("a")
    world.step()
    world.add_model("a", "sparse-kv")
    assert _prepared(world)


@pytest.mark.parametrize("options", [{}, {"is_behind": True, "eager_pages": 0}], ids=str)
def test_none_on_the_host_or_without_the_option(open_world: Open, options: dict[str, Any]) -> None:
    world = open_world(MEMORY_BYTES, models={"a": "llama"}, **options)
    before = world.engine.pool.usage()
    assert not world.engine.prepare()
    assert world.engine.pool.usage() == before
