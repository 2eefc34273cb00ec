"""Reports of several devices as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from aquifer.engine.reports import (
    EngineStats,
    KVCapacity,
    MemoryReport,
    ModelMemory,
    ModelState,
    ModelStatus,
)
from aquifer.memory.eviction_log import EvictionTotals
from aquifer.memory.owners import Owner

_STATES = (
    ModelState.RESIDENT,
    ModelState.LOADING,
    ModelState.PARTIAL,
    ModelState.REGISTERED,
    ModelState.FAILED,
    ModelState.REMOVED,
)
"""Where a model is in different states on several devices, the first of these is its state."""

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


def total_memory(reports: Sequence[MemoryReport]) -> MemoryReport:
    """The memory of several devices together, with the report of each.

    Sizes are sums, but for those of a model's weights: these are of the device that has most of it.

    Args:
        reports: of the devices; one at least.
    """
    totals: dict[Owner, EvictionTotals] = {}
    for report in reports:
        for owner, of_device in report.eviction_totals.items():
            before = totals.get(owner, EvictionTotals())
            totals[owner] = EvictionTotals(
                before.num_evictions + of_device.num_evictions,
                before.num_bytes + of_device.num_bytes,
                before.expected_s + of_device.expected_s,
                before.paid_s + of_device.paid_s,
            )
    evictions = sorted(
        (entry for report in reports for entry in report.evictions), key=lambda entry: entry.time_s
    )
    names = dict.fromkeys(name for report in reports for name in report.models)
    return MemoryReport(
        device=", ".join(report.device for report in reports),
        page_bytes=max(report.page_bytes for report in reports),
        budget_bytes=sum(report.budget_bytes for report in reports),
        overhead_bytes=sum(report.overhead_bytes for report in reports),
        free_bytes=sum(report.free_bytes for report in reports),
        idle_bytes=sum(report.idle_bytes for report in reports),
        retired_bytes=sum(report.retired_bytes for report in reports),
        mapped_pages=sum(report.mapped_pages for report in reports),
        free_pages=sum(report.free_pages for report in reports),
        loop_page_calls=sum(report.loop_page_calls for report in reports),
        background_page_calls=sum(report.background_page_calls for report in reports),
        models={
            name: _model([report.models[name] for report in reports if name in report.models])
            for name in names
        },
        process_resident_bytes=sum(report.process_resident_bytes for report in reports),
        host_cache_bytes=sum(report.host_cache_bytes for report in reports),
        host_cache_budget_bytes=sum(report.host_cache_budget_bytes for report in reports),
        neighbour_bytes=sum(report.neighbour_bytes for report in reports),
        loaded_bytes=sum((Counter(report.loaded_bytes) for report in reports), Counter()),
        evictions=tuple(evictions),
        eviction_totals=totals,
        devices=tuple(reports),
    )


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The counters of several devices together; the usage of KV is the mean.

    Args:
        stats: of the devices; one at least.
    """
    return EngineStats(
        num_running=_sums(each.num_running for each in stats),
        num_waiting=_sums(each.num_waiting for each in stats),
        num_preemptions=_sums(each.num_preemptions for each in stats),
        kv_usage=sum(each.kv_usage for each in stats) / len(stats),
        num_prefix_queried_tokens=_sums(each.num_prefix_queried_tokens for each in stats),
        num_prefix_hit_tokens=_sums(each.num_prefix_hit_tokens for each in stats),
        num_late_compilations=sum(each.num_late_compilations for each in stats),
    )


def _model(models: Sequence[ModelMemory]) -> ModelMemory:
    """A model on several devices."""
    return ModelMemory(
        status=_status([model.status for model in models]),
        bytes_by_kind=_sums(model.bytes_by_kind for model in models),
        num_running=sum(model.num_running for model in models),
        num_waiting=sum(model.num_waiting for model in models),
        kv_written_tokens=sum(model.kv_written_tokens for model in models),
        kv_written_bytes=sum(model.kv_written_bytes for model in models),
        kv_mapped_bytes=sum(model.kv_mapped_bytes for model in models),
        kv_wasted_bytes=sum(model.kv_wasted_bytes for model in models),
        kv_capacity=KVCapacity(
            max(model.kv_capacity.num_tokens for model in models),
            sum(model.kv_capacity.num_sequences for model in models),
        ),
    )


def _status(statuses: Sequence[ModelStatus]) -> ModelStatus:
    """What a model does on several devices: that of the device that has most of it, in the main."""
    first = min(statuses, key=lambda each: (_STATES.index(each.state), -each.resident_bytes))
    return replace(
        first,
        resident_bytes=max(each.resident_bytes for each in statuses),
        host_bytes=max(each.host_bytes for each in statuses),
        num_loads=sum(each.num_loads for each in statuses),
        loading_s=sum(each.loading_s for each in statuses),
        is_saving=any(each.is_saving for each in statuses),
        is_pinned=any(each.is_pinned for each in statuses),
        left_s=max((each.left_s for each in statuses if each.left_s is not None), default=None),
    )


def _sums(counts: Iterable[Mapping[_Key, _Number]]) -> dict[_Key, _Number]:
    """Sums by key."""
    sums: dict[_Key, _Number] = {}
    for each in counts:
        for key, count in each.items():
            sums[key] = sums[key] + count if key in sums else count
    return sums
