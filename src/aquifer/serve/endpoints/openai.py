"""OpenAI's endpoints: models, completions and chat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Annotated
from uuid import uuid4

from fastapi import Request, Response
from pydantic import BaseModel

from aquifer.errors import EngineError, RequestError
from aquifer.serve.answers import (
    ChatWriter,
    CompletionWriter,
    Piece,
    PieceBuffer,
    Pieces,
    event_of,
    whole_pieces,
)
from aquifer.serve.generation import EncodedPrompt, Job
from aquifer.serve.http import (
    EventShortcut,
    EventStream,
    begin_now,
    response_to,
    unless_disconnected,
)
from aquifer.serve.prefixes import joined_salt
from aquifer.serve.protocol.requests import ChatCompletionRequest, CompletionRequest
from aquifer.serve.protocol.responses import ModelCard, ModelList
from aquifer.serve.service import Served, check_prompt, parsed

_SILENT_S = 10.0
"""How long a stream may send nothing before its first event; many proxies wait for a minute."""


async def list_models(service: Served) -> ModelList:
    """List the served models."""
    return ModelList(data=[service.card(model) for model in service.models.values()])


async def get_model(service: Served, model_id: str) -> ModelCard:
    """Describe one served model."""
    return service.card(service.model(model_id))


async def completions(
    request: Request, body: Annotated[CompletionRequest, parsed(CompletionRequest)], service: Served
) -> Response:
    """Complete one or several prompts."""
    arrival_s = time.monotonic()
    model = service.model(body.model)
    params = body.params(model.text.defaults)
    prompts = await service.prompts(model, body, params.num_completions)
    response_id = f"cmpl-{uuid4().hex}"
    salt = joined_salt(service.owner(request), body.cache_salt)
    client = service.client_name(request)
    jobs = service.jobs(
        model,
        prompts,
        params,
        response_id,
        arrival_s,
        salt,
        client,
        body.keep_alive_s,
        only_scores=body.only_scores,
    )
    echoes = [_echo_of(job) if body.echo else None for job in jobs]
    writer = CompletionWriter(response_id, model.info.name, jobs)
    if not body.stream:
        await unless_disconnected(request.receive, service.finish(jobs))
        content = await writer.response([*map(whole_pieces, jobs, echoes)])
        return Response(content, media_type="application/json")
    buffers = [
        [PieceBuffer(job, echo) for _ in range(params.n)]
        for job, echo in zip(jobs, echoes, strict=True)
    ]
    return await stream(
        request,
        partial(service.pieces, jobs, buffers),
        writer.events,
        writer.usage_chunk if body.include_usage else None,
    )


async def chat_completions(
    request: Request,
    body: Annotated[ChatCompletionRequest, parsed(ChatCompletionRequest)],
    service: Served,
) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    model = service.model(body.model)
    params = body.params(model.text.defaults)
    token_ids = await service.conversation(model, body)
    check_prompt(model, token_ids, "messages")
    response_id = f"chatcmpl-{uuid4().hex}"
    salt = joined_salt(service.owner(request), body.cache_salt)
    client = service.client_name(request)
    jobs = service.jobs(
        model,
        [EncodedPrompt(None, token_ids)],
        params,
        response_id,
        arrival_s,
        salt,
        client,
        body.keep_alive_s,
    )
    writer = ChatWriter(response_id, model.info.name, jobs[0])
    if not body.stream:
        await unless_disconnected(request.receive, service.finish(jobs))
        content = await writer.response(whole_pieces(jobs[0]))
        return Response(content, media_type="application/json")
    buffers = [[PieceBuffer(jobs[0]) for _ in range(params.n)]]
    return await stream(
        request,
        partial(service.pieces, jobs, buffers),
        lambda _, index, piece: writer.events(index, piece),
        writer.usage_chunk if body.include_usage else None,
    )


async def stream(
    request: Request,
    run: Callable[..., AsyncGenerator[Pieces, None]],
    events_of: Callable[[int, int, Piece], bytes],
    usage_chunk: Callable[[], BaseModel] | None,
) -> Response:
    """Stream pieces as server-sent events; a failure before the first one is an HTTP error.

    Pieces that arrive together are events of one write. If the first ones take long, because the
    model is being loaded, the response begins without them, and has comments so that no proxy
    between takes the connection for dead.

    Args:
        request: the request.
        run: runs it, as `Service.pieces` does with its last two arguments.
        events_of: makes the events of a piece.
        usage_chunk: makes the last chunk but one; None for none.
    """
    shortcut = EventShortcut()

    def joined(pieces: Pieces) -> bytes:
        return b"".join([events_of(*piece) for piece in pieces])

    batches = run(lambda pieces: shortcut.write(joined(pieces)), lambda: shortcut.is_open)

    async def events(first: asyncio.Task[Pieces]) -> AsyncGenerator[bytes, None]:
        while not first.done():
            yield b": the model is not ready yet\n\n"
            await asyncio.wait({first}, timeout=_SILENT_S)
        try:
            yield joined(first.result())
            async for pieces in batches:
                yield joined(pieces)
        except (RequestError, EngineError) as error:
            yield b"event: error\ndata: " + bytes(response_to(error).body) + b"\n\n"
            return
        if usage_chunk is not None:
            yield event_of(usage_chunk())
        yield b"data: [DONE]\n\n"

    async with AsyncExitStack() as resources:
        await resources.enter_async_context(aclosing(batches))
        first = begin_now(_next(batches))
        resources.push_async_callback(_cancel, first)
        await unless_disconnected(request.receive, asyncio.wait({first}, timeout=_SILENT_S))
        if first.done():
            first.result()
        return EventStream(events(first), resources.pop_all(), shortcut)


async def _next(batches: AsyncGenerator[Pieces, None]) -> Pieces:
    return await anext(batches)


async def _cancel(task: asyncio.Task[Pieces]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _echo_of(job: Job) -> str:
    """Return the prompt's text, decoded from its tokens if it came as token ids."""
    text = job.builder.output.prompt
    if text is None and job.tokenizer is not None:
        text = job.tokenizer.decode(job.request.prompt_token_ids, skip_special_tokens=False)
    return text or ""
