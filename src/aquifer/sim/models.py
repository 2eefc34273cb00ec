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

from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.model_life import ModelLife
from aquifer.engine.model_set import ModelSet
from aquifer.engine.reports import LoadProgress, ModelInfo, ModelState
from aquifer.memory.pool import Kind, Owner
from aquifer.sim.baselines.evictions import victims_of
from aquifer.sim.baselines.split import WeightShare
from aquifer.sim.clock import Clock
from aquifer.sim.config import LoadingConfig
from aquifer.sim.device import ModelShape
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.results import LoadRecord
from aquifer.sim.trace import ID_LIMIT
from aquifer.weights.store import Parameter, WeightStore, check_fits


class TimedWeights:
    """The weights of one model: real pages, and loads that take time on the clock alone.

    Args:
        assembly: pool and reclaimer.
        clock: the time; it goes on where a load is waited for.
        name: of the model.
        shape: its sizes.
        loading: how long a load takes.
        share: a fixed part of the pool that all weights have; None if the pool is shared.
        is_idle: tells whether they may be evicted.
        is_wanted: tells whether requests wait for them.
        on_evict: called when some of them have been evicted.

    Attributes:
        victims: their part in the eviction rule.
        filled_s: when the load that is under way ends; None if there is none.
        loads: all loads so far.
    """

    def __init__(
        self,
        assembly: Assembly,
        clock: Clock,
        name: str,
        shape: ModelShape,
        loading: LoadingConfig,
        share: WeightShare | None,
        *,
        is_idle: Callable[[], bool],
        is_wanted: Callable[[], bool],
        on_evict: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._name = name
        self._loading = loading
        self._share = share
        self._store = WeightStore(assembly.pool, Owner(name, Kind.WEIGHTS), _parameters(shape))
        self._missing_bytes = 0  # of the load that is under way
        self.filled_s: float | None = None
        self.loads: list[LoadRecord] = []

        def evicted() -> None:
            self._settle()
            on_evict()

        self.victims = victims_of(
            loading.eviction, self._store, self._read_s, is_idle, is_wanted, evicted, name
        )
        self._reclaimer = assembly.room.reclaimer if share is None else share.reclaimer
        self._reclaimer.register(self.victims)
        if share is not None:
            share.stores.append(self._store)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages of all weights."""
        return self._store.placement.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages of those that are in the pool."""
        return self._store.resident_bytes

    @property
    def missing_pages(self) -> int:
        """Number of pages of those that are not in the pool."""
        return self._store.missing_pages

    @property
    def missing_s(self) -> float:
        """Seconds to load those that are not in the pool, with the start of a process if any."""
        missing_bytes = self.num_bytes - self.resident_bytes
        return self._loading.start_s + self._read_s(missing_bytes) if missing_bytes else 0.0

    def take_pages(self) -> bool:
        """Take pages for those that are not in the pool; False if it has no room for them."""
        before_bytes = self._store.resident_bytes
        missing_bytes = self.num_bytes - before_bytes
        if self._share is not None and not self._share.make_room(missing_bytes):
            return False
        if not self._store.populate(self._store.missing):
            self._settle()
            return False
        self._missing_bytes = self._store.resident_bytes - before_bytes
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

    def evict(self) -> None:
        """Evict all of them."""
        self.filled_s = None
        self._store.evict()
        self._settle()

    def close(self) -> None:
        """Give pages and addresses back."""
        self.evict()
        self._reclaimer.unregister(self.victims)
        if self._share is not None:
            self._share.stores.remove(self._store)
        self._store.close()

    def _begin(self) -> None:
        now_s = self._clock.now_s
        seconds = self._loading.start_s + self._read_s(self._missing_bytes)
        self.filled_s = now_s + seconds
        self.loads.append(
            LoadRecord(self._name, now_s, seconds, self._missing_bytes, self.num_bytes)
        )

    def _read_s(self, num_bytes: int) -> float:
        """Seconds to read so many bytes of them."""
        bytes_per_s = self._loading.bytes_per_s
        if self._loading.disk_bytes_per_s is not None and not self.loads:
            bytes_per_s = min(bytes_per_s, self._loading.disk_bytes_per_s)
        return num_bytes / bytes_per_s

    def _settle(self) -> None:
        if self._share is not None:
            self._share.settle()


class ReplayedModel(ModelLife):
    """One model of a replay, and the owner of its resources.

    Args:
        assembly: pool and scheduler.
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
                clock,
                spec.name,
                shape,
                loading,
                share,
                is_idle=lambda: self.is_idle,
                is_wanted=lambda: bool(self.lane.waiting),
                on_evict=self._on_evict,
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

    @property
    def used_s(self) -> float:
        """When it was loaded, or a request of it arrived or ran last."""
        return self._weights.victims.last_used_s

    @used_s.setter
    def used_s(self, at_s: float) -> None:
        self._weights.victims.last_used_s = at_s

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
        share: the part of the weights.
    """

    def __init__(self, assembly: Assembly, share: WeightShare) -> None:
        super().__init__(assembly)
        self._share = share

    def _has_room(self, host: ReplayedModel, kv_pages: int = 0) -> bool:
        busy_bytes = sum(
            other.resident_bytes for other in self if other is not host and not other.is_idle
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
        share: WeightShare | None = None
        models_of_device: ModelSet[ReplayedModel]
        if loading.weight_share is None:
            models_of_device = ModelSet(assembly)
        else:
            share = WeightShare.of(assembly, loading.weight_share, driver)
            models_of_device = SplitSet(assembly, share)
        resources.callback(models_of_device.close)
        kind = ExclusiveModel if loading.is_exclusive else ReplayedModel
        for spec, shape in models:
            host = models_of_device.register(
                spec.name,
                lambda spec=spec, shape=shape: kind(  # type: ignore[misc]
                    assembly, clock, spec, shape, loading, share
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
