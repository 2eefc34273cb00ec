"""Trace replay: the engine's scheduler and cache managers with a simulated clock.

One iteration of the loop is one step of the engine: requests that have arrived are added, the
scheduler plans, the clock advances by the time that the device model predicts
(`aquifer.sim.device`), and the scheduler commits made-up tokens. All decisions are made by the real
code; time is modelled, and token values are left out. A sequence ends at the length in the trace.
Planning one step ahead is left out too: a step is planned when the one before it is done.

While the same sequences decode for many steps, most of the scheduler's work is the same at each
step. `_Replay._decode_on` then asks the cache manager for room step by step, as the scheduler
would, and does the rest for all of these steps at once. The outcome is the same
(`tests/sim/test_replay.py` compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import CacheFactory, IntArray
from aquifer.cache.swap import SwapSpace
from aquifer.config import format_size
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.committing import skip_steps
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import TokenLogprobs, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.policies import Policies, RestoreMode
from aquifer.engine.policies.admission import static_batches
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.sim.baselines.reserved import Policy, ReservedCache
from aquifer.sim.device import DeviceModel, ModelShape, StepModel, StepWork
from aquifer.sim.driver import PAGE_BYTES, ModelledDriver
from aquifer.sim.trace import PromptMaker, TraceRequest

_RESERVED: dict[str, Policy] = {
    "orca-max": "max",
    "orca-pow2": "pow2",
    "orca-oracle": "oracle",
    "static": "max",
}

MANAGERS = ("virtual", "paged", *_RESERVED)
"""Cache managers to compare. "static" reserves like "orca-max" and runs static batches: no request
joins a running batch, and all of its outputs return when the last is done (FasterTransformer,
section 6.1)."""

_PARTS = ("written", "future", "internal", "external", "retained", "free")
"""Parts of the memory for KV: written tokens (shared blocks count once); memory reserved for future
tokens; for tokens that never come (internal fragmentation); lost between regions (external
fragmentation, section 3.1); prefixes retained for later requests; and free memory."""

_COLUMNS = ("requests", "sequences", "waiting", "shared", *_PARTS)
"""Quantities averaged over time: counts, then bytes."""

_MOST_STEPS = 4096  # maximum number of steps done at once
STEPS_PER_SUM = 1024  # single steps per summation, because small arrays are slow
_UTILIZATION = 0.9  # fraction of the device's memory; vLLM's default too


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Configuration of a replay.

    Args:
        models: by the names that a trace may use; requests without a name go to the first.
        device: the device that all models run on.
        manager: one of `MANAGERS`.
        memory_bytes: the pool's budget, weights included; None for nine tenths of the device.
        page_bytes: size of a physical page.
        block_size: tokens of a block, for managers with blocks.
        max_model_len: the longest context; None for the model's.
        max_num_seqs: maximum number of running sequences of one model.
        max_num_batched_tokens: maximum number of tokens of one step.
        num_samples: completions of each prompt.
        beam_width: number of beams of a beam search; 0 for sampling.
        prefix_caching: retain KV for later requests.
        preemption_mode: "swap", "recompute" or "auto", as in the engine.
        swap_space_bytes: host memory for the KV of preempted requests; 0 for none.
        fast_forward: process steps in which nothing changes together.
        seed: seed of the made-up beam scores.

    Raises:
        ConfigError: an option is invalid.
    """

    models: dict[str, ModelShape]
    device: DeviceModel
    manager: str = "virtual"
    memory_bytes: int | None = None
    page_bytes: int = PAGE_BYTES
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_samples: int = 1
    beam_width: int = 0
    prefix_caching: bool = False
    preemption_mode: RestoreMode = "auto"
    swap_space_bytes: int = 4 << 30
    fast_forward: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.manager not in MANAGERS:
            raise ConfigError(
                f"unknown KV cache {self.manager!r}; choose one of {', '.join(MANAGERS)}"
            )
        if self.prefix_caching and self.manager in _RESERVED:
            raise ConfigError(f"{self.manager} cannot share, so there is no prefix caching with it")

    @property
    def budget_bytes(self) -> int:
        """The pool's budget."""
        return self.memory_bytes or int(_UTILIZATION * self.device.memory_bytes)

    def context(self, model: ModelShape) -> int:
        """Return the maximum length of a model's sequences, in tokens."""
        return min(self.max_model_len or model.max_tokens, model.max_tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences of each request."""
        return self.beam_width or self.num_samples

    def factory(self) -> CacheFactory:
        """Return the factory of a model's cache manager."""
        policy = _RESERVED.get(self.manager)
        if policy is None:
            return kv_cache(self.manager, self.block_size)
        return partial(ReservedCache, policy=policy, block_size=self.block_size)


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


@dataclass(slots=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
        records: one per request, in order of arrival.
        duration_s: time until the last request ended.
        busy_s: the part of it in which a request ran.
        num_steps: steps of the engine.
        num_preemptions: preemptions of requests.
        queried_tokens: prompt tokens looked up among retained prefixes.
        hit_tokens: prompt tokens found there.
        kv_budget_bytes: the memory for KV.
        averages: averages of `_COLUMNS` over the busy time.
        averages_waiting: the same over the part of it in which requests were waiting.
    """

    records: list[RequestRecord]
    duration_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    kv_budget_bytes: int = 0
    averages: dict[str, float] = field(default_factory=dict)
    averages_waiting: dict[str, float] = field(default_factory=dict)

    @property
    def normalized_latency_s(self) -> float:
        """Mean over all served requests; infinite if there are none."""
        values = [record.normalized_latency_s for record in self.records]
        served = [value for value in values if value is not None]
        return float(np.mean(served)) if served else np.inf

    def figures(self) -> dict[str, Any]:
        """Return all figures except the records, for a result file."""
        served = [record for record in self.records if record.finished_s is not None]
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
            "not_completed": len(self.records) - len(served),
            "duration": self.duration_s,
            "busy_seconds": self.busy_s,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "total_input_tokens": sum(record.prompt_tokens for record in served),
            "total_output_tokens": outputs,
            "request_throughput": len(served) / duration_s,
            "output_throughput": outputs / duration_s,
            "normalized_latency": self.normalized_latency_s,
            **_percentiles("ttft", ttft),
            **_percentiles("tpot", tpot),
            **_percentiles("e2el", latency),
            "prefix_cache_queries": self.queried_tokens,
            "prefix_cache_hits": self.hit_tokens,
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
        ConfigError: the weights do not fit, or a request names an unknown model.
    """
    with ExitStack() as resources:
        run = _Replay(config, requests, resources)
        run.run(on_progress)
        return run.result


class _Averages:
    """Means over simulated time."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(_COLUMNS))
        self._waiting_sums = np.zeros(len(_COLUMNS))
        self._waiting_s = 0.0
        self._seconds = 0.0
        # Steps that are not in the sums yet.
        self._steps_s: list[float] = []
        self._steps: list[list[int]] = []

    def add_step(self, seconds: float, values: list[int]) -> None:
        """Add an interval with constant values, one for each of `_COLUMNS`."""
        self._steps_s.append(seconds)
        self._steps.append(values)
        if len(self._steps) == STEPS_PER_SUM:
            self._sum_steps()

    def add(self, seconds: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> None:
        """Add several intervals.

        Args:
            seconds: [n].
            values: [n, len(_COLUMNS)].
        """
        self._sums += seconds @ values
        self._seconds += float(seconds.sum())
        waits = values[:, _COLUMNS.index("waiting")] > 0
        if waits.any():
            self._waiting_sums += seconds[waits] @ values[waits]
            self._waiting_s += float(seconds[waits].sum())

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the means over all time, and over the time in which requests were waiting."""
        self._sum_steps()
        return (
            dict(zip(_COLUMNS, (self._sums / (self._seconds or 1)).tolist(), strict=True)),
            dict(
                zip(_COLUMNS, (self._waiting_sums / (self._waiting_s or 1)).tolist(), strict=True)
            ),
        )

    @property
    def seconds(self) -> float:
        """Sum of all intervals."""
        self._sum_steps()
        return self._seconds

    def _sum_steps(self) -> None:
        if self._steps:
            self.add(np.array(self._steps_s), np.array(self._steps, np.float64))
            self._steps_s.clear()
            self._steps.clear()


class _Replay:
    """State of one replay.

    Args:
        config: the configuration.
        requests: in order of arrival.
        resources: the stack that closes all resources opened here.
    """

    def __init__(
        self, config: ReplayConfig, requests: Sequence[TraceRequest], resources: ExitStack
    ) -> None:
        self._config = config
        self._requests = requests
        arrivals = [request.arrival_s for request in requests if request.arrival_s is not None]
        if len(arrivals) < len(requests):
            raise ConfigError("the trace has no times; give a --rate of arrivals")
        self._arrivals_s = np.array(arrivals)
        self._num_arrived = 0
        self._num_ended = 0
        self._now_s = 0.0
        self._prompts = PromptMaker()
        self._random = np.random.default_rng(config.seed)
        self._averages = _Averages()
        self._outputs_left: dict[str, int] = {}  # unfinished completions of each request
        self._batch_done: list[RequestRecord] = []  # finished requests of a running static batch
        driver = ModelledDriver(config.budget_bytes, config.page_bytes)
        # Keep all idle pages, so that pages are not created again.
        self._pool = PagePool(driver, config.budget_bytes, keep_idle_bytes=config.budget_bytes)
        resources.callback(self._pool.close)
        self._take_weights(resources)
        self._kv_budget_bytes = self._pool.free_bytes
        # Without physical memory, like the KV.
        space = SwapSpace(
            config.swap_space_bytes, torch.device("meta"), config.device.link_bandwidth
        )
        space.prepare()
        resources.callback(space.close)
        assembly = Assembly(
            self._pool,
            config.max_num_batched_tokens,
            swap_space=space,
            restore_mode=config.preemption_mode,
            clock_s=lambda: self._now_s,
            policies=Policies(admission=static_batches) if config.manager == "static" else None,
        )
        self._room = assembly.room
        self._preemption = assembly.preemption
        self._scheduler = assembly.scheduler
        self._moved_bytes = self._copied_bytes = 0  # accounted for so far
        self._lanes: dict[str, Lane] = {}
        self._steps: dict[str, StepModel] = {}
        for name, model in config.models.items():
            self._steps[name] = StepModel(model, config.device)
            lane = self._lanes[name] = assembly.open_lane(
                LaneSpec(
                    name,
                    model.kv_layout,
                    config.max_num_seqs,
                    config.context(model),
                    config.factory(),
                    config.prefix_caching,
                    self._steps[name].prefill_seconds,
                )
            )
            resources.callback(assembly.close_lane, lane)
        self.result = ReplayResult([], kv_budget_bytes=self._kv_budget_bytes)

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Run the simulation until the last request has ended."""
        scheduler, result = self._scheduler, self.result
        while True:
            self._arrive()
            num_preemptions = scheduler.num_preemptions
            plan = scheduler.plan()
            for output in scheduler.take_failed():
                self._end(output)
            if plan is None:
                if self._num_arrived == len(self._requests):
                    break
                self._now_s = float(self._arrivals_s[self._num_arrived])
                continue
            seconds = self._steps[plan.model].seconds(self._work(plan))
            self._averages.add_step(seconds, self._sample())
            self._now_s += seconds
            result.num_steps += 1
            num_ended = self._num_ended
            has_freed = self._commit(plan) or scheduler.num_preemptions > num_preemptions
            if self._num_ended > num_ended:
                on_progress(self._num_ended)
            if self._config.fast_forward:
                self._decode_on(plan, is_refused=not has_freed)
        if scheduler.has_work:
            raise InvariantError("requests are left that are never planned")
        result.duration_s = self._now_s
        result.busy_s = self._averages.seconds
        result.num_preemptions = scheduler.num_preemptions
        for lane in self._lanes.values():
            if lane.prefixes is not None:
                stats = lane.prefixes.stats
                result.queried_tokens += stats.queried_tokens
                result.hit_tokens += stats.hit_tokens
        result.averages, result.averages_waiting = self._averages.means()

    # --- setup -------------------------------------------------------------------------------

    def _take_weights(self, resources: ExitStack) -> None:
        for name, model in self._config.models.items():
            pages = self._pool.acquire(
                Owner(name, Kind.WEIGHTS), -(-model.weight_bytes // self._pool.page_bytes)
            )
            if pages is None:
                raise ConfigError(
                    f"the weights of {name} take {format_size(model.weight_bytes)}, more than what "
                    f"is left of {format_size(self._config.budget_bytes)}; give more --memory"
                )
            resources.callback(self._pool.release, pages)

    # --- requests ----------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Add the requests that have arrived by now, as the engine does."""
        end = int(self._arrivals_s.searchsorted(self._now_s, side="right"))
        for number in range(self._num_arrived, end):
            self._add(number, self._requests[number])
        self._num_arrived = end

    def _add(self, number: int, request: TraceRequest) -> None:
        config = self._config
        name = request.model or next(iter(config.models))
        lane = self._lanes.get(name)
        if lane is None:
            raise ConfigError(
                f"the trace asks for a model {name!r}; name one with --model {name}=SHAPE"
            )
        record = RequestRecord(
            name, float(self._arrivals_s[number]), request.prompt_tokens, request.output_tokens
        )
        self.result.records.append(record)
        max_total = request.prompt_tokens + request.output_tokens
        footprint, num_sequences = lane.cache.footprint, config.num_sequences
        needed_pages = footprint.most(request.prompt_tokens, max_total, num_sequences)
        is_too_large = self._room.size(needed_pages) > self._kv_budget_bytes
        if max_total > config.context(config.models[name]) or is_too_large:
            self._num_ended += 1  # refused
            return
        prompt = self._prompts.ids(request)
        params = SamplingParams(
            n=config.num_sequences,
            use_beam_search=config.beam_width > 0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
        )
        asked = Request(str(number), name, prompt.tolist(), params, record.arrival_s)
        group = SequenceGroup.of(asked, number, prompt, seed=0, max_total=max_total)
        self._outputs_left[asked.request_id] = config.num_sequences
        self._scheduler.add(lane, group)

    def _commit(self, plan: StepInput) -> bool:
        """Commit the step's tokens; return whether a sequence has ended."""
        tokens = _own_tokens(plan.serials[plan.sampled])[:, None]
        has_ended = False
        result = StepOutput(tokens, plan.most_new, self._beam_reports(plan))
        for output in self._scheduler.commit(plan, result, with_each_token=False):
            self._end(output)
            has_ended = has_ended or output.finish_reason is not None
        if self._batch_done and not self._lanes[plan.model].running:
            for record in self._batch_done:
                record.finished_s = self._now_s
            self._batch_done.clear()
        return has_ended

    def _end(self, output: TokenOutput) -> None:
        """Record an output: cached tokens, and the end of a completion."""
        record = self.result.records[int(output.request_id)]
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
                self._batch_done.append(record)
        if left == 0:
            del self._outputs_left[output.request_id]
            self._num_ended += 1

    def _beam_reports(self, plan: StepInput) -> dict[int, list[TokenLogprobs]]:
        """Make up candidates for each beam in the step.

        The best continuation of a beam has a probability of about 0.6, and each next one about half
        that of the one before. These figures determine how often beams fork and end.
        """
        table = self._lanes[plan.model].slots
        reports: dict[int, list[TokenLogprobs]] = {}
        if not self._config.beam_width:
            return reports
        for index, row in enumerate(plan.sampled.tolist()):
            sequence = table.sequences[plan.spans.slots[row]]
            if sequence is None or sequence.num_logprobs is None:
                continue
            count = sequence.num_logprobs
            steps = self._random.exponential(np.log(2), count)
            logprobs = np.log(0.6) - np.cumsum(steps) + np.log(2)
            ids = self._random.permutation(count) + 1
            ranks = list(range(1, count + 2))
            reports[index] = [TokenLogprobs([0, *ids.tolist()], [0.0, *logprobs.tolist()], ranks)]
        return reports

    def _work(self, plan: StepInput) -> StepWork:
        """Return the work of a step: its plan, and the copies made since the last step."""
        copied_bytes = sum(
            lane.cache.copied_bytes
            for lane in self._lanes.values()
            if isinstance(lane.cache, ReservedCache)
        )
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
        )
        self._copied_bytes, self._moved_bytes = copied_bytes, moved_bytes
        return work

    # --- memory ------------------------------------------------------------------------------

    def _sample(self) -> list[int]:
        """Return the current values of `_COLUMNS`."""
        num_requests = num_seqs = num_waiting = 0
        shared_bytes = written_bytes = future_bytes = internal_bytes = external_bytes = 0
        is_reserved = self._config.manager in _RESERVED
        for lane in self._lanes.values():
            table, cache = lane.slots, lane.cache
            num_waiting += len(lane.waiting)
            if not lane.running:
                continue
            num_requests += len(lane.running)
            num_seqs += table.num_taken
            num_written = lane.written_tokens
            stats = cache.stats(num_written)
            shared_bytes += stats.shared_bytes
            written_bytes += stats.written_bytes - stats.shared_bytes
            if is_reserved:
                assert isinstance(cache, ReservedCache)
                waste = cache.waste(num_written, table.max_total)
                future_bytes += waste.future_bytes
                internal_bytes += waste.internal_bytes
                external_bytes += waste.external_bytes
            else:
                internal_bytes += stats.wasted_bytes
        free_bytes = self._pool.free_bytes
        known_bytes = written_bytes + future_bytes + internal_bytes + external_bytes + free_bytes
        return [
            num_requests,
            num_seqs,
            num_waiting,
            shared_bytes,
            written_bytes,
            future_bytes,
            internal_bytes,
            external_bytes,
            self._kv_budget_bytes - known_bytes,
            free_bytes,
        ]

    # --- many steps at once ------------------------------------------------------------------

    def _decode_on(self, plan: StepInput, *, is_refused: bool) -> None:
        """Do the steps after a committed one in which all running sequences decode and nobody ends.

        In each of these steps the scheduler would plan the same sequences with one token each, so
        it is enough to ask the manager for room as it does, and to count. This holds as long as

        - all running sequences are of this model, have one token to run, which was sampled in the
          step before, and are not beams; no sequence waits to fork;
        - no request arrives for which there might be room;
        - waiting requests have been refused, for lack of memory or slots: neither grows before a
          sequence ends. So the scheduler must have tried the first request in the queue when it
          planned the last step, and since then no sequence may have ended, nor prefixes been added
          that the request could use. A request that was preempted may find room later, because the
          room to be left for all others (`_RUN_TOKENS`) shrinks as they approach their ends;
        - the manager has room.

        Args:
            plan: the last step's, committed.
            is_refused: whether no sequence has ended in it or been preempted for it.
        """
        lane = self._lanes[plan.model]
        table = lane.slots
        slots = table.in_order
        num_seqs = len(slots)
        computed, known = table.num_computed[slots], table.num_tokens[slots]
        if (
            not num_seqs
            or self._config.beam_width
            or (known - computed != 1).any()
            or (computed < table.num_given[slots]).any()
            or any(other.waiting or other.running for other in self._others(lane))
        ):
            return
        is_blocked = bool(lane.waiting)
        if is_blocked and not (
            is_refused
            and plan.spans.num_tokens < self._config.max_num_batched_tokens
            and lane.waiting[0].num_preemptions == 0
            and (lane.prefixes is None or plan.num_decodes == len(plan.spans.slots))
        ):
            return
        most = min(int((table.max_total[slots] - known).min()) - 1, _MOST_STEPS)
        if most < 1:
            return
        kv_tokens = int(computed.sum()) + num_seqs * np.arange(1, most + 1)
        seconds = self._steps[lane.name].decode_seconds(num_seqs, kv_tokens)
        # Accumulated one after the other, as in single steps: [i] is when step i begins.
        begins_s = np.add.accumulate(np.concatenate(([self._now_s], seconds)))
        may_join = not is_blocked or len(self._lanes) > 1
        if may_join and self._num_arrived < len(self._requests):
            arrival_s = self._arrivals_s[self._num_arrived]
            most = int(begins_s[:most].searchsorted(arrival_s))
        free_bytes, retained_bytes = self._reserve_on(lane, slots, begins_s[:most].tolist())
        count = len(free_bytes)
        if count:
            skip_steps(lane, slots, count, _own_tokens(table.serial[slots]))
            lane.cache.upload()
            values = np.array(self._sample()) + np.zeros((count, 1))
            self._set_columns(values, lane, num_seqs, begins_s[:count], free_bytes, retained_bytes)
            self._averages.add(seconds[:count], values)
            self._now_s = float(begins_s[count])
            self.result.num_steps += count

    def _others(self, lane: Lane) -> list[Lane]:
        return [other for other in self._lanes.values() if other is not lane]

    def _reserve_on(
        self, lane: Lane, slots: IntArray, begins_s: list[float]
    ) -> tuple[list[int], list[int]]:
        """Ask for room as the scheduler does, until a step is refused.

        Returns: free bytes and retained bytes after each step that was not refused.
        """
        needed = lane.slots.num_computed[slots] + 1
        free_bytes: list[int] = []
        retained_bytes: list[int] = []
        pool, reserve = self._pool, lane.cache.reserve
        for begin_s in begins_s:
            self._now_s = begin_s
            if not reserve(slots, needed):
                break
            needed += 1
            free_bytes.append(pool.free_bytes)
            retained_bytes.append(self._retained_bytes())
        return free_bytes, retained_bytes

    def _retained_bytes(self) -> int:
        if not self._config.prefix_caching:
            return 0
        in_use_bytes = self._pool.usage().in_use_bytes
        return sum(in_use_bytes.get(Owner(name, Kind.PREFIX), 0) for name in self._lanes)

    def _set_columns(
        self,
        values: npt.NDArray[np.float64],
        lane: Lane,
        num_seqs: int,
        begins_s: npt.NDArray[np.float64],
        free_bytes: list[int],
        retained_bytes: list[int],
    ) -> None:
        """Correct the rows of skipped steps, which are copies of the last step's values."""
        column = {name: values[:, index] for index, name in enumerate(_COLUMNS)}
        # Tokens written after each step, until the last.
        later = np.arange(len(values) - 1, -1, -1) * (num_seqs * lane.cache.layout.token_bytes)
        column["written"][:] -= later
        if self._config.manager in _RESERVED:
            column["future"][:] += later
        else:
            column["free"][:] = free_bytes
            column["retained"][:] = retained_bytes
            known = column["written"] + column["free"] + column["retained"]
            column["internal"][:] = self._kv_budget_bytes - known
        arrived = self._arrivals_s.searchsorted(begins_s, side="right") - self._num_arrived
        column["waiting"][:] += arrived


def _own_tokens(serials: IntArray) -> IntArray:
    """Return a made-up token for each sequence, different from those of all others."""
    return serials % (1 << 30)
