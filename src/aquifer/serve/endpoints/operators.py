"""Endpoints for operators: health, version, metrics and memory."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST

from aquifer import __version__
from aquifer.serve.http import response_to
from aquifer.serve.service import Client, Served
from aquifer.serve.snapshots import memory_dict


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
    return memory_dict(await service.backend.memory())
