"""Prometheus metrics under the names that dashboards of this field parse, prefixed `aquifer:`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aquifer.engine.request import EngineStats, FinishReason, MemoryReport, TokenOutput
from aquifer.memory.pool import Kind

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
    """All metrics of one server, in a registry of their own.

    Args:
        models: the served names, so that every series exists from the start.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self._models = tuple(models)
        self._engine = _EngineCollector(self._models)
        self._registry.register(self._engine)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up among retained prefixes."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found among retained prefixes."
        )
        self._finished = Counter(
            "aquifer:request_success",
            "Finished requests, by why they finished.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self._inter_token_s = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of a request.", _TOKEN_S
        )
        self._per_token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            _TOKEN_S,
        )
        self._end_to_end_s = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S
        )
        self._queue_s = self._histogram(
            "request_queue_time_seconds", "From arrival to being scheduled.", _REQUEST_S
        )
        self._prefill_s = self._histogram(
            "request_prefill_time_seconds", "From being scheduled to the first token.", _REQUEST_S
        )
        self._decode_s = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )

    def render(self, stats: EngineStats, report: MemoryReport | None) -> bytes:
        """The exposition format.

        Args:
            stats: the engine's counters.
            report: where the memory is, or None if the engine cannot say any more.
        """
        self._engine.stats, self._engine.report = stats, report
        return generate_latest(self._registry)

    def watch(self, model: str, num_prompt_tokens: int, arrival_s: float) -> RequestMetrics:
        """Begin to measure a request."""
        return RequestMetrics(self, model, num_prompt_tokens, arrival_s)

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


class RequestMetrics:
    """Measures one request, output by output."""

    def __init__(
        self, metrics: Metrics, model: str, num_prompt_tokens: int, arrival_s: float
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = arrival_s
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._num_tokens = 0
        self.is_finished = False

    def output(self, output: TokenOutput) -> None:
        """One output has arrived."""
        metrics, model = self._metrics, self._model
        now_s = time.monotonic()
        if output.token_ids:
            if self._first_s is None:
                self._first_s = now_s
                metrics._first_token_s.labels(model).observe(now_s - self._arrival_s)
                metrics._prompt_tokens.labels(model).inc(self._num_prompt_tokens)
                metrics._prefix_queries.labels(model).inc(self._num_prompt_tokens)
                metrics._prefix_hits.labels(model).inc(output.num_cached_tokens)
            else:
                metrics._inter_token_s.labels(model).observe(now_s - self._last_s)
            self._last_s = now_s
            self._num_tokens += len(output.token_ids)
            metrics._generation_tokens.labels(model).inc(len(output.token_ids))
        timing = output.timing
        if timing is not None and timing.scheduled_s is not None:
            metrics._queue_s.labels(model).observe(timing.scheduled_s - timing.arrival_s)
            if timing.first_token_s is not None:
                prefill_s = timing.first_token_s - timing.scheduled_s
                metrics._prefill_s.labels(model).observe(prefill_s)

    def finish(self, reason: FinishReason) -> None:
        """The request has ended; later calls change nothing."""
        if self.is_finished:
            return
        self.is_finished = True
        metrics, model = self._metrics, self._model
        metrics._finished.labels(model, reason).inc()
        if reason in ("stop", "length") and self._first_s is not None:
            decode_s = self._last_s - self._first_s
            metrics._end_to_end_s.labels(model).observe(self._last_s - self._arrival_s)
            metrics._decode_s.labels(model).observe(decode_s)
            if self._num_tokens > 1:
                metrics._per_token_s.labels(model).observe(decode_s / (self._num_tokens - 1))


class _EngineCollector(Collector):
    """What the engine counts itself, read at the moment of a scrape."""

    def __init__(self, models: tuple[str, ...]) -> None:
        self._models = models
        self.stats: EngineStats | None = None
        self.report: MemoryReport | None = None

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
            "aquifer:num_preemptions", "Requests set back for want of memory.", labels=label
        )
        usage = GaugeMetricFamily(
            "aquifer:kv_cache_usage_perc",
            "KV bytes in use over all that KV could have, 0 to 1.",
            labels=label,
        )
        for model in self._models:
            running.add_metric([model], self.stats.num_running.get(model, 0))
            waiting.add_metric([model], self.stats.num_waiting.get(model, 0))
            preemptions.add_metric([model], self.stats.num_preemptions.get(model, 0))
            usage.add_metric([model], self.stats.kv_usage)
        yield from (running, waiting, preemptions, usage)
        if self.report is not None:
            yield _pool_bytes(self.report)


def _pool_bytes(report: MemoryReport) -> Metric:
    """Bytes by owner. All values together are the pool's budget."""
    family = GaugeMetricFamily(
        "aquifer:pool_bytes",
        "The pool's budget by owner. Free bytes are retained (idle pages, or retired ones that are "
        "still mapped where they were used) or uncreated.",
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
