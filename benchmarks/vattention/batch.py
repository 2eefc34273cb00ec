"""Part `batch`: the largest batch of a replayed trace, by page size and layout (Fig. 12)."""

from __future__ import annotations

from typing import Any

from benchmarks.vattention import paper
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import KIB, SEED, Settings
from benchmarks.vattention.waste import kv_layout, num_parts

from aquifer.bench.result import summarize
from aquifer.progress import counting_bar
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import ModelShape, find_device
from aquifer.sim.replay import replay
from aquifer.sim.results import RequestRecord
from aquifer.sim.trace import TraceRequest, fit_lengths, poisson_arrivals, read_trace

PAGE_SIZES = tuple(size * KIB for size in (64, 2048, 4096, 16384))
CONTEXT_TOKENS = 8192
SATURATED = 1e6
"""A rate at which all requests arrive at the start, requests/s."""

_MAX_SEQS = 2048
_DEVICE = "a100-80g"

_WIDTHS = {
    "Yi-6B": (4096, 11008, 64000),
    "Llama-3-8B": (4096, 14336, 128256),
    "Yi-34B": (7168, 20480, 64000),
}
"""Elements of a hidden state and of the feed-forward layer, and the vocabulary."""


def shape_of(model: str) -> ModelShape:
    """Sizes of one of the paper's models (Table 4)."""
    sizes = paper.MODELS[model]
    hidden, feed_forward, vocab_size = _WIDTHS[model]
    return ModelShape.dense(
        model,
        num_layers=sizes["num_layers"],
        hidden=hidden,
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        feed_forward_matrices=3,
        feed_forward=feed_forward,
        vocab_size=vocab_size,
        tied=False,
        max_tokens=CONTEXT_TOKENS,
    )


def largest_batch(records: list[RequestRecord]) -> int:
    """Most requests that ran at once. A preempted one counts until it ends."""
    # Ends come before starts of the same time.
    changes = sorted(
        change
        for record in records
        if record.scheduled_s is not None and record.finished_s is not None
        for change in ((record.scheduled_s, 1), (record.finished_s, -1))
    )
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def load_name(rate: float) -> str:
    """A load in results, by its rate."""
    return "saturated" if rate == SATURATED else f"{rate:g} requests/s"


def config_of(model: str, order: str, page_bytes: int) -> ReplayConfig:
    """The configuration of a replay on the paper's devices.

    All devices and parts of a sequence's KV grow by a page at the same token, so pages of all of
    them are one page of the replay. This holds for layer-major KV too, where a page of each part
    has room for the same tokens.

    Args:
        model: one of the paper's.
        order: see `num_parts`.
        page_bytes: size of a page on one device.
    """
    num_devices = paper.MODELS[model]["devices"]
    parts = num_parts(kv_layout(model, num_devices), order)
    return ReplayConfig(
        models={model: shape_of(model)},
        device=find_device(f"{num_devices}x{_DEVICE}"),
        page_bytes=page_bytes * parts * num_devices,
        max_num_seqs=_MAX_SEQS,
    )


def measure(settings: Settings, record: Record) -> None:
    """Replay the trace for each model, page size and layout."""
    record.content |= {
        "paper": paper.BATCH,
        "modelled_device": _DEVICE,
        "num_requests": settings.trace_requests,
        "context_tokens": CONTEXT_TOKENS,
    }
    if settings.trace is None:
        record.leave_out("batch", "no trace; give --data")
        record.save()
        return
    record.content["trace"] = settings.trace.name
    lengths, _ = fit_lengths(read_trace(settings.trace), CONTEXT_TOKENS, cut=False)
    cells = {
        f"{model}, {order}, {size // KIB} KiB, {load_name(rate)}": (model, order, size, rate)
        for rate in (settings.trace_rate, SATURATED)
        for model in paper.MODELS
        for order in ("token-major", "layer-major")
        for size in PAGE_SIZES
    }
    for name, (model, order, page_bytes, rate) in record.cells(cells):
        requests = poisson_arrivals(lengths, rate, settings.trace_requests, SEED)
        row = _replayed(name, config_of(model, order, page_bytes), requests)
        described = {"model": model, "layout": order, "page_kib": page_bytes // KIB}
        record.add("rows", {**described, "load": load_name(rate), **row})


def _replayed(name: str, config: ReplayConfig, requests: list[TraceRequest]) -> dict[str, Any]:
    with counting_bar() as bar:
        task = bar.add_task(name, total=len(requests))
        result = replay(config, requests, lambda done: bar.update(task, completed=done))
    waste = {key: result.averages.get(key, 0.0) for key in ("written", "internal")}
    held_bytes = sum(waste.values())
    latencies = [each.normalized_latency_s for each in result.records]
    return {
        "largest_batch": largest_batch(result.records),
        "mean_batch": result.averages.get("requests", 0.0),
        "mean_batch_while_waiting": result.averages_waiting.get("requests", 0.0),
        "preemptions": result.num_preemptions,
        "unserved": result.num_unserved,
        "wasted_share": waste["internal"] / held_bytes if held_bytes else 0.0,
        "normalized_latency_s": summarize([each for each in latencies if each is not None]),
        "duration_s": result.duration_s,
    }
