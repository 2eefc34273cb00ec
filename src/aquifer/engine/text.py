"""Text at either end of the engine: encoding, chat templates, detokenising, stop strings.

Nothing here touches the engine or torch, so that a server can do all of it in another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import DecodeStream
from transformers.utils.chat_template_utils import render_jinja_template

from aquifer.engine.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    TokenLogprobs,
    TokenOutput,
)
from aquifer.errors import ConfigError, RequestError

# What a template can raise: it calls methods and does arithmetic on what the client sent.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_PRIMING_TOKENS = 5  # of the prompt, so that the first output token gets its leading space right


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        backend: the tokenizer proper.
        chat_template: Jinja source, or None if the model has none.
        special_tokens: what the template may refer to, such as `bos_token`.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> Tokenizer | None:
        """Read `tokenizer.json` and what goes with it; None if the checkpoint has no tokenizer.

        Args:
            folder: the checkpoint.
            chat_template: used in place of the checkpoint's own.

        Raises:
            ConfigError: a file is there, but damaged.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = BackendTokenizer.from_file(str(file))
            config = _read_optional_json(folder / "tokenizer_config.json")
            template_file = folder / "chat_template.jinja"
            if chat_template is None and template_file.is_file():
                chat_template = template_file.read_text(encoding="utf-8")
            special_tokens = {
                name: token["content"] if isinstance(token, dict) else token
                for name, token in config.items()
                if name.endswith("_token") and isinstance(token, (str, dict))
            }
            return cls(backend, chat_template or _default_template(config), special_tokens)
        except Exception as error:  # the backend raises bare Exception
            raise ConfigError(f"cannot read the tokenizer in {folder}: {error!r}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: it is no Unicode: it has lone surrogates, which JSON can spell.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise RequestError("the text is not valid Unicode", param="prompt") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the chat template.

        Raises:
            RequestError: the model has no chat template, or it refuses these messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or give the server one "
                "with --chat-template",
                param="messages",
            )
        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **template_args,
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        return self.encode(rendered[0], add_special_tokens=False)


class Detokenizer:
    """Text of a growing list of tokens; never half a character.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what comes before the output.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._backend = tokenizer.backend
        self._skip_special_tokens = skip_special_tokens
        priming = list(prompt_token_ids[-_PRIMING_TOKENS:])
        if tokenizer.decode(priming, skip_special_tokens).endswith("\ufffd"):
            priming = []  # half a character: it must not come out with the output's first token
        self._stream = DecodeStream(ids=priming, skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:
            # The backend's bare Exception("Invalid prefix"): a decoder whose text for a prefix
            # changes with what follows. A fresh stream gives this token's own text.
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._backend, token_id) or ""


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    Text that may turn out to be the beginning of a stop string is held back until that is known.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string found or None)."""
        text = self._held + piece
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            position, _, stop = min(found)
            self._held = ""
            return text[:position], stop
        held = max(
            (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What is still held back, once the output has ended."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class Delta:
    """What one step added to a completion, as a client of a stream sees it."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    index: int = 0  # of the completion
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string ended the completion: the engine does not know, and must be told.

        No more output of this completion may be pushed.
        """
        return isinstance(self.stop_reason, str)


class OutputBuilder:
    """Turns the engine's token outputs for one request into its `RequestOutput`.

    Until it is finished, `output` has all completions that run. If they are more than were asked
    for, the best are chosen then and numbered anew, best first.

    Args:
        request: what was asked.
        prompt: the prompt's text, if it was text.
        tokenizer: the model's, or None for a checkpoint without one: then `text` stays empty.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self._num_wanted = request.params.n
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
        """Whether the output is complete: by the engine's word, or by stop strings."""
        return self.output.finished

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all completions, those included that were not chosen."""
        return sum(len(builder.completion.token_ids) for builder in self._completions)

    def push(self, output: TokenOutput) -> Delta:
        """Add one step's output for one completion.

        An error ends all completions.

        Returns: what the step added; if it `needs_abort`, the caller must tell the engine.
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

    def _choose(self) -> None:
        """Keep as many completions as were asked for."""
        if self._num_wanted == len(self._completions):
            return
        best = sorted(self._completions, key=lambda b: b.cumulative_logprob, reverse=True)
        self.output.outputs = [builder.completion for builder in best[: self._num_wanted]]
        for index, completion in enumerate(self.output.outputs):
            completion.index = index


class _CompletionBuilder:
    """One completion of a request, with its own half characters and half stop strings."""

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
        if params.logprobs is not None or params.is_choice:
            self.completion.cumulative_logprob = 0.0

    @property
    def cumulative_logprob(self) -> float:
        """What completions are chosen by. Pre-condition: there is a choice to make."""
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

    def _add_logprobs(self, entry: TokenLogprobs, delta: Delta) -> None:
        """Of one token; the entries themselves only if the client asked for them."""
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


def _read_optional_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return content


def _default_template(config: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer configuration, which may hold several by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
