"""How long weights stay: pinned, asked for, and given up after a time without use."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.life import PAGE_BYTES, Case, Open, World
from tests.engine.test_loading import make_short
from tests.models.tiny import TINY_MODELS

from aquifer.config import ModelSpec
from aquifer.engine.params import Request
from aquifer.engine.reports import ModelState
from aquifer.errors import ConfigError, RequestError, UnknownModelError


def send_keeping(world: World, case: Case, keep_alive_s: float) -> None:
    """Serve a request for model a that says how long its weights are kept."""
    request = Request("kept", "a", case.prompt, replace(case.params, n=1), 0.0)
    world.engine.add(replace(request, keep_alive_s=keep_alive_s))
    ended = False
    while not ended:
        ended = any(output.finish_reason is not None for output in world.engine.step())


def state(world: World, name: str) -> ModelState:
    return world.engine.statuses[name].state


# --- keep-alive ----------------------------------------------------------------------------------


def test_without_a_time_weights_stay(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world(models={"a": "llama"})
    world.finished(world.send("a", cases["llama"][0]))
    assert world.engine.idle_s is None
    status = world.engine.statuses["a"]
    assert (status.state, status.keep_alive_s, status.left_s) == (ModelState.RESIDENT, None, None)


def test_weights_go_after_a_time_without_use(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    """The loop is told how long it may wait, and has something to do then."""
    world = open_world(models={"a": "llama", "b": "sparse-kv"}, keep_alive_s=0.05)
    world.finished(world.send("a", cases["llama"][0]))
    while state(world, "a") == ModelState.RESIDENT:
        idle_s = world.engine.idle_s
        assert idle_s is not None
        assert 0 <= idle_s <= 0.05
        if world.engine.has_work:
            world.step()
    while world.engine.has_work or world.engine.idle_s is not None:
        world.step()
    assert all(status.resident_bytes == 0 for status in world.engine.statuses.values())
    world.finished(world.send("a", cases["llama"][1]))
    assert world.engine.statuses["a"].num_loads == 2


def test_a_request_says_how_long(open_world: Open, cases: dict[str, list[Case]]) -> None:
    """For its model, from then on: at once, or not at all."""
    world = open_world(models={"a": "llama"}, keep_alive_s=3600.0)
    left_s = world.engine.statuses["a"].left_s
    assert left_s is not None
    assert 0 < left_s <= 3600
    case = make_short(cases["llama"])
    send_keeping(world, case, math.inf)
    assert world.engine.statuses["a"].left_s is None
    send_keeping(world, case, 0.0)
    assert world.engine.statuses["a"].keep_alive_s == 0
    assert world.engine.has_work
    world.finish()
    assert state(world, "a") == ModelState.REGISTERED
    assert world.engine.idle_s is None


def test_another_device_was_told_how_long(open_world: Open) -> None:
    world = open_world(models={"a": "llama", "b": "sparse-kv"})
    world.engine.keep_alive("unknown", 0.0)
    world.engine.keep_alive("a", 0.0)
    assert world.engine.has_work
    world.finish()
    assert state(world, "a") == ModelState.REGISTERED
    assert state(world, "b") == ModelState.RESIDENT


# --- asked for -----------------------------------------------------------------------------------


def test_a_model_that_is_asked_for_is_loaded_in_the_steps_to_come(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    world = open_world(models={"a": "llama"})
    world.add_model("b", "sparse-kv", load=False)
    sent = world.send("a", cases["llama"][0])
    world.engine.ask_for_model("b")
    assert state(world, "b") == ModelState.REGISTERED
    world.finished(sent)
    assert state(world, "b") == ModelState.RESIDENT
    assert not world.engine.has_work
    world.engine.ask_for_model("b")
    assert not world.engine.has_work
    with pytest.raises(UnknownModelError):
        world.engine.ask_for_model("c")


def test_the_status_says_why_a_model_cannot_be_loaded(
    open_world: Open, cases: dict[str, list[Case]], tmp_path: Path
) -> None:
    """It is tried again when it is asked for again."""
    world = open_world(models={"a": "llama"})
    file = TINY_MODELS["sparse-kv"].save(tmp_path / "b") / "model.safetensors"
    world.engine.add_model(ModelSpec("b", tmp_path / "b"), load=False)
    world.checkpoints["b"] = "sparse-kv"
    contents, status_before = file.read_bytes(), file.stat()
    file.write_bytes(contents[:-100])
    for _ in range(2):
        world.engine.ask_for_model("b")
        world.finish()
        status = world.engine.statuses["b"]
        assert status.state == ModelState.FAILED
        assert "model.safetensors changed since b was registered" in (status.error or "")
    file.write_bytes(contents)
    os.utime(file, ns=(status_before.st_atime_ns, status_before.st_mtime_ns))
    world.engine.ask_for_model("b")
    world.finished(world.send("b", cases["sparse-kv"][0]))
    assert world.engine.statuses["b"].error is None


# --- pinned --------------------------------------------------------------------------------------


def test_a_pinned_model_loses_nothing(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """To another model or to time, until it is unpinned."""
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] + sizes["sparse-kv"][0] // 2
    world = open_world(memory_bytes, models={"a": "llama"}, keep_alive_s=0.0)
    world.add_model("b", "llama-tied", load=False)
    world.add_model("c", "sparse-kv", load=False)
    world.engine.pin_model("a")
    world.finish()
    for name, checkpoint in (("b", "llama-tied"), ("c", "sparse-kv")) * 2:
        world.finished(world.send(name, make_short(cases[checkpoint])))
        assert state(world, "a") == ModelState.RESIDENT
    with pytest.raises(RequestError, match="'a' is pinned; unpin it first"):
        world.engine.unload_model("a")
    world.engine.unpin_model("a")
    world.finish()
    assert state(world, "a") == ModelState.REGISTERED


def test_what_would_leave_no_room_is_not_pinned(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """Nor registered beside what is pinned."""
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 10 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama", "c": "sparse-kv"})
    world.engine.pin_model("a")
    refusal = r"b could not be loaded beside what is pinned \(a\)"
    with pytest.raises(ConfigError, match=refusal):
        world.add_model("b", "llama-tied", load=False)
    world.engine.unpin_model("a")
    world.add_model("b", "llama-tied", load=False)
    with pytest.raises(RequestError, match=refusal):
        world.engine.pin_model("a")
    assert not world.engine.statuses["a"].is_pinned
    world.finished(world.send("b", make_short(cases["llama-tied"])))
