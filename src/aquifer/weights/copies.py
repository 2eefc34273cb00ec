"""Where the weights of a load come from: a neighbour's device, the host cache, or files.

Of the sources that have a group, it comes from the one that is expected to be the fastest
(`aquifer.weights.sources`). From a neighbour, it depends on whether its pages are mapped here: a
copy is then several times as fast as one from host memory, but to map them first may take longer
than that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from aquifer.memory.host_buffer import in_pieces
from aquifer.weights.host_cache import HostCache
from aquifer.weights.loader import CopyQueue, begin_copying
from aquifer.weights.neighbours import Borrowing, Neighbours
from aquifer.weights.parameters import ParameterGroup
from aquifer.weights.sources import SourceSpeeds, WeightSource
from aquifer.weights.store import WeightStore


class Copies:
    """Fills groups of one model from neighbours and from the host cache: a `Filling`.

    Mapping a page takes a part of the time of a copy of the same size. So a copy to a GPU begins as
    soon as the group has its pages, while more of them get theirs. On a CPU a copy from the host
    cache would keep the engine's loop, and all are made by `finish`.

    Args:
        cache: the host cache.
        neighbours: the other engine processes of this machine; None for none.
        store: the weights of the model.
        keys: what those groups are that are to be filled, in the cache and for neighbours.
        speeds: how fast the sources are.
    """

    def __init__(
        self,
        cache: HostCache,
        neighbours: Neighbours | None,
        store: WeightStore,
        keys: Mapping[ParameterGroup, str],
        speeds: SourceSpeeds,
    ) -> None:
        self._cache = cache
        self._neighbours = neighbours
        self._store = store
        self._keys = keys
        self._speeds = speeds
        self._borrowing: Borrowing | None = None
        self._leases = ExitStack()
        self._sources: dict[ParameterGroup, WeightSource] = {}
        self._queue: CopyQueue | None = None  # begins after what used the pages before
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source_of(self, group: ParameterGroup) -> WeightSource:
        """Where a group comes from, or came from; before `finish`, where it is expected from."""
        return self._sources.get(group, WeightSource.DISK)

    def begin(self, group: ParameterGroup) -> None:
        """A group has its pages."""
        key = self._keys.get(group)
        if key is None:
            return
        if self._neighbours is not None and self._borrowing is None:
            self._borrowing = self._neighbours.borrow(
                {each: self._store.num_bytes_of(group) for group, each in self._keys.items()}
            )
        lent = None if self._borrowing is None else self._borrowing.source_of(key)
        if self._borrowing is not None and lent is not None and self._is_best(lent, key):
            self._sources[group] = lent
            self._borrowing.read(key, self._store.bytes_of(group))
        else:
            self._begin_from_host(group)

    def finish(self) -> tuple[ParameterGroup, ...]:
        """Wait until the groups that it fills have their contents.

        Returns: those that neighbours have not brought, and that the host cache has not either;
            they come from disk, too.
        """
        lost = self._finish_borrowing()
        for group in lost:
            del self._sources[group]
            self._begin_from_host(group)
        with self._leases:
            begin_copying(self._later)()
            self._wait()
        self._later = []
        return tuple(group for group in lost if group not in self._sources)

    def cancel(self) -> None:
        """Wait until nothing is written any more."""
        try:
            self._finish_borrowing()
        finally:
            with self._leases:
                self._wait()
            self._later = []

    def _is_best(self, source: WeightSource, key: str) -> bool:
        """Whether a source that has a group is expected to be the fastest one that has it."""
        host = (WeightSource.HOST,) if self._cache.has(key) else ()
        return self._speeds.fastest((source, *host, WeightSource.DISK)) is source

    def _begin_from_host(self, group: ParameterGroup) -> None:
        key = self._keys[group]
        if not self._is_best(WeightSource.HOST, key):
            return
        kept = self._leases.enter_context(self._cache.lease(key))
        if kept is None:
            return
        target = self._store.bytes_of(group)
        pairs = in_pieces(kept, target)
        self._sources[group] = WeightSource.HOST
        if target.device.type == "cpu":
            self._later += pairs
            return
        if self._queue is None:
            self._queue = CopyQueue(target.device)
        self._queue.add(pairs)

    def _finish_borrowing(self) -> list[ParameterGroup]:
        """End what was borrowed; returns the groups that have not come."""
        if self._borrowing is None:
            return []
        arrived = self._borrowing.finish()
        return [
            group
            for group, source in self._sources.items()
            if source.is_neighbour and self._keys[group] not in arrived
        ]

    def _wait(self) -> None:
        if self._queue is not None:
            self._queue.done()()
