"""A runner in another process, which gets nothing but pickled steps, makes the same tokens."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cases import EVERY_CASE
from tests.engine.books import PAGE_BYTES, open_assembly, open_lane
from tests.engine.mixed import Results, note, requests
from tests.models.serving import loaded_model
from tests.models.tiny import TINY_MODELS, plan_tiny

from aquifer.cache import kv_cache
from aquifer.cache.base import CacheFactory, KVLayout
from aquifer.cache.follower import kv_follower
from aquifer.cache.group_tensors import GroupedShape
from aquifer.cache.swap import SwapSpace
from aquifer.cache.swap_memory import SwapMemory
from aquifer.cache.tensors import KVShape
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.assembly import LaneSpec
from aquifer.engine.engine import Engine
from aquifer.engine.policies import RestoreMode
from aquifer.engine.runner import Runner
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.memory.driver import open_driver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights.checkpoint import Checkpoint

MAX_SEQS = 9
MAX_TOKENS = 96
OUTPUT_TOKENS = 24
SWAP_BYTES = 1 << 20
STEP_TOKENS = 20
NAMES = ("llama", "sparse-kv", "no-kv", "windows", "sliding")
MODES = (("virtual", "swap", 1), ("paged", "recompute", 0))
"""(KV cache, preemption, steps planned ahead)"""
CASES = [
    (name, *mode)
    for number, name in enumerate(NAMES)
    # In turn; both with the caches of several groups of layers.
    for mode in (MODES if EVERY_CASE or name == "windows" else MODES[number % 2 :][:1])
]
PATIENCE_S = 300


def runner_process(connection: Connection) -> None:
    """Run pickled steps of one model after the other, until the other end is closed.

    For each, a message has its checkpoint and the shape of its KV; after its last step comes an
    empty message.
    """
    torch.set_num_threads(1)
    while True:
        try:
            folder, shape = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        run_steps(connection, folder, shape)


def run_steps(connection: Connection, folder: Path, shape: KVShape | GroupedShape) -> None:
    pool = PagePool(open_driver("cpu"), 64 << 20, PAGE_BYTES)
    with loaded_model(Checkpoint.open(folder), plan_tiny) as model:
        follower = kv_follower(pool, Owner("m", Kind.KV), shape)
        host_memory = SwapMemory(SWAP_BYTES, pool.driver.device)
        runner = Runner(model, follower, pool.driver, MAX_SEQS, MAX_SEQS, MAX_TOKENS)
        while message := connection.recv_bytes():
            step: StepInput = pickle.loads(message)
            follower.execute(step.kv_ops, host_memory)
            connection.send_bytes(pickle.dumps(runner.launch(step).wait()))
        runner.close()
        follower.close()
    host_memory.close()
    pool.close()


class RunnerProcess:
    """The other process, which serves the tests of this module one after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=runner_process, args=(theirs,))
        self._process.start()
        theirs.close()

    def begin(self, folder: Path, shape: KVShape | GroupedShape) -> None:
        """Have it load a model."""
        self.connection.send_bytes(pickle.dumps((folder, shape)))

    def run(self, step: StepInput) -> None:
        self.connection.send_bytes(pickle.dumps(step))

    def result(self) -> StepOutput:
        assert self.connection.poll(PATIENCE_S)
        output: StepOutput = pickle.loads(self.connection.recv_bytes())
        return output

    def end(self) -> None:
        """Have it close the model."""
        self.connection.send_bytes(b"")

    def close(self) -> int | None:
        """End it; its exit code."""
        self.connection.close()
        self._process.join(PATIENCE_S)
        return self._process.exitcode


@pytest.fixture(scope="module")
def remote() -> Iterator[RunnerProcess]:
    process = RunnerProcess()
    yield process
    assert process.close() == 0


def served_here(folder: Path) -> Results:
    """By an engine of this process, in plenty of memory."""
    config = EngineConfig(
        (ModelSpec("m", folder),), device="cpu", memory_bytes=32 << 20, max_model_len=MAX_TOKENS
    )
    results: Results = {}
    with closing(Engine.open(config, planner=plan_tiny)) as engine:
        for request in requests(14, OUTPUT_TOKENS):
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                note(results, output)
    return results


def most_pages(factory: CacheFactory, layout: KVLayout) -> int:
    """Pages of the largest request."""
    with ExitStack() as resources:
        driver = open_driver("cpu")
        resources.callback(driver.close)
        pool = PagePool(driver, 1 << 20, PAGE_BYTES)
        resources.callback(pool.close)
        cache = factory(pool, Owner("m", Kind.KV), layout, MAX_SEQS, MAX_TOKENS)
        resources.callback(cache.close)
        cache.keep_checkpoints()
        return cache.footprint.most(9, 64, 3)


def served_there(
    remote: RunnerProcess, folder: Path, cache: str, mode: RestoreMode, num_ahead: int
) -> tuple[Results, int, int]:
    """By a runner in another process, with hardly more memory than one request takes.

    Returns: the results, and how many preemptions and swaps there were.
    """
    plan = plan_tiny(Checkpoint.open(folder))
    factory = kv_cache(cache, block_size=4, max_step_tokens=STEP_TOKENS)
    # The largest request, and some pages.
    budget_bytes = (most_pages(factory, plan.kv_layout) + 1) * PAGE_BYTES
    results: Results = {}
    with ExitStack() as resources:
        driver = open_driver("cpu")
        space = SwapSpace(SWAP_BYTES, driver.device)
        assembly = open_assembly(
            resources, driver, budget_bytes, STEP_TOKENS, space, restore_mode=mode
        )
        spec = LaneSpec(
            "m",
            plan.kv_layout,
            MAX_SEQS,
            MAX_TOKENS,
            factory,
            keeps_prefixes=True,
            keeps_journal=True,
        )
        lane = open_lane(resources, assembly, spec)
        remote.begin(folder, lane.cache.tensors.shape)
        for number, request in enumerate(requests(14, OUTPUT_TOKENS)):
            prompt = np.array(request.prompt_token_ids, np.int32)
            params = request.params
            group = SequenceGroup.of(
                request,
                number,
                prompt,
                seed=params.seed or 0,
                max_total=len(prompt) + (params.max_tokens or 0),
                stop_ids=frozenset(params.stop_token_ids or ()),
            )
            assembly.scheduler.add(lane, group)
        in_flight: deque[StepInput] = deque()
        while assembly.scheduler.has_work:
            step = assembly.scheduler.plan()
            assert not assembly.scheduler.take_failed()
            if step is not None:
                remote.run(step)
                in_flight.append(step)
            if len(in_flight) > (0 if step is None else num_ahead):
                for token in assembly.scheduler.commit(in_flight.popleft(), remote.result()):
                    note(results, token)
        remote.end()
    return results, lane.num_preemptions, lane.num_swaps


@pytest.fixture(scope="module")
def all_served() -> dict[str, tuple[Path, Results]]:
    """What `served` has found so far, by model."""
    return {}


@pytest.fixture
def served(
    request: pytest.FixtureRequest,
    all_served: dict[str, tuple[Path, Results]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path, Results]:
    """A model, its checkpoint, and what an engine of this process makes of the requests."""
    name = request.param
    if name not in all_served:
        folder = TINY_MODELS[name].save(tmp_path_factory.mktemp("model") / name)
        all_served[name] = folder, served_here(folder)
    return name, *all_served[name]


@pytest.mark.parametrize(("served", "cache", "mode", "num_ahead"), CASES, indirect=["served"])
def test_a_runner_in_another_process_makes_the_same_tokens(
    served: tuple[str, Path, Results],
    remote: RunnerProcess,
    cache: str,
    mode: RestoreMode,
    num_ahead: int,
) -> None:
    name, folder, expected = served
    results, num_preemptions, num_swaps = served_there(remote, folder, cache, mode, num_ahead)
    assert results == expected
    if name in ("llama", "sparse-kv"):  # the others take no memory, or hardly more as they grow
        assert num_preemptions > 0
    assert (num_swaps > 0) == (mode == "swap" and num_preemptions > 0)
