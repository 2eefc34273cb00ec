"""How to choose tokens, and when to stop: the parameters of a request, and the request itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aquifer.errors import RequestError

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
"""The most completions of one prompt."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request: how to choose tokens and when to stop.

    Names and defaults are vLLM's.

    Args:
        n: completions to return for the prompt.
        best_of: generate this many completions, and return the `n` with the highest cumulative
            log probability.
        use_beam_search: search for the most probable completions with `best_of` beams; the
            sampling parameters have no effect then.
        length_penalty: for beam search: scores are divided by length to this power.
        early_stopping: for beam search, as in Transformers: True to stop when there are enough
            finished beams, False when a better one is unlikely, "never" when it is impossible.
        temperature: 0 is greedy.
        top_p: sample from the most probable tokens that together reach this mass; in (0, 1].
        top_k: sample from this many most probable tokens; 0 or -1 for all.
        min_p: exclude tokens less probable than this fraction of the most probable one.
        seed: makes the request's tokens reproducible, in any batch.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: tokens that end the output, in addition to the model's own.
        max_tokens: maximum number of tokens to generate; None for the rest of the context.
        min_tokens: no stop token is sampled before this many tokens.
        logprobs: report this many most probable tokens at each position, and the chosen one.
        prompt_logprobs: the same for the prompt.
        presence_penalty: subtracted from the logit of each token that the output contains.
        frequency_penalty: subtracted from it once per occurrence in the output.
        repetition_penalty: divides the positive (multiplies the negative) logits of tokens that
            prompt or output contain.
        ignore_eos: continue past the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        logit_bias: added to the logits of these tokens, each in [-100, 100].
        allowed_token_ids: sample from these tokens only.

    Raises:
        RequestError: a value is invalid; the message names the field and a value that works.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.n <= MAX_SEQUENCES, "n", self.n, f"from 1 to {MAX_SEQUENCES}")
        if self.best_of is not None:
            _require(
                self.n <= self.best_of <= MAX_SEQUENCES,
                "best_of",
                self.best_of,
                f"from n, which is {self.n}, to {MAX_SEQUENCES}",
            )
        _require_number("length_penalty", self.length_penalty, -100.0, 100.0)
        _require(
            self.early_stopping in (True, False, "never"),
            "early_stopping",
            self.early_stopping,
            'true, false or "never"',
        )
        if self.use_beam_search:
            self._check_beam_search()
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        _require(self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1, such as 0.9")
        _require(self.top_k >= -1, "top_k", self.top_k, "a positive number, or 0 for all tokens")
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        _require(
            self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0"
        )
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(
            0 <= self.min_tokens <= (self.max_tokens or math.inf),
            "min_tokens",
            self.min_tokens,
            "from 0 to max_tokens",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require(0 <= value <= MAX_LOGPROBS, name, value, f"from 0 to {MAX_LOGPROBS}")
        _require(all(self.stop_strings), "stop", self.stop, "a list of non-empty texts")
        for token_id, bias in (self.logit_bias or {}).items():
            _require_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        if self.allowed_token_ids is not None:
            _require(
                len(self.allowed_token_ids) > 0,
                "allowed_token_ids",
                self.allowed_token_ids,
                "a non-empty list",
            )

    def _check_beam_search(self) -> None:
        """Refuse parameters that have no defined effect on a beam search."""
        without_effect = {
            "stop": bool(self.stop_strings),
            "min_tokens": self.min_tokens > 0,
            "logprobs": self.logprobs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "logit_bias": bool(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids is not None,
        }
        for name, is_set in without_effect.items():
            _require(not is_set, name, getattr(self, name), "left out with use_beam_search")

    @property
    def has_penalties(self) -> bool:
        """Whether logits are changed for tokens that occurred before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def changes_logits(self) -> bool:
        """Whether single tokens' logits are changed, by biases or a list of allowed tokens."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that run for the prompt: candidate completions, or beams."""
        return self.best_of or self.n

    @property
    def num_completions(self) -> int:
        """Completions that the engine outputs; for a beam search the `n` best beams."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def is_ranked(self) -> bool:
        """Whether completions are ranked: the best are known only when all have ended."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def ranking_field(self) -> str:
        """The parameter that makes `is_ranked` true, for messages."""
        return "use_beam_search" if self.use_beam_search else "best_of"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_ids_named(self) -> set[int]:
        """All token ids in the parameters, to be checked against the vocabulary."""
        return {
            *(self.stop_token_ids or ()),
            *(self.logit_bias or ()),
            *(self.allowed_token_ids or ()),
        }


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search. Names are vLLM's.

    Args:
        beam_width: number of beams, and of completions returned.
        max_tokens: maximum length of a completion.
        ignore_eos: continue past the model's end-of-sequence tokens.
        length_penalty: the score of a beam is the sum of its log probabilities divided by its
            length to this power; above 0 favours long completions.
        early_stopping: as in Transformers: True to stop when there are `beam_width` finished beams,
            False when a better one is unlikely, "never" when it is impossible.
        stop_token_ids: tokens that end a beam, in addition to the model's own.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] | None = None

    def sampling_params(self) -> SamplingParams:
        """Convert to `SamplingParams`, which is what a request carries.

        Raises:
            RequestError: a value is invalid.
        """
        _require(
            1 <= self.beam_width <= MAX_SEQUENCES,
            "beam_width",
            self.beam_width,
            f"from 1 to {MAX_SEQUENCES}",
        )
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to complete. It holds token ids; text is handled at either end of the engine.

    A retained prefix is found only by requests with the same `cache_salt`.
    """

    request_id: str
    model: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float  # time.monotonic(), which all processes of a machine share
    cache_salt: str | None = None


def _require(holds: bool, name: str, value: object, instead: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}; it must be {instead}", param=name)


def _require_number(
    name: str, value: float, lowest: float, highest: float, param: str | None = None
) -> None:
    # NaN fails both comparisons.
    if not lowest <= value <= highest:
        raise RequestError(
            f"{name} is {value!r}; it must be a number from {lowest:g} to {highest:g}",
            param=param or name,
        )
