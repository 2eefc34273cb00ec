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
from aquifer.cache.base import SequenceCache
from aquifer.config import EngineConfig, ModelSpec, format_size
from aquifer.engine.request import (
    EngineStats,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    ModelMemory,
    Request,
    TokenOutput,
)
from aquifer.engine.runner import InFlight, Runner
from aquifer.engine.scheduler import Lane, Plan, Scheduler
from aquifer.engine.sizing import batched_tokens, make_pool
from aquifer.engine.slots import Sequence, SlotTable
from aquifer.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.base import Driver
from aquifer.memory.pool import Kind, Owner, PagePool
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
        self._requests: dict[str, tuple[Lane, Sequence]] = {}
        self._in_flight: deque[tuple[Plan, InFlight]] = deque()
        # Where work is done when the call that does it returns, running ahead would only let
        # sequences that have ended be computed once more.
        self._accounted_s = time.monotonic()
        self.num_ahead = 0 if pool.driver.fence() is None else 1
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
            pool = make_pool(config, driver, [p.plan.parameters for p in planned])
            resources.callback(pool.close)
            max_batched_tokens = batched_tokens(config, driver.device.type)
            scheduler = Scheduler(pool, max_batched_tokens)
            served = {p.spec.name: _load(config, pool, p, on_progress, resources) for p in planned}
            for model in served.values():
                scheduler.add_lane(model.lane)
                model.runner.warm_up(max_batched_tokens)
            pool.account_overhead(driver.overhead_bytes())
            stocker = PageStocker(pool)
            stocker.start()
            resources.callback(stocker.close)
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
        served = self._served.get(request.model)
        if served is None:
            raise UnknownModelError(
                f"no model {request.model!r} is served here; there is {', '.join(self._served)}",
                param="model",
            )
        if request.request_id in self._requests:
            raise RequestError(f"a request {request.request_id!r} is running already")
        if self._scheduler.num_waiting >= self.config.max_num_waiting:
            raise QueueFullError(
                f"{self._scheduler.num_waiting} requests are waiting already; try again later"
            )
        token_ids = _checked_token_ids(request, served.info.vocab_size)
        params = request.params
        sequence = Sequence(
            request=request,
            arrival=self._num_arrivals,
            seed=(int(self._seeds.integers(2**63)) if params.seed is None else params.seed % 2**64),
            max_total=self._max_total(request, served),
            stop_ids=frozenset(params.stop_token_ids or ()).union(
                () if params.ignore_eos else served.eos_ids
            ),
            eos_ids=served.eos_ids,
            token_ids=token_ids,
        )
        if params.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None] * sequence.num_prompt_tokens
        self._num_arrivals += 1
        self._requests[request.request_id] = (served.lane, sequence)
        self._scheduler.add(served.lane, sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request; its pages are free when this returns. Unknown ids are ignored."""
        found = self._requests.pop(request_id, None)
        if found is not None:
            self._scheduler.abort(*found)

    def step(self) -> list[TokenOutput]:
        """Launch one step of one model; returns what requests got from the step that is done.

        On a device that works by itself, that is the step before: it runs while the next one is
        planned, so that the device always has work.
        """
        plan = self._scheduler.plan()
        outputs = self._scheduler.take_failed()
        if plan is not None:
            self._stocker.wake()
            launched = self._served[plan.lane.name].runner.launch(plan)
            self._in_flight.append((plan, launched))
            self._account_overhead()
        # With nothing more to launch, there is nothing to wait for behind.
        if len(self._in_flight) > (0 if plan is None else self.num_ahead):
            plan, launched = self._in_flight.popleft()
            outputs += self._scheduler.commit(plan, launched.wait())
        for output in outputs:
            if output.finish_reason is not None:
                del self._requests[output.request_id]
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

    def _account_overhead(self) -> None:
        """Captured graphs, and whatever else has grown, leave less for pages."""
        now = time.monotonic()
        if now - self._accounted_s >= _ACCOUNT_EVERY_S:
            self._accounted_s = now
            self.pool.account_overhead(self.pool.driver.overhead_bytes())

    @property
    def _kv_budget_bytes(self) -> int:
        """What KV could have, if nobody but the weights and the process itself had anything."""
        weights = sum(served.info.weight_bytes for served in self._served.values())
        return self.pool.budget_bytes - weights - self.pool.usage().overhead_bytes

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
        # The last token is never run, so it needs no KV.
        cache = served.lane.cache
        total = limit if wanted is None else num_prompt + wanted
        if wanted is None:
            total = min(total, max(self._capacity_tokens(cache), num_prompt) + 1)
        needed_bytes = cache.bytes_needed(total - 1)
        if needed_bytes > self._kv_budget_bytes:
            raise CapacityError(
                f"{total - 1} tokens of KV take {needed_bytes} bytes ({format_size(needed_bytes)}) "
                f"and this server has {self._kv_budget_bytes} bytes "
                f"({format_size(self._kv_budget_bytes)}) for KV: enough for "
                f"{self._capacity_tokens(cache)} tokens",
                param="prompt" if wanted is None else "max_tokens",
            )
        return total

    def _capacity_tokens(self, cache: SequenceCache) -> int:
        """The longest sequence whose KV fits if nothing else runs."""
        low, high = 0, self._kv_budget_bytes // cache.layout.token_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if cache.bytes_needed(middle) <= self._kv_budget_bytes:
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
    lane = Lane(spec.name, cache, SlotTable(config.max_num_seqs, max_model_len))
    runner = Runner(model, cache, lane.slots, pool.driver)
    return _Served(info, weights, runner, lane, _eos_ids(checkpoint))


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
