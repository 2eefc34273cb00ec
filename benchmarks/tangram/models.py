"""Models in one pool: modes of loading, placement on devices, one rule against fixed splits.

    python benchmarks/tangram/models.py --data FOLDER [--parts models,batches,splits]
        [--requests 150] [--output FOLDER]

FOLDER has the lengths of real requests. All times are simulated: the decisions are the engine's,
and the time of steps and loads is modelled (`aquifer.sim`). It writes `models.json` with
`splits.json` and `models.png`, `batches.json` with `batches.png`; README.md compares them with the
paper's figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from benchmarks.pagedattention.workloads import CONTEXT_TOKENS
from benchmarks.tangram.mixes import (
    MixedTrace,
    Setting,
    by_class,
    lengths,
    mixed_settings,
    settings,
)
from scipy.stats import t as student_t

from aquifer.bench.result import save
from aquifer.engine.policies.placement import (
    Placement,
    affinity,
    least_loaded,
    random_device,
    round_robin_devices,
)
from aquifer.sim.cluster import ClusterConfig, replay_cluster
from aquifer.sim.config import LoadingConfig, ReplayConfig
from aquifer.sim.locality import LOCALITIES, LocalityWorkload
from aquifer.sim.replay import replay
from aquifer.sim.results import LoadRecord, RequestRecord
from aquifer.sim.trace import TraceRequest

mpl.use("Agg")

from matplotlib import pyplot as plt

_HERE = Path(__file__).resolve().parent

START_S = 9.0
"""A fresh process: import and engine start for Llama-3-8B on an H200, without its weights."""

LOW_RATE = 0.05
"""Requests per second at which hardly any two run at once: TTFT is loading and the first step."""

RATES = (0.4, 1.6)
"""Of the paper's Fig. 13."""

_NUM_MODELS_PLACED = 20
_POOLS = (4, 8, 12, 16, 20)
_BATCHES = (1, 4, 16, 32)
_SPLITS = (0.5, 0.67, 0.75, 0.85, 0.92)
_REASONABLE = (0.5, 0.67, 0.75)
_MIXED_FACTOR = 3
"""Requests of a mixed trace, by those of other runs: it has phases, so it must be longer."""

_COMPARED = ("ttft_mean_ms", "ttft_p99_ms")

_NUM_MIXED = 4
"""Mixed traces of each setting. The p99 of one is its fourth or fifth worst request, and says
little."""


def modes(bytes_per_s: float) -> dict[str, LoadingConfig]:
    """Ours first, then other choices of what is evicted, then the paper's baselines."""
    return {
        "tensor": LoadingConfig(bytes_per_s),
        "tensor, lru": LoadingConfig(bytes_per_s, eviction="lru"),
        "tensor, random": LoadingConfig(bytes_per_s, eviction="random"),
        "model": LoadingConfig(bytes_per_s, eviction="model"),
        "whole": LoadingConfig(bytes_per_s, is_exclusive=True),
        "whole, not kept": LoadingConfig(bytes_per_s, is_exclusive=True, keep_alive_s=0.0),
        "process": LoadingConfig(bytes_per_s, is_exclusive=True, start_s=START_S),
    }


def config_of(setting: Setting, loading: LoadingConfig, **options: Any) -> ReplayConfig:
    """A replay of a setting."""
    return ReplayConfig(
        setting.models,
        setting.device,
        memory_bytes=setting.memory_bytes,
        loading=loading,
        **options,
    )


def figures(
    records: Sequence[RequestRecord], loads: Sequence[LoadRecord], batch_size: int = 1
) -> dict[str, Any]:
    """Loading and TTFT of one run. Loading is divided by all batches, loaded for or not."""
    ttfts_s = [r.first_token_s - r.arrival_s for r in records if r.first_token_s is not None]
    return {
        "requests": len(records),
        "not_served": sum(record.finished_s is None for record in records),
        "loads": len(loads),
        "loaded_gb": sum(load.loaded_bytes for load in loads) / 1e9,
        "loading_ms": 1e3 * sum(load.seconds for load in loads) * batch_size / len(records),
        "ttft_mean_ms": 1e3 * float(np.mean(ttfts_s)),
        "ttft_p50_ms": 1e3 * float(np.percentile(ttfts_s, 50)),
        "ttft_p99_ms": 1e3 * float(np.percentile(ttfts_s, 99)),
    }


def by_locality(
    setting: Setting, of: Sequence[TraceRequest], rate: float, num_requests: int, names: set[str]
) -> dict[str, Any]:
    """Loading and TTFT by level of locality and mode."""
    workload = LocalityWorkload(tuple(setting.models), of, rate, num_requests)
    found: dict[str, Any] = {}
    for level, locality in LOCALITIES.items():
        requests = workload.requests(locality)
        row = found[level] = {}
        for name, loading in modes(setting.device.link_bandwidth).items():
            if name in names:
                result = replay(config_of(setting, loading), requests)
                row[name] = figures(result.records, result.loads)
    return found


def by_pool_size(of: Sequence[TraceRequest], num_requests: int) -> dict[str, Any]:
    """Loading by the size of all models together (Fig. 12b), on one L40."""
    found: dict[str, Any] = {}
    for num_models in _POOLS:
        setting = by_class(num_models)
        found[str(num_models)] = {
            "models_gb": setting.weight_bytes / 1e9,
            **by_locality(setting, of, LOW_RATE, num_requests, {"tensor", "whole, not kept"}),
        }
    return found


def by_batch(setting: Setting, of: Sequence[TraceRequest], num_batches: int) -> dict[str, Any]:
    """Loading and TTFT by batch size, level and mode (Fig. 9 and 12a).

    "reserved" is what the paper calls "+Reuse": tensors stay where they can, but KV has a fixed
    part of the pool, for the longest context of each sequence of the batch with the model that
    needs the most.
    """
    link_bandwidth = setting.device.link_bandwidth
    most_bytes = max(model.kv_layout.token_bytes for model in setting.models.values())
    found: dict[str, Any] = {}
    for size in _BATCHES:
        reserved_bytes = size * CONTEXT_TOKENS * most_bytes
        workload = LocalityWorkload(
            tuple(setting.models), of, LOW_RATE, num_batches, batch_size=size
        )
        row: dict[str, Any] = {"reserved_gb": reserved_bytes / 1e9}
        share = 1 - reserved_bytes / setting.memory_bytes
        known = modes(link_bandwidth)
        compared = {
            "tensor": known["tensor"],
            "reserved": LoadingConfig(link_bandwidth, weight_share=share),
            "whole, not kept": known["whole, not kept"],
        }
        for level, locality in LOCALITIES.items():
            requests = workload.requests(locality)
            row[level] = {}
            for name, loading in compared.items():
                result = replay(config_of(setting, loading), requests)
                row[level][name] = figures(result.records, result.loads, size)
        found[str(size)] = row
    return found


def placements() -> dict[str, tuple[bool, Placement]]:
    """Whether models are reloaded as a whole, and the placement."""
    return {
        "whole, random": (True, random_device(0)),
        "tensor, random": (False, random_device(0)),
        "tensor, round robin": (False, round_robin_devices),
        "tensor, least loaded": (False, least_loaded),
        "tensor, affinity": (False, affinity),
    }


def by_devices(
    of: Sequence[TraceRequest], num_requests: int, counts: Sequence[int] = (1, 2, 4, 8)
) -> dict[str, Any]:
    """TTFT by rate, number of devices, and placement (Fig. 13)."""
    setting = by_class(_NUM_MODELS_PLACED)
    found: dict[str, Any] = {}
    for rate in RATES:
        workload = LocalityWorkload(tuple(setting.models), of, rate, num_requests)
        requests = workload.requests(LOCALITIES["L3"])
        for count in counts:
            row = found.setdefault(str(rate), {}).setdefault(str(count), {})
            for name, (is_exclusive, placement) in placements().items():
                if count == 1 and name.startswith("tensor") and name != "tensor, random":
                    continue  # one device, one placement
                loading = LoadingConfig(setting.device.link_bandwidth, is_exclusive=is_exclusive)
                workers = (config_of(setting, loading),) * count
                result = replay_cluster(ClusterConfig(workers, placement), requests)
                row[name] = figures(result.records, result.loads)
    return found


def by_split(
    setting: Setting,
    rate: float,
    of: Sequence[TraceRequest],
    num_requests: int,
    num_traces: int,
) -> dict[str, Any]:
    """TTFT with the one rule, and with fixed parts of the pool for weights."""
    traces = [
        MixedTrace(setting.models, of, rate, num_requests, seed=seed).requests()
        for seed in range(num_traces)
    ]
    found: dict[str, Any] = {}
    for share in (None, *_SPLITS):
        loading = LoadingConfig(setting.device.link_bandwidth, weight_share=share)
        config = config_of(setting, loading, prefix_caching=True)
        results = [replay(config, requests) for requests in traces]
        row = figures(
            [record for result in results for record in result.records],
            [load for result in results for load in result.loads],
        )
        by_seed = [figures(result.records, result.loads) for result in results]
        for field in _COMPARED:
            row[f"{field}_by_seed"] = [each[field] for each in by_seed]
        hits = sum(result.hit_tokens for result in results)
        row["prefix_hits"] = hits / sum(result.queried_tokens for result in results)
        row["preemptions"] = sum(result.num_preemptions for result in results)
        found["one rule" if share is None else str(share)] = row
    return found | {"compared": compared_splits(found)}


def compared_splits(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios of the best and the worst fixed split to the one rule; above 1 the rule is better.

    The best split is the one with the least geometric mean over the traces. Ratios are geometric
    means of those of each trace, with 95 % intervals (Student's t of the logarithms).
    """
    compared: dict[str, Any] = {"reasonable": _REASONABLE}
    for field in _COMPARED:
        logs = {name: np.log(found[name][f"{field}_by_seed"]) for name in found}
        rule = logs.pop("one rule")
        best = min(logs, key=lambda name: float(logs[name].mean()))
        worst = max(map(str, _REASONABLE), key=lambda name: float(logs[name].mean()))
        compared[field] = {
            "best_split": best,
            "best_by_rule": _ratio(logs[best] - rule),
            "worst_reasonable_by_rule": _ratio(logs[worst] - rule),
        }
    return compared


def _ratio(logs: npt.NDArray[np.float64]) -> dict[str, Any]:
    """A geometric mean of ratios, its 95 % interval, and the least and the largest one.

    Args:
        logs: logarithms of the ratios, [n]; with one there is no interval.
    """
    mean = logs.mean()
    found = {"mean": float(np.exp(mean)), "least": float(np.exp(logs.min()))}
    found["most"] = float(np.exp(logs.max()))
    if len(logs) > 1:
        half = student_t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
        found |= {"low": float(np.exp(mean - half)), "high": float(np.exp(mean + half))}
    return found


def draw(content: Mapping[str, Any], splits: Mapping[str, Any], file: Path) -> None:
    """Draw loading by locality, p99 TTFT by devices, and TTFT by split."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7))
    names = ("tensor", "tensor, random", "model", "whole", "whole, not kept")
    for axis, (setting, found) in zip(axes[0], content["locality"].items(), strict=False):
        for index, name in enumerate(names):
            heights = [found[level][name]["loading_ms"] for level in LOCALITIES]
            axis.bar(np.arange(4) + 0.16 * (index - 2), heights, 0.16, label=name)
        axis.set_xticks(range(4), list(LOCALITIES))
        axis.set_title(f"{setting}: loading, ms a request", fontsize=10)
        axis.legend(fontsize=7)
    axis = axes[0][2]
    for level in LOCALITIES:
        rows = content["pool"].values()
        shares = [
            100 * row[level]["tensor"]["loading_ms"] / row[level]["whole, not kept"]["loading_ms"]
            for row in rows
        ]
        axis.plot([row["models_gb"] for row in rows], shares, "o-", label=level)
    axis.set_title("l40: loading, % of whole models, by GB of models", fontsize=10)
    axis.set_ylim(0, None)
    axis.legend(fontsize=7)
    for axis, rate in zip(axes[1], RATES, strict=False):
        rows = content["devices"][str(rate)]
        for name in placements():
            counts = [count for count in rows if name in rows[count]]
            values = [rows[count][name]["ttft_p99_ms"] / 1e3 for count in counts]
            axis.plot([int(count) for count in counts], values, "o-", label=name)
        axis.set(yscale="log", xlabel="devices")
        axis.set_title(f"p99 TTFT, s, {rate} requests/s", fontsize=10)
        axis.legend(fontsize=7)
    axis = axes[1][2]
    for index, (setting, found) in enumerate(splits.items()):
        colour, rule = f"C{index}", found["one rule"]["ttft_mean_ms"]
        axis.plot(
            _SPLITS,
            [found[str(share)]["ttft_mean_ms"] for share in _SPLITS],
            "o-",
            color=colour,
            label=setting,
        )
        axis.axhline(rule, color=colour, linestyle="--")
    axis.set(xlabel="part of the pool for weights (dashed: one rule)", yscale="log")
    axis.set_title("mean TTFT, ms, models and prefixes", fontsize=10)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)


def draw_batches(batches: Mapping[str, Any], file: Path) -> None:
    """Draw loading by batch size and mode, and ours by that of whole models."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    names = ("tensor", "reserved", "whole, not kept")

    def loading_ms(size: str, level: str, name: str) -> float:
        return float(batches[size][level][name]["loading_ms"])

    for index, name in enumerate(names):
        means = [
            float(np.mean([loading_ms(size, level, name) for level in LOCALITIES]))
            for size in batches
        ]
        axes[0].bar(np.arange(len(batches)) + 0.25 * (index - 1), means, 0.25, label=name)
    axes[0].set_xticks(range(len(batches)), list(batches))
    axes[0].set(xlabel="batch size", title="loading, ms a batch, mean of L1 to L4")
    for level in LOCALITIES:
        shares = [
            100 * loading_ms(size, level, "tensor") / loading_ms(size, level, "whole, not kept")
            for size in batches
        ]
        axes[1].plot(range(len(batches)), shares, "o-", label=level)
    axes[1].set_xticks(range(len(batches)), list(batches))
    axes[1].set(xlabel="batch size", title="loading, % of whole models")
    axes[1].set_ylim(0, None)
    for axis in axes:
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)


def described() -> dict[str, Any]:
    """Models and devices of all experiments."""
    return {
        name: {
            "device": setting.device.name,
            "memory_gb": setting.memory_bytes / 1e9,
            "load_gb_per_s": setting.device.link_bandwidth / 1e9,
            "models_gb": {
                model: shape.weight_bytes / 1e9 for model, shape in setting.models.items()
            },
        }
        for name, setting in {
            **settings(),
            "devices": by_class(_NUM_MODELS_PLACED),
            **{f"splits, {name}": setting for name, (setting, _) in mixed_settings().items()},
        }.items()
    }


_Keep: TypeAlias = Callable[[dict[str, Any]], None]
"""Writes what was found so far."""


def measure_models(of: Sequence[TraceRequest], num_requests: int, keep: _Keep) -> None:
    """Modes of loading and placements, with so many requests in each run."""
    compared = settings()
    every = set(modes(1.0))
    keep(
        {
            "process_start_s": START_S,
            "settings": described(),
            "locality": {
                name: by_locality(setting, of, LOW_RATE, num_requests, every)
                for name, setting in compared.items()
            },
            "locality_at_higher_rate": {
                "rate": 0.4,
                "h200": by_locality(
                    compared["h200"], of, 0.4, num_requests, {"tensor", "whole", "whole, not kept"}
                ),
            },
            "pool": by_pool_size(of, num_requests // 2),
            "devices": by_devices(of, num_requests),
        }
    )


def measure_batches(of: Sequence[TraceRequest], num_batches: int, keep: _Keep) -> None:
    """KV on demand against KV reserved, in batches."""
    setting = settings()["h200"]
    keep({"settings": described(), "batches": by_batch(setting, of, num_batches)})


def measure_splits(
    of: Sequence[TraceRequest], num_requests: int, num_traces: int, keep: _Keep
) -> None:
    """One rule against two, with so many requests in each run."""
    found: dict[str, Any] = {}
    for name, (setting, rate) in mixed_settings().items():
        found[name] = by_split(setting, rate, of, _MIXED_FACTOR * num_requests, num_traces)
        keep({"settings": described(), "splits": found})


_PARTS = ("models", "batches", "splits")


def main() -> None:
    """Replay all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the lengths")
    parser.add_argument("--parts", default=",".join(_PARTS), help="what to run")
    parser.add_argument("--requests", type=int, default=150, help="requests of each run")
    parser.add_argument(
        "--traces", type=int, default=_NUM_MIXED, help="mixed traces of each setting"
    )
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    for part in parts:
        if part not in _PARTS:
            parser.error(f"--parts has {part!r}; known are {', '.join(_PARTS)}")
    of = lengths(arguments.data)
    for part in parts:
        begin_s = time.process_time()

        def keep(content: dict[str, Any], part: str = part, begin_s: float = begin_s) -> None:
            content["cpu_s"] = time.process_time() - begin_s
            command = "benchmarks/tangram/models.py --data DATA"
            command += f" --parts {part} --requests {arguments.requests}"
            if part == "splits":
                command += f" --traces {arguments.traces}"
            save(arguments.output / f"{part}.json", content, command=command)
            print(f"{part}: {content['cpu_s']:.0f} s of CPU time so far", flush=True)

        if part == "models":
            measure_models(of, arguments.requests, keep)
        elif part == "batches":
            measure_batches(of, arguments.requests, keep)
        else:
            measure_splits(of, arguments.requests, arguments.traces, keep)
    files = {part: arguments.output / f"{part}.json" for part in _PARTS}
    found = {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}
    if "models" in found and "splits" in found:
        draw(found["models"], found["splits"]["splits"], arguments.output / "models.png")
    if "batches" in found:
        draw_batches(found["batches"]["batches"], arguments.output / "batches.png")


if __name__ == "__main__":
    main()
