"""Server life cycle: start, run and stop the engine process and the HTTP half."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from aquifer.config import EngineConfig
from aquifer.engine.reports import LoadProgress
from aquifer.errors import ConfigError
from aquifer.garbage import collect_less, collect_nothing
from aquifer.serve.client import EngineClient
from aquifer.serve.config import BACKLOG, LAST_BYTES_S, ServerConfig
from aquifer.serve.logs import configure_logging
from aquifer.serve.process import STOP_SIGNALS, OpenEngine, open_engine

if TYPE_CHECKING:
    from aquifer.serve.web import Web


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_progress: Callable[[LoadProgress], None],
    on_ready: Callable[[str], None],
    on_listening: Callable[[str], None] = lambda _: None,
    open_it: OpenEngine = open_engine,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends everything at once.

    Connections are accepted from the start. Until the models are loaded, requests are answered with
    503.

    Args:
        engine: options of the engine, with the models to serve.
        server: options of the HTTP server.
        on_progress: called with the progress of loading.
        on_ready: called with the server's URL, once it accepts requests.
        on_listening: called with the server's URL, before anything is loaded.
        open_it: opens the engine in its process.

    Raises:
        ConfigError: an option or a checkpoint cannot be used.
        EngineError: the engine could not start.
    """
    collect_nothing()
    configure_logging(server.log_level)
    with _listen(server.host, server.port) as listener:
        url = _url(server.host, listener.getsockname()[1])

        on_listening(url)

        def ready() -> None:
            on_ready(url)

        asyncio.run(_Server(engine, server, listener, open_it).run(on_progress, ready))


class _Server:
    """One run of a server."""

    def __init__(
        self,
        engine: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        open_it: OpenEngine,
    ) -> None:
        self._engine = engine
        self._config = config
        self._listener = listener
        self._client = EngineClient(engine, open_it, config.log_level)
        self._stopping = asyncio.Event()

    async def run(
        self, on_progress: Callable[[LoadProgress], None], on_ready: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        self._client.start()
        from aquifer.serve import web as http  # while the engine process imports its own half

        web = http.Web(self._client, self._engine, self._config)
        stopping = asyncio.create_task(self._stopping.wait())
        serving = asyncio.create_task(web.run(self._listener))
        opening = asyncio.create_task(self._open(web, on_progress))
        try:
            await asyncio.wait({opening, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                collect_less()
                on_ready()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            web.stop()  # accept no more; let running requests finish
            stopping.cancel()
            opening.cancel()
            await self._client.stop(self._config.shutdown_timeout_s)
            await serving

    async def _open(self, web: Web, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the tokenizers while the engine process loads the weights."""
        texts = await web.load_texts()
        await web.open(texts, await self._client.ready(on_progress))

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._exit()
        self._stopping.set()
        # Whatever still runs then, in this thread or another one, ends with the process.
        deadline = threading.Timer(self._config.shutdown_timeout_s + LAST_BYTES_S, self._exit)
        deadline.daemon = True
        deadline.start()

    def _exit(self) -> NoReturn:
        self._client.kill()
        os._exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """Listen, so that a second server on the same port fails before it loads anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"host {host!r} is not an address of this machine ({error}); use one such as "
            "127.0.0.1 or 0.0.0.0"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
