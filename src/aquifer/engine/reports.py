"""Reports of the engine to other processes: models, memory, counters, progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from aquifer.memory.eviction_log import Eviction, EvictionTotals
from aquifer.memory.owners import Kind, Owner

Stage = Literal["weights", "kernels", "steps"]
"""What is done to load a model: weights are read, kernels compiled, steps captured."""

OnStage = Callable[[Stage, int, int], None]
"""Called with a stage, how much of it is done, and all of it."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a served model for the other processes."""

    name: str
    path: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


class ModelState(StrEnum):
    """State of a model in the engine."""

    REGISTERED = "registered"  # without weights in the pool
    LOADING = "loading"
    RESIDENT = "resident"  # with all weights in the pool
    PARTIAL = "partly resident"  # with some of them, or about to lose some
    FAILED = "failed"  # loading failed
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What a model does and has."""

    state: ModelState
    resident_bytes: int  # of its weights, in whole pages
    weight_bytes: int  # of all of them
    num_loads: int = 0  # times that it became resident
    loading_s: float = 0.0  # that took, from the first page of each load on
    error: str | None = None  # why loading it failed
    shared_bytes: int = 0  # of the resident ones, in pages that are accounted to another model
    host_bytes: int = 0  # of all of them, in the host cache
    is_saving: bool = False  # whether they are being copied there
    is_pinned: bool = False
    keep_alive_s: float | None = None  # how long they are kept unused; None for any time
    left_s: float | None = None  # time until they are given up for that; None for never


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading a model: how much of a stage is done."""

    model: str
    done: int  # bytes of weights; kernels that are compiled or read from disk; captured steps
    total: int
    stage: Stage = "weights"


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What fits into the KV cache if one model has all of it; no tokens for a model without KV.

    It changes with the weights that are loaded and the prefixes that are pinned.
    """

    num_tokens: int  # of one sequence, if the model's context had no limit
    num_sequences: float  # of the model's context length each


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model in the pool, and the usage of its KV cache."""

    status: ModelStatus
    bytes_by_kind: dict[Kind, int]
    num_running: int
    num_waiting: int
    kv_written_tokens: int
    kv_written_bytes: int
    kv_mapped_bytes: int
    kv_wasted_bytes: int
    kv_capacity: KVCapacity


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Breakdown of the pool's budget.

    Bytes in use by all models + overhead_bytes + free_bytes == budget_bytes.
    """

    device: str
    page_bytes: int
    budget_bytes: int
    overhead_bytes: int  # device memory not in pages: CUDA context, workspaces, CUDA graphs
    free_bytes: int
    idle_bytes: int  # the part of free_bytes that is kept as pages for quick reuse
    retired_bytes: int  # the part of free_bytes in pages that are still mapped where last used
    mapped_pages: int
    free_pages: int
    models: dict[str, ModelMemory]
    process_resident_bytes: int
    loop_page_calls: int = 0  # calls of the device's driver about pages that a step may wait for
    background_page_calls: int = 0  # those of other threads
    host_cache_bytes: int = 0  # host memory with copies of weights
    host_cache_budget_bytes: int = 0
    neighbour_bytes: int = 0  # pages of other devices that are mapped here, to load weights from
    # Bytes of weights that were loaded so far, by model and source (`WeightSource`).
    loaded_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    evictions: tuple[Eviction, ...] = ()  # the latest ones, the oldest first
    eviction_totals: Mapping[Owner, EvictionTotals] = field(default_factory=dict)  # by loser
    devices: tuple[MemoryReport, ...] = ()  # where it is of several: that of each


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of the engine, cheap enough to send with every step's outputs."""

    num_running: dict[str, int]  # by model
    num_waiting: dict[str, int]
    num_preemptions: dict[str, int]  # since the start
    kv_usage: float  # KV bytes in use / bytes that KV could have, 0..1
    # Prompt tokens looked up among retained prefixes, and hits; by model, since the start.
    num_prefix_queried_tokens: dict[str, int]
    num_prefix_hit_tokens: dict[str, int]
    num_late_compilations: int = 0  # kernels that were compiled while a step waited

    def without_requests(self) -> EngineStats:
        """The same counters of an engine that has lost its requests."""
        none = dict.fromkeys(self.num_running, 0)
        return replace(self, num_running=none, num_waiting=none, kv_usage=0.0)
