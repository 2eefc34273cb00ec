"""Generation for one HTTP request: prompts in, deltas of text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from aquifer.engine.outputs import FinishReason, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import EngineError, RequestError
from aquifer.serve.client import EngineClient
from aquifer.serve.metrics import Metrics, RequestMetrics
from aquifer.serve.models import TextModel
from aquifer.serve.request_log import RequestLog
from aquifer.serve.streams import Arrival, Tokens, TokenStream
from aquifer.text import Delta, OutputBuilder, Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A tokenised prompt; `text` is None if it came as token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt with its request and the builder of its output.

    Args:
        request: the request.
        builder: builds its output.
        tokenizer: the model's, if it has one.
        only_scores: only the prompt's log probabilities are wanted. The engine generates one token,
            which is dropped.
    """

    request: Request
    builder: OutputBuilder
    tokenizer: Tokenizer | None
    only_scores: bool = False

    @classmethod
    def prepare(
        cls,
        model: TextModel,
        prompt: EncodedPrompt,
        params: SamplingParams,
        request_id: str,
        arrival_s: float,
        cache_salt: str | None,
        client: str,
        keep_alive_s: float | None = None,
        *,
        only_scores: bool = False,
    ) -> Job:
        """Create a job; it is not started."""
        request = Request(
            request_id,
            model.name,
            prompt.token_ids,
            params,
            arrival_s,
            cache_salt,
            client,
            keep_alive_s,
        )
        builder = OutputBuilder(request, prompt.text, model.tokenizer)
        return cls(request, builder, model.tokenizer, only_scores)

    def push(self, output: TokenOutput) -> Delta:
        """Add one output of the engine; returns what it adds for the client."""
        if self.only_scores:
            reason: FinishReason | None = None if output.finish_reason is None else "length"
            output = replace(
                output, token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None
            )
        return self.builder.push(output)

    @property
    def takes_tokens(self) -> bool:
        """Whether `push_tokens` adds all that it is given."""
        return self.builder.takes_tokens and not self.only_scores

    def push_tokens(self, tokens: Tokens) -> tuple[int, list[Delta]]:
        """Add outputs that are a token each.

        Returns: how many of them were added, which are all unless a stop string ended the
            completion; and what they add for the client.
        """
        if self.takes_tokens:
            delta = self.builder.push_tokens(tokens.index, tokens.token_ids)
            return len(tokens.token_ids), [delta]
        deltas: list[Delta] = []
        for token_id in tokens.token_ids:
            deltas.append(self.push(TokenOutput(tokens.request_id, [token_id], tokens.index)))
            if deltas[-1].finish_reason is not None:
                break
        return len(deltas), deltas

    def text_of_token(self, token_id: int) -> str:
        """Decode a single token; empty if there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


Deltas = list[tuple[int, Delta]]
"""What outputs add: (index of the job, delta of one of its completions)."""


class Shortcut(Protocol):
    """Takes deltas in place of the consumer of `run_jobs`, which waits meanwhile."""

    @property
    def is_open(self) -> bool:
        """Whether deltas can be taken now."""

    def take(self, deltas: Deltas) -> None:
        """Take deltas. Pre-condition: `is_open`."""


async def run_jobs(
    client: EngineClient,
    metrics: Metrics,
    log: RequestLog | None,
    jobs: Sequence[Job],
    shortcut: Shortcut | None = None,
) -> AsyncGenerator[Deltas, None]:
    """Run jobs until all finish; yield the deltas that have arrived together.

    Closing the generator aborts unfinished jobs.

    Args:
        client: the engine.
        metrics: measures the jobs.
        log: logs them; None if they are not logged.
        jobs: the jobs.
        shortcut: takes deltas of tokens alone when it is open; None for all to be yielded.

    Raises:
        RequestError: the engine refused one of them.
        EngineError: the engine stopped.
    """
    watches = [metrics.watch(job.request) for job in jobs]
    reason_of_the_rest: FinishReason | None = "abort"
    if log is not None:
        for job in jobs:
            log.received(job.request, job.builder.output.prompt)
    try:
        async with aclosing(client.generate([job.request for job in jobs])) as outputs:
            run = _Run(outputs, jobs, watches, log)
            if shortcut is not None and all(job.takes_tokens for job in jobs):
                outputs.shortcut = partial(run.add_by, shortcut)
            async for arrived in outputs:
                yield run.add(arrived)
                if run.lost is not None:
                    raise run.lost
    except RequestError:
        reason_of_the_rest = None  # it was never accepted
        raise
    except EngineError:
        reason_of_the_rest = "error"
        raise
    finally:
        if reason_of_the_rest is not None:
            for watch in watches:
                watch.finish_all(reason_of_the_rest)
        if log is not None:
            for job in jobs:
                if not job.builder.finished:
                    log.ended(job.request, job.builder.num_generated_tokens, reason_of_the_rest)


class _Run:
    """Jobs that run together, and their stream of outputs.

    Attributes:
        lost: the error that ends them all, once the engine has lost one of them.
    """

    def __init__(
        self,
        outputs: TokenStream,
        jobs: Sequence[Job],
        watches: Sequence[RequestMetrics],
        log: RequestLog | None,
    ) -> None:
        self._outputs = outputs
        self._jobs = jobs
        self._watches = watches
        self._log = log
        self._indexes = {job.request.request_id: index for index, job in enumerate(jobs)}
        self.lost: EngineError | None = None

    def add(self, arrived: Sequence[Arrival]) -> Deltas:
        """Add outputs; return what they add, up to the one with which the engine lost a job."""
        deltas: Deltas = []
        for item in arrived:
            if not self._outputs.accepts(item):
                continue
            index = self._indexes[item.request_id]
            job, watch = self._jobs[index], self._watches[index]
            if isinstance(item, Tokens):
                num_added, added = job.push_tokens(item)
                watch.tokens(item.index, item.arrived_s[:num_added])
                deltas += [(index, delta) for delta in added]
            else:
                watch.output(item.output, item.arrived_s)
                if item.output.finish_reason == "error":
                    self.lost = EngineError(item.output.error or "the engine lost the request")
                    break
                added = [job.push(item.output)]
                deltas.append((index, added[0]))
            if added[-1].finish_reason is not None:
                self._finish(job, watch, added[-1])
        return deltas

    def add_by(self, shortcut: Shortcut, arrived: Sequence[Arrival]) -> bool:
        """Add outputs, and give what they add to a shortcut; False if it is not open."""
        if not shortcut.is_open:
            return False
        shortcut.take(self.add(arrived))
        return True

    def _finish(self, job: Job, watch: RequestMetrics, delta: Delta) -> None:
        """Record the end of a completion, whose last delta this is."""
        assert delta.finish_reason is not None
        if delta.needs_abort:
            self._outputs.abort(job.request.request_id, delta.index)
        watch.finish(delta.index, delta.finish_reason)
        if self._log is not None and job.builder.finished:
            self._log.ended(job.request, job.builder.num_generated_tokens, delta.finish_reason)
