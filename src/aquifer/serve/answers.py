"""Response writers: they turn pieces of output into the objects of OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel
from pydantic_core import to_json

from aquifer.engine.outputs import FinishReason, Logprob
from aquifer.serve.generation import Deltas, Job
from aquifer.serve.protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from aquifer.text import Delta

_LOWEST_LOGPROB = -9999.0  # replaces -inf, which JSON cannot express
_ENTRIES_AT_ONCE = 2048
"""Log probabilities of a whole response that are written before other tasks have their turn."""


@dataclass(slots=True)
class Piece:
    """A part of a completion, or a whole completion."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[dict[int, Logprob] | None] = ()  # one a token, or none
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    texts: Sequence[str] = ()  # if not empty: parts of the text that are an event each


def whole_pieces(job: Job, echo: str | None = None) -> list[Piece]:
    """Return the completions of a finished job.

    Args:
        job: the job.
        echo: the prompt's text if it is to precede each completion.
    """
    pieces = []
    for completion in job.builder.output.outputs:
        piece = Piece(
            completion.text,
            completion.token_ids,
            completion.logprobs or (),
            completion.finish_reason,
            completion.stop_reason,
        )
        if echo is not None:
            _precede(piece, job, echo)
        pieces.append(piece)
    return pieces


class PieceBuffer:
    """Buffer of one completion's deltas until there is something to send.

    If text is held back (part of a character or of a stop string), its tokens and their log
    probabilities wait for it.

    Args:
        job: the completion's job.
        echo: the prompt's text if it is to precede the output.
    """

    def __init__(self, job: Job, echo: str | None = None) -> None:
        self._job = job
        self._echo = echo
        self._piece = Piece()

    def add(self, delta: Delta) -> Piece | None:
        """Add the output of one step.

        Returns: everything since the last piece; None if a client would see nothing new.
        """
        if delta.texts and self._echo is None:
            return self._add_texts(delta)
        piece = self._piece
        piece.text += delta.text
        piece.token_ids += delta.token_ids
        if delta.logprobs:
            piece.logprobs = [*piece.logprobs, *delta.logprobs]
        piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        if self._echo is not None:
            _precede(piece, self._job, self._echo)
            self._echo = None
        if not (piece.text or piece.finish_reason or self._job.tokenizer is None):
            return None
        self._piece = Piece()
        return piece

    def _add_texts(self, delta: Delta) -> Piece | None:
        """Add the output of several steps: tokens without log probabilities."""
        texts = delta.texts
        if self._job.tokenizer is not None:
            texts = [text for text in texts if text]
            if not texts:
                return None
        return Piece(delta.text, texts=texts)


Pieces = list[tuple[int, int, Piece]]
"""What to send: (index of the job, index of the completion, its next piece)."""


def pieces_of(deltas: Deltas, buffers: Sequence[Sequence[PieceBuffer]]) -> Pieces:
    """Return the pieces that are complete with these deltas.

    Args:
        deltas: the deltas.
        buffers: of the completions of each job.
    """
    pieces = []
    for job_index, delta in deltas:
        piece = buffers[job_index][delta.index].add(delta)
        if piece is not None:
            pieces.append((job_index, delta.index, piece))
    return pieces


def _precede(piece: Piece, job: Job, echo: str) -> None:
    """Put the prompt before the first piece of a completion."""
    piece.text = echo + piece.text
    if job.request.params.logprobs is not None:
        piece.token_ids = [*job.request.prompt_token_ids, *piece.token_ids]
        piece.logprobs = [*(job.builder.output.prompt_logprobs or ()), *piece.logprobs]


class _Template:
    """Event of a stream, of which only the text changes.

    Args:
        chunk: makes the chunk with a text. Two calls must differ in the text alone.
    """

    def __init__(self, chunk: Callable[[str], BaseModel]) -> None:
        marker = uuid4().hex
        self._before, self._after = event_of(chunk(marker)).split(f'"{marker}"'.encode())

    def events(self, texts: Sequence[str]) -> bytes:
        """Return the events with these texts, one after the other."""
        before, after = self._before, self._after
        return b"".join([before + to_json(text) + after for text in texts])


def event_of(body: BaseModel) -> bytes:
    """Return a server-sent event with a body as its data."""
    return b"data: " + body.model_dump_json().encode() + b"\n\n"


def _json_with(body: BaseModel, field: str, value: bytes) -> bytes:
    """Return a body's JSON with another value of a field.

    Args:
        body: the body.
        field: a field that is None or an empty list there, and that has a name of its own.
        value: the value's JSON.
    """
    empty = b"null" if getattr(body, field) is None else b"[]"
    before, key, after = body.model_dump_json().encode().partition(f'"{field}":'.encode() + empty)
    return before + key.removesuffix(empty) + value + after


async def _json_of_logprobs(
    piece: Piece, num_top: int, logprobs_of: Callable[[Piece], BaseModel | None]
) -> bytes:
    """Return the JSON of a whole completion's log probabilities; other tasks run meanwhile.

    Args:
        piece: the completion.
        num_top: how many log probabilities were requested for each token.
        logprobs_of: makes the log probabilities of a part: lists with an item for each token.
    """
    num_tokens = max(_ENTRIES_AT_ONCE // (num_top + 1), 1)
    lists: defaultdict[str, list[bytes]] = defaultdict(list)
    for start in range(0, max(len(piece.token_ids), 1), num_tokens):
        part = slice(start, start + num_tokens)
        logprobs = logprobs_of(
            Piece(token_ids=piece.token_ids[part], logprobs=piece.logprobs[part])
        )
        for name, values in logprobs or ():
            lists[name].append(to_json(values, inf_nan_mode="null")[1:-1])
        await asyncio.sleep(0)
    fields = [f'"{name}":['.encode() + b",".join(parts) + b"]" for name, parts in lists.items()]
    return b"{" + b",".join(fields) + b"}"


class CompletionWriter:
    """Writer of the response to a completions request, whole or in chunks.

    Args:
        response_id: the response's id.
        model: the served name.
        jobs: one for each prompt.
    """

    def __init__(self, response_id: str, model: str, jobs: Sequence[Job]) -> None:
        self._id = response_id
        self._model = model
        self._jobs = jobs
        self._created = int(time.time())
        # Characters of the tokens written so far, by choice; for text_offset.
        self._num_chars: defaultdict[int, int] = defaultdict(int)
        self._templates: dict[int, _Template] = {}  # by choice

    def events(self, job_index: int, index: int, piece: Piece) -> bytes:
        """Return the events with a part of one completion of one prompt."""
        params = self._jobs[job_index].request.params
        if not piece.texts:
            return event_of(self.chunk(job_index, index, piece))
        number = job_index * params.n + index
        if number not in self._templates:
            self._templates[number] = _Template(
                lambda text: self.chunk(job_index, index, Piece(text))
            )
        return self._templates[number].events(piece.texts)

    def chunk(self, job_index: int, index: int, piece: Piece) -> CompletionResponse:
        """Return a part of one completion of one prompt."""
        choice = self._choice(job_index, index, piece)
        choice.logprobs = self._logprobs(self._jobs[job_index], choice.index, piece)
        return CompletionResponse(
            id=self._id, created=self._created, model=self._model, choices=[choice]
        )

    def usage_chunk(self) -> CompletionResponse:
        """Return the last chunk of a stream with `include_usage`."""
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage_of(self._jobs),
        )

    async def response(self, pieces: Sequence[Sequence[Piece]]) -> bytes:
        """Return the whole response's JSON, from the whole completions of each prompt.

        Other tasks run between parts of many log probabilities.
        """
        choices = [
            await self._whole_choice(job_index, index, piece)
            for job_index, pieces_of_job in enumerate(pieces)
            for index, piece in enumerate(pieces_of_job)
        ]
        return _json_with(self.usage_chunk(), "choices", b"[" + b",".join(choices) + b"]")

    async def _whole_choice(self, job_index: int, index: int, piece: Piece) -> bytes:
        """Return the JSON of a choice that is a whole completion."""
        choice = self._choice(job_index, index, piece)
        job = self._jobs[job_index]
        if (num_top := job.request.params.logprobs) is None:
            return choice.model_dump_json().encode()
        logprobs = await _json_of_logprobs(
            piece, num_top, lambda part: self._logprobs(job, choice.index, part)
        )
        return _json_with(choice, "logprobs", logprobs)

    def _choice(self, job_index: int, index: int, piece: Piece) -> CompletionChoice:
        """Return one choice without log probabilities; choices are numbered prompt by prompt."""
        return CompletionChoice(
            index=job_index * self._jobs[job_index].request.params.n + index,
            text=piece.text,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )

    def _logprobs(self, job: Job, number: int, piece: Piece) -> CompletionLogprobs | None:
        if job.request.params.logprobs is None:
            return None
        logprobs = CompletionLogprobs()
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            if entry is None:  # the prompt's first token has no log probability
                text = job.text_of_token(token_id)
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
            else:
                text = entry[token_id].decoded_token or ""
                logprobs.token_logprobs.append(_finite(entry[token_id].logprob))
                logprobs.top_logprobs.append(
                    {lp.decoded_token or "": _finite(lp.logprob) for lp in entry.values()}
                )
            logprobs.tokens.append(text)
            logprobs.text_offset.append(self._num_chars[number])
            self._num_chars[number] += len(text)
        return logprobs


class ChatWriter:
    """Writer of the response to a chat request, whole or in chunks.

    Args:
        response_id: the response's id.
        model: the served name.
        job: the request's job.
    """

    def __init__(self, response_id: str, model: str, job: Job) -> None:
        self._id = response_id
        self._model = model
        self._job = job
        self._created = int(time.time())
        self._begun: set[int] = set()  # indexes of choices
        self._templates: dict[int, _Template] = {}  # by choice

    def events(self, index: int, piece: Piece) -> bytes:
        """Return the events with a part of one choice; the first part of each has the role."""
        if not piece.texts:
            return event_of(self.chunk(index, piece))
        if index not in self._begun:
            first, *texts = piece.texts
            event = event_of(self.chunk(index, Piece(first)))
            return event + self._template(index).events(texts)
        return self._template(index).events(piece.texts)

    def _template(self, index: int) -> _Template:
        """The event of a choice that has begun."""
        if index not in self._templates:
            self._templates[index] = _Template(lambda text: self.chunk(index, Piece(text)))
        return self._templates[index]

    def chunk(self, index: int, piece: Piece) -> ChatCompletionChunk:
        """Return a part of one choice; the first part of each has the role."""
        delta: dict[Literal["role", "content"], str] = {}
        if index not in self._begun:
            delta["role"] = "assistant"
        if piece.text or index not in self._begun:
            delta["content"] = piece.text
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=[choice]
        )

    def usage_chunk(self) -> ChatCompletionChunk:
        """Return the last chunk of a stream with `include_usage`."""
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage_of([self._job]),
        )

    async def response(self, pieces: Sequence[Piece]) -> bytes:
        """Return the whole response's JSON, from whole completions.

        Other tasks run between parts of many log probabilities.
        """
        choices = [await self._whole_choice(index, piece) for index, piece in enumerate(pieces)]
        response = ChatCompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage_of([self._job]),
        )
        return _json_with(response, "choices", b"[" + b",".join(choices) + b"]")

    async def _whole_choice(self, index: int, piece: Piece) -> bytes:
        """Return the JSON of a choice that is a whole completion."""
        choice = ChatChoice(
            index=index,
            message=AssistantMessage(content=piece.text),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if (num_top := self._job.request.params.logprobs) is None:
            return choice.model_dump_json().encode()
        return _json_with(
            choice, "logprobs", await _json_of_logprobs(piece, num_top, self._logprobs)
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_top = self._job.request.params.logprobs
        if num_top is None:
            return None
        content = []
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            assert entry is not None  # only prompt tokens may have no log probability
            best = sorted(entry.items(), key=lambda item: item[1].rank)
            top = [self._top_logprob(*item) for item in best if item[1].rank <= num_top]
            chosen = self._top_logprob(token_id, entry[token_id])
            content.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top_logprob(self, token_id: int, logprob: Logprob) -> TopLogprob:
        token = logprob.decoded_token or ""
        content = token.encode()
        if "\ufffd" in token and self._job.tokenizer is not None:
            content = self._job.tokenizer.token_bytes(token_id)  # it is part of a character
        return TopLogprob(token=token, logprob=_finite(logprob.logprob), bytes=list(content))


def usage_of(jobs: Sequence[Job]) -> Usage:
    """Count the tokens of all jobs, including completions that were not chosen."""
    prompt_tokens = sum(len(job.request.prompt_token_ids) for job in jobs)
    completion_tokens = sum(job.builder.num_generated_tokens for job in jobs)
    cached_tokens = sum(job.builder.output.num_cached_tokens for job in jobs)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
