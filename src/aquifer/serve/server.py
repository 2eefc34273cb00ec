"""Server life cycle: start, run and stop the engine process and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from aquifer.config import EngineConfig, aliases_of, check_fields
from aquifer.engine.reports import LoadProgress
from aquifer.errors import ConfigError, EngineError
from aquifer.garbage import collect_less
from aquifer.options import default_of
from aquifer.serve.app import create_app
from aquifer.serve.client import EngineClient
from aquifer.serve.cors import ANY, CorsPolicy, as_browsers_send_it, comma_separated
from aquifer.serve.limits import MAX_CONNECTIONS, TimedProtocol, allow_connections
from aquifer.serve.logs import configure_logging
from aquifer.serve.models import TextModel
from aquifer.serve.process import STOP_SIGNALS, OpenEngine, open_engine
from aquifer.serve.request_log import RequestLog
from aquifer.serve.service import ServedModel, Service
from aquifer.serve.stats_log import StatsLog, log_start

_BACKLOG = 2048
_KEEP_ALIVE_S = 60  # longer than most clients keep a connection, so that they close it first
_LAST_BYTES_S = 5  # after the last request ended, for its response to reach a slow client


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The options of the HTTP side; `OPTIONS` describes them.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = default_of("host")
    port: int = default_of("port")
    api_key: str | None = default_of("api_key")
    api_key_for_all: bool = default_of("api_key_for_all")
    prefix_cache_salt_by_key: bool | None = default_of("prefix_cache_salt_by_key")
    chat_template: str | None = default_of("chat_template")
    trust_request_chat_template: bool = default_of("trust_request_chat_template")
    allowed_origins: str | None = default_of("allowed_origins")
    allowed_methods: str | None = default_of("allowed_methods")
    allowed_headers: str | None = default_of("allowed_headers")
    allow_credentials: bool = default_of("allow_credentials")
    enable_tokenizer_info_endpoint: bool = default_of("enable_tokenizer_info_endpoint")
    log_level: str = default_of("log_level")
    disable_log_stats: bool = default_of("disable_log_stats")
    enable_log_requests: bool = default_of("enable_log_requests")
    max_log_len: int | None = default_of("max_log_len")
    shutdown_timeout_s: float = default_of("shutdown_timeout")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.api_key is not None and not self.api_keys:
            raise ConfigError("api_key contains no key; leave it out to require none")
        self._check_cors()
        if self.enable_log_requests and self.log_level in ("warning", "error"):
            raise ConfigError(
                f"enable_log_requests logs at level info, and log_level is {self.log_level}; set "
                "log_level to info or debug"
            )
        if self.max_log_len is not None and not self.enable_log_requests:
            raise ConfigError("max_log_len needs enable_log_requests")

    def _check_cors(self) -> None:
        if self.cors is not None:
            return
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) != default_of(name):
                raise ConfigError(f"{name} needs allowed_origins, such as https://chat.example.org")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The valid API keys; empty if no key is required."""
        return comma_separated(self.api_key or "")

    @property
    def cors(self) -> CorsPolicy | None:
        """What web pages of other origins may do; None for nothing."""
        if self.allowed_origins is None:
            return None
        origins = tuple(map(as_browsers_send_it, comma_separated(self.allowed_origins)))
        if not origins:
            raise ConfigError("allowed_origins contains no origin; leave it out to allow none")
        methods = comma_separated((self.allowed_methods or ANY).upper())
        headers = comma_separated(self.allowed_headers or ANY)
        return CorsPolicy(origins, methods, headers, self.allow_credentials)

    @property
    def request_log(self) -> RequestLog | None:
        """The log of requests; None if they are not logged."""
        return RequestLog(self.max_log_len) if self.enable_log_requests else None

    @property
    def salts_by_key(self) -> bool:
        """Whether clients with different API keys share no retained prefixes."""
        if self.prefix_cache_salt_by_key is None:
            return len(self.api_keys) > 1
        return self.prefix_cache_salt_by_key


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
    configure_logging(server.log_level)
    allow_connections()
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
        app = create_app(
            self._client,
            self._config.api_keys,
            guards_all=self._config.api_key_for_all,
            cors=self._config.cors,
            has_tokenizer_info=self._config.enable_tokenizer_info_endpoint,
        )
        uvicorn_server = self._uvicorn(app)
        stopping = asyncio.create_task(self._stopping.wait())
        serving = asyncio.create_task(uvicorn_server.serve(sockets=[self._listener]))
        opening = asyncio.create_task(self._open(on_progress))
        logging_stats: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({opening, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                aliases = aliases_of(self._engine.models)
                app.state.service = service = Service(
                    self._client,
                    opening.result(),
                    aliases,
                    trusts_templates=self._config.trust_request_chat_template,
                    salts_by_key=self._config.salts_by_key,
                    shares_by_key=len(self._config.api_keys) > 1,
                    request_log=self._config.request_log,
                )
                device = await self._log_start(opening.result(), aliases)
                if not self._config.disable_log_stats:
                    stats_log = StatsLog(service.metrics, device)
                    logging_stats = asyncio.create_task(stats_log.run(lambda: self._client.stats))
                collect_less()
                on_ready()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                service.close()
        finally:
            uvicorn_server.should_exit = True  # accept no more; let running requests finish
            stopping.cancel()
            opening.cancel()
            if logging_stats is not None:
                logging_stats.cancel()
            await self._client.stop(self._config.shutdown_timeout_s)
            await serving

    async def _open(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ServedModel]:
        """Load the tokenizers while the engine process loads the weights."""
        texts = await asyncio.to_thread(
            lambda: [
                TextModel.load(spec, self._config.chat_template) for spec in self._engine.models
            ]
        )
        infos = await self._client.ready(on_progress)
        return {text.name: ServedModel(text, infos[text.name]) for text in texts}

    async def _log_start(
        self, served: Mapping[str, ServedModel], aliases: Mapping[str, str]
    ) -> str | None:
        """Log what is served; return the device, or None if the engine does not say it."""
        try:
            report = await self._client.memory()
        except EngineError:
            return None  # the engine process has died, which the client logs
        log_start([model.info for model in served.values()], aliases, report)
        return report.device

    def _uvicorn(self, app: FastAPI) -> uvicorn.Server:
        return _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                http=TimedProtocol,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(self._config.shutdown_timeout_s) + _LAST_BYTES_S,
            )
        )

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._exit()
        self._stopping.set()
        # Whatever still runs then, in this thread or another one, ends with the process.
        deadline = threading.Timer(self._config.shutdown_timeout_s + _LAST_BYTES_S, self._exit)
        deadline.daemon = True
        deadline.start()

    def _exit(self) -> NoReturn:
        self._client.kill()
        os._exit(1)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: a shutdown stops the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
