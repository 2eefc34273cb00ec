"""Parts `pressure`, `utilisation` and `drift`: replays on a modelled device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.odma.workloads import (
    CONVERSATIONS,
    WRONG,
    WrongPredictor,
    num_good,
    recorded,
    saturated_sources,
    shifting,
    tokens_in_use,
)
from rich.progress import track

from aquifer.cache.bucketed import sizes_of
from aquifer.cache.buckets import BucketBounds
from aquifer.engine.policies.placement import (
    Placement,
    PlacementSnapshot,
    affinity,
    least_loaded,
    round_robin_devices,
)
from aquifer.sim.cluster import ClusterConfig, replay_cluster
from aquifer.sim.config import LengthPrediction, LoadingConfig, ReplayConfig
from aquifer.sim.device import MODELS, find_device
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest, fit_lengths, poisson_arrivals, read_trace

SHARES = (1.2, 0.6, 0.4, 0.3)
"""Memory for KV, as parts of the most that is in use where memory is plentiful."""

DEMAND_SHARES = (1.0, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35)
"""The same, of the part that looks at each amount of memory more closely."""

STEADY_SHARES = (0.7, 0.6, 0.5)

SHARE_OF_P95 = 0.6
"""Memory for KV, as a part of what is in use at most in 95 % of the time, likewise."""

DEMAND_WAYS = ("off", "prior", "oracle")

GOOD = ((2.0, 0.04), (5.0, 0.04), (10.0, 0.04))
"""Bounds of TTFT and TPOT in seconds within which a request counts for goodput."""

STATIC, BUCKETED = "orca-max", "bucketed"

_MODEL, _DEVICE = "llama-2-13b", "h200"
_BUCKET_MODEL, _BUCKET_DEVICE = "llama-3-8b", "a100-40g"
_BUCKET_BYTES = 12 << 30
_CONTEXT_TOKENS = 4096
_WINDOW = 200  # requests
_STEADY_RATE = 6.0  # requests a second
_GROUPING_RATE = 6.0  # requests a second
_NUM_DEVICES = 4
_DEVICES_RATE = 24.0  # requests a second, of all devices
_LOAD_BYTES_PER_S = 50e9

WAYS: dict[str, tuple[LengthPrediction, str | None]] = {
    "off": ("off", None),
    "prior": ("prior", None),
    "oracle": ("oracle", None),
    **{says: ("prior", says) for says in WRONG},
}
"""By name: how lengths are forecast, and what a wrong predictor says beside."""


def pressure(data: Path, num_requests: int) -> dict[str, Any]:
    """Replay the conversation trace at its own times, in memory for a part of the demand."""
    return _in_short_memory(_conversations(data, num_requests), SHARES, tuple(WAYS))


def demand(data: Path, num_requests: int) -> dict[str, Any]:
    """The same in many amounts of memory, and how often the demand exceeds each.

    They are shares of the largest demand. One more is 60 % of the 95th percentile over time.
    """
    requests = _conversations(data, num_requests)
    found = _in_short_memory(requests, DEMAND_SHARES, DEMAND_WAYS)
    share = SHARE_OF_P95 * found["p95_bytes"] / found["demand_bytes"]
    return {**found, "of_p95": _in_short_memory(requests, (share,), DEMAND_WAYS)["rows"]}


def steady(data: Path, num_requests: int) -> dict[str, Any]:
    """The same with the trace's lengths at a steady rate, in place of its waves."""
    requests = _conversations(data)
    arriving = poisson_arrivals(requests, _STEADY_RATE, num_requests, seed=0)
    found = _in_short_memory(arriving, STEADY_SHARES, DEMAND_WAYS)
    return {**found, "requests_per_s": _STEADY_RATE}


def _conversations(data: Path, num_requests: int | None = None) -> list[TraceRequest]:
    return recorded(data / CONVERSATIONS, MODELS[_MODEL].max_tokens, num_requests)


def _in_short_memory(
    requests: Sequence[TraceRequest], shares: Sequence[float], ways: Sequence[str]
) -> dict[str, Any]:
    model = MODELS[_MODEL]
    base = ReplayConfig(
        {_MODEL: model}, find_device(_DEVICE), max_num_seqs=1024, states_lengths=False
    )
    plenty = replace(base, memory_bytes=model.weight_bytes + (1 << 40))
    token_bytes = model.kv_layout.token_bytes
    in_use = tokens_in_use(replay(plenty, requests).records) * token_bytes
    most_bytes = int(in_use.max())
    rows = []
    cells = [(share, way) for share in shares for way in ways]
    for share, way in track(cells, "short memory"):
        how, says = WAYS[way]
        config = replace(
            base,
            memory_bytes=model.weight_bytes + int(share * most_bytes),
            length_prediction=how,
            predictor=None if says is None else WrongPredictor(says),
        )
        result = replay(config, requests)
        rows.append({"memory_share": share, "way": way, **_figures(result)})
    return {
        "model": _MODEL,
        "modelled_device": _DEVICE,
        "trace": CONVERSATIONS,
        "num_requests": len(requests),
        "demand_bytes": most_bytes,
        "mean_bytes": int(in_use.mean()),
        "p95_bytes": int(np.percentile(in_use, 95)),
        "time_above": {share: float((in_use > share * most_bytes).mean()) for share in shares},
        "good_bounds_s": GOOD,
        "rows": rows,
    }


def utilisation(data: Path, num_requests: int) -> dict[str, Any]:
    """Replay requests that all wait at the start, in contiguous memory and in pages."""
    base = _small_memory()
    ways: dict[str, ReplayConfig] = {
        "static, the longest context": replace(base, manager=STATIC),
        "S3: static buckets": replace(
            base, manager=BUCKETED, length_prediction="prior", static_buckets=True
        ),
        "ODMA: dynamic buckets": replace(base, manager=BUCKETED, length_prediction="prior"),
        "buckets, lengths known": replace(base, manager=BUCKETED, length_prediction="oracle"),
        "paged": replace(base, manager="paged"),
        "virtual": replace(base, manager="virtual"),
        "virtual, forecasts": replace(base, manager="virtual", length_prediction="prior"),
    }
    sources = saturated_sources(data, _CONTEXT_TOKENS, num_requests)
    rows = []
    for source, way in track([(s, w) for s in sources for w in ways], "utilisation"):
        result = replay(ways[way], sources[source])
        waiting = result.averages_waiting
        rows.append(
            {
                "source": source,
                "way": way,
                "utilisation": waiting["written"] / result.kv_budget_bytes,
                "sequences": waiting["sequences"],
                **_figures(result),
            }
        )
    return {
        "model": _BUCKET_MODEL,
        "modelled_device": _BUCKET_DEVICE,
        "kv_bytes": _BUCKET_BYTES,
        "context_tokens": _CONTEXT_TOKENS,
        "num_requests": num_requests,
        "rows": rows,
    }


def grouping(data: Path, num_requests: int) -> dict[str, Any]:
    """Replay the requests of `utilisation` in order of arrival, and grouped by bucket."""
    base = replace(_small_memory(), manager=BUCKETED, length_prediction="prior")
    sources = {
        **saturated_sources(data, _CONTEXT_TOKENS, num_requests),
        "conversations, 6 a second": poisson_arrivals(
            fit_lengths(read_trace(data / CONVERSATIONS), _CONTEXT_TOKENS, cut=False)[0],
            _GROUPING_RATE,
            num_requests,
            seed=0,
        ),
    }
    rows = []
    for source, groups in track([(s, g) for s in sources for g in (False, True)], "grouping"):
        result = replay(replace(base, groups_by_bucket=groups), sources[source])
        waiting = result.averages_waiting
        rows.append(
            {
                "source": source,
                "groups_by_bucket": groups,
                "utilisation": waiting["written"] / result.kv_budget_bytes,
                **_figures(result),
            }
        )
    return {"model": _BUCKET_MODEL, "num_requests": num_requests, "rows": rows}


def drift(data: Path, num_requests: int) -> dict[str, Any]:
    """Replay a trace in which lengths shift twice, and look at each window of it."""
    requests = shifting(data, _CONTEXT_TOKENS, num_requests // 3, rate=5.0)
    base = _small_memory()
    ways = {
        "static, the longest context": replace(base, manager=STATIC),
        "S3: static buckets": replace(
            base, manager=BUCKETED, length_prediction="prior", static_buckets=True
        ),
        "ODMA: dynamic buckets": replace(base, manager=BUCKETED, length_prediction="prior"),
        "virtual": replace(base, manager="virtual"),
        "virtual, forecasts": replace(base, manager="virtual", length_prediction="prior"),
    }
    rows = []
    for way, config in track(list(ways.items()), "drift"):
        result = replay(config, requests)
        rows.append({"way": way, **_figures(result), "windows": list(_windows(result))})
    return {
        "model": _BUCKET_MODEL,
        "modelled_device": _BUCKET_DEVICE,
        "window_requests": _WINDOW,
        "shifts_at": [num_requests // 3, 2 * (num_requests // 3)],
        "mean_outputs": _means(requests),
        "rows": rows,
    }


def devices(data: Path, num_requests: int) -> dict[str, Any]:
    """Replay conversations on several devices, by where requests are placed, in short memory.

    Bounds "in step" are those of one window of lengths for all devices (section 3.5).
    """
    base = replace(
        _small_memory(),
        manager=BUCKETED,
        length_prediction="prior",
        loading=LoadingConfig(_LOAD_BYTES_PER_S),
    )
    paged = replace(base, manager="virtual")
    fitting, _ = fit_lengths(read_trace(data / CONVERSATIONS), _CONTEXT_TOKENS, cut=False)
    requests = [
        replace(request, model=_BUCKET_MODEL)
        for request in poisson_arrivals(fitting, _DEVICES_RATE, num_requests, seed=0)
    ]
    ways: dict[str, tuple[ReplayConfig, Placement, bool]] = {
        "round-robin": (base, round_robin_devices, False),
        "least-loaded": (base, least_loaded, False),
        "affinity by wait": (base, affinity_by_wait, False),
        "affinity": (base, affinity, False),
        "round-robin, bounds in step": (base, round_robin_devices, True),
        "least-loaded, bounds in step": (base, least_loaded, True),
        "affinity, bounds in step": (base, affinity, True),
        "virtual, affinity by wait": (paged, affinity_by_wait, False),
        "virtual, affinity": (paged, affinity, False),
    }
    rows = []
    for way, (config, placement, in_step) in track(list(ways.items()), "devices"):
        if in_step:
            bounds = BucketBounds(sizes_of(config.block_size, _CONTEXT_TOKENS))
            config = replace(config, bounds=bounds)
        result = replay_cluster(ClusterConfig((config,) * _NUM_DEVICES, placement), requests)
        placed = [index for index in result.placed if index is not None]
        begun_s = [r.first_token_s - r.arrival_s for r in result.records if r.first_token_s]
        ended_s = [r.finished_s - r.arrival_s for r in result.records if r.finished_s]
        duration_s = max(device.duration_s for device in result.devices)
        rows.append(
            {
                "way": way,
                "placed": np.bincount(placed, minlength=_NUM_DEVICES).tolist(),
                "not_completed": len(requests) - len(ended_s),
                "preemptions": sum(device.num_preemptions for device in result.devices),
                "tokens_per_s": sum(r.output_tokens for r in result.records) / duration_s,
                "mean_ttft_s": float(np.mean(begun_s)),
                "p99_ttft_s": float(np.percentile(begun_s, 99)),
                "mean_e2el_s": float(np.mean(ended_s)),
            }
        )
    return {
        "model": _BUCKET_MODEL,
        "modelled_device": _BUCKET_DEVICE,
        "num_devices": _NUM_DEVICES,
        "kv_bytes": _BUCKET_BYTES,
        "requests_per_s": _DEVICES_RATE,
        "num_requests": num_requests,
        "rows": rows,
    }


def affinity_by_wait(snapshot: PlacementSnapshot) -> int | None:
    """`affinity` without regard to memory: a device's first waiting request tells how long the
    next one will wait."""
    return affinity(
        snapshot._replace(
            devices=[
                device._replace(
                    wait_s=max(device.wait_s, device.queued_s or 0.0),
                    queued_s=None,
                    lacks_memory=False,
                )
                for device in snapshot.devices
            ]
        )
    )


def _small_memory() -> ReplayConfig:
    """The device on which contiguous memory is compared with pages."""
    model = MODELS[_BUCKET_MODEL]
    return ReplayConfig(
        {_BUCKET_MODEL: model},
        find_device(_BUCKET_DEVICE),
        memory_bytes=model.weight_bytes + _BUCKET_BYTES,
        max_model_len=_CONTEXT_TOKENS,
        max_num_seqs=1024,
        states_lengths=False,
    )


def _figures(result: ReplayResult) -> dict[str, Any]:
    """What a row has of a result."""
    figures = result.figures()
    return {
        "preemptions": result.num_preemptions,
        "not_completed": result.num_unserved,
        "tokens_per_s": figures["output_throughput"],
        "goodput": [num_good(result.records, *bounds) / result.duration_s for bounds in GOOD],
        **{
            name: figures[f"{name}_ms"]
            for name in ("mean_ttft", "p99_ttft", "median_tpot", "p99_tpot", "mean_e2el")
        },
    }


def _windows(result: ReplayResult) -> Iterator[float]:
    """Mean time of requests until their first token, by windows of arrivals, in seconds."""
    waits = [
        record.first_token_s - record.arrival_s
        for record in result.records
        if record.first_token_s is not None
    ]
    for start in range(0, len(waits), _WINDOW):
        yield float(np.mean(waits[start : start + _WINDOW]))


def _means(requests: Sequence[TraceRequest]) -> list[float]:
    outputs = [request.output_tokens for request in requests]
    return [
        float(np.mean(outputs[start : start + _WINDOW]))
        for start in range(0, len(outputs), _WINDOW)
    ]
