"""Occupancy of a simulated device: how many requests there are, and what the memory is used for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import IntArray
from aquifer.engine.lane import Lane
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.sim.baselines.reserved import ReservedCache
from aquifer.sim.config import ReplayConfig

_PARTS = ("written", "future", "internal", "external", "weights", "retained", "free")
"""Parts of the memory for KV: written tokens (shared blocks count once); memory reserved for future
tokens; for tokens that never come (internal fragmentation); lost between regions (external
fragmentation, section 3.1); weights that come and go, with a part of the memory that is theirs
alone; prefixes retained for later requests; and free memory."""

COLUMNS = ("requests", "sequences", "waiting", "shared", *_PARTS)
"""Quantities that are averaged over time: counts, then bytes."""


class Occupancy:
    """Measures the occupancy of a device.

    Args:
        config: the configuration of the replay.
        pool: the device's memory.
        lanes: by model.
        kv_budget_bytes: the memory for KV.
    """

    def __init__(
        self,
        config: ReplayConfig,
        pool: PagePool,
        lanes: Mapping[str, Lane],
        kv_budget_bytes: int,
    ) -> None:
        self._config = config
        self._pool = pool
        self._lanes = lanes
        self._kv_budget_bytes = kv_budget_bytes

    @property
    def free_bytes(self) -> int:
        """Free memory."""
        return self._pool.free_bytes

    @property
    def retained_bytes(self) -> int:
        """Memory of retained prefixes."""
        if not self._config.prefix_caching:
            return 0
        in_use_bytes = self._pool.usage().in_use_bytes
        return sum(in_use_bytes.get(Owner(name, Kind.PREFIX), 0) for name in self._lanes)

    @property
    def weight_bytes(self) -> int:
        """Memory of weights that come and go."""
        if self._config.loading is None:
            return 0
        usage = self._pool.usage()
        resident_bytes = sum(
            num_bytes
            for owner, num_bytes in usage.in_use_bytes.items()
            if owner.kind is Kind.WEIGHTS
        )
        return resident_bytes + usage.overhead_bytes

    def values(self) -> list[int]:
        """Return the current values of `COLUMNS`."""
        num_requests = num_seqs = num_waiting = 0
        shared_bytes = written_bytes = future_bytes = internal_bytes = external_bytes = 0
        for lane in self._lanes.values():
            table, cache = lane.slots, lane.cache
            num_waiting += len(lane.waiting)
            if not lane.running:
                continue
            num_requests += len(lane.running)
            num_seqs += table.num_taken
            num_written = lane.written_tokens
            stats = cache.stats(num_written)
            shared_bytes += stats.shared_bytes
            written_bytes += stats.written_bytes - stats.shared_bytes
            if self._config.is_reserved:
                assert isinstance(cache, ReservedCache)
                waste = cache.waste(int(num_written.sum()), table.max_total)
                future_bytes += waste.future_bytes
                internal_bytes += waste.internal_bytes
                external_bytes += waste.external_bytes
            else:
                internal_bytes += stats.wasted_bytes
        free_bytes, weight_bytes = self._pool.free_bytes, self.weight_bytes
        known_bytes = written_bytes + future_bytes + internal_bytes + external_bytes
        known_bytes += weight_bytes + free_bytes
        return [
            num_requests,
            num_seqs,
            num_waiting,
            shared_bytes,
            written_bytes,
            future_bytes,
            internal_bytes,
            external_bytes,
            weight_bytes,
            self._kv_budget_bytes - known_bytes,
            free_bytes,
        ]

    def values_of_decodes(
        self,
        lane: Lane,
        num_untaken: IntArray,
        free_bytes: list[int],
        retained_bytes: list[int],
        weight_bytes: list[int],
    ) -> npt.NDArray[np.float64]:
        """Return the values of `COLUMNS` in each of several steps that were done at once: [n, ...].

        The running sequences of `lane` decoded in all of them, and no other model had any. The
        values after the last step are measured, and those before it follow from them.

        Args:
            lane: the model that ran.
            num_untaken: [n], requests that have arrived by each step and are in no queue yet.
            free_bytes: of each step.
            retained_bytes: of each step.
            weight_bytes: of each step.
        """
        count = len(num_untaken)
        values = np.array(self.values()) + np.zeros((count, 1))
        column = {name: values[:, index] for index, name in enumerate(COLUMNS)}
        # KV written after each step, until the last.
        step_bytes = lane.cache.footprint.kv_bytes(lane.slots.num_taken)
        later_bytes = np.arange(count - 1, -1, -1) * step_bytes
        column["written"][:] -= later_bytes
        if self._config.is_reserved:
            column["future"][:] += later_bytes
        else:
            column["free"][:] = free_bytes
            column["retained"][:] = retained_bytes
            column["weights"][:] = weight_bytes
            known_bytes = column["written"] + column["free"] + column["retained"]
            known_bytes += column["weights"]
            column["internal"][:] = self._kv_budget_bytes - known_bytes
        column["waiting"][:] += num_untaken
        return values
