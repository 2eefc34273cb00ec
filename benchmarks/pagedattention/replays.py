"""Replay jobs: each distinct job runs once, in one of several processes, and its result is kept."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.pagedattention.workloads import load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aquifer.engine.policies import RestoreMode
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import find_device, find_model
from aquifer.sim.driver import PAGE_BYTES
from aquifer.sim.replay import replay
from aquifer.sim.results import ReplayResult
from aquifer.sim.trace import TraceRequest, poisson_arrivals

ARRIVAL_SEED = 0

SATURATED = 1e6
"""A rate at which all requests arrive at the start, requests/s."""

_PARTS = ("written", "future", "internal", "external", "retained", "free", "shared")


@dataclass(frozen=True, slots=True)
class Job:
    """One replay.

    Args:
        workload: one of `WORKLOADS`.
        manager: name of the cache manager.
        rate: Poisson arrivals, requests per second; None for the trace's own times.
        num_requests: number of requests, from the first.
        model: name of the model.
        device: name of the device.
        block_size: tokens of a block.
        page_bytes: page size; None for the manager's default, see `config`.
        max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks.
        max_num_seqs: maximum number of running sequences; large enough that memory is the limit.
        num_samples: completions of each prompt.
        beam_width: number of beams, 0 for sampling.
        prefix_caching: retain KV for later requests.
        preemption_mode: swap or recompute.
        link_bandwidth: bandwidth to the host, bytes per second; None for the device's.
        memory_bytes: the pool's budget; None for nine tenths of the device.
        max_model_len: the longest context; None for the model's own.
    """

    workload: str
    manager: str
    rate: float | None
    num_requests: int
    model: str = "opt-13b"
    device: str = "a100-40g"
    block_size: int = 16
    page_bytes: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    num_samples: int = 1
    beam_width: int = 0
    prefix_caching: bool = False
    preemption_mode: RestoreMode = "auto"
    link_bandwidth: float | None = None
    memory_bytes: int | None = None
    max_model_len: int | None = None

    def config(self) -> ReplayConfig:
        """Return the configuration of the replay.

        `virtual` has the device's page size. For all others a page is as large as a block, so that
        pages add no waste: the paper's systems have no pages.
        """
        model = find_model(self.model)
        if self.max_model_len is not None:
            model = replace(model, max_tokens=self.max_model_len)
        device = find_device(self.device)
        if self.link_bandwidth is not None:
            device = replace(device, link_bandwidth=self.link_bandwidth)
        page_bytes = self.page_bytes
        if page_bytes is None:
            is_virtual = self.manager == "virtual"
            block_bytes = self.block_size * model.kv_layout.token_bytes
            page_bytes = PAGE_BYTES if is_virtual else block_bytes
        return ReplayConfig(
            models={self.model: model},
            device=device,
            manager=self.manager,
            memory_bytes=self.memory_bytes,
            page_bytes=page_bytes,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            num_samples=self.num_samples,
            beam_width=self.beam_width,
            prefix_caching=self.prefix_caching,
            preemption_mode=self.preemption_mode,
            swap_space_bytes=64 << 30,
        )


Figures = dict[str, Any]


class Replays:
    """Runner of jobs in separate processes, with a cache of results. A context manager.

    Args:
        data: the folder of the traces.
        num_processes: number of processes.
    """

    def __init__(self, data: Path, num_processes: int) -> None:
        self._data = data
        self._num_processes = num_processes
        self._results: dict[Job, Figures] = {}
        self._pool: Pool | None = None

    def __enter__(self) -> Replays:
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(self._num_processes, _start, (self._data,))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._pool is not None
        self._pool.terminate()
        self._pool.join()

    def run(self, what: str, jobs: Iterable[Job]) -> list[Figures]:
        """Return the figures of each job, in order; run missing ones with a progress bar."""
        assert self._pool is not None
        jobs = list(jobs)
        missing = [job for job in dict.fromkeys(jobs) if job not in self._results]
        if missing:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=Console(stderr=True)) as progress:
                task = progress.add_task(what, total=len(missing))
                for job, figures in self._pool.imap_unordered(_execute, missing):
                    self._results[job] = figures
                    progress.advance(task)
        return [self._results[job] for job in jobs]

    def capacities(self, what: str, jobs: Iterable[Job]) -> list[float]:
        """Return each job's throughput with all requests waiting, in requests per second."""
        saturated = [replace(job, rate=SATURATED) for job in jobs]
        return [float(figures["capacity"]) for figures in self.run(what, saturated)]


_data = Path()  # data folder, in a process that runs jobs


def _start(data: Path) -> None:
    global _data
    _data = data


@cache
def _workload(name: str) -> list[TraceRequest]:
    return load(name, _data)


def _execute(job: Job) -> tuple[Job, Figures]:
    """Run a job, in a process initialised by `_start`."""
    requests = _workload(job.workload)
    if job.rate is None:
        requests = requests[: job.num_requests]
    else:
        requests = poisson_arrivals(requests, job.rate, job.num_requests, ARRIVAL_SEED)
    config = job.config()
    result = replay(config, requests)
    figures = {**asdict(job), "page_bytes": config.page_bytes, "arrival_seed": ARRIVAL_SEED}
    figures |= _figures(result)
    if job.rate == SATURATED:
        figures["rate"] = None
        figures["capacity"] = _capacity(result)
    if job.prefix_caching:
        figures["hit_rate"] = result.hit_tokens / max(result.queried_tokens, 1)
    if job.workload.startswith("mooncake"):
        block_tokens = config.page_bytes // config.models[job.model].kv_layout.token_bytes
        figures["unbounded_hit_rate"] = _unbounded_hit_rate(requests, result, block_tokens)
    return job, figures


def _figures(result: ReplayResult) -> Figures:
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


def _capacity(result: ReplayResult) -> float:
    """Return the throughput while there is a queue, in requests per second.

    It is measured in output tokens until the last request leaves the queue. Requests still running
    then count with their outputs so far, so a short replay gives nearly the result of a long one.
    If nearly all requests fit at once, the time is until half of them have ended, which gives
    less than a longer queue would.
    """
    served = [record for record in result.records if record.finished_s is not None]
    finished_s = [record.finished_s or 0.0 for record in served]
    empty_s = max(record.scheduled_s or 0.0 for record in served)
    end_s = max(empty_s, float(np.median(finished_s)))
    outputs = 0.0
    for record in served:
        assert record.first_token_s is not None
        assert record.finished_s is not None
        span_s = max(record.finished_s - record.first_token_s, 1e-9)
        part = min(max((end_s - record.first_token_s) / span_s, 0.0), 1.0)
        outputs += part * record.output_tokens
    return outputs / end_s / float(np.mean([record.output_tokens for record in served]))


def _unbounded_hit_rate(
    requests: list[TraceRequest], result: ReplayResult, block_tokens: int
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
                seen[key] = max(seen.get(key, 0), min(end * 512, full))
            continue
        num_found = max((seen[key] for key in keys if key in seen), default=0)
        num_found = min(num_found, request.prompt_tokens - 1)
        num_hits += num_found - num_found % block_tokens
        num_tokens += request.prompt_tokens
    return num_hits / num_tokens
