"""Replays of clusters of 1 to 64 workers: sustained rates, a failure, different devices, size.

    python benchmarks/cluster/run.py --data FOLDER [--parts rates,failure,mixed,large]
        [--output FOLDER] [--resume]

FOLDER has the lengths of real requests. All times but those of the replays themselves are
simulated (`aquifer.sim.cluster`). It writes `PART.json` for each part and `rates.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib as mpl
import numpy as np
from benchmarks.tangram.mixes import by_class, lengths

from aquifer.bench.result import save
from aquifer.engine.policies.placement import PLACEMENTS
from aquifer.errors import ConfigError
from aquifer.sim.cluster import ClusterConfig, ClusterResult, Failure, replay_cluster
from aquifer.sim.config import LoadingConfig, ReplayConfig
from aquifer.sim.device import DEVICES, DeviceModel
from aquifer.sim.locality import LOCALITIES, LocalityWorkload
from aquifer.sim.trace import TraceRequest

mpl.use("Agg")

from matplotlib import pyplot as plt

_HERE = Path(__file__).resolve().parent

REPORT_S = 0.25
"""Seconds between the reports of a worker."""

BOUND_S = 1.0
"""A rate is sustained if nine of ten requests have their first token within this time."""

COUNTS = (1, 2, 4, 8, 16, 32, 64)

ONE_POOL = "one pool"
"""A device as large and as fast as all workers together, to compare placements with."""

_MODELS_OF_WORKER = 5  # 83 GB by size classes, twice the pool of an L40
_STEP = 1.44
_PRECISION = 1.1
_LEAST_RATE, _MOST_RATE = 0.01, 1e3  # of a worker


def worker_config(models: Mapping[str, Any], device: DeviceModel) -> ReplayConfig:
    """A worker with nine tenths of a device's memory, which loads from its host."""
    return ReplayConfig(
        dict(models),
        device,
        memory_bytes=int(0.9 * device.memory_bytes),
        loading=LoadingConfig(device.link_bandwidth),
    )


def workload(
    models: Sequence[str], of: Sequence[TraceRequest], rate: float, num_requests: int, seed: int = 0
) -> list[TraceRequest]:
    """Requests of locality L3: Poisson arrivals, runs of four for a model, Zipf's law."""
    return LocalityWorkload(models, of, rate, num_requests, seed=seed).requests(LOCALITIES["L3"])


def ttft_figures(result: ClusterResult, since_s: float = 0.0, until_s: float = np.inf) -> Any:
    """TTFT of the requests that arrived in an interval, in milliseconds, and what was loaded."""
    records = [record for record in result.records if since_s <= record.arrival_s < until_s]
    ttfts_ms = [
        1e3 * (record.first_token_s - record.arrival_s)
        for record in records
        if record.first_token_s is not None
    ]
    p50, p90, p99 = np.percentile(ttfts_ms, (50, 90, 99)).tolist()
    loads = [load for load in result.loads if since_s <= load.begun_s < until_s]
    return {
        "requests": len(records),
        "not_served": sum(record.finished_s is None for record in records),
        "ttft_p50_ms": p50,
        "ttft_p90_ms": p90,
        "ttft_p99_ms": p99,
        "loads": len(loads),
        "loaded_gb": sum(load.loaded_bytes for load in loads) / 1e9,
    }


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Search for the rate that workers sustain.

    Args:
        of: lengths of requests.
        seconds: how long requests arrive in a run.
        fewest: the fewest requests of a run.
        warm_up: the part of the arrivals that comes first and does not count.
    """

    of: Sequence[TraceRequest]
    seconds: float = 150.0
    fewest: int = 300
    warm_up: float = 0.25

    def run(self, name: str, count: int, rate: float, seed: int = 0) -> dict[str, Any]:
        """Replay at one rate, in requests per second of all workers together."""
        models = by_class(_MODELS_OF_WORKER * count).models
        device = DEVICES["l40"]
        if name == ONE_POOL:
            workers: tuple[ReplayConfig, ...] = (worker_config(models, device.times(count)),)
            placement = PLACEMENTS["affinity"]
        else:
            workers = (worker_config(models, device),) * count
            placement = PLACEMENTS[name]
        num_requests = max(round(rate * self.seconds), self.fewest)
        requests = workload(tuple(models), self.of, rate, num_requests, seed)
        begun_s = time.process_time()
        result = replay_cluster(ClusterConfig(workers, placement, report_s=REPORT_S), requests)
        warm_s = self.warm_up * num_requests / rate
        return {
            "rate": rate,
            "arrivals_s": num_requests / rate,
            **ttft_figures(result, warm_s),
            "cpu_s": time.process_time() - begun_s,
        }

    def sustained(self, name: str, count: int, first: float, seed: int) -> tuple[float, list[Any]]:
        """The highest rate of a worker within the bound, and all runs.

        Args:
            name: a placement, or `ONE_POOL`.
            count: number of workers.
            first: rate of a worker that is tried first.
            seed: of the requests.
        """
        runs: list[Any] = []

        def holds(rate: float) -> bool:
            runs.append(self.run(name, count, count * rate, seed))
            found = runs[-1]
            return found["ttft_p90_ms"] <= 1e3 * BOUND_S and not found["not_served"]

        return highest(holds, first), runs


def highest(holds: Callable[[float], bool], first: float) -> float:
    """The highest rate that holds, up to `_PRECISION`: the first that fails above it is as near.

    It is 0 if none from `_LEAST_RATE` on does.

    Steps of `_STEP` up or down lead to a rate that holds and one that does not; then the interval
    between them is halved.

    Args:
        holds: asked about one rate after the other.
        first: is asked first.

    Raises:
        ConfigError: all up to `_MOST_RATE` hold.
    """
    low: float | None = None
    high: float | None = None
    rate = first
    while low is None or high is None or high / low > _PRECISION:
        if rate < _LEAST_RATE:
            return 0.0
        if rate > _MOST_RATE:
            raise ConfigError(f"a worker sustains any rate up to {_MOST_RATE}")
        if holds(rate):
            low = rate
        else:
            high = rate
        if low is None:
            rate /= _STEP
        elif high is None:
            rate *= _STEP
        else:
            rate = (low * high) ** 0.5
    return low


@dataclass(frozen=True, slots=True)
class Searches:
    """Searches with the same seeds.

    Args:
        names: placements, or `ONE_POOL`.
        counts: numbers of workers.
        seeds: of the requests; a search for each.
        first: rate of a worker that is tried first; then it is what was found last.
        fewest: the fewest requests of a run.
    """

    names: Sequence[str]
    counts: Sequence[int]
    seeds: Sequence[int]
    first: float
    fewest: int = 300


_OTHERS = tuple(name for name in PLACEMENTS if name != "affinity")

ALL_SEARCHES = (
    Searches(["affinity"], (1, 2, 4, 8), (0, 1), 0.7),
    Searches(_OTHERS, (2, 4, 8, 16), (0,), 0.1, fewest=150),
    Searches(["affinity"], (16,), (0,), 0.8),
    Searches([ONE_POOL], (2, 4, 8), (0,), 0.7),
    Searches(["affinity"], (32, 64), (0,), 0.8),
)
"""In this order. One worker has one placement and is one pool: it is in the row of affinity."""


def measure_rates(
    search: RateSearch,
    searches: Sequence[Searches] = ALL_SEARCHES,
    on_found: Callable[[dict[str, Any]], None] = lambda found: None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Sustained rates by placement, number of workers and seed.

    Args:
        search: how a rate is found.
        searches: which ones.
        on_found: called with all that was found after each number of workers.
        before: what was found before, to go on from there; it is not searched for again.
    """
    found: dict[str, Any] = {name: {} for name in (*PLACEMENTS, ONE_POOL)}
    for name, cells in (before or {}).items():
        found[name] |= cells
    for each in searches:
        for name in each.names:
            rate = each.first
            for count in each.counts:
                if str(count) in found[name]:
                    continue
                cell: dict[str, Any] = {"seeds": list(each.seeds), "rates": [], "runs": []}
                found[name][str(count)] = cell
                for seed in each.seeds:
                    rate, runs = replace(search, fewest=each.fewest).sustained(
                        name, count, rate or each.first, seed
                    )
                    cell["rates"].append(count * rate)
                    cell["runs"].append(runs)
                    print(f"{name}, {count}: {count * rate:.3g}/s in {len(runs)} runs", flush=True)
                on_found(found)
    return found


def measure_failure(
    of: Sequence[TraceRequest], count: int = 8, num_requests: int = 480, rate: float = 1.6
) -> dict[str, Any]:
    """TTFT with a worker that fails in the middle third, and without, by placement."""
    models = by_class(_MODELS_OF_WORKER * count).models
    requests = workload(tuple(models), of, rate, num_requests)
    third_s = num_requests / rate / 3
    failure = Failure(0, third_s, 2 * third_s)
    workers = (worker_config(models, DEVICES["l40"]),) * count
    found: dict[str, Any] = {"rate": rate, "workers": count, "at_s": third_s, "back_s": 2 * third_s}
    for name in ("affinity", "least-loaded", "random"):
        row = found[name] = {}
        for what, failures in (("no failure", ()), ("failure", (failure,))):
            result = replay_cluster(
                ClusterConfig(workers, PLACEMENTS[name], failures, report_s=REPORT_S), requests
            )
            row[what] = {
                "before": ttft_figures(result, 0, third_s),
                "while gone": ttft_figures(result, third_s, 2 * third_s),
                "after": ttft_figures(result, 2 * third_s),
                "failed": sorted(result.failed.values()),
            }
    return found


def measure_mixed(
    of: Sequence[TraceRequest], num_requests: int = 480, rate: float = 3.2
) -> dict[str, Any]:
    """TTFT on six L40s and two H200s, by placement, and how many requests the H200s get."""
    models = by_class(_MODELS_OF_WORKER * 8).models
    requests = workload(tuple(models), of, rate, num_requests)
    l40, h200 = (worker_config(models, DEVICES[name]) for name in ("l40", "h200"))
    workers = (l40,) * 6 + (h200,) * 2
    found: dict[str, Any] = {"rate": rate, "workers": ["l40"] * 6 + ["h200"] * 2}
    for name, placement in PLACEMENTS.items():
        result = replay_cluster(ClusterConfig(workers, placement, report_s=REPORT_S), requests)
        on_h200 = sum(index is not None and index >= 6 for index in result.placed)
        found[name] = {**ttft_figures(result), "on_h200": on_h200 / num_requests}
    return found


def measure_large(
    of: Sequence[TraceRequest],
    count: int = 64,
    num_models: int = 10_000,
    num_requests: int = 10_000,
    rate: float = 16.0,
) -> dict[str, Any]:
    """Seconds of a replay with many workers and models, by affinity."""
    models = by_class(num_models).models
    requests = workload(tuple(models), of, rate, num_requests)
    workers = (worker_config(models, DEVICES["l40"]),) * count
    begin_s, begin_wall_s = time.process_time(), time.perf_counter()
    result = replay_cluster(ClusterConfig(workers, report_s=REPORT_S), requests)
    return {
        "workers": count,
        "models": num_models,
        "models_asked_for": len({request.model for request in requests}),
        "rate": rate,
        "simulated_s": result.total.duration_s,
        "steps": result.total.num_steps,
        "cpu_s": time.process_time() - begin_s,
        "wall_s": time.perf_counter() - begin_wall_s,
        **ttft_figures(result),
    }


def draw(rates: Mapping[str, Any], file: Path) -> None:
    """Draw sustained rates by workers."""
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, row in rates.items():
        counts = [int(count) for count in row]
        # Where no rate holds there is no point.
        means = [float(np.mean(of["rates"])) or np.nan for of in row.values()]
        style = "k--" if name == ONE_POOL else "o-"
        (line,) = axis.plot(counts, means, style, label=name)
        for count, of in zip(counts, row.values(), strict=True):
            axis.plot([count, count], [min(of["rates"]), max(of["rates"])], color=line.get_color())
    axis.set(xscale="log", yscale="log", xlabel="workers (L40), 5 models each")
    axis.set_xticks(COUNTS, list(map(str, COUNTS)))
    axis.set_title(f"requests/s with p90 TTFT within {BOUND_S:g} s", fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)


_Keep: TypeAlias = Callable[[dict[str, Any]], None]

_PARTS: dict[str, Callable[[Sequence[TraceRequest], _Keep, Mapping[str, Any]], dict[str, Any]]] = {
    "rates": lambda of, keep, before: measure_rates(RateSearch(of), on_found=keep, before=before),
    "failure": lambda of, keep, before: measure_failure(of),
    "mixed": lambda of, keep, before: measure_mixed(of),
    "large": lambda of, keep, before: measure_large(of),
}
"""The parts by name. They are given what writes the results so far, and results to go on from."""


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the lengths")
    parser.add_argument("--parts", default=",".join(_PARTS), help="what to run")
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    parser.add_argument("--resume", action="store_true", help="keep the rates that are there")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    for part in parts:
        if part not in _PARTS:
            parser.error(f"--parts has {part!r}; known are {', '.join(_PARTS)}")
    if arguments.resume and "rates" not in parts:
        parser.error("--resume is for the part rates, and --parts leaves it out")
    of = lengths(arguments.data)
    for part in parts:
        begin_s = time.process_time()
        file = arguments.output / f"{part}.json"
        before: dict[str, Any] = {"results": {}, "cpu_s": 0.0}
        if arguments.resume and part == "rates" and file.is_file():
            before = json.loads(file.read_text())

        def keep(
            results: dict[str, Any],
            part: str = part,
            file: Path = file,
            begin_s: float = begin_s - before["cpu_s"],
        ) -> None:
            content = {"results": results, "cpu_s": time.process_time() - begin_s}
            save(file, content, command=f"benchmarks/cluster/run.py --data DATA --parts {part}")

        keep(_PARTS[part](of, keep, before["results"]))
        print(f"{part}: {time.process_time() - begin_s:.0f} s of CPU time")
    rates = arguments.output / "rates.json"
    if rates.is_file():
        draw(json.loads(rates.read_text())["results"], arguments.output / "rates.png")


if __name__ == "__main__":
    main()
