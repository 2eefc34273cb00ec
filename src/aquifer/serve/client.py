"""Client of the engine, for the event loop of a web process: its requests and their outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aquifer.engine.params import Request
from aquifer.errors import EngineError, UnavailableError
from aquifer.serve.backend import Backend
from aquifer.serve.keeper import SHUT_DOWN
from aquifer.serve.messages import Abort, Add, Outputs, first_number
from aquifer.serve.routes import Routes
from aquifer.serve.streams import Pacer, TokenStream
from aquifer.serve.supervisor import out_of_service

_DRAINED_S = 0.02  # how often to look whether all requests have ended


class EngineClient:
    """The running requests of one web process.

    For one event loop.

    Args:
        backend: the rest of the server.
        max_completions: maximum number of completions that are added at once for several prompts:
            they all wait for the next step.
        process: the web process's serial number.
    """

    def __init__(self, backend: Backend, max_completions: int, process: int) -> None:
        self.backend = backend
        self.max_completions = max_completions
        self._routes = Routes(first_number(process))
        self._pacer = Pacer()

    @property
    def unavailable(self) -> UnavailableError | None:
        """Why no requests are accepted, or None if they are."""
        return self.backend.availability.reason

    def generate(self, requests: Sequence[Request]) -> TokenStream:
        """Run requests; return the stream of their outputs, which the caller must close.

        If one request is refused, the whole stream ends with that error.

        Raises:
            UnavailableError: no requests are accepted, or none for this model.
        """
        availability = self.backend.availability
        if availability.reason is not None:
            raise availability.reason
        for request in requests:
            if (reason := availability.out_of_service.get(request.model)) is not None:
                raise out_of_service(request.model, reason)
        stream = TokenStream(requests, self.abort, self._pacer)
        for request in requests:
            self.backend.send(Add(request, self._routes.add(request, stream)))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request, or one completion of it; unknown ones are ignored."""
        if self._routes.end(request_id, index):
            self.backend.send(Abort(request_id, index))

    def deliver(self, outputs: Outputs) -> None:
        """Deliver outputs of the engine that have just arrived."""
        self._routes.deliver(outputs, time.monotonic())

    def lose(self, error: EngineError) -> None:
        """End all requests with an error."""
        for request_id in self._routes.fail(error):
            self.backend.send(Abort(request_id))

    async def drain(self, timeout_s: float) -> None:
        """Wait until all requests have ended; end those with an error that take longer."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._routes and loop.time() < deadline_s:
            await asyncio.sleep(_DRAINED_S)
        self.lose(EngineError(SHUT_DOWN))
