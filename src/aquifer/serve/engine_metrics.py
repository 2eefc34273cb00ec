"""Prometheus metrics of the engine, and those of all web processes together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aquifer.engine.reports import EngineStats, MemoryReport
from aquifer.memory.eviction_log import EvictionTotals
from aquifer.memory.owners import Kind, Owner
from aquifer.serve.metrics import COMPLETIONS, GENERATION_TOKENS, PROMPT_TOKENS
from aquifer.serve.snapshots import RequestCounts

_EVICTABLE = (Kind.WEIGHTS, Kind.PREFIX)

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineMetrics:
    """Metrics of the engine.

    Args:
        models: the names of the served models.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        step_tokens = Histogram(
            "aquifer:iteration_tokens_total",
            "Tokens that a step of the engine computes, of prompts and outputs.",
            ["model_name"],
            registry=self._registry,
            buckets=_STEP_TOKENS,
        )
        self._series = step_tokens
        self._step_tokens = {model: step_tokens.labels(model) for model in models}

    def add(self, model: str) -> None:
        """Measure another model; one that was here before goes on where it ended."""
        self._step_tokens[model] = self._series.labels(model)

    def remove(self, model: str) -> None:
        """Report the state of a model no more; its counters stay."""
        self._step_tokens.pop(model, None)

    def launched(self, model: str, num_tokens: int) -> None:
        """Record that a step was launched.

        Args:
            model: the model.
            num_tokens: tokens that the step computes, of prompts and of outputs.
        """
        if model in self._step_tokens:  # else it was removed with a step in flight
            self._step_tokens[model].observe(num_tokens)

    def render(
        self,
        of_requests: Sequence[Metric],
        stats: EngineStats,
        report: MemoryReport | None,
        num_restarts: int,
    ) -> bytes:
        """Render all metrics of a server in Prometheus's exposition format.

        Args:
            of_requests: what the web processes have measured, together.
            stats: the engine's counters.
            report: the memory report, or None if the engine does not answer.
            num_restarts: how often the engine process was started again.
        """
        families = [*of_requests, *self._registry.collect()]
        families += _engine_families([*self._step_tokens], stats, num_restarts)
        if report is not None:
            families.append(_pool_bytes(report.devices or (report,)))
            families.append(_page_calls(report.devices or (report,)))
            families += _loads(report)
            families += _evictions(report)
        registry = CollectorRegistry()
        registry.register(_Families(families))
        return generate_latest(registry)


class _Families(Collector):
    """Collector of metrics that are there already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def summed(of_processes: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Add up counters and histograms of several processes, sample by sample.

    Times at which a series was created are not added: the first one counts.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}
    for of_process in of_processes:
        for family in of_process:
            families.setdefault(family.name, family)
            of_family = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                if key not in of_family:
                    of_family[key] = sample.value
                elif sample.name.endswith("_created"):
                    of_family[key] = min(of_family[key], sample.value)
                else:
                    of_family[key] += sample.value
    return [_with_values(family, values[name]) for name, family in families.items()]


def _with_values(
    family: Metric, values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
) -> Metric:
    """The same metric with other values; samples keep the order that their format asks for."""
    result = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        value = values[sample.name, frozenset(sample.labels.items())]
        result.add_sample(sample.name, sample.labels, value)
    return result


def request_counts(families: Iterable[Metric]) -> dict[str, RequestCounts]:
    """Read what each model has served off the metrics of its requests."""
    counted: dict[str, Counter[str]] = {
        name: Counter() for name in (PROMPT_TOKENS, GENERATION_TOKENS, COMPLETIONS)
    }
    for family in families:
        if family.name in counted:
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    counted[family.name][sample.labels["model_name"]] += int(sample.value)
    return {
        model: RequestCounts(
            num_tokens, counted[GENERATION_TOKENS][model], counted[COMPLETIONS][model]
        )
        for model, num_tokens in counted[PROMPT_TOKENS].items()
    }


def _engine_families(
    models: Sequence[str], stats: EngineStats, num_restarts: int
) -> Iterator[Metric]:
    """Yield the engine's counters."""
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
    for model in models:
        running.add_metric([model], stats.num_running.get(model, 0))
        waiting.add_metric([model], stats.num_waiting.get(model, 0))
        preemptions.add_metric([model], stats.num_preemptions.get(model, 0))
        queries.add_metric([model], stats.num_prefix_queried_tokens.get(model, 0))
        hits.add_metric([model], stats.num_prefix_hit_tokens.get(model, 0))
        usage.add_metric([model], stats.kv_usage)
    yield from (running, waiting, preemptions, queries, hits, usage)
    yield CounterMetricFamily(
        "aquifer:engine_restarts",
        "Times that the engine process died and was started again.",
        value=num_restarts,
    )
    yield CounterMetricFamily(
        "aquifer:late_compilations",
        "Kernels compiled while a step waited, after the models were ready.",
        value=stats.num_late_compilations,
    )


def _pool_bytes(reports: Sequence[MemoryReport]) -> Metric:
    """Return bytes by owner; the values of a device add up to its pool's budget."""
    family = GaugeMetricFamily(
        "aquifer:pool_bytes",
        "The pool's budget by owner. Free bytes are retained (idle pages, or retired pages that "
        "are still mapped) or uncreated.",
        labels=["device", "model", "kind", "state"],
    )
    for report in reports:
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


def _page_calls(reports: Sequence[MemoryReport]) -> Metric:
    """Return calls of the devices' drivers about pages."""
    family = CounterMetricFamily(
        "aquifer:page_calls",
        "Calls of the device's driver that create, map, unmap or zero pages: by the engine's loop, "
        "which a step may wait for, and in the background.",
        labels=["device", "thread"],
    )
    for report in reports:
        family.add_metric([report.device, "loop"], report.loop_page_calls)
        family.add_metric([report.device, "background"], report.background_page_calls)
    return family


def _loads(report: MemoryReport) -> Iterator[Metric]:
    """Yield bytes of weights by where they were loaded from, and the time that it took."""
    family = CounterMetricFamily(
        "aquifer:loaded_weight_bytes",
        "Bytes of weights that were loaded: from a neighbour (another device of the machine), host "
        "(the host cache) or disk.",
        labels=["model", "source"],
    )
    for (model, source), num_bytes in sorted(report.loaded_bytes.items()):
        family.add_metric([model, source], num_bytes)
    yield family
    family = CounterMetricFamily(
        "aquifer:model_loading_seconds",
        "Time that loads of a model took, from their first page until it could run.",
        labels=["model"],
    )
    for model, memory in report.models.items():
        family.add_metric([model], memory.status.loading_s)
    yield family


def _evictions(report: MemoryReport) -> Iterator[Metric]:
    """Yield the counters of the eviction log, by the tenant that lost."""
    labels = ["model", "kind"]
    evictions = CounterMetricFamily(
        "aquifer:evictions", "Evictions, each of a batch of one tenant's data.", labels=labels
    )
    num_bytes = CounterMetricFamily(
        "aquifer:evicted_bytes", "Bytes that evictions gave back.", labels=labels
    )
    expected = CounterMetricFamily(
        "aquifer:eviction_regret_expected_seconds",
        "Delay that the eviction rule expected of what it evicted.",
        labels=labels,
    )
    paid = CounterMetricFamily(
        "aquifer:eviction_regret_paid_seconds",
        "Time to restore what was evicted: loading weights, as measured; computing prefixes, by "
        "the measured prefill cost.",
        labels=labels,
    )
    owners = [Owner(model, kind) for model in report.models for kind in _EVICTABLE]
    # A model that was removed keeps its counters.
    for owner in dict.fromkeys([*owners, *report.eviction_totals]):
        totals = report.eviction_totals.get(owner, EvictionTotals())
        values = [owner.model, owner.kind.value]
        evictions.add_metric(values, totals.num_evictions)
        num_bytes.add_metric(values, totals.num_bytes)
        expected.add_metric(values, totals.expected_s)
        paid.add_metric(values, totals.paid_s)
    yield from (evictions, num_bytes, expected, paid)
