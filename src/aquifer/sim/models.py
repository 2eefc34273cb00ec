"""Models of a replay whose weights come and go, as in the engine; only the time is modelled.

What decides is the engine's: `ModelSet` tells which model is loaded and which one gives way,
`ModelLife` has the states, `WeightStore` the pages, and `IdleWeights` the part in the eviction
rule. A load takes its bytes over the bandwidth, on the clock of the replay, while other models run.
They are not slowed down by it, and it shares the link with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.model_life import ModelLife
from aquifer.engine.model_set import ModelSet
from aquifer.engine.pooled_weights import Life, PooledWeights
from aquifer.engine.reports import LoadProgress, ModelInfo, ModelState
from aquifer.memory.use_rate import UseRate
from aquifer.sim.baselines.evictions import VICTIMS, recent_use
from aquifer.sim.baselines.split import WeightShare
from aquifer.sim.clock import Clock
from aquifer.sim.config import LoadingConfig
from aquifer.sim.device import ModelShape, distinct
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.results import LoadRecord
from aquifer.sim.trace import ID_LIMIT
from aquifer.weights.host_cache import HostCache
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.store import check_fits

_MANY = 32
"""More models than these are opened when they are asked for, and closed when they have nothing."""


@dataclass(frozen=True, slots=True)
class ModelPast:
    """What a replay knows of a model on a device, be it open or not.

    Attributes:
        uses: the requests for it, since the start of the replay.
        loads: all loads so far.
    """

    uses: UseRate = field(default_factory=lambda: UseRate(0.0))
    loads: list[LoadRecord] = field(default_factory=list)


class TimedWeights(PooledWeights):
    """The weights of one model: real pages, and loads that take time on the clock alone.

    Args:
        assembly: pool and reclaimer.
        reuse: the weights of all models.
        clock: the time; it goes on where a load is waited for.
        name: of the model.
        shape: its sizes.
        loading: how a load takes time.
        share: a fixed part of the pool that all weights have; None if the pool is shared.
        life: the model's.
        used_s: tells when the model was used last.
        past: of the model.

    Attributes:
        filled_s: when the load that is under way ends; None if there is none.
    """

    costs_version = None  # they change with a load, and so does the store

    def __init__(
        self,
        assembly: Assembly,
        reuse: ReuseStore,
        clock: Clock,
        name: str,
        shape: ModelShape,
        loading: LoadingConfig,
        share: WeightShare | None,
        life: Life,
        used_s: Callable[[], float],
        past: ModelPast,
    ) -> None:
        self._clock = clock
        self._loading = loading
        self._share = share
        self._used_s = used_s
        self._past = past
        self.filled_s: float | None = None
        of = (assembly.room if share is None else share).reclaimer, reuse, name, _parameters(shape)
        super().__init__(assembly, *of, life, VICTIMS[loading.eviction])
        self.uses = past.uses
        if share is not None:
            share.stores.append(self._store)

    def probability(self, now_s: float) -> float:
        """See `PooledWeights`."""
        if self._loading.eviction == "lru" and not self._life.is_wanted():
            return recent_use(now_s - self._used_s())
        return super().probability(now_s)

    def on_evict(self) -> None:
        """See `PooledWeights`."""
        self._settle()
        super().on_evict()

    @property
    def missing_s(self) -> float:
        """Seconds to load those that are not in the pool, with the start of a process if any."""
        seconds = super().missing_s
        return self._loading.start_s + seconds if seconds else 0.0

    def take_pages(self) -> bool:
        """See `PooledWeights`."""
        missing_bytes = self.num_bytes - self.resident_bytes
        if self._share is not None and not self._share.make_room(missing_bytes, self._store.owner):
            return False
        if not super().take_pages():
            self._settle()
            return False
        return True

    def fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Wait for the load of the pages that were taken."""
        self._begin()
        self.finish_filling()
        on_progress(LoadProgress(self._name, self._missing_bytes, self._missing_bytes))

    def begin_filling(self, threads: Executor) -> None:
        """Begin to load the contents of the pages that were taken; `threads` have nothing to do."""
        self._begin()

    def is_filled_within(self, timeout_s: float | None) -> bool:
        """Whether the load has ended; with None it is waited for.

        With a time the answer is that of now: the replay advances its clock by itself.
        """
        assert self.filled_s is not None
        if timeout_s is None:
            self._clock.now_s = max(self._clock.now_s, self.filled_s)
        return self._clock.now_s >= self.filled_s

    def finish_filling(self) -> None:
        """Wait until all are in the pool. Pre-condition: a load is under way."""
        self.is_filled_within(None)
        self.filled_s = None
        self._filled()

    def evict(self, keep_bytes: int = 0) -> None:
        """See `PooledWeights`."""
        self.filled_s = None
        super().evict(keep_bytes)
        self._settle()

    def close(self) -> None:
        """Give pages and addresses back."""
        super().close()
        if self._share is not None:
            self._share.stores.remove(self._store)

    def _begin(self) -> None:
        now_s, num_bytes = self._clock.now_s, self._missing_bytes
        seconds = self._loading.start_s + sum(
            self.member.bytes_of(group) * self._byte_s(group) for group in self._to_fill
        )
        self.filled_s = now_s + seconds
        self._past.loads.append(LoadRecord(self._name, now_s, seconds, num_bytes, self.num_bytes))

    @property
    def _missing_bytes(self) -> int:
        """Bytes of the load that is under way."""
        return sum(map(self.member.bytes_of, self._to_fill))

    def _byte_s(self, group: ParameterGroup) -> float:
        bytes_per_s = self._loading.bytes_per_s
        if self._loading.disk_bytes_per_s is not None and not self._past.loads:
            bytes_per_s = min(bytes_per_s, self._loading.disk_bytes_per_s)
        return 1 / bytes_per_s

    def _settle(self) -> None:
        if self._share is not None:
            self._share.settle()


class ReplayedModel(ModelLife):
    """One model of a replay, and the owner of its resources.

    Args:
        assembly: pool and scheduler.
        reuse: the weights of all models.
        clock: the time.
        spec: its requests.
        shape: its sizes.
        loading: how its weights come and go.
        past: of the model.
        share: see `TimedWeights`.
    """

    _weights: TimedWeights

    def __init__(
        self,
        assembly: Assembly,
        reuse: ReuseStore,
        clock: Clock,
        spec: LaneSpec,
        shape: ModelShape,
        loading: LoadingConfig,
        past: ModelPast,
        share: WeightShare | None = None,
    ) -> None:
        super().__init__(assembly)
        with ExitStack() as resources:
            self._weights = TimedWeights(
                assembly,
                reuse,
                clock,
                spec.name,
                shape,
                loading,
                share,
                self.weights_life(),
                lambda: self.used_s,
                past,
            )
            resources.callback(self._weights.close)
            self.lane = assembly.open_lane(spec)
            self.lane.is_resident = False
            resources.callback(assembly.close_lane, self.lane)
            self._resources = resources.pop_all()
        self.info = ModelInfo(
            name=spec.name,
            path="",
            architecture=shape.name,
            dtype=str(spec.kv_layout.dtype).removeprefix("torch."),
            max_model_len=spec.max_tokens,
            vocab_size=ID_LIMIT,
            num_parameters=shape.weight_bytes // spec.kv_layout.dtype.itemsize,
            weight_bytes=self._weights.num_bytes,
            kv_bytes_per_token=spec.kv_layout.token_bytes,
        )

    @property
    def filled_s(self) -> float | None:
        """When the load that is under way ends; None if there is none."""
        return self._weights.filled_s

    @property
    def is_empty(self) -> bool:
        """Whether it has no weights, no requests and nothing else that a later request may use."""
        lane = self.lane
        keeps = lane.prefixes is not None or lane.forecaster is not None
        return self.state == ModelState.REGISTERED and not (keeps or lane.has_work)

    def close(self) -> None:
        """Release everything. Pre-condition: it has no requests."""
        self.state = ModelState.REMOVED
        self._resources.close()

    def _make_ready(self, on_progress: Callable[[LoadProgress], None]) -> bool:
        """Nothing is made: steps are counted and not run."""
        return False


class ExclusiveModel(ReplayedModel):
    """A model that has the device for itself while it is loaded, and is evicted as a whole.

    This is how ServerlessLLM and SLLM-CM share a device (Tangram, sections 2.1 and 5.1).

    Attributes:
        others: all models of the device.
    """

    others: ModelSet[ReplayedModel]

    def begin_loading(self, threads: Executor) -> bool:
        """See `ModelLife`. All weights of others go; False while requests of another one run."""
        others = [other for other in self.others if other is not self]
        if any(other.lane.is_resident and other.lane.has_work for other in others):
            return False
        for other in others:
            other.unload()
        return super().begin_loading(threads)


class SplitSet(ModelSet[ReplayedModel]):
    """Models whose weights have a fixed part of the pool, and KV and prefixes the rest.

    Args:
        assembly: pool and scheduler.
        reuse: the weights of all models.
        share: the part of the weights.
    """

    def __init__(self, assembly: Assembly, reuse: ReuseStore, share: WeightShare) -> None:
        super().__init__(assembly, reuse)
        self._share = share

    def _has_room(self, host: ReplayedModel, kv_pages: int = 0) -> bool:
        busy_bytes = sum(
            other.resident_bytes
            for other in self
            if other is not host and not other.weights.is_idle
        )
        fits = busy_bytes + host.info.weight_bytes <= self._share.num_bytes
        return fits and self._room.has(kv_pages)

    def _kv_pages_beside(self, weight_bytes: int) -> int:
        if weight_bytes > self._share.num_bytes:
            return 0
        return self._room.budget_pages(self._share.num_bytes + self.pinned_bytes)


class ReplayedModels:
    """All models of a device, as the loop of the replay sees them.

    An open model has addresses and a queue, and no memory at first. A few models are all open from
    the start, in the order given, which decides between equals. Of many, one is opened when a
    request asks for it, and those that have neither weights in the pool nor requests are closed
    again, so that time and memory do not grow with the number of models.

    Args:
        assembly: pool and scheduler.
        clock: the time.
        loading: how weights come and go.
        shapes: sizes of the models, by name.
        spec: makes the lane of a model.
        resources: the stack that closes them.
        driver: of the device.

    Attributes:
        set: the models that are open.
        loading: as given.

    Raises:
        ConfigError: a model does not fit.
    """

    def __init__(
        self,
        assembly: Assembly,
        clock: Clock,
        loading: LoadingConfig,
        shapes: Mapping[str, ModelShape],
        spec: Callable[[str], LaneSpec],
        resources: ExitStack,
        driver: ModelledDriver,
    ) -> None:
        for name, shape in distinct(shapes).items():
            check_fits(assembly.pool, name, _parameters(shape))
        self._assembly = assembly
        self._clock = clock
        self.loading = loading
        self._shapes = shapes
        self._spec = spec
        self._reuse = ReuseStore(HostCache(0, driver.device), Path())
        self._share: WeightShare | None = None
        self._pasts: dict[str, ModelPast] = {}
        self.set: ModelSet[ReplayedModel]
        if loading.weight_share is None:
            self.set = ModelSet(assembly, self._reuse)
        else:
            self._share = WeightShare.of(assembly, loading.weight_share, driver)
            self.set = SplitSet(assembly, self._reuse, self._share)
        resources.callback(self.set.close)
        if len(shapes) <= _MANY:
            for name in shapes:
                self.open(name)

    def open(self, name: str) -> ReplayedModel:
        """Open a model that is not open; none of it is loaded."""
        kind = ExclusiveModel if self.loading.is_exclusive else ReplayedModel
        host = self.set.register(
            name,
            lambda: kind(
                self._assembly,
                self._reuse,
                self._clock,
                self._spec(name),
                self._shapes[name],
                self.loading,
                self._pasts.setdefault(name, ModelPast()),
                self._share,
            ),
        )
        if isinstance(host, ExclusiveModel):
            host.others = self.set
        return host

    def close_empty(self) -> list[Lane]:
        """Close models that have nothing, if many are open; return their lanes."""
        hosts = list(self.set)
        if len(hosts) < _MANY:
            return []
        empty = [host for host in hosts if host.is_empty]
        for host in empty:
            self.set.remove(host)
        return [host.lane for host in empty]

    @property
    def loads(self) -> list[LoadRecord]:
        """Loads of all models so far, in order of time."""
        loads = [load for past in self._pasts.values() for load in past.loads]
        return sorted(loads, key=lambda load: load.begun_s)

    @property
    def filled_s(self) -> float | None:
        """When the load that is under way ends; None if there is none."""
        return next((host.filled_s for host in self.set if host.filled_s is not None), None)

    @property
    def states(self) -> list[ModelState]:
        """The state of each model."""
        return [host.state for host in self.set]

    def expire(self, now_s: float) -> None:
        """Evict the weights of models that have been idle for as long as they are kept alive."""
        for expiry_s, host in self._expiries():
            if now_s >= expiry_s:
                host.unload()

    @property
    def expiry_s(self) -> float:
        """When `expire` has something to do, if no request arrives."""
        return min((expiry_s for expiry_s, _ in self._expiries()), default=math.inf)

    def _expiries(self) -> list[tuple[float, ReplayedModel]]:
        """Until when each model without requests is kept alive."""
        kept_s = self.loading.keep_alive_s
        if kept_s is None:
            return []
        idle = [h for h in self.set if h.state == ModelState.RESIDENT and not h.lane.has_work]
        return [(host.used_s + kept_s, host) for host in idle]


@lru_cache
def _parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """The parameters of a shape. They are filled by nothing."""
    dtype = shape.kv_layout.dtype
    return tuple(
        Parameter(str(number), (num_bytes // dtype.itemsize,), dtype, ())
        for number, num_bytes in enumerate(shape.tensor_bytes)
    )
