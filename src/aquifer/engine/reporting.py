"""Reports for people and metrics: models, counters of the engine, and where its memory is."""

from __future__ import annotations

from collections.abc import Mapping

from aquifer.cache.footprint import UNLIMITED_TOKENS, Footprint
from aquifer.config import ModelSpec
from aquifer.engine.lane import Lane
from aquifer.engine.reports import (
    EngineStats,
    KVCapacity,
    MemoryReport,
    ModelInfo,
    ModelMemory,
    ModelStatus,
)
from aquifer.memory.eviction_log import EvictionLog
from aquifer.memory.pool import Kind, Owner, PagePool, PoolUsage
from aquifer.memory.proc import proc_bytes
from aquifer.models import ModelPlan
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.reuse import ReuseStore


def model_info(
    spec: ModelSpec,
    plan: ModelPlan,
    checkpoint: Checkpoint,
    max_model_len: int,
    weight_bytes: int,
) -> ModelInfo:
    """Description of a model for other processes.

    Args:
        spec: its name and path.
        plan: what its configuration says.
        checkpoint: where its weights are.
        max_model_len: maximum length of its sequences, in tokens.
        weight_bytes: bytes of its weights in the pool.
    """
    return ModelInfo(
        name=spec.name,
        path=str(spec.path),
        architecture=checkpoint.architecture,
        dtype=str(plan.kv_layout.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        vocab_size=plan.vocab_size,
        num_parameters=plan.num_parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=plan.kv_layout.token_bytes,
    )


def kv_capacity(footprint: Footprint, max_tokens: int, num_pages: int) -> KVCapacity:
    """What fits into the KV cache of one model.

    Args:
        footprint: of its sequences.
        max_tokens: maximum length of a sequence.
        num_pages: pages that its KV can have.
    """
    most_pages = footprint.most(1, max_tokens)
    if not most_pages:
        return KVCapacity(0, 0.0)
    num_seqs = num_pages / most_pages
    if not footprint.token_bytes:  # recurrent state alone
        return KVCapacity(0, num_seqs)
    longest = footprint.longest(num_pages)
    if longest >= UNLIMITED_TOKENS:  # a sequence keeps its windows alone
        longest = int(num_seqs * max_tokens) + 1
    return KVCapacity(longest - 1, num_seqs)


def engine_stats(
    lanes: Mapping[str, Lane], usage: PoolUsage, fixed_bytes: int, num_late_compilations: int
) -> EngineStats:
    """Current counters, in time proportional to the number of models.

    Args:
        lanes: the lanes of all models.
        usage: usage of the pool.
        fixed_bytes: bytes of the budget that KV cannot have.
        num_late_compilations: kernels that were compiled while a step waited.
    """
    kv_bytes = usage.of_kind(Kind.KV)
    stats = {
        name: None if lane.prefixes is None else lane.prefixes.stats for name, lane in lanes.items()
    }
    return EngineStats(
        num_running={name: len(lane.running) for name, lane in lanes.items()},
        num_waiting={name: len(lane.waiting) for name, lane in lanes.items()},
        num_preemptions={name: lane.num_preemptions for name, lane in lanes.items()},
        kv_usage=kv_bytes / max(usage.budget_bytes - fixed_bytes, 1),
        num_prefix_queried_tokens={
            name: 0 if prefixes is None else prefixes.queried_tokens
            for name, prefixes in stats.items()
        },
        num_prefix_hit_tokens={
            name: 0 if prefixes is None else prefixes.hit_tokens for name, prefixes in stats.items()
        },
        num_late_compilations=num_late_compilations,
    )


def memory_report(
    lanes: Mapping[str, Lane],
    pool: PagePool,
    statuses: Mapping[str, ModelStatus],
    capacities: Mapping[str, KVCapacity],
    reuse: ReuseStore,
    log: EvictionLog,
) -> MemoryReport:
    """Breakdown of the pool's budget by owner, now.

    Args:
        lanes: the lanes of all models.
        pool: the memory.
        statuses: by model.
        capacities: by model.
        reuse: the weights of all models.
        log: what was evicted.
    """
    usage = pool.usage()
    models = {}
    for name, lane in lanes.items():
        kv = lane.cache.stats(lane.written_tokens)
        models[name] = ModelMemory(
            status=statuses[name],
            bytes_by_kind={
                kind: usage.in_use_bytes.get(Owner(name, kind), 0)
                for kind in Kind
                if kind != Kind.OVERHEAD
            },
            num_running=len(lane.running),
            num_waiting=len(lane.waiting),
            kv_written_tokens=kv.written_tokens,
            kv_written_bytes=kv.written_bytes,
            kv_mapped_bytes=kv.mapped_bytes,
            kv_wasted_bytes=kv.wasted_bytes,
            kv_capacity=capacities[name],
        )
    return MemoryReport(
        device=str(pool.driver.device),
        page_bytes=pool.page_bytes,
        budget_bytes=usage.budget_bytes,
        overhead_bytes=usage.overhead_bytes,
        free_bytes=usage.free_bytes,
        idle_bytes=usage.idle_bytes,
        retired_bytes=usage.retired_bytes,
        mapped_pages=(sum(usage.in_use_bytes.values()) - usage.overhead_bytes) // pool.page_bytes,
        free_pages=usage.free_bytes // pool.page_bytes,
        loop_page_calls=pool.pages.num_foreground_calls,
        background_page_calls=pool.pages.num_background_calls,
        models=models,
        process_resident_bytes=proc_bytes("/proc/self/status", "VmRSS"),
        host_cache_bytes=reuse.host.used_bytes,
        host_cache_budget_bytes=reuse.host.num_bytes,
        neighbour_bytes=0 if reuse.neighbours is None else reuse.neighbours.mapped_bytes,
        loaded_bytes=dict(reuse.loaded_bytes),
        evictions=log.latest,
        eviction_totals=log.totals,
    )
