"""Results of a trace replay: a record for each request, and the figures of the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class RequestRecord:
    """Record of a request. Times are in seconds since the start of the trace.

    A request that failed, or was refused because it could never fit, has no `finished_s`.
    """

    model: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end latency by output token (section 6.1)."""
        if self.finished_s is None:
            return None
        return (self.finished_s - self.arrival_s) / self.output_tokens


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """Record of a load of a model's weights: of all of them, or of those that were missing."""

    model: str
    begun_s: float  # since the start of the trace
    seconds: float
    loaded_bytes: int
    weight_bytes: int


@dataclass(slots=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
        records: one per request, in order of arrival.
        duration_s: time until the last request ended.
        busy_s: the part of it in which a request ran.
        waiting_s: the part of that in which requests were waiting.
        num_steps: steps of the engine.
        num_preemptions: preemptions of requests.
        queried_tokens: prompt tokens looked up among retained prefixes.
        hit_tokens: prompt tokens found there.
        held_bytes: what is retained of prefixes at the end.
        checkpoint_bytes: of that, what checkpoints hold.
        kv_budget_bytes: the memory for KV; with weights that come and go, for these too.
        loads: loads of weights, in order of time; those that stay in the pool are not loaded.
        averages: averages of `aquifer.sim.occupancy.COLUMNS` over the busy time.
        averages_waiting: the same over the part of it in which requests were waiting.
        failed: why requests failed where workers of a cluster did, by number.
    """

    records: list[RequestRecord]
    duration_s: float = 0.0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    held_bytes: int = 0
    checkpoint_bytes: int = 0
    kv_budget_bytes: int = 0
    averages: dict[str, float] = field(default_factory=dict)
    averages_waiting: dict[str, float] = field(default_factory=dict)
    loads: list[LoadRecord] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def served(self) -> list[RequestRecord]:
        """Records of the requests that have got all of their outputs."""
        return [record for record in self.records if record.finished_s is not None]

    @property
    def num_unserved(self) -> int:
        """Requests that were refused or failed."""
        return len(self.records) - len(self.served)

    @property
    def normalized_latency_s(self) -> float:
        """Mean over all served requests; infinite if there are none."""
        values = [record.normalized_latency_s for record in self.records]
        served = [value for value in values if value is not None]
        return float(np.mean(served)) if served else np.inf

    def figures(self) -> dict[str, Any]:
        """Return all figures except the records, for a result file."""
        served = self.served
        outputs = sum(record.output_tokens for record in served)
        ttft, tpot, latency = [], [], []
        for record in served:
            assert record.first_token_s is not None
            assert record.finished_s is not None
            ttft.append(1e3 * (record.first_token_s - record.arrival_s))
            latency.append(1e3 * (record.finished_s - record.arrival_s))
            if record.output_tokens > 1:
                after_s = record.finished_s - record.first_token_s
                tpot.append(1e3 * after_s / (record.output_tokens - 1))
        duration_s = self.duration_s or np.inf
        return {
            "completed": len(served),
            "not_completed": self.num_unserved,
            "failed_with_a_worker": len(self.failed),
            "duration": self.duration_s,
            "busy_seconds": self.busy_s,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "total_input_tokens": sum(record.prompt_tokens for record in served),
            "total_output_tokens": outputs,
            "request_throughput": len(served) / duration_s,
            "output_throughput": outputs / duration_s,
            "normalized_latency": self.normalized_latency_s if served else None,
            **_percentiles("ttft", ttft),
            **_percentiles("tpot", tpot),
            **_percentiles("e2el", latency),
            "prefix_cache_queries": self.queried_tokens,
            "prefix_cache_hits": self.hit_tokens,
            "num_loads": len(self.loads),
            "loaded_bytes": sum(load.loaded_bytes for load in self.loads),
            "loading_seconds": sum(load.seconds for load in self.loads),
            "kv_budget_bytes": self.kv_budget_bytes,
            "averages": self.averages,
            "averages_while_waiting": self.averages_waiting,
        }


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    """Return mean and percentiles, with the names of `vllm bench serve`."""
    if not values:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "p90", "p99")}
    median, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": median,
        f"p90_{name}_ms": p90,
        f"p99_{name}_ms": p99,
    }
