"""From pieces of output to the objects of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from aquifer.engine.request import FinishReason, Logprob
from aquifer.engine.text import Delta
from aquifer.serve.generation import Job
from aquifer.serve.protocol import (
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

_LOWEST_LOGPROB = -9999.0  # in place of -inf, which JSON cannot spell


@dataclass(slots=True)
class Piece:
    """A part of an output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)  # one a token, or none
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class PieceBuffer:
    """Collects a job's deltas until they are worth sending.

    Tokens whose text is held back (half a character, half a stop string) wait for it, and their
    log probabilities with them.

    Args:
        job: whose deltas.
        echo: the prompt's text if it is to precede the output.
    """

    def __init__(self, job: Job, echo: str | None = None) -> None:
        self._job = job
        self._echo = echo
        self._piece = Piece()

    def add(self, delta: Delta) -> None:
        """Collect what one step brought."""
        piece = self._piece
        if self._echo is not None:
            piece.text = self._echo
            self._echo = None
            if delta.logprobs is not None:
                piece.token_ids += self._job.request.prompt_token_ids
                piece.logprobs += self._job.builder.output.prompt_logprobs or ()
        piece.text += delta.text
        piece.token_ids += delta.token_ids
        piece.logprobs += delta.logprobs or ()

    def take(self) -> Piece | None:
        """What was collected since the last time; None if a client would see nothing new."""
        builder = self._job.builder
        if not (self._piece.text or builder.finished or self._job.tokenizer is None):
            return None
        piece, self._piece = self._piece, Piece()
        if builder.finished:
            piece.finish_reason = builder.completion.finish_reason
            piece.stop_reason = builder.completion.stop_reason
        return piece


class CompletionWriter:
    """Writes the answer to a completions request, whole or in chunks.

    Args:
        response_id: of the answer.
        model: the served name.
        jobs: one for each prompt.
    """

    def __init__(self, response_id: str, model: str, jobs: Sequence[Job]) -> None:
        self._id = response_id
        self._model = model
        self._jobs = jobs
        self._created = int(time.time())
        self._num_chars = [0] * len(jobs)  # of the tokens written so far, for text_offset

    def chunk(self, index: int, piece: Piece) -> CompletionResponse:
        """A part of one prompt's output."""
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, piece)],
        )

    def usage_chunk(self) -> CompletionResponse:
        """The last chunk of a stream that was asked for its usage."""
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage_of(self._jobs),
        )

    def response(self, pieces: Sequence[Piece]) -> CompletionResponse:
        """The whole answer, from each prompt's whole output."""
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, piece) for index, piece in enumerate(pieces)],
            usage=usage_of(self._jobs),
        )

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        wants_logprobs = self._jobs[index].request.params.logprobs is not None
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(index, piece) if wants_logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )

    def _logprobs(self, index: int, piece: Piece) -> CompletionLogprobs:
        logprobs = CompletionLogprobs()
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            if entry is None:  # the prompt's first token follows nothing
                text = self._jobs[index].text_of_token(token_id)
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
            else:
                text = entry[token_id].decoded_token or ""
                logprobs.token_logprobs.append(_finite(entry[token_id].logprob))
                logprobs.top_logprobs.append(
                    {lp.decoded_token or "": _finite(lp.logprob) for lp in entry.values()}
                )
            logprobs.tokens.append(text)
            logprobs.text_offset.append(self._num_chars[index])
            self._num_chars[index] += len(text)
        return logprobs


class ChatWriter:
    """Writes the answer to a conversation, whole or in chunks.

    Args:
        response_id: of the answer.
        model: the served name.
        job: the only one.
    """

    def __init__(self, response_id: str, model: str, job: Job) -> None:
        self._id = response_id
        self._model = model
        self._job = job
        self._created = int(time.time())
        self._has_begun = False

    def chunk(self, piece: Piece) -> ChatCompletionChunk:
        """A part of the answer; the first one names the role."""
        delta: dict[Literal["role", "content"], str] = {}
        if not self._has_begun:
            delta["role"] = "assistant"
        if piece.text or not self._has_begun:
            delta["content"] = piece.text
        self._has_begun = True
        choice = ChatChunkChoice(
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=[choice]
        )

    def usage_chunk(self) -> ChatCompletionChunk:
        """The last chunk of a stream that was asked for its usage."""
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage_of([self._job]),
        )

    def response(self, piece: Piece) -> ChatCompletionResponse:
        """The whole answer."""
        choice = ChatChoice(
            message=AssistantMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return ChatCompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage_of([self._job]),
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_top = self._job.request.params.logprobs
        if num_top is None:
            return None
        content = []
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=True):
            assert entry is not None  # only a prompt has tokens without
            best = sorted(entry.values(), key=lambda lp: lp.rank)
            top = [_top_logprob(lp) for lp in best if lp.rank <= num_top]
            chosen = _top_logprob(entry[token_id])
            content.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)


def usage_of(jobs: Sequence[Job]) -> Usage:
    """Tokens of all jobs together."""
    prompt_tokens = sum(len(job.request.prompt_token_ids) for job in jobs)
    completion_tokens = sum(len(job.builder.completion.token_ids) for job in jobs)
    cached_tokens = sum(job.builder.output.num_cached_tokens for job in jobs)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def _top_logprob(logprob: Logprob) -> TopLogprob:
    token = logprob.decoded_token or ""
    return TopLogprob(
        token=token, logprob=_finite(logprob.logprob), bytes=list(token.encode("utf-8"))
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
