"""Snapshots of the server as server-sent events, for the pages that are open."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from aquifer.errors import EngineError, UnavailableError
from aquifer.serve.backend import Backend
from aquifer.serve.snapshots import SNAPSHOT_S, Shared, snapshot_dict

MOST_VIEWERS = 64
"""Pages of a server that may be open at once."""
_RETRY_S = 10


class Feed:
    """The events of a web process: a snapshot each second, for as long as any page is open.

    A snapshot is made and written as JSON once, however many pages show it.

    Args:
        backend: the rest of the server.
        num_processes: web processes of the server, which share the number of pages.
    """

    def __init__(self, backend: Backend, num_processes: int = 1) -> None:
        self._backend = backend
        self._most_viewers = max(MOST_VIEWERS // num_processes, 1)
        self._num_viewers = 0
        self._event = Shared(self._make_event, 0.9 * SNAPSHOT_S)
        self._closed = asyncio.Event()

    def join(self) -> None:
        """Count a viewer, until `leave`.

        Raises:
            UnavailableError: there are too many.
        """
        if self._num_viewers >= self._most_viewers:
            raise UnavailableError(
                f"{self._num_viewers} pages or other readers of /events are connected, which is "
                "the most that this web process serves; close one of them",
                _RETRY_S,
            )
        self._num_viewers += 1

    def leave(self) -> None:
        """Count a viewer no more."""
        self._num_viewers -= 1

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events for one viewer, until `close`. Those it is too slow for are left out."""
        while not self._closed.is_set():
            yield await self._event.get()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), SNAPSHOT_S)

    def close(self) -> None:
        """End the streams of all viewers."""
        self._closed.set()

    async def _make_event(self) -> bytes:
        """The next event: a snapshot, or why there is none."""
        try:
            content = snapshot_dict(await self._backend.snapshot())
        except EngineError as error:
            content = {"error": {"message": str(error)}}
        # A path of an error message may have bytes that are no UTF-8.
        return b"data: " + json.dumps(content).encode("ascii") + b"\n\n"
