"""How to choose tokens, and when to stop: the parameters of a request, and the request itself."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from aquifer.errors import RequestError

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
"""The most completions of one prompt."""
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 256
"""The longest stop string."""
MAX_TOKENS_NAMED = 1 << 18
"""The most entries of `stop_token_ids`, `logit_bias` and `allowed_token_ids`, each."""
_MAX_INT = 2**31 - 1  # token counts and ranks are 32-bit numbers on the device


@dataclass(frozen=True, slots=True)
class Bound:
    """Range of numbers that a field allows.

    Args:
        lowest: the least number allowed.
        highest: the greatest number allowed.
        is_whole: whether only whole numbers are allowed.
        excludes_lowest: whether `lowest` itself is not allowed.
        advice: what to use instead of a number outside; "" for the range.
    """

    lowest: float
    highest: float
    is_whole: bool = False
    excludes_lowest: bool = False
    advice: str = ""

    def allows(self, value: object) -> bool:
        """Whether a value is a number in the range; NaN is not."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.lowest <= value <= self.highest and not (
            self.excludes_lowest and value == self.lowest
        )

    @property
    def description(self) -> str:
        """The numbers allowed, for messages."""
        if self.advice:
            return self.advice
        noun = "a whole number" if self.is_whole else "a number"
        if self.excludes_lowest:
            return f"{noun} above {self.lowest:g} and at most {self.highest:g}"
        return f"{noun} from {self.lowest:.10g} to {self.highest:.10g}"


BOUNDS: dict[str, Bound] = {
    "n": Bound(1, MAX_SEQUENCES, is_whole=True),
    "best_of": Bound(1, MAX_SEQUENCES, is_whole=True),
    "beam_width": Bound(1, MAX_SEQUENCES, is_whole=True),
    "length_penalty": Bound(-100, 100),
    "temperature": Bound(0, 100),
    "top_p": Bound(0, 1, excludes_lowest=True),
    "top_k": Bound(-1, _MAX_INT, is_whole=True, advice="a positive number, or 0 for all tokens"),
    "min_p": Bound(0, 1),
    "seed": Bound(-(2**63), 2**64 - 1, is_whole=True, advice="a 64-bit integer"),
    "max_tokens": Bound(1, _MAX_INT, is_whole=True),
    "min_tokens": Bound(0, _MAX_INT, is_whole=True),
    "logprobs": Bound(0, MAX_LOGPROBS, is_whole=True),
    "prompt_logprobs": Bound(0, MAX_LOGPROBS, is_whole=True),
    "presence_penalty": Bound(-2, 2),
    "frequency_penalty": Bound(-2, 2),
    "repetition_penalty": Bound(0, 100, excludes_lowest=True),
    "logit_bias": Bound(-100, 100),
}
"""The numbers that each parameter of a request allows; of `logit_bias`, each of its values.

They are checked when `SamplingParams` is made, which is before the engine takes a request.
"""


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
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                _require_number(name, value)
        if self.best_of is not None:
            _require(
                self.best_of >= self.n,
                "best_of",
                self.best_of,
                f"from n, which is {self.n}, to {MAX_SEQUENCES}",
            )
        _require(
            self.early_stopping in (True, False, "never"),
            "early_stopping",
            self.early_stopping,
            'true, false or "never"',
        )
        if self.use_beam_search:
            self._check_beam_search()
        else:
            self._check_no_beam_search()
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens, which is {self.max_tokens}",
            )
        self._check_stop()
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_tokens_named(name)
        for token_id, bias in (self.logit_bias or {}).items():
            _require_number("logit_bias", bias, f"logit_bias[{token_id}]")
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids",
            self.allowed_token_ids,
            "a non-empty list",
        )

    def _check_stop(self) -> None:
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(strings)} texts; it may have at most {MAX_STOP_STRINGS}",
                param="stop",
            )
        for string in strings:
            if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_CHARS:
                shown = repr(string) if len(str(string)) <= 40 else f"{str(string)[:40]!r}..."
                raise RequestError(
                    f"stop contains {shown}; each must be a text of 1 to {MAX_STOP_CHARS} "
                    "characters",
                    param="stop",
                )

    def _check_tokens_named(self, name: str) -> None:
        token_ids = getattr(self, name) or ()
        if len(token_ids) > MAX_TOKENS_NAMED:
            raise RequestError(
                f"{name} has {len(token_ids)} entries; it may have at most {MAX_TOKENS_NAMED}",
                param=name,
            )
        if not all(type(token_id) is int for token_id in token_ids):
            raise RequestError(f"{name} must name tokens by whole numbers", param=name)

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

    def _check_no_beam_search(self) -> None:
        """Refuse parameters that have an effect on a beam search only."""
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            value = getattr(self, name)
            _require(value == default, name, value, "left out without use_beam_search")

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


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """The parameters of each prompt.

    Args:
        params: one for all prompts, or one for each; None for the defaults.
        num_prompts: number of prompts.

    Raises:
        RequestError: they are not as many as prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, Mapping):
        raise RequestError(
            "sampling_params is a mapping; write SamplingParams(max_tokens=16)",
            param="sampling_params",
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one for each "
            "prompt",
            param="sampling_params",
        )
    return list(params)


def longest_first(params: Sequence[SamplingParams]) -> list[int]:
    """Indices of requests that begin together, in an order in which they are soon all done.

    The device does little with a few sequences, so the longest ones should not be left for the end
    (longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). How
    long a completion will be at most is what is known; those of equal length keep their order.
    """
    most = [_MAX_INT if one.max_tokens is None else one.max_tokens for one in params]
    return sorted(range(len(most)), key=lambda index: -most[index])


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
        _require_number("beam_width", self.beam_width)
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

    A retained prefix is found only by requests with the same `cache_salt`. The requests of several
    clients share the models fairly (`aquifer.engine.policies`).
    """

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]  # an `array` where it came from another process
    params: SamplingParams
    arrival_s: float  # time.monotonic(), which all processes of a machine share
    cache_salt: str | None = None
    client: str = ""  # name of the client that it is for
    keep_alive_s: float | None = None  # for its model from now on; None to leave it as it is

    def __reduce__(self) -> tuple[object, ...]:
        """How it is sent to another process: with the token ids as bytes.

        All streams of an engine wait while it reads a request: 131 000 ids of a list take it 3 ms,
        and the first ones 17. Where some are no token ids, all stay as they are, for the engine to
        refuse.
        """
        values = [getattr(self, field.name) for field in fields(self)]
        with suppress(OverflowError, TypeError):
            values[_PROMPT] = array("I", self.prompt_token_ids).tobytes()
        return _received, (values,)


_PROMPT = [field.name for field in fields(Request)].index("prompt_token_ids")


def _received(values: list[Any]) -> Request:
    """The request that was sent with these values."""
    if isinstance(values[_PROMPT], bytes):
        values[_PROMPT] = array("I", values[_PROMPT])
    return Request(*values)


def _require(holds: bool, name: str, value: object, instead: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}; it must be {instead}", param=name)


def _require_number(param: str, value: object, name: str = "") -> None:
    if not BOUNDS[param].allows(value):
        instead = BOUNDS[param].description
        raise RequestError(f"{name or param} is {value!r}; it must be {instead}", param=param)


_NUMBERS = tuple(name for name in BOUNDS if name not in ("beam_width", "logit_bias"))
