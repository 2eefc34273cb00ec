"""The weights of one model: loaded into pages of the pool, in the background too, and evicted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from threading import Event

import torch

from aquifer.engine.reports import LoadProgress
from aquifer.errors import DriverError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer
from aquifer.memory.use_rate import UseRate
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.fingerprint import GroupOrigin
from aquifer.weights.loader import begin_copying
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.store import WeightStore
from aquifer.weights.victims import IdleWeights

_log = logging.getLogger(__name__)

_DISK_BYTES_PER_S = 2e9
_HOST_BYTES_PER_S = 20e9
"""Speeds of a load from the checkpoint and from the host cache, until they were measured."""


class ModelWeights:
    """Keeps the weights of one model, and measures how fast they are loaded.

    Args:
        pool: where pages come from.
        reclaimer: evicts them while the model is idle.
        reuse: the weights of all models.
        name: of the model.
        parameters: what is to be loaded.
        checkpoint: where it is.
        random_seed: seed of random numbers that take the place of the checkpoint's; None for none.
        is_unused: tells whether they are neither in use nor being loaded.
        is_wanted: tells whether requests wait for them: then they are needed again for certain.
        on_evict: called when some of them have been evicted.

    Attributes:
        uses: the requests for the model.
        sensitivity: weight of a second of its delay, compared with other models.

    Raises:
        DriverError: the device has no addresses left.
    """

    def __init__(
        self,
        pool: PagePool,
        reclaimer: Reclaimer,
        reuse: ReuseStore,
        name: str,
        parameters: Sequence[Parameter],
        checkpoint: Checkpoint,
        random_seed: int | None,
        *,
        is_unused: Callable[[], bool],
        is_wanted: Callable[[], bool],
        on_evict: Callable[[], None],
    ) -> None:
        self._name = name
        self._checkpoint = checkpoint
        self._random_seed = random_seed
        self._reclaimer = reclaimer
        self._reuse = reuse
        self._is_unused = is_unused
        self._is_wanted = is_wanted
        self._on_evict = on_evict
        self.uses = UseRate(time.monotonic())
        self.sensitivity = 1.0
        self._store = WeightStore(pool, Owner(name, Kind.WEIGHTS), parameters)
        by_name = {parameter.name: parameter for parameter in parameters}
        parts = {g: tuple(by_name[each] for each in g.names) for g in self._store.groups}
        if random_seed is None:
            origins = {g: GroupOrigin(part, checkpoint) for g, part in parts.items()}
            self.member = reuse.register(self._store, self, origins, {})
        else:  # those of another model are others
            keys = {g: f"{name} {random_seed} {g.names}" for g in parts}
            self.member = reuse.register(self._store, self, {}, keys)
        # Of the load that is under way:
        self._filling: Future[None] | None = None  # in the background
        self._to_fill: tuple[ParameterGroup, ...] = ()
        self._bytes_per_s = {"disk": _DISK_BYTES_PER_S, "host": _HOST_BYTES_PER_S}
        self._saving: Future[None] | None = None
        self._stop_saving = Event()
        self._victims = IdleWeights(reuse, self.member, self._byte_s)
        reclaimer.register(self._victims)

    # --- how they are used: a `WeightUse` -------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether they are neither in use nor being loaded or copied, and may be evicted."""
        return self._is_unused() and not self.is_saving

    def probability(self, now_s: float) -> float:
        """p(the model is needed again)."""
        return 1.0 if self._is_wanted() else self.uses.probability(now_s)

    def on_evict(self) -> None:
        """Some of them have been evicted."""
        self._on_evict()

    # --- what is there -------------------------------------------------------------------------

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
    def own_victim_bytes(self) -> int:
        """Bytes of the pool that the model needs and that count as evictable now."""
        needed = 0
        for group in self._store.groups:
            holders = self._reuse.holders_of_like(self.member, group)
            if holders and all(holder.use.is_idle for holder in holders):
                needed += self.member.bytes_of(group)
        return needed

    @property
    def missing_s(self) -> float:
        """Seconds to load those that are not in the pool, as fast as the last time."""
        missing = self._reuse.missing(self.member)
        return sum(self.member.bytes_of(group) * self._byte_s(group) for group in missing)

    def _byte_s(self, group: ParameterGroup) -> float:
        """Seconds to load a byte of a group, from where it would come."""
        return 1 / self._bytes_per_s["host" if self._is_in_host(group) else "disk"]

    def _is_in_host(self, group: ParameterGroup) -> bool:
        key = self.member.keys.get(group)
        return key is not None and self._reuse.host.has(key)

    # --- loading -------------------------------------------------------------------------------

    def take_pages(self) -> bool:
        """Take pages for those that are not in the pool; False if it has no room for them.

        They are then to be filled, or to be evicted.

        Raises:
            DriverError: the device refused memory; nothing has changed.
        """
        to_fill = self._reuse.populate(self.member)
        if to_fill is None:
            return False
        self._to_fill = to_fill
        return True

    def fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the contents of the pages that were taken.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        self._fill(on_progress)
        self._reuse.filled(self.member, self._to_fill)

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
        self._reuse.filled(self.member, self._to_fill)

    def evict(self, keep_bytes: int = 0) -> None:
        """Evict all of them but so many bytes; whatever loads or copies them is waited for.

        Those that a step uses first are kept.
        """
        if self._filling is not None:
            wait([self._filling])
            self._filling = None
        self._end_saving()
        left_bytes = self.resident_bytes
        evicted: list[ParameterGroup] = []
        for group in reversed(self._store.by_use):
            if left_bytes > keep_bytes and group in self._store.resident:
                evicted.append(group)
                left_bytes -= self.member.bytes_of(group)
        self._reuse.evict(self.member, evicted)

    def close(self) -> None:
        """Give pages and addresses back."""
        self.evict()
        self._reclaimer.unregister(self._victims)
        self._reuse.unregister(self.member)
        self._reuse.host.forget(self._worth)
        self._store.close()

    def _fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Copy the weights from the host, and read the others or fill them with random numbers."""
        groups = self._to_fill
        total_bytes = sum(self._store.bytes_of(group).numel() for group in groups)
        loaded_bytes = 0

        def advance(num_bytes: int) -> None:
            nonlocal loaded_bytes
            loaded_bytes = min(loaded_bytes + num_bytes, total_bytes)
            on_progress(LoadProgress(self._name, loaded_bytes, total_bytes))

        with ExitStack() as leases:
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            others: list[ParameterGroup] = []
            for group in groups:
                key = self.member.keys.get(group, "")
                kept = leases.enter_context(self._reuse.host.lease(key))
                if kept is None:
                    others.append(group)
                else:
                    copies.append((kept, self._store.bytes_of(group)))
            begun_s = time.monotonic()
            wait_for_copies = begin_copying(copies)
            try:  # those from disk come meanwhile
                self._fill_from_disk(others, advance)
            finally:
                wait_for_copies()
            seconds = time.monotonic() - begun_s
        # Those from disk take longer than what is copied beside them.
        place, measured = ("disk", others) if others else ("host", groups)
        num_bytes = sum(map(self.member.bytes_of, measured))
        if num_bytes:
            self._bytes_per_s[place] = num_bytes / max(seconds, 1e-6)
        on_progress(LoadProgress(self._name, total_bytes, total_bytes))

    def _fill_from_disk(
        self, groups: Sequence[ParameterGroup], advance: Callable[[int], None]
    ) -> None:
        if self._random_seed is not None:
            self._store.fill_random(self._random_seed, groups)
        elif groups:
            self._store.load(self._checkpoint, advance, groups)

    # --- copies in host memory -----------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether they are being copied to the host cache."""
        return self._saving is not None and not self._saving.done()

    def begin_saving(self, threads: Executor) -> None:
        """Begin to copy what the host cache lacks. Pre-condition: all are resident."""
        self._end_saving()
        if self._reuse.host.num_bytes:
            self._saving = threads.submit(self._save)

    def finish_saving(self) -> None:
        """Wait until they have been copied to the host cache."""
        if self._saving is not None:
            wait([self._saving])

    def _end_saving(self) -> None:
        self._stop_saving.set()
        self.finish_saving()
        self._saving = None
        self._stop_saving.clear()

    def _worth(self) -> float:
        return self.probability(time.monotonic())

    def _save(self) -> None:
        try:
            for group in self._store.by_use:
                if self._stop_saving.is_set():
                    return
                key = self.member.keys.get(group)
                if key is not None:
                    contents = self._store.bytes_of(group)
                    self._reuse.host.keep(key, contents, self._worth)
                    if (new := self.member.keys[group]) != key:  # it was compared meanwhile
                        self._reuse.host.rename(key, new)
        except (DriverError, RuntimeError) as error:  # they are read from disk again
            _log.warning("%s was not copied to host memory: %s", self._name, error)
