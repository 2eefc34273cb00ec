"""The HTTP half of a server: application, service, uvicorn.

Importing it takes half a second and more, so it is imported while the engine process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace

import uvicorn
from prometheus_client.core import Metric
from starlette.types import ASGIApp

from aquifer.config import EngineConfig, ModelSpec, aliases_of
from aquifer.engine.reports import ModelInfo
from aquifer.serve.app import create_app
from aquifer.serve.backend import Backend
from aquifer.serve.client import EngineClient
from aquifer.serve.config import BACKLOG, LAST_BYTES_S, ServerConfig
from aquifer.serve.limits import (
    ACCEPTED_AT_ONCE,
    MAX_CONNECTIONS,
    TimedProtocol,
    allow_connections,
)
from aquifer.serve.messages import Availability, Outputs
from aquifer.serve.models import TextModel
from aquifer.serve.service import ServedModel, Service
from aquifer.serve.templates import Templates

_KEEP_ALIVE_S = 60  # longer than most clients keep a connection, so that they close it first


class Web:
    """Serves the API on a socket; until `open`, requests that need a model get status 503.

    A `WebSide` of one web process.

    Args:
        backend: the rest of the server.
        engine: options of the engine, with the models to serve.
        config: options of the HTTP side.
        listener: the socket.
        process: this process's serial number.
    """

    def __init__(
        self,
        backend: Backend,
        engine: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        process: int = 0,
    ) -> None:
        allow_connections()
        self._engine = engine
        self._config = config
        self._listener = listener
        self._client = EngineClient(backend, engine.max_num_waiting, process)
        self._app = create_app(
            self._client,
            config.api_keys,
            guards_all=config.api_key_for_all,
            cors=config.cors,
            has_tokenizer_info=config.enable_tokenizer_info_endpoint,
        )
        self._uvicorn = http_server(self._app, config.shutdown_timeout_s)
        self._templates = Templates()
        self._texts: list[TextModel] = []
        self._service: Service | None = None

    async def run(self) -> None:
        """Serve until `stop`, and then until running requests have ended."""
        await self._uvicorn.serve(sockets=[self._listener])

    async def prepare(self) -> None:
        """Load the models' tokenizers and templates.

        Raises:
            ConfigError: one of them cannot be used.
        """
        template = self._config.chat_template
        self._texts = await asyncio.to_thread(
            lambda: [TextModel.load(spec, template) for spec in self._engine.models]
        )
        if any(text.has_chat_template for text in self._texts):
            self._templates.start()

    async def open(self, models: Mapping[str, ModelInfo]) -> None:
        """Answer requests for these models, by served name. Pre-condition: `prepare`."""
        served = {text.name: ServedModel(text, models[text.name]) for text in self._texts}
        self._service = self._app.state.service = Service(
            self._client,
            served,
            aliases_of(self._engine.models),
            self._templates,
            trusts_templates=self._config.trust_request_chat_template,
            salts_by_key=self._config.salts_by_key,
            shares_by_key=len(self._config.api_keys) > 1,
            may_change_models=self._config.may_change_models,
            request_log=self._config.request_log,
            num_processes=self._config.api_server_count,
        )

    async def add(self, spec: ModelSpec, info: ModelInfo) -> None:
        """Answer requests for one more model. Pre-condition: `open`.

        Raises:
            ConfigError: its tokenizer or template cannot be used; nothing has changed.
        """
        assert self._service is not None
        text = await asyncio.to_thread(TextModel.load, spec, self._config.chat_template)
        if text.has_chat_template:
            self._templates.start()
        self._engine = replace(self._engine, models=(*self._engine.models, spec))
        self._service.add(ServedModel(text, info), aliases_of(self._engine.models))

    async def remove(self, name: str) -> None:
        """Answer no more requests for a model."""
        assert self._service is not None
        left = tuple(spec for spec in self._engine.models if spec.name != name)
        self._engine = replace(self._engine, models=left)
        self._service.remove(name, aliases_of(left))

    def deliver(self, outputs: Outputs) -> None:
        """Deliver outputs of the engine to the requests that they are of."""
        self._client.deliver(outputs)

    def available(self, availability: Availability) -> None:
        """Nothing to do: the backend is asked for each request."""

    async def request_metrics(self) -> list[list[Metric]]:
        """Return what was measured since the start."""
        return [] if self._service is None else [self._service.metrics.families()]

    async def stop(self, timeout_s: float) -> None:
        """Accept no more requests; end those that still run after `timeout_s` with an error."""
        self._uvicorn.should_exit = True
        if self._service is not None:
            self._service.feed.close()
        await self._client.drain(timeout_s)
        if self._service is not None:
            self._service.close()
        self._templates.close()

    def kill(self) -> None:
        """Nothing to do: there are no other processes that serve."""


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
