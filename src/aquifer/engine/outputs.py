"""Outputs of a request: tokens of each step, and completions for the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the chosen token, then the most probable, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 is the most probable token


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Timestamps of a request, in seconds of time.monotonic(); None if not reached."""

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class TokenOutput:
    """Output of one step for one completion of a request.

    Only the last output of a completion has a `finish_reason`. A sampling request outputs each of
    `SamplingParams.num_sequences` completions token by token, with a logprob for each token if
    completions are ranked (`SamplingParams.is_ranked`). A beam search outputs `n` whole
    completions, best first, each in one output.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    index: int = 0  # the completion's index
    logprobs: list[TokenLogprobs] | None = None  # one entry a token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id that ended it, unless it was an EOS
    error: str | None = None
    # Prompt tokens found in the prefix cache; set in the first output of a request.
    num_cached_tokens: int = 0
    # Sum over all tokens; set for a beam only, because its tokens have no single logprobs.
    cumulative_logprob: float | None = None
    timing: RequestTiming | None = None  # with the last output of a completion

    @property
    def has_only_tokens(self) -> bool:
        """Whether this is token ids and nothing else, as in most steps of most requests."""
        return (
            self.finish_reason is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and not self.num_cached_tokens
            and self.cumulative_logprob is None
            and self.timing is None
            and self.error is None
            and bool(self.token_ids)
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability, before temperature and penalties."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `stop_reason` is the stop string or stop token id that ended it; None if an EOS token did.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTiming | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
