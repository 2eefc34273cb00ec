"""The HTTP API as an ASGI application: routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from aquifer import __version__
from aquifer.serve.client import EngineClient
from aquifer.serve.cors import CorsPolicy
from aquifer.serve.endpoints import models, openai, operators, page, prefixes, tokens
from aquifer.serve.http import ApiKeyMiddleware, install_error_handlers
from aquifer.serve.openapi import Operation, document
from aquifer.serve.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    PrefixRequest,
    TokenizeRequest,
)
from aquifer.serve.protocol.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    Memory,
    ModelCard,
    ModelList,
    ModelRemoved,
    ModelStates,
    ModelStatus,
    PrefixCard,
    PrefixDeleted,
    PrefixList,
    Snapshot,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)

_GONE = (404, 503)
_OPEN = Operation(is_guarded=False)

_Route = tuple[str, str, Callable[..., Awaitable[object]], Operation]

_ROUTES: tuple[_Route, ...] = (
    ("/v1/models", "GET", openai.list_models, Operation(ModelList)),
    ("/v1/models/{model_id:path}", "GET", openai.get_model, Operation(ModelCard, statuses=_GONE)),
    (
        "/v1/completions",
        "POST",
        openai.completions,
        Operation(CompletionResponse, CompletionRequest, stream=CompletionResponse),
    ),
    (
        "/v1/chat/completions",
        "POST",
        openai.chat_completions,
        Operation(ChatCompletionResponse, ChatCompletionRequest, stream=ChatCompletionChunk),
    ),
    ("/v1/prefixes", "POST", prefixes.pin_prefix, Operation(PrefixCard, PrefixRequest)),
    ("/v1/prefixes", "GET", prefixes.list_prefixes, Operation(PrefixList)),
    (
        "/v1/prefixes/{prefix_id}",
        "DELETE",
        prefixes.unpin_prefix,
        Operation(PrefixDeleted, statuses=_GONE),
    ),
    ("/models", "GET", models.list_states, Operation(ModelStates)),
    ("/models", "POST", models.add, Operation(ModelStatus, ModelRequest, statuses=(403,))),
    (
        "/models/{model_id:path}",
        "DELETE",
        models.remove,
        Operation(ModelRemoved, statuses=(403, *_GONE)),
    ),
    (
        "/models/{model_id:path}/{verb}",
        "POST",
        models.manage,
        Operation(ModelStatus, statuses=(400, 403, *_GONE)),
    ),
    ("/tokenize", "POST", tokens.tokenize, Operation(TokenizeResponse, TokenizeRequest)),
    ("/detokenize", "POST", tokens.detokenize, Operation(DetokenizeResponse, DetokenizeRequest)),
    ("/health", "GET", operators.health, _OPEN),
    ("/metrics", "GET", operators.metrics, Operation(media_type="text/plain", is_guarded=False)),
    ("/version", "GET", operators.version, Operation(Version, statuses=(), is_guarded=False)),
    ("/memory", "GET", operators.memory, Operation(Memory)),
    ("/", "GET", page.page, Operation(media_type="text/html", statuses=(), is_guarded=False)),
    ("/events", "GET", page.events, Operation(stream=Snapshot)),
)
_TOKENIZER_INFO: _Route = (
    "/tokenizer_info",
    "GET",
    tokens.tokenizer_info,
    Operation(TokenizerInfo, statuses=(400, *_GONE)),
)

_READABLE = ("Retry-After",)
"""Headers of answers that pages of other origins may read, beside those that are always shown."""

_DOCUMENTS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")


def create_app(
    client: EngineClient,
    api_keys: Sequence[str] = (),
    *,
    guards_all: bool = False,
    cors: CorsPolicy | None = None,
    has_tokenizer_info: bool = False,
) -> FastAPI:
    """Create the ASGI application.

    Requests that need a model are answered with 503 until `app.state.service` is set.

    Args:
        client: the engine, ready or not.
        api_keys: if not empty, clients must send one of them as their bearer token.
        guards_all: require it for everything but /health.
        cors: what web pages of other origins may do; None for nothing.
        has_tokenizer_info: whether there is /tokenizer_info.
    """
    routes = (*_ROUTES, _TOKENIZER_INFO) if has_tokenizer_info else _ROUTES
    app = FastAPI(title="Aquifer", version=__version__)
    app.state.client = client
    app.state.service = None
    install_error_handlers(app)
    if api_keys:
        is_open = [path for path, *_, operation in routes if not operation.is_guarded]
        open_paths = ["/health"] if guards_all else [*is_open, *_DOCUMENTS]
        app.add_middleware(ApiKeyMiddleware, api_keys=api_keys, open_paths=open_paths)
    if cors is not None:
        _add_cors(app, cors)
    for path, method, endpoint, _ in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    operations = [(path, method, operation) for path, method, _, operation in routes]
    app.openapi = cache(partial(document, app, operations))  # type: ignore[method-assign]
    return app


def _add_cors(app: FastAPI, policy: CorsPolicy) -> None:
    """Add the middleware of the policy, outside of those that were added before.

    Preflights are answered before an API key is asked for.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=policy.origins,
        allow_methods=policy.methods,
        allow_headers=policy.headers,
        allow_credentials=policy.allows_credentials,
        expose_headers=_READABLE,
    )
