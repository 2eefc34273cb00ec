"""A web process of several: serves HTTP, and asks the server's first process for all else."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Coroutine, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from aquifer.config import EngineConfig
from aquifer.engine.reports import MemoryReport, ModelInfo
from aquifer.errors import AquiferError, UnavailableError
from aquifer.garbage import collect_less, collect_nothing
from aquifer.process_name import name_process
from aquifer.serve.backend import WebSide
from aquifer.serve.config import ServerConfig
from aquifer.serve.logs import configure_logging
from aquifer.serve.messages import (
    Abort,
    Add,
    AddModel,
    Answer,
    Availability,
    GetRequestMetrics,
    ModelsChanged,
    ModelVerb,
    Open,
    Opened,
    Outputs,
    Prepared,
    Question,
    RemoveModel,
    RequestMetricFamilies,
    Stop,
    ToWeb,
)
from aquifer.serve.pipe import Pipe, ignore_stop_signals
from aquifer.serve.prefixes import PinnedPrefix
from aquifer.serve.questions import RETRY_S
from aquifer.serve.snapshots import Snapshot


def run_web_process(
    connection: Connection,
    listener: socket.socket,
    engine: EngineConfig,
    config: ServerConfig,
    process: int,
) -> None:
    """Run a web process until it is told to stop, or the first process is gone.

    Args:
        connection: this process's end of the pipe.
        listener: the socket, of which all web processes accept connections.
        engine: options of the engine, with the models to serve.
        config: options of the HTTP side.
        process: its serial number.
    """
    name_process("aquifer-web")
    collect_nothing()
    ignore_stop_signals()
    configure_logging(config.log_level)
    asyncio.run(_WebProcess(connection, listener, engine, config, process).run())


class RemoteHub:
    """The `Backend` of a web process: methods of the hub in the first process, over a pipe.

    For one event loop.

    Args:
        pipe: to the first process.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.availability = Availability(UnavailableError("the server is starting", RETRY_S))
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def send(self, message: Add | Abort) -> None:
        """Send a message to an engine process; a request that none accepts ends with an error."""
        self._pipe.send(message)

    async def memory(self) -> MemoryReport:
        """Ask the engine for its memory report, which includes the effect of all earlier aborts."""
        report = await self._ask("memory")
        assert isinstance(report, MemoryReport)
        return report

    async def metrics(self) -> bytes:
        """Return the metrics of the whole server in Prometheus's exposition format."""
        return bytes(await self._ask("metrics"))

    async def snapshot(self) -> Snapshot:
        """Return the state of the server, made at most once in `SNAPSHOT_S` for all who ask."""
        snapshot = await self._ask("snapshot")
        assert isinstance(snapshot, Snapshot)
        return snapshot

    async def pin(
        self,
        owner: str | None,
        client: str,
        model: str,
        token_ids: list[int],
        cache_salt: str | None,
    ) -> PinnedPrefix:
        """Pin the KV of a prefix, as `PinnedPrefixes.pin` does."""
        prefix = await self._ask("pin", owner, client, model, token_ids, cache_salt)
        assert isinstance(prefix, PinnedPrefix)
        return prefix

    async def unpin(self, owner: str | None, prefix_id: str) -> bool:
        """Unpin a prefix; return whether this owner had one with this id."""
        return bool(await self._ask("unpin", owner, prefix_id))

    async def prefixes(self, owner: str | None) -> list[PinnedPrefix]:
        """List this owner's pinned prefixes, oldest first."""
        return list(await self._ask("prefixes", owner))

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model, as `Engines.manage` does."""
        await self._ask("manage", verb, model)

    async def register(self, model: str) -> str:
        """Register a model, as `Hub.register` does."""
        return str(await self._ask("register", model))

    async def remove(self, name: str) -> None:
        """Remove a model, as `Hub.remove` does."""
        await self._ask("remove", name)

    def answer(self, answer: Answer) -> None:
        """Give a method the answer that it waits for."""
        waiter = self._questions.pop(answer.number)
        if waiter.done():
            return  # the caller was cancelled
        if answer.error is not None:
            waiter.set_exception(answer.error)
        else:
            waiter.set_result(answer.value)

    async def _ask(self, method: str, *args: object) -> Any:
        number = next(self._numbers)
        waiter = self._questions[number] = asyncio.get_running_loop().create_future()
        self._pipe.send(Question(number, method, args))
        return await waiter


class _WebProcess:
    """One run of a web process."""

    def __init__(
        self,
        connection: Connection,
        listener: socket.socket,
        engine: EngineConfig,
        config: ServerConfig,
        process: int,
    ) -> None:
        self._pipe = Pipe(connection, "aquifer-server")
        self._hub = RemoteHub(self._pipe)
        self._listener = listener
        self._engine = engine
        self._config = config
        self._process = process
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._timeout_s = 0.0  # that running requests have to end

    async def run(self) -> None:
        from aquifer.serve.web import Web

        web = Web(self._hub, self._engine, self._config, self._listener, self._process)
        self._pipe.start(asyncio.get_running_loop(), partial(self._handle, web))
        serving = asyncio.create_task(web.run())
        stopping = asyncio.create_task(self._stopping.wait())
        self._preparing = self._in_background(self._prepare(web))
        await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await web.stop(self._timeout_s)
        await serving
        self._pipe.finish_sending()

    def _handle(self, web: WebSide, message: ToWeb | None) -> None:
        match message:
            case Outputs():
                web.deliver(message)
            case Availability():
                self._hub.availability = message
            case Answer():
                self._hub.answer(message)
            case GetRequestMetrics():
                self._in_background(self._report(web))
            case Open(models):
                self._changing = self._in_background(self._open(web, models))
            case AddModel() | RemoveModel():
                self._changing = self._in_background(self._change(web, message, self._changing))
            case Stop(timeout_s):
                self._timeout_s = timeout_s
                self._stopping.set()
            case None:  # the first process is gone
                self._stopping.set()

    async def _prepare(self, web: WebSide) -> None:
        try:
            await web.prepare()
        except AquiferError as error:
            self._pipe.send(Prepared(error))
            self._stopping.set()
        else:
            self._pipe.send(Prepared())

    async def _open(self, web: WebSide, models: Mapping[str, ModelInfo]) -> None:
        await self._preparing
        if not self._stopping.is_set():
            await web.open(models)
            collect_less()
            self._pipe.send(Opened())

    async def _change(
        self, web: WebSide, message: AddModel | RemoveModel, before: asyncio.Task[None]
    ) -> None:
        """Add or remove a model, after what changes the models before."""
        await before
        if self._stopping.is_set():
            return
        try:
            if isinstance(message, RemoveModel):
                await web.remove(message.name)
            else:
                await web.add(message.spec, message.info)
        except AquiferError as error:
            self._pipe.send(ModelsChanged(error))
        else:
            self._pipe.send(ModelsChanged())

    async def _report(self, web: WebSide) -> None:
        for families in await web.request_metrics() or [[]]:
            self._pipe.send(RequestMetricFamilies(families))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
