"""Numbers of each figure: its replays, and the values derived from them.

Every function returns the content of one JSON file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.pagedattention.measures import Figures
from benchmarks.pagedattention.replays import Case, Job, Replays, finite
from benchmarks.pagedattention.workloads import LONG_PREFIX_TOKENS, SHORT_PREFIX_TOKENS

from aquifer.sim.device import StepModel, find_device, find_model

OURS = ("paged", "virtual")
ORCAS = ("orca-max", "orca-pow2", "orca-oracle")
MANAGERS = ("static", *ORCAS, *OURS)

WIDTHS = (2, 4, 6)
"""Numbers of samples of a prompt, and of beams (Fig. 14)."""

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SWAP_BLOCK_SIZES = (1, 4, 16, 64, 256)

_FRACTIONS = (0.3, 0.8, 0.9, 1.0, 1.1, 1.3)
"""Rates of a curve, as fractions of the manager's throughput with a queue (its capacity)."""

_FEW_FRACTIONS = (0.4, 0.8, 1.1)

_NUM_REQUESTS = 800
"""Requests of a replay, or of the first one of a convergence test: two blocks of a workload."""

_WIDE_REQUESTS = 400
"""Requests of a curve's replays where a request has several sequences."""

_LIMIT = 2.0
"""Normalized latency, as a multiple of the unloaded one, at which rates are compared.

Higher ones say less: beyond a manager's capacity, latency depends on the length of the replay."""

_MANY_SEQS = 1536  # more than fit in memory, with six sequences to a request

COPY_FIXED_S = 10e-6
"""Fixed cost of a copy over PCIe: an assumption, of the order of a `cudaMemcpyAsync`."""

_MICRO_TOKENS = 1024  # length of the sequence that is swapped or recomputed in Fig. 19a


def sustained_rate(curve: Sequence[Figures], bound_s: float) -> float | None:
    """Interpolate the rate at which a curve first crosses a latency.

    None if its first point is above the latency; infinite if no point is.
    """
    points = sorted((point["rate"], point["normalized_latency"]) for point in curve)
    if points[0][1] > bound_s:
        return None
    for (rate, latency), (next_rate, next_latency) in pairwise(points):
        if next_latency > bound_s:
            part = math.log(bound_s / latency) / math.log(next_latency / latency)
            return float(rate + part * (next_rate - rate))
    return math.inf


def figure_12(replays: Replays) -> Figures:
    """Latency against request rate, basic sampling; with the rates sustained at `_LIMIT`."""
    return {"figure": "12", "settings": [_setting(replays, *setting) for setting in _SETTINGS]}


_SETTINGS = (
    ("conversation", "opt-13b"),
    ("conversation-4096", "llama-2-13b"),
    ("sharegpt-like", "opt-13b"),
    ("alpaca", "opt-13b"),
)
"""(workload, model)."""


def _basic(workload: str, model: str, names: Sequence[str] = MANAGERS) -> dict[str, Job]:
    """Return jobs of basic sampling, by manager."""
    return {name: Job(workload, name, None, _NUM_REQUESTS, model) for name in names}


def _setting(replays: Replays, workload: str, model: str) -> Figures:
    jobs = _basic(workload, model)
    saturated = replays.saturated(f"12, {workload}", jobs)
    return {
        "workload": workload,
        "model": model,
        "saturated": [_saturated(jobs[name], figures) for name, figures in saturated.items()],
        **_curves(replays, f"12, {workload}", jobs, saturated),
    }


def _saturated(job: Job, figures: Figures) -> Figures:
    """Return a manager's throughput with all requests waiting, and how its step time divides."""
    steps = StepModel(find_model(job.model), find_device(job.device))
    waiting = figures["averages_while_waiting"]
    kv_tokens = waiting["written"] * figures["kv_budget_bytes"] / steps.model.kv_layout.token_bytes
    batch = waiting["sequences"]
    step_s = float(steps.decode_seconds(max(round(batch), 1), np.array([round(kv_tokens)]))[0])
    empty_s = float(steps.decode_seconds(1, np.array([1]))[0])
    num = figures["completed"]
    prompts = figures["input_tokens"] / num
    outputs = figures["output_throughput"] * figures["duration"] / num
    return {
        "manager": job.manager,
        "capacity": figures["capacity"],
        "convergence": figures["convergence"],
        "batched": waiting["requests"],
        "kv_tokens_per_sequence": kv_tokens / max(batch, 1e-9),
        "decode_step_s": step_s,
        "decode_step_weights_s": empty_s,
        "prefill_s_per_request": steps.prefill_seconds(0, prompts),
        "prefill_part_of_time": figures["capacity"] * steps.prefill_seconds(0, prompts),
        "mean_prompt_tokens": prompts,
        "mean_output_tokens": outputs,
        "num_preemptions": figures["num_preemptions"],
    }


def token_budgets(replays: Replays) -> Figures:
    """Throughput with a queue, by the maximum number of tokens of a step.

    Steps of few tokens compute prompts in the time that reading the weights takes anyway.
    """
    runs: list[Figures] = []
    for workload, model in _SETTINGS[:2]:
        for budget in (8192, 512, 192):
            jobs = _basic(workload, model, ("orca-max", "orca-oracle", "virtual"))
            jobs = {n: replace(job, max_num_batched_tokens=budget) for n, job in jobs.items()}
            runs += replays.saturated(f"token budgets, {workload}", jobs).values()
    return {"figure": "token budgets", "runs": runs}


def hour(replays: Replays) -> Figures:
    """Replays of one hour, as in the paper, at 0.95 of each manager's capacity.

    They show that such a rate can be sustained, which short replays cannot: beyond a manager's
    capacity, latency depends on the length of the replay.
    """
    jobs = []
    for workload, model in _SETTINGS[:2]:
        short = _basic(workload, model, ("orca-max", "orca-oracle", "virtual"))
        for name, figures in replays.saturated("hour", short).items():
            rate = float(f"{0.95 * figures['capacity']:.3g}")
            jobs.append(replace(short[name], rate=rate, num_requests=round(3600 * rate)))
    return {"figure": "hour", "runs": replays.run("hour", jobs)}


def figure_13(replays: Replays) -> Figures:
    """Batched requests while others wait, independent of the rate.

    In the paper the rate is one that only its own system could just sustain.
    """
    groups = []
    for workload, model in _SETTINGS:
        runs = replays.saturated(f"13, {workload}", _basic(workload, model))
        groups.append({"workload": workload, "model": model, "runs": list(runs.values())})
    return {"figure": "13", "groups": groups}


def figure_2(replays: Replays) -> Figures:
    """Use of the memory for KV while requests wait for it: the runs of Fig. 13."""
    groups = []
    for group in figure_13(replays)["groups"]:
        bars = []
        for run in group["runs"]:
            if run["manager"] == "static":
                continue
            memory = run["averages_while_waiting"]
            # Free memory that no waiting request can use is external fragmentation; our managers
            # keep free memory for running requests to grow.
            is_ours = run["manager"] in OURS
            wasted = memory["future"] + memory["internal"] + memory["external"]
            bars.append(
                {
                    "manager": run["manager"],
                    "token states": memory["written"],
                    "reserved": memory["future"],
                    "internal": memory["internal"],
                    "external": memory["external"] + (0 if is_ours else memory["free"]),
                    "free": memory["free"] if is_ours else 0.0,
                    "waste_of_memory_in_use": wasted / (wasted + memory["written"]),
                }
            )
        groups.append({"workload": group["workload"], "model": group["model"], "bars": bars})
    return {"figure": "2", "groups": groups}


def figure_14(replays: Replays) -> Figures:
    """Latency against request rate, and throughput with a queue, with several sequences each.

    Beam search steps are slow to replay, so there are fewer managers.
    """
    panels = []
    for kind in ("samples", "beams"):
        names = (*ORCAS, *OURS) if kind == "samples" else ("orca-oracle", "virtual")
        for width in WIDTHS:
            jobs = {name: _wide("alpaca", name, kind, width) for name in names}
            panels.append(
                {"kind": kind, "width": width, **_few(replays, f"14, {width} {kind}", jobs)}
            )
    return {"figure": "14", "panels": panels}


def _wide(workload: str, manager: str, kind: str, width: int) -> Job:
    """Return a job with several sequences to a request."""
    job = Job(workload, manager, None, _WIDE_REQUESTS, max_num_seqs=_MANY_SEQS)
    return replace(job, num_samples=width) if kind == "samples" else replace(job, beam_width=width)


def figure_15(replays: Replays) -> Figures:
    """Memory saved by sharing, at a rate with short queueing times."""
    workloads = {"alpaca": 2.0, "alpaca-like": 2.0, "conversation": 0.2, "sharegpt-like": 0.2}
    jobs = []
    for workload, rate in workloads.items():
        for kind in ("samples", "beams"):
            for width in WIDTHS:
                for name in OURS if workload == "alpaca" else ("paged",):
                    job = replace(_wide(workload, name, kind, width), rate=rate)
                    if kind == "samples":  # what they share depends much on the lengths drawn
                        job = replace(job, num_requests=_NUM_REQUESTS)
                    if kind == "beams" and "alpaca" not in workload:  # ten times as many steps
                        job = replace(job, num_requests=16)
                    jobs.append(job)
    return {"figure": "15", "runs": replays.run("15", jobs)}


def figure_16(replays: Replays) -> Figures:
    """Prompts that share a prefix."""
    panels = []
    for num_prefix in (SHORT_PREFIX_TOKENS, LONG_PREFIX_TOKENS):
        workload = f"translation-{num_prefix}"
        jobs = _basic(workload, "llama-13b", ("orca-max", "orca-oracle", "paged"))
        for name, job in _basic(workload, "llama-13b", OURS).items():
            jobs[f"{name}, prefix kept"] = replace(job, prefix_caching=True)
        panels.append({"prefix_tokens": num_prefix, **_few(replays, f"16, {num_prefix}", jobs)})
    return {"figure": "16", "panels": panels}


def figure_17(replays: Replays) -> Figures:
    """A chatbot, without and with KV retained between rounds."""
    jobs = _basic("chatbot", "opt-13b", (*ORCAS, *OURS))
    jobs["virtual, rounds kept"] = replace(jobs["virtual"], prefix_caching=True)
    return {"figure": "17", **_few(replays, "17", jobs, _FRACTIONS)}


def figure_18(replays: Replays, kernels: Path) -> Figures:
    """Measured time of the attention kernel; and latency by block size at a fixed rate."""
    measured = json.loads(kernels.read_text(encoding="utf-8"))
    shapes: dict[str, Figures] = {}
    for result in measured["results"]:
        shape = result["shape"]
        text = f"{shape['batch']} x {shape['tokens']}, {shape['num_kv_heads']} KV heads"
        entry = shapes.setdefault(text, {"shape": shape})
        entry[f"{result['layout']}_s"] = float(np.median(result["layer_s"]))
    panels = []
    for workload in ("sharegpt-like", "alpaca"):
        base = Job(workload, "paged", None, _NUM_REQUESTS)
        rate = round(0.95 * _capacity(replays, "18", base), 2)
        runs = replays.run(
            f"18, {workload}",
            [replace(base, rate=rate, block_size=size) for size in BLOCK_SIZES],
        )
        panels.append({"workload": workload, "rate": rate, "runs": runs})
    return {
        "figure": "18",
        "kernel": {"environment": measured["environment"], "shapes": list(shapes.values())},
        "panels": panels,
    }


def figure_19(replays: Replays) -> Figures:
    """Swapping and recomputation: one sequence, modelled; and latency under memory pressure."""
    model, device = find_model("opt-13b"), find_device("a100-40g")
    token_bytes = model.kv_layout.token_bytes
    num_bytes = _MICRO_TOKENS * token_bytes
    recompute_s = StepModel(model, device).prefill_seconds(0, _MICRO_TOKENS)
    # Separate copies for K and V of each layer, as in the paper's system, or one for a block.
    pieces = {"per layer": 2 * len(model.kv_layout.layers), "whole": 1}

    def copy_s(size: int, num_pieces: int) -> float:
        num_copies = -(-_MICRO_TOKENS // size) * num_pieces
        return num_bytes / device.link_bandwidth + num_copies * COPY_FIXED_S

    one_copy_s = num_bytes / device.link_bandwidth + COPY_FIXED_S
    micro = [
        {
            "block_size": size,
            "recompute_s": recompute_s,
            **{f"swap_{name}_s": copy_s(size, count) for name, count in pieces.items()},
            "swap_virtual_s": one_copy_s,
        }
        for size in BLOCK_SIZES
    ]
    # A rate above capacity, so that requests are preempted repeatedly.
    base = Job("sharegpt-like", "paged", None, _NUM_REQUESTS)
    rate = round(1.25 * _capacity(replays, "19", base), 2)
    jobs = []
    for size in _SWAP_BLOCK_SIZES:
        sized = replace(base, rate=rate, block_size=size)
        jobs.append(replace(sized, preemption_mode="recompute"))
        for count in pieces.values():
            bandwidth = num_bytes / copy_s(size, count)
            jobs.append(replace(sized, preemption_mode="swap", link_bandwidth=bandwidth))
    for mode in ("recompute", "swap"):
        bandwidth = num_bytes / one_copy_s
        virtual = replace(base, manager="virtual", rate=rate, link_bandwidth=bandwidth)
        jobs.append(replace(virtual, preemption_mode="swap" if mode == "swap" else "recompute"))
    runs = replays.run("19", jobs)
    series = ["recompute", *(f"swap, {name}" for name in pieces)] * len(_SWAP_BLOCK_SIZES)
    for run, name in zip(runs, [*series, "recompute", "swap, one copy"], strict=True):
        run["series"] = name
    return {
        "figure": "19",
        "tokens": _MICRO_TOKENS,
        "copy_fixed_s": COPY_FIXED_S,
        "link_bandwidth": device.link_bandwidth,
        "one_sequence": micro,
        "rate": rate,
        "runs": runs,
    }


def prefixes(replays: Replays) -> Figures:
    """Hit rate on Mooncake's synthetic trace, by the memory for KV."""
    base = Job(
        "mooncake",
        "virtual",
        None,
        _MOONCAKE_REQUESTS,
        model="llama-3-8b",
        device="h200",
        page_bytes=_MOONCAKE_PAGE_BYTES,
        prefix_caching=True,
        max_model_len=131072,
    )
    weights = find_model("llama-3-8b").weight_bytes

    def runs(workload: str, kv_gb: Sequence[int]) -> list[Figures]:
        jobs = [
            replace(base, workload=workload, memory_bytes=weights + size * 10**9) for size in kv_gb
        ]
        return replays.run(workload, jobs)

    return {
        "figure": "prefixes",
        "series": [
            {"workload": workload, "kv_gb": kv_gb, "runs": runs(workload, kv_gb)}
            for workload, kv_gb in (
                # 120 GB is about an H200's memory without the weights; 10 TB hold everything.
                ("mooncake", (120, 10000)),
                ("mooncake-slow", (60, 120, 250, 500, 10000)),
            )
        ],
    }


_MOONCAKE_REQUESTS = 4000
_MOONCAKE_PAGE_BYTES = 64 << 20  # 512 tokens, as many as the trace's blocks


def _curves(
    replays: Replays, what: str, jobs: Mapping[str, Job], saturated: Mapping[str, Figures]
) -> Figures:
    """Run each job at fractions of its capacity, and find the rate at which it is slow.

    That is the rate at which the normalized latency is `_LIMIT` times that of an unloaded device.
    The curves are of replays so long that it has converged.
    """
    first = _at(jobs["virtual"], saturated["virtual"], _FRACTIONS[0])
    unloaded_s = replays.run(what, [first])[0]["normalized_latency"]
    bound_s = _LIMIT * unloaded_s
    cases = [
        Case(
            [_at(job, saturated[name], fraction) for fraction in _FRACTIONS],
            lambda curve: sustained_rate(curve, bound_s),
        )
        for name, job in jobs.items()
    ]
    found = dict(zip(jobs, replays.converge(what, cases), strict=True))
    return {
        "capacities": {name: figures["capacity"] for name, figures in saturated.items()},
        "unloaded_latency": unloaded_s,
        "bound_s": bound_s,
        "sustained": {name: finite(result.values[-1]) for name, result in found.items()},
        "convergence": {name: result.record() for name, result in found.items()},
        "curves": {name: result.runs for name, result in found.items()},
    }


def _few(
    replays: Replays,
    what: str,
    jobs: Mapping[str, Job],
    fractions: Sequence[float] = _FEW_FRACTIONS,
) -> Figures:
    """Find each job's capacity, and run it at a few fractions of that, with a fixed length."""
    queued = {name: replace(job, num_requests=_NUM_REQUESTS) for name, job in jobs.items()}
    saturated = replays.saturated(what, queued)
    rated = [
        _at(job, saturated[name], fraction) for name, job in jobs.items() for fraction in fractions
    ]
    runs = replays.run(what, rated)
    count = len(fractions)
    return {
        "capacities": {name: figures["capacity"] for name, figures in saturated.items()},
        "convergence": {name: figures["convergence"] for name, figures in saturated.items()},
        "curves": {name: runs[count * i : count * (i + 1)] for i, name in enumerate(jobs)},
    }


def _at(job: Job, saturated: Figures, fraction: float) -> Job:
    """Return the job at a fraction of its capacity."""
    return replace(job, rate=float(f"{fraction * saturated['capacity']:.3g}"))


def _capacity(replays: Replays, what: str, job: Job) -> float:
    return float(replays.saturated(what, {job.manager: job})[job.manager]["capacity"])


def all_figures(kernels: Path) -> dict[str, Callable[[Replays], dict[str, Any]]]:
    """Return the function of each figure, by the name of its files."""
    return {
        "figure_12": figure_12,
        "figure_13": figure_13,
        "figure_2": figure_2,
        "token_budgets": token_budgets,
        "hour": hour,
        "figure_14": figure_14,
        "figure_15": figure_15,
        "figure_16": figure_16,
        "figure_17": figure_17,
        "figure_18": lambda replays: figure_18(replays, kernels),
        "figure_19": figure_19,
        "prefix_mooncake": prefixes,
    }
