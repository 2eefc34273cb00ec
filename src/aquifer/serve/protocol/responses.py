"""Bodies of responses, and chunks of streams."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel


class PromptTokensDetails(BaseModel):
    """Part of `Usage`."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Log probabilities in the form of completions: parallel lists, one entry per token."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(BaseModel):
    """One completion, or in a stream its next piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionResponse(BaseModel):
    """Response to POST /v1/completions, and a chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token and its log probability, in the form of chat."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A chosen token, and the most probable ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities in the form of chat."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """The generated message."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One completion of a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionResponse(BaseModel):
    """Response to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """The next piece of a choice."""

    index: int
    delta: dict[Literal["role", "content"], str]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "aquifer"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Response to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Response to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Response to POST /detokenize."""

    prompt: str


class TokenizerInfo(RootModel[dict[str, Any]]):
    """Response to GET /tokenizer_info: fields of `tokenizer_config.json`, and the chat template."""


class PrefixCard(BaseModel):
    """A pinned prefix."""

    id: str
    object: Literal["prefix"] = "prefix"
    created: int
    model: str
    num_tokens: int


class PrefixList(BaseModel):
    """Response to GET /v1/prefixes."""

    object: Literal["list"] = "list"
    data: list[PrefixCard]


class PrefixDeleted(BaseModel):
    """Response to DELETE /v1/prefixes/ID."""

    id: str
    object: Literal["prefix"] = "prefix"
    deleted: Literal[True] = True


class Version(BaseModel):
    """Response to GET /version."""

    version: str


class Memory(RootModel[dict[str, Any]]):
    """Response to GET /memory: sizes in bytes and as text, in all, by model and by device."""


class ModelStatus(BaseModel):
    """What a model does, and how long its weights stay."""

    name: str
    path: str
    status: str
    error: str | None
    weights_total: str
    weights_total_bytes: int
    weights_resident: str
    weights_resident_bytes: int
    weights_shared: str
    weights_shared_bytes: int
    weights_in_host_cache: str
    weights_in_host_cache_bytes: int
    loads: int
    pinned: bool
    keep_alive_seconds: float | None
    seconds_left: float | None
    requests_running: int
    requests_waiting: int
    devices: dict[str, ModelStatus] | None = None  # where there are several


class ModelStates(BaseModel):
    """Response to GET /models."""

    models: list[ModelStatus]


class ModelRemoved(BaseModel):
    """Response to DELETE /models/NAME."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class Snapshot(RootModel[dict[str, Any]]):
    """Event of GET /events: the answer of GET /memory, and counters by model; or an error."""


class ErrorInfo(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorInfo
