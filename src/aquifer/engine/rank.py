"""The ranks of a tensor-parallel group but rank 0: they execute what that one tells them.

Such a process has a pool of its own, with the pages that rank 0 has in use under the same
addresses: those of weights (`aquifer.weights.store`) and of KV (`aquifer.cache.follower`). It
decides nothing. An error that rank 0 can raise is answered; any other one ends the process, and
with it the group.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from multiprocessing.connection import Connection
from typing import TypeGuard

import torch

from aquifer.cache.follower import kv_follower
from aquifer.cache.journal import KVOp
from aquifer.cache.swap_memory import SwapMemory
from aquifer.config import EngineConfig
from aquifer.engine.mapping import map_ahead
from aquifer.engine.model_files import read_model
from aquifer.engine.rank_ops import (
    BuildModel,
    ClosePool,
    Filled,
    FillWeights,
    KVChanged,
    LaunchStep,
    OpenPool,
    RankError,
    RankOp,
    RegisterModel,
    RemoveModel,
    TakeSwapMemory,
    WarmUpModel,
    WeightsChanged,
)
from aquifer.engine.runner import Runner
from aquifer.errors import ConfigError, DriverError, InvariantError
from aquifer.garbage import collect_less, collect_nothing
from aquifer.kernels import start_compiler
from aquifer.memory.budget import make_pool_like
from aquifer.memory.driver import make_current, open_driver
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.stock import PageStocker
from aquifer.models import Planner
from aquifer.parallel.collectives import GroupCollectives
from aquifer.parallel.plan import sharding
from aquifer.weights.store import GroupPlace, Populated, WeightOp, WeightStore

_log = logging.getLogger(__name__)

_Answer = RankError | None


def serve_rank(connection: Connection, collectives: GroupCollectives, device: str) -> None:
    """Execute what rank 0 sends, until it closes the pipe: a `aquifer.parallel.ranks.Serve`."""
    collect_nothing()
    with _Rank(connection, collectives, device) as rank:
        while True:
            try:
                ops: Sequence[RankOp] = connection.recv()
            except EOFError:
                return
            rank.execute(ops)


class _Rank:
    """A rank with its device, for one engine of rank 0 after the other."""

    def __init__(self, connection: Connection, collectives: GroupCollectives, device: str) -> None:
        self._connection = connection
        self._collectives = collectives
        self._device = device
        self._answering = threading.Lock()
        self._threads = ThreadPoolExecutor(
            1, "aquifer-load", initializer=make_current, initargs=(torch.device(device),)
        )
        self._pool: _RankPool | None = None

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_pool()
        self._threads.shutdown()

    def execute(self, ops: Sequence[RankOp]) -> None:
        """Execute operations, in order."""
        for model, neighbours in groupby(ops, lambda op: op.model if _is_kv(op) else None):
            if model is not None:
                self._open.change_kv(model, [op.op for op in neighbours if _is_kv(op)])
                continue
            for op in neighbours:
                self._execute(op)

    @property
    def _open(self) -> _RankPool:
        assert self._pool is not None, "an `OpenPool` came first"
        return self._pool

    def _execute(self, op: RankOp) -> None:
        match op:
            case OpenPool():
                self._answer(lambda: self._open_pool(op))
            case RegisterModel():
                self._answer(lambda: self._open.register(op))
            case WeightsChanged(model, change):
                self._open.change_weights(model, change)
            case FillWeights(model, groups):
                fill = self._open.models[model].fill
                filling = self._threads.submit(self._answer, lambda: fill(groups), Filled)
                filling.add_done_callback(_end_if_failed)
            case BuildModel(model):
                self._open.models[model].build(self._collectives)
                collect_less()
            case WarmUpModel():
                self._open.models[op.model].warm_up(op)
            case LaunchStep(step, num_threads):
                torch.set_num_threads(num_threads)
                self._open.models[step.model].runner.launch(step)
                self._open.wake()
            case TakeSwapMemory():
                self._open.swap_memory.begin()
            case RemoveModel(model):
                self._open.remove(model)
            case ClosePool():
                self._answer(self._close_pool)

    def _answer(
        self, run: Callable[[], None], form: Callable[[_Answer], object] = lambda answer: answer
    ) -> None:
        """Do something, and tell rank 0 that it is done, or which error it is to raise."""
        answer: _Answer = None
        try:
            run()
        except (ConfigError, DriverError) as error:
            answer = RankError(f"rank {self._collectives.rank} ({self._device})", error)
        with self._answering:
            self._connection.send(form(answer))

    def _close_pool(self) -> None:
        """Give everything back; a pool that could not be opened has nothing."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _open_pool(self, op: OpenPool) -> None:
        planner = sharding(op.planner, self._collectives)
        self._pool = _RankPool(op, planner, self._device)


def _end_if_failed(done: Future[None]) -> None:
    """End the process if a thread has failed: rank 0 waits for an answer that will not come."""
    error = done.exception()
    if error is not None:
        _log.error("this rank ends", exc_info=error)
        os._exit(1)


def _is_kv(op: RankOp) -> TypeGuard[KVChanged]:
    return isinstance(op, KVChanged)


class _RankPool:
    """Device, pool and models of a rank.

    Args:
        op: what rank 0 has.
        planner: of the rank's parts of models.
        device: name of the device.

    Attributes:
        models: the registered models, by name.
        swap_memory: of all models, as on rank 0.

    Raises:
        ConfigError: the device has less free memory than rank 0's pool.
        DriverError: the device refused memory.
    """

    def __init__(self, op: OpenPool, planner: Planner, device: str) -> None:
        self._config = op.config
        self._planner = planner
        self.models: dict[str, _RankModel] = {}
        with ExitStack() as resources:
            driver = open_driver(device)
            resources.callback(driver.close)
            if driver.device.type == "cuda":
                start_compiler(driver.device)
            self._pool = make_pool_like(op.size, driver)
            resources.callback(self._pool.close)
            if map_ahead(op.config, driver) == "background":
                self._pool.mapper = BackgroundMapper(self._pool.pages)
                resources.callback(self._pool.mapper.close)
            self._stocker = PageStocker(self._pool, reclaim_below=op.config.reclaim_below)
            self._stocker.start()
            resources.callback(self._stocker.close)
            swap_bytes = op.config.swap_space_bytes
            self.swap_memory = SwapMemory(swap_bytes, driver.device, uses_all=True)
            resources.callback(self.swap_memory.close)
            self._resources = resources.pop_all()

    def register(self, op: RegisterModel) -> None:
        """Register a model.

        Raises:
            ConfigError: its checkpoint cannot be used.
            DriverError: the device has no addresses left.
        """
        model = _RankModel(self._pool, self._config, self._planner, op)
        self.models[op.spec.name] = model

    def change_weights(self, model: str, op: WeightOp) -> None:
        """Put pages under weights, or give them up, as rank 0 has."""
        store = self.models[model].store
        groups = [store.groups[number] for number in op.groups]
        if not isinstance(op, Populated):
            store.evict(groups)
            return
        same_as = {
            store.groups[number]: GroupPlace(
                self.models[other].store, self.models[other].store.groups[their]
            )
            for number, other, their in op.same_as
        }
        if not store.populate(groups, same_as):
            raise InvariantError("this rank's pool has no room for the pages of rank 0")

    def change_kv(self, model: str, ops: Sequence[KVOp]) -> None:
        """Do to the KV of a model what rank 0 has done."""
        self.models[model].kv.execute(ops, self.swap_memory)

    def wake(self) -> None:
        """Have pages created and mapped ahead of need, while a step runs."""
        if self._pool.mapper is not None:
            self._pool.mapper.begin()
        self._stocker.wake()

    def remove(self, model: str) -> None:
        """Give everything of a model back. One that could not be registered has nothing."""
        if model in self.models:
            self.models.pop(model).close()

    def close(self) -> None:
        """Give everything back."""
        for model in self.models.values():
            model.close()
        self.models.clear()
        self._resources.close()


class _RankModel:
    """A rank's part of a model.

    Args:
        pool: the rank's.
        config: options of the engine.
        planner: of the rank's parts of models.
        op: what rank 0 has.

    Attributes:
        store: its weights.
        kv: its KV.
        runner: runs its steps; there after `build`.
    """

    runner: Runner

    def __init__(
        self, pool: PagePool, config: EngineConfig, planner: Planner, op: RegisterModel
    ) -> None:
        self._op = op
        self._pool = pool
        self._config = config
        self._checkpoint, self._plan = read_model(op.spec, planner, config)
        name = op.spec.name
        self.store = WeightStore(pool, Owner(name, Kind.WEIGHTS), self._plan.parameters)
        self.kv = kv_follower(pool, Owner(name, Kind.KV), op.shape)

    def fill(self, groups: Sequence[int]) -> None:
        """Load the contents of groups of weights.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        chosen = [self.store.groups[number] for number in groups]
        if self._config.load_format == "dummy":
            self.store.fill_random(self._config.seed or 0, chosen)
        else:
            self.store.load(self._checkpoint, groups=chosen)

    def build(self, collectives: GroupCollectives) -> None:
        """Build the model over its weights."""
        with torch.inference_mode():
            model = self._plan.build(self.store.tensors)
        op = self._op
        driver = self._pool.driver
        self.runner = Runner(
            model, self.kv, driver, op.max_seqs, op.num_slots, op.max_tokens, collectives
        )

    def warm_up(self, op: WarmUpModel) -> None:
        """Run everything once that steps may run."""
        if op.captures:  # rank 0 has the first addresses mapped, with or without other pages
            self.kv.execute(())
        self.runner.warm_up(
            self.runner.warm_up_of(op.num_tokens),
            op.num_tokens,
            lambda *_: None,
            has_kv=op.has_kv,
            captures=op.captures,
        )

    def close(self) -> None:
        """Give everything back."""
        if hasattr(self, "runner"):
            self.runner.close()
        self.kv.close()
        self.store.close()
