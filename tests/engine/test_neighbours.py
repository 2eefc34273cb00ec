"""Engine processes that copy weights from each other, and give the same tokens as alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.checkpoints import VOCAB_SIZE, tiny_llama
from tests.lending import NAME, NEVER, kill, lender, until

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.driver.host import HostDriver


class KillingDriver(HostDriver):
    """Kills a process when pages of it are opened for the n-th time."""

    def __init__(self, victim: BaseProcess, number: int) -> None:
        super().__init__()
        self.victim = victim
        self.left = number

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        self.left -= 1
        if not self.left:
            kill(self.victim)
        return super().adopt(pages)


class MappingDriver(KillingDriver):
    """A device that may have any number of mappings: pages are mapped ahead, and stay mapped."""

    max_mappings = None  # type: ignore[assignment]

    def __init__(self, victim: BaseProcess, number: int) -> None:
        super().__init__(victim, number)
        self.adopted: set[Handle] = set()

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        handles = super().adopt(pages)
        self.adopted.update(handles)
        return handles

    def release(self, handles: Sequence[Handle]) -> None:
        self.adopted.difference_update(handles)
        super().release(handles)


class HookedDriver(HostDriver):
    """Calls a function when pages of another process are opened for the first time."""

    def __init__(self, hook: Callable[[], None]) -> None:
        super().__init__()
        self.hooks = [hook]

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        while self.hooks:
            self.hooks.pop()()
        return super().adopt(pages)


def config(*models: Path, neighbours: Path | None = None) -> EngineConfig:
    return EngineConfig(
        tuple(ModelSpec(model.name, model) for model in models),
        device="cpu",
        memory_bytes=8 << 20,
        page_bytes=4096,
        max_model_len=128,
        enable_prefix_caching=False,
        neighbours=neighbours,
    )


def ask(engine: Engine, model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    prompt = [token % VOCAB_SIZE for token in range(3, 400, 17)]
    engine.add(Request("r", model, prompt, params, time.monotonic()))


def answer(engine: Engine, model: str | None = NAME) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities; without a model, of a request that was sent before."""
    if model is not None:
        ask(engine, model)
    tokens, logprobs = list[int](), list[float]()
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.token_ids
            logprobs += [each.logprobs[0] for each in output.logprobs or ()]
    return tokens, logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / NAME, seed=3)


def test_weights_come_from_another_process_bit_for_bit(model: Path, tmp_path: Path):
    """As long as it has them; then from the files, and the other one borrows them in turn."""
    with closing(Engine.open(config(model))) as engine:
        expected = answer(engine)
    with lender(config(model, neighbours=tmp_path)) as (_, other):
        with closing(Engine.open(config(model, neighbours=tmp_path))) as engine:
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().loaded_bytes == {(NAME, "neighbour"): num_bytes}
            assert answer(engine) == expected
            for _ in range(2):
                engine.unload_model(NAME, num_bytes // 2)
                assert answer(engine) == expected
                engine.pool.check()
            other.send("unload")
            other.recv()
            engine.unload_model(NAME)
            assert answer(engine) == expected
            assert engine.memory().loaded_bytes[NAME, "disk"] == num_bytes
            other.send("load")
            assert other.recv()[NAME, "neighbour"] == num_bytes
            other.send(None)
            assert other.recv() == "closed"
            engine.unload_model(NAME)
            assert answer(engine) == expected
            engine.pool.check()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [1, 3])
def test_a_process_that_is_killed_while_it_lends(model: Path, tmp_path: Path, number: int):
    """The load goes on from the files, and the answer is right."""
    with closing(Engine.open(config(model))) as engine:
        expected = answer(engine)
    with lender(config(model, neighbours=tmp_path)) as (process, _):
        driver = KillingDriver(process, number)
        with (
            closing(driver),
            closing(Engine.open(config(model, neighbours=tmp_path), driver=driver)) as engine,
        ):
            assert driver.left <= 0
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().loaded_bytes == {(NAME, "disk"): num_bytes}
            assert answer(engine) == expected
            engine.unload_model(NAME)
            assert answer(engine) == expected
            engine.pool.check()


@pytest.mark.parametrize("is_killed", [False, True])
def test_pages_are_mapped_before_a_load(model: Path, tmp_path: Path, is_killed: bool):
    """The load maps none then. If the other process is killed, the load goes on from the files."""
    with closing(Engine.open(config(model))) as engine:
        expected = answer(engine)
    with lender(config(model, neighbours=tmp_path)) as (process, other):
        driver = MappingDriver(process, NEVER)
        with (
            closing(driver),
            closing(Engine.open(config(model, neighbours=tmp_path), driver=driver)) as engine,
        ):
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().neighbour_bytes == num_bytes  # the first load has mapped them
            engine.unload_model(NAME)
            other.send("unload")
            other.recv()
            until(lambda: engine.memory().neighbour_bytes == 0)
            driver.left = 2 if is_killed else NEVER
            other.send("load")
            if is_killed:
                until(lambda: driver.left <= 0 and not driver.adopted)  # its pages are given back
            else:
                until(lambda: engine.memory().neighbour_bytes == num_bytes)
                assert other.recv() == {(NAME, "disk"): 2 * num_bytes}
            left = driver.left
            assert answer(engine) == expected
            assert driver.left == left
            expected_bytes = Counter({(NAME, "neighbour"): num_bytes})
            expected_bytes[NAME, "disk" if is_killed else "neighbour"] += num_bytes
            assert engine.memory().loaded_bytes == expected_bytes
            engine.unload_model(NAME)
            assert answer(engine) == expected
            engine.pool.check()


def test_a_model_that_needs_the_room_of_what_is_lent_waits(model: Path, tmp_path: Path):
    """Its requests do not fail meanwhile, though nothing else runs."""
    other = tiny_llama(tmp_path / "other", seed=4)
    sockets = tmp_path / "s"
    with closing(Engine.open(config(other))) as engine:
        expected = answer(engine, "other")
        num_bytes = engine.models["other"].weight_bytes
    narrow = replace(config(model, other, neighbours=sockets), memory_bytes=num_bytes + (128 << 10))
    with closing(Engine.open(narrow)) as lender:
        assert lender.statuses["other"].resident_bytes == 0

        def need_the_room() -> None:
            ask(lender, "other")
            for _ in range(5):
                assert lender.step() == []
            status = lender.statuses[NAME]
            assert status.resident_bytes == status.weight_bytes

        driver = HookedDriver(need_the_room)
        wide = config(model, other, neighbours=sockets)
        with closing(driver), closing(Engine.open(wide, driver=driver)) as engine:
            assert driver.hooks == []
            assert engine.memory().loaded_bytes[NAME, "neighbour"] == num_bytes
            assert answer(lender, None) == expected
            assert lender.statuses[NAME].resident_bytes < num_bytes
        lender.pool.check()


@pytest.mark.parametrize("num_pages", [1, 2])
def test_a_request_that_needs_the_room_of_what_is_lent_waits(
    model: Path, tmp_path: Path, num_pages: int
):
    """Its model is there and nothing else runs, but its KV has no room beside what is lent: that of
    its prompt, or of its output."""
    other = tiny_llama(tmp_path / "other", seed=4)
    sockets = tmp_path / "s"
    with closing(Engine.open(config(model, other))) as engine:
        expected, _ = answer(engine, "other")
        weight_bytes = sum(status.weight_bytes for status in engine.statuses.values())
    narrow = replace(
        config(model, other, neighbours=sockets), memory_bytes=weight_bytes + num_pages * 4096
    )
    with closing(Engine.open(narrow)) as lender:
        assert all(each.resident_bytes == each.weight_bytes for each in lender.statuses.values())
        tokens: list[int] = []

        def need_the_room() -> None:
            ask(lender, "other")
            for _ in range(20):
                for output in lender.step():
                    assert output.error is None
                    tokens.extend(output.token_ids)
            status = lender.statuses[NAME]
            assert status.resident_bytes == status.weight_bytes

        driver = HookedDriver(need_the_room)
        wide = config(model, other, neighbours=sockets)
        with closing(driver), closing(Engine.open(wide, driver=driver)) as engine:
            assert driver.hooks == []
            assert engine.memory().loaded_bytes[NAME, "neighbour"] > 0
            assert len(tokens) < len(expected)
            assert (num_pages > 1) == (len(tokens) > 0)
            rest, _ = answer(lender, None)
            assert tokens + rest == expected
            assert lender.statuses[NAME].resident_bytes < lender.statuses[NAME].weight_bytes
        lender.pool.check()
