"""State shared by the endpoints, and what they do with prompts and jobs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel

from aquifer.engine.params import SamplingParams
from aquifer.engine.reports import ModelInfo
from aquifer.errors import ContextLengthError, RequestError, UnavailableError, UnknownModelError
from aquifer.serve.answers import PieceBuffer, Pieces, pieces_of
from aquifer.serve.client import EngineClient
from aquifer.serve.encoders import encode_here, encoder_of
from aquifer.serve.feed import Feed
from aquifer.serve.generation import Deltas, EncodedPrompt, Job, Shortcut, run_jobs
from aquifer.serve.http import key_name_of
from aquifer.serve.limits import BodyReader
from aquifer.serve.metrics import Metrics
from aquifer.serve.models import TextModel, check_token_ids
from aquifer.serve.off_loop import OffLoop
from aquifer.serve.protocol.parsing import parse_body
from aquifer.serve.protocol.requests import CompletionRequest, TemplateFields
from aquifer.serve.protocol.responses import ModelCard
from aquifer.serve.request_log import RequestLog
from aquifer.serve.sandbox import Sandbox
from aquifer.serve.templates import Templates
from aquifer.text.chat_template import RENDERER

_INLINE_BYTES = 64 << 10
"""Longer bodies are parsed in another process: parsing holds the interpreter from first to last."""

_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model: its text side, the engine's description of it, where texts are encoded.

    Attributes:
        encoder: of an unusual tokenizer; None for the others.
    """

    text: TextModel
    info: ModelInfo
    off_loop: OffLoop = field(default_factory=OffLoop)
    encoder: Sandbox | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", encoder_of(self.text.tokenizer))

    def close(self) -> None:
        """End the process that encodes its texts, if there is one."""
        if self.encoder is not None:
            self.encoder.close()


class Service:
    """State shared by the endpoints.

    Args:
        client: of the engine, whose models are ready.
        models: by served name.
        aliases: served names by the other names that clients may use.
        templates: renders the models' chat templates; closed by the caller, after this.
        trusts_templates: whether clients may send chat templates.
        salts_by_key: whether clients with different API keys share no retained prefixes.
        shares_by_key: whether clients with different API keys share the models fairly.
        may_change_models: whether clients may register and remove models.
        request_log: logs each request; None if they are not logged.
        num_processes: web processes that share what the server allows.
    """

    def __init__(
        self,
        client: EngineClient,
        models: Mapping[str, ServedModel],
        aliases: Mapping[str, str],
        templates: Templates,
        *,
        trusts_templates: bool = False,
        salts_by_key: bool = False,
        shares_by_key: bool = False,
        may_change_models: bool = False,
        request_log: RequestLog | None = None,
        num_processes: int = 1,
    ) -> None:
        self.client = client
        self.backend = client.backend
        self.models = dict(models)
        self._aliases = dict(aliases)
        self.metrics = Metrics(
            {name: model.info.max_model_len for name, model in self.models.items()}
        )
        self.may_change_models = may_change_models
        self._request_log = request_log
        self.started_s = int(time.time())
        self.bodies = BodyReader(num_processes)
        self.feed = Feed(self.backend, num_processes)
        self._salts_by_key = salts_by_key
        self._shares_by_key = shares_by_key
        self._trusts_templates = trusts_templates
        self._sandbox = Sandbox([parse_body.__module__, *([RENDERER] if trusts_templates else [])])
        self._templates = templates

    def close(self) -> None:
        """End the processes that this one has started."""
        self._sandbox.close()
        for model in self.models.values():
            model.close()

    def add(self, model: ServedModel, aliases: Mapping[str, str]) -> None:
        """Serve another model.

        Args:
            model: the model.
            aliases: of all models then.
        """
        self.metrics.add(model.info.name)
        self.models[model.info.name] = model
        self._aliases = dict(aliases)

    def remove(self, name: str, aliases: Mapping[str, str]) -> None:
        """Serve a model no more.

        Args:
            name: its served name.
            aliases: of all models then.
        """
        if (model := self.models.pop(name, None)) is not None:
            model.close()
        self._templates.forget(name)
        self._aliases = dict(aliases)

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
        name = self._aliases.get(name, name)
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
            root=model.info.name,
            max_model_len=model.info.max_model_len,
        )

    def owner(self, request: Request) -> str | None:
        """Return the owner of a request's prefixes; None where clients share them."""
        return key_name_of(request) if self._salts_by_key else None

    def client_name(self, request: Request) -> str:
        """Return the name of a request's client; empty where all requests are of one client."""
        return (key_name_of(request) or "") if self._shares_by_key else ""

    async def parse(self, kind: type[_Body], content: bytes) -> _Body:
        """Parse a body.

        Raises:
            RequestError: it is not valid.
        """
        if len(content) <= _INLINE_BYTES:
            return parse_body(kind, content)
        return await self._sandbox.run("reading the body", None, parse_body, kind, content)

    async def prompts(
        self, model: ServedModel, body: CompletionRequest, num_completions: int
    ) -> list[EncodedPrompt]:
        """Tokenise and check the prompts of a completions request.

        Args:
            model: the model.
            body: the request.
            num_completions: completions of each prompt.

        Raises:
            RequestError: one of them is invalid, or they are too many.
        """
        all_given = body.prompts()
        limit = self.client.max_completions
        if len(all_given) > 1 and len(all_given) * num_completions > limit:
            raise RequestError(
                f"the request asks for {len(all_given) * num_completions} completions "
                f"({len(all_given)} prompts, {num_completions} completions of each); this server "
                f"accepts at most {limit} in a request; send several requests",
                param="prompt",
            )
        num_chars = sum(map(len, all_given))
        special = body.add_special_tokens is not False
        prompts = []
        for given in all_given:
            if isinstance(given, str):
                token_ids = await encode(model, given, special, num_chars)
                prompts.append(EncodedPrompt(given, token_ids))
            else:
                prompts.append(EncodedPrompt(None, given))
            check_prompt(model, prompts[-1].token_ids, "prompt")
        return prompts

    async def conversation(self, model: ServedModel, body: TemplateFields) -> list[int]:
        """Encode a conversation as token ids.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages; or the client
                sent one and may not.
        """
        if body.chat_template is not None and not self._trusts_templates:
            raise RequestError(
                "this server does not accept a chat_template in a request; leave it out, or "
                "start the server with --trust-request-chat-template",
                param="chat_template",
            )
        template = model.text.need_tokenizer().chat(body.chat_template)
        messages = [message.for_template() for message in body.messages]
        add_prompt = True if body.add_generation_prompt is None else body.add_generation_prompt
        args = messages, add_prompt, body.template_args()
        if body.chat_template is not None:
            text = await self._sandbox.run(
                "the chat template", "chat_template", template.render, *args
            )
        else:
            text = await self._templates.render(model.info.name, template, *args)
        return await encode(model, text, special=False)

    def jobs(
        self,
        model: ServedModel,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        response_id: str,
        arrival_s: float,
        cache_salt: str | None,
        client: str,
        keep_alive_s: float | None = None,
        *,
        only_scores: bool = False,
    ) -> list[Job]:
        """Prepare a job for each prompt; with `only_scores`, none has any output of its own.

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
            Job.prepare(
                model.text,
                prompt,
                params,
                f"{response_id}-{index}",
                arrival_s,
                cache_salt,
                client,
                keep_alive_s,
                only_scores=only_scores,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def pieces(
        self,
        jobs: Sequence[Job],
        buffers: Sequence[Sequence[PieceBuffer]],
        take: Callable[[Pieces], None],
        can_take: Callable[[], bool],
    ) -> AsyncGenerator[Pieces, None]:
        """Run jobs; yield the next pieces to send that have arrived together.

        Args:
            jobs: the jobs.
            buffers: of the completions of each.
            take: takes pieces in place of the generator's consumer, while that waits.
            can_take: whether `take` may be called now.
        """
        shortcut = _PieceShortcut(buffers, take, can_take)
        async with aclosing(self._run(jobs, shortcut)) as batches:
            async for deltas in batches:
                if pieces := pieces_of(deltas, buffers):
                    yield pieces

    async def finish(self, jobs: Sequence[Job]) -> None:
        """Run jobs until all are finished."""
        async with aclosing(self._run(jobs)) as deltas:
            async for _ in deltas:
                pass

    def _run(
        self, jobs: Sequence[Job], shortcut: Shortcut | None = None
    ) -> AsyncGenerator[Deltas, None]:
        return run_jobs(self.client, self.metrics, self._request_log, jobs, shortcut)


class _PieceShortcut:
    """Shortcut from the outputs of jobs to what takes the pieces of a stream."""

    def __init__(
        self,
        buffers: Sequence[Sequence[PieceBuffer]],
        take: Callable[[Pieces], None],
        can_take: Callable[[], bool],
    ) -> None:
        self._buffers = buffers
        self._take = take
        self._can_take = can_take

    @property
    def is_open(self) -> bool:
        return self._can_take()

    def take(self, deltas: Deltas) -> None:
        if pieces := pieces_of(deltas, self._buffers):
            self._take(pieces)


async def _client(request: Request) -> EngineClient:
    client = request.app.state.client
    assert isinstance(client, EngineClient)
    return client


async def _service(request: Request) -> Service:
    service = request.app.state.service
    if service is None:
        raise request.app.state.client.unavailable or UnavailableError("the server is starting", 1)
    assert isinstance(service, Service)
    return service


Client = Annotated[EngineClient, Depends(_client)]
Served = Annotated[Service, Depends(_service)]


def parsed(kind: type[_Body]) -> Any:
    """A dependency of an endpoint: the request's body as `kind`.

    Raises:
        RequestError: it is not valid.
    """

    async def read(request: Request, service: Served) -> _Body:
        content_type, _, _ = request.headers.get("content-type", "").partition(";")
        if content_type.strip().lower() != "application/json":
            raise RequestError("send the body as JSON, with Content-Type: application/json")
        async with service.bodies.reading(request) as content:
            return await service.parse(kind, content)

    return Depends(read)


def check_prompt(model: ServedModel, token_ids: Sequence[int], param: str) -> None:
    """Check a prompt before it is sent through the pipe."""
    check_token_ids(token_ids, model.info.vocab_size, param)
    limit = model.info.max_model_len
    if len(token_ids) >= limit:
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens and this model's context length is {limit}, "
            "which must hold at least one more; shorten the prompt",
            param=param,
        )


async def encode(
    model: ServedModel, text: str, special: bool = True, num_chars: int | None = None
) -> list[int]:
    """Encode a text as token ids, so that other streams continue.

    A long one is encoded in a thread, and all of an unusual tokenizer in another process.

    Args:
        model: the model.
        text: the text.
        special: whether to add special tokens around it.
        num_chars: characters of all texts that the client sent, if it is more than this one.

    Raises:
        RequestError: there is no tokenizer, the text is not valid Unicode, or far too long.
        LimitError: it takes too long, or too much memory.
    """
    tokenizer, limit = model.text.need_tokenizer(), model.info.max_model_len
    if model.encoder is not None:
        what = f"encoding with the tokenizer of {model.info.name!r}"
        return await model.encoder.run(what, "prompt", encode_here, text, special, limit)
    return await model.off_loop.run(
        num_chars or len(text), partial(tokenizer.encode, text, special, max_tokens=limit)
    )
