"""Server life cycle: start, run and stop the engine processes and the web processes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from aquifer.config import EngineConfig
from aquifer.engine.reports import LoadProgress
from aquifer.errors import ConfigError
from aquifer.garbage import collect_less, collect_nothing
from aquifer.options import default_of
from aquifer.serve.backend import WebSide
from aquifer.serve.config import BACKLOG, LAST_BYTES_S, ServerConfig
from aquifer.serve.fleet import Fleet, LocalFleet
from aquifer.serve.hub import Hub
from aquifer.serve.logs import configure_logging
from aquifer.serve.pipe import STOP_SIGNALS
from aquifer.serve.start_times import StartTimes
from aquifer.serve.web_processes import WebProcesses

_log = logging.getLogger(__name__)


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_progress: Callable[[LoadProgress], None],
    on_ready: Callable[[str], None],
    on_listening: Callable[[str], None] = lambda _: None,
    fleet: Fleet | None = None,
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
        fleet: adds the engines; None for those of this machine's devices.

    Raises:
        ConfigError: an option or a checkpoint cannot be used.
        EngineError: the engine could not start.
    """
    if server.device_names and engine.device != default_of("device"):
        raise ConfigError("device and devices are both given; leave one of them out")
    collect_nothing()
    configure_logging(server.log_level)
    with _listen(server.host, server.port) as listener:
        url = _url(server.host, listener.getsockname()[1])

        on_listening(url)

        def ready() -> None:
            on_ready(url)

        fleet = fleet or LocalFleet(engine, server)
        asyncio.run(_Server(engine, server, listener, fleet).run(on_progress, ready))


class _Server:
    """One run of a server."""

    def __init__(
        self,
        engine: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        fleet: Fleet,
    ) -> None:
        self._engine = engine
        self._config = config
        self._listener = listener
        self._hub = Hub(engine, config, fleet)
        self._web: WebSide | None = None
        self._times = StartTimes()
        self._stopping = asyncio.Event()

    async def run(
        self, on_progress: Callable[[LoadProgress], None], on_ready: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        self._hub.start()
        try:
            self._web = web = self._web_side()
        except BaseException:
            self._hub.kill()  # the engine process would keep this one
            raise
        self._hub.attach(web)
        stopping = asyncio.create_task(self._stopping.wait())
        serving = asyncio.create_task(web.run())
        opening = asyncio.create_task(self._open(web, on_progress))
        try:
            await asyncio.wait({opening, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                collect_less()
                on_ready()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            opening.cancel()
            self._hub.refuse()
            await web.stop(self._config.shutdown_timeout_s)  # let running requests finish
            await self._hub.stop()
            await serving

    def _web_side(self) -> WebSide:
        """The web processes: this one, or others if several are wanted."""
        if self._config.api_server_count > 1:
            return WebProcesses(self._hub, self._engine, self._config, self._listener)
        try:
            from aquifer.serve.web import Web  # while the engine process imports its own half
        except ImportError as error:
            raise ConfigError(
                f"a package of the web side cannot be imported ({error}); install Aquifer again"
            ) from error
        return Web(self._hub, self._engine, self._config, self._listener)

    async def _open(self, web: WebSide, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the tokenizers while the engine process loads the weights."""

        def note(progress: LoadProgress) -> None:
            self._times.update(progress)
            on_progress(progress)

        await web.prepare()
        models = await self._hub.ready(note)
        await web.open(models)
        await self._hub.log(models)
        _log.info(self._times.summary())

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._exit()
        self._stopping.set()
        # Whatever still runs then, in this thread or another one, ends with the process.
        deadline = threading.Timer(self._config.shutdown_timeout_s + LAST_BYTES_S, self._exit)
        deadline.daemon = True
        deadline.start()

    def _exit(self) -> NoReturn:
        self._hub.kill()
        if self._web is not None:
            self._web.kill()
        os._exit(1)


def _listen(host: str, port: int) -> socket.socket:
    """Listen, so that a second server on the same port fails before it loads anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # or no host name at all
        raise _not_of_this_machine(host, error) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _not_of_this_machine(host, error.strerror) from error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def _not_of_this_machine(host: str, reason: object) -> ConfigError:
    return ConfigError(
        f"host {host!r} is not an address of this machine ({reason}); use one such as "
        "127.0.0.1 or 0.0.0.0"
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
