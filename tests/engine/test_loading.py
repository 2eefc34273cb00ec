"""Loading models: for requests that wait, in a pool without room for all, and with failures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from tests.engine.life import PAGE_BYTES, Case, Open, each_kv_cache, longest_prompt
from tests.models.tiny import TINY_MODELS

from aquifer.config import ModelSpec
from aquifer.engine import model_life
from aquifer.engine.policies import Policies
from aquifer.errors import CapacityError, ConfigError, DriverError, UnknownModelError

# --- loading that fails --------------------------------------------------------------------------


def test_a_broken_checkpoint_leaves_nothing_behind(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    world = open_world(models={"a": "llama"})
    sent = world.send("a", cases["llama"][0])
    world.step()
    reservations = dict(world.driver.reservations)
    with pytest.raises(ConfigError, match="lacks the tensor"):
        world.add_model("b", "broken")
    assert world.driver.reservations == reservations
    assert world.used_bytes("b") == 0
    world.check()
    world.add_model("b", "sparse-kv")
    world.finished(world.send("b", cases["sparse-kv"][0]))
    assert sent.has_ended


def test_an_option_that_does_not_fit_leaves_nothing_behind(open_world: Open) -> None:
    world = open_world(max_model_len=128, guard_pages=False)
    with pytest.raises(ConfigError, match="max_model_len is 128; b allows at most 96"):
        world.add_model("b", "llama-tied")
    assert world.driver.is_unused


def test_a_broken_checkpoint_is_not_even_registered(open_world: Open) -> None:
    world = open_world(guard_pages=False)
    with pytest.raises(ConfigError, match=r"lacks the tensor 'model\.norm\.weight'"):
        world.add_model("b", "broken", load=False)
    assert world.driver.is_unused


@pytest.mark.parametrize("is_explicit", [False, True])
def test_requests_for_a_model_that_cannot_be_loaded(
    open_world: Open, cases: dict[str, list[Case]], is_explicit: bool, tmp_path: Path
) -> None:
    """Its file was cut off after it was registered."""
    world = open_world(models={"a": "llama"})
    other = world.send("a", cases["llama"][0])
    file = TINY_MODELS["llama"].save(tmp_path / "llama") / "model.safetensors"
    world.engine.add_model(ModelSpec("b", tmp_path / "llama"), load=False)
    world.checkpoints["b"] = "llama"
    file.write_bytes(file.read_bytes()[:-100])
    sent = [world.send("b", cases["llama"][i]) for i in range(2)]
    if is_explicit:
        with pytest.raises(ConfigError, match="changed since b was registered"):
            world.engine.load_model("b")
    while not all(one.has_ended for one in sent):
        world.step()
    for one in sent:
        assert "model.safetensors changed since b was registered" in (one.error or "")
    with pytest.raises(UnknownModelError, match="'b' could not be loaded"):
        world.send("b", cases["llama"][0])
    world.finished(other)
    assert world.used_bytes("b") == 0
    world.engine.unload_model("b")
    world.remove_model("b")


def test_a_model_that_failed_can_be_loaded_again(
    open_world: Open, cases: dict[str, list[Case]], tmp_path: Path
) -> None:
    """Its file was cut off while it was registered, and is whole again."""
    world = open_world()
    file = TINY_MODELS["llama"].save(tmp_path / "llama") / "model.safetensors"
    world.engine.add_model(ModelSpec("a", tmp_path / "llama"), load=False)
    world.checkpoints["a"] = "llama"
    contents, status = file.read_bytes(), file.stat()
    file.write_bytes(contents[:-100])
    for _ in range(2):
        with pytest.raises(ConfigError, match="changed since a was registered"):
            world.engine.load_model("a")
        assert world.used_bytes("a") == 0
    file.write_bytes(contents)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    world.engine.load_model("a")
    world.finished(world.send("a", cases["llama"][0]))
    world.engine.unload_model("a")
    world.finished(world.send("a", cases["llama"][0]))


@pytest.mark.parametrize("is_behind", [False, True])
@each_kv_cache
def test_the_device_refuses_each_call_of_an_addition(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str, is_behind: bool
) -> None:
    """Others run on, and nothing of the model is left."""
    world = open_world(models={"a": "llama"}, kv_cache=kv_cache, is_behind=is_behind)
    for num_failed in count():
        sent = world.send("a", make_short(cases["llama"]))
        world.step()
        before = dict(world.driver.reservations)
        world.driver.fail_at = world.driver.num_calls + num_failed
        try:
            world.add_model("b", "sparse-kv")
        except DriverError:
            assert world.driver.reservations == before
            assert world.used_bytes("b") == 0
            world.check()
            world.finished(sent)
        else:
            break
    world.driver.fail_at = None
    assert num_failed >= 3  # two reservations, a mapping, and pages unless they are in stock
    world.finished(world.send("b", cases["sparse-kv"][0]))


@each_kv_cache
def test_a_warm_up_that_fails_gives_its_pages_back(
    open_world: Open,
    cases: dict[str, list[Case]],
    kv_cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails before its first step, once pages are under the slot that it borrows."""
    world = open_world(kv_cache=kv_cache, is_behind=True)
    world.add_model("a", "llama", load=False)

    def refuse_once() -> None:
        monkeypatch.undo()
        assert world.used_bytes("a") > world.engine.models["a"].weight_bytes
        raise DriverError("REFUSED", "no table can be sent")

    monkeypatch.setattr(world.engine.lanes["a"].cache, "upload", refuse_once)
    with pytest.raises(DriverError, match="no table can be sent"):
        world.engine.load_model("a")
    assert world.used_bytes("a") == 0
    world.check()
    world.engine.load_model("a")
    world.finished(world.send("a", cases["llama"][0]))


@each_kv_cache
def test_the_device_refuses_each_call_of_a_load(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    """A load that was asked for fails, and one that a request waits for; the next one succeeds."""
    world = open_world(
        models={"a": "llama", "b": "sparse-kv"}, kv_cache=kv_cache, enable_prefix_caching=False
    )
    driver, engine = world.driver, world.engine
    for num_failed in count():
        other = world.send("a", make_short(cases["llama"]))
        world.step()
        engine.unload_model("b")
        engine.pool.trim()  # or there would be pages at hand
        driver.fail_at = driver.num_calls + num_failed
        try:
            engine.load_model("b")
        except DriverError:
            assert not world.is_loaded("b")
            assert world.used_bytes("b") == 0
        else:
            break
        driver.fail_at = driver.num_calls + num_failed
        sent = world.send("b", make_short(cases["sparse-kv"]))
        world.finish()
        # The first call is of the load in any case; how many more are depends on pages in stock.
        assert sent.error is not None or num_failed > 0
        for one in (sent, other):
            assert one.error is None or "INJECTED" in one.error
        driver.fail_at = None
        world.finished(world.send("b", make_short(cases["sparse-kv"])))
    driver.fail_at = None
    assert num_failed >= 1
    world.finish()


@each_kv_cache
def test_a_load_without_room_leaves_retained_prefixes_alone(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], kv_cache: str
) -> None:
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] - PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, kv_cache=kv_cache)
    case = longest_prompt(cases["llama"])
    world.finished(world.send("a", case))
    world.send("a", make_short(cases["llama"]))
    world.step()
    with pytest.raises(ConfigError, match=r"take 208\.00 KiB and the pool has"):
        world.add_model("b", "llama-tied")
    again = world.finished(world.send("a", case))
    assert again.num_cached_tokens >= len(case.prompt) - PAGE_BYTES // sizes["llama"][1]


def test_a_model_that_leaves_no_room_for_kv_is_not_loaded(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    world = open_world(sizes["llama"][0])
    with pytest.raises(ConfigError, match="for KV, and the first token of c takes"):
        world.add_model("c", "llama")
    assert world.used_bytes("c") == 0
    world.add_model("c", "llama", load=False)
    with pytest.raises(ConfigError, match="the first token of c takes"):
        world.engine.load_model("c")
    assert not world.is_loaded("c")
    with pytest.raises(CapacityError, match="0 bytes"):
        world.send("c", make_short(cases["llama"]))
    world.add_model("a", "no-kv")
    world.finished(world.send("a", cases["no-kv"][0]))


def make_short(cases: Sequence[Case]) -> Case:
    """The request that needs least memory."""
    return min(cases, key=lambda case: case.num_tokens * len(case.completions))


def pages_of(case: Case, token_bytes: int) -> int:
    """Pages that the KV of a request with one completion takes."""
    return -(-case.num_tokens * token_bytes // PAGE_BYTES)


# --- more models than there is room for ----------------------------------------------------------


@each_kv_cache
def test_weights_of_all_models_exceed_the_pool(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], kv_cache: str
) -> None:
    """Each is loaded when it is wanted, and unloaded by the operator."""
    memory_bytes = max(weights for weights, _ in sizes.values()) + 30 * PAGE_BYTES
    world = open_world(memory_bytes, kv_cache=kv_cache)
    for name in TINY_MODELS:
        world.add_model(name, name, load=False)
    memory = world.engine.memory()
    assert memory.free_bytes == memory.budget_bytes - memory.overhead_bytes
    weight_bytes = [info.weight_bytes for info in world.engine.models.values()]
    assert sum(weight_bytes) > world.engine.memory().budget_bytes
    for i in range(2):
        for name in TINY_MODELS:
            assert not world.is_loaded(name)
            world.finished(world.send(name, cases[name][i]))
            assert world.is_loaded(name)
            world.engine.unload_model(name)


NONE_GIVES_WAY = Policies(residents=lambda snapshot: None)


def test_a_model_is_loaded_when_others_give_memory_back(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """The load waits for room, not until all other requests end."""
    small, large = make_short(cases["llama"]), longest_prompt(cases["llama"])
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 12 * PAGE_BYTES
    world = open_world(
        memory_bytes,
        models={"a": "llama"},
        enable_prefix_caching=False,
        policies=NONE_GIVES_WAY,
    )
    world.add_model("b", "sparse-kv", load=False)
    for _ in range(4):
        world.send("a", large)
    for _ in range(4):
        world.step()
    sent = world.send("b", make_short(cases["sparse-kv"]))
    world.step()
    assert not world.is_loaded("b")
    while not sent.has_ended:
        if len(world.engine.lanes["a"].running) < 2:
            world.send("a", small)
        assert world.engine.lanes["a"].has_work
        world.step()
    world.finished(sent)
    assert all(one.error is None for one in world.sent.values())


def test_a_model_that_is_wanted_does_not_take_what_others_were_promised(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """A request that was taken in needs the memory later; so the other model is loaded later."""
    large = longest_prompt(cases["llama"])
    num_pages = pages_of(large, sizes["llama"][1])
    memory_bytes = sizes["llama"][0] + num_pages * PAGE_BYTES
    world = open_world(
        memory_bytes,
        models={"a": "llama"},
        enable_prefix_caching=False,
        policies=NONE_GIVES_WAY,
    )
    world.add_model("b", "no-kv", load=False)
    promised = world.send("a", large)
    sent = world.send("b", cases["no-kv"][0])
    while not promised.has_ended:
        assert not world.is_loaded("b")
        world.step()
    world.finished(sent)
    assert promised.error is None


@pytest.mark.parametrize("leaves", ["removed", "unloaded", "idle"])
def test_a_model_is_loaded_when_another_one_leaves(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], leaves: str
) -> None:
    memory_bytes = sizes["sparse-kv"][0] + 13 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "sparse-kv"}, policies=NONE_GIVES_WAY)
    world.add_model("b", "no-kv", load=False)
    other = world.send("a", cases["sparse-kv"][1])
    world.step()
    sent = world.send("b", cases["no-kv"][0])
    world.step()
    assert not world.is_loaded("b")
    if leaves == "removed":
        world.remove_model("a")
        world.finished(sent)
        assert other.error == "model 'a' was removed"
        return
    if leaves == "unloaded":
        world.engine.unload_model("a")
    world.finished(sent)
    assert world.finished(other).error is None


def test_a_request_ends_if_nothing_can_make_room_for_its_model(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """The process needs more memory beside the pages than when the request came."""
    world = open_world(sizes["llama-tied"][0] + 20 * PAGE_BYTES, models={"a": "llama"})
    world.engine.meter.every_s = float("inf")
    world.add_model("b", "llama-tied", load=False)
    sent = world.send("b", make_short(cases["llama-tied"]))
    world.engine.pool.account_overhead(21 * PAGE_BYTES)
    world.finish()
    assert "the weights of b take 208.00 KiB and the pool has" in (sent.error or "")
    world.finished(world.send("a", make_short(cases["llama"])))
    world.engine.pool.account_overhead(0)


def test_pins_leave_room_for_each_model(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    memory_bytes = sizes["llama-tied"][0] + 7 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"})
    prefix = longest_prompt(cases["llama"]).prompt
    assert world.engine.pin_prefix("a", prefix)
    world.finish()
    world.add_model("b", "llama-tied", load=False)
    with pytest.raises(CapacityError, match="0 bytes"):  # it came after the pin
        world.send("b", make_short(cases["llama-tied"]))
    world.engine.unpin_prefix("a", prefix)
    with pytest.raises(CapacityError, match="more than half of the 28"):
        world.engine.pin_prefix("a", prefix)
    world.finished(world.send("b", make_short(cases["llama-tied"])))


def test_a_request_of_an_unloaded_model_holds_up_no_others(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """A request blocks later ones; its model is unloaded and another takes the memory."""
    large = longest_prompt(cases["llama"])
    num_pages = pages_of(large, sizes["llama"][1])
    world = open_world(
        2 * sizes["llama"][0] + (num_pages + 2) * PAGE_BYTES,
        models={"a": "llama", "b": "llama"},
        enable_prefix_caching=False,
    )
    first = world.send("b", large)
    world.step()
    blocked = world.send("a", large)
    world.step()
    later = world.send("b", make_short(cases["llama"]))
    world.engine.unload_model("a")
    world.add_model("c", "no-kv")
    while not first.has_ended:
        world.step()
    assert later.token_ids
    world.finish()
    assert first.error is None
    assert later.error is None
    assert blocked.error is None


def test_a_checkpoint_that_is_gone_fails_its_own_requests(
    open_world: Open, cases: dict[str, list[Case]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted while its weights are evicted; a request after a while tries it again."""
    world = open_world(models={"a": "llama"})
    file = TINY_MODELS["sparse-kv"].save(tmp_path / "b") / "model.safetensors"
    world.engine.add_model(ModelSpec("b", tmp_path / "b"))
    world.checkpoints["b"] = "sparse-kv"
    case = cases["sparse-kv"][0]
    world.finished(world.send("b", case))
    world.engine.unload_model("b")
    file.rename(tmp_path / "away")
    other, lost = world.send("a", cases["llama"][0]), world.send("b", case)
    world.finished(other)
    assert "cannot read" in (lost.error or "")
    with pytest.raises(UnknownModelError, match="'b' could not be loaded: cannot read"):
        world.send("b", case)
    (tmp_path / "away").rename(file)
    monkeypatch.setattr(model_life, "RETRY_S", 0.0)
    world.finished(world.send("b", case))
