"""Streams of the outputs of requests, from the client of the engine process to endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.errors import AquiferError


class TokenStream(AsyncIterator[TokenOutput]):
    """Stream of the outputs of one or several requests, until all completions have ended.

    Closing it aborts unfinished requests.

    Args:
        requests: the requests.
        abort: aborts one of them by its id, or with an index one of its completions.
    """

    def __init__(self, requests: Sequence[Request], abort: Callable[..., None]) -> None:
        self._abort = abort
        self._open = {request.request_id: indexes_of(request) for request in requests}
        self._arrived: asyncio.Queue[TokenOutput | AquiferError] = asyncio.Queue()

    async def __anext__(self) -> TokenOutput:
        while self._open:
            item = await self._arrived.get()
            if isinstance(item, AquiferError):
                raise item
            indexes = self._open.get(item.request_id)
            if indexes is None or item.index not in indexes:
                continue  # it was in flight when the completion was aborted
            if item.finish_reason is not None:
                indexes.discard(item.index)
                if not indexes or item.finish_reason == "error":
                    del self._open[item.request_id]
            return item
        raise StopAsyncIteration

    def put(self, item: TokenOutput | AquiferError) -> None:
        """Add an output, or an error that ends the whole stream."""
        self._arrived.put_nowait(item)

    def abort(self, request_id: str, index: int) -> None:
        """Abort one completion; the stream yields no more of its outputs."""
        indexes = self._open.get(request_id)
        if indexes is not None and index in indexes:
            indexes.discard(index)
            if not indexes:
                del self._open[request_id]
            self._abort(request_id, index)

    async def aclose(self) -> None:
        """Abort every request that is not finished."""
        for request_id in sorted(self._open):
            del self._open[request_id]
            self._abort(request_id)


def indexes_of(request: Request) -> set[int]:
    """Indexes of the completions that the engine outputs."""
    return set(range(request.params.num_completions))
