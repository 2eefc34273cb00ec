"""Rank 0's side of a tensor-parallel group: it tells the others what it does.

What only changes books of the other ranks, such as pages of the KV, waits for the next message that
they have to act upon: a step, or weights to be loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from aquifer.cache.base import DeviceCache
from aquifer.cache.journal import KVOp
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.in_flight import InFlight
from aquifer.engine.rank import serve_rank
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
from aquifer.engine.reports import OnStage
from aquifer.engine.runner import Runner
from aquifer.engine.step_input import StepInput
from aquifer.engine.warm_up import WarmUp
from aquifer.errors import AquiferError, ConfigError, DriverError, GroupError
from aquifer.memory.driver import rank_devices
from aquifer.memory.driver.base import Driver
from aquifer.memory.pool import PagePool
from aquifer.models import Model, Planner
from aquifer.models.collectives import Collectives
from aquifer.parallel.plan import sharding
from aquifer.parallel.ranks import Ranks
from aquifer.weights.store import WeightOp


def start_ranks(device: str, size: int) -> Ranks:
    """Start a group on `device` and the ones after it.

    Args:
        device: device of rank 0, as in the options.
        size: number of ranks.

    Raises:
        ConfigError: there are not so many devices.
        GroupError: a rank could not start.
    """
    ranks = Ranks(rank_devices(device, size), serve_rank)
    ranks.start()
    return ranks


class Leader:
    """Tells the other ranks of a group what an engine does.

    Args:
        ranks: the group, started.
        planner: plans whole models.
        is_owner: whether it ends the group when it is closed.

    Attributes:
        planner: plans rank 0's part of models.
    """

    def __init__(self, ranks: Ranks, planner: Planner, *, is_owner: bool) -> None:
        self._ranks = ranks
        self._whole_planner = planner
        self._is_owner = is_owner
        self.planner = sharding(planner, ranks.collectives)
        self._noted: list[RankOp] = []
        self._noting = threading.RLock()
        self._is_open = False

    @property
    def device(self) -> str:
        """Name of rank 0's device."""
        return self._ranks.devices[0]

    @property
    def collectives(self) -> Collectives:
        """Rank 0's."""
        return self._ranks.collectives

    @property
    def is_lost(self) -> bool:
        """Whether a rank is gone; `check` raises then."""
        return self._ranks.is_lost

    def check(self) -> None:
        """Raise the reason why no step can be run any more, if there is one.

        Raises:
            GroupError: a rank is gone.
        """
        self._ranks.check()

    def failure(self, error: BaseException) -> AquiferError:
        """What to raise for an error in something that all ranks do."""
        return self._ranks.failure(error)

    def open(self, config: EngineConfig, pool: PagePool) -> None:
        """Open a pool on each other rank that has room for all pages of rank 0's.

        Raises:
            ConfigError: a device has not so much memory.
            DriverError: a device refused it.
            GroupError: a rank is gone.
        """
        self._is_open = True
        self.ask(OpenPool(config, self._whole_planner, pool.size))

    def take_swap_memory(self) -> None:
        """Have each other rank take host memory for preempted KV, as rank 0 begins to do."""
        self.send(TakeSwapMemory())

    def note(self, op: RankOp) -> None:
        """Send something with the next message."""
        with self._noting:
            self._noted.append(op)

    def send(self, op: RankOp) -> None:
        """Send something now, after all that was noted.

        Raises:
            GroupError: a rank is gone.
        """
        with self._noting:
            ops, self._noted = (*self._noted, op), []
            self._ranks.send(ops)

    def ask(self, op: RankOp) -> None:
        """Send something, and wait until it is done.

        Raises:
            ConfigError: it cannot be done on one of the ranks.
            DriverError: a device refused.
            GroupError: a rank is gone.
        """
        self.send(op)
        self.wait()

    def wait(self, *, for_filled: bool = False) -> None:
        """Wait for the answers to what was sent, or to `FillWeights`. Raises what `ask` does."""
        for answer in self._ranks.receive(lambda each: isinstance(each, Filled) == for_filled):
            match answer.error if isinstance(answer, Filled) else answer:
                case RankError(where, DriverError() as error):
                    raise DriverError(error.name, f"{error.explanation} ({where})")
                case RankError(where, error):
                    raise ConfigError(f"{where}: {error}")

    def model(self, name: str) -> LedModel:
        """The side of one model."""
        return LedModel(self, name)

    def close(self) -> None:
        """Have the other ranks give everything back, and end them if the group is the leader's."""
        try:
            if self._is_open and not self.is_lost:
                with suppress(GroupError):  # they are gone already
                    self.ask(ClosePool())
        finally:
            self._is_open = False
            if self._is_owner:
                self._ranks.close()


class LedModel:
    """What a leader tells the other ranks of one model.

    Args:
        leader: the leader.
        name: name of the model.
    """

    def __init__(self, leader: Leader, name: str) -> None:
        self._leader = leader
        self._name = name

    def register(
        self, spec: ModelSpec, cache: DeviceCache, max_seqs: int, num_slots: int, max_tokens: int
    ) -> None:
        """Register the model on the other ranks.

        Raises:
            ConfigError: a rank cannot use the checkpoint.
            GroupError: a rank is gone.
        """
        shape = cache.shape
        self._leader.ask(RegisterModel(spec, shape, max_seqs, num_slots, max_tokens))

    def note_weights(self, op: WeightOp) -> None:
        """Pages of weights have changed."""
        self._leader.note(WeightsChanged(self._name, op))

    def note_kv(self, op: KVOp) -> None:
        """Something happened to the KV cache."""
        self._leader.note(KVChanged(self._name, op))

    def fill(self, groups: Sequence[int]) -> Callable[[], None]:
        """Have the other ranks load the contents of groups of weights.

        Returns: waits until they have; raises what `Leader.ask` does.
        """
        self._leader.send(FillWeights(self._name, tuple(groups)))
        return partial(self._leader.wait, for_filled=True)

    def runner(
        self,
        model: Model,
        kv: DeviceCache,
        driver: Driver,
        max_seqs: int,
        num_slots: int,
        max_tokens: int,
    ) -> Runner:
        """A runner of the model on all ranks; see `Runner`."""
        self._leader.send(BuildModel(self._name))
        return _LeadingRunner(
            self._leader, self._name, model, kv, driver, max_seqs, num_slots, max_tokens
        )

    def remove(self) -> None:
        """Remove the model on the other ranks."""
        if not self._leader.is_lost:
            with suppress(GroupError):  # they are gone already
                self._leader.send(RemoveModel(self._name))


class _LeadingRunner(Runner):
    """Runs the steps of a model on all ranks of a group.

    A step that fails on one rank leaves the others waiting for it. So an error of a step is one of
    the group.
    """

    def __init__(
        self,
        leader: Leader,
        name: str,
        model: Model,
        kv: DeviceCache,
        driver: Driver,
        max_seqs: int,
        num_slots: int,
        max_tokens: int,
    ) -> None:
        super().__init__(model, kv, driver, max_seqs, num_slots, max_tokens, leader.collectives)
        self._leader = leader
        self._name = name

    def warm_up(
        self,
        warm_up: WarmUp,
        num_tokens: int,
        on_stage: OnStage,
        *,
        has_kv: bool,
        captures: bool,
    ) -> float:
        """See `Runner.warm_up`."""
        self._leader.send(WarmUpModel(self._name, num_tokens, has_kv, captures))
        try:
            return super().warm_up(warm_up, num_tokens, on_stage, has_kv=has_kv, captures=captures)
        except Exception as error:
            raise self._leader.failure(error) from error

    def launch(self, step: StepInput) -> InFlight:
        """See `Runner.launch`."""
        self._leader.send(LaunchStep(step, torch.get_num_threads()))
        try:
            return super().launch(step)
        except Exception as error:
            raise self._leader.failure(error) from error
