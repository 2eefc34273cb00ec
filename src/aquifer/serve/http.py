"""HTTP layer: errors in OpenAI's form, API keys, client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import sys
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aquifer.errors import (
    EngineError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from aquifer.serve.chunked import CHUNKS, ChunkWriter
from aquifer.serve.protocol.responses import ErrorInfo, ErrorResponse

_EVENTS_AT_ONCE = 4
"""Events that a stream may write before it lets the event loop run. Only the loop reports a broken
connection, and asyncio logs a warning for the sixth write to one: these events and the headers, or
the end of the response, are five."""

_CLIENT_CLOSED_REQUEST = 499  # status for logs; the client has disconnected

_KEY_NAME = "aquifer.key_name"  # in a request's scope

_T = TypeVar("_T")


# ---- errors


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return an error response in the form that OpenAI's clients expect."""
    # A client's text may have lone surrogates, which JSON can express and UTF-8 cannot.
    message = message.encode("utf-8", "replace").decode()
    param = param and param.encode("utf-8", "replace").decode()
    body = ErrorResponse(
        error=ErrorInfo(message=message, type=_error_type(status), param=param, code=code)
    )
    return Response(body.model_dump_json(), status, headers, "application/json")


def response_to(error: RequestError | EngineError) -> Response:
    """Map an exception to an HTTP response."""
    if isinstance(error, UnavailableError):
        retry_s = error.retry_after_s
        headers = None if retry_s is None else {"Retry-After": str(retry_s)}
        return error_response(503, error.message, code="unavailable", headers=headers)
    if isinstance(error, EngineError):
        return error_response(503, str(error), code="engine_error")
    if isinstance(error, QueueFullError):
        return error_response(
            429, error.message, error.param, error.code, headers={"Retry-After": "1"}
        )
    status = 404 if isinstance(error, UnknownModelError) else 400
    return error_response(status, error.message, error.param, error.code)


def json_response(body: BaseModel) -> Response:
    """Return a response with `body` as JSON."""
    return Response(body.model_dump_json(), media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that give every error of the app OpenAI's form."""

    @app.exception_handler(RequestError)
    @app.exception_handler(EngineError)
    async def own(_: Request, error: RequestError | EngineError) -> Response:
        return response_to(error)

    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
        code = "request_too_large" if error.status_code == 413 else None
        return error_response(
            error.status_code, message, code=code, headers=dict(error.headers or {})
        )

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:
        # Starlette raises it again after this, so that it is logged.
        return error_response(500, "internal error; see the server's log")


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


# ---- middleware


class ApiKeyMiddleware:
    """Middleware that requires a valid bearer key; it notes in the scope which one was sent.

    Args:
        app: the wrapped application.
        api_keys: the valid keys.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Sequence[str]) -> None:
        self._app = app
        self._names = {key.encode(): name_of_key(key) for key in api_keys}
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            sent = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
            # All keys are compared, so that the time does not reveal which one matched.
            names = [n for key, n in self._names.items() if hmac.compare_digest(sent, key)]
            if not names:
                response = error_response(
                    401,
                    "wrong or missing API key; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await response(scope, receive, send)
                return
            scope[_KEY_NAME] = names[0]
        await self._app(scope, receive, send)


def key_name_of(request: Request) -> str | None:
    """The name of the API key that a request was sent with; None if the server has no keys."""
    name: str | None = request.scope.get(_KEY_NAME)
    return name


def name_of_key(key: str) -> str:
    """A hash of an API key, for places where the key itself must not be stored."""
    return hashlib.sha256(key.encode()).hexdigest()


# ---- client disconnects


def begin_now(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Run work in a task, of which the first part runs before this returns.

    A task otherwise begins after all others that are ready: of many requests that arrive together,
    none would be sent to the engine before all have been parsed, and a GPU would idle meanwhile.
    Python 3.11 has no such tasks; there it begins in its turn.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.create_task(work)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`, which is cancelled at once if the client disconnects.

    Pre-condition: the body has been read, so that only a disconnect can still arrive.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    working = begin_now(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventShortcut:
    """Writes events of a stream that waits for its next ones, without waking its task.

    It is closed until the stream begins, and where the server cannot write this way.
    """

    def __init__(self) -> None:
        self._writer: ChunkWriter | None = None

    @property
    def is_open(self) -> bool:
        """Whether events may be written now."""
        return self._writer is not None and self._writer.can_write_chunk

    def write(self, events: bytes) -> None:
        """Write events. Pre-condition: `is_open`."""
        assert self._writer is not None
        self._writer.write_chunk(events)

    @contextlib.contextmanager
    def of(self, scope: Scope) -> Iterator[None]:
        """Use the connection of a request within this context."""
        self._writer = scope.get("extensions", {}).get(CHUNKS, {}).get("protocol")
        try:
            yield
        finally:
            self._writer = None


class EventStream(Response):
    """Stream of server-sent events; it closes their source when the client disconnects.

    Args:
        events: the events, including their framing.
        resources: closed with the stream, started or not.
        shortcut: is open while the stream waits for its next events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        resources: AsyncExitStack,
        shortcut: EventShortcut | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources
        self._shortcut = shortcut or EventShortcut()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they arrive."""
        async with self._resources, aclosing(self._events):
            with contextlib.suppress(ClientDisconnect), self._shortcut.of(scope):
                await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        num_sent = 0
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            num_sent += 1
            if num_sent % _EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
