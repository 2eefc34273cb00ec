"""Weights of another engine process on a GPU: of the same GPU, and of another one."""

from __future__ import annotations

import time
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, tiny_llama
from tests.lending import NAME, NEVER, kill, lender, until

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.memory.driver.base import ExportedPages, Handle
from aquifer.memory.driver.cuda import CudaDriver

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Its largest matrices take pages of both sizes: 96 MiB for gate and up, 48 MiB for down."""

other_device = pytest.mark.parametrize(
    "lending",
    [
        "cuda:0",
        pytest.param(
            "cuda:1",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)


class KillingDriver(CudaDriver):
    """Kills a process when pages of it are opened for the n-th time."""

    def __init__(self, victim: BaseProcess, number: int) -> None:
        super().__init__(0, exports=True)
        self.victim = victim
        self.left = number

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        self.left -= 1
        if not self.left:
            kill(self.victim)
        return super().adopt(pages)


def config(model: Path, device: str, neighbours: Path | None) -> EngineConfig:
    return EngineConfig(
        (ModelSpec(NAME, model),),
        device=device,
        dtype="bfloat16",
        memory_bytes=6 << 30,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        neighbours=neighbours,
    )


def answer(engine: Engine) -> list[int]:
    """Greedy tokens of two prompts, which captured steps decode."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for number, name in enumerate(tokens):
        prompt = [(token + number) % VOCAB_SIZE for token in range(3, 400, 17)]
        engine.add(Request(name, NAME, prompt, params, time.monotonic()))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return [token for found in tokens.values() for token in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / NAME, seed=3, **SHAPE)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """The tokens of an engine that is alone."""
    with closing(Engine.open(config(model, "cuda:0", None))) as engine:
        return answer(engine)


@other_device
def test_weights_come_from_another_process(
    model: Path, expected: list[int], tmp_path: Path, lending: str
):
    """Whole and half, again and again; then from the files, and in the other direction.

    What was mapped for a load, or before it, is the fastest source of all.
    """
    with lender(config(model, lending, tmp_path)) as (_, other):
        with closing(Engine.open(config(model, "cuda:0", tmp_path))) as engine:
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().loaded_bytes == {(NAME, "neighbour"): num_bytes}
            assert answer(engine) == expected
            for keep_bytes in (0, num_bytes // 2, 0):
                engine.unload_model(NAME, keep_bytes)
                assert answer(engine) == expected
                engine.pool.check()
            assert set(engine.memory().loaded_bytes) == {(NAME, "neighbour")}
            other.send("unload")
            other.recv()
            engine.unload_model(NAME)
            assert answer(engine) == expected
            assert engine.memory().loaded_bytes[NAME, "disk"] == num_bytes
            other.send("load")
            assert other.recv()[NAME, "neighbour"] == num_bytes
            engine.unload_model(NAME)
            until(lambda: engine.memory().neighbour_bytes == num_bytes)
            assert answer(engine) == expected
            assert engine.memory().loaded_bytes[NAME, "disk"] == num_bytes
            other.send(None)
            assert other.recv() == "closed"
            until(lambda: engine.memory().neighbour_bytes == 0)
            engine.unload_model(NAME)
            assert answer(engine) == expected
            engine.pool.check()
        assert list(tmp_path.iterdir()) == []


@other_device
def test_pages_are_mapped_before_a_load(
    model: Path, expected: list[int], tmp_path: Path, lending: str
):
    """The load maps none then. They do not count as this process's memory."""
    with lender(config(model, lending, tmp_path)) as (process, other):
        driver = KillingDriver(process, NEVER)
        with (
            closing(driver),
            closing(Engine.open(config(model, "cuda:0", tmp_path), driver=driver)) as engine,
        ):
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().neighbour_bytes == num_bytes  # the first load has mapped them
            engine.unload_model(NAME)
            other.send("unload")
            other.recv()
            until(lambda: engine.memory().neighbour_bytes == 0)
            overhead_bytes = driver.overhead_bytes()
            other.send("load")
            assert other.recv() == {(NAME, "disk"): 2 * num_bytes}
            until(lambda: engine.memory().neighbour_bytes == num_bytes)
            mapped_overhead_bytes = driver.overhead_bytes()
            num_left = driver.left
            assert answer(engine) == expected
            assert driver.left == num_left
            assert engine.memory().loaded_bytes == {(NAME, "neighbour"): 2 * num_bytes}
            engine.pool.check()
            assert mapped_overhead_bytes < overhead_bytes + num_bytes // 2


@other_device
@pytest.mark.parametrize("number", [1, 6])
def test_a_process_that_is_killed_while_it_lends(
    model: Path, expected: list[int], tmp_path: Path, lending: str, number: int
):
    """The load goes on from the files, and the answer is right."""
    with lender(config(model, lending, tmp_path)) as (process, _):
        driver = KillingDriver(process, number)
        with (
            closing(driver),
            closing(Engine.open(config(model, "cuda:0", tmp_path), driver=driver)) as engine,
        ):
            assert driver.left <= 0
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().loaded_bytes == {(NAME, "disk"): num_bytes}
            assert answer(engine) == expected
            engine.unload_model(NAME)
            assert answer(engine) == expected
            engine.pool.check()


@other_device
def test_what_is_lent_stays_while_it_is_unloaded(
    model: Path, expected: list[int], tmp_path: Path, lending: str
):
    """The lender unloads the model as soon as its first pages are open here."""

    class UnloadingDriver(CudaDriver):
        max_mappings = 1 << 20  # type: ignore[assignment]  # so that nothing is mapped ahead
        is_told = False

        def adopt(self, pages: ExportedPages) -> list[Handle]:
            if not self.is_told:
                self.is_told = True
                other.send("unload")
                other.recv()
            return super().adopt(pages)

    with lender(config(model, lending, tmp_path)) as (_, other):
        driver = UnloadingDriver(0, exports=True)
        with (
            closing(driver),
            closing(Engine.open(config(model, "cuda:0", tmp_path), driver=driver)) as engine,
        ):
            num_bytes = engine.models[NAME].weight_bytes
            assert engine.memory().loaded_bytes == {(NAME, "neighbour"): num_bytes}
            assert answer(engine) == expected
        other.send("load")
        assert other.recv() == {(NAME, "disk"): 2 * num_bytes}
