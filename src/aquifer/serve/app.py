"""The HTTP API as an ASGI application: routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import FastAPI

from aquifer import __version__
from aquifer.serve.client import EngineClient
from aquifer.serve.endpoints import openai, operators, prefixes, tokens
from aquifer.serve.http import ApiKeyMiddleware, BodyLimitMiddleware, install_error_handlers
from aquifer.serve.service import ServedModel, Service

_GUARDED = ("/v1", "/memory", "/tokenize", "/detokenize")

_ROUTES: tuple[tuple[str, Callable[..., Awaitable[object]], str], ...] = (
    ("/v1/models", openai.list_models, "GET"),
    ("/v1/models/{model_id:path}", openai.get_model, "GET"),
    ("/v1/completions", openai.completions, "POST"),
    ("/v1/chat/completions", openai.chat_completions, "POST"),
    ("/v1/prefixes", prefixes.pin_prefix, "POST"),
    ("/v1/prefixes", prefixes.list_prefixes, "GET"),
    ("/v1/prefixes/{prefix_id}", prefixes.unpin_prefix, "DELETE"),
    ("/tokenize", tokens.tokenize, "POST"),
    ("/detokenize", tokens.detokenize, "POST"),
    ("/health", operators.health, "GET"),
    ("/metrics", operators.metrics, "GET"),
    ("/version", operators.version, "GET"),
    ("/memory", operators.memory, "GET"),
)


def create_app(
    client: EngineClient, models: Mapping[str, ServedModel], api_keys: Sequence[str] = ()
) -> FastAPI:
    """Create the ASGI application.

    Args:
        client: the engine. Pre-condition: it is ready.
        models: by served name.
        api_keys: if not empty, clients must send one of them as their bearer token.
    """
    app = FastAPI(title="Aquifer", version=__version__)
    app.state.service = Service(client, models)
    install_error_handlers(app)
    app.add_middleware(BodyLimitMiddleware)
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=api_keys, guarded=_GUARDED)
    for path, endpoint, method in _ROUTES:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app
