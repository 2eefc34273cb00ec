"""Soak test: random requests of every decoding method against a pool that is too small for them.

Three things must hold: each request whose client stays is answered or refused with a reason, no
request is answered twice, and in the end every page is accounted for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import MAX_LOGPROBS, Request, SamplingParams
from aquifer.errors import CapacityError, ContextLengthError, InvariantError, QueueFullError
from aquifer.llm import LLM
from aquifer.memory.pool import Kind

_NUM_BEGINNINGS = 16
_LEAVES = 0.05  # probability that a client leaves before its answer is complete
_STEPS_BETWEEN = 3  # at most, between two requests,
_MOST_DUE = 64  # unless so many wait or run already


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
    seconds: float = 0.0


class _Crowd:
    """Generator of random requests.

    Args:
        vocab_size: vocabulary size of the model.
        max_tokens: most tokens of a prompt and its output together.
        max_seqs: sequences that may run at once.
        seed: seed of all random choices.
    """

    def __init__(self, vocab_size: int, max_tokens: int, max_seqs: int, seed: int) -> None:
        self.random = Random(seed)
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
        return Request(name, model, prompt, params, time.monotonic(), cache_salt=salt)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self._vocab_size) for _ in range(count)]


def soak(
    llm: LLM,
    num_requests: int,
    max_tokens: int,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> SoakResult:
    """Send requests, abort some as if the client had left, and check all outcomes.

    Args:
        llm: with a small pool, which must have been idle.
        num_requests: how many.
        max_tokens: most tokens of a prompt and its output together; some requests exceed it.
        seed: seed of all random choices.
        on_progress: told how many requests were sent.

    Raises:
        InvariantError: a request was not answered, or answered twice; or pages are not accounted
            for.
    """
    engine = llm.engine
    ((name, info),) = engine.models.items()
    (lane,) = engine.lanes.values()
    crowd = _Crowd(info.vocab_size, max_tokens, engine.limits.max_seqs, seed)
    result = SoakResult(num_requests)
    due: dict[str, set[int]] = {}  # unfinished completions of each request
    left: set[str] = set()

    def note(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.request_id in left:
                continue
            result.num_output_tokens += len(output.token_ids)
            result.num_cached_tokens += output.num_cached_tokens
            if output.finish_reason is None:
                continue
            waiting = due.get(output.request_id)
            if waiting is None or output.index not in waiting or output.error is not None:
                raise InvariantError(f"an answer to no waiting request: {output}")
            waiting.remove(output.index)
            result.num_completions += 1
            if not waiting:
                del due[output.request_id]
                result.num_answered += 1

    start = time.perf_counter()
    for number in range(num_requests):
        request = crowd.request(str(number), name)
        try:
            engine.add(request)
            due[request.request_id] = set(range(request.params.num_completions))
        except (CapacityError, ContextLengthError, QueueFullError) as error:
            kind = type(error).__name__
            result.refused[kind] = result.refused.get(kind, 0) + 1
        if due and crowd.random.random() < _LEAVES:
            leaver = crowd.random.choice(list(due))
            engine.abort(leaver)
            left.add(leaver)
            del due[leaver]
            result.num_left += 1
        for _ in range(crowd.random.randrange(_STEPS_BETWEEN + 1)):
            note(engine.step())
        while len(due) > _MOST_DUE:
            note(engine.step())
        on_progress(number + 1)
    while engine.has_work:
        note(engine.step())
    result.seconds = time.perf_counter() - start
    result.num_preemptions, result.num_swaps = lane.num_preemptions, lane.num_swaps
    if due:
        raise InvariantError(f"{len(due)} requests did not finish, such as {next(iter(due))}")
    check_idle(llm)
    return result


def check_idle(llm: LLM) -> None:
    """Check that an idle engine has pages for weights only, after its prefixes are cleared.

    Raises:
        InvariantError: it has others.
    """
    for lane in llm.engine.lanes.values():
        if lane.prefixes is not None:
            lane.prefixes.clear()
    llm.engine.pool.check()
    for name, model in llm.memory().models.items():
        held = {k: n for k, n in model.bytes_by_kind.items() if n and k != Kind.WEIGHTS}
        if held or model.kv_mapped_bytes or model.num_running or model.num_waiting:
            raise InvariantError(f"the idle model {name} holds {held or model}")
