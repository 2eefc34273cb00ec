"""Comparison of cache managers by replaying a trace, at given rates or up to the highest possible.

All times are simulated (`aquifer.sim`), so the figures are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from aquifer.errors import ConfigError
from aquifer.sim.cluster import ClusterConfig, replay_cluster
from aquifer.sim.config import ReplayConfig
from aquifer.sim.replay import replay as run_replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest, poisson_arrivals

_RATE_RANGE = 2**20
"""Factor above and below the first rate in which `find_rate` searches."""

_FEWEST_WAITS = 20

Target: TypeAlias = ReplayConfig | ClusterConfig
"""What a trace is replayed on: a device, or a cluster of them."""

Progress = Callable[[str, int, int], None]
"""Called with (description of the run, requests that have ended, all requests). In a cluster those
that were placed count as ended."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of all runs.

    Args:
        requests: requests of the trace, with or without arrival times.
        num_requests: number of requests to take, from the first; with generated arrivals the
            requests repeat if there are fewer.
        seed: seed of generated arrivals.
    """

    requests: list[TraceRequest]
    num_requests: int
    seed: int

    def at(self, rate: float | None) -> list[TraceRequest]:
        """The requests with Poisson arrivals at a rate a second, or as recorded.

        Raises:
            ConfigError: as recorded there are fewer.
        """
        if rate is None:
            if self.num_requests > len(self.requests):
                raise ConfigError(
                    f"--num-requests is {self.num_requests}; the trace has {len(self.requests)} "
                    "requests, which repeat only with a --rate"
                )
            return self.requests[: self.num_requests]
        return poisson_arrivals(self.requests, rate, self.num_requests, self.seed)


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one manager at one rate; None stands for the trace's own times."""

    manager: str
    rate: float | None
    result: ReplayResult

    @property
    def num_tokens(self) -> int:
        """Tokens of all served requests, prompts and outputs."""
        return sum(record.prompt_tokens + record.output_tokens for record in self.result.served)

    def figures(self, *, with_requests: bool = False) -> dict[str, Any]:
        """The figures for the result's file."""
        figures = {"kv_cache": self.manager, "request_rate": self.rate, **self.result.figures()}
        figures["queue_grows"] = queue_waits_s(self) is not None
        if with_requests:
            records = self.result.records
            figures["requests"] = {
                name: [getattr(record, name) for record in records]
                for name in (
                    "model",
                    "arrival_s",
                    "prompt_tokens",
                    "output_tokens",
                    "scheduled_s",
                    "first_token_s",
                    "finished_s",
                    "cached_tokens",
                )
            }
        return figures


@dataclass(frozen=True, slots=True)
class Bounds:
    """What users accept, in seconds.

    Args:
        latency_s: mean latency by output token.
        ttft_s: time to first token, 99th percentile.
        tpot_s: time per output token after the first, 99th percentile.
    """

    latency_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf


def run(config: Target, workload: Workload, rate: float | None, on_progress: Progress) -> Run:
    """Replay the workload once."""
    requests = workload.at(rate)
    what = config.manager if rate is None else f"{config.manager} at {rate:.4g} requests/s"
    on_progress(what, 0, len(requests))

    def advance(num_ended: int) -> None:
        on_progress(what, num_ended, len(requests))

    if isinstance(config, ClusterConfig):
        result = replay_cluster(config, requests, advance).total
    else:
        result = run_replay(config, requests, advance)
    return Run(config.manager, rate, result)


def compare(
    configs: Sequence[Target],
    workload: Workload,
    rates: Sequence[float | None],
    on_progress: Progress,
) -> list[Run]:
    """Run each configuration at each rate."""
    return [run(config, workload, rate, on_progress) for config in configs for rate in rates]


def find_rate(
    config: Target,
    workload: Workload,
    bounds: Bounds,
    on_progress: Progress,
    *,
    first_rate: float = 1.0,
    precision: float = 0.02,
) -> list[Run]:
    """Search for the highest arrival rate at which all bounds are kept.

    The rate is doubled or halved until two rates bracket the answer; then their geometric mean is
    tried until they are close. A trace is finite, so its queue cannot grow without end: with few
    requests the rate found is higher than a rate that could be sustained for ever
    (`queue_waits_s` shows it).

    Args:
        config: model, device and cache manager.
        workload: requests to replay.
        bounds: of the latencies.
        on_progress: called as requests end.
        first_rate: rate of the first run.
        precision: relative distance at which the search ends.

    Returns:
        All runs in the order of their rates. The last one within the bounds has the rate found. If
        none is, no rate tried is low enough, or some requests are never served.
    """
    runs: dict[float, Run] = {}

    def holds(rate: float) -> bool:
        runs[rate] = run(config, workload, rate, on_progress)
        return is_within(runs[rate], bounds)

    def tried() -> list[Run]:
        return [runs[rate] for rate in sorted(runs)]

    low = high = first_rate
    if holds(first_rate):
        while high < first_rate * _RATE_RANGE and holds(high := 2 * high):
            low = high
    else:
        if runs[first_rate].result.num_unserved:
            return tried()
        while not holds(low := low / 2):
            high = low
            if low < first_rate / _RATE_RANGE:
                return tried()
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return tried()


def exceeded(run: Run, bounds: Bounds) -> list[str]:
    """What keeps a run from being within the bounds, in words; empty if it is."""
    figures = run.result.figures()
    found = []
    if run.result.num_unserved:
        found.append(f"{run.result.num_unserved} of {len(run.result.records)} requests not served")
    for what, value, bound in (
        ("latency by output token", figures["normalized_latency"], bounds.latency_s),
        ("p99 TTFT", _seconds(figures["p99_ttft_ms"]), bounds.ttft_s),
        ("p99 TPOT", _seconds(figures["p99_tpot_ms"]), bounds.tpot_s),
    ):
        if value is not None and value > bound:
            found.append(f"{what} {value:.3g} s")
    return found


def is_within(run: Run, bounds: Bounds) -> bool:
    """Whether all requests were served, within all bounds."""
    return not exceeded(run, bounds)


def sustained_rate(runs: Sequence[Run], bounds: Bounds) -> float | None:
    """The highest rate within the bounds; None if no rate is."""
    rates = [run.rate for run in runs if run.rate is not None and is_within(run, bounds)]
    return max(rates, default=None)


def queue_waits_s(run: Run) -> tuple[float, float] | None:
    """Mean waits before the first step, if they grow: of the second and the last quarter.

    Beyond a manager's capacity the wait grows linearly as long as requests arrive, so those of the
    last quarter wait 2.3 times as long. Then latencies depend on the length of the trace. The first
    quarter is left out: it finds an empty device.

    Returns:
        None if the queue does not grow: the last quarter waits at most 1.5 times as long as the
        second, or a tenth of a request's mean latency; or there are fewer than 20 requests.
    """
    served = run.result.served
    if len(served) < _FEWEST_WAITS:
        return None
    waits_s = [(record.scheduled_s or 0.0) - record.arrival_s for record in served]
    latency_s = np.mean([(record.finished_s or 0.0) - record.arrival_s for record in served])
    _, second_s, _, last_s = (float(np.mean(part)) for part in np.array_split(waits_s, 4))
    grows = last_s > 1.5 * second_s and last_s > 0.1 * latency_s
    return (second_s, last_s) if grows else None


def kv_waste(run: Run) -> float:
    """Average share of the KV memory in use that holds no token: the waste of section 6.2.

    Memory that is free or retained for later requests is not in use.
    """
    averages = run.result.averages
    wasted_bytes = sum(averages[part] for part in ("future", "internal", "external"))
    used_bytes = wasted_bytes + averages["written"]
    return wasted_bytes / used_bytes if used_bytes else 0.0


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
