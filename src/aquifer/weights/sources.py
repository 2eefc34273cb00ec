"""The sources that weights are loaded from, and how fast each of them is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum


class WeightSource(StrEnum):
    """Where weights come from."""

    MAPPED = "mapped"  # another device of the machine, of which the pages are mapped here
    NEIGHBOUR = "neighbour"  # another device, of which the pages are to be mapped first
    HOST = "host"  # the host cache
    DISK = "disk"  # files; or random numbers in their place

    @property
    def is_neighbour(self) -> bool:
        """Whether it is another device."""
        return self in (WeightSource.MAPPED, WeightSource.NEIGHBOUR)

    @property
    def place(self) -> str:
        """Its name in reports, which do not tell what was mapped before."""
        return (WeightSource.NEIGHBOUR if self.is_neighbour else self).value


_FIRST_BYTES_PER_S = {
    WeightSource.MAPPED: 300e9,
    WeightSource.NEIGHBOUR: 30e9,
    WeightSource.HOST: 50e9,
    WeightSource.DISK: 2e9,
}
"""Speeds of a load from each source until they were measured, from loads on an H200; the disk's is
that of files which the system has not in memory."""

_REGAINED = 0.05
"""Part of its loss that a source regains with each load from another one that is usually slower."""


class SourceSpeeds:
    """How fast the weights of one model come from each source.

    A load gives the speed of one source, by the bytes from there and the time of the whole load:
    of the one that is expected to have taken longest, beside which the others were done. So what
    takes time in each load, such as taking pages, is a part of every speed.

    A measurement counts by its part of the model's weights: a load of a few small groups says
    little. A source that was never measured is expected to fall behind its first speed as others
    do, so that it is not preferred to one that is usually faster: loads of a small model are short
    but not fast, wherever it is. A source that was slow once, and is therefore passed over, regains
    trust with each load, and is tried again.
    """

    def __init__(self) -> None:
        self.version = 0
        self._changes: dict[WeightSource, float] = {}  # log of measured speed / first speed
        self._byte_s = {source: 1 / first for source, first in _FIRST_BYTES_PER_S.items()}

    def byte_s(self, source: WeightSource) -> float:
        """Expected seconds for a byte from a source."""
        return self._byte_s[source]

    def fastest(self, sources: Iterable[WeightSource]) -> WeightSource:
        """The one of these sources that is expected to be the fastest."""
        return min(sources, key=self._byte_s.__getitem__)

    def measured(
        self, loaded_bytes: Mapping[WeightSource, int], seconds: float, model_bytes: int
    ) -> None:
        """Note what a load has taken.

        Args:
            loaded_bytes: that came from each source.
            seconds: for all of them.
            model_bytes: of all weights of the model.
        """
        if not any(loaded_bytes.values()):
            return
        self.version += 1
        slowest = max(loaded_bytes, key=lambda each: loaded_bytes[each] * self.byte_s(each))
        first_bytes_per_s = _FIRST_BYTES_PER_S[slowest]
        found = math.log(loaded_bytes[slowest] / max(seconds, 1e-6) / first_bytes_per_s)
        weight = min(loaded_bytes[slowest] / model_bytes, 1.0)
        change = self._change(slowest)
        change += weight * (found - change)
        self._changes[slowest] = change
        for source, other in self._changes.items():
            if _FIRST_BYTES_PER_S[source] > first_bytes_per_s and other < change:
                self._changes[source] += _REGAINED * weight * (change - other)
        self._byte_s = {
            source: math.exp(-self._change(source)) / first
            for source, first in _FIRST_BYTES_PER_S.items()
        }

    def _change(self, source: WeightSource) -> float:
        if source in self._changes:
            return self._changes[source]
        own = _FIRST_BYTES_PER_S[source]
        faster = [c for each, c in self._changes.items() if _FIRST_BYTES_PER_S[each] > own]
        return min(min(faster) if faster else max(self._changes.values(), default=0.0), 0.0)
