"""Figures of a pass as text, in the lines of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from aquifer.bench.report import new_table
from aquifer.bench.serving.figures import METRICS, percentile_key

_WIDTH = 50
_MOST_ERRORS = 10
_IN_TABLE = ("ttft", "tpot", "worst_gap")

_COUNTS = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)


def result_lines(
    figures: Mapping[str, Any],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    title: str = "Serving Benchmark Result",
) -> Iterator[str]:
    """The lines of one pass.

    Args:
        figures: those of `figures_of`, with the settings of the load; None is left out.
        metrics: latencies to print, of `METRICS`.
        percentiles: percentiles to print, from 0 to 100.
        title: the heading.
    """
    yield f" {title} ".center(_WIDTH, "=")
    for label, key, form in _COUNTS:
        value = figures.get(key)
        if value is not None and value != "inf":
            yield f"{label:<40} {value:<10{form}}"
    for name in metrics:
        short, long = METRICS[name]
        yield long.center(_WIDTH, "-")
        statistics = [("Mean", f"mean_{name}_ms"), ("Median", f"median_{name}_ms")]
        statistics += [(f"P{p:g}", percentile_key(name, p)) for p in percentiles]
        for statistic, key in statistics:
            yield f"{statistic + ' ' + short + ' (ms):':<40} {figures[key]:<10.2f}"
    yield "=" * _WIDTH
    errors = list(figures["error_counts"].items())
    for message, count in errors[:_MOST_ERRORS]:
        yield f"{count} failed: {message}"
    if len(errors) > _MOST_ERRORS:
        yield f"and {len(errors) - _MOST_ERRORS} other errors"


def passes_table(passes: Sequence[Mapping[str, Any]], percentile: float) -> Table:
    """A row for each pass: rates, and latencies as median and percentile."""
    table = new_table("Passes of the same load")
    latencies = {name: short for name, (short, _) in METRICS.items() if name in _IN_TABLE}
    for column in ("pass", "req/s", "tok/s", *latencies.values()):
        table.add_column(column, justify="right", no_wrap=True)
    for number, figures in enumerate(passes, 1):
        pairs = [
            (figures[f"median_{name}_ms"], figures[percentile_key(name, percentile)])
            for name in latencies
        ]
        table.add_row(
            str(number),
            f"{figures['request_throughput']:.2f}",
            f"{figures['output_throughput']:.0f}",
            *(f"{median:.1f} / {high:.1f}" for median, high in pairs),
        )
    table.caption = f"latencies: median / P{percentile:g} in ms"
    return table
