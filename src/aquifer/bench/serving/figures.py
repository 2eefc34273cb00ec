"""Figures of a pass, by the names and definitions of `vllm bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aquifer.bench.result import percentile_name, summarize
from aquifer.bench.serving.load import Run
from aquifer.bench.serving.stream import Stream
from aquifer.errors import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "worst_gap": ("Worst Gap", "Longest Gap of Each Stream"),
}
"""Latencies, with their short and long names. All but the last are vLLM's."""

_GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def parse_metrics(text: str) -> list[str]:
    """Parse names of latencies, such as "ttft,tpot".

    Raises:
        ConfigError: one is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise ConfigError(
                f"--percentile-metrics is {text!r}; choose from {', '.join(METRICS)}, by commas"
            )
    return names


def parse_percentiles(text: str) -> list[float]:
    """Parse percentiles, such as "50,99.9".

    Raises:
        ConfigError: one is no number from 0 to 100.
    """
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [math.nan]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ConfigError(
            f"--metric-percentiles is {text!r}; write numbers from 0 to 100, such as 50,90,99"
        )
    return percentiles


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Parse bounds that a good request keeps, such as "ttft:500".

    Returns: milliseconds by name of the latency.

    Raises:
        ConfigError: one is no such bound.
    """
    bounds_ms = {}
    for text in (part for written in texts for part in written.split()):
        name, _, number = text.partition(":")
        try:
            bounds_ms[name] = float(number)
        except ValueError:
            bounds_ms[name] = math.nan
        if name not in _GOODPUT_METRICS or not 0 <= bounds_ms[name] < math.inf:
            raise ConfigError(
                f"--goodput is {text!r}; write milliseconds by latency, such as ttft:500 tpot:50 "
                "e2el:10000"
            )
    return bounds_ms


def latencies_ms(streams: Sequence[Stream]) -> dict[str, list[float]]:
    """Samples of each latency, in milliseconds, by the names of `METRICS`.

    A stream adds one value to each, with three exceptions. Its output tokens after the first have
    no time if there are none. Its gaps are those between neighbouring events, so `itl` has many
    values, and where it has a single event there are none, and no longest one.
    """
    gaps_s = [gaps_s for stream in streams if len(gaps_s := stream.gaps_s)]
    return {
        "ttft": [1e3 * stream.first_token_s for stream in streams],
        "tpot": [1e3 * stream.per_token_s for stream in streams if stream.num_tokens > 1],
        "itl": (1e3 * np.concatenate(gaps_s)).tolist() if gaps_s else [],
        "e2el": [1e3 * stream.latency_s for stream in streams],
        "worst_gap": [1e3 * float(gaps.max()) for gaps in gaps_s],
    }


def latency_figures(
    streams: Sequence[Stream], percentiles: Sequence[float] = (99,)
) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of each latency, such as `mean_ttft_ms`.

    They are 0 where there is no sample, as in `vllm bench serve`.
    """
    figures: dict[str, float] = {}
    for name, values in latencies_ms(streams).items():
        statistics = summarize(values or [0.0], percentiles)
        statistics["std"] = float(np.std(values or [0.0]))
        figures |= {f"{statistic}_{name}_ms": value for statistic, value in statistics.items()}
    return figures


def figures_of(
    run: Run, percentiles: Sequence[float] = (99,), goodput_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Figures of one pass. Failed requests are counted, and are in no other figure.

    Args:
        run: the pass; at least one request succeeded.
        percentiles: percentiles of the latencies, from 0 to 100.
        goodput_ms: bounds that a good request keeps, in milliseconds; none for no goodput.
    """
    num_input_tokens = sum(stream.num_input_tokens for stream in run.streams)
    num_tokens = sum(stream.num_tokens for stream in run.streams)
    good = _num_good(run.streams, goodput_ms) / run.seconds if goodput_ms else None
    return {
        "duration": run.seconds,
        "completed": len(run.streams),
        "failed": len(run.failures),
        "total_input_tokens": num_input_tokens,
        "total_output_tokens": num_tokens,
        "request_throughput": len(run.streams) / run.seconds,
        "request_goodput": good,
        "output_throughput": num_tokens / run.seconds,
        "total_token_throughput": (num_input_tokens + num_tokens) / run.seconds,
        "max_output_tokens_per_s": _most_tokens_in_a_second(run.streams),
        "max_concurrent_requests": _most_at_once(run.streams),
        **latency_figures(run.streams, percentiles),
        "max_send_lag_ms": 1e3 * run.max_send_lag_s,
        "client_cpu_share": run.client_cpu_s / run.seconds,
        "error_counts": dict(Counter(failure.message for failure in run.failures).most_common()),
    }


def percentile_key(name: str, percentile: float) -> str:
    """The key of a latency's percentile, such as `p99_ttft_ms`."""
    return f"{percentile_name(percentile)}_{name}_ms"


def _num_good(streams: Sequence[Stream], bounds_ms: Mapping[str, float]) -> int:
    """Number of streams that keep every bound; time per token is 0 where there is one token."""
    return sum(
        all(
            1e3 * seconds <= bounds_ms.get(name, math.inf)
            for name, seconds in (
                ("ttft", stream.first_token_s),
                ("tpot", stream.per_token_s),
                ("e2el", stream.latency_s),
            )
        )
        for stream in streams
    )


def _most_tokens_in_a_second(streams: Sequence[Stream]) -> float:
    """Most output tokens in a second, of the seconds counted from the first request.

    Each event of a stream has the same share of its tokens.
    """
    begin_s = min(stream.sent_s for stream in streams)
    seconds = [np.asarray(stream.events_s, np.float64) - begin_s for stream in streams]
    shares = [np.full(len(s.events_s), s.num_tokens / len(s.events_s)) for s in streams]
    counts = np.bincount(np.concatenate(seconds).astype(np.int64), np.concatenate(shares))
    return float(counts.max())


def _most_at_once(streams: Sequence[Stream]) -> int:
    """Most streams at any time, each from sending its request to its last output."""
    changes = [(stream.sent_s, 1) for stream in streams] + [(s.end_s, -1) for s in streams]
    most = running = 0
    for _, change in sorted(changes):  # at the same time, ends come first
        running += change
        most = max(most, running)
    return most
