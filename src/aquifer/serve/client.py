"""Client of the engine process, for the web process's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from aquifer.config import EngineConfig
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import AquiferError, ConfigError, EngineError
from aquifer.serve.link import EngineLink
from aquifer.serve.messages import (
    Abort,
    Add,
    Close,
    FromEngine,
    GetMemory,
    Memory,
    OpenFailed,
    Pin,
    Pinned,
    Ready,
    Step,
    Unpin,
)
from aquifer.serve.process import OpenEngine, open_engine


class _State(Enum):
    NEW = auto()
    LOADING = auto()
    SERVING = auto()
    STOPPING = auto()
    DEAD = auto()


class TokenStream(AsyncIterator[TokenOutput]):
    """Stream of the outputs of one or several requests, until all completions have ended.

    Closing it aborts unfinished requests.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._open = {request.request_id: _indexes_of(request) for request in requests}
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
            self._client.abort(request_id, index)

    async def aclose(self) -> None:
        """Abort every request that is not finished."""
        for request_id in sorted(self._open):
            del self._open[request_id]
            self._client.abort(request_id)


@dataclass(frozen=True, slots=True)
class _Route:
    """Destination of a request's outputs, kept until the last one has arrived."""

    stream: TokenStream
    indexes: set[int]  # completions that have not received their last output


class EngineClient:
    """Client of the engine process, which it starts and stops; for one event loop.

    Args:
        config: the engine's options.
        open_it: opens the engine, in the engine process.
    """

    def __init__(self, config: EngineConfig, open_it: OpenEngine = open_engine) -> None:
        self._config = config
        self._link = EngineLink(config, open_it)
        self._state = _State.NEW
        self._routes: dict[str, _Route] = {}
        self._waiters: deque[asyncio.Future[Any]] = deque()
        self._stats: EngineStats | None = None

    @property
    def max_prompts(self) -> int:
        """Maximum number of requests added at once: they all wait for the next step."""
        return self._config.max_num_waiting

    @property
    def salts_by_key(self) -> bool:
        """Whether clients with different API keys may not share retained prefixes."""
        return self._config.prefix_cache_salt_by_key

    @property
    def is_serving(self) -> bool:
        """Whether requests are accepted."""
        return self._state is _State.SERVING

    @property
    def is_dead(self) -> bool:
        """Whether the engine process has died."""
        return self._state is _State.DEAD

    @property
    def stats(self) -> EngineStats:
        """The engine's latest counters. Pre-condition: it became ready."""
        assert self._stats is not None
        return self._stats

    def start(self) -> None:
        """Start the engine process; `ready` then waits for its models."""
        assert self._state is _State.NEW
        self._state = _State.LOADING
        self._loop = asyncio.get_running_loop()
        self._died = asyncio.Event()
        self._opened: asyncio.Future[dict[str, ModelInfo]] = self._loop.create_future()
        self._on_progress: Callable[[LoadProgress], None] | None = None
        self._link.start(self._loop, self._handle)

    async def ready(
        self, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> dict[str, ModelInfo]:
        """Wait until all models are loaded; return their infos by served name.

        Raises:
            ConfigError: an option or a checkpoint cannot be used.
            EngineError: the driver refused a call, or the process died.
        """
        self._on_progress = on_progress
        return await self._opened

    def generate(self, requests: Sequence[Request]) -> TokenStream:
        """Run requests; return the stream of their outputs, which the caller must close.

        If one request is refused, the whole stream ends with that error.

        Raises:
            EngineError: the engine has stopped or is shutting down.
        """
        self._check_serving()
        stream = TokenStream(self, requests)
        for request in requests:
            self._routes[request.request_id] = _Route(stream, _indexes_of(request))
            self._link.send(Add(request))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request, or one completion of it; unknown ones are ignored."""
        route = self._routes.get(request_id)
        if route is None or (index is not None and index not in route.indexes):
            return
        self._end(request_id, route, index)
        self._link.send(Abort(request_id, index))

    async def memory(self) -> MemoryReport:
        """Ask the engine for its memory report, which includes the effect of all earlier aborts.

        Raises:
            EngineError: the engine has stopped.
        """
        report = await self._ask(GetMemory())
        assert isinstance(report, MemoryReport)
        return report

    async def pin(self, model: str, token_ids: list[int], salt: str | None) -> int:
        """Pin the KV of a prefix; return how many of its tokens are pinned.

        Raises:
            RequestError: it cannot be pinned.
            EngineError: the engine has stopped.
        """
        num_tokens = await self._ask(Pin(model, token_ids, salt))
        assert isinstance(num_tokens, int)
        return num_tokens

    async def unpin(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """Unpin the KV of a prefix.

        Raises:
            EngineError: the engine has stopped.
        """
        await self._ask(Unpin(model, token_ids, salt))

    async def died(self) -> None:
        """Wait until the engine process dies."""
        await self._died.wait()

    def kill(self) -> None:
        """Kill the engine process at once."""
        self._link.kill()

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, give running ones `timeout_s` to finish, end the rest, exit.

        When this returns, the engine process has exited and its memory is free.
        """
        if self._state is _State.SERVING:
            self._state = _State.STOPPING
            deadline = self._loop.time() + timeout_s
            while self._routes and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
            self._fail_everyone("the server shut down before the request finished")
            self._link.send(Close())
        elif self._state is _State.LOADING:
            self._state = _State.STOPPING
            self.kill()  # it reads no messages while it loads
        if self._state is not _State.NEW:
            await asyncio.to_thread(self._link.join)

    def _check_serving(self) -> None:
        if self._state is _State.SERVING:
            return
        if self._state is _State.STOPPING:
            raise EngineError("the server is shutting down")
        raise EngineError("the engine has stopped; restart the server")

    async def _ask(self, question: GetMemory | Pin | Unpin) -> Any:
        """Send a question and return the engine's answer; answers come in order."""
        self._check_serving()
        waiter: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(waiter)
        self._link.send(question)
        return await waiter

    def _answer(self, answer: object) -> None:
        waiter = self._waiters.popleft()
        if waiter.done():
            return  # the caller was cancelled
        if isinstance(answer, AquiferError):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)

    def _end(self, request_id: str, route: _Route, index: int | None) -> None:
        """Stop expecting outputs of a request, or of one completion."""
        if index is not None:
            route.indexes.discard(index)
        if index is None or not route.indexes:
            del self._routes[request_id]

    def _fail_everyone(self, why: str) -> None:
        routes, self._routes = self._routes, {}
        for request_id in routes:
            self._link.send(Abort(request_id))
        for stream in {route.stream for route in routes.values()}:
            stream.put(EngineError(why))
        while self._waiters:
            self._answer(EngineError(why))

    def _handle(self, message: FromEngine | None) -> None:
        match message:
            case Step(token_ids, outputs, refused, stats):
                self._stats = stats
                for request_id, error in refused.items():
                    if (route := self._routes.pop(request_id, None)) is not None:
                        route.stream.put(error)
                for request_id, token_id in token_ids.items():
                    self._deliver(TokenOutput(request_id, [token_id]))
                for output in outputs:
                    self._deliver(output)
            case Memory(answer) | Pinned(answer):
                self._answer(answer)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case Ready(models, stats):
                self._stats = stats
                self._state = _State.SERVING
                self._opened.set_result(models)
            case OpenFailed(text, is_config):
                self._opened.set_exception(ConfigError(text) if is_config else EngineError(text))
            case None:
                self._handle_end()

    def _deliver(self, output: TokenOutput) -> None:
        route = self._routes.get(output.request_id)
        if route is not None:
            if output.finish_reason is not None:
                is_error = output.finish_reason == "error"  # ends the whole request
                self._end(output.request_id, route, None if is_error else output.index)
            route.stream.put(output)

    def _handle_end(self) -> None:
        """Handle the end of the pipe: a regular stop, or the death of the process."""
        if self._state is not _State.STOPPING:
            self._state = _State.DEAD
            self._died.set()
            if not self._opened.done():
                self._opened.set_exception(EngineError("the engine process died while loading"))
        self._fail_everyone("the engine process died before the request finished")


def _indexes_of(request: Request) -> set[int]:
    """Indexes of the completions that the engine outputs."""
    return set(range(request.params.num_completions))
