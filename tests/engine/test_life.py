"""Models that come and go while others are served: outputs, accounts, and what is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.engine.life import PAGE_BYTES, Case, LoopDriver, World, make_cases
from tests.memory.late_driver import LateDriver, LateFence
from tests.models.tiny import TINY_MODELS

from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import CapacityError, ConfigError, DriverError, UnknownModelError
from aquifer.memory.driver.host import HostDriver

NAMES = ("a", "b", "c", "d")
NUM_OPERATIONS = 300
PLENTY_BYTES = 8 << 20
KV_CACHES = pytest.mark.parametrize("kv_cache", ["virtual", "paged"])


class BehindDriver(LateDriver):
    """A device that has done nothing before it is waited for."""

    def fence(self) -> LateFence:  # type: ignore[override]
        self.launch(())
        return super().fence()


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Case]]:
    return {name: make_cases(tiny, seed) for seed, (name, tiny) in enumerate(TINY_MODELS.items())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the four models, and one of which a tensor is missing."""
    folder = tmp_path_factory.mktemp("models")
    for name, tiny in TINY_MODELS.items():
        tiny.save(folder / name)
    file = TINY_MODELS["llama"].save(folder / "broken") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    return folder


@pytest.fixture(scope="module")
def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes of each model's weights in pages, and of a token's KV."""
    models = {name: name for name in TINY_MODELS}
    world = World(folder, PLENTY_BYTES, LoopDriver(HostDriver()), models=models)
    infos = world.engine.models.items()
    sizes = {name: (info.weight_bytes, info.kv_bytes_per_token) for name, info in infos}
    world.close()
    return sizes


Open = Callable[..., World]


@pytest.fixture
def open_world(folder: Path) -> Iterator[Open]:
    """Opens an engine; when the test is over, it is closed and the driver must have all back."""
    worlds: list[World] = []

    def open_it(
        memory_bytes: int = PLENTY_BYTES, *, is_behind: bool = False, **options: Any
    ) -> World:
        driver = LoopDriver(BehindDriver() if is_behind else HostDriver())
        world = World(folder, memory_bytes, driver, **options)
        worlds.append(world)
        return world

    yield open_it
    for world in worlds:
        world.close()
        assert world.driver.is_unused
        world.driver.close()


# --- at random -----------------------------------------------------------------------------------


class Life:
    """Random operations on a world, and how often each came out in which way."""

    def __init__(self, world: World, cases: dict[str, list[Case]], seed: int) -> None:
        self.world = world
        self.cases = cases
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        operations: list[Callable[[], str]] = [self.send] * 10
        operations += [self.add_model] * 4 + [self.unload_model] * 2
        operations += [self.remove_model, self.load_model, self.abort]
        for _ in range(num_operations):
            self.seen[self.random.choice(operations)()] += 1
            self.world.check()
            for _ in range(self.random.randrange(3)):
                self.world.step()
        self.world.finish()

    def name(self) -> str:
        """A name, mostly of a model that is registered."""
        known = [name for name in NAMES if name in self.world.checkpoints]
        return self.random.choice(known if known and self.random.random() < 0.9 else NAMES)

    def send(self) -> str:
        world, name = self.world, self.name()
        checkpoint = world.checkpoints.get(name)
        case = self.random.choice(self.cases[checkpoint or "llama"])
        try:
            world.send(name, case)
        except UnknownModelError:
            assert checkpoint is None
            return "unknown"
        except CapacityError:
            return "too large"
        return "sent" if world.is_loaded(name) else "sent to wait"

    def abort(self) -> str:
        requests = self.world.open_requests
        if requests:
            self.world.abort(self.random.choice(requests))
        return "aborted"

    def add_model(self) -> str:
        world, name = self.world, self.random.choice(NAMES)
        load = self.random.random() < 0.6
        checkpoint = self.random.choice(list(TINY_MODELS))
        is_new = name not in world.checkpoints
        error = failure(lambda: world.add_model(name, checkpoint, load=load))
        if not is_new:
            assert "registered already" in error
            return "added twice"
        if error:
            assert load
            assert says_no_room(error)
            return "refused"
        assert world.is_loaded(name) == load
        return "added"

    def remove_model(self) -> str:
        world, name = self.world, self.name()
        if name not in world.checkpoints:
            with pytest.raises(UnknownModelError):
                world.remove_model(name)
            return "removed unknown"
        was_running = bool(world.engine.lanes[name].running)
        sent = [world.sent[i] for i in world.open_requests if world.sent[i].model == name]
        world.remove_model(name)
        world.step()
        for one in sent:
            assert one.has_ended
            assert one.error in (None, f"model {name!r} was removed")
        return "removed running" if was_running else "removed"

    def unload_model(self) -> str:
        world, name = self.world, self.name()
        if name not in world.checkpoints:
            return "unloaded unknown"
        was_running = bool(world.engine.lanes[name].running)
        world.engine.unload_model(name)
        assert not world.is_loaded(name)
        return "unloaded running" if was_running else "unloaded"

    def load_model(self) -> str:
        world, name = self.world, self.name()
        if name not in world.checkpoints:
            return "loaded unknown"
        was_loaded = world.is_loaded(name)
        error = failure(lambda: world.engine.load_model(name))
        assert world.is_loaded(name) == (not error)
        if error:
            assert says_no_room(error)
            return "not loaded"
        return "loaded before" if was_loaded else "loaded"


def failure(operation: Callable[[], None]) -> str:
    """The ConfigError that an operation ends with; empty if it succeeds."""
    try:
        operation()
    except ConfigError as error:
        return str(error)
    return ""


def says_no_room(error: str) -> bool:
    """Whether an error says that the pool has no room for a model or for a request."""
    texts = ("left; raise --memory", "for KV, and the first token", "out of memory")
    return any(text in error for text in texts)


@pytest.mark.parametrize(
    ("kv_cache", "num_ahead", "preemption_mode"),
    [
        ("virtual", 0, "swap"),
        ("virtual", 1, "recompute"),
        ("paged", 0, "recompute"),
        ("paged", 1, "swap"),
    ],
)
def test_models_come_and_go_while_others_stream(
    open_world: Open,
    cases: dict[str, list[Case]],
    sizes: dict[str, tuple[int, int]],
    kv_cache: str,
    num_ahead: int,
    preemption_mode: str,
) -> None:
    """Each name may stand for another checkpoint every time."""
    weight_bytes = sorted(weights for weights, _ in sizes.values())
    memory_bytes = sum(weight_bytes[-2:]) + 110 * max(kv for _, kv in sizes.values())
    world = open_world(
        memory_bytes,
        is_behind=num_ahead > 0,
        num_ahead=num_ahead,
        kv_cache=kv_cache,
        preemption_mode=preemption_mode,
    )
    life = Life(world, cases, seed=2 * num_ahead + (kv_cache == "paged"))
    life.run(NUM_OPERATIONS)
    errors = Counter(sent.error for sent in world.sent.values())
    finished = errors.pop(None)
    assert finished > NUM_OPERATIONS / 10
    removed = {f"model {name!r} was removed" for name in NAMES}
    assert all(error in removed or says_no_room(error) for error in errors)
    assert errors.keys() & removed
    expected = {"added", "added twice", "refused", "sent", "sent to wait", "aborted"}
    assert life.seen.keys() >= expected | {"removed running", "unloaded running"}
    assert world.num_preemptions > 0


# --- none, twice, unknown ------------------------------------------------------------------------


def test_an_engine_without_models(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world()
    engine = world.engine
    for _ in range(2):
        assert not engine.has_work
        world.step()
        assert engine.models == engine.memory().models == engine.stats().num_running == {}
        assert engine.stats().kv_usage == 0
        assert engine.memory().free_bytes == engine.memory().budget_bytes
        with pytest.raises(UnknownModelError, match="'a' is served here; served models: none"):
            world.engine.add(Request("early", "a", cases["llama"][0].prompt, SamplingParams(), 0.0))
        world.add_model("a", "llama")
        world.finished(world.send("a", cases["llama"][0]))
        world.remove_model("a")


def test_a_name_is_taken_once(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world(models={"a": "llama"})
    for load in (True, False):
        with pytest.raises(ConfigError, match="a model named 'a' is registered already"):
            world.add_model("a", "sparse-kv", load=load)
    world.finished(world.send("a", cases["llama"][0]))


def test_unknown_models(open_world: Open) -> None:
    engine = open_world(models={"a": "llama", "b": "no-kv"}).engine
    for operation in (engine.load_model, engine.unload_model, engine.remove_model):
        with pytest.raises(UnknownModelError, match="'c' is served here; served models: a, b"):
            operation("c")


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
    world = open_world(max_model_len=128)
    with pytest.raises(ConfigError, match="max_model_len is 128; b allows at most 96"):
        world.add_model("b", "llama-tied")
    assert world.driver.is_unused


@pytest.mark.parametrize("is_explicit", [False, True])
def test_requests_for_a_model_that_cannot_be_loaded(
    open_world: Open, cases: dict[str, list[Case]], is_explicit: bool
) -> None:
    world = open_world(models={"a": "llama"})
    other = world.send("a", cases["llama"][0])
    world.add_model("b", "broken", load=False)
    sent = [world.send("b", cases["llama"][i]) for i in range(2)]
    if is_explicit:
        with pytest.raises(ConfigError, match="lacks the tensor"):
            world.engine.load_model("b")
    world.step()
    for one in sent:
        assert "lacks the tensor 'model.norm.weight'" in (one.error or "")
    with pytest.raises(UnknownModelError, match="'b' could not be loaded"):
        world.send("b", cases["llama"][0])
    world.finished(other)
    assert world.used_bytes("b") == 0
    world.engine.unload_model("b")
    world.remove_model("b")


@pytest.mark.parametrize("is_behind", [False, True])
@KV_CACHES
def test_the_device_refuses_each_call_of_an_addition(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str, is_behind: bool
) -> None:
    """Others run on, and nothing of the model is left."""
    world = open_world(models={"a": "llama"}, kv_cache=kv_cache, is_behind=is_behind)
    for num_failed in count():
        sent = world.send("a", cases["llama"][num_failed % len(cases["llama"])])
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


@KV_CACHES
def test_the_device_refuses_each_call_of_a_load(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    """Of one that was asked for, and of one that a request waits for; the next one succeeds."""
    world = open_world(
        models={"a": "llama", "b": "sparse-kv"}, kv_cache=kv_cache, enable_prefix_caching=False
    )
    driver, engine = world.driver, world.engine
    for num_failed in count():
        other = world.send("a", cases["llama"][0])
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
        sent = world.send("b", cases["sparse-kv"][0])
        world.finish()
        # The first call is of the load in any case; how many more are depends on pages in stock.
        assert sent.error is not None or num_failed > 0
        for one in (sent, other):
            assert one.error is None or "INJECTED" in one.error
        driver.fail_at = None
        world.finished(world.send("b", cases["sparse-kv"][0]))
    driver.fail_at = None
    assert num_failed >= 1
    world.finish()


@KV_CACHES
def test_a_load_without_room_leaves_retained_prefixes_alone(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], kv_cache: str
) -> None:
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] - PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, kv_cache=kv_cache)
    case = cases["llama"][3]
    world.finished(world.send("a", case))
    with pytest.raises(ConfigError, match=r"take 208\.00 KiB and the pool has"):
        world.add_model("b", "llama-tied")
    again = world.finished(world.send("a", case))
    assert again.num_cached_tokens >= len(case.prompt) - PAGE_BYTES // sizes["llama"][1]


def test_a_model_that_leaves_no_room_for_kv_is_not_loaded(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """Neither for its own, nor for that of a model that is loaded."""
    world = open_world(sizes["llama"][0] + sizes["no-kv"][0])
    world.add_model("a", "no-kv")
    with pytest.raises(ConfigError, match="for KV, and the first token of c takes"):
        world.add_model("c", "llama")
    assert world.used_bytes("c") == 0
    world.remove_model("a")
    world.add_model("c", "llama")
    with pytest.raises(ConfigError, match="the first token of c takes"):
        world.add_model("a", "no-kv")
    assert world.used_bytes("a") == 0
    world.finished(world.send("c", make_short(cases["llama"])))


def make_short(cases: Sequence[Case]) -> Case:
    """The request that needs least memory."""
    return min(cases, key=lambda case: (len(case.prompt) + 14) * len(case.completions))


# --- more models than there is room for ----------------------------------------------------------


@KV_CACHES
def test_weights_of_all_models_exceed_the_pool(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], kv_cache: str
) -> None:
    """Each is loaded when it is wanted, and unloaded by the operator."""
    memory_bytes = max(weights for weights, _ in sizes.values()) + 30 * PAGE_BYTES
    world = open_world(memory_bytes, kv_cache=kv_cache)
    for name in TINY_MODELS:
        world.add_model(name, name, load=False)
    assert world.engine.memory().free_bytes == world.engine.memory().budget_bytes
    weight_bytes = [info.weight_bytes for info in world.engine.models.values()]
    assert sum(weight_bytes) > world.engine.memory().budget_bytes
    for i in range(2):
        for name in TINY_MODELS:
            assert not world.is_loaded(name)
            world.finished(world.send(name, cases[name][i]))
            assert world.is_loaded(name)
            world.engine.unload_model(name)


def test_a_model_is_loaded_when_others_give_memory_back(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """While they go on: it waits for room, not for the end of all other requests."""
    small, large = make_short(cases["llama"]), cases["llama"][3]
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 12 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, enable_prefix_caching=False)
    world.add_model("b", "sparse-kv", load=False)
    for _ in range(4):
        world.send("a", large)
    for _ in range(4):
        world.step()
    sent = world.send("b", make_short(cases["sparse-kv"]))
    world.step()
    assert not world.is_loaded("b")
    for _ in range(200):
        if sent.has_ended:
            break
        world.send("a", small)
        world.step()
        assert world.engine.lanes["a"].has_work
    world.finished(sent)
    assert all(one.error is None for one in world.sent.values())


def test_a_model_that_is_wanted_does_not_take_what_others_were_promised(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """A request that was taken in needs the memory later; so the other model is loaded later."""
    large = cases["llama"][3]
    num_pages = -(-(len(large.prompt) + 14) * sizes["llama"][1] // PAGE_BYTES)
    memory_bytes = sizes["llama"][0] + num_pages * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, enable_prefix_caching=False)
    world.add_model("b", "no-kv", load=False)
    promised = world.send("a", large)
    sent = world.send("b", cases["no-kv"][0])
    while not promised.has_ended:
        assert not world.is_loaded("b")
        world.step()
    world.finished(sent)
    assert promised.error is None


@pytest.mark.parametrize("leaves", ["removed", "unloaded"])
def test_a_model_is_loaded_when_another_one_leaves(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], leaves: str
) -> None:
    memory_bytes = sizes["sparse-kv"][0] + 13 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "sparse-kv"})
    world.add_model("b", "no-kv", load=False)
    world.add_model("c", "llama", load=False)
    other = world.send("a", cases["sparse-kv"][1])
    world.step()
    with pytest.raises(CapacityError, match="0 bytes"):
        world.send("c", cases["llama"][0])
    sent = world.send("b", cases["no-kv"][0])
    world.step()
    assert not world.is_loaded("b")
    if leaves == "removed":
        world.remove_model("a")
        world.finished(sent)
        assert other.error == "model 'a' was removed"
        return
    world.engine.unload_model("a")
    world.finished(sent)  # after the earlier request, for which the other one is loaded again
    assert other.error is None


def test_a_request_ends_if_nothing_can_make_room_for_its_model(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    world = open_world(sizes["llama"][0] + 6 * PAGE_BYTES, models={"a": "llama"})
    world.add_model("b", "no-kv", load=False)
    sent = world.send("b", cases["no-kv"][0])
    world.finish()
    assert "the weights of b take 28.00 KiB and the pool has 24.00 KiB left" in (sent.error or "")
    world.engine.unload_model("a")
    world.finished(world.send("b", cases["no-kv"][0]))


# --- unloaded and removed in the middle of it ----------------------------------------------------


@pytest.mark.parametrize("num_ahead", [0, 1])
@KV_CACHES
def test_requests_go_on_after_their_model_was_unloaded(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str, num_ahead: int
) -> None:
    """Requests of all kinds, between any two steps."""
    world = open_world(
        models={"a": "llama", "b": "sparse-kv"},
        kv_cache=kv_cache,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
    )
    for index in range(0, len(cases["llama"]), 2):
        for name, model in (("a", "llama"), ("b", "sparse-kv")):
            world.send(name, cases[model][index])
    for _ in range(100):
        if not world.engine.has_work:
            break
        world.step()
        world.engine.unload_model("a")
        assert not world.engine.lanes["a"].running
        world.check()
    world.finish()
    assert all(sent.error is None for sent in world.sent.values())


def test_outputs_are_equal_before_and_after(open_world: Open, cases: dict[str, list[Case]]) -> None:
    """To the last bit of the log probabilities, where nothing is found in a cache."""
    models = {name: name for name in TINY_MODELS}
    world = open_world(models=models, enable_prefix_caching=False)
    for name in TINY_MODELS:
        case = next(case for case in cases[name] if case.logprobs)
        before = world.finished(world.send(name, case)).logprobs
        world.engine.unload_model(name)
        world.engine.load_model(name)
        assert world.finished(world.send(name, case)).logprobs == before


@KV_CACHES
def test_retained_prefixes_outlast_the_weights(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    world = open_world(models={"a": "llama"}, kv_cache=kv_cache)
    case = cases["llama"][3]
    world.finished(world.send("a", case))
    world.engine.unload_model("a")
    assert world.used_bytes("a") > 0
    sent = world.finished(world.send("a", case))
    assert sent.num_cached_tokens >= len(case.prompt) - 9
    world.remove_model("a")
    world.add_model("a", "llama")
    assert world.finished(world.send("a", case)).num_cached_tokens == 0


def test_a_model_is_removed_with_steps_in_flight(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    """Whatever the number of steps before: what has ended ends well, the rest with an error."""
    num_errors = set()
    for num_steps in range(1, 40):
        world = open_world(models={"a": "llama", "b": "sparse-kv"}, num_ahead=1, is_behind=True)
        own = [world.send("a", cases["llama"][i]) for i in (0, 2, 4)]
        others = [world.send("b", cases["sparse-kv"][i]) for i in (0, 2, 4)]
        for _ in range(num_steps):
            world.step()
        world.remove_model("a")
        assert world.used_bytes("a") == 0
        world.step()
        assert all(sent.error in (None, "model 'a' was removed") for sent in own)
        assert all(sent.has_ended for sent in own)
        num_errors.add(sum(sent.error is not None for sent in own))
        world.finish()
        assert all(sent.error is None for sent in others)
    assert num_errors >= {0, 3}


def test_an_aborted_request_has_no_output_any_more(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    """Nor such as came of the steps that were in flight when another model was unloaded."""
    world = open_world(models={"a": "llama", "b": "no-kv"}, num_ahead=1, is_behind=True)
    for num_steps in range(2, 20):
        sent = world.send("a", cases["llama"][0])
        for _ in range(num_steps):
            world.step()
        world.engine.unload_model("b")
        if sent.has_ended:
            break
        for request_id in world.open_requests:
            world.abort(request_id)
        assert not world.engine.has_work
        world.step()
    else:
        raise AssertionError("it never ended by itself")


def test_an_engine_is_closed_with_steps_in_flight(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    world = open_world(models={"a": "llama", "b": "sparse-kv"}, num_ahead=1, is_behind=True)
    for name, model in (("a", "llama"), ("b", "sparse-kv")):
        for case in cases[model]:
            world.send(name, case)
    for _ in range(3):
        world.step()
    assert world.engine.has_work


# --- pins ----------------------------------------------------------------------------------------


@KV_CACHES
def test_a_pinned_prefix_goes_with_its_model(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    world = open_world(models={"a": "llama", "b": "sparse-kv"}, kv_cache=kv_cache)
    prefix = cases["llama"][3].prompt
    other = cases["sparse-kv"][1].prompt
    for name, tokens in (("a", prefix), ("b", other)):
        assert world.engine.pin_prefix(name, tokens) > 0
    world.finish()
    world.engine.unload_model("a")  # which keeps it
    world.engine.load_model("a")
    assert world.finished(world.send("a", cases["llama"][3])).num_cached_tokens > 0
    world.remove_model("a")
    assert world.used_bytes("a") == 0
    with pytest.raises(UnknownModelError):
        world.engine.unpin_prefix("a", prefix)
    world.add_model("a", "llama")
    assert world.finished(world.send("a", cases["llama"][3])).num_cached_tokens == 0
    world.engine.unpin_prefix("a", prefix)
    assert world.finished(world.send("b", cases["sparse-kv"][1])).num_cached_tokens > 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_model_is_removed_while_a_prefix_is_computed(
    open_world: Open, cases: dict[str, list[Case]], num_steps: int
) -> None:
    """No output of that is returned."""
    world = open_world(models={"a": "llama"}, num_ahead=1, is_behind=True)
    world.engine.pin_prefix("a", cases["llama"][3].prompt)
    for _ in range(num_steps):
        world.step()
    world.remove_model("a")
    assert not world.engine.has_work
    world.step()


def test_a_model_is_loaded_for_a_prefix(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world()
    world.add_model("a", "llama", load=False)
    world.engine.pin_prefix("a", cases["llama"][3].prompt)
    world.finish()
    assert world.is_loaded("a")
    assert world.finished(world.send("a", cases["llama"][3])).num_cached_tokens > 0
