"""The weights of one model in the pool: what is there, who has it too, and their eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from aquifer.engine.assembly import Assembly
from aquifer.engine.reports import LoadProgress
from aquifer.memory.pool import Kind, Owner
from aquifer.memory.reclaim import Reclaimer
from aquifer.memory.use_rate import UseRate
from aquifer.weights.fingerprint import GroupOrigin
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import Member, ReuseStore
from aquifer.weights.store import Filling, WeightStore
from aquifer.weights.victims import IdleWeights


class Life(NamedTuple):
    """What weights have to know of their model.

    Attributes:
        is_unused: tells whether they are neither in use nor being loaded.
        is_wanted: tells whether requests wait for them: then they are needed again for certain.
        on_evict: to be called when some of them have been evicted.
    """

    is_unused: Callable[[], bool]
    is_wanted: Callable[[], bool]
    on_evict: Callable[[], None]


class PooledWeights(ABC):
    """Weights of one model, in pages of the pool as far as they are there.

    `ModelWeights` fills the pages of an engine. A replay only counts the time.

    Args:
        assembly: pool and clock.
        reclaimer: evicts them while the model is idle.
        reuse: the weights of all models.
        name: of the model.
        parameters: what is to be loaded.
        life: the model's.
        victims: makes their part in the eviction rule.

    Attributes:
        uses: the requests for the model.
        sensitivity: weight of a second of its delay, compared with other models.
        load_s: seconds to load all of them, as it was when they were loaded last; 0 before.
        member: what of them other models have too.

    Raises:
        DriverError: the device has no addresses left.
    """

    def __init__(
        self,
        assembly: Assembly,
        reclaimer: Reclaimer,
        reuse: ReuseStore,
        name: str,
        parameters: Sequence[Parameter],
        life: Life,
        victims: Callable[..., IdleWeights] = IdleWeights,
    ) -> None:
        self._name = name
        self._clock_s = assembly.clock_s
        self._reclaimer = reclaimer
        self._reuse = reuse
        self._life = life
        self.uses = UseRate(self._clock_s())
        self.sensitivity = 1.0
        self._store = WeightStore(assembly.pool, Owner(name, Kind.WEIGHTS), parameters)
        self.load_s = 0.0
        self._to_fill: tuple[ParameterGroup, ...] = ()  # of the load that is under way
        self.member: Member = reuse.register(self._store, self, self._origins(), self._keys())
        self._losses = reclaimer.log.losses_of(self._store.owner)
        self.victims = victims(reuse, self.member, self._byte_s, self._losses)
        reclaimer.register(self.victims)

    def _origins(self) -> Mapping[ParameterGroup, GroupOrigin]:
        """How groups are made from a checkpoint."""
        return {}

    def _keys(self) -> Mapping[ParameterGroup, str]:
        """What groups are that are not made from one."""
        return {}

    # --- how they are used: a `WeightUse` -------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether they are neither in use nor being loaded or copied, and may be evicted."""
        return self._life.is_unused()

    def probability(self, now_s: float) -> float:
        """p(the model is needed again)."""
        return 1.0 if self._life.is_wanted() else self.uses.probability(now_s)

    def on_evict(self) -> None:
        """Some of them have been evicted."""
        self._life.on_evict()

    # --- what is there -------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages of all weights."""
        return self._store.placement.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages of those that are in the pool, shared ones included."""
        return self._store.resident_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the pages of those that are in pages of another model."""
        if not self._reuse.has_shared:
            return 0
        return sum(
            self.member.bytes_of(group)
            for group in self._store.resident
            if self._reuse.holders(self.member, group)[0] is not self.member
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of the pages of those that the host cache has."""
        has = self._reuse.host.has
        return sum(
            self.member.bytes_of(group) for group, key in self.member.keys.items() if has(key)
        )

    @property
    def missing_pages(self) -> int:
        """Number of pages that a load takes: of those that no model has in the pool."""
        return sum(group.num_pages for group in self._reuse.missing(self.member))

    @property
    def missing_s(self) -> float:
        """Seconds to load those that no model has in the pool."""
        missing = self._reuse.missing(self.member)
        return sum(self.member.bytes_of(group) * self._byte_s(group) for group in missing)

    @property
    def borrowed_s(self) -> float | None:
        """Seconds to load these if another device has them; None if that is not possible."""
        return None

    @property
    def num_borrowed_changes(self) -> int:
        """Changes when `borrowed_s` may be another one though the same weights are missing."""
        return 0

    @property
    def own_victim_bytes(self) -> int:
        """Bytes of the pool that the model needs and that count as evictable now."""
        if not self.member.keys:  # no other model can have any of them
            return self.resident_bytes if self.is_idle else 0
        needed_bytes = 0
        for group in self._store.groups:
            holders = self._reuse.holders_of_like(self.member, group)
            if holders and all(holder.use.is_idle for holder in holders):
                needed_bytes += self.member.bytes_of(group)
        return needed_bytes

    @property
    @abstractmethod
    def costs_version(self) -> object:
        """See `WeightUse`."""

    @abstractmethod
    def _byte_s(self, group: ParameterGroup) -> float:
        """Seconds to load a byte of a group, from where it would come."""

    # --- loading and evicting --------------------------------------------------------------------

    def take_pages(self) -> bool:
        """Take pages for those that are not in the pool; False if it has no room for them.

        They are then to be filled, or to be evicted.

        Raises:
            DriverError: the device refused memory; nothing has changed.
        """
        to_fill = self._reuse.populate(self.member, self._new_filling())
        if to_fill is None:
            return False
        self._to_fill = to_fill
        return True

    def _new_filling(self) -> Filling | None:
        """What begins to fill pages while others are taken."""
        return None

    @abstractmethod
    def fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the contents of the pages that were taken.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """

    @abstractmethod
    def begin_filling(self, threads: Executor) -> None:
        """Begin to load the contents of the pages that were taken.

        Args:
            threads: where they are loaded; `finish_filling` ends it.
        """

    @abstractmethod
    def is_filled_within(self, timeout_s: float | None) -> bool:
        """Wait for a time, None for any; return whether `finish_filling` would not wait."""

    @abstractmethod
    def finish_filling(self) -> None:
        """Wait until all are in the pool. Pre-condition: `begin_filling`.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """

    @property
    def is_saving(self) -> bool:
        """Whether they are being copied to the host cache."""
        return False

    def begin_saving(self, threads: Executor) -> None:  # noqa: B027 (nothing to do by default)
        """Begin to copy what the host cache lacks. Pre-condition: all are resident."""

    def is_saved_within(self, timeout_s: float | None) -> bool:
        """Wait for a time, None for any; return whether they are not being copied any more."""
        return True

    def evict(self, keep_bytes: int = 0) -> None:
        """Evict all of them but so many bytes; whatever loads or copies them is waited for.

        Those that a step uses first are kept.
        """
        left_bytes = self.resident_bytes
        evicted: list[ParameterGroup] = []
        for group in reversed(self._store.by_use):
            if left_bytes > keep_bytes and group in self._store.resident:
                evicted.append(group)
                left_bytes -= self.member.bytes_of(group)
        self._reuse.evict(self.member, evicted)
        if not keep_bytes:
            self._losses.forget()

    def _filled(self) -> None:
        """Note that the pages that were taken have their contents, and what that has taken."""
        self._reuse.filled(self.member, self._to_fill)
        groups = self._store.groups
        self.load_s = sum(self.member.bytes_of(each) * self._byte_s(each) for each in groups)
        seconds = [self.member.bytes_of(each) * self._byte_s(each) for each in self._to_fill]
        self._losses.restored(self._to_fill, lambda start, stop: sum(seconds[start:stop]))

    def close(self) -> None:
        """Give pages and addresses back."""
        self.evict()
        self._reclaimer.unregister(self.victims)
        self._reuse.unregister(self.member)
        self._store.close()
