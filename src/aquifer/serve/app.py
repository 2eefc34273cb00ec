"""The HTTP API as an ASGI application: routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI

from aquifer import __version__
from aquifer.serve.client import EngineClient
from aquifer.serve.endpoints import openai, operators, prefixes, tokens
from aquifer.serve.http import ApiKeyMiddleware, install_error_handlers

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


def create_app(client: EngineClient, api_keys: Sequence[str] = ()) -> FastAPI:
    """Create the ASGI application.

    Requests that need a model are answered with 503 until `app.state.service` is set.

    Args:
        client: the engine, ready or not.
        api_keys: if not empty, clients must send one of them as their bearer token.
    """
    app = FastAPI(title="Aquifer", version=__version__)
    app.state.client = client
    app.state.service = None
    install_error_handlers(app)
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=api_keys, guarded=_GUARDED)
    for path, endpoint, method in _ROUTES:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app
