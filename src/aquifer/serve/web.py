"""The HTTP half of a server: application, service, uvicorn.

Importing it takes a second and more, so it is imported while the engine process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping

import uvicorn
from starlette.types import ASGIApp

from aquifer.config import EngineConfig, aliases_of
from aquifer.engine.reports import ModelInfo
from aquifer.errors import EngineError
from aquifer.serve.app import create_app
from aquifer.serve.client import EngineClient
from aquifer.serve.config import BACKLOG, LAST_BYTES_S, ServerConfig
from aquifer.serve.limits import (
    ACCEPTED_AT_ONCE,
    MAX_CONNECTIONS,
    TimedProtocol,
    allow_connections,
)
from aquifer.serve.models import TextModel
from aquifer.serve.service import ServedModel, Service
from aquifer.serve.stats_log import StatsLog, log_start

_KEEP_ALIVE_S = 60  # longer than most clients keep a connection, so that they close it first


class Web:
    """Serves the API on a socket; until `open`, requests that need a model get status 503.

    Args:
        client: of the engine, ready or not.
        engine: options of the engine, with the models to serve.
        config: options of the HTTP side.
    """

    def __init__(self, client: EngineClient, engine: EngineConfig, config: ServerConfig) -> None:
        allow_connections()
        self._client = client
        self._engine = engine
        self._config = config
        self._app = create_app(
            client,
            config.api_keys,
            guards_all=config.api_key_for_all,
            cors=config.cors,
            has_tokenizer_info=config.enable_tokenizer_info_endpoint,
        )
        self._uvicorn = http_server(self._app, config.shutdown_timeout_s)
        self._service: Service | None = None
        self._logging: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve until `stop`, and then until running requests have ended."""
        await self._uvicorn.serve(sockets=[listener])

    def stop(self) -> None:
        """Accept no more requests."""
        self._uvicorn.should_exit = True
        if self._logging is not None:
            self._logging.cancel()
        if self._service is not None:
            self._service.close()

    async def load_texts(self) -> list[TextModel]:
        """Load the models' tokenizers and templates.

        Raises:
            ConfigError: one of them cannot be used.
        """
        template = self._config.chat_template
        return await asyncio.to_thread(
            lambda: [TextModel.load(spec, template) for spec in self._engine.models]
        )

    async def open(self, texts: list[TextModel], infos: Mapping[str, ModelInfo]) -> None:
        """Answer requests from now on.

        Args:
            texts: from `load_texts`.
            infos: the models that the engine has loaded, by served name.
        """
        served = {text.name: ServedModel(text, infos[text.name]) for text in texts}
        aliases = aliases_of(self._engine.models)
        service = Service(
            self._client,
            served,
            aliases,
            trusts_templates=self._config.trust_request_chat_template,
            salts_by_key=self._config.salts_by_key,
            shares_by_key=len(self._config.api_keys) > 1,
            request_log=self._config.request_log,
        )
        self._service = self._app.state.service = service
        try:
            report = await self._client.memory()
        except EngineError:
            device = None  # the engine process has died, which the client logs
        else:
            device = report.device
            log_start([model.info for model in served.values()], aliases, report)
        if not self._config.disable_log_stats:
            stats_log = StatsLog(service.metrics, device)
            self._logging = asyncio.create_task(stats_log.run(lambda: self._client.stats))


def http_server(app: ASGIApp, shutdown_timeout_s: float) -> uvicorn.Server:
    """The HTTP server of an application.

    Args:
        app: the application.
        shutdown_timeout_s: seconds that running requests have to end when it stops.
    """
    return _Uvicorn(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=TimedProtocol,
            backlog=ACCEPTED_AT_ONCE,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(shutdown_timeout_s) + LAST_BYTES_S,
        )
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: a shutdown stops the engine first.

    asyncio has one number for the connections that wait in the kernel, and for those that it
    accepts at once; here the former is larger.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
