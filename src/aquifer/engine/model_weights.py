"""The weights of one model of an engine: loaded into pages of the pool, in the background too."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from threading import Event

import torch

from aquifer.engine.assembly import Assembly
from aquifer.engine.leader import LedModel
from aquifer.engine.pooled_weights import Life, PooledWeights
from aquifer.engine.reports import LoadProgress
from aquifer.errors import ConfigError, DriverError, one_line
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.copies import Copies
from aquifer.weights.fingerprint import GroupOrigin, file_stamp
from aquifer.weights.neighbours import Neighbours
from aquifer.weights.parameters import Parameter, ParameterGroup
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.sources import SourceSpeeds, WeightSource

_log = logging.getLogger(__name__)


class ModelWeights(PooledWeights):
    """Loads the weights of one model, measures how fast, and keeps copies in the host cache.

    Args:
        assembly: pool, clock, and what evicts them while the model is idle.
        reuse: the weights of all models.
        name: of the model.
        parameters: what is to be loaded.
        checkpoint: where it is.
        random_seed: seed of random numbers that take the place of the checkpoint's; None for none.
        life: the model's.
        led: the other ranks that have parts of them; None for none.

    Raises:
        DriverError: the device has no addresses left.
    """

    def __init__(
        self,
        assembly: Assembly,
        reuse: ReuseStore,
        name: str,
        parameters: Sequence[Parameter],
        checkpoint: Checkpoint,
        random_seed: int | None,
        life: Life,
        led: LedModel | None = None,
    ) -> None:
        self._led = led
        self._checkpoint = checkpoint
        self._random_seed = random_seed
        self._stamps = {
            file: file_stamp(file) for file in {each.file for each in checkpoint.tensors.values()}
        }
        self._begun_s = 0.0  # of the last load
        self._speeds = SourceSpeeds()
        self._sources: Counter[WeightSource] = Counter()  # bytes of pages of the last load
        self._filling: Future[None] | None = None  # in the background
        self._saving: Future[None] | None = None
        self._stop_saving = Event()
        reclaimer = assembly.room.reclaimer
        super().__init__(assembly, reclaimer, reuse, name, parameters, life)
        self._copies = self._new_filling()
        if led is not None:
            self._store.record = led.note_weights

    def _origins(self) -> Mapping[ParameterGroup, GroupOrigin]:
        if self._random_seed is not None:
            return {}
        by_name = {parameter.name: parameter for parameter in self._store.parameters}
        return {
            group: GroupOrigin(tuple(by_name[name] for name in group.names), self._checkpoint)
            for group in self._store.groups
        }

    def _keys(self) -> Mapping[ParameterGroup, str]:
        if self._random_seed is None:
            return {}
        # Random numbers of another model are others.
        return {g: f"{self._name} {self._random_seed} {g.names}" for g in self._store.groups}

    @property
    def is_idle(self) -> bool:
        """Whether they are neither in use nor being loaded, copied or lent, and may be evicted."""
        return super().is_idle and not self.is_saving and not self._reuse.is_lent(self.member)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name, to be used only while all are resident."""
        return self._store.tensors

    @property
    def borrowed_s(self) -> float | None:
        """See `PooledWeights`."""
        neighbours = self._reuse.neighbours
        if neighbours is None:
            return None
        return sum(
            self.member.bytes_of(group) * self._speeds.byte_s(self._lent_source(group, neighbours))
            for group in self._reuse.missing(self.member)
        )

    @property
    def num_borrowed_changes(self) -> int:
        """See `PooledWeights`."""
        return 0 if self._reuse.neighbours is None else self._reuse.neighbours.num_changes

    def _lent_source(self, group: ParameterGroup, neighbours: Neighbours) -> WeightSource:
        """Where a group would come from if a neighbour has it."""
        key = self.member.keys.get(group)
        is_mapped = key is not None and neighbours.has_mapped(key)
        lent = WeightSource.MAPPED if is_mapped else WeightSource.NEIGHBOUR
        return self._speeds.fastest((lent, *self._own_sources(group)))

    @property
    def costs_version(self) -> object:
        """See `WeightUse`."""
        return self._speeds.version, self._reuse.host.version

    def _byte_s(self, group: ParameterGroup) -> float:
        """Seconds to load a byte of a group, from where it would come."""
        return self._speeds.byte_s(self._speeds.fastest(self._own_sources(group)))

    def _own_sources(self, group: ParameterGroup) -> Sequence[WeightSource]:
        """What has a group without any neighbour."""
        key = self.member.keys.get(group)
        is_in_host = key is not None and self._reuse.host.has(key)
        return (WeightSource.HOST, WeightSource.DISK) if is_in_host else (WeightSource.DISK,)

    # --- loading -------------------------------------------------------------------------------

    def fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the contents of the pages that were taken.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        self._fill(on_progress)
        self._filled()

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
        self._filled()

    def evict(self, keep_bytes: int = 0) -> None:
        """See `PooledWeights`."""
        if self._filling is not None:
            wait([self._filling])
            self._filling = None
        self._copies.cancel()
        self._end_saving()
        super().evict(keep_bytes)

    def close(self) -> None:
        """Give pages and addresses back, and copies in host memory."""
        super().close()
        self._reuse.host.forget(self._worth)

    def _new_filling(self) -> Copies:
        self._begun_s = time.monotonic()
        keys = self.member.keys
        missing = {
            group: keys[group] for group in self._reuse.missing(self.member) if group in keys
        }
        self._copies = Copies(
            self._reuse.host, self._reuse.neighbours, self._store, missing, self._speeds
        )
        return self._copies

    def _fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Read what has no faster source, or fill it with random numbers, and wait for copies."""
        copies, groups = self._copies, self._to_fill
        others = [group for group in groups if copies.source_of(group) is WeightSource.DISK]
        copied = [group for group in groups if group not in set(others)]
        total_bytes = sum(map(self._store.num_bytes_of, copied)) + self._stored_bytes(others)
        loaded_bytes = 0

        def advance(num_bytes: int) -> None:
            nonlocal loaded_bytes
            loaded_bytes = min(loaded_bytes + num_bytes, total_bytes)
            on_progress(LoadProgress(self._name, loaded_bytes, total_bytes))

        await_ranks = None
        if self._led is not None:
            await_ranks = self._led.fill([self._store.number_of(group) for group in groups])
        lost: Sequence[ParameterGroup] = ()
        try:  # those from disk come while the others are copied
            self._fill_from_disk(others, advance)
        finally:
            lost = copies.finish()
            if await_ranks is not None:
                await_ranks()
        self._fill_from_disk(lost, advance)
        self._measure(groups, time.monotonic() - self._begun_s)
        on_progress(LoadProgress(self._name, total_bytes, total_bytes))

    def _measure(self, groups: Sequence[ParameterGroup], seconds: float) -> None:
        """Note where groups came from, and how fast."""
        self._sources = Counter()
        for group in groups:
            self._sources[self._copies.source_of(group)] += self.member.bytes_of(group)
        if self._random_seed is None or not self._sources[WeightSource.DISK]:
            self._speeds.measured(self._sources, seconds, self.num_bytes)

    def _filled(self) -> None:
        super()._filled()
        for source, num_bytes in self._sources.items():
            self._reuse.loaded_bytes[self._name, source.place] += num_bytes

    def _fill_from_disk(
        self, groups: Sequence[ParameterGroup], advance: Callable[[int], None]
    ) -> None:
        if self._random_seed is not None:
            self._store.fill_random(self._random_seed, groups)
        elif groups:
            self._check_files()
            self._store.load(self._checkpoint, advance, groups)
            self._check_files()

    def _stored_bytes(self, groups: Sequence[ParameterGroup]) -> int:
        """Bytes of the checkpoint that these groups are read from: fewer, if they are decoded."""
        if self._random_seed is not None:
            return sum(self._store.bytes_of(group).numel() for group in groups)
        return sum(stored.num_bytes for stored, _ in self._store.jobs(self._checkpoint, groups))

    def _check_files(self) -> None:
        """Refuse a checkpoint that is not the one that was registered any more.

        What is left in the pool, and what others share, is of that one.

        Raises:
            ConfigError: a file is gone, or changed.
        """
        for file, stamp in self._stamps.items():
            try:
                is_same = file_stamp(file) == stamp
            except OSError as error:
                raise ConfigError(f"cannot read {file}: {one_line(error)}") from error
            if not is_same:
                raise ConfigError(
                    f"{file} changed since {self._name} was registered; restart the server, or "
                    "bring the file back"
                )

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

    def is_saved_within(self, timeout_s: float | None) -> bool:
        """Wait for a time, None for any; return whether they are not being copied any more."""
        return self._saving is None or bool(wait([self._saving], timeout_s).done)

    def _end_saving(self) -> None:
        self._stop_saving.set()
        self.is_saved_within(None)
        self._saving = None
        self._stop_saving.clear()

    def _worth(self) -> float:
        return self.probability(self._clock_s())

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
