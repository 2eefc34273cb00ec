"""Soak test: random requests of every decoding method against a pool that is too small for them.

These things must hold: each request whose client stays is answered or refused with a reason, no
request is answered twice, the books of memory agree throughout, and in the end every page is
accounted for. Where tokens do not depend on chance, they are those of an engine that has memory for
all requests and serves them without preemption (`Sample`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import MAX_LOGPROBS, Request, SamplingParams
from aquifer.errors import CapacityError, ContextLengthError, InvariantError, QueueFullError
from aquifer.llm import LLM
from aquifer.memory.pool import Kind

_NUM_BEGINNINGS = 16
_LEAVES = 0.05  # probability that a client leaves before its answer is complete
_STEPS_BETWEEN = 3  # at most, between two requests,
_MOST_DUE = 64  # unless so many wait or run already
_STEPS_BETWEEN_CHECKS = 64  # of the books of memory
_HIDDEN = 0.8  # probability that the length of an output is hidden, where lengths are
_SHIFT = 4  # outputs become so many times as long


Lengths = Literal["stated", "hidden", "shifting"]
"""Lengths of outputs: as `max_tokens` says; unknown to the scheduler, since most of them end by a
token that is forbidden before and forced then; or these, and longer from the middle of the run on.
"""


@dataclass(slots=True)
class SoakResult:
    """Outcomes of the requests, counted."""

    num_requests: int
    num_answered: int = 0  # all completions finished
    num_left: int = 0  # the client left
    refused: dict[str, int] = field(default_factory=dict)  # by the kind of error
    num_completions: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_steps: int = 0
    num_compared: int = 0  # answers that are those of an undisturbed engine
    seconds: float = 0.0
    buckets: BucketCounts | None = None  # of a bucketed cache


@dataclass(slots=True)
class BucketCounts:
    """What happened to the buckets of a bucketed cache.

    Attributes:
        num_overflows: sequences that have outgrown their region.
        migrated_bytes: bytes that were copied for them.
        bounds: bounds of the buckets after each quarter of the requests, in tokens.
    """

    num_overflows: int
    migrated_bytes: int
    bounds: list[tuple[int, ...]] = field(default_factory=list)


class _Crowd:
    """Generator of random requests.

    Args:
        vocab_size: vocabulary size of the model.
        max_tokens: most tokens of a prompt and its output together.
        max_seqs: sequences that may run at once.
        seed: seed of all random choices.

    Attributes:
        random: makes all choices.
        hidden_tokens: mean tokens of the outputs with hidden lengths; None if all are stated.
    """

    def __init__(self, vocab_size: int, max_tokens: int, max_seqs: int, seed: int) -> None:
        self.random = Random(seed)
        self.hidden_tokens: float | None = None
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_seqs = max_seqs
        self._beginnings = [self._tokens(max_tokens) for _ in range(_NUM_BEGINNINGS)]

    def request(self, name: str, model: str) -> Request:
        """A request of a random kind. Some are too long, or have too many sequences."""
        random = self.random
        shared = random.randrange(self._max_tokens // 2)
        own = self._tokens(random.randrange(1, 2 + self._max_tokens // 8))
        prompt = random.choice(self._beginnings)[:shared] + own
        n = min(random.choice((1, 1, 1, 2, 3, 5)), self._max_seqs)
        best_of = min(n + random.choice((0, 0, 0, 2)), self._max_seqs)
        max_tokens = random.choice((1, random.randrange(1, self._max_tokens), None))
        salt = random.choice((None, None, None, "a"))
        if random.random() < 0.25:
            params = SamplingParams(
                n=n,
                best_of=best_of,
                use_beam_search=True,
                length_penalty=random.choice((0.0, 1.0, 2.0)),
                early_stopping=random.choice((True, False, "never")),
                max_tokens=random.randrange(1, 1 + self._max_tokens // 4),
            )
            return Request(name, model, prompt, params, time.monotonic(), cache_salt=salt)
        params = SamplingParams(
            n=n,
            best_of=best_of,
            temperature=random.choice((0.0, 0.7, 1.0)),
            top_p=random.choice((1.0, 1.0, 0.8)),
            top_k=random.choice((0, 0, 5)),
            frequency_penalty=random.choice((0.0, 0.0, 0.5)),
            logprobs=random.choice((None, None, None, 0, MAX_LOGPROBS)),
            prompt_logprobs=random.choice((None,) * 9 + (1,)),
            seed=random.choice((None, 7)),
            max_tokens=max_tokens,
        )
        if self.hidden_tokens is not None and random.random() < _HIDDEN:
            params = self._with_hidden_length(params, self.hidden_tokens)
        return Request(name, model, prompt, params, time.monotonic(), cache_salt=salt)

    def _with_hidden_length(self, params: SamplingParams, mean_tokens: float) -> SamplingParams:
        """Let an output end by a token that is forbidden before and forced then."""
        last = self._vocab_size - 1
        return replace(
            params,
            max_tokens=None,
            min_tokens=int(self.random.expovariate(1 / mean_tokens)),
            stop_token_ids=[last],
            logit_bias={last: 100.0},
            ignore_eos=True,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self._vocab_size) for _ in range(count)]


class Sample:
    """Answers that do not depend on chance, to compare with those of an undisturbed engine.

    Args:
        num_wanted: how many.
        num_requests: requests that there will be; answers are kept at equal distances.
    """

    def __init__(self, num_wanted: int, num_requests: int) -> None:
        self._answers: list[tuple[Request, list[list[int]]]] = []
        self._num_wanted = num_wanted
        self._distance = max(num_requests // (2 * max(num_wanted, 1)), 1)
        self._num_seen = 0

    def note(self, request: Request, tokens: list[list[int]]) -> None:
        """Keep an answer, or not: the tokens of all completions."""
        params = request.params
        if not (params.use_beam_search or params.temperature == 0 or params.seed is not None):
            return
        self._num_seen += 1
        if self._num_seen % self._distance == 0 and len(self._answers) < self._num_wanted:
            self._answers.append((request, tokens))

    def compare(self, llm: LLM) -> int:
        """Compare with the answers of another engine of the same model; returns how many.

        Raises:
            InvariantError: tokens differ.
        """
        engine = llm.engine
        tokens: dict[str, list[list[int]]] = {}
        for start in range(0, len(self._answers), _MOST_DUE):
            for request, _ in self._answers[start : start + _MOST_DUE]:
                tokens[request.request_id] = [[] for _ in range(request.params.num_completions)]
                engine.add(request)
            while engine.has_work:
                for output in engine.step():
                    tokens[output.request_id][output.index] += output.token_ids
        for request, expected in self._answers:
            found = tokens[request.request_id]
            if request.params.max_tokens is None:  # a small pool may end it earlier
                found = [part[: len(rest)] for part, rest in zip(found, expected, strict=True)]
            if found != expected:
                raise InvariantError(f"other tokens than without other requests: {request}")
        return len(self._answers)


class _Answers:
    """Answers as they come in.

    Args:
        result: where they are counted.
        sample: gets those that are complete; None if they are not compared.

    Attributes:
        due: requests that wait for an answer.
    """

    def __init__(self, result: SoakResult, sample: Sample | None) -> None:
        self.due: dict[str, Request] = {}
        self._result = result
        self._sample = sample
        self._unfinished: dict[str, set[int]] = {}  # completions of each request
        self._tokens: dict[str, list[list[int]]] = {}
        self._left: set[str] = set()

    def expect(self, request: Request) -> None:
        """Wait for the answer of a request."""
        count = request.params.num_completions
        self.due[request.request_id] = request
        self._unfinished[request.request_id] = set(range(count))
        self._tokens[request.request_id] = [[] for _ in range(count)]

    def leave(self, request_id: str) -> None:
        """Wait for the answer of a request no longer."""
        self._left.add(request_id)
        self._result.num_left += 1
        self._forget(request_id)

    def note(self, outputs: Iterable[TokenOutput]) -> None:
        """Count what a step has brought.

        Raises:
            InvariantError: an output answers no waiting request, or is an error.
        """
        for output in outputs:
            request_id = output.request_id
            if request_id in self._left:
                continue
            self._result.num_output_tokens += len(output.token_ids)
            self._result.num_cached_tokens += output.num_cached_tokens
            unfinished = self._unfinished.get(request_id, ())
            if output.index not in unfinished or output.error is not None:
                raise InvariantError(f"an answer to no waiting request: {output}")
            self._tokens[request_id][output.index] += output.token_ids
            if output.finish_reason is not None:
                self._finish(request_id, output.index)

    def _finish(self, request_id: str, index: int) -> None:
        """A completion is complete, and with the last one its request."""
        unfinished = self._unfinished[request_id]
        unfinished.remove(index)
        self._result.num_completions += 1
        if not unfinished:
            self._result.num_answered += 1
            if self._sample is not None:
                self._sample.note(self.due[request_id], self._tokens[request_id])
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self.due[request_id], self._unfinished[request_id], self._tokens[request_id]


def soak(
    llm: LLM,
    num_requests: int,
    max_tokens: int,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
    *,
    lengths: Lengths = "stated",
    sample: Sample | None = None,
) -> SoakResult:
    """Send requests, abort some as if the client had left, and check all outcomes.

    Args:
        llm: with a small pool, which must have been idle.
        num_requests: how many.
        max_tokens: most tokens of a prompt and its output together; some requests exceed it.
        seed: seed of all random choices.
        on_progress: told how many requests were sent.
        lengths: see `Lengths`.
        sample: gets complete answers; None if they are not to be compared.

    Raises:
        InvariantError: a request was not answered, or answered twice; or pages or pieces of
            buckets are not accounted for.
    """
    engine = llm.engine
    ((name, info),) = engine.models.items()
    (lane,) = engine.lanes.values()
    crowd = _Crowd(info.vocab_size, max_tokens, engine.limits.max_seqs, seed)
    if lengths != "stated":
        crowd.hidden_tokens = max_tokens / 8
    result = SoakResult(num_requests)
    answers = _Answers(result, sample)
    bounds: list[tuple[int, ...]] = []

    def step() -> None:
        answers.note(engine.step())
        result.num_steps += 1
        if result.num_steps % _STEPS_BETWEEN_CHECKS == 0:
            engine.pool.check()
            if isinstance(lane.cache, BucketedCache):
                lane.cache.check()

    start = time.perf_counter()
    for number in range(num_requests):
        if lengths == "shifting" and number == num_requests // 2:
            crowd.hidden_tokens = _SHIFT * max_tokens / 8
        request = crowd.request(str(number), name)
        try:
            engine.add(request)
            answers.expect(request)
        except (CapacityError, ContextLengthError, QueueFullError) as error:
            kind = type(error).__name__
            result.refused[kind] = result.refused.get(kind, 0) + 1
        if answers.due and crowd.random.random() < _LEAVES:
            leaver = crowd.random.choice(list(answers.due))
            engine.abort(leaver)
            answers.leave(leaver)
        for _ in range(crowd.random.randrange(_STEPS_BETWEEN + 1)):
            step()
        while len(answers.due) > _MOST_DUE:
            step()
        if isinstance(lane.cache, BucketedCache) and (number + 1) % (num_requests // 4 or 1) == 0:
            bounds.append(lane.cache.bounds.bounds)
        on_progress(number + 1)
    while engine.has_work:
        step()
    result.seconds = time.perf_counter() - start
    result.num_preemptions, result.num_swaps = lane.num_preemptions, lane.num_swaps
    if isinstance(lane.cache, BucketedCache):
        cache = lane.cache
        result.buckets = BucketCounts(cache.num_overflows, cache.migrated_bytes, bounds)
    if answers.due:
        due = answers.due
        raise InvariantError(f"{len(due)} requests did not finish, such as {next(iter(due))}")
    check_idle(llm)
    return result


def check_idle(llm: LLM) -> None:
    """Check that an idle engine has pages for weights only, after its prefixes are cleared; and
    that no piece of its buckets is lost.

    Raises:
        InvariantError: it has other pages, or a piece is lost.
    """
    for lane in llm.engine.lanes.values():
        if lane.prefixes is not None:
            lane.prefixes.clear()
        if isinstance(lane.cache, BucketedCache):
            lane.cache.check_empty()
    llm.engine.pool.check()
    for name, model in llm.memory().models.items():
        held = {k: n for k, n in model.bytes_by_kind.items() if n and k != Kind.WEIGHTS}
        cache = llm.engine.lanes[name].cache
        kept_bytes = cache.kept_bytes if isinstance(cache, BucketedCache) else 0
        held_bytes = sum(held.values())
        has_work = model.num_running or model.num_waiting
        if held_bytes != kept_bytes or model.kv_mapped_bytes != kept_bytes or has_work:
            raise InvariantError(f"the idle model {name} holds {held or model}")
