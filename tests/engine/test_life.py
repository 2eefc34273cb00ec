"""Models that come and go while others are served: outputs, accounts, and what is left behind."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from tests.cases import EVERY_CASE
from tests.engine.life import Case, Open, World, each_kv_cache, longest_prompt
from tests.models.tiny import TINY_MODELS

from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import CapacityError, ConfigError, RequestError, UnknownModelError

NAMES = ("a", "b", "c", "d")
NUM_OPERATIONS = 300


# --- at random -----------------------------------------------------------------------------------


class Life:
    """Random operations on a world, and how often each came out in which way."""

    def __init__(self, world: World, cases: dict[str, list[Case]], seed: int) -> None:
        self.world = world
        self.cases = cases
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.pinned: set[str] = set()

    def run(self, num_operations: int) -> None:
        operations: list[Callable[[], str]] = [self.send] * 10
        operations += [self.add_model] * 4 + [self.unload_model] * 2
        operations += [self.remove_model, self.load_model, self.abort]
        operations += [self.pin_model, self.unpin_model, self.unpin_model, self.ask_for_model]
        for _ in range(num_operations):
            self.seen[self.random.choice(operations)()] += 1
            self.world.check()
            for name, status in self.world.engine.statuses.items():
                assert status.is_pinned == (name in self.pinned)
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
        if not requests:
            return "nothing to abort"
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
            assert says_no_room(error)
            assert load or "pinned" in error
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
        self.pinned.discard(name)
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
        if name in self.pinned:
            with pytest.raises(RequestError, match="is pinned"):
                world.engine.unload_model(name)
            return "not unloaded"
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

    def ask_for_model(self) -> str:
        world, name = self.world, self.name()
        if name not in world.checkpoints:
            return "asked for unknown"
        world.engine.ask_for_model(name)
        return "asked for"

    def pin_model(self) -> str:
        world, name = self.world, self.name()
        if name not in world.checkpoints:
            return "pinned unknown"
        error = failure(lambda: world.engine.pin_model(name))
        if error:
            assert says_no_room(error)
            return "not pinned"
        self.pinned.add(name)
        return "pinned"

    def unpin_model(self) -> str:
        world, name = self.world, self.name()
        if name not in world.checkpoints:
            return "unpinned unknown"
        world.engine.unpin_model(name)
        self.pinned.discard(name)
        return "unpinned"


def failure(operation: Callable[[], None]) -> str:
    """The error that an operation is refused with; empty if it succeeds."""
    try:
        operation()
    except (ConfigError, RequestError) as error:
        return str(error)
    return ""


def says_no_room(error: str) -> bool:
    """Whether an error says that the pool has no room for a model or for a request."""
    texts = (
        "left; raise --memory",
        "for KV, and the first token",
        "out of memory",
        "could not be loaded beside what is pinned",
    )
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
    assert all(error in removed or says_no_room(error or "") for error in errors)
    assert errors.keys() & removed
    expected = {"added", "added twice", "refused", "sent", "sent to wait", "aborted"}
    expected |= {"pinned", "not unloaded", "asked for"}
    assert life.seen.keys() >= expected | {"removed running", "unloaded running"}
    assert world.num_preemptions > 0


# --- none, twice, unknown ------------------------------------------------------------------------


def test_an_engine_without_models(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world()
    engine = world.engine
    for _ in range(2):
        assert not engine.has_work
        world.step()
        assert not engine.models
        assert not engine.memory().models
        assert not engine.stats().num_running
        assert engine.stats().kv_usage == 0
        memory = engine.memory()
        assert memory.free_bytes == memory.budget_bytes - memory.overhead_bytes
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


# --- unloaded and removed in the middle of it ----------------------------------------------------


@pytest.mark.parametrize("num_ahead", [0, 1])
@each_kv_cache
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
    """Log probabilities are equal to the last bit when prefixes are not cached."""
    models = {name: name for name in TINY_MODELS}
    world = open_world(models=models, enable_prefix_caching=False)
    for name in TINY_MODELS:
        case = next(case for case in cases[name] if case.logprobs)
        before = world.finished(world.send(name, case)).logprobs
        world.engine.unload_model(name)
        world.engine.load_model(name)
        assert world.finished(world.send(name, case)).logprobs == before


@each_kv_cache
def test_retained_prefixes_outlast_the_weights(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    world = open_world(models={"a": "llama"}, kv_cache=kv_cache)
    case = longest_prompt(cases["llama"])
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
    for num_steps in range(1, 40, 1 if EVERY_CASE else 3):
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


def test_nothing_refers_to_a_model_that_was_removed(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    world = open_world(models={"a": "llama", "b": "sparse-kv"}, num_ahead=1)
    for case in cases["llama"]:
        world.send("a", case)
        world.step()
    world.engine.pin_prefix("a", longest_prompt(cases["llama"]).prompt)
    lane = world.engine.lanes["a"]
    parts = [weakref.ref(part) for part in (lane.cache, lane.prefixes, lane.slots)]
    del lane
    world.remove_model("a")
    world.step()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


def test_an_aborted_request_has_no_output_any_more(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    """Outputs of steps in flight when another model was unloaded are dropped too."""
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


@pytest.mark.parametrize("index", [None, 0])
def test_an_aborted_request_may_come_again(
    open_world: Open, cases: dict[str, list[Case]], index: int | None
) -> None:
    """Under its own name, whether it was running, waiting, or waiting again."""
    world = open_world(models={"a": "llama"}, max_num_seqs=1)
    case = cases["llama"][0]
    request = Request("again", "a", case.prompt, case.params, 0.0)
    for num_others, num_steps, unloads in (
        (0, 0, False),
        (0, 2, False),
        (1, 2, False),
        (0, 3, True),
    ):
        for _ in range(num_others):
            world.send("a", case)
            world.step()
        world.engine.add(request)
        for _ in range(num_steps):
            world.engine.step()
        if unloads:
            world.engine.unload_model("a")
        world.engine.abort("again", index)
        world.engine.load_model("a")
        world.engine.add(request)
        world.engine.abort("again", index)
        for request_id in world.open_requests:
            world.abort(request_id)
        assert not world.engine.has_work


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


@each_kv_cache
def test_a_pinned_prefix_goes_with_its_model(
    open_world: Open, cases: dict[str, list[Case]], kv_cache: str
) -> None:
    world = open_world(models={"a": "llama", "b": "sparse-kv"}, kv_cache=kv_cache)
    prefix = longest_prompt(cases["llama"]).prompt
    other = cases["sparse-kv"][1].prompt
    for name, tokens in (("a", prefix), ("b", other)):
        assert world.engine.pin_prefix(name, tokens) > 0
    world.finish()
    world.engine.unload_model("a")  # which keeps it
    world.engine.load_model("a")
    assert world.finished(world.send("a", longest_prompt(cases["llama"]))).num_cached_tokens > 0
    world.remove_model("a")
    assert world.used_bytes("a") == 0
    with pytest.raises(UnknownModelError):
        world.engine.unpin_prefix("a", prefix)
    world.add_model("a", "llama")
    assert world.finished(world.send("a", longest_prompt(cases["llama"]))).num_cached_tokens == 0
    world.engine.unpin_prefix("a", prefix)
    assert world.finished(world.send("b", cases["sparse-kv"][1])).num_cached_tokens > 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_model_is_removed_while_a_prefix_is_computed(
    open_world: Open, cases: dict[str, list[Case]], num_steps: int
) -> None:
    """The engine returns no output of that computation."""
    world = open_world(models={"a": "llama"}, num_ahead=1, is_behind=True)
    world.engine.pin_prefix("a", longest_prompt(cases["llama"]).prompt)
    for _ in range(num_steps):
        world.step()
    world.remove_model("a")
    assert not world.engine.has_work
    world.step()


def test_a_model_is_loaded_for_a_prefix(open_world: Open, cases: dict[str, list[Case]]) -> None:
    world = open_world()
    world.add_model("a", "llama", load=False)
    world.engine.pin_prefix("a", longest_prompt(cases["llama"]).prompt)
    world.finish()
    assert world.is_loaded("a")
    assert world.finished(world.send("a", longest_prompt(cases["llama"]))).num_cached_tokens > 0
