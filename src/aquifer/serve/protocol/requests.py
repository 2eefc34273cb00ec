"""Bodies of requests.

A null field counts as not given; a field that is not listed here is refused by
`aquifer.serve.protocol.parsing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, WrapValidator

from aquifer.durations import parse_duration
from aquifer.engine.params import BOUNDS, MAX_LOGPROBS, SamplingParams
from aquifer.errors import ConfigError, RequestError
from aquifer.serve.protocol.fields import (
    AtMost,
    Biases,
    CacheSalt,
    OnePromptField,
    PromptField,
    StopStrings,
    TokenIds,
    limited,
)

# Variables that the template gets anyway, or arguments of the function that renders it.
_RESERVED_TEMPLATE_ARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tools",
    }
)


MAX_MESSAGES = 2048
MAX_MESSAGE_VALUES = 1 << 16
"""The most JSON values in all messages of a conversation together."""
MAX_TEMPLATE_VALUES = 4096
"""The most JSON values in `chat_template_kwargs`."""
MAX_TOKENS_DECODED = 1 << 18
"""The most tokens of one request to /detokenize."""

UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_processors": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
    # vLLM's
    "bad_words": (None, []),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "guided_choice": (None,),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "kv_transfer_params": (None,),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None,),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
}
"""Known fields that are refused, each with the values that ask for nothing."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None


class ClientFields(BaseModel):
    """Fields for OpenAI's own bookkeeping; no value of them would change an answer."""

    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


_NO_PARAMS = frozenset({"model", "cache_salt", "stream", "stream_options", "keep_alive"})


class SamplingFields(BaseModel):
    """Fields common to completions and chat."""

    model: str | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIds | None = None
    cache_salt: CacheSalt = None
    keep_alive: float | str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def keep_alive_s(self) -> float | None:
        """How long the model's weights are to be kept unused from now on; None if not given.

        Raises:
            RequestError: it is no duration.
        """
        if self.keep_alive is None:
            return None
        try:
            return parse_duration(self.keep_alive)
        except ConfigError as error:
            raise RequestError(f"keep_alive: {error}", param="keep_alive") from None

    def _params(self, defaults: Mapping[str, Any], **others: Any) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        given = {
            name: value
            for name in SamplingFields.model_fields
            if name not in _NO_PARAMS and (value := getattr(self, name)) is not None
        }
        # The model's defaults are sampling values; a beam search refuses some of them.
        applying = {} if self.use_beam_search else defaults
        params = SamplingParams(**{**applying, **given, **others})
        if self.stream and params.is_ranked:
            name = params.ranking_field
            raise RequestError(
                f"{name} cannot be streamed, because the best completions are known only when "
                f"all have ended; leave out stream or {name}",
                param=name,
            )
        return params


class CompletionRequest(SamplingFields, ClientFields):
    """Body of POST /v1/completions."""

    prompt: PromptField
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def only_scores(self) -> bool:
        """Whether only the prompt is wanted, with its log probabilities, and no output."""
        return self.max_tokens == 0 and bool(self.echo)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, each a text or a list of token ids.

        Raises:
            RequestError: there is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt is empty; it must have at least one token", param="prompt")
        # Validation has checked that all elements have the type of the first.
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters; `defaults` are the model's.

        Raises:
            RequestError: a value is impossible, or asks for what is not supported.
        """
        if self.suffix:
            raise RequestError("suffix is not supported; leave it out", param="suffix")
        max_tokens = {}
        if self.max_tokens == 0:
            max_tokens = {"max_tokens": self._least_tokens()}
        return self._params(
            defaults,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            **max_tokens,
        )

    def _least_tokens(self) -> int:
        """The number of tokens that the engine generates for a request with max_tokens 0.

        Raises:
            RequestError: the request would have an empty answer, or asks for more tokens.
        """
        if not self.only_scores:
            raise RequestError(
                "max_tokens is 0, which is for scoring a prompt and needs echo to be true; set "
                "echo, or ask for at least 1 token",
                param="max_tokens",
            )
        if self.min_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, which is 0",
                param="min_tokens",
            )
        return 1


class ChatMessage(BaseModel):
    """A message; fields that are not listed are passed to the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message with its content as one text.

        Raises:
            RequestError: a part of it is not text.
        """
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(map(_text_of_part, self.content))
        return message


Messages = Annotated[
    list[ChatMessage], AtMost(MAX_MESSAGES), WrapValidator(limited(MAX_MESSAGE_VALUES))
]
TemplateArgs = Annotated[dict[str, Any], WrapValidator(limited(MAX_TEMPLATE_VALUES))]


class TemplateFields(BaseModel):
    """Fields that turn a conversation into a prompt."""

    messages: Annotated[Messages, Field(min_length=1)]
    chat_template: str | None = None
    chat_template_kwargs: TemplateArgs | None = None
    add_generation_prompt: bool | None = None

    def template_args(self) -> dict[str, Any]:
        """Return the chat template's variables beside the messages.

        Raises:
            RequestError: one of them is reserved.
        """
        args = self.chat_template_kwargs or {}
        reserved = sorted(_RESERVED_TEMPLATE_ARGS & args.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs must not contain {reserved[0]!r}; leave it out",
                param="chat_template_kwargs",
            )
        return args


class ChatCompletionRequest(SamplingFields, TemplateFields, ClientFields):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters; `defaults` are the model's.

        Raises:
            RequestError: a value is impossible, or asks for what is not supported.
        """
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}",
                    param="top_logprobs",
                )
        max_tokens, bound = self.max_tokens, BOUNDS["max_tokens"]
        for name in ("max_tokens", "max_completion_tokens"):
            if (value := getattr(self, name)) is not None:
                if not bound.allows(value):
                    raise RequestError(
                        f"{name} is {value}; it must be {bound.description}", param=name
                    )
                max_tokens = value  # of both, the latter counts
        return self._params(
            defaults,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=max_tokens,
        )


class PromptOrMessages(BaseModel):
    """One prompt: either `messages`, or the `prompt` field of a subclass."""

    model: str | None = None
    messages: Messages | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateArgs | None = None
    add_generation_prompt: bool | None = None

    def _conversation(
        self, prompt: object, add_generation_prompt_by_default: bool
    ) -> TemplateFields | None:
        if (prompt is None) == (not self.messages):
            raise RequestError("give either prompt or messages", param="prompt")
        if not self.messages:
            return None
        add_prompt = self.add_generation_prompt
        return TemplateFields.model_construct(
            messages=self.messages,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=(
                add_generation_prompt_by_default if add_prompt is None else add_prompt
            ),
        )


class TokenizeRequest(PromptOrMessages):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def conversation(self) -> TemplateFields | None:
        """Return the conversation to tokenize, or None if `prompt` is given.

        Raises:
            RequestError: both or neither are given.
        """
        return self._conversation(self.prompt, add_generation_prompt_by_default=True)


class PrefixRequest(PromptOrMessages):
    """Body of POST /v1/prefixes: either `prompt` or `messages`."""

    prompt: OnePromptField = None
    cache_salt: CacheSalt = None

    def conversation(self) -> TemplateFields | None:
        """Return the conversation to pin, or None if `prompt` is given; more messages may follow.

        Raises:
            RequestError: both or neither are given.
        """
        return self._conversation(self.prompt, add_generation_prompt_by_default=False)


class ModelRequest(BaseModel):
    """Body of POST /models: PATH, NAME=PATH or ORG/NAME, as on the command line."""

    model: str


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[StrictInt], AtMost(MAX_TOKENS_DECODED)]


def _text_of_part(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type", "text") != "text" or not isinstance(text, str):
        raise RequestError(
            f"a content part of type {part.get('type')!r} is not supported; send parts like "
            '{"type": "text", "text": "..."}',
            param="messages",
        )
    return text
