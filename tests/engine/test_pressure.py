"""Models, pinned prefixes and overhead that compete for a pool too small for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from tests.architectures import (
    GQA,
    HYBRIDS,
    OUR_DECODER,
    TRANSFORMERS,
    VOCAB_SIZE,
    WINDOW_TOKENS,
    save_tiny,
)

from aquifer.cache import KV_CACHES
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import CapacityError, RequestError
from aquifer.memory.driver.base import Driver
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind

MODELS = ("llama", "gpt2")  # their KV differs in size
PAGE_BYTES = 4096
OUTPUT_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
PLENTY_BYTES = 16 << 20


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


PROMPTS = {"llama": random_prompts(0, 33, 70, 12, 50), "gpt2": random_prompts(1, 12, 40, 70, 33)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_tiny((OUR_DECODER | TRANSFORMERS)[name](), folder / name)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Each model's outputs for its prompts, one at a time with plenty of memory."""
    return {model: outputs_alone(folders[model], model) for model in MODELS}


def open_engine(
    folders: Mapping[str, Path],
    memory_bytes: int = PLENTY_BYTES,
    *,
    driver: Driver | None = None,
    **options: Any,
) -> Engine:
    config = EngineConfig(
        models=tuple(ModelSpec(name, folder) for name, folder in folders.items()),
        device="cpu",
        memory_bytes=memory_bytes,
        page_bytes=PAGE_BYTES,
        block_size=4,
        **options,
    )
    return Engine.open(config, driver=driver)


def tight_memory(folders: Mapping[str, Path], num_tokens: int) -> int:
    """Bytes of a pool that holds the weights, and so many tokens of the model with most KV."""
    with closing(open_engine(folders)) as engine:
        infos = engine.models.values()
        token_bytes = max(info.kv_bytes_per_token for info in infos)
        return sum(info.weight_bytes for info in infos) + num_tokens * token_bytes + PAGE_BYTES


@dataclass
class Answer:
    """An engine's outputs for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0


_request_numbers = count()


def add(engine: Engine, model: str, prompt: Sequence[int]) -> str:
    request_id = f"{model} {next(_request_numbers)}"
    engine.add(Request(request_id, model, list(prompt), GREEDY, 0.0))
    return request_id


def step(engine: Engine, answers: dict[str, Answer]) -> None:
    """Run one step; its outputs must be of requests that have not ended."""
    for output in engine.step():
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish_reason is None
        answer.token_ids += output.token_ids
        answer.finish_reason, answer.error = output.finish_reason, output.error
        answer.num_cached_tokens += output.num_cached_tokens
    engine.pool.check()


def finish(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Run until no request is left; the answers by request id."""
    answers = {} if answers is None else answers
    while engine.has_work:
        step(engine, answers)
    assert all(answer.finish_reason is not None for answer in answers.values())
    return answers


def assert_idle(engine: Engine) -> None:
    """Nothing is in use but weights and retained prefixes."""
    for model in engine.memory().models.values():
        assert model.bytes_by_kind[Kind.KV] == model.num_running == model.num_waiting == 0


def outputs_alone(folder: Path, model: str) -> list[list[int]]:
    with closing(open_engine({model: folder}, enable_prefix_caching=False)) as engine:
        outputs = []
        for prompt in PROMPTS[model]:
            add(engine, model, prompt)
            (answer,) = finish(engine).values()
            outputs.append(answer.token_ids)
        return outputs


# --- several models ------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_models_that_compete_answer_as_if_alone(
    folders: dict[str, Path],
    alone: dict[str, list[list[int]]],
    kv_cache: str,
    preemption_mode: Any,
) -> None:
    """A pool for the longest request and not much more, for eight requests to two models."""
    options = {"kv_cache": kv_cache, "preemption_mode": preemption_mode}
    with closing(open_engine(folders, tight_memory(folders, 120), **options)) as engine:
        expected = {}
        for index in range(len(PROMPTS["llama"])):
            for model in MODELS:
                request_id = add(engine, model, PROMPTS[model][index])
                expected[request_id] = (model, index)
        answers = finish(engine)
        assert {request_id: answer.token_ids for request_id, answer in answers.items()} == {
            request_id: alone[model][index] for request_id, (model, index) in expected.items()
        }
        num_loads = sum(status.num_loads for status in engine.statuses.values())
        assert sum(engine.stats().num_preemptions.values()) + num_loads > len(MODELS)
        assert_idle(engine)


# --- overhead ------------------------------------------------------------------------------------


class GrowingDriver(FaultyDriver):
    """A driver with growing overhead, as captured graphs cause it."""

    held_bytes = 0

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        return self.held_bytes


@pytest.fixture
def driver() -> Iterator[GrowingDriver]:
    driver = GrowingDriver(HostDriver())
    yield driver
    driver.close()


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_requests_wait_while_overhead_grows(
    folders: dict[str, Path],
    alone: dict[str, list[list[int]]],
    driver: GrowingDriver,
    kv_cache: str,
) -> None:
    """A page a step, until there is room for the longest request only."""
    one = {"llama": folders["llama"]}
    least_bytes, most_bytes = tight_memory(one, 100), tight_memory(one, 400)
    with closing(open_engine(one, most_bytes, driver=driver, kv_cache=kv_cache)) as engine:
        engine.meter.every_s = 0.0
        ids = [add(engine, "llama", prompt) for prompt in PROMPTS["llama"]]
        answers: dict[str, Answer] = {}
        while engine.has_work:
            driver.held_bytes = min(driver.held_bytes + 2 * PAGE_BYTES, most_bytes - least_bytes)
            step(engine, answers)
            memory = engine.memory()
            assert memory.overhead_bytes <= driver.held_bytes + PAGE_BYTES  # and the guard page
            assert memory.free_bytes >= 0
        assert driver.held_bytes == most_bytes - least_bytes
        assert [answers[request_id].token_ids for request_id in ids] == alone["llama"]
        assert sum(engine.stats().num_preemptions.values()) > 0
        assert_idle(engine)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_requests_are_refused_with_a_reason_when_overhead_takes_all(
    folders: dict[str, Path],
    alone: dict[str, list[list[int]]],
    driver: GrowingDriver,
    kv_cache: str,
) -> None:
    one, prompts = {"llama": folders["llama"]}, PROMPTS["llama"]
    memory_bytes = tight_memory(one, 400)
    with closing(open_engine(one, memory_bytes, driver=driver, kv_cache=kv_cache)) as engine:
        engine.meter.every_s = 0.0
        ids = [add(engine, "llama", prompt) for prompt in prompts]
        answers: dict[str, Answer] = {}
        for _ in range(5):
            step(engine, answers)
        driver.held_bytes = memory_bytes
        finish(engine, answers)
        assert answers.keys() == set(ids)
        for request_id, expected in zip(ids, alone["llama"], strict=True):
            answer = answers[request_id]
            assert answer.token_ids == expected[: len(answer.token_ids)]
            if answer.finish_reason != "length":
                assert answer.finish_reason == "error"
                assert "out of memory" in (answer.error or "")
        assert any(answer.finish_reason == "error" for answer in answers.values())
        with pytest.raises(CapacityError, match="for KV"):
            add(engine, "llama", prompts[0])
        assert_idle(engine)

        driver.held_bytes = 0
        engine.pool.account_overhead(0)
        add(engine, "llama", prompts[0])
        (answer,) = finish(engine).values()
        assert answer.token_ids == alone["llama"][0]


# --- several pins --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_the_kv_capacity_is_what_requests_may_take(folders: dict[str, Path], kv_cache: str) -> None:
    """The longest request that is accepted has KV for all of its tokens but the last."""
    one = {"llama": folders["llama"]}
    with closing(open_engine(one, tight_memory(one, 100), kv_cache=kv_cache)) as engine:
        capacity = engine.memory().models["llama"].kv_capacity
        context_tokens = engine.models["llama"].max_model_len
        assert 0 < capacity.num_tokens < context_tokens
        assert 0 < capacity.num_sequences < 1
        prompt = random_prompts(0, 5)[0]
        longest = capacity.num_tokens + 1 - len(prompt)
        for max_tokens, is_accepted in ((longest, True), (longest + 1, False)):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
            request = Request(f"{max_tokens}", "llama", prompt, params, 0.0)
            if is_accepted:
                engine.add(request)
                assert len(finish(engine)[request.request_id].token_ids) == max_tokens
            else:
                with pytest.raises(CapacityError, match=f"enough for {capacity.num_tokens} tokens"):
                    engine.add(request)
        assert_idle(engine)


def test_the_kv_capacity_of_windows_and_of_state_alone(tmp_path: Path) -> None:
    """Sequences of windows have no longest one, and a model without KV has no tokens of it."""
    windows = transformers.MistralConfig(**GQA, sliding_window=WINDOW_TOKENS)
    folders = {"windows": tmp_path / "windows", "state": tmp_path / "state"}
    for (name, folder), config in zip(folders.items(), (windows, HYBRIDS["mamba2"]()), strict=True):
        folder.mkdir()
        save_tiny(config, folder)
        one = {name: folder}
        with closing(open_engine(one, 16 << 20)) as engine:
            capacity = engine.memory().models[name].kv_capacity
            context_tokens = engine.models[name].max_model_len
            assert capacity.num_sequences > 1
            if name == "windows":
                assert capacity.num_tokens == int(capacity.num_sequences * context_tokens)
                continue
            assert capacity.num_tokens == 0
            with pytest.raises(RequestError, match="model 'state' has no KV, so there are no"):
                engine.pin_prefix(name, [1, 2, 3])


def cached_tokens(engine: Engine, model: str, prompt: Sequence[int]) -> int:
    add(engine, model, prompt)
    (answer,) = finish(engine).values()
    return answer.num_cached_tokens


def crowd(engine: Engine, model: str) -> None:
    """Requests that together need all memory that is not pinned."""
    for prompt in random_prompts(2, *[60] * 8):
        add(engine, model, prompt)
    finish(engine)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_pins_that_overlap_are_kept_and_ended_one_by_one(
    folders: dict[str, Path], kv_cache: str
) -> None:
    one = {"llama": folders["llama"]}
    (long,) = random_prompts(3, 64)
    short, beside = long[:32], [*long[:32], *random_prompts(4, 16)[0]]
    with closing(open_engine(one, tight_memory(one, 400), kv_cache=kv_cache)) as engine:
        kept = {}
        for prefix in (long, short, beside):
            kept[len(prefix)] = engine.pin_prefix("llama", prefix)
            finish(engine)
        engine.unpin_prefix("llama", short)
        crowd(engine, "llama")
        assert cached_tokens(engine, "llama", [*long, 1]) >= kept[64]
        assert cached_tokens(engine, "llama", [*beside, 1]) >= kept[48]
        engine.unpin_prefix("llama", long)
        crowd(engine, "llama")
        assert cached_tokens(engine, "llama", [*beside, 1]) >= kept[48]
        assert kept[32] <= cached_tokens(engine, "llama", [*long, 2]) < kept[64]
        engine.unpin_prefix("llama", beside)
        crowd(engine, "llama")
        assert cached_tokens(engine, "llama", [*beside, 2]) < kept[48]


def test_pins_of_two_models_have_nothing_in_common(folders: dict[str, Path]) -> None:
    (prefix,) = random_prompts(3, 48)
    with closing(open_engine(folders, tight_memory(folders, 300))) as engine:
        kept = {model: engine.pin_prefix(model, prefix) for model in MODELS}
        finish(engine)
        engine.unpin_prefix("gpt2", prefix)
        add(engine, "llama", random_prompts(6, 20)[0])
        engine.step()  # its weights are in use, and none of them is evicted for others
        crowd(engine, "gpt2")
        assert cached_tokens(engine, "llama", [*prefix, 1]) >= kept["llama"]
        assert cached_tokens(engine, "gpt2", [*prefix, 1]) < kept["gpt2"]


@pytest.mark.parametrize("models", [("llama",), MODELS], ids=["one model", "two models"])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_pins_take_up_to_half_of_what_kv_can_have(
    folders: dict[str, Path], kv_cache: str, models: tuple[str, ...]
) -> None:
    """Any number of pins of any model; what is unpinned can be pinned again.

    KV can have what the weights of the largest model leave: so each can be loaded beside the pins.
    """
    some = {model: folders[model] for model in models}
    with closing(open_engine(some, tight_memory(some, 500), kv_cache=kv_cache)) as engine:
        weight_bytes = max(info.weight_bytes for info in engine.models.values())
        half_bytes = (engine.memory().budget_bytes - weight_bytes) // 2
        prefixes = random_prompts(5, *[40] * 30)

        def pin(index: int) -> None:
            engine.pin_prefix(models[index % len(models)], prefixes[index])

        def pin_until_refused(begin: int) -> int:
            """The index of the first prefix that is refused."""
            for index in range(begin, len(prefixes)):
                try:
                    pin(index)
                except CapacityError:
                    return index
                finish(engine)
            raise AssertionError("nothing was refused")

        def pinned_bytes() -> int:
            lanes = engine.lanes.values()
            return sum(lane.prefixes.stats.pinned_bytes for lane in lanes if lane.prefixes)

        end = pin_until_refused(0)
        with pytest.raises(CapacityError, match="more than half"):
            pin(end)
        longest_bytes = 40 * max(info.kv_bytes_per_token for info in engine.models.values())
        assert half_bytes - longest_bytes < pinned_bytes() <= half_bytes
        for index in range(len(models)):
            engine.unpin_prefix(models[index], prefixes[index])
        assert pin_until_refused(end) >= end + 1
        assert half_bytes - longest_bytes < pinned_bytes() <= half_bytes


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_pins_that_are_not_computed_yet_count(folders: dict[str, Path], kv_cache: str) -> None:
    """Many are asked for at once, and the engine has not run a step."""
    one = {"llama": folders["llama"]}
    with closing(open_engine(one, tight_memory(one, 400), kv_cache=kv_cache)) as engine:
        (info,) = engine.models.values()
        half_bytes = (engine.memory().budget_bytes - info.weight_bytes) // 2
        *prefixes, another = random_prompts(5, *[40] * 6)
        assert half_bytes // (40 * info.kv_bytes_per_token) == len(prefixes)
        for prefix in prefixes:
            engine.pin_prefix("llama", prefix)
        with pytest.raises(CapacityError, match="more than half"):
            engine.pin_prefix("llama", another)
        finish(engine)
        (lane,) = engine.lanes.values()
        assert lane.prefixes is not None
        assert 0 < lane.prefixes.pinned_bytes == lane.prefixes.promised_bytes <= half_bytes


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_what_pins_have_in_common_counts_once(folders: dict[str, Path], kv_cache: str) -> None:
    """So a prefix may be pinned again, and with a little more, though half of the room is taken."""
    one = {"llama": folders["llama"]}
    with closing(open_engine(one, tight_memory(one, 260), kv_cache=kv_cache)) as engine:
        (long,) = random_prompts(6, 100)
        num_kept = engine.pin_prefix("llama", long)
        finish(engine)
        for prefix in (long, long[:60], [*long, *random_prompts(7, 20)[0]]):
            assert engine.pin_prefix("llama", prefix) > 40
            finish(engine)
        with pytest.raises(CapacityError, match="more than half"):
            engine.pin_prefix("llama", random_prompts(8, 60)[0])
        assert engine.pin_prefix("llama", long) == num_kept
