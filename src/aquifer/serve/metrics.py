"""Prometheus metrics with vLLM's names, prefixed `aquifer:`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aquifer.engine.outputs import FinishReason, TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.reports import EngineStats, MemoryReport
from aquifer.memory.owners import Kind

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


class Metrics:
    """All metrics of one server, in a separate registry.

    Its public attributes are the counters and histograms (`_s`) that `RequestMetrics` fills.

    Args:
        models: the served names, so that every series exists from the start.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self._models = tuple(models)
        self._engine = _EngineCollector(self._models)
        self._registry.register(self._engine)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.finished = Counter(
            "aquifer:request_success",
            "Finished completions, of which a request may have several, by why they finished.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.inter_token_s = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of a completion.", _TOKEN_S
        )
        self.per_token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after the first.",
            _TOKEN_S,
        )
        self.end_to_end_s = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self.queue_s = self._histogram(
            "request_queue_time_seconds", "From arrival to scheduling.", _REQUEST_S
        )
        self.prefill_s = self._histogram(
            "request_prefill_time_seconds", "From scheduling to the first token.", _REQUEST_S
        )
        self.decode_s = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )

    def render(
        self, stats: EngineStats, report: MemoryReport | None, num_restarts: int = 0
    ) -> bytes:
        """Render all metrics in Prometheus's exposition format.

        Args:
            stats: the engine's counters.
            report: the memory report, or None if the engine does not answer.
            num_restarts: how often the engine process was started again.
        """
        self._engine.stats, self._engine.report = stats, report
        self._engine.num_restarts = num_restarts
        return generate_latest(self._registry)

    def watch(self, request: Request) -> RequestMetrics:
        """Start measuring a request."""
        return RequestMetrics(self, request)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"aquifer:{name}", text, ["model_name"], registry=self._registry)
        for model in self._models:
            counter.labels(model)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"aquifer:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        )
        for model in self._models:
            histogram.labels(model)
        return histogram


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

    As in vLLM, each completion counts as a request of its own. The prompt, which all completions
    share, is counted once.
    """

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._model = request.model
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._arrival_s = request.arrival_s
        self._completions = [_Watched() for _ in range(request.params.num_completions)]
        self._has_begun = False

    def output(self, output: TokenOutput) -> None:
        """Record one output."""
        metrics, model = self._metrics, self._model
        now_s = time.monotonic()
        if output.token_ids:
            watched = self._completions[output.index]
            if not self._has_begun:
                self._has_begun = True
                metrics.prompt_tokens.labels(model).inc(self._num_prompt_tokens)
            if watched.first_s is None:
                watched.first_s = now_s
                metrics.first_token_s.labels(model).observe(now_s - self._arrival_s)
            else:
                metrics.inter_token_s.labels(model).observe(now_s - watched.last_s)
            watched.last_s = now_s
            watched.num_tokens += len(output.token_ids)
            watched.num_outputs += 1
            metrics.generation_tokens.labels(model).inc(len(output.token_ids))
        timing = output.timing
        if timing is not None and timing.scheduled_s is not None:
            metrics.queue_s.labels(model).observe(timing.scheduled_s - timing.arrival_s)
            if timing.first_token_s is not None:
                prefill_s = timing.first_token_s - timing.scheduled_s
                metrics.prefill_s.labels(model).observe(prefill_s)

    def finish(self, index: int, reason: FinishReason) -> None:
        """Record the end of a completion; later calls for it have no effect."""
        watched = self._completions[index]
        if watched.is_finished:
            return
        watched.is_finished = True
        metrics, model = self._metrics, self._model
        metrics.finished.labels(model, reason).inc()
        if reason in ("stop", "length") and watched.first_s is not None:
            metrics.end_to_end_s.labels(model).observe(watched.last_s - self._arrival_s)
            if watched.num_tokens > 1 and watched.num_outputs == 1:
                return  # a beam arrives whole: the times of its tokens are unknown
            decode_s = watched.last_s - watched.first_s
            metrics.decode_s.labels(model).observe(decode_s)
            if watched.num_tokens > 1:
                metrics.per_token_s.labels(model).observe(decode_s / (watched.num_tokens - 1))

    def finish_all(self, reason: FinishReason) -> None:
        """Record the end of all completions that have not ended."""
        for index in range(len(self._completions)):
            self.finish(index, reason)


class _EngineCollector(Collector):
    """Collector of the engine's own counters, read at each scrape."""

    def __init__(self, models: tuple[str, ...]) -> None:
        self._models = models
        self.stats: EngineStats | None = None
        self.report: MemoryReport | None = None
        self.num_restarts = 0

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        label = ["model_name"]
        running = GaugeMetricFamily(
            "aquifer:num_requests_running", "Requests in the running batch.", labels=label
        )
        waiting = GaugeMetricFamily(
            "aquifer:num_requests_waiting", "Requests waiting to run.", labels=label
        )
        preemptions = CounterMetricFamily(
            "aquifer:num_preemptions", "Requests preempted for lack of memory.", labels=label
        )
        queries = CounterMetricFamily(
            "aquifer:prefix_cache_queries",
            "Prompt tokens looked up among retained prefixes.",
            labels=label,
        )
        hits = CounterMetricFamily(
            "aquifer:prefix_cache_hits",
            "Prompt tokens found among retained prefixes.",
            labels=label,
        )
        usage = GaugeMetricFamily(
            "aquifer:kv_cache_usage_perc",
            "KV bytes in use / bytes that KV could have, 0 to 1.",
            labels=label,
        )
        for model in self._models:
            running.add_metric([model], self.stats.num_running.get(model, 0))
            waiting.add_metric([model], self.stats.num_waiting.get(model, 0))
            preemptions.add_metric([model], self.stats.num_preemptions.get(model, 0))
            queries.add_metric([model], self.stats.num_prefix_queried_tokens.get(model, 0))
            hits.add_metric([model], self.stats.num_prefix_hit_tokens.get(model, 0))
            usage.add_metric([model], self.stats.kv_usage)
        yield from (running, waiting, preemptions, queries, hits, usage)
        yield CounterMetricFamily(
            "aquifer:engine_restarts",
            "Times that the engine process died and was started again.",
            value=self.num_restarts,
        )
        if self.report is not None:
            yield _pool_bytes(self.report)


def _pool_bytes(report: MemoryReport) -> Metric:
    """Return bytes by owner; the values add up to the pool's budget."""
    family = GaugeMetricFamily(
        "aquifer:pool_bytes",
        "The pool's budget by owner. Free bytes are retained (idle pages, or retired pages that "
        "are still mapped) or uncreated.",
        labels=["device", "model", "kind", "state"],
    )
    for model, memory in report.models.items():
        for kind, num_bytes in memory.bytes_by_kind.items():
            state = "retained" if kind is Kind.PREFIX else "mapped"
            family.add_metric([report.device, model, kind.value, state], num_bytes)
    overhead = [report.device, "", Kind.OVERHEAD.value, "mapped"]
    family.add_metric(overhead, report.overhead_bytes)
    retained_bytes = report.idle_bytes + report.retired_bytes
    family.add_metric([report.device, "", "free", "retained"], retained_bytes)
    uncreated_bytes = max(report.free_bytes - retained_bytes, 0)
    family.add_metric([report.device, "", "free", "uncreated"], uncreated_bytes)
    return family
