"""What is measured on a replay: throughput with a queue, use of memory, prefix hits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import PREFIX_BLOCK_TOKENS, TraceRequest

Figures = dict[str, Any]

_PARTS = ("written", "future", "internal", "external", "retained", "free", "shared")


def figures_of(result: ReplayResult) -> Figures:
    """Select the figures for plots and tables; memory is given as fractions of that for KV."""
    served = result.figures()
    names = (
        "completed",
        "not_completed",
        "duration",
        "num_steps",
        "num_preemptions",
        "request_throughput",
        "output_throughput",
        "normalized_latency",
        "median_ttft_ms",
        "p99_e2el_ms",
        "kv_budget_bytes",
    )
    figures: Figures = {name: served[name] for name in names}
    figures["input_tokens"] = served["total_input_tokens"]
    for name, averages in (
        ("averages", result.averages),
        ("averages_while_waiting", result.averages_waiting),
    ):
        figures[name] = {
            part: round(value / result.kv_budget_bytes if part in _PARTS else value, 5)
            for part, value in averages.items()
        }
    averages = result.averages
    mapped = averages["written"] + averages["internal"]
    if averages["shared"]:
        # Fig. 15: blocks saved / blocks without sharing.
        figures["saved_by_sharing"] = averages["shared"] / (averages["shared"] + mapped)
    wasted = averages["future"] + averages["internal"] + averages["external"]
    figures["waste"] = wasted / max(wasted + averages["written"], 1.0)
    return figures


def capacity(result: ReplayResult) -> float:
    """Throughput of a replay in which all requests arrive at the start, in requests per second.

    It is measured in output tokens, from when half of the requests have been admitted until the
    last one is. Before that an empty memory fills, mostly with sequences that are still short;
    after it there is no queue. A request that runs across a limit counts with the outputs that it
    got within, as if it got them evenly.

    Returns:
        Not a number if the second half is admitted at once: the replay is too short to tell.
    """
    served = result.served
    scheduled_s = np.sort([record.scheduled_s or 0.0 for record in served])
    begin_s, end_s = float(scheduled_s[len(served) // 2]), float(scheduled_s[-1])
    if begin_s == end_s:
        return math.nan
    firsts_s = np.array([record.first_token_s or 0.0 for record in served])
    spans_s = np.array([record.finished_s or 0.0 for record in served]) - firsts_s
    outputs = np.array([record.output_tokens for record in served])

    def outputs_by(time_s: float) -> float:
        parts = np.clip((time_s - firsts_s) / np.maximum(spans_s, 1e-9), 0.0, 1.0)
        return float((parts * outputs).sum())

    tokens_per_s = (outputs_by(end_s) - outputs_by(begin_s)) / (end_s - begin_s)
    return tokens_per_s / float(outputs.mean())


def unbounded_hit_rate(
    requests: Sequence[TraceRequest], result: ReplayResult, block_tokens: int
) -> float:
    """Return the hit rate of an unbounded prefix cache, over all prompt tokens.

    A prompt's full blocks are added when the prompt has been computed, and looked up when a request
    is admitted, at the times of the replay; the last token is always computed. Only the trace's
    hash ids are compared.
    """
    seen: dict[tuple[int, ...], int] = {}  # ids of prefix blocks -> tokens known, in full blocks
    events: list[tuple[float, int, int]] = []
    for index, record in enumerate(result.records):
        if record.first_token_s is not None and record.scheduled_s is not None:
            events.append((record.first_token_s, 0, index))
            events.append((record.scheduled_s, 1, index))
    num_hits = num_tokens = 0
    for _, is_asking, index in sorted(events):
        request = requests[index]
        keys = [request.prefix_ids[: end + 1] for end in range(len(request.prefix_ids))]
        if not is_asking:
            full = request.prompt_tokens - request.prompt_tokens % block_tokens
            for end, key in enumerate(keys, 1):
                seen[key] = max(seen.get(key, 0), min(end * PREFIX_BLOCK_TOKENS, full))
            continue
        num_found = max((seen[key] for key in keys if key in seen), default=0)
        num_found = min(num_found, request.prompt_tokens - 1)
        num_hits += num_found - num_found % block_tokens
        num_tokens += request.prompt_tokens
    return num_hits / num_tokens
