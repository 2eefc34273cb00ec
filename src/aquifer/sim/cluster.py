"""Replay on a cluster of workers, each a device with its own pool. Requests are placed on arrival.

Workers may differ, and may fail: one that fails loses its memory, and the requests that were there.
Those that had got no token are placed again when the failure is noticed; others have failed. The
same worker may come back, with nothing in its memory.

What the placement knows of a worker is what it reports: with each request that is placed there, and
else every `report_s` seconds, as the heartbeats of a real cluster. A worker is seen as it is at the
end of the step that runs when it reports. Between reports nothing stops a worker, so that many of
its steps can be done at once (`aquifer.sim.fast_forward`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from aquifer.engine.policies.placement import (
    ModelReport,
    Placement,
    PlacementSnapshot,
    affinity,
)
from aquifer.errors import ConfigError
from aquifer.sim.config import ReplayConfig
from aquifer.sim.results import LoadRecord, ReplayResult, RequestRecord
from aquifer.sim.trace import PromptMaker, TraceRequest
from aquifer.sim.worker import NOT_ABLE, Worker, reports_of_unopened


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a worker.

    Args:
        worker: its index.
        at_s: when it fails, since the start of the trace.
        back_s: when it is back, with nothing in its memory; None for never.

    Raises:
        ConfigError: a time is negative, or it is back before it fails.
    """

    worker: int
    at_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ConfigError(f"worker {self.worker} fails at {self.at_s} s; give a time from 0 on")
        if self.back_s is not None and not self.at_s < self.back_s < math.inf:
            raise ConfigError(
                f"worker {self.worker} fails at {self.at_s} s and is back at {self.back_s} s; "
                "it must be back later than it fails"
            )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Configuration of a replay on a cluster.

    Args:
        workers: configuration of each; weights must come and go (`loading`), and all have the same
            models. A model may be too large for some workers.
        placement: chooses the worker of each request.
        failures: failures of workers.
        notice_s: seconds until a failure is noticed. Until then requests are placed there too.
        report_s: seconds between reports of a worker that no request is placed on; 0 for a report
            before each placement.

    Raises:
        ConfigError: an option is invalid.
    """

    workers: tuple[ReplayConfig, ...]
    placement: Placement = affinity
    failures: tuple[Failure, ...] = ()
    notice_s: float = 1.0
    report_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("a cluster needs at least one worker")
        for config in self.workers:
            if config.loading is None:
                raise ConfigError(
                    "requests are placed by the weights that devices have; give a loading"
                )
            if config.models != self.workers[0].models:
                raise ConfigError("all workers of a cluster must have the same models")
        if not (0 <= self.notice_s < math.inf and 0 <= self.report_s < math.inf):
            raise ConfigError("notice_s and report_s must be 0 or more seconds")
        until_s: dict[int, float] = {}
        for failure in sorted(self.failures, key=lambda failure: failure.at_s):
            number = failure.worker
            if not 0 <= number < len(self.workers):
                raise ConfigError(
                    f"worker {number} is to fail; the workers are 0 to {len(self.workers) - 1}"
                )
            if failure.at_s <= until_s.get(number, -math.inf):
                raise ConfigError(f"worker {number} fails at {failure.at_s} s before it is back")
            until_s[number] = math.inf if failure.back_s is None else failure.back_s

    @property
    def manager(self) -> str:
        """The cache manager of the workers."""
        return self.workers[0].manager


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Result of a replay on a cluster.

    Attributes:
        records: one per request, in order of arrival. That of one that was placed several times is
            of the last time, but for its arrival.
        devices: the result of each life of each worker: the workers in order, then those that came
            back, in order of time.
        placed: index of the worker of each request, the last one; None if it was never placed.
        num_workers: number of workers; as many results come first in `devices`.
        failed: why requests failed, by number.
    """

    records: list[RequestRecord]
    devices: list[ReplayResult]
    placed: list[int | None]
    num_workers: int
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def loads(self) -> list[LoadRecord]:
        """Loads on all devices, in order of time."""
        loads = [load for result in self.devices for load in result.loads]
        return sorted(loads, key=lambda load: load.begun_s)

    @property
    def total(self) -> ReplayResult:
        """The figures of all devices together. Averages are means over their busy time, or over the
        part of it in which requests were waiting."""

        def mean(
            of: Callable[[ReplayResult], dict[str, float]],
            seconds: Callable[[ReplayResult], float],
        ) -> dict[str, float]:
            weights = [*map(seconds, self.devices)]
            if not sum(weights):
                return of(self.devices[0])
            return {
                name: float(np.average([of(each)[name] for each in self.devices], weights=weights))
                for name in of(self.devices[0])
            }

        def total(of: Callable[[ReplayResult], float]) -> int:
            return int(sum(map(of, self.devices)))

        return ReplayResult(
            self.records,
            duration_s=max(result.duration_s for result in self.devices),
            busy_s=sum(result.busy_s for result in self.devices),
            waiting_s=sum(result.waiting_s for result in self.devices),
            num_steps=total(lambda result: result.num_steps),
            num_preemptions=total(lambda result: result.num_preemptions),
            queried_tokens=total(lambda result: result.queried_tokens),
            hit_tokens=total(lambda result: result.hit_tokens),
            held_bytes=total(lambda result: result.held_bytes),
            checkpoint_bytes=total(lambda result: result.checkpoint_bytes),
            kv_budget_bytes=sum(each.kv_budget_bytes for each in self.devices[: self.num_workers]),
            averages=mean(lambda result: result.averages, lambda result: result.busy_s),
            averages_waiting=mean(
                lambda result: result.averages_waiting, lambda result: result.waiting_s
            ),
            loads=self.loads,
            failed=self.failed,
        )


def replay_cluster(
    config: ClusterConfig,
    requests: Sequence[TraceRequest],
    on_progress: Callable[[int], None] = lambda num_placed: None,
) -> ClusterResult:
    """Replay a trace on a cluster.

    Args:
        config: the cluster.
        requests: in order of arrival, each with its time.
        on_progress: called from time to time with the number of requests that were placed.

    Raises:
        ConfigError: no worker can run a model, or a request has no time or names an unknown model.
    """
    first = next(iter(config.workers[0].models))
    named = [
        replace(request, model=first) if request.model is None else request for request in requests
    ]
    with ExitStack() as resources:
        cluster = _Cluster(config, named, resources)
        cluster.run(on_progress)
        return cluster.result()


class _Kind(IntEnum):
    """What happens to a worker that fails, in this order."""

    FAILS = 0
    IS_NOTICED = 1
    IS_BACK = 2


class _Event(NamedTuple):
    """Something that happens to a worker."""

    at_s: float
    worker: int
    kind: _Kind


class _Cluster:
    """State of a replay on a cluster.

    Args:
        config: the cluster.
        requests: the requests.
        resources: the stack that closes all workers.
    """

    def __init__(
        self, config: ClusterConfig, requests: Sequence[TraceRequest], resources: ExitStack
    ) -> None:
        self._config = config
        self._requests = requests
        self._resources = resources
        # Each failure may run all requests again, with new tokens.
        self._prompts = PromptMaker([*requests] * (1 + len(config.failures)))
        self._kinds: dict[int, tuple[ReplayConfig, dict[str, ModelReport]]] = {}
        self._workers: list[Worker | None] = [self._start(each) for each in config.workers]
        self._lives = [worker for worker in self._workers if worker is not None]
        self._where: list[tuple[int, Worker] | None] = [None] * len(requests)
        self._waiting: list[int] = []  # requests that no worker could take
        self._failed: dict[int, str] = {}
        self._num_placed = 0
        self._events = sorted(_events(config), reverse=True)  # the next one is the last

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Replay all requests."""
        for number, request in enumerate(self._requests):
            if request.model not in self._config.workers[0].models:
                raise ConfigError(f"the trace asks for a model {request.model!r}")
            if request.arrival_s is None:
                raise ConfigError("the trace has no times; give a --rate of arrivals")
            self._pass_events(request.arrival_s)
            self._place(number, request.arrival_s)
            on_progress(number + 1)
        self._pass_events(math.inf)
        for number in self._waiting:
            self._failed[number] = "no worker was left that could run it"
        for worker in self._workers:
            if worker is not None:
                worker.replay.run()

    def result(self) -> ClusterResult:
        """The result, when all requests have ended."""
        by_life = {id(life): life.replay.finish() for life in self._lives}
        indices = {
            id(life): {number: index for index, number in enumerate(life.numbers)}
            for life in self._lives
        }
        records: list[RequestRecord] = []
        for number, (request, where) in enumerate(zip(self._requests, self._where, strict=True)):
            assert request.model is not None
            assert request.arrival_s is not None
            record = RequestRecord(
                request.model, request.arrival_s, request.prompt_tokens, request.output_tokens
            )
            if where is not None and number not in self._failed:
                life = id(where[1])
                record = replace(
                    by_life[life].records[indices[life][number]], arrival_s=request.arrival_s
                )
            records.append(record)
        return ClusterResult(
            records,
            list(by_life.values()),
            [None if where is None else where[0] for where in self._where],
            len(self._config.workers),
            self._failed,
        )

    def _start(self, config: ReplayConfig) -> Worker:
        """Start a worker with nothing in its memory."""
        if id(config) not in self._kinds:
            unopened = reports_of_unopened(config)
            models = {name: config.models[name] for name in unopened}
            self._kinds[id(config)] = replace(config, models=models), unopened
        fitting, unopened = self._kinds[id(config)]
        report_s = self._config.report_s
        return Worker(fitting, unopened, self._prompts, self._resources, report_s)

    def _pass_events(self, until_s: float) -> None:
        """Let all happen to the workers that does until a time, which is included."""
        while self._events and self._events[-1].at_s <= until_s:
            at_s, index, kind = self._events.pop()
            worker = self._workers[index]
            if kind is _Kind.FAILS:
                assert worker is not None
                worker.end(at_s)
            elif kind is _Kind.IS_NOTICED:
                assert worker is not None
                self._workers[index] = None
                self._place_again(worker, index, at_s)
            else:
                worker = self._workers[index] = self._start(self._config.workers[index])
                self._lives.append(worker)
                waiting, self._waiting = self._waiting, []
                for number in waiting:
                    self._place(number, at_s)

    def _place_again(self, worker: Worker, index: int, now_s: float) -> None:
        """Place the requests of a worker that has ended, but for those that had got a token."""
        for number, has_tokens in sorted(worker.unfinished().items()):
            if has_tokens:
                self._failed[number] = f"worker {index} failed while it streamed"
            else:
                self._place(number, now_s)

    def _place(self, number: int, now_s: float) -> None:
        """Place a request, or let it wait if no worker can take it but one may be back."""
        request = replace(self._requests[number], arrival_s=now_s)
        states = [
            NOT_ABLE if worker is None else worker.state(request, now_s) for worker in self._workers
        ]
        index = self._config.placement(PlacementSnapshot(states, self._num_placed))
        worker = None if index is None else self._workers[index]
        if index is None or worker is None:
            if all(worker is not None for worker in self._workers):
                raise ConfigError(f"no device has room for {request.model}")
            self._waiting.append(number)
            return
        self._num_placed += 1
        self._where[number] = (index, worker)
        worker.add(number, request)


def _events(config: ClusterConfig) -> list[_Event]:
    """All that happens to workers."""
    events: list[_Event] = []
    for failure in config.failures:
        noticed_s = failure.at_s + config.notice_s
        events.append(_Event(failure.at_s, failure.worker, _Kind.FAILS))
        if failure.back_s is not None:
            noticed_s = min(noticed_s, failure.back_s)  # it tells that it is new
            events.append(_Event(failure.back_s, failure.worker, _Kind.IS_BACK))
        events.append(_Event(noticed_s, failure.worker, _Kind.IS_NOTICED))
    return events
