"""From token ids to text: increments for a stream, stop strings, completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from aquifer.engine.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
    TokenOutput,
)
from aquifer.engine.params import Request
from aquifer.text.tokenizer import Tokenizer, cannot_decode, reason_of

_PRIMING_TOKENS = 5  # last prompt tokens decoded first: they decide the output's leading space
_MAX_WAITING_TOKENS = 16
"""Tokens that may wait for the rest of a character: each step decodes all of them again."""
_CHARACTER_TOKENS = 4  # the most that one character takes: UTF-8 has at most 4 bytes for it


class Detokenizer:
    """Incremental decoder of an output's tokens; it never returns part of a character.

    Bytes that are no character come out as U+FFFD: with the next character, or once they are many.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the tokens before the output.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._skip_special_tokens = skip_special_tokens
        self._left_out = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        priming = list(prompt_token_ids[-_PRIMING_TOKENS:])
        if self._decode(priming).endswith("\ufffd"):
            priming = []  # part of a character: the output's first token must not complete it
        self._restart(priming)

    def _restart(self, context: Sequence[int]) -> None:
        """Begin a stream after tokens whose text was returned."""
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)
        # held = context + waiting tokens: what the stream decodes at the next step.
        self._held = list(context)
        self._num_context = len(context)
        self._num_shown_chars = 0  # beginning of the stream's next text that was returned before

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes, possibly empty.

        Raises:
            EngineError: the tokenizer fails on it.
        """
        if token_id in self._left_out or self._backend.id_to_token(token_id) is None:
            return ""  # decoding leaves it out, and the stream would hold it until text comes
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except BaseException as error:
            reason_of(error)
            # The backend raises a bare Exception("Invalid prefix") if the text of a prefix
            # changes with the tokens that follow. A new stream gives this token's own text.
            self._restart([])
            self._held.append(token_id)
            try:
                text = self._stream.step(self._backend, token_id)
            except BaseException as error:
                raise cannot_decode(error) from error
        if text:
            text = text[self._num_shown_chars :]
            self._num_shown_chars = 0
            del self._held[: self._num_context]
            self._num_context = len(self._held)
            return text
        if len(self._held) - self._num_context < _MAX_WAITING_TOKENS:
            return ""
        return self._cut()

    def _cut(self) -> str:
        """Return the text of the waiting tokens, but for a character that may be incomplete."""
        num_shown_chars = self._num_shown_chars + len(self._decode(self._held[: self._num_context]))
        text = self._decode(self._held)[num_shown_chars:]
        last = self._held[-_CHARACTER_TOKENS:]
        self._restart(last)
        last_text = self._decode(last)
        if last_text.endswith("\ufffd"):
            # The stream will return the text of all these tokens, once a character is complete.
            self._num_context = 0
            self._num_shown_chars = len(last_text) - 1
            text = text[:-1]
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


class StopStrings:
    """Finder of the first stop string in a text that arrives in pieces.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece; return (text that is safe to show, the stop string found or None)."""
        if not self._stop:  # as in most requests, and this is called for each token
            return piece, None
        text = self._held + piece
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            position, _, stop = min(found)
            self._held = ""
            return text[:position], stop
        held = max(
            (
                n
                for stop in self._stop
                for n in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:n])
            ),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """Return the text still held back, once the output has ended."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class Delta:
    """Text and tokens that one step added to a completion, as a streaming client sees them.

    `OutputBuilder.push_tokens` adds those of several steps at once, which `texts` keeps apart.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    index: int = 0  # the completion's index
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    texts: Sequence[str] = ()  # of several steps: what each of them added; together, the text

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string ended the completion, so that the caller must abort it.

        The engine does not search for stop strings. No more output of this completion may be
        pushed.
        """
        return isinstance(self.stop_reason, str)


class OutputBuilder:
    """Builder of a request's `RequestOutput` from the engine's token outputs.

    Until it is finished, `output` has all running completions. If they are more than were
    requested, the best are then chosen and renumbered, best first.

    Args:
        request: the request.
        prompt: the prompt's text, if it was text.
        tokenizer: the model's, or None for a checkpoint without one: then `text` stays empty.

    Attributes:
        takes_tokens: whether `push_tokens` may be called.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.takes_tokens = not (
            params.stop_strings or params.logprobs is not None or params.is_ranked
        )
        self._num_wanted = params.n
        self._tokenizer = tokenizer
        self._completions = [
            _CompletionBuilder(request, index, tokenizer)
            for index in range(request.params.num_completions)
        ]
        self._num_running = len(self._completions)
        self.output = RequestOutput(
            request.request_id,
            prompt,
            request.prompt_token_ids,
            [builder.completion for builder in self._completions],
            False,
        )

    @property
    def finished(self) -> bool:
        """Whether all completions have ended, by the engine or by stop strings."""
        return self.output.finished

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all completions, including those that were not chosen."""
        return sum(len(builder.completion.token_ids) for builder in self._completions)

    def push(self, output: TokenOutput) -> Delta:
        """Add one step's output for one completion.

        An error ends all completions.

        Returns: what the step added; if it `needs_abort`, the caller must abort the completion.
        """
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if entry is None else _logprob_dict(entry, self._tokenizer)
                for entry in output.prompt_logprobs
            ]
        delta = self._completions[output.index].push(output)
        if output.num_cached_tokens and not self.output.num_cached_tokens:
            self.output.num_cached_tokens = output.num_cached_tokens
        if output.timing is not None:
            self.output.metrics = output.timing
        if delta.finish_reason is not None:
            self._num_running -= 1
            if delta.finish_reason == "error":
                for builder in self._completions:
                    builder.completion.finish_reason = builder.completion.finish_reason or "error"
                self._num_running = 0
            if self._num_running == 0:
                self.output.finished = True
                self._choose()
        return delta

    def push_tokens(self, index: int, token_ids: list[int]) -> Delta:
        """Add tokens of one completion, each of which is all that a step output for it.

        Does what `push` does for one after the other. Pre-condition: `takes_tokens`.
        """
        return self._completions[index].push_tokens(token_ids)

    def _choose(self) -> None:
        """Keep the most probable completions, as many as were requested."""
        if self._num_wanted == len(self._completions):
            return
        best = sorted(self._completions, key=lambda b: b.cumulative_logprob, reverse=True)
        self.output.outputs = [builder.completion for builder in best[: self._num_wanted]]
        for index, completion in enumerate(self.output.outputs):
            completion.index = index


class _CompletionBuilder:
    """Builder of one completion, with its own detokenizer and stop strings."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.completion = CompletionOutput(index, "", [])
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, params.skip_special_tokens
            )
        self._stop = StopStrings(params.stop_strings)
        self._min_tokens = params.min_tokens
        if params.logprobs is not None:
            self.completion.logprobs = []
        if params.logprobs is not None or params.is_ranked:
            self.completion.cumulative_logprob = 0.0

    @property
    def cumulative_logprob(self) -> float:
        """The key by which completions are ranked. Pre-condition: `is_ranked`."""
        assert self.completion.cumulative_logprob is not None
        return self.completion.cumulative_logprob

    def push(self, output: TokenOutput) -> Delta:
        completion = self.completion
        delta = Delta("", [], None if completion.logprobs is None else [], completion.index)
        stop: str | None = None
        for position, token_id in enumerate(output.token_ids):
            completion.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            if output.logprobs is not None:
                self._add_logprobs(output.logprobs[position], delta)
            text, stop = self._text_of(token_id)
            delta.text += text
            if stop is not None:
                break
        if output.cumulative_logprob is not None:
            completion.cumulative_logprob = output.cumulative_logprob
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        elif output.finish_reason is not None:
            delta.text += self._stop.flush()
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
        completion.text += delta.text
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        return delta

    def push_tokens(self, token_ids: list[int]) -> Delta:
        completion = self.completion
        completion.token_ids += token_ids
        if self._detokenizer is None:
            texts = [""] * len(token_ids)
        else:
            texts = [self._detokenizer.push(token_id) for token_id in token_ids]
        text = "".join(texts)
        completion.text += text
        return Delta(text, token_ids, None, completion.index, texts=texts)

    def _add_logprobs(self, entry: TokenLogprobs, delta: Delta) -> None:
        """Add one token's log probability; its entries only if the client requested them."""
        completion = self.completion
        if completion.cumulative_logprob is not None:
            completion.cumulative_logprob += entry.logprobs[0]
        if completion.logprobs is not None and delta.logprobs is not None:
            logprobs = _logprob_dict(entry, self._tokenizer)
            completion.logprobs.append(logprobs)
            delta.logprobs.append(logprobs)

    def _text_of(self, token_id: int) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(token_id)
        if len(self.completion.token_ids) <= self._min_tokens:
            return text, None
        return self._stop.push(text)


def _logprob_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    return {
        token_id: Logprob(
            logprob,
            rank,
            tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else None,
        )
        for token_id, logprob, rank in zip(
            entry.token_ids, entry.logprobs, entry.ranks, strict=True
        )
    }
