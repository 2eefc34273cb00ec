"""Comparison of cache managers by replaying a trace, at given rates or up to the highest possible.

All times are simulated (`aquifer.sim`), so the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aquifer.errors import ConfigError
from aquifer.sim.config import ReplayConfig
from aquifer.sim.replay import replay as run_replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest, poisson_arrivals

MEMORY_PARTS = {
    "written": "token states",
    "future": "reserved",
    "internal": "internal",
    "external": "external",
    "retained": "prefixes",
    "free": "free",
}
"""Names in Fig. 2 of the parts of KV memory; there, free memory counts as external."""

Progress = Callable[[str, int, int], None]
"""Called with (description of the run, requests that have ended, all requests)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of all runs.

    Args:
        requests: requests of the trace, with or without arrival times.
        num_requests: number of requests to take; with generated arrivals, the requests repeat from
            the first if there are fewer.
        seed: seed of generated arrivals.
    """

    requests: list[TraceRequest]
    num_requests: int
    seed: int

    def at(self, rate: float | None) -> list[TraceRequest]:
        """The requests with Poisson arrivals at a rate a second, or as recorded."""
        if rate is None:
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
        served = [record for record in self.result.records if record.finished_s is not None]
        return sum(record.prompt_tokens + record.output_tokens for record in served)

    def figures(self, *, with_requests: bool = False) -> dict[str, Any]:
        """The figures for the result's file."""
        figures = {"kv_cache": self.manager, "request_rate": self.rate, **self.result.figures()}
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


def run(config: ReplayConfig, workload: Workload, rate: float | None, on_progress: Progress) -> Run:
    """Replay the workload once."""
    requests = workload.at(rate)
    what = config.manager if rate is None else f"{config.manager} at {rate:.4g} requests/s"
    on_progress(what, 0, len(requests))
    result = run_replay(
        config, requests, lambda num_ended: on_progress(what, num_ended, len(requests))
    )
    return Run(config.manager, rate, result)


def compare(
    config: ReplayConfig,
    managers: Sequence[str],
    workload: Workload,
    rates: Sequence[float | None],
    on_progress: Progress,
) -> list[Run]:
    """Run each manager at each rate."""
    return [
        run(replace(config, manager=manager), workload, rate, on_progress)
        for manager in managers
        for rate in rates
    ]


def find_rate(
    config: ReplayConfig,
    workload: Workload,
    latency_bound_s: float,
    on_progress: Progress,
    *,
    first_rate: float = 1.0,
    precision: float = 0.02,
) -> list[Run]:
    """Search for the highest arrival rate at which the mean normalized latency is within a bound.

    The rate is doubled or halved until two rates bracket the answer; then their geometric mean is
    tried until they are close. A trace is finite, so its queue cannot grow without end: with few
    requests the rate found is higher than a rate that could be sustained for ever.

    Args:
        config: model, device and cache manager.
        workload: requests to replay.
        latency_bound_s: seconds for each output token.
        on_progress: called as requests end.
        first_rate: rate of the first run.
        precision: relative distance at which the search ends.

    Returns:
        All runs in the order of their rates; the last within the bound has the rate found.

    Raises:
        ConfigError: no rate is within the bound.
    """
    runs: dict[float, Run] = {}

    def holds(rate: float) -> bool:
        runs[rate] = run(config, workload, rate, on_progress)
        return is_within(runs[rate], latency_bound_s)

    low = high = first_rate
    if holds(first_rate):
        while high < first_rate * 2**20 and holds(high := 2 * high):
            low = high
    else:
        while not holds(low := low / 2):
            high = low
            if low < first_rate / 2**20:
                raise ConfigError(
                    f"{config.manager} does not reach {latency_bound_s} s/token at any rate; "
                    "give a higher --latency-bound"
                )
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return [runs[rate] for rate in sorted(runs)]


def is_within(run: Run, latency_bound_s: float) -> bool:
    """Whether all requests were served, within the latency bound."""
    is_complete = all(record.finished_s is not None for record in run.result.records)
    return is_complete and run.result.normalized_latency_s <= latency_bound_s


def sustained_rate(runs: Sequence[Run], latency_bound_s: float) -> float | None:
    """The highest rate within the bound; None if no rate is."""
    rates = [run.rate for run in runs if run.rate is not None and is_within(run, latency_bound_s)]
    return max(rates, default=None)


def kv_waste(run: Run) -> float:
    """Average share of the KV memory in use that holds no token: the waste of section 6.2.

    Memory that is free or retained for later requests is not in use.
    """
    averages = run.result.averages
    wasted_bytes = sum(averages[part] for part in ("future", "internal", "external"))
    used_bytes = wasted_bytes + averages["written"]
    return wasted_bytes / used_bytes if used_bytes else 0.0


def plot(runs: Sequence[Run], file: Path, title: str) -> None:
    """Plot latency and batched requests by rate, and the parts of memory at the highest rate.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the file's format.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("plots need matplotlib; pip install 'aquifer[plots]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    managers = list(dict.fromkeys(run.manager for run in runs))
    figure, (latency, batched, memory) = plt.subplots(1, 3, figsize=(15, 4.2))
    for manager in managers:
        line = [run for run in runs if run.manager == manager and run.rate is not None]
        rates = [run.rate for run in line]
        latency.plot(rates, [run.result.normalized_latency_s for run in line], "o-", label=manager)
        batched.plot(rates, [run.result.averages["requests"] for run in line], "o-", label=manager)
    latency.set(xlabel="requests/s", ylabel="normalized latency, s/token", yscale="log")
    batched.set(xlabel="requests/s", ylabel="requests batched, mean", ylim=(0, None))
    if any(run.rate is not None for run in runs):
        latency.legend()
    bottom = [0.0] * len(managers)
    last = [[run for run in runs if run.manager == manager][-1] for manager in managers]
    for part, name in MEMORY_PARTS.items():
        heights = [100 * r.result.averages[part] / r.result.kv_budget_bytes for r in last]
        memory.bar(managers, heights, bottom=bottom, label=name)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    memory.set(ylabel="memory for KV, %")
    memory.tick_params(axis="x", rotation=30)
    memory.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title)
    figure.tight_layout()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {file}: {error}") from error
    finally:
        plt.close(figure)
