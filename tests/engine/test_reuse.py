"""Equal weights of several models take their pages once, and come back from host memory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.cases import tries
from tests.engine.life import PAGE_BYTES, Case, Open, World, each_kv_cache, make_case
from tests.models.tiny import TINY_MODELS, TinyModel

from aquifer.config import ModelSpec
from aquifer.engine.reports import ModelState

NUM_TUNED = 4


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hashes are kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tuned() -> dict[str, TinyModel]:
    """A base model and fine-tunes of it that differ in the norms and one matrix of a layer."""
    base = TINY_MODELS["llama"]
    models = {"base": base}
    for number in range(NUM_TUNED):
        name = "model.layers.1.self_attn.o_proj.weight"
        changed = {name: base.weights[name] * (1 + 0.1 * (number + 1))}
        models[f"tuned-{number}"] = replace(base, weights={**base.weights, **changed})
    return models


@pytest.fixture(scope="module")
def tuned_cases(tuned: dict[str, TinyModel]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, tiny in tuned.items():
        random, case = Random(7), None
        while case is None:
            prompt = [random.randrange(tiny.config["vocab_size"]) for _ in range(20)]
            case = make_case(tiny, "greedy", prompt, random)
        found[name] = case
    return found


def add_all(world: World, models: dict[str, TinyModel], folder: Path, *, load: bool = True) -> None:
    for name, tiny in models.items():
        world.engine.add_model(ModelSpec(name, tiny.save(folder / name)), load=load)
        world.checkpoints[name] = name


def wait_until_saved(world: World, name: str) -> None:
    """Until a model's weights are in host memory."""
    deadline_s = time.monotonic() + 60
    while world.engine.statuses[name].is_saving:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@each_kv_cache
def test_fine_tunes_take_what_they_differ_in(
    open_world: Open,
    tuned: dict[str, TinyModel],
    tuned_cases: dict[str, Case],
    tmp_path: Path,
    kv_cache: str,
) -> None:
    """And answer like themselves, whichever of them lose their weights."""
    world = open_world(models={}, kv_cache=kv_cache)
    add_all(world, tuned, tmp_path)
    weight_bytes = world.engine.models["base"].weight_bytes
    all_bytes = sum(world.used_bytes(name) for name in tuned)
    assert all_bytes <= 1.5 * weight_bytes
    assert len({tuple(case.completions[0]) for case in tuned_cases.values()}) > 1
    random = Random(1)
    for _ in range(tries(15)):
        for name in tuned:
            if not world.sent or random.random() < 0.7:
                world.send(name, tuned_cases[name])
        while world.engine.has_work:
            world.step()
        world.sent.clear()
        name = random.choice(list(tuned))
        world.engine.unload_model(name)
        world.check()
    for name in tuned:
        assert world.engine.statuses[name].error is None


def test_a_base_may_go_while_a_fine_tune_is_used(
    open_world: Open, tuned: dict[str, TinyModel], tuned_cases: dict[str, Case], tmp_path: Path
) -> None:
    world = open_world(models={})
    add_all(world, tuned, tmp_path)
    sent = [world.send("tuned-0", tuned_cases["tuned-0"]) for _ in range(4)]
    world.step()
    world.remove_model("base")
    for name in ("tuned-1", "tuned-2"):
        world.engine.unload_model(name)
        world.check()
    while not all(one.has_ended for one in sent):
        world.step()
    world.finished(world.send("tuned-3", tuned_cases["tuned-3"]))
    statuses = world.engine.statuses
    assert statuses["tuned-0"].shared_bytes == 0
    assert statuses["tuned-3"].shared_bytes > statuses["tuned-3"].weight_bytes // 2


def test_one_checkpoint_under_two_names_is_loaded_once(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """Even if there is no room for it twice."""
    world = open_world(sizes["llama"][0] + 30 * PAGE_BYTES, models={"a": "llama"})
    world.add_model("b", "llama")
    assert world.used_bytes("b") == 0
    sent = [world.send(name, cases["llama"][i]) for i in range(3) for name in "ab"]
    while not all(one.has_ended for one in sent):
        world.step()
    assert {state.state for state in world.engine.statuses.values()} == {ModelState.RESIDENT}


def test_weights_come_back_from_host_memory(
    open_world: Open, tuned: dict[str, TinyModel], tuned_cases: dict[str, Case], tmp_path: Path
) -> None:
    """The files are gone by then. What models share is there once."""
    world = open_world(models={}, host_cache_bytes=PAGE_BYTES << 10)
    add_all(world, tuned, tmp_path)
    for name in tuned:
        wait_until_saved(world, name)
    host_bytes = world.engine.memory().host_cache_bytes
    assert 0 < host_bytes < 1.5 * world.engine.models["base"].weight_bytes
    for name in tuned:
        (tmp_path / name / "model.safetensors").unlink()
        world.engine.unload_model(name)
    assert sum(world.used_bytes(name) for name in tuned) == 0
    for name in tuned:
        status = world.engine.statuses[name]
        assert status.host_bytes == status.weight_bytes
        world.finished(world.send(name, tuned_cases[name]))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_host_memory_does_not_hold_is_read_from_disk(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], share: float
) -> None:
    num_bytes = sizes["llama"][0]
    world = open_world(models={"a": "llama"}, host_cache_bytes=int(share * num_bytes))
    for _ in range(3):
        world.finished(world.send("a", cases["llama"][0]))
        wait_until_saved(world, "a")
        world.engine.unload_model("a")
    status = world.engine.statuses["a"]
    assert status.num_loads == 3
    assert (status.host_bytes > 0) == (share > 0)
    assert world.engine.memory().host_cache_bytes <= share * num_bytes
