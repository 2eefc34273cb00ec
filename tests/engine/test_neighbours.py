"""Engine processes that copy weights from each other, and give the same tokens as alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.checkpoints import VOCAB_SIZE, tiny_llama

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.driver.host import HostDriver

NAME = "m"


class HookedDriver(HostDriver):
    """Kills a process when pages of it are opened for the n-th time."""

    def __init__(self, victim: BaseProcess, number: int) -> None:
        super().__init__()
        self.victim = victim
        self.left = number

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        self.left -= 1
        if not self.left:
            assert self.victim.pid is not None
            os.kill(self.victim.pid, signal.SIGKILL)
            self.victim.join()
        return super().adopt(pages)


def config(model: Path, neighbours: Path | None) -> EngineConfig:
    return EngineConfig(
        (ModelSpec(NAME, model),),
        device="cpu",
        memory_bytes=8 << 20,
        page_bytes=4096,
        max_model_len=128,
        enable_prefix_caching=False,
        neighbours=neighbours,
    )


def lend(model: Path, neighbours: Path, connection: Connection) -> None:
    """A process that has a model: unloads it or loads it again when told to, and ends."""
    with closing(Engine.open(config(model, neighbours))) as engine:
        connection.send(dict(engine.memory().loaded_bytes))
        while (message := connection.recv()) is not None:
            engine.unload_model(NAME) if message == "unload" else load(engine)
            engine.pool.check()
            connection.send(dict(engine.memory().loaded_bytes))
    connection.send("closed")


@contextmanager
def lender(model: Path, neighbours: Path) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend, args=(model, neighbours, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert set(ours.recv()) == {(NAME, "disk")}
        yield process, ours
    finally:
        process.kill()
        process.join()


def load(engine: Engine) -> None:
    engine.ask_for_model(NAME)
    while engine.has_work:
        engine.step()


def answer(engine: Engine) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    prompt = [token % VOCAB_SIZE for token in range(3, 400, 17)]
    engine.add(Request("r", NAME, prompt, params, time.monotonic()))
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
    with closing(Engine.open(config(model, None))) as engine:
        expected = answer(engine)
    with lender(model, tmp_path) as (_, other):
        with closing(Engine.open(config(model, tmp_path))) as engine:
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
    with closing(Engine.open(config(model, None))) as engine:
        expected = answer(engine)
    with lender(model, tmp_path) as (process, _):
        driver = HookedDriver(process, number)
        with (
            closing(driver),
            closing(Engine.open(config(model, tmp_path), driver=driver)) as engine,
        ):
            assert driver.left <= 0
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().loaded_bytes == {(NAME, "disk"): num_bytes}
            assert answer(engine) == expected
            engine.unload_model(NAME)
            assert answer(engine) == expected
            engine.pool.check()
