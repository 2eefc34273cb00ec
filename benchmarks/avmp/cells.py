"""One cell of AVMP's benchmark: a stream of requests, a model, a pool, and an allocator.

Nothing waits and nothing is scheduled: a request takes the memory for its whole prompt when it
arrives, one page for each attention layer as it grows, and gives all of it back when it departs. A
call that finds no memory is counted and not repeated; the request goes on without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from benchmarks.avmp.workloads import PAGE_TOKENS, EventKind, Stream

from aquifer.cache.avmp import DynamicPools, HybridAllocator, PaddedUnified, SlotSizes
from aquifer.cache.avmp.handles import Store

NUM_ATTENTION_LAYERS = 4
NUM_STATE_LAYERS = 28

MODELS = {
    "jamba_1_5_mini": SlotSizes(kv_page_bytes=65536, state_bytes=8192 * 16 * 2),
    "mamba2_1b3": SlotSizes(kv_page_bytes=65536, state_bytes=8192 * 128 * 2),
}
"""Sizes in one layer: 16 tokens of 8 KV heads with 128 elements, and the state of a sequence."""

POOLS = {"1 GiB": 1 << 30, "4 GiB": 4 << 30}

_SAMPLE_EVERY = 100

MakeAllocator = Callable[[SlotSizes, int], HybridAllocator]
"""Makes an allocator for a model and a number of bytes."""


@dataclass(slots=True)
class Cell:
    """What became of the requests of a cell.

    Args:
        ooms: calls that found no memory.
        submitted: requests.
        completed: requests of which no call found none.
        clean: those of them that have not lost any memory while they ran.
        evictions: how often a request has lost its memory in a store.
        active_p50: median number of requests that have arrived and not departed.
        seconds: of the loop over all events.
        rebalances: batches of slots that were moved.
        refused: batches that could not be.
        migrated_bytes: of batches.
        stale: slots that were freed though another request had them.
    """

    ooms: int = 0
    submitted: int = 0
    completed: int = 0
    clean: int = 0
    evictions: int = 0
    active_p50: float = 0.0
    seconds: float = 0.0
    rebalances: int = 0
    refused: int = 0
    migrated_bytes: int = 0
    stale: int = 0


def play(stream: Stream, allocator: HybridAllocator, page_tokens: int = PAGE_TOKENS) -> Cell:
    """Play the requests of a stream.

    Args:
        stream: the requests.
        allocator: gives them memory.
        page_tokens: tokens of a KV page.
    """
    events = stream.events(page_tokens)
    num_pages = (-(-stream.prompt // page_tokens)).tolist()
    ids: list[list[int]] = [[] for _ in num_pages]
    failed: set[int] = set()
    cell = Cell(submitted=len(num_pages))
    active: set[int] = set()
    sampled: list[int] = []

    def call(request: int, store: Store, count: int) -> None:
        given = allocator.allocate(request, store, count)
        if given is None:
            cell.ooms += 1
            failed.add(request)
        else:
            ids[request].extend(given)

    begin_s = time.perf_counter()
    for number, (_, kind, request) in enumerate(events, 1):
        if kind is EventKind.ARRIVAL:
            active.add(request)
            for _ in range(NUM_ATTENTION_LAYERS):
                call(request, Store.KV, num_pages[request])
            for _ in range(NUM_STATE_LAYERS):
                call(request, Store.STATE, 1)
        elif kind is EventKind.DEPARTURE:
            active.remove(request)
            allocator.end(request, ids[request])
        elif request in active:
            for _ in range(NUM_ATTENTION_LAYERS):
                call(request, Store.KV, 1)
        if number % _SAMPLE_EVERY == 0:
            sampled.append(len(active))
    cell.seconds = time.perf_counter() - begin_s
    sampled.append(len(active))
    counted = [count for count in sampled if count]
    cell.active_p50 = float(np.percentile(counted, 50)) if counted else 0.0
    done = set(range(len(num_pages))) - failed
    cell.completed = len(done)
    cell.clean = len(done - allocator.lost)
    cell.evictions = allocator.num_evictions
    if isinstance(allocator, PaddedUnified):
        cell.stale = allocator.num_stale
    if isinstance(allocator, DynamicPools):
        cell.rebalances, cell.refused = allocator.num_rebalances, allocator.num_refused
        cell.migrated_bytes = allocator.migrated_bytes
    return cell
