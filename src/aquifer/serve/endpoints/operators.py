"""Endpoints for operators: health, version, metrics and memory."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST

from aquifer import __version__
from aquifer.engine.reports import MemoryReport
from aquifer.memory.eviction_log import Eviction
from aquifer.serve.http import response_to
from aquifer.serve.service import Client, Served
from aquifer.sizes import format_size


async def health(client: Client) -> Response:
    """Return 200 while requests are accepted, else 503 with the reason."""
    reason = client.unavailable
    return Response(status_code=200) if reason is None else response_to(reason)


async def version() -> dict[str, str]:
    """Return Aquifer's version."""
    return {"version": __version__}


async def metrics(service: Served) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(await service.backend.metrics(), media_type=CONTENT_TYPE_LATEST)


async def memory(service: Served) -> dict[str, Any]:
    """Return the breakdown of the pool's budget, in bytes and human-readable."""
    return _memory_dict(await service.backend.memory())


def _memory_dict(report: MemoryReport) -> dict[str, Any]:
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
        ),
        "mapped_pages": report.mapped_pages,
        "free_pages": report.free_pages,
        "requests_running": sum(model.num_running for model in report.models.values()),
        "requests_waiting": sum(model.num_waiting for model in report.models.values()),
        "models": {
            name: {
                "status": model.status.state.value,
                "error": model.status.error,
                **_sizes(weights_total=model.status.weight_bytes),
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
        "evictions": [_eviction_dict(entry) for entry in reversed(report.evictions)],
    }


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


def _sizes(**num_bytes: int) -> dict[str, int | str]:
    """Return each quantity twice: `name_bytes` as a number, `name` human-readable."""
    sizes: dict[str, int | str] = {}
    for name, value in num_bytes.items():
        sizes[f"{name}_bytes"] = value
        sizes[name] = format_size(value)
    return sizes
