"""Models of a replay whose weights come and go, as in the engine; only the time is modelled.

What decides is the engine's: `ModelSet` tells which model is loaded and which one gives way,
`ModelLife` has the states, `WeightStore` the pages, and `IdleWeights` the part in the eviction
rule. A load takes its bytes over the bandwidth, on the clock of the replay, while other models run.
They are not slowed down by it, and it shares the link with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.model_life import ModelLife
from aquifer.engine.model_set import ModelSet
from aquifer.engine.pooled_weights import Life, PooledWeights
from aquifer.engine.reports import LoadProgress, ModelInfo, ModelState
from aquifer.sim.baselines.evictions import VICTIMS, recent_use
from aquifer.sim.baselines.split import WeightShare
from aquifer.sim.clock import Clock
from aquifer.sim.config import LoadingConfig
from aquifer.sim.device import ModelShape
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.results import LoadRecord
from aquifer.sim.trace import ID_LIMIT
from aquifer.weights.host_cache import HostCache
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.store import check_fits


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

    Attributes:
        filled_s: when the load that is under way ends; None if there is none.
        loads: all loads so far.
    """

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
    ) -> None:
        self._clock = clock
        self._loading = loading
        self._share = share
        self._used_s = used_s
        self.filled_s: float | None = None
        self.loads: list[LoadRecord] = []
        reclaimer = assembly.room.reclaimer if share is None else share.reclaimer
        victims = VICTIMS[loading.eviction]
        super().__init__(assembly, reclaimer, reuse, name, _parameters(shape), life, victims)
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
        now_s = self._clock.now_s
        num_bytes = self._missing_bytes
        seconds = self._loading.start_s + sum(
            self.member.bytes_of(group) * self._byte_s(group) for group in self._to_fill
        )
        self.filled_s = now_s + seconds
        self.loads.append(LoadRecord(self._name, now_s, seconds, num_bytes, self.num_bytes))

    @property
    def _missing_bytes(self) -> int:
        """Bytes of the load that is under way."""
        return sum(map(self.member.bytes_of, self._to_fill))

    def _byte_s(self, group: ParameterGroup) -> float:
        bytes_per_s = self._loading.bytes_per_s
        if self._loading.disk_bytes_per_s is not None and not self.loads:
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
        share: see `TimedWeights`.

    Raises:
        ConfigError: its weights do not fit the pool.
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
        share: WeightShare | None = None,
    ) -> None:
        super().__init__(assembly)
        check_fits(assembly.pool, spec.name, _parameters(shape))
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
    def loads(self) -> list[LoadRecord]:
        """All loads so far."""
        return self._weights.loads

    def close(self) -> None:
        """Release everything. Pre-condition: it has no requests."""
        self.state = ModelState.REMOVED
        self._resources.close()

    def _make_ready(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Nothing is made: steps are counted and not run."""


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


@dataclass(frozen=True, slots=True)
class ReplayedModels:
    """All models of a device, as the loop of the replay sees them."""

    set: ModelSet[ReplayedModel]
    loading: LoadingConfig

    @classmethod
    def open(
        cls,
        assembly: Assembly,
        clock: Clock,
        loading: LoadingConfig,
        models: list[tuple[LaneSpec, ModelShape]],
        resources: ExitStack,
        driver: ModelledDriver,
    ) -> ReplayedModels:
        """Register models; none is loaded.

        Args:
            assembly: pool and scheduler.
            clock: the time.
            loading: how weights come and go.
            models: their lanes and sizes.
            resources: the stack that closes them.
            driver: of the device.

        Raises:
            ConfigError: a model does not fit.
        """
        reuse = ReuseStore(HostCache(0, driver.device), Path())
        share: WeightShare | None = None
        models_of_device: ModelSet[ReplayedModel]
        if loading.weight_share is None:
            models_of_device = ModelSet(assembly, reuse)
        else:
            share = WeightShare.of(assembly, loading.weight_share, driver)
            models_of_device = SplitSet(assembly, reuse, share)
        resources.callback(models_of_device.close)
        kind = ExclusiveModel if loading.is_exclusive else ReplayedModel
        for spec, shape in models:
            host = models_of_device.register(
                spec.name,
                lambda spec=spec, shape=shape: kind(  # type: ignore[misc]
                    assembly, reuse, clock, spec, shape, loading, share
                ),
            )
            if isinstance(host, ExclusiveModel):
                host.others = models_of_device
        return cls(models_of_device, loading)

    @property
    def filled_s(self) -> float | None:
        """When the load that is under way ends; None if there is none."""
        return next((host.filled_s for host in self.set if host.filled_s is not None), None)

    @property
    def states(self) -> list[ModelState]:
        """The state of each model."""
        return [host.state for host in self.set]

    def expire(self, now_s: float) -> None:
        """Evict the weights of models that have been idle for longer than they are kept alive."""
        keep_alive_s = self.loading.keep_alive_s
        if keep_alive_s is None:
            return
        for host in self.set:
            is_unused = host.state == ModelState.RESIDENT and not host.lane.has_work
            if is_unused and now_s - host.used_s >= keep_alive_s:
                host.unload()


def _parameters(shape: ModelShape) -> list[Parameter]:
    """The parameters of a shape. They are filled by nothing."""
    dtype = shape.kv_layout.dtype
    return [
        Parameter(str(number), (num_bytes // dtype.itemsize,), dtype, ())
        for number, num_bytes in enumerate(shape.tensor_bytes)
    ]
