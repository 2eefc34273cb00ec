"""Trace replay: the engine's scheduler and cache managers with a simulated clock.

One iteration of the loop is one step of the engine: requests that have arrived are added, the
scheduler plans, the clock advances by the time that the device model predicts
(`aquifer.sim.device`), and the scheduler commits made-up tokens. All decisions are made by the real
code; time is modelled, and token values are left out. A sequence ends at the length in the trace.
Planning one step ahead is left out too: a step is planned when the one before it is done.

With `ReplayConfig.loading`, weights come and go as in the engine: the models share the pool with KV
and prefixes under the one eviction rule, and are loaded when requests wait for them
(`aquifer.sim.models`).

While the same sequences decode for many steps, most of the scheduler's work is the same at each
step, and is done at once for all of them (`aquifer.sim.fast_forward`). The outcome is the same
(`tests/sim/test_replay.py` compares them).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache

import torch

from aquifer.cache.swap import SwapSpace
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.policies import Policies
from aquifer.engine.policies.admission import static_batches
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import PagePool
from aquifer.sim.averages import Averages
from aquifer.sim.clock import Arrivals, Clock
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import StepModels, StepWork
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.fast_forward import FastForward, copied_bytes_of
from aquifer.sim.models import ReplayedModel, ReplayedModels
from aquifer.sim.occupancy import Occupancy
from aquifer.sim.outputs import OutputMaker
from aquifer.sim.results import ReplayResult, RequestRecord
from aquifer.sim.trace import PromptMaker, TraceRequest


def replay(
    config: ReplayConfig,
    requests: Sequence[TraceRequest],
    on_progress: Callable[[int], None] = lambda num_finished: None,
) -> ReplayResult:
    """Replay a trace to its end.

    Args:
        config: the configuration.
        requests: in order of arrival, each with its time.
        on_progress: called from time to time with the number of requests that have ended.

    Raises:
        ConfigError: the weights do not fit, or a request names an unknown model or has no time.
    """
    for name in dict.fromkeys(request.model for request in requests):
        if name is not None and name not in config.models:
            raise ConfigError(
                f"the trace asks for a model {name!r}; name one with --model {name}=SHAPE"
            )
    with ExitStack() as resources:
        arrivals = Arrivals()
        for request in requests:
            arrivals.add(request)
        device = DeviceReplay(config, arrivals, PromptMaker(requests), resources)
        device.run(on_progress)
        return device.finish()


class DeviceReplay:
    """State of the replay on one device.

    Args:
        config: the configuration.
        arrivals: the requests in order of arrival. More may be added between two calls of `run`.
        prompts: makes the prompts of the requests.
        resources: the stack that closes all resources opened here.

    Attributes:
        models: the models, if their weights come and go.

    Raises:
        ConfigError: the weights do not fit.
    """

    def __init__(
        self,
        config: ReplayConfig,
        arrivals: Arrivals,
        prompts: PromptMaker,
        resources: ExitStack,
    ) -> None:
        self._config = config
        self._clock = Clock()
        self._arrivals = arrivals
        self.num_ended: Counter[str] = Counter()
        self._prompts = prompts
        self._outputs = OutputMaker(config.beam_width > 0, config.seed)
        self._averages = Averages()
        self._outputs_left: dict[str, int] = {}  # unfinished completions of each request
        # Finished requests of each model's running static batch.
        self._batch_done: dict[str, list[RequestRecord]] = {}
        self._moved_bytes = self._copied_bytes = 0  # accounted for so far
        driver = ModelledDriver(config.budget_bytes, config.page_bytes)
        # Keep all idle pages, so that pages are not created again.
        budget_bytes = config.budget_bytes
        pool = PagePool(driver, budget_bytes, keep_idle_bytes=budget_bytes)
        resources.callback(pool.close)
        if config.loading is None:
            # Not in pages: there would be hundreds of thousands, and none ever moves.
            driver.held_bytes = config.weight_bytes(pool.budget_bytes)
            pool.account_overhead(driver.held_bytes)
        self._kv_budget_bytes = pool.free_bytes
        # Without physical memory, like the KV.
        space = SwapSpace(
            config.swap_space_bytes, torch.device("meta"), config.device.link_bandwidth
        )
        space.prepare()
        resources.callback(space.close)
        assembly = Assembly(
            pool,
            config.max_num_batched_tokens,
            swap_space=space,
            restore_mode=config.preemption_mode,
            clock_s=lambda: self._clock.now_s,
            policies=Policies(admission=static_batches) if config.manager == "static" else None,
            prediction_uses=config.prediction_uses,
            groups_by_bucket=config.groups_by_bucket,
        )
        self.room = assembly.room
        self._preemption = assembly.preemption
        self._scheduler = assembly.scheduler
        self._steps = StepModels(config.models, config.device)
        self.models: ReplayedModels | None = None
        if config.loading is None:
            for name in config.models:
                resources.callback(assembly.close_lane, assembly.open_lane(self._spec(name)))
        else:
            self.models = ReplayedModels(
                assembly,
                self._clock,
                config.loading,
                config.models,
                self._spec,
                resources,
                driver,
            )
        self._num_closed_preemptions = 0  # of models that were closed
        self._lanes = self._scheduler.lanes
        self._occupancy = Occupancy(config, pool, self._lanes, self._kv_budget_bytes)
        self._fast_forward = FastForward(
            self._scheduler,
            self._steps,
            self._clock,
            self._arrivals,
            self._occupancy,
            None if len(config.models) > 1 else self._is_refused,
        )
        self._result = ReplayResult([], kv_budget_bytes=self._kv_budget_bytes)

    @property
    def now_s(self) -> float:
        """The time on this device: the end of its latest step."""
        return self._clock.now_s

    def run(
        self, on_progress: Callable[[int], None] = lambda _: None, until_s: float = math.inf
    ) -> None:
        """Run the simulation until a time, or until the last request has ended.

        A step that has begun before `until_s` is run to its end.

        Args:
            on_progress: called from time to time with the number of requests that have ended.
            until_s: no step begins at this time or later.
        """
        scheduler, clock, result = self._scheduler, self._clock, self._result
        while clock.now_s < until_s:
            has_changed = self._arrive()
            num_preemptions = scheduler.num_preemptions
            plan = scheduler.plan()
            for output in scheduler.take_failed():
                self._end(output)
                has_changed = True
            if plan is None:
                if has_changed or scheduler.num_preemptions > num_preemptions:
                    continue  # a model or a request has given way, or a model is there: ask again
                next_s = self._next_s()
                clock.now_s = clock.now_s if next_s is None else min(next_s, until_s)
                if next_s is None:
                    break
                continue
            seconds = self._steps[plan.model].seconds(self._work(plan))
            self._averages.add_step(seconds, self._occupancy.values())
            if self.models is not None:
                self.models.set[plan.model].used()
            clock.now_s += seconds
            result.num_steps += 1
            num_ended = self.num_ended.total()
            has_freed = self._commit(plan) or scheduler.num_preemptions > num_preemptions
            if self.num_ended.total() > num_ended:
                on_progress(self.num_ended.total())
            if self._config.fast_forward:
                end_s = until_s if self.models is None else min(until_s, self.models.expiry_s)
                skipped = self._fast_forward.run(plan, end_s, has_freed=has_freed)
                if skipped is not None:
                    self._averages.add(skipped.seconds, skipped.values)
                    result.num_steps += len(skipped.seconds)
                    if self.models is not None:
                        # When the last of these steps began.
                        used_s = clock.now_s - float(skipped.seconds[-1])
                        self.models.set[plan.model].used_s = used_s

    def finish(self) -> ReplayResult:
        """The result, when all requests have ended.

        Raises:
            InvariantError: some have not.
        """
        result = self._result
        if self._scheduler.has_work:
            raise InvariantError("requests are left that are never planned")
        result.duration_s = self._clock.now_s
        result.busy_s = self._averages.seconds
        result.waiting_s = self._averages.waiting_seconds
        result.num_preemptions = self._num_closed_preemptions + self._scheduler.num_preemptions
        for lane in self._lanes.values():
            if lane.prefixes is not None:
                stats = lane.prefixes.stats
                result.queried_tokens += stats.queried_tokens
                result.hit_tokens += stats.hit_tokens
                result.held_bytes += stats.held_bytes
                result.checkpoint_bytes += stats.checkpoint_bytes
        result.averages, result.averages_waiting = self._averages.means()
        if self.models is not None:
            result.loads = self.models.loads
        return result

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a model is being loaded."""
        models = self.models
        is_loading = models is not None and models.filled_s is not None
        return is_loading or self._arrivals.next_s is not None or self._scheduler.has_work

    def drop_unfinished(self, now_s: float) -> dict[int, bool]:
        """Drop all requests that had not ended by a time: the device has failed then.

        Pre-condition: it ran until that time. The outcome of a step that ends later is dropped too.

        Returns: whether each had got a token, by its number among the arrivals.
        """
        dropped: dict[int, bool] = {}

        def is_past(time_s: float | None) -> bool:
            return time_s is not None and time_s <= now_s

        for number, record in enumerate(self._result.records):
            if record.finished_s is not None and record.finished_s > now_s:
                dropped[number] = is_past(record.first_token_s)
                record.scheduled_s = record.first_token_s = record.finished_s = None
        for lane in self._lanes.values():
            for group in [*lane.waiting, *lane.running]:
                self._scheduler.abort(lane, group)
                dropped[group.arrival] = is_past(group.first_token_s)
        for number in range(self._arrivals.num_taken, len(self._arrivals)):
            dropped[number] = False
        return dropped

    def _arrive(self) -> bool:
        """Add the requests that have arrived, and load models; return whether one has changed."""
        models = self.models
        if models is not None:
            models.expire(self._clock.now_s)
        for number in self._arrivals.take(self._clock.now_s):
            self._add(number, self._arrivals[number])
        if models is None:
            return False
        before = models.states
        models.set.load_wanted(self._arrivals.num_taken, self._preempt_all, self._end_requests)
        return models.states != before

    def _next_s(self) -> float | None:
        """When the next request arrives or a load ends; None if neither is to come."""
        times_s = [self._arrivals.next_s, None if self.models is None else self.models.filled_s]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _preempt_all(self, host: ReplayedModel) -> None:
        """Preempt all running requests of a model. No step is in flight here."""
        self._scheduler.preempt_all(host.lane)

    def _end_requests(self, host: ReplayedModel, error: str) -> None:
        """End all requests of a model that cannot be loaded; they count as not served."""
        for group in [*host.lane.waiting, *host.lane.running]:
            self._scheduler.abort(host.lane, group)
            request_id = group.request.request_id
            self._end(TokenOutput(request_id, finish_reason="error", error=error))

    def _add(self, number: int, request: TraceRequest) -> None:
        """Add a request that has arrived, as the engine does."""
        config = self._config
        name = request.model or next(iter(config.models))
        lane = self._open_lane(name)
        record = RequestRecord(
            name, self._arrivals.time_s(number), request.prompt_tokens, request.output_tokens
        )
        self._result.records.append(record)
        max_total = request.prompt_tokens + request.output_tokens
        if self._is_refused(lane, request):
            self.num_ended[name] += 1
            return
        prompt = self._prompts.ids(request)
        params = _params(config.num_sequences, config.beam_width > 0, request.output_tokens)
        asked = Request(str(number), name, prompt.tolist(), params, record.arrival_s)
        group = SequenceGroup.of(
            asked,
            number,
            prompt,
            seed=0,
            max_total=max_total,
            limit_total=None if config.knows_lengths else config.context(config.models[name]),
        )
        self._outputs_left[asked.request_id] = config.num_sequences
        if self.models is not None:
            self.models.set[name].wanted()
        self._scheduler.add(lane, group)

    def _is_refused(self, lane: Lane, request: TraceRequest) -> bool:
        """Whether a request is too long for its model, or too large for the memory."""
        config, name = self._config, lane.name
        kv_budget_bytes = self._kv_budget_bytes
        if self.models is not None:
            kv_budget_bytes = self.room.size(self.models.set.kv_pages(self.models.set[name]))
        max_total = request.prompt_tokens + request.output_tokens
        needed_pages = lane.cache.footprint.most(
            request.prompt_tokens, max_total, config.num_sequences
        )
        is_too_large = self.room.size(needed_pages) > kv_budget_bytes
        return max_total > config.context(config.models[name]) or is_too_large

    def _spec(self, name: str) -> LaneSpec:
        """What the lane of a model is made of."""
        config = self._config
        model = config.models[name]
        return LaneSpec(
            name,
            model.kv_layout,
            config.max_num_seqs,
            config.context(model),
            config.factory(),
            config.prefix_caching,
            self._steps[name].prefill_seconds,
            state_layout=model.state_layout,
            forecaster=config.forecaster(),
        )

    def _open_lane(self, name: str) -> Lane:
        """The lane of a model, which is opened if it is not open."""
        if self.models is not None and name not in self._lanes:
            closed = self.models.close_empty()
            self._num_closed_preemptions += sum(lane.num_preemptions for lane in closed)
            self._copied_bytes -= _copied_bytes(closed)
            self.models.open(name)
        return self._lanes[name]

    def _work(self, plan: StepInput) -> StepWork:
        """Return the work of a step: its plan, and the copies made since the last step."""
        copied_bytes = _copied_bytes(self._lanes.values())
        assert self._preemption is not None
        moved_bytes = self._preemption.moved_bytes
        spans, num_decodes = plan.spans, plan.num_decodes
        starts, counts = spans.starts[num_decodes:].tolist(), spans.counts[num_decodes:].tolist()
        chunks = list(zip(starts, counts, strict=True))
        work = StepWork(
            num_tokens=spans.num_tokens,
            num_sampled=len(plan.sampled),
            decode_kv_tokens=int(spans.starts[:num_decodes].sum()) + num_decodes,
            chunk_kv_tokens=sum(start + count for start, count in chunks),
            chunk_pairs=sum(count * start + count * (count + 1) // 2 for start, count in chunks),
            copied_bytes=copied_bytes - self._copied_bytes,
            moved_bytes=moved_bytes - self._moved_bytes,
            num_seqs=len(spans.slots),
        )
        self._copied_bytes, self._moved_bytes = copied_bytes, moved_bytes
        return work

    def _commit(self, plan: StepInput) -> bool:
        """Commit the step's tokens; return whether a sequence has ended."""
        lane = self._lanes[plan.model]
        has_ended = False
        result = self._outputs.output(plan, lane.slots)
        for output in self._scheduler.commit(plan, result, with_each_token=False):
            self._end(output)
            has_ended = has_ended or output.finish_reason is not None
        if self._batch_done and not lane.running:
            for record in self._batch_done.pop(plan.model, ()):
                record.finished_s = self._clock.now_s
        return has_ended

    def _end(self, output: TokenOutput) -> None:
        """Record an output: cached tokens, and the end of a completion."""
        record = self._result.records[int(output.request_id)]
        record.cached_tokens = max(record.cached_tokens, output.num_cached_tokens)
        if output.finish_reason is None:
            return
        left = self._outputs_left[output.request_id] = self._outputs_left[output.request_id] - 1
        if output.finish_reason == "error":
            left = 0
        elif left == 0 and output.timing is not None:
            record.scheduled_s = output.timing.scheduled_s
            record.first_token_s = output.timing.first_token_s
            record.finished_s = output.timing.last_token_s
            if self._config.manager == "static":
                self._batch_done.setdefault(record.model, []).append(record)
        if left == 0:
            del self._outputs_left[output.request_id]
            self.num_ended[record.model] += 1


def _copied_bytes(lanes: Iterable[Lane]) -> int:
    """Bytes that the managers of these lanes have copied on the device so far."""
    return sum(map(copied_bytes_of, lanes))


@lru_cache(maxsize=4096)
def _params(num_sequences: int, uses_beams: bool, max_tokens: int) -> SamplingParams:
    """Parameters of a request; those of an earlier one are used again, as to check them takes time.

    Args:
        num_sequences: completions, or beams.
        uses_beams: whether it is a beam search.
        max_tokens: tokens of each completion.
    """
    return SamplingParams(
        n=num_sequences, use_beam_search=uses_beams, max_tokens=max_tokens, ignore_eos=True
    )
