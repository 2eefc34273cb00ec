"""The HTTP API: OpenAI's endpoints, and those for operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from uuid import uuid4

import anyio.to_thread
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from aquifer import __version__
from aquifer.config import format_size
from aquifer.engine.params import SamplingParams
from aquifer.engine.reports import MemoryReport, ModelInfo
from aquifer.errors import (
    ContextLengthError,
    EngineError,
    RequestError,
    UnknownModelError,
)
from aquifer.serve.answers import (
    ChatWriter,
    CompletionWriter,
    Piece,
    PieceBuffer,
    whole_pieces,
)
from aquifer.serve.client import EngineClient
from aquifer.serve.generation import Job, Prompt, run_jobs
from aquifer.serve.http import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    EventStream,
    error_response,
    install_error_handlers,
    response_to,
    unless_disconnected,
)
from aquifer.serve.metrics import Metrics
from aquifer.serve.models import TextModel, check_token_ids
from aquifer.serve.prefixes import PinnedPrefix, PinnedPrefixes, joined_salt, salt_of_key
from aquifer.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    PrefixCard,
    PrefixDeleted,
    PrefixList,
    PrefixRequest,
    TemplateFields,
    TokenizeRequest,
    TokenizeResponse,
)

_GUARDED = ("/v1", "/memory", "/tokenize", "/detokenize")
_MEMORY_S = 5.0  # timeout of a scrape: the engine answers between two steps
_INLINE_CHARS = 4096  # longer texts are tokenised in a thread


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model: its text side and the engine's description of it."""

    text: TextModel
    info: ModelInfo


class Service:
    """State shared by the endpoints.

    Args:
        client: the engine. Pre-condition: it is ready.
        models: by served name.
    """

    def __init__(self, client: EngineClient, models: Mapping[str, ServedModel]) -> None:
        self.client = client
        self.models = dict(models)
        self.metrics = Metrics(self.models)
        self.prefixes = PinnedPrefixes(client)
        self.started_s = int(time.time())

    def model(self, name: str | None) -> ServedModel:
        """Return the model that a request names; it may leave the name out if there is only one.

        Raises:
            UnknownModelError: there is no such model, or there are several and no name was given.
        """
        served = ", ".join(map(repr, self.models))
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise UnknownModelError(f"name the model: one of {served}", param="model")
        if name not in self.models:
            raise UnknownModelError(
                f"no model {name!r} is served here; served models: {served}", param="model"
            )
        return self.models[name]

    def card(self, model: ServedModel) -> ModelCard:
        """Return the model as /v1/models shows it."""
        return ModelCard(
            id=model.info.name,
            created=self.started_s,
            root=str(model.text.path),
            max_model_len=model.info.max_model_len,
        )

    def owner(self, request: Request) -> str | None:
        """Return the owner of a request's prefixes; None where clients share them."""
        if not self.client.salts_by_key:
            return None
        return salt_of_key(request.headers.get("authorization", ""))

    async def prompts(self, model: ServedModel, body: CompletionRequest) -> list[Prompt]:
        """Tokenise and check the prompts of a completions request.

        Raises:
            RequestError: one of them is invalid.
        """
        all_given = body.prompts()
        limit = self.client.max_prompts
        if len(all_given) > limit:
            raise RequestError(
                f"the request has {len(all_given)} prompts; this server accepts at most {limit}",
                param="prompt",
            )
        num_chars = sum(map(len, all_given))
        prompts = []
        for given in all_given:
            if isinstance(given, str):
                token_ids = await _off_loop(num_chars, partial(model.text.encode, given))
                prompts.append(Prompt(given, token_ids))
            else:
                prompts.append(Prompt(None, given))
            _check_prompt(model, prompts[-1].token_ids, "prompt")
        return prompts

    async def conversation(self, model: ServedModel, body: TemplateFields) -> list[int]:
        """Encode a conversation as token ids.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        messages = [message.for_template() for message in body.messages]
        add_prompt = True if body.add_generation_prompt is None else body.add_generation_prompt
        template_args = body.template_args()
        num_chars = sum(len(message.get("content") or "") for message in messages)
        if body.chat_template is not None:
            num_chars = _INLINE_CHARS + 1  # a client's template may take long
        return await _off_loop(
            num_chars,
            lambda: model.text.encode_chat(messages, add_prompt, body.chat_template, template_args),
        )

    def jobs(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        response_id: str,
        arrival_s: float,
        cache_salt: str | None,
    ) -> list[Job]:
        """Prepare a job for each prompt.

        Raises:
            RequestError: the parameters need a tokenizer, and there is none.
        """
        if params.stop_strings and model.text.tokenizer is None:
            raise RequestError(
                f"stop needs text, and model {model.info.name!r} has no tokenizer; use "
                "stop_token_ids",
                param="stop",
            )
        return [
            Job.prepare(model.text, prompt, params, f"{response_id}-{index}", arrival_s, cache_salt)
            for index, prompt in enumerate(prompts)
        ]

    async def pieces(
        self, jobs: Sequence[Job], buffers: Sequence[Sequence[PieceBuffer]]
    ) -> AsyncGenerator[tuple[int, int, Piece], None]:
        """Run jobs; yield (index of the job, index of the completion, next piece to send)."""
        async with aclosing(run_jobs(self.client, self.metrics, jobs)) as deltas:
            async for index, delta in deltas:
                piece = buffers[index][delta.index].add(delta)
                if piece is not None:
                    yield index, delta.index, piece

    async def finish(self, jobs: Sequence[Job]) -> None:
        """Run jobs until all are finished."""
        async with aclosing(run_jobs(self.client, self.metrics, jobs)) as deltas:
            async for _ in deltas:
                pass


async def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


Served = Annotated[Service, Depends(_service)]


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


# ---- OpenAI's endpoints


async def list_models(service: Served) -> ModelList:
    """List the served models."""
    return ModelList(data=[service.card(model) for model in service.models.values()])


async def get_model(service: Served, model_id: str) -> ModelCard:
    """Describe one served model."""
    return service.card(service.model(model_id))


async def completions(request: Request, body: CompletionRequest, service: Served) -> Response:
    """Complete one or several prompts."""
    arrival_s = time.monotonic()
    model = service.model(body.model)
    params = body.params(model.text.defaults)
    prompts = await service.prompts(model, body)
    response_id = f"cmpl-{uuid4().hex}"
    salt = joined_salt(service.owner(request), body.cache_salt)
    jobs = service.jobs(model, prompts, params, response_id, arrival_s, salt)
    echoes = [_echo_of(job) if body.echo else None for job in jobs]
    writer = CompletionWriter(response_id, model.info.name, jobs)
    if not body.stream:
        await unless_disconnected(request.receive, service.finish(jobs))
        return _json(writer.response([*map(whole_pieces, jobs, echoes)]))
    buffers = [
        [PieceBuffer(job, echo) for _ in range(params.n)]
        for job, echo in zip(jobs, echoes, strict=True)
    ]
    return await _stream(
        request,
        service.pieces(jobs, buffers),
        writer.chunk,
        writer.usage_chunk if body.include_usage else None,
    )


async def chat_completions(
    request: Request, body: ChatCompletionRequest, service: Served
) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    model = service.model(body.model)
    params = body.params(model.text.defaults)
    token_ids = await service.conversation(model, body)
    _check_prompt(model, token_ids, "messages")
    response_id = f"chatcmpl-{uuid4().hex}"
    salt = joined_salt(service.owner(request), body.cache_salt)
    jobs = service.jobs(model, [Prompt(None, token_ids)], params, response_id, arrival_s, salt)
    writer = ChatWriter(response_id, model.info.name, jobs[0])
    if not body.stream:
        await unless_disconnected(request.receive, service.finish(jobs))
        return _json(writer.response(whole_pieces(jobs[0])))
    buffers = [[PieceBuffer(jobs[0]) for _ in range(params.n)]]
    return await _stream(
        request,
        service.pieces(jobs, buffers),
        lambda _, index, piece: writer.chunk(index, piece),
        writer.usage_chunk if body.include_usage else None,
    )


async def _stream(
    request: Request,
    pieces: AsyncGenerator[tuple[int, int, Piece], None],
    chunk: Callable[[int, int, Piece], BaseModel],
    usage_chunk: Callable[[], BaseModel] | None,
) -> Response:
    """Stream pieces as server-sent events; a failure before the first one is an HTTP error."""

    async def first_piece() -> tuple[int, int, Piece]:
        return await anext(pieces)

    async def events(first: tuple[int, int, Piece]) -> AsyncGenerator[bytes, None]:
        yield _event(chunk(*first))
        try:
            async for job_index, index, piece in pieces:
                yield _event(chunk(job_index, index, piece))
        except (RequestError, EngineError) as error:
            yield b"event: error\ndata: " + bytes(response_to(error).body) + b"\n\n"
            return
        if usage_chunk is not None:
            yield _event(usage_chunk())
        yield b"data: [DONE]\n\n"

    async with AsyncExitStack() as resources:
        await resources.enter_async_context(aclosing(pieces))
        first = await unless_disconnected(request.receive, first_piece())
        return EventStream(events(first), resources.pop_all())


# ---- beyond OpenAI's


async def pin_prefix(request: Request, body: PrefixRequest, service: Served) -> PrefixCard:
    """Pin the KV of a common prefix."""
    model = service.model(body.model)
    conversation = body.conversation()
    if conversation is not None:
        token_ids, param = await service.conversation(model, conversation), "messages"
    elif isinstance(body.prompt, str):
        text = body.prompt
        token_ids, param = await _off_loop(len(text), partial(model.text.encode, text)), "prompt"
    else:
        token_ids, param = body.prompt or [], "prompt"
    _check_prompt(model, token_ids, param)
    prefix = await service.prefixes.pin(
        service.owner(request), model.info.name, token_ids, body.cache_salt
    )
    return _prefix_card(prefix)


async def list_prefixes(request: Request, service: Served) -> PrefixList:
    """List the pinned prefixes."""
    prefixes = service.prefixes.of(service.owner(request))
    return PrefixList(data=[*map(_prefix_card, prefixes)])


async def unpin_prefix(request: Request, prefix_id: str, service: Served) -> Response:
    """Unpin a prefix."""
    if not await service.prefixes.unpin(service.owner(request), prefix_id):
        return error_response(404, f"no prefix {prefix_id!r} is pinned", "prefix_id")
    return _json(PrefixDeleted(id=prefix_id))


def _prefix_card(prefix: PinnedPrefix) -> PrefixCard:
    return PrefixCard(
        id=prefix.prefix_id,
        created=prefix.created_s,
        model=prefix.model,
        num_tokens=prefix.num_tokens,
    )


async def tokenize(body: TokenizeRequest, service: Served) -> TokenizeResponse:
    """Encode a text or a conversation as token ids."""
    model = service.model(body.model)
    tokenizer = model.text.need_tokenizer()
    conversation = body.conversation()
    if conversation is not None:
        token_ids = await service.conversation(model, conversation)
    else:
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await _off_loop(len(text), lambda: model.text.encode(text, add_special_tokens))
    token_strs = None
    if body.return_token_strs:
        token_strs = [tokenizer.decode([i], skip_special_tokens=False) for i in token_ids]
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=model.info.max_model_len,
        tokens=token_ids,
        token_strs=token_strs,
    )


async def detokenize(body: DetokenizeRequest, service: Served) -> DetokenizeResponse:
    """Decode token ids to text."""
    model = service.model(body.model)
    tokenizer = model.text.need_tokenizer()
    if body.tokens:
        check_token_ids(body.tokens, model.info.vocab_size, "tokens")
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


# ---- for operators


async def health(service: Served) -> Response:
    """Return 200 while requests are accepted, else 503."""
    if service.client.is_serving:
        return Response(status_code=200)
    if service.client.is_dead:
        return error_response(503, "the engine process died; restart the server")
    return error_response(503, "the server is shutting down")


async def version() -> dict[str, str]:
    """Return Aquifer's version."""
    return {"version": __version__}


async def metrics(service: Served) -> Response:
    """Return the metrics in Prometheus's text format."""
    report = None
    if service.client.is_serving:
        report = await _memory_report(service.client)
    return Response(
        service.metrics.render(service.client.stats, report), media_type=CONTENT_TYPE_LATEST
    )


async def memory(service: Served) -> dict[str, Any]:
    """Return the breakdown of the pool's budget, in bytes and human-readable."""
    return _memory_dict(await service.client.memory())


async def _memory_report(client: EngineClient) -> MemoryReport | None:
    """Return the report, or None if the engine dies or a step exceeds the timeout."""
    try:
        async with asyncio.timeout(_MEMORY_S):
            return await client.memory()
    except (EngineError, TimeoutError):
        return None


def _memory_dict(report: MemoryReport) -> dict[str, Any]:
    used_bytes = report.budget_bytes - report.free_bytes
    return {
        "device": report.device,
        **_sizes(
            page=report.page_bytes,
            budget=report.budget_bytes,
            used=used_bytes,
            overhead=report.overhead_bytes,
            free=report.free_bytes,
            idle=report.idle_bytes,
            retired=report.retired_bytes,
            process_resident=report.process_resident_bytes,
        ),
        "mapped_pages": report.mapped_pages,
        "free_pages": report.free_pages,
        "requests_running": sum(model.num_running for model in report.models.values()),
        "requests_waiting": sum(model.num_waiting for model in report.models.values()),
        "models": {
            name: {
                **_sizes(**{kind.value: n for kind, n in model.bytes_by_kind.items()}),
                **_sizes(
                    kv_written=model.kv_written_bytes,
                    kv_mapped=model.kv_mapped_bytes,
                    kv_wasted=model.kv_wasted_bytes,
                ),
                "kv_written_tokens": model.kv_written_tokens,
                "requests_running": model.num_running,
                "requests_waiting": model.num_waiting,
            }
            for name, model in report.models.items()
        },
    }


def _sizes(**num_bytes: int) -> dict[str, int | str]:
    """Return each quantity twice: `name_bytes` as a number, `name` human-readable."""
    sizes: dict[str, int | str] = {}
    for name, value in num_bytes.items():
        sizes[f"{name}_bytes"] = value
        sizes[name] = format_size(value)
    return sizes


_ROUTES: tuple[tuple[str, Callable[..., Awaitable[object]], str], ...] = (
    ("/v1/models", list_models, "GET"),
    ("/v1/models/{model_id:path}", get_model, "GET"),
    ("/v1/completions", completions, "POST"),
    ("/v1/chat/completions", chat_completions, "POST"),
    ("/v1/prefixes", pin_prefix, "POST"),
    ("/v1/prefixes", list_prefixes, "GET"),
    ("/v1/prefixes/{prefix_id}", unpin_prefix, "DELETE"),
    ("/tokenize", tokenize, "POST"),
    ("/detokenize", detokenize, "POST"),
    ("/health", health, "GET"),
    ("/metrics", metrics, "GET"),
    ("/version", version, "GET"),
    ("/memory", memory, "GET"),
)


# ---- helpers


async def _off_loop(num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
    """Run `encode`; in a thread if it may take long, so that other streams continue."""
    if num_chars <= _INLINE_CHARS:
        return encode()
    return await anyio.to_thread.run_sync(encode)


def _check_prompt(model: ServedModel, token_ids: Sequence[int], param: str) -> None:
    """Check a prompt before it is sent through the pipe."""
    check_token_ids(token_ids, model.info.vocab_size, param)
    limit = model.info.max_model_len
    if len(token_ids) >= limit:
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens and this model's context length is {limit}, "
            "which must hold at least one more; shorten the prompt",
            param=param,
        )


def _echo_of(job: Job) -> str:
    """Return the prompt's text, decoded from its tokens if it came as token ids."""
    text = job.builder.output.prompt
    if text is None and job.tokenizer is not None:
        text = job.tokenizer.decode(job.request.prompt_token_ids, skip_special_tokens=False)
    return text or ""


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json().encode() + b"\n\n"
