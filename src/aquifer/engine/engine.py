"""The engine: one pool, the models that share it, and the loop that serves their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

import numpy as np

from aquifer.config import EngineConfig
from aquifer.engine import checks
from aquifer.engine.device_reports import DeviceReporter
from aquifer.engine.lane import Lane
from aquifer.engine.lane_lengths import learn
from aquifer.engine.late_compilations import LateCompilations
from aquifer.engine.leader import Leader, start_ranks
from aquifer.engine.model_control import ModelControl
from aquifer.engine.model_files import read_model
from aquifer.engine.model_host import ModelHost
from aquifer.engine.model_set import OnProgress
from aquifer.engine.new_prompts import NewPrompts
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.parts import EngineParts
from aquifer.engine.pipeline import Pipeline, require_device
from aquifer.engine.policies import Policies
from aquifer.engine.policies.placement import DeviceReport
from aquifer.engine.reporting import engine_stats, memory_report
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport
from aquifer.engine.sequence import SequenceGroup
from aquifer.errors import GroupError, RequestError, errors_of_model
from aquifer.memory.driver.base import Driver
from aquifer.memory.pool import PagePool
from aquifer.models import Planner, plan_model
from aquifer.parallel.ranks import Ranks
from aquifer.predict.ended import EndedOutput

_LOOK_S = 1.0
"""How often an engine without work looks whether its ranks are there."""


def _ignore(_: LoadProgress) -> None:
    """Ignore progress."""


def _ignore_launch(_: str, __: int) -> None:
    """Ignore that a step is launched."""


def _ignore_wait() -> None:
    """Ignore that the device is waited for."""


class Engine(ModelControl):
    """Serves models from one pool. Made by `Engine.open`.

    It is not thread-safe; one loop calls all methods.

    Attributes:
        config: its options.
        limits: the limits of a step.
        pool: its memory.
        num_ahead: steps that may be in flight while the next one is planned.
        on_launch: called with the model of each step, and its number of tokens, before it is
            launched.
        on_wait: called before a step waits for the device, which works.
        meter: keeps the figure of the process's memory outside of pages.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts, planner: Planner) -> None:
        super().__init__(config, parts, planner)
        assembly = parts.assembly
        self.limits = parts.limits
        self.pool: PagePool = assembly.pool
        # On a synchronous device, running ahead would only compute sequences that have ended.
        self.num_ahead = 1 if assembly.pool.driver.runs_ahead else 0
        self.on_launch: Callable[[str, int], None] = _ignore_launch
        self.on_wait: Callable[[], None] = _ignore_wait
        self.meter = parts.meter
        self._stocker = parts.stocker
        self._resources = parts.resources
        self._requests: dict[str, tuple[ModelHost, SequenceGroup]] = {}
        self._own_requests: set[str] = set()  # the engine's own requests: outputs are dropped
        self._reporter = DeviceReporter(self._models, assembly.room)
        self._leader = parts.leader
        self._steps = Pipeline(assembly.scheduler, self._require_devices)
        self._new = NewPrompts()
        self._undelivered: list[TokenOutput] = []  # outputs that the next step returns
        self._late = LateCompilations()
        # As the seeds of requests, it may be negative.
        self._seeds = np.random.default_rng(None if config.seed is None else config.seed % 2**64)

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        on_progress: OnProgress = _ignore,
        driver: Driver | None = None,
        planner: Planner = plan_model,
        policies: Policies | None = None,
        ranks: Ranks | None = None,
    ) -> Engine:
        """Open an engine and load the models of its configuration, of which there may be none.

        Args:
            config: models and options.
            on_progress: called for each stretch of weights that was read.
            driver: used in place of the device's own.
            planner: finds the implementation of a checkpoint.
            policies: the decisions; None for the default ones.
            ranks: a group that was started, to use in place of one that the engine starts and ends;
                it serves one engine after the other.

        Raises:
            ConfigError: a checkpoint cannot be used, or the memory does not suffice.
            DriverError: the device refused memory.
            GroupError: a rank of a tensor-parallel group could not start.
        """
        with ExitStack() as undo:
            leader = None
            if config.tensor_parallel_size > 1:
                group = ranks or start_ranks(config.device, config.tensor_parallel_size)
                leader = Leader(group, planner, is_owner=ranks is None)
                planner = leader.planner
                undo.callback(leader.close)
            models = []
            for spec in config.models:
                with errors_of_model(spec.name):
                    models.append((spec, read_model(spec, planner, config)))
            undo.pop_all()
            parameters = [plan.parameters for _, (_, plan) in models]
            parts = EngineParts.open(config, parameters, driver, policies, leader)
        engine = cls(config, parts, planner)
        try:
            engine._load_first(models, on_progress)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The sequences of each model, with their cache; for measurements and tests."""
        return self._scheduler.lanes

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, steps are in flight, outputs are to be returned, or a model
        is to be loaded or unloaded."""
        return (
            self._scheduler.has_work
            or bool(self._steps or self._undelivered)
            or self._models.has_work
            or (self._leader is not None and self._leader.is_lost)
        )

    @property
    def should_step(self) -> bool:
        """Whether a step should be launched before more requests are added."""
        return self._new.are_enough(self._scheduler.budget, lambda: self._steps.are_done)

    @property
    def idle_s(self) -> float | None:
        """See `ModelControl.idle_s`; with ranks, it looks now and then whether they are there."""
        idle_s = super().idle_s
        if self._leader is None:
            return idle_s
        return _LOOK_S if idle_s is None else min(idle_s, _LOOK_S)

    # --- requests ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request. Its model need not be loaded; the request waits until it is.

        Raises:
            UnknownModelError: no such model, or loading it has failed.
            QueueFullError: too many requests are waiting.
            ContextLengthError: it is longer than the model's context.
            CapacityError: it needs more memory than KV can ever have.
            RequestError: a token id is outside of the vocabulary, or the prompt is empty.
        """
        host = self._models.find(request.model)
        host.check_not_failed()
        if request.request_id in self._requests:
            raise RequestError(f"a request {request.request_id!r} is running already")
        checks.check_waiting(
            request,
            self._scheduler.num_waiting,
            self._scheduler.num_waiting_of(request.client),
            self.config.max_num_waiting,
            self.config.max_share_by_key,
        )
        token_ids = checks.check_token_ids(request, host.info.vocab_size)
        checks.check_sequences(request, self.limits.max_seqs)
        params = request.params
        group = SequenceGroup.of(
            request,
            self._num_arrivals,
            token_ids,
            seed=(int(self._seeds.integers(2**63)) if params.seed is None else params.seed % 2**64),
            max_total=checks.max_total(
                request,
                host.info,
                host.lane,
                self._assembly.room,
                self._models.kv_pages(host),
            ),
            stop_ids=frozenset(params.stop_token_ids or ()).union(
                () if params.ignore_eos else host.eos_ids
            ),
            eos_ids=host.eos_ids,
        )
        self._num_arrivals += 1
        self._new.add(host.lane, group, self._scheduler.budget)
        host.wanted(request.keep_alive_s)
        self._requests[request.request_id] = (host, group)
        self._scheduler.add(host.lane, group)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one completion of it; its pages are free when this returns.

        Unknown requests are ignored.
        """
        if self._undelivered:
            self._undelivered = [
                output
                for output in self._undelivered
                if output.request_id != request_id or index not in (None, output.index)
            ]
        found = self._requests.get(request_id)
        if found is None:
            return
        host, group = found
        self._use_device()  # copies of its state may be launched
        self._scheduler.abort(host.lane, group, index)
        if index is None or not group.sequences:
            del self._requests[request_id]

    def withdraw(self, model: str, most: int) -> list[str]:
        """Give up requests of a model that have never run, as if they had not come.

        Args:
            model: its name; there need be no such model.
            most: how many, at most. Those that came first are given up.

        Returns: their ids.
        """
        waiting = [
            group
            for host, group in self._requests.values()
            if host.info.name == model
            and group.scheduled_s is None
            and group.request.request_id not in self._own_requests
        ]
        waiting.sort(key=lambda group: group.arrival)
        withdrawn = [group.request.request_id for group in waiting[:most]]
        for request_id in withdrawn:
            self.abort(request_id)
        return withdrawn

    def pin_prefix(
        self, model: str, token_ids: list[int], salt: str | None = None, client: str = ""
    ) -> int:
        """Keep the KV of a prefix until `unpin_prefix`. KV that is not cached yet is computed.

        Returns: how many of its tokens are kept; only whole blocks are.

        Raises:
            UnknownModelError: no such model.
            RequestError: prefixes are not kept by this server, or the model has no KV, or this
                prefix is shorter than a block.
            CapacityError: pinned prefixes would take more than half of the memory for KV, or those
                of this client more than its share of that.
        """
        request = Request(
            f"pin-{self._num_arrivals}",
            model,
            token_ids,
            SamplingParams(max_tokens=1, ignore_eos=True),
            time.monotonic(),
            cache_salt=salt,
            client=client,
        )
        if self._pinning.check(request):
            self.add(request)
            self._own_requests.add(request.request_id)
        return self._pinning.pin(request)

    def unpin_prefix(self, model: str, token_ids: list[int], salt: str | None = None) -> None:
        """The opposite of `pin_prefix` of the same tokens; unknown prefixes are ignored."""
        self._pinning.unpin(model, token_ids, salt)

    # --- the loop ----------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Launch one step of one model; returns the outputs of the latest step that is done.

        On a device that runs ahead, that is the step before: it runs while the next one is planned,
        so that the device always has work. Requests of a step that fails end with an error; only a
        failure of the device itself, a bug or an interrupt is raised (`aquifer.engine.pipeline`).
        """
        if self._leader is not None:
            self._leader.check()
        self._use_device()
        self._models.expire()
        self._models.load_wanted(self._num_arrivals, self._preempt_all, self._end_requests)
        self._late.begin()
        self._new = NewPrompts()
        with self.pool.gate:
            plan = self._scheduler.plan()
            try:
                if plan is not None:
                    self.on_launch(plan.model, plan.spans.num_tokens)
                    host = self._models[plan.model]
                    self._steps.launch(plan, host, host.prefill_cost)
            finally:
                self._deliver_failed()
        # What the planning has left to other threads.
        if self.pool.mapper is not None:
            self.pool.mapper.begin()
        if plan is not None:
            self._stocker.wake()
        # Without another step to launch, nothing is left in flight.
        if len(self._steps) > (0 if plan is None else self.num_ahead):
            if not self._steps.are_done:
                self.on_wait()
            self._commit_first()
        self._late.end(plan)
        self.meter.update(is_idle=not self._steps)
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def stats(self) -> EngineStats:
        """Current counters. Cheap: it is called with every step."""
        usage = self.pool.usage()
        return engine_stats(
            self._scheduler.lanes,
            usage,
            self._models.fixed_bytes(usage),
            self._late.count,
        )

    def share_lengths(self) -> None:
        """From now on, learn from outputs that have ended only what `learn_lengths` says."""
        self._assembly.share_lengths()

    def take_ended(self) -> dict[str, list[EndedOutput]]:
        """The outputs that have ended since the last call, by model: where lengths are shared, and
        anything depends on them."""
        taken = {}
        for name, lane in self._scheduler.lanes.items():
            if lane.ended:
                taken[name], lane.ended = lane.ended, []
        return taken

    def learn_lengths(self, model: str, ended: Sequence[EndedOutput]) -> None:
        """Learn from outputs of a model, of this device and others, in this order. Nothing is
        learnt of a model that is not here."""
        lane = self._scheduler.lanes.get(model)
        if lane is not None:
            for each in ended:
                learn(lane, each)

    def device_report(self) -> DeviceReport:
        """What placement needs to know of the device. Cheap: it is called with every step."""
        return self._reporter.report()

    def memory(self) -> MemoryReport:
        """Breakdown of the pool's budget by owner, now."""
        capacities = {host.info.name: self._models.kv_capacity(host) for host in self._models}
        return memory_report(
            self._scheduler.lanes,
            self.pool,
            self.statuses,
            capacities,
            self._reuse,
            self._assembly.room.reclaimer.log,
        )

    def close(self) -> None:
        """End all requests and release everything."""
        self._use_device()
        for request_id in list(self._requests):
            self.abort(request_id)
        with suppress(GroupError):  # then nothing runs any more
            self._finish_steps()  # they use the memory that goes now
        self._models.close()
        self._resources.close()

    # --- parts -------------------------------------------------------------------------------

    def _end_requests(self, host: ModelHost, error: str) -> None:
        """End all requests of a model with an error, which the next `step` returns."""
        for request_id, (owner, group) in list(self._requests.items()):
            if owner is host:
                self._scheduler.abort(host.lane, group)
                del self._requests[request_id]
                self._deliver([TokenOutput(request_id, finish_reason="error", error=error)])

    def _commit_first(self) -> None:
        """Wait for the earliest step in flight, and commit it."""
        try:
            outputs = self._steps.commit_first()
            if self._leader is not None:
                self._leader.check()  # without a rank, tokens are of no use
            self._deliver(outputs)
        finally:
            self._deliver_failed()

    def _finish_steps(self) -> None:
        """Wait for all steps in flight; the next `step` returns their outputs."""
        while self._steps:
            self._commit_first()

    def _deliver_failed(self) -> None:
        """Queue the last outputs of requests that failed; raises the error of a lost device."""
        failed = self._scheduler.take_failed()
        if failed:
            self._deliver(failed)
            self._require_devices()

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        """Queue outputs to be returned, and remove requests that have ended with them."""
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self._requests:
                _, group = self._requests[output.request_id]
                if not group.sequences:
                    del self._requests[output.request_id]
        if self._own_requests:
            outputs = [output for output in outputs if not self._is_own(output)]
        self._undelivered += outputs

    def _require_devices(self) -> None:
        """Raise the error of a lost device, if one is lost."""
        if self._leader is not None:
            self._leader.check()
        require_device(self.pool.driver)

    def _is_own(self, output: TokenOutput) -> bool:
        if output.request_id not in self._own_requests:
            return False
        if output.finish_reason is not None:
            self._own_requests.remove(output.request_id)
        return True
