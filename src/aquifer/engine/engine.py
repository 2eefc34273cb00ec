"""The engine: one pool, the models that share it, and the loop that serves their requests."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import KVLayout, SequenceCache
from aquifer.cache.prefix import PrefixCache
from aquifer.cache.swap import SwapSpace
from aquifer.config import EngineConfig, ModelSpec, format_size
from aquifer.engine.costs import PrefillCost
from aquifer.engine.headroom import group_bytes
from aquifer.engine.lane import Lane
from aquifer.engine.preemption import Preemption
from aquifer.engine.request import (
    EngineStats,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    ModelMemory,
    Request,
    SamplingParams,
    TokenOutput,
)
from aquifer.engine.runner import InFlight, Runner
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.sizing import batched_tokens, make_pool
from aquifer.engine.slots import SlotTable
from aquifer.engine.step_input import StepInput
from aquifer.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)
from aquifer.kernels import start_compiler
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.base import Driver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer, batch_bytes
from aquifer.memory.stock import PageStocker
from aquifer.models import ModelPlan, plan_model
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.store import WeightStore

_log = logging.getLogger(__name__)

_ACCOUNT_EVERY_S = 1.0
"""How often to ask what the process holds beside pages, which takes the driver about 0.1 ms."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A model that is known but not loaded."""

    spec: ModelSpec
    checkpoint: Checkpoint
    plan: ModelPlan


@dataclass(frozen=True, slots=True)
class _Served:
    """A model that is loaded."""

    info: ModelInfo
    weights: WeightStore
    runner: Runner
    lane: Lane
    eos_ids: frozenset[int]
    prefill_cost: PrefillCost


class Engine:
    """Serves the models of a configuration from one pool. Made by `Engine.open`.

    Nothing here is thread-safe; one loop calls `add`, `abort` and `step`.

    Attributes:
        num_ahead: steps that are launched before the first of them is waited for, less one.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        served: dict[str, _Served],
        scheduler: Scheduler,
        stocker: PageStocker,
        resources: ExitStack,
    ) -> None:
        self.config = config
        self.pool = pool
        self._served = served
        self._scheduler = scheduler
        self._stocker = stocker
        self._resources = resources
        self._requests: dict[str, tuple[Lane, SequenceGroup]] = {}
        self._own_requests: set[str] = set()  # nobody else wants to hear of these
        self._in_flight: deque[tuple[StepInput, InFlight]] = deque()
        # Where work is done when the call that does it returns, running ahead would only let
        # sequences that have ended be computed once more.
        self._accounted_s = time.monotonic()
        self.num_ahead = 1 if pool.driver.runs_ahead else 0
        self._committed_s = time.monotonic()
        self._num_arrivals = 0
        self._seeds = np.random.default_rng(config.seed)

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        on_progress: Callable[[LoadProgress], None] = lambda _: None,
        driver: Driver | None = None,
    ) -> Engine:
        """Load the models and get ready to serve them.

        Args:
            config: what to serve, and how.
            on_progress: told of each stretch of weights that was read.
            driver: used in place of the device's own.

        Raises:
            ConfigError: a checkpoint cannot be used, or the memory does not suffice.
            DriverError: the device refused memory.
        """
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        planned = []
        for spec in config.models:
            is_dummy = config.load_format == "dummy"
            checkpoint = (Checkpoint.without_tensors if is_dummy else Checkpoint.open)(spec.path)
            planned.append(_Planned(spec, checkpoint, plan_model(checkpoint, dtype)))
        with ExitStack() as resources:
            if driver is None:
                driver = open_driver(config.device)
                resources.callback(driver.close)
            if driver.device.type == "cuda":
                start_compiler(driver.device)
            pool = make_pool(config, driver, [p.plan.parameters for p in planned])
            resources.callback(pool.close)
            max_batched_tokens = batched_tokens(config, driver.device.type)
            at_a_time = batch_bytes(pool.budget_bytes, pool.page_bytes)
            reclaimer = Reclaimer(time.monotonic, at_a_time)
            pool.on_short = reclaimer.reclaim
            space = SwapSpace(
                0 if config.preemption_mode == "recompute" else config.swap_space_bytes,
                driver.device,
            )
            served = {p.spec.name: _load(config, pool, p, on_progress, resources) for p in planned}
            preemption = Preemption(space, config.preemption_mode)
            scheduler = Scheduler(pool, max_batched_tokens, preemption)
            for model in served.values():
                if model.lane.prefixes is not None:
                    reclaimer.register(model.lane.prefixes)
                scheduler.add_lane(model.lane)
                model.runner.warm_up(max_batched_tokens)
            pool.account_overhead(driver.overhead_bytes())
            stocker = PageStocker(pool)
            stocker.start()
            resources.callback(stocker.close)
            resources.callback(space.close)
            engine = cls(config, pool, served, scheduler, stocker, resources.pop_all())
        engine._check_room()
        return engine

    @property
    def models(self) -> dict[str, ModelInfo]:
        """What is served, by name."""
        return {name: served.info for name, served in self._served.items()}

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The sequences of each model, with their cache; for measurements and tests."""
        return self._scheduler.lanes

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or any step in flight."""
        return self._scheduler.has_work or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            UnknownModelError: no such model.
            QueueFullError: too many requests wait already.
            ContextLengthError: it is longer than the model's context.
            CapacityError: it needs more memory than there is for it at the best of times.
            RequestError: a token id is outside of the vocabulary, or the prompt is empty.
        """
        served = self._find(request.model)
        if request.request_id in self._requests:
            raise RequestError(f"a request {request.request_id!r} is running already")
        if self._scheduler.num_waiting >= self.config.max_num_waiting:
            raise QueueFullError(
                f"{self._scheduler.num_waiting} requests are waiting already; try again later"
            )
        token_ids = _checked_token_ids(request, served.info.vocab_size)
        params = request.params
        if params.num_sequences > self.config.max_num_seqs:
            field = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{field} is {params.num_sequences}, and this server runs at most "
                f"{self.config.max_num_seqs} sequences at once",
                param=field,
            )
        group = SequenceGroup.of(
            request,
            self._num_arrivals,
            token_ids,
            seed=(int(self._seeds.integers(2**63)) if params.seed is None else params.seed % 2**64),
            max_total=self._max_total(request, served),
            stop_ids=frozenset(params.stop_token_ids or ()).union(
                () if params.ignore_eos else served.eos_ids
            ),
            eos_ids=served.eos_ids,
        )
        self._num_arrivals += 1
        self._requests[request.request_id] = (served.lane, group)
        self._scheduler.add(served.lane, group)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one completion of it; its pages are free when this returns.

        Unknown ones are ignored.
        """
        found = self._requests.get(request_id)
        if found is None:
            return
        lane, group = found
        self._scheduler.abort(lane, group, index)
        if index is None or not group.sequences:
            del self._requests[request_id]

    def pin_prefix(self, model: str, token_ids: list[int], salt: str | None = None) -> int:
        """Keep the KV of a prefix until `unpin_prefix`. What is not cached yet is computed.

        Returns: how many of its tokens are kept; only whole blocks can be.

        Raises:
            UnknownModelError: no such model.
            RequestError: prefixes are not kept by this server, or this one is shorter than a block.
            CapacityError: pinned prefixes would take more than half of what KV can have.
        """
        served, prefixes = self._prefixes_of(model)
        request = Request(
            f"pin-{self._num_arrivals}",
            model,
            token_ids,
            SamplingParams(max_tokens=1, ignore_eos=True),
            time.monotonic(),
            cache_salt=salt,
        )
        tokens = _checked_token_ids(request, served.info.vocab_size)
        cache = served.lane.cache
        num_blocks = len(token_ids) * cache.layout.token_bytes // cache.block_bytes
        if num_blocks == 0:
            raise RequestError(
                f"the prefix has {len(token_ids)} tokens; blocks of KV, which are kept whole, hold "
                f"{cache.block_bytes / cache.layout.token_bytes:g}",
                param="prompt",
            )
        pinned_bytes = self._pinned_bytes + num_blocks * cache.block_bytes
        kv_bytes = self._kv_budget_bytes + self._pinned_bytes
        if 2 * pinned_bytes > kv_bytes:
            raise CapacityError(
                f"pinned prefixes would take {format_size(pinned_bytes)}, more than half of the "
                f"{format_size(kv_bytes)} that this server has for KV",
                param="prompt",
            )
        if prefixes.match(tokens, salt).num_tokens < cache.tokens_in(num_blocks) - 1:
            self.add(request)
            self._own_requests.add(request.request_id)
        prefixes.pin(tokens, salt)
        return cache.tokens_in(num_blocks)

    def unpin_prefix(self, model: str, token_ids: list[int], salt: str | None = None) -> None:
        """End what `pin_prefix` of the same tokens began; others are ignored."""
        _, prefixes = self._prefixes_of(model)
        prefixes.unpin(np.array(token_ids, np.int32), salt)

    def step(self) -> list[TokenOutput]:
        """Launch one step of one model; returns what requests got from the step that is done.

        On a device that works by itself, that is the step before: it runs while the next one is
        planned, so that the device always has work.
        """
        plan = self._scheduler.plan()
        outputs = self._scheduler.take_failed()
        if plan is not None:
            self._stocker.wake()
            launched = self._served[plan.model].runner.launch(plan)
            self._in_flight.append((plan, launched))
            self._account_overhead()
        # With nothing more to launch, there is nothing to wait for behind.
        if len(self._in_flight) > (0 if plan is None else self.num_ahead):
            plan, launched = self._in_flight.popleft()
            outputs += self._scheduler.commit(plan, launched.wait())
            self._observe(plan)
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self._requests:
                _, group = self._requests[output.request_id]
                if not group.sequences:
                    del self._requests[output.request_id]
        if self._own_requests:
            outputs = [output for output in outputs if not self._is_own(output)]
        return outputs

    def stats(self) -> EngineStats:
        """Counters of this moment."""
        lanes = self._scheduler.lanes
        in_use = self.pool.usage().in_use_bytes
        kv_bytes = sum(n for owner, n in in_use.items() if owner.kind == Kind.KV)
        return EngineStats(
            num_running={name: len(lane.running) for name, lane in lanes.items()},
            num_waiting={name: len(lane.waiting) for name, lane in lanes.items()},
            num_preemptions={name: lane.num_preemptions for name, lane in lanes.items()},
            kv_usage=kv_bytes / self._kv_budget_bytes,
            num_prefix_queried_tokens=_prefix_counts(lanes, "queried_tokens"),
            num_prefix_hit_tokens=_prefix_counts(lanes, "hit_tokens"),
        )

    def memory(self) -> MemoryReport:
        """Where the pool's budget is at this moment."""
        usage = self.pool.usage()
        models = {}
        for name, lane in self._scheduler.lanes.items():
            kv = lane.cache.stats(lane.written_tokens)
            models[name] = ModelMemory(
                bytes_by_kind={
                    kind: usage.in_use_bytes.get(Owner(name, kind), 0)
                    for kind in Kind
                    if kind != Kind.OVERHEAD
                },
                num_running=len(lane.running),
                num_waiting=len(lane.waiting),
                kv_written_tokens=kv.written_tokens,
                kv_written_bytes=kv.written_bytes,
                kv_mapped_bytes=kv.mapped_bytes,
                kv_wasted_bytes=kv.wasted_bytes,
            )
        page_bytes = self.pool.page_bytes
        return MemoryReport(
            device=str(self.pool.driver.device),
            page_bytes=page_bytes,
            budget_bytes=usage.budget_bytes,
            overhead_bytes=usage.overhead_bytes,
            free_bytes=usage.free_bytes,
            idle_bytes=usage.idle_bytes,
            retired_bytes=usage.retired_bytes,
            mapped_pages=(sum(usage.in_use_bytes.values()) - usage.overhead_bytes) // page_bytes,
            free_pages=usage.free_bytes // page_bytes,
            models=models,
            process_resident_bytes=_resident_bytes(),
        )

    def close(self) -> None:
        """End all requests and give everything back."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._resources.close()

    def _is_own(self, output: TokenOutput) -> bool:
        if output.request_id not in self._own_requests:
            return False
        if output.finish_reason is not None:
            self._own_requests.remove(output.request_id)
        return True

    def _observe(self, plan: StepInput) -> None:
        """Learn from a step how fast prompts are computed, if it had little else to do."""
        now_s = time.monotonic()
        seconds, self._committed_s = now_s - self._committed_s, now_s
        num_decodes, spans = plan.num_decodes, plan.spans
        num_prompt = spans.num_tokens - num_decodes
        if num_prompt > 10 * num_decodes:
            counts = spans.counts[num_decodes:]
            first_token = float(np.average(spans.starts[num_decodes:], weights=counts))
            cost = self._served[plan.model].prefill_cost
            cost.observe(first_token, num_prompt, seconds)

    def _prefixes_of(self, model: str) -> tuple[_Served, PrefixCache]:
        served = self._find(model)
        if served.lane.prefixes is None:
            raise RequestError("this server was started with --no-enable-prefix-caching")
        return served, served.lane.prefixes

    def _find(self, model: str) -> _Served:
        served = self._served.get(model)
        if served is None:
            raise UnknownModelError(
                f"no model {model!r} is served here; there is {', '.join(self._served)}",
                param="model",
            )
        return served

    def _account_overhead(self) -> None:
        """Captured graphs, and whatever else has grown, leave less for pages."""
        now = time.monotonic()
        if now - self._accounted_s >= _ACCOUNT_EVERY_S:
            self._accounted_s = now
            self.pool.account_overhead(self.pool.driver.overhead_bytes())

    @property
    def _kv_budget_bytes(self) -> int:
        """What KV could have, beside weights, pinned prefixes and what the process itself has."""
        weight_bytes = sum(served.info.weight_bytes for served in self._served.values())
        taken_bytes = self.pool.usage().overhead_bytes + weight_bytes + self._pinned_bytes
        return self.pool.budget_bytes - taken_bytes

    @property
    def _pinned_bytes(self) -> int:
        """Bytes of the pinned prefixes of all models."""
        caches = (served.lane.prefixes for served in self._served.values())
        return sum(cache.stats.pinned_bytes for cache in caches if cache is not None)

    def _max_total(self, request: Request, served: _Served) -> int:
        """Length in tokens, prompt included, at which a request ends."""
        limit = served.info.max_model_len
        num_prompt = len(request.prompt_token_ids)
        wanted = request.params.max_tokens
        if num_prompt >= limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and this model's context length is {limit}, "
                "which must hold at least one more; shorten the prompt",
                param="prompt",
            )
        if wanted is not None and num_prompt + wanted > limit:
            raise ContextLengthError(
                f"the prompt's {num_prompt} tokens and max_tokens {wanted} exceed this model's "
                f"context length of {limit}; ask for at most {limit - num_prompt}",
                param="max_tokens",
            )
        cache, num_sequences = served.lane.cache, request.params.num_sequences
        total = limit if wanted is None else num_prompt + wanted
        capacity = self._capacity_tokens(cache, num_prompt, num_sequences)
        if wanted is None:
            total = min(total, max(capacity, num_prompt) + 1)
        needed_bytes = group_bytes(cache, num_prompt, total, num_sequences)
        if needed_bytes > self._kv_budget_bytes:
            times = "" if num_sequences == 1 else f", {num_sequences} times but for the prompt,"
            raise CapacityError(
                f"{total - 1} tokens of KV{times} take {needed_bytes} bytes "
                f"({format_size(needed_bytes)}) and this server has {self._kv_budget_bytes} bytes "
                f"({format_size(self._kv_budget_bytes)}) for KV: enough for {capacity} tokens",
                param="prompt" if wanted is None else "max_tokens",
            )
        return total

    def _capacity_tokens(
        self, cache: SequenceCache, num_prompt: int = 1, num_sequences: int = 1
    ) -> int:
        """How long sequences with the same prompt can be if nothing else runs."""
        low, high = 0, self._kv_budget_bytes // cache.layout.token_bytes
        while low < high:
            middle = (low + high + 1) // 2
            shared = min(num_prompt, middle)
            needed_bytes = group_bytes(cache, shared, middle + 1, num_sequences)
            if needed_bytes <= self._kv_budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _check_room(self) -> None:
        """Refuse to start where no request could ever run; warn where long ones cannot."""
        for name, served in self._served.items():
            cache, limit = served.lane.cache, served.info.max_model_len
            capacity = self._capacity_tokens(cache)
            if capacity < 1:
                least = cache.bytes_needed(1)
                self.close()
                raise ConfigError(
                    f"the weights leave {format_size(max(self._kv_budget_bytes, 0))} of the pool's "
                    f"{format_size(self.pool.budget_bytes)} for KV, and the first token of {name} "
                    f"takes {format_size(least)}; raise --memory"
                )
            if capacity < limit - 1:
                _log.warning(
                    "the pool holds at most %d tokens of %s at a time, its context length is %d; "
                    "longer requests will be refused",
                    capacity,
                    name,
                    limit,
                )


def _load(
    config: EngineConfig,
    pool: PagePool,
    planned: _Planned,
    on_progress: Callable[[LoadProgress], None],
    resources: ExitStack,
) -> _Served:
    """Bring one model's weights into the pool and set up what serves it."""
    spec, checkpoint, plan = planned.spec, planned.checkpoint, planned.plan
    max_model_len = config.max_model_len or plan.max_model_len
    if max_model_len > plan.max_model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; {spec.name} allows at most {plan.max_model_len}"
        )
    weights = WeightStore(pool, Owner(spec.name, Kind.WEIGHTS), plan.parameters)
    resources.callback(weights.close)
    if not weights.populate():
        raise ConfigError(
            f"the weights of {spec.name} take {format_size(weights.placement.num_bytes)} and the "
            f"pool has {format_size(pool.free_bytes)} left; raise --memory"
        )
    _fill(config, weights, checkpoint, on_progress, spec.name)
    with torch.inference_mode():
        model = plan.build(weights.tensors)
    cache = kv_cache(config.kv_cache, config.block_size)(
        pool, Owner(spec.name, Kind.KV), model.kv_layout, config.max_num_seqs, max_model_len
    )
    resources.callback(cache.close)
    info = ModelInfo(
        name=spec.name,
        path=str(spec.path),
        architecture=str((checkpoint.config.get("architectures") or ["unknown"])[0]),
        dtype=str(model.kv_layout.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        num_parameters=sum(t.numel() for t in weights.tensors.values()),
        weight_bytes=weights.placement.num_bytes,
        kv_bytes_per_token=model.kv_layout.token_bytes,
    )
    prefill_cost = PrefillCost(_even_tokens(checkpoint, info, model.kv_layout))
    lane = Lane(
        spec.name,
        cache,
        SlotTable(config.max_num_seqs, max_model_len),
        recompute_s=prefill_cost.seconds,
    )
    if config.enable_prefix_caching and cache.can_share:
        lane.prefixes = PrefixCache(cache, prefill_cost.seconds)
        resources.callback(lane.prefixes.close)
    runner = Runner(model, cache, pool.driver, config.max_num_seqs, max_model_len)
    resources.callback(runner.close)
    return _Served(info, weights, runner, lane, _eos_ids(checkpoint), prefill_cost)


def _even_tokens(checkpoint: Checkpoint, info: ModelInfo, layout: KVLayout) -> float:
    """The position at which a token's attention is as many operations as its products."""
    layer = layout.layers[0]
    num_heads = checkpoint.config.get("num_attention_heads") or layer.num_kv_heads
    # Each query head multiplies and adds once with every element of K and of V.
    attention = 2 * num_heads / layer.num_kv_heads * layout.token_elements
    return 2 * info.num_parameters / attention


def _prefix_counts(lanes: Mapping[str, Lane], name: str) -> dict[str, int]:
    return {
        model: 0 if lane.prefixes is None else getattr(lane.prefixes.stats, name)
        for model, lane in lanes.items()
    }


def _fill(
    config: EngineConfig,
    weights: WeightStore,
    checkpoint: Checkpoint,
    on_progress: Callable[[LoadProgress], None],
    model: str,
) -> None:
    """Give the weights their values."""
    if config.load_format == "dummy":
        weights.fill_random(config.seed or 0)
        num_bytes = sum(parameter.num_bytes for parameter in weights.parameters)
        on_progress(LoadProgress(model, num_bytes, num_bytes))
        return
    total_bytes = sum(
        checkpoint.tensors[source.name].num_bytes
        for parameter in weights.parameters
        for source in parameter.sources
        if source.name in checkpoint.tensors
    )
    loaded_bytes = 0

    def advance(num_bytes: int) -> None:
        nonlocal loaded_bytes
        loaded_bytes += num_bytes
        on_progress(LoadProgress(model, loaded_bytes, total_bytes))

    weights.load(checkpoint, advance)


def _eos_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """End-of-sequence tokens: of `generation_config.json`, or else of `config.json`."""
    file = checkpoint.path / "generation_config.json"
    try:
        generation: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    ids = generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _checked_token_ids(request: Request, vocab_size: int) -> npt.NDArray[np.int32]:
    """The prompt as an array; whatever else names tokens is checked too."""
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    _token_array(list(request.params.token_ids_named), vocab_size, None)
    return _token_array(request.prompt_token_ids, vocab_size, "prompt")


def _token_array(token_ids: list[int], vocab_size: int, param: str | None) -> npt.NDArray[np.int32]:
    """As an array, which is much faster to look through than a list.

    Raises:
        RequestError: one of them is outside of the vocabulary.
    """
    try:
        array = np.array(token_ids, np.int32)
    except OverflowError:
        array = np.array([-1], np.int32)
    if len(array) and not (array.min() >= 0 and array.max() < vocab_size):
        outside = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"token id {outside} is outside of the vocabulary: this model has {vocab_size} tokens, "
            "numbered from 0",
            param=param,
        )
    return array


def _resident_bytes() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024
