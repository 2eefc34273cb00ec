"""Prometheus metrics of requests, as a web process measures them.

They have vLLM's names, prefixed `aquifer:`. docs/guide/metrics.md has them all, those of the engine
too, which are in `aquifer.serve.engine_metrics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from aquifer.engine.outputs import FinishReason, TokenOutput
from aquifer.engine.params import Request

PROMPT_TOKENS = "aquifer:prompt_tokens"
GENERATION_TOKENS = "aquifer:generation_tokens"
COMPLETIONS = "aquifer:request_success"

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """What one web process measures of its requests, in a separate registry.

    Args:
        context_tokens: context length of each served model, by name. Every series of theirs exists
            from the start.

    Attributes:
        models: what is measured of each model, by name.
    """

    def __init__(self, context_tokens: Mapping[str, int]) -> None:
        self._registry = CollectorRegistry()
        self._histograms: dict[str, Histogram] = {}
        self._finished = Counter(
            COMPLETIONS,
            "Finished completions, of which a request may have several, by why they finished.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._token_buckets = _up_to(max(context_tokens.values(), default=1))
        self.models: dict[str, ModelMetrics] = {}
        for name in context_tokens:
            self.add(name)
        self._registry.register(_TokenCollector(self.models))

    def add(self, model: str) -> None:
        """Measure another model; one that was here before goes on where it ended.

        Its requests may be longer than the last bucket, which is that of the first models.
        """
        if model not in self.models:
            self.models[model] = ModelMetrics(
                partial(self._histogram, model),
                {reason: self._finished.labels(model, reason) for reason in get_args(FinishReason)},
                self._token_buckets,
            )

    def families(self) -> list[Metric]:
        """Return all metrics as they are now."""
        return list(self._registry.collect())

    def watch(self, request: Request) -> RequestMetrics:
        """Start measuring a request."""
        return RequestMetrics(self.models[request.model], request)

    def _histogram(self, model: str, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A model's series of a histogram, which is made for the first model that asks for it."""
        if name not in self._histograms:
            self._histograms[name] = Histogram(
                f"aquifer:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
            )
        return self._histograms[name].labels(model)


class TokenHistogram:
    """Histogram of what is measured for every token: `observe` is a fifth of Prometheus's.

    For one thread.

    Args:
        bounds: upper bounds of the buckets, without infinity, in increasing order.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # by bucket; the last one is up to infinity
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Record a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_between(self, last: float, values: Sequence[float]) -> None:
        """Record the difference of each value to the one before it, which is first `last`."""
        counts, bounds = self._counts, self._bounds
        self._sum += values[-1] - last
        for value in values:
            counts[bisect_left(bounds, value - last)] += 1
            last = value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add the buckets and the sum to a family, with these values of its labels."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets, self._sum)


class ModelMetrics:
    """Counters and histograms of one model, which `RequestMetrics` fills.

    They are a model's own objects, so that nothing is looked up for a token.

    Args:
        histogram: makes a histogram from its name, its help and its buckets.
        finished: counters of finished completions, by reason.
        token_buckets: buckets for tokens of a request.
    """

    def __init__(
        self,
        histogram: Callable[[str, str, tuple[float, ...]], Histogram],
        finished: Mapping[FinishReason, Counter],
        token_buckets: tuple[float, ...],
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished = dict(finished)
        self.first_token_s = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.inter_token_s = TokenHistogram(_TOKEN_S)
        self.per_token_s = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after the first.",
            _TOKEN_S,
        )
        self.end_to_end_s = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self.queue_s = histogram(
            "request_queue_time_seconds", "From arrival to scheduling.", _REQUEST_S
        )
        self.inference_s = histogram(
            "request_inference_time_seconds", "From scheduling to the last token.", _REQUEST_S
        )
        self.prefill_s = histogram(
            "request_prefill_time_seconds", "From scheduling to the first token.", _REQUEST_S
        )
        self.decode_s = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self.prompt_tokens = histogram(
            "request_prompt_tokens", "Tokens of a request's prompt.", token_buckets
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a completion.", token_buckets
        )
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest completion of a request.",
            token_buckets,
        )
        self.params_n = histogram("request_params_n", "Parameter n of a request.", _COMPLETIONS)
        self.params_max_tokens = histogram(
            "request_params_max_tokens",
            "Parameter max_tokens of a request, if it has one.",
            token_buckets,
        )


@dataclass(slots=True)
class _Watched:
    """Measurements of one completion."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    num_outputs: int = 0  # outputs with tokens
    is_finished: bool = False


class RequestMetrics:
    """Measurements of one request, output by output.

    As in vLLM, times are measured for each completion. The prompt, which all completions share, is
    counted once.
    """

    def __init__(self, metrics: ModelMetrics, request: Request) -> None:
        self._metrics = metrics
        self._params = request.params
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._arrival_s = request.arrival_s
        self._completions = [_Watched() for _ in range(request.params.num_completions)]
        self._num_open = len(self._completions)
        self._has_begun = False

    def tokens(self, index: int, arrived_s: Sequence[float]) -> None:
        """Record outputs of one completion that are a token each.

        Args:
            index: the completion's index.
            arrived_s: when each of them arrived, in seconds of time.monotonic().
        """
        metrics, watched = self._metrics, self._completions[index]
        if watched.first_s is None:
            self._tokens(index, 1, arrived_s[0])
            arrived_s = arrived_s[1:]
        if arrived_s:
            metrics.inter_token_s.observe_between(watched.last_s, arrived_s)
            watched.last_s = arrived_s[-1]
            watched.num_tokens += len(arrived_s)
            watched.num_outputs += len(arrived_s)
            metrics.num_generation_tokens += len(arrived_s)

    def output(self, output: TokenOutput, now_s: float) -> None:
        """Record one output that arrived at `now_s`, in seconds of time.monotonic()."""
        metrics = self._metrics
        if output.token_ids:
            self._tokens(output.index, len(output.token_ids), now_s)
        timing = output.timing
        if timing is not None and timing.scheduled_s is not None:
            metrics.queue_s.observe(timing.scheduled_s - timing.arrival_s)
            if timing.first_token_s is not None:
                metrics.prefill_s.observe(timing.first_token_s - timing.scheduled_s)
            if timing.last_token_s is not None:
                metrics.inference_s.observe(timing.last_token_s - timing.scheduled_s)

    def _tokens(self, index: int, count: int, now_s: float) -> None:
        """Record the tokens of one output."""
        metrics, watched = self._metrics, self._completions[index]
        if watched.first_s is None:
            watched.first_s = now_s
            metrics.first_token_s.observe(now_s - self._arrival_s)
            if not self._has_begun:
                self._has_begun = True
                metrics.num_prompt_tokens += self._num_prompt_tokens
        else:
            metrics.inter_token_s.observe(now_s - watched.last_s)
        watched.last_s = now_s
        watched.num_tokens += count
        watched.num_outputs += 1
        metrics.num_generation_tokens += count

    def finish(self, index: int, reason: FinishReason) -> None:
        """Record the end of a completion; later calls for it have no effect."""
        watched = self._completions[index]
        if watched.is_finished:
            return
        watched.is_finished = True
        self._metrics.finished[reason].inc()
        self._metrics.generation_tokens.observe(watched.num_tokens)
        if reason in ("stop", "length") and watched.first_s is not None:
            self._observe_times(watched, watched.first_s)
        self._num_open -= 1
        if self._num_open == 0:
            self._finish_request()

    def finish_all(self, reason: FinishReason) -> None:
        """Record the end of all completions that have not ended."""
        for index in range(len(self._completions)):
            self.finish(index, reason)

    def _observe_times(self, watched: _Watched, first_s: float) -> None:
        metrics = self._metrics
        metrics.end_to_end_s.observe(watched.last_s - self._arrival_s)
        if watched.num_tokens > 1 and watched.num_outputs == 1:
            return  # a beam arrives whole: the times of its tokens are unknown
        decode_s = watched.last_s - first_s
        metrics.decode_s.observe(decode_s)
        if watched.num_tokens > 1:
            metrics.per_token_s.observe(decode_s / (watched.num_tokens - 1))

    def _finish_request(self) -> None:
        """Record what a request has once, when all of its completions have ended."""
        metrics, params = self._metrics, self._params
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        longest = max(watched.num_tokens for watched in self._completions)
        metrics.max_generation_tokens.observe(longest)
        metrics.params_n.observe(params.n)
        if params.max_tokens is not None:
            metrics.params_max_tokens.observe(params.max_tokens)


class _TokenCollector(Collector):
    """Collector of what is counted for every token, read at each scrape."""

    def __init__(self, models: Mapping[str, ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        label = ["model_name"]
        prompts = CounterMetricFamily(PROMPT_TOKENS, "Prompt tokens processed.", labels=label)
        generated = CounterMetricFamily(GENERATION_TOKENS, "Tokens generated.", labels=label)
        between = HistogramMetricFamily(
            "aquifer:inter_token_latency_seconds",
            "Between two outputs of a completion.",
            labels=label,
        )
        for model, metrics in self._models.items():
            metrics.inter_token_s.add_to(between, [model])
            prompts.add_metric([model], metrics.num_prompt_tokens)
            generated.add_metric([model], metrics.num_generation_tokens)
        yield from (prompts, generated, between)


def _up_to(most: int) -> tuple[float, ...]:
    """Buckets of 1, 2, 5, 10, 20, 50 and so on, up to a number of tokens."""
    buckets: list[float] = []
    power = 1
    while power <= most:
        buckets += [step * power for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return tuple(buckets)
