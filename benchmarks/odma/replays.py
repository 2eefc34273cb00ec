"""Parts `pressure`, `utilisation` and `drift`: replays on a modelled device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.odma.workloads import (
    ALPACA,
    CONVERSATIONS,
    GSM8K,
    WRONG,
    WrongPredictor,
    most_tokens,
    num_good,
    recorded,
    saturated,
    shifting,
)
from rich.progress import track

from aquifer.sim.config import LengthPrediction, ReplayConfig
from aquifer.sim.device import MODELS, find_device
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest

SHARES = (1.2, 0.6, 0.4, 0.3)
"""Memory for KV, as parts of the most that is in use where memory is plentiful."""

GOOD = ((2.0, 0.04), (5.0, 0.04), (10.0, 0.04))
"""Bounds of TTFT and TPOT in seconds within which a request counts for goodput."""

STATIC, BUCKETED = "orca-max", "bucketed"

_MODEL, _DEVICE = "llama-2-13b", "h200"
_BUCKET_MODEL, _BUCKET_DEVICE = "llama-3-8b", "a100-40g"
_BUCKET_BYTES = 12 << 30
_CONTEXT_TOKENS = 4096
_ALPACA_MODEL = "Qwen1.5-7B-Chat"
_WINDOW = 200  # requests

WAYS: dict[str, tuple[LengthPrediction, str | None]] = {
    "off": ("off", None),
    "prior": ("prior", None),
    "oracle": ("oracle", None),
    **{says: ("prior", says) for says in WRONG},
}
"""By name: how lengths are forecast, and what a wrong predictor says beside."""


def pressure(data: Path, num_requests: int) -> dict[str, Any]:
    """Replay the conversation trace at its own times, in memory for a part of the demand."""
    model = MODELS[_MODEL]
    requests = recorded(data / CONVERSATIONS, model.max_tokens, num_requests)
    base = ReplayConfig(
        {_MODEL: model}, find_device(_DEVICE), max_num_seqs=1024, states_lengths=False
    )
    plenty = replace(base, memory_bytes=model.weight_bytes + (1 << 40))
    demand = most_tokens(replay(plenty, requests).records) * model.kv_layout.token_bytes
    rows = []
    cells = [(share, way) for share in SHARES for way in WAYS]
    for share, way in track(cells, "pressure"):
        how, says = WAYS[way]
        config = replace(
            base,
            memory_bytes=model.weight_bytes + int(share * demand),
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
        "demand_bytes": int(demand),
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
    sources = {
        "Alpaca": saturated(data / ALPACA, _CONTEXT_TOKENS, num_requests, _ALPACA_MODEL),
        "GSM8K": saturated(data / GSM8K, _CONTEXT_TOKENS, num_requests),
        "conversations": saturated(data / CONVERSATIONS, _CONTEXT_TOKENS, num_requests),
    }
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
