"""Replay jobs: each distinct job runs once, in one of several processes, and its result is kept.

Where a figure depends on the length of the replay, a convergence test chooses the length: it is
doubled until that changes the figure by less than 2 % (`Replays.converge`). The result has every
length that was tried.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing.pool import Pool
from pathlib import Path

from benchmarks.pagedattention.measures import Figures, capacity, figures_of, unbounded_hit_rate
from benchmarks.pagedattention.workloads import load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aquifer.engine.policies import RestoreMode
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import find_device, find_model
from aquifer.sim.driver import PAGE_BYTES
from aquifer.sim.replay import replay
from aquifer.sim.trace import TraceRequest, poisson_arrivals

ARRIVAL_SEED = 0

SATURATED = 1e6
"""A rate at which all requests arrive at the start, requests/s."""

CONVERGED = 0.02
"""Relative change by a doubling of the length below which a figure counts as independent of it."""

MOST_DOUBLINGS = 5

MOST_BEAM_DOUBLINGS = 1
"""The same for beam search, of which each step is replayed: 1600 requests of four beams take
minutes, and 3200 a quarter of an hour."""


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


@dataclass(frozen=True, slots=True)
class Case:
    """A figure, and the replays that it follows from.

    Args:
        jobs: the replays, with the first number of requests to try.
        value: returns the figure, given the figures of all replays; None if there is none.
    """

    jobs: Sequence[Job]
    value: Callable[[Sequence[Figures]], float | None]

    @property
    def most_doublings(self) -> int:
        """How often the length may be doubled."""
        has_beams = any(job.beam_width for job in self.jobs)
        return MOST_BEAM_DOUBLINGS if has_beams else MOST_DOUBLINGS


@dataclass(slots=True)
class Converged:
    """The longest replays of a case, and how they were chosen.

    Attributes:
        runs: figures of each of its jobs.
        lengths: numbers of requests that were tried.
        values: the case's figure with each of them.
    """

    runs: list[Figures] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    @property
    def change(self) -> float:
        """Relative change of the figure by the last doubling; infinite if it cannot be told."""
        if len(self.values) < 2:
            return math.inf
        before, after = self.values[-2:]
        if before == after:  # there may be none, or no limit
            return 0.0
        if before is None or after is None or not math.isfinite(before * after):
            return math.inf
        return abs(after - before) / abs(after)

    def record(self) -> Figures:
        """Return the convergence test for the result's file."""
        return {
            "num_requests": self.lengths,
            "values": list(map(finite, self.values)),
            "change": finite(self.change),
            "is_converged": self.change < CONVERGED,
        }


class Replays:
    """Runner of jobs in separate processes, with a cache of results. A context manager.

    Args:
        data: the folder of the traces.
        num_processes: number of processes.
        kept: file to which the result of each job is added, and from which those of an earlier run
            of the same code are read; None to keep none.
    """

    def __init__(self, data: Path, num_processes: int, kept: Path | None = None) -> None:
        self._data = data
        self._num_processes = num_processes
        self._kept = kept
        self._results: dict[Job, Figures] = {}
        if kept is not None and kept.exists():
            for line in kept.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._results[Job(**entry["job"])] = entry["figures"]
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
        jobs = list(jobs)
        missing = [job for job in dict.fromkeys(jobs) if job not in self._results]
        if missing:
            assert self._pool is not None
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=Console(stderr=True)) as progress:
                task = progress.add_task(what, total=len(missing))
                for job, figures in self._pool.imap_unordered(_execute, missing):
                    self.keep(job, figures)
                    progress.advance(task)
        return [self._results[job] for job in jobs]

    def keep(self, job: Job, figures: Figures) -> None:
        """Store the result of a job."""
        self._results[job] = figures
        if self._kept is not None:
            with self._kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": asdict(job), "figures": figures}) + "\n")

    def converge(self, what: str, cases: Iterable[Case]) -> list[Converged]:
        """Double the lengths of each case's replays until its figure has converged.

        Or until they have been doubled as often as they may be; the record of the result says so.
        """
        cases = list(cases)
        results = [Converged() for _ in cases]
        pending = list(zip(cases, results, strict=True))
        for doubling in range(MOST_DOUBLINGS + 1):
            factor = 2**doubling
            jobs = [
                [replace(job, num_requests=factor * job.num_requests) for job in case.jobs]
                for case, _ in pending
            ]
            self.run(what, [job for group in jobs for job in group])
            for group, (case, result) in zip(jobs, pending, strict=True):
                result.runs = self.run(what, group)
                result.lengths.append(group[0].num_requests)
                result.values.append(case.value(result.runs))
            pending = [
                (case, result)
                for case, result in pending
                if result.change >= CONVERGED and doubling < case.most_doublings
            ]
            if not pending:
                break
        return results

    def saturated(self, what: str, jobs: Mapping[str, Job]) -> dict[str, Figures]:
        """Return the figures of each job with all requests waiting from the start.

        They are of a replay so long that `capacity`, in requests per second, has converged;
        `convergence` has the test.
        """
        results = self.converge(
            f"{what}: with a queue",
            [Case([replace(job, rate=SATURATED)], _capacity) for job in jobs.values()],
        )
        return {
            name: {**result.runs[0], "convergence": result.record()}
            for name, result in zip(jobs, results, strict=True)
        }


def finite(value: float | None) -> float | str | None:
    """Return a figure as JSON can hold it."""
    return "not reached" if value is not None and not math.isfinite(value) else value


def _capacity(runs: Sequence[Figures]) -> float:
    found = runs[0]["capacity"]
    return math.nan if found is None else float(found)


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
    figures |= figures_of(result)
    if job.rate == SATURATED:
        figures["rate"] = None
        throughput = capacity(result)
        figures["capacity"] = None if math.isnan(throughput) else throughput
    if job.prefix_caching:
        figures["hit_rate"] = result.hit_tokens / max(result.queried_tokens, 1)
    if job.workload.startswith("mooncake"):
        block_tokens = config.page_bytes // config.models[job.model].kv_layout.token_bytes
        figures["unbounded_hit_rate"] = unbounded_hit_rate(requests, result, block_tokens)
    return job, figures
