"""One interface to two commits of the project, whose modules have other names.

`aquifer` is imported from the tree that PYTHONPATH names; each function here works with both.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import KVLayout, Rows
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.sequence import SequenceGroup
from aquifer.memory.driver import open_driver
from aquifer.memory.pool import Kind, Owner, PagePool

_CPU = torch.device("cpu")


def find(*places: str) -> Any:
    """Import the first of some "module:name" that exists; None if none of them does."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


Request = find("aquifer.engine.params:Request", "aquifer.engine.request:Request")
SamplingParams = find(
    "aquifer.engine.params:SamplingParams", "aquifer.engine.request:SamplingParams"
)
ReplayConfig = find("aquifer.sim.config:ReplayConfig", "aquifer.sim.replay:ReplayConfig")
_Assembly = find("aquifer.engine.assembly:Assembly")
_LaneSpec = find("aquifer.engine.assembly:LaneSpec")
_StepOutput = find("aquifer.engine.step_input:StepOutput")


@dataclass(frozen=True, slots=True)
class Books:
    """A scheduler with one model, which has a cache and no weights."""

    pool: PagePool
    scheduler: Any
    lane: Any

    def add(self, number: int, prompt: list[int], num_outputs: int) -> SequenceGroup:
        """Add a request; returns what `abort` takes."""
        tokens = np.array(prompt, np.int32)
        params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
        request = Request(str(number), self.lane.name, prompt, params, time.monotonic())
        group = SequenceGroup.of(
            request,
            number,
            tokens,
            seed=number,
            max_total=len(prompt) + num_outputs,
            stop_ids=frozenset({0}),
            eos_ids=frozenset({0}),
        )
        self.scheduler.add(self.lane, group)
        return group

    def view(self, plan: Any) -> None:
        """Compute the addresses that a plan's step needs."""
        cache = self.lane.cache
        cache.upload()
        source = getattr(cache, "tensors", cache)  # a cache had no device's half of its own
        source.view(Rows.of(plan.spans, plan.num_decodes, _CPU))

    def commit(self, plan: Any) -> None:
        """Commit a plan with the token 1 for every sequence."""
        self.scheduler.commit(plan, sampled(plan))


def sampled(plan: Any) -> Any:
    """The result of a step in which every sequence gets the token 1."""
    tokens = np.ones(len(plan.sampled), np.int64)
    if _StepOutput is not None:
        return _StepOutput.of_single(tokens)
    return find("aquifer.engine.scheduler:Sampled")(tokens, {}, {})


def open_books(
    resources: ExitStack,
    kv_name: str,
    layout: KVLayout,
    *,
    max_seqs: int,
    max_tokens: int,
    max_batched_tokens: int,
    pool_bytes: int,
    page_bytes: int,
    keeps_prefixes: bool = False,
) -> Books:
    """Open a pool on the CPU, and a scheduler with one model.

    Args:
        resources: closes all that is opened here.
        kv_name: of the cache manager.
        layout: of the model's KV.
        max_seqs: sequences that run at once.
        max_tokens: length of the longest sequence.
        max_batched_tokens: tokens of one step.
        pool_bytes: the pool's budget.
        page_bytes: size of a page.
        keeps_prefixes: whether KV is retained for later requests.
    """
    driver = open_driver("cpu")
    resources.callback(driver.close)
    pool = PagePool(driver, pool_bytes, page_bytes, keep_idle_bytes=pool_bytes)
    resources.callback(pool.close)
    factory = kv_cache(kv_name)
    if _Assembly is not None:
        assembly = _Assembly(pool, max_batched_tokens)
        lane = assembly.open_lane(
            _LaneSpec("bench", layout, max_seqs, max_tokens, factory, keeps_prefixes)
        )
        resources.callback(assembly.close_lane, lane)
        return Books(pool, assembly.scheduler, lane)
    cache = factory(pool, Owner("bench", Kind.KV), layout, max_seqs, max_tokens)
    resources.callback(cache.close)
    table = find("aquifer.engine.slots:SlotTable")(max_seqs, max_tokens)
    lane = find("aquifer.engine.scheduler:Lane")("bench", cache, table)
    scheduler: Any = Scheduler(pool, max_batched_tokens)  # type: ignore[arg-type]
    if keeps_prefixes:
        lane.prefixes = find("aquifer.cache.prefix:PrefixCache")(cache, lane.recompute_s)
        resources.callback(lane.prefixes.close)
        batch_bytes = find("aquifer.memory.reclaim:batch_bytes")(pool_bytes, page_bytes)
        reclaimer = find("aquifer.memory.reclaim:Reclaimer")(time.monotonic, batch_bytes)
        reclaimer.register(lane.prefixes)
        pool.on_short = reclaimer.reclaim
    scheduler.add_lane(lane)
    return Books(pool, scheduler, lane)
