"""Assembly of pool, cache managers, lanes and scheduler.

The engine, the replay, the benchmarks and the tests all use it; they differ in the device, the
clock and the policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from aquifer.cache.base import CacheFactory, KVLayout, StateLayout
from aquifer.cache.journal import KVOp
from aquifer.cache.prefix import PrefixCache
from aquifer.cache.swap import SwapSpace
from aquifer.engine.costs import PrefillCost
from aquifer.engine.lane import Lane
from aquifer.engine.lane_lengths import learns
from aquifer.engine.planning import StepBudget
from aquifer.engine.policies import (
    Policies,
    RestoreMode,
    first_with_region,
    latest_of_busiest,
    least_served,
    longest_left,
)
from aquifer.engine.preemption import Preemption
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.slots import SlotTable
from aquifer.errors import ConfigError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.room import Room
from aquifer.memory_options import PREDICTION_USES
from aquifer.predict.forecaster import Forecaster

_ENOUGH_S = 0.01
"""Work for the device with which a step is launched rather than to let it idle while the host takes
in more requests, of which each may take milliseconds: these run in the next step, which the host
launches meanwhile."""

_BESIDE_S = 0.025
"""Prompts of a step beside sequences that outlast them (`StepBudget`). Of an 8B model a GPU reads
1024 tokens meanwhile, at a rate 2 to 5 % lower than in steps of 8192, and of a small one as many as
a step has."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A model as the scheduler and the cache managers see it.

    Args:
        name: name of the model.
        kv_layout: layout of one token's KV.
        max_seqs: sequences that run at once.
        max_tokens: length of the longest sequence.
        cache: factory of the cache manager.
        keeps_prefixes: whether KV is retained for later requests, if the manager can share.
        recompute_s: seconds to compute a stretch of KV, given its first position and its length.
        most_new: the most new tokens that a step brings to a sequence.
        num_spare_slots: slots beyond `max_seqs`, so that the cache has a choice for a sequence.
        keeps_journal: whether steps carry what happens to the KV cache's memory, for a runner in
            another process.
        on_kv_op: called with each thing that happens to the KV cache's memory, in place of that.
        kv_limits: see `ModelPlan.kv_limits`.
        state_layout: layout of one sequence's recurrent state; None if no layer has any.
        forecaster: forecasts the lengths of outputs; None if they are not predicted.
    """

    name: str
    kv_layout: KVLayout
    max_seqs: int
    max_tokens: int
    cache: CacheFactory
    keeps_prefixes: bool = False
    recompute_s: Callable[[float, float], float] = PrefillCost().seconds
    most_new: int = 1
    num_spare_slots: int = 0
    keeps_journal: bool = False
    on_kv_op: Callable[[KVOp], None] | None = None
    kv_limits: tuple[int, ...] = ()
    state_layout: StateLayout | None = None
    forecaster: Forecaster | None = None


class Assembly:
    """One pool with the scheduler of all models that share it.

    Args:
        pool: the memory; closed by the caller, after this.
        max_batched_tokens: tokens of one step.
        swap_space: host memory for the KV of preempted requests; None for no swapping.
        restore_mode: how the KV of preempted requests comes back.
        clock_s: tells the time in seconds.
        policies: the scheduler's decisions.
        express_share: the most of the time that express steps may take, from 0 to 1.
        max_prefill_s: time limit of the prompts in a step in which sequences decode; None for none.
        prediction_uses: what forecasts of lengths are used for, where there are any.
        groups_by_bucket: whether requests are admitted first whose bucket has a free region.

    Attributes:
        pool: as given.
        clock_s: as given.
        room: free memory, and memory that tenants could give up.
        policies: as given, or the defaults.
        preemption: moves the KV of preempted requests; None without swapping.
        scheduler: scheduler of all lanes.
    """

    def __init__(
        self,
        pool: PagePool,
        max_batched_tokens: int,
        *,
        swap_space: SwapSpace | None = None,
        restore_mode: RestoreMode = "auto",
        clock_s: Callable[[], float] = time.monotonic,
        policies: Policies | None = None,
        express_share: float = 0.0,
        max_prefill_s: float | None = None,
        prediction_uses: Collection[str] = PREDICTION_USES,
        groups_by_bucket: bool = False,
    ) -> None:
        self.pool = pool
        self.clock_s = clock_s
        self.policies = policies or Policies(
            admission=first_with_region if groups_by_bucket else least_served,
            victims=longest_left if "victims" in prediction_uses else latest_of_busiest,
        )
        self.room = Room.of(pool, clock_s)
        self.preemption = None if swap_space is None else Preemption(swap_space, restore_mode)
        self.scheduler = Scheduler(
            self.room,
            StepBudget(
                max_batched_tokens,
                max_prefill_s,
                _BESIDE_S if pool.driver.runs_ahead else None,
                _ENOUGH_S if pool.driver.runs_ahead else None,
            ),
            self.preemption,
            clock_s,
            self.policies,
            express_share,
            plans_by_forecasts="admission" in prediction_uses,
        )
        self._tells_caches = "cache" in prediction_uses
        self._shares_lengths = False

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes of KV to the host or back; 0 if none is ever copied."""
        return 0.0 if self.preemption is None else self.preemption.copy_s(num_bytes)

    def open_lane(self, spec: LaneSpec) -> Lane:
        """Begin to schedule a model.

        Raises:
            DriverError: the device has no addresses for its KV.
            ConfigError: its sequences are too many or too long to keep track of them.
        """
        try:
            table = SlotTable(
                spec.max_seqs, spec.max_tokens, spec.most_new, spec.num_spare_slots, spec.kv_limits
            )
        except MemoryError as error:
            raise ConfigError(
                f"this machine has no memory for the token ids of {spec.max_seqs} sequences of "
                f"{spec.max_tokens} tokens; give a lower --max-model-len or --max-num-seqs"
            ) from error
        cache = spec.cache(
            self.pool,
            Owner(spec.name, Kind.KV),
            spec.kv_layout,
            spec.max_seqs + spec.num_spare_slots,
            spec.max_tokens,
            spec.state_layout,
        )
        lane = Lane(
            spec.name,
            cache,
            table,
            recompute_s=spec.recompute_s,
            forecaster=spec.forecaster,
            tells_cache=self._tells_caches,
        )
        if spec.on_kv_op is not None:
            cache.tensors.record(spec.on_kv_op)
        elif spec.keeps_journal:
            cache.tensors.record()
            lane.keeps_journal = True
        if spec.keeps_prefixes and cache.can_share:
            owner = Owner(spec.name, Kind.PREFIX)
            retained_bytes = None
            if lane.has_windows:
                cache.keep_checkpoints()
                retained_bytes = partial(self.pool.owned_bytes, owner)
            lane.prefixes = PrefixCache(
                cache,
                spec.recompute_s,
                parts=cache.parts,
                retained_bytes=retained_bytes,
                losses=self.room.reclaimer.log.losses_of(owner),
            )
            self.room.reclaimer.register(lane.prefixes)
        if self._shares_lengths and learns(lane):
            lane.ended = []
        self.scheduler.add_lane(lane)
        return lane

    def share_lengths(self) -> None:
        """From now on, lanes keep the outputs that have ended, to learn from them with others."""
        self._shares_lengths = True
        for lane in self.scheduler.lanes.values():
            if learns(lane):
                lane.ended = []

    def close_lane(self, lane: Lane) -> None:
        """Schedule a model no longer, and give its pages and addresses back.

        Pre-condition: none of its requests waits or runs, and no step of it is in flight.
        """
        self.scheduler.remove_lane(lane.name)
        if lane.prefixes is not None:
            self.room.reclaimer.unregister(lane.prefixes)
            lane.prefixes.close()
        lane.cache.close()
        if lane.forecaster is not None:
            lane.forecaster.close()
