"""Copies of weights from the host cache to the device, while more of them get their pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from aquifer.weights.host_cache import HostCache
from aquifer.weights.loader import begin_copying
from aquifer.weights.parameters import ParameterGroup
from aquifer.weights.store import WeightStore


class HostCopies:
    """Fills groups of one model from the host cache, as far as it has them: a `Filling`.

    Mapping a page takes a part of the time of a copy of the same size. So a copy to a GPU begins as
    soon as the group has its pages. On a CPU a copy would keep the engine's loop, and all are made
    by `finish`.

    Args:
        cache: the host cache.
        store: the weights of the model.
        keys: what its groups are, in the cache.

    Attributes:
        num_bytes: of the groups that it fills.
    """

    def __init__(
        self, cache: HostCache, store: WeightStore, keys: Mapping[ParameterGroup, str]
    ) -> None:
        self.num_bytes = 0
        self._cache = cache
        self._store = store
        self._keys = keys
        self._leases = ExitStack()
        self._groups: set[ParameterGroup] = set()
        self._waits: list[Callable[[], None]] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __contains__(self, group: ParameterGroup) -> bool:
        """Whether it fills a group."""
        return group in self._groups

    def begin(self, group: ParameterGroup) -> None:
        """A group has its pages."""
        kept = self._leases.enter_context(self._cache.lease(self._keys.get(group, "")))
        if kept is None:
            return
        pair = (kept, self._store.bytes_of(group))
        self._groups.add(group)
        self.num_bytes += kept.numel()
        if pair[1].device.type == "cpu":
            self._later.append(pair)
        else:
            self._waits.append(begin_copying([pair]))

    def finish(self) -> None:
        """Wait until all groups that it fills have their contents."""
        with self._leases:
            begin_copying(self._later)()
            self._wait()
        self._later = []

    def cancel(self) -> None:
        """Wait until nothing is written any more."""
        with self._leases:
            self._wait()
        self._later = []

    def _wait(self) -> None:
        if self._waits:
            self._waits[-1]()  # copies of one stream are done in their order
        self._waits = []
