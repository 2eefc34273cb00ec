"""Host overhead of a step beside the model: plan, view, commit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import KVLayout, LayerKV, Rows
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.errors import ConfigError
from aquifer.memory.driver import open_driver
from aquifer.memory.pool import PagePool
from aquifer.memory.stock import PageStocker

_DEVICE = torch.device("cpu")
_MAX_PROMPT_TOKENS = 64
_MODEL_S = 0.005  # stands for the model's step time, in which new pages are created ahead
_POOL_BYTES = 64 << 30  # address space; only used pages take memory


@dataclass(slots=True)
class StepCosts:
    """Times of each step's parts. `plan_s` includes mapping pages for new tokens."""

    plan_s: list[float] = field(default_factory=list)
    view_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)

    def total_s(self) -> list[float]:
        """Return the time of each step, all parts together."""
        parts = zip(self.plan_s, self.view_s, self.commit_s, strict=True)
        return [sum(part) for part in parts]


def measure_steps(
    kv_name: str, layout: KVLayout, num_seqs: int, num_steps: int, page_bytes: int
) -> dict[str, StepCosts]:
    """Decode `num_steps` tokens of `num_seqs` sequences twice, without a model.

    Returns:
        "first": the pool's pages are new, and each comes from the system;
        "again": the same again, on the pages that the first round left idle.

    Raises:
        ConfigError: pages cannot have that size.
    """
    driver = open_driver("cpu")
    if page_bytes % driver.granularity_bytes:
        driver.close()
        raise ConfigError(
            f"--page-size is {page_bytes}; it must be a multiple of {driver.granularity_bytes}"
        )
    pool = PagePool(driver, _POOL_BYTES, page_bytes, keep_idle_bytes=_POOL_BYTES)
    stocker = PageStocker(pool)
    stocker.start()
    max_tokens = _MAX_PROMPT_TOKENS + num_steps + 1
    assembly = Assembly(pool, num_seqs * _MAX_PROMPT_TOKENS)
    lane = assembly.open_lane(LaneSpec("bench", layout, num_seqs, max_tokens, kv_cache(kv_name)))
    scheduler = assembly.scheduler
    costs = {}
    for name in ("first", "again"):
        _add_sequences(scheduler, lane, num_seqs, num_steps + 1)
        plan = scheduler.plan()  # all prompts in one step
        assert plan is not None
        scheduler.commit(plan, _sampled(plan))
        costs[name] = _decode(scheduler, lane, num_steps, stocker)
    assembly.close_lane(lane)
    stocker.close()
    pool.close()
    driver.close()
    return costs


def random_layout(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> KVLayout:
    """Return the KV layout of a model of that shape."""
    return KVLayout((LayerKV(num_kv_heads, head_dim, head_dim),) * num_layers, dtype)


def _add_sequences(scheduler: Scheduler, lane: Lane, count: int, num_outputs: int) -> None:
    params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        # Prompt lengths differ, so that sequences do not all need a page in the same step.
        prompt = np.ones(rng.integers(1, _MAX_PROMPT_TOKENS + 1), np.int32)
        request = Request(str(i), lane.name, prompt.tolist(), params, time.monotonic())
        group = SequenceGroup.of(
            request,
            i,
            prompt,
            seed=i,
            max_total=len(prompt) + num_outputs,
            stop_ids=frozenset({0}),
            eos_ids=frozenset({0}),
        )
        scheduler.add(lane, group)


def _sampled(plan: StepInput) -> StepOutput:
    return StepOutput.of_single(np.ones(len(plan.sampled), np.int64))


def _decode(scheduler: Scheduler, lane: Lane, num_steps: int, stocker: PageStocker) -> StepCosts:
    costs = StepCosts()
    for _ in range(num_steps):
        stocker.wake()
        time.sleep(_MODEL_S)
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        lane.cache.tensors.view(Rows.of(plan.spans, plan.num_decodes, _DEVICE))
        viewed = time.perf_counter()
        sampled = _sampled(plan)
        ready = time.perf_counter()
        scheduler.commit(plan, sampled)
        costs.plan_s.append(planned - start)
        costs.view_s.append(viewed - planned)
        costs.commit_s.append(time.perf_counter() - ready)
    return costs
