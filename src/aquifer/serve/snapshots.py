"""Snapshots of a running server: its memory and its counters at one moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aquifer import __version__
from aquifer.engine.reports import MemoryReport, ModelInfo, ModelStatus
from aquifer.memory.eviction_log import Eviction
from aquifer.sizes import format_size

SNAPSHOT_S = 1.0
"""Seconds from one snapshot to the next, while any page is open."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What a model has served since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    completions: int = 0  # that have ended


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a server at one moment."""

    time_s: float  # since the epoch
    report: MemoryReport
    counts: dict[str, RequestCounts]  # by model
    num_restarts: int  # of the engine process


class Shared(Generic[_T]):
    """A value that is made at most once in an interval, for all who ask for it.

    For one event loop.

    Args:
        make: makes it.
        fresh_s: how long a value is given to those who ask.
    """

    def __init__(self, make: Callable[[], Awaitable[_T]], fresh_s: float) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._making: asyncio.Future[_T] | None = None
        self._begun_s = 0.0

    async def get(self) -> _T:
        """Return the value, or raise what making it has raised."""
        making = self._making
        now_s = time.monotonic()
        if making is None or (making.done() and now_s - self._begun_s >= self._fresh_s):
            self._begun_s = now_s
            making = self._making = asyncio.ensure_future(self._make())
            making.add_done_callback(_retrieve)
        # It is made for others too, so it goes on if this caller is cancelled.
        return await asyncio.shield(making)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at an exception, which asyncio logs where nothing waits for it any more."""
    if not done.cancelled():
        done.exception()


def snapshot_dict(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as `GET /events` sends it."""
    return {
        "version": __version__,
        "time": round(snapshot.time_s, 3),
        "engine_restarts": snapshot.num_restarts,
        "counts": {
            name: {
                "prompt_tokens": counts.prompt_tokens,
                "generated_tokens": counts.generated_tokens,
                "completions": counts.completions,
            }
            for name, counts in snapshot.counts.items()
        },
        "memory": memory_dict(snapshot.report),
    }


def models_dict(report: MemoryReport, infos: Mapping[str, ModelInfo]) -> dict[str, Any]:
    """Models and what they do, as `GET /models` answers it.

    Args:
        report: of the engine.
        infos: descriptions of the models, by name.
    """
    return {
        "models": [
            model_dict(name, report, info) for name, info in infos.items() if name in report.models
        ]
    }


def model_dict(name: str, report: MemoryReport, info: ModelInfo) -> dict[str, Any]:
    """One of them."""
    model = report.models[name]
    status = model.status
    return {
        "name": name,
        "path": info.path,
        "status": status.state.value,
        "error": status.error,
        **_sizes(
            weights_total=status.weight_bytes,
            weights_resident=status.resident_bytes,
            weights_shared=status.shared_bytes,
            weights_in_host_cache=status.host_bytes,
        ),
        "loads": status.num_loads,
        "loading_seconds": status.loading_s,
        **_keeping(status),
        "requests_running": model.num_running,
        "requests_waiting": model.num_waiting,
        **_by_device(report, lambda of_device: model_dict(name, of_device, info)),
    }


def memory_dict(report: MemoryReport) -> dict[str, Any]:
    """A memory report as `GET /memory` answers it."""
    used_bytes = report.budget_bytes - report.free_bytes
    return {
        "device": report.device,
        **_sizes(
            page=report.page_bytes,
            budget=report.budget_bytes,
            used=used_bytes,
            overhead=report.overhead_bytes,
            free=report.free_bytes,
            idle=report.idle_bytes,
            retired=report.retired_bytes,
            process_resident=report.process_resident_bytes,
            host_cache=report.host_cache_bytes,
            host_cache_budget=report.host_cache_budget_bytes,
        ),
        "mapped_pages": report.mapped_pages,
        "free_pages": report.free_pages,
        "page_calls": {
            "loop": report.loop_page_calls,
            "background": report.background_page_calls,
        },
        "requests_running": sum(model.num_running for model in report.models.values()),
        "requests_waiting": sum(model.num_waiting for model in report.models.values()),
        "models": {
            name: {
                "status": model.status.state.value,
                "error": model.status.error,
                **_keeping(model.status),
                **_sizes(
                    weights_total=model.status.weight_bytes,
                    weights_resident=model.status.resident_bytes,
                    weights_shared=model.status.shared_bytes,
                    weights_in_host_cache=model.status.host_bytes,
                ),
                **_sizes(**{kind.value: n for kind, n in model.bytes_by_kind.items()}),
                **_sizes(
                    kv_written=model.kv_written_bytes,
                    kv_mapped=model.kv_mapped_bytes,
                    kv_wasted=model.kv_wasted_bytes,
                ),
                "kv_written_tokens": model.kv_written_tokens,
                "kv_capacity_tokens": model.kv_capacity.num_tokens,
                "max_concurrency": round(model.kv_capacity.num_sequences, 2),
                "requests_running": model.num_running,
                "requests_waiting": model.num_waiting,
            }
            for name, model in report.models.items()
        },
        "eviction_totals": [
            {
                "loser_model": loser.model,
                "loser_kind": loser.kind.value,
                "evictions": totals.num_evictions,
                **_sizes(evicted=totals.num_bytes),
                "regret_expected_seconds": totals.expected_s,
                "regret_paid_seconds": totals.paid_s,
            }
            for loser, totals in report.eviction_totals.items()
        ],
        "evictions": [_eviction_dict(entry) for entry in reversed(report.evictions)],
        **_by_device(report, memory_dict),
    }


def _by_device(
    report: MemoryReport, answer: Callable[[MemoryReport], dict[str, Any]]
) -> dict[str, Any]:
    """The same answer for each device, where there are several."""
    if not report.devices:
        return {}
    return {"devices": {of_device.device: answer(of_device) for of_device in report.devices}}


def _eviction_dict(entry: Eviction) -> dict[str, Any]:
    return {
        "time": round(entry.time_s, 3),
        "clock_seconds": round(entry.clock_s, 3),
        "loser_model": entry.loser.model,
        "loser_kind": entry.loser.kind.value,
        "asker_model": entry.asker.model,
        "asker_kind": entry.asker.kind.value,
        "items": entry.num_items,
        **_sizes(evicted=entry.num_bytes),
        "regret_expected_seconds": entry.expected_s,
        "regret_paid_seconds": entry.paid_s,
        "items_restored": entry.num_restored,
    }


def _keeping(status: ModelStatus) -> dict[str, Any]:
    """How long a model's weights stay."""
    return {
        "pinned": status.is_pinned,
        "keep_alive_seconds": status.keep_alive_s,
        "seconds_left": None if status.left_s is None else round(status.left_s, 3),
    }


def _sizes(**num_bytes: int) -> dict[str, int | str]:
    """Return each quantity twice: `name_bytes` as a number, `name` human-readable."""
    sizes: dict[str, int | str] = {}
    for name, value in num_bytes.items():
        sizes[f"{name}_bytes"] = value
        sizes[name] = format_size(value)
    return sizes
