"""Endpoints of the page to look at: the page itself, and the events that it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path

from fastapi import Response

from aquifer.serve.http import EventStream
from aquifer.serve.service import Served

_FILE = Path(__file__).parents[1] / "page.html"


async def page() -> Response:
    """Return the page: one HTML file, which shows what /events sends."""
    content, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(content, media_type="text/html", headers=headers)


async def events(service: Served) -> Response:
    """Stream a snapshot of memory, evictions and counters as server-sent events, each second."""
    service.feed.join()
    resources = AsyncExitStack()
    resources.callback(service.feed.leave)
    return EventStream(service.feed.events(), resources)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and its content security policy: its own script and style, and nothing else."""
    content = _FILE.read_bytes()
    (style,) = re.findall(rb"<style>(.*?)</style>", content, re.DOTALL)
    (script,) = re.findall(rb"<script>(.*?)</script>", content, re.DOTALL)
    rules = (
        "default-src 'none'",
        f"style-src {_source(style)}",
        f"script-src {_source(script)}",
        "img-src data:",  # its icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return content, "; ".join(rules)


def _source(content: bytes) -> str:
    """The name of an inline script or style in a content security policy."""
    digest = hashlib.sha256(content).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
