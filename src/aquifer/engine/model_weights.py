"""The weights of one model: loaded into pages of the pool, in the background too, and evicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait

import torch

from aquifer.engine.reports import LoadProgress
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.store import Parameter, ParameterGroup, WeightStore
from aquifer.weights.victims import IdleWeights

_LOAD_BYTES_PER_S = 2e9
"""Speed of a model's first load, as long as it was not measured."""


class ModelWeights:
    """Keeps the weights of one model, and measures how fast they are loaded.

    Args:
        pool: where pages come from.
        reclaimer: evicts them while the model is idle.
        name: of the model.
        parameters: what is to be loaded.
        checkpoint: where it is.
        random_seed: seed of random numbers that take the place of the checkpoint's; None for none.
        is_idle: tells whether they are neither in use nor being loaded, and may be evicted.
        is_wanted: tells whether requests wait for them.
        on_evict: called when some of them have been evicted.

    Attributes:
        victims: their part in the eviction rule.

    Raises:
        DriverError: the device has no addresses left.
    """

    def __init__(
        self,
        pool: PagePool,
        reclaimer: Reclaimer,
        name: str,
        parameters: Sequence[Parameter],
        checkpoint: Checkpoint,
        random_seed: int | None,
        *,
        is_idle: Callable[[], bool],
        is_wanted: Callable[[], bool],
        on_evict: Callable[[], None],
    ) -> None:
        self._name = name
        self._checkpoint = checkpoint
        self._random_seed = random_seed
        self._reclaimer = reclaimer
        owner = Owner(name, Kind.WEIGHTS)
        self._store = WeightStore(pool, owner, parameters)
        self._losses = reclaimer.log.losses_of(owner)
        self._filling: Future[None] | None = None  # in the background
        # Of the load that is under way:
        self._to_fill: tuple[ParameterGroup, ...] = ()
        self._begun_s = 0.0
        self._missing_bytes = 0
        self._bytes_per_s = _LOAD_BYTES_PER_S
        self.victims = IdleWeights(
            self._store, self.load_s, is_idle, is_wanted, on_evict, losses=self._losses
        )
        reclaimer.register(self.victims)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name, to be used only while all are resident."""
        return self._store.tensors

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
        """Seconds to load those that are not in the pool, as fast as the last time."""
        return self.load_s(self.num_bytes - self.resident_bytes)

    def load_s(self, num_bytes: int) -> float:
        """Seconds to load so many bytes of them, as fast as the last time."""
        return num_bytes / self._bytes_per_s

    def take_pages(self) -> bool:
        """Take pages for those that are not in the pool; False if it has no room for them.

        They are then to be filled, or to be evicted.

        Raises:
            DriverError: the device refused memory; nothing has changed.
        """
        missing = self._store.missing
        before_bytes = self._store.resident_bytes
        begun_s = time.monotonic()
        if not self._store.populate(missing):
            return False
        self._to_fill, self._begun_s = missing, begun_s
        self._missing_bytes = self._store.resident_bytes - before_bytes
        return True

    def fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the contents of the pages that were taken.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        self._fill(on_progress)
        self._measure()

    def begin_filling(self, threads: Executor) -> None:
        """Begin to load the contents of the pages that were taken.

        Args:
            threads: where they are loaded; `finish_filling` ends it.
        """
        self._filling = threads.submit(self._fill, lambda progress: None)

    def is_filled_within(self, timeout_s: float | None) -> bool:
        """Wait for a time, None for any; return whether `finish_filling` would not wait."""
        assert self._filling is not None
        return bool(wait([self._filling], timeout_s).done)

    def finish_filling(self) -> None:
        """Wait until all are in the pool. Pre-condition: `begin_filling`.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        assert self._filling is not None
        filling, self._filling = self._filling, None
        filling.result()
        self._measure()

    def evict(self) -> None:
        """Evict all of them; whatever loads them is waited for."""
        if self._filling is not None:
            wait([self._filling])
            self._filling = None
        self._store.evict()
        self._losses.forget()

    def close(self) -> None:
        """Give pages and addresses back."""
        self.evict()
        self._reclaimer.unregister(self.victims)
        self._store.close()

    def _measure(self) -> None:
        """Learn how fast weights are loaded from the load that has ended, and log what it took."""
        if self._missing_bytes:
            seconds = max(time.monotonic() - self._begun_s, 1e-6)
            self._bytes_per_s = self._missing_bytes / seconds
            self.victims.restored(self._to_fill)

    def _fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Read the weights, or fill them with random numbers."""
        groups = self._to_fill
        parameters = self._store.parameters_of(groups)
        if self._random_seed is not None:
            self._store.fill_random(self._random_seed, groups)
            num_bytes = sum(parameter.num_bytes for parameter in parameters)
            on_progress(LoadProgress(self._name, num_bytes, num_bytes))
            return
        stored = self._checkpoint.tensors
        total_bytes = sum(
            stored[source.name].num_bytes
            for parameter in parameters
            for source in parameter.sources
            if source.name in stored
        )
        loaded_bytes = 0

        def advance(num_bytes: int) -> None:
            nonlocal loaded_bytes
            loaded_bytes += num_bytes
            on_progress(LoadProgress(self._name, loaded_bytes, total_bytes))

        self._store.load(self._checkpoint, advance, groups)
