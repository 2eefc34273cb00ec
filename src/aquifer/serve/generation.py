"""Generation for one HTTP request: prompts in, deltas of text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from aquifer.engine.outputs import FinishReason, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import EngineError, RequestError
from aquifer.serve.client import EngineClient
from aquifer.serve.metrics import Metrics
from aquifer.serve.models import TextModel
from aquifer.serve.request_log import RequestLog
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
        *,
        only_scores: bool = False,
    ) -> Job:
        """Create a job; it is not started."""
        request = Request(
            request_id, model.name, prompt.token_ids, params, arrival_s, cache_salt, client
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

    def text_of_token(self, token_id: int) -> str:
        """Decode a single token; empty if there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


async def run_jobs(
    client: EngineClient, metrics: Metrics, log: RequestLog | None, jobs: Sequence[Job]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Run jobs; yield (index of the job, delta of one of its completions) until all finish.

    Closing the generator aborts unfinished jobs.

    Args:
        client: the engine.
        metrics: measures the jobs.
        log: logs them; None if they are not logged.
        jobs: the jobs.

    Raises:
        RequestError: the engine refused one of them.
        EngineError: the engine stopped.
    """
    indexes = {job.request.request_id: index for index, job in enumerate(jobs)}
    watches = [metrics.watch(job.request) for job in jobs]
    reason_of_the_rest: FinishReason | None = "abort"
    if log is not None:
        for job in jobs:
            log.received(job.request, job.builder.output.prompt)
    try:
        async with aclosing(client.generate([job.request for job in jobs])) as outputs:
            async for output in outputs:
                index = indexes[output.request_id]
                job, watch = jobs[index], watches[index]
                watch.output(output)
                if output.finish_reason == "error":
                    raise EngineError(output.error or "the engine lost the request")
                delta = job.push(output)
                if delta.needs_abort:
                    outputs.abort(output.request_id, delta.index)
                if delta.finish_reason is not None:
                    watch.finish(delta.index, delta.finish_reason)
                    if log is not None and job.builder.finished:
                        log.ended(
                            job.request, job.builder.num_generated_tokens, delta.finish_reason
                        )
                yield index, delta
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
