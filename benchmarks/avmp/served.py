"""The streams of AVMP's benchmark through Aquifer's own scheduler: requests wait and lose nothing.

Scheduler, cache managers and pool are the engine's; the device is modelled, and holds no bytes.
Time is counted in ticks of the benchmark, in which each running request computes one token, of its
prompt as well. A request has the memory that the benchmark gives it: the pages of its whole prompt
and its state from its admission on, and a page of each attention layer for each 16 tokens more.

A step of the scheduler is 16 ticks, in which each running request goes on by a row: the page of 16
tokens in all attention layers. So a token of the engine is a row here. An arrival waits for the
next step, and a request ends with a step; both cost it up to 15 ticks that the benchmark does not
count.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from benchmarks.avmp.cells import NUM_ATTENTION_LAYERS, NUM_STATE_LAYERS
from benchmarks.avmp.workloads import PAGE_TOKENS, Stream

from aquifer.cache import kv_cache
from aquifer.cache.avmp import SlotSizes
from aquifer.cache.avmp.manager import AvmpCache
from aquifer.cache.base import KVLayout, LayerKV, StateLayout, StateTensor
from aquifer.engine.assembly import Assembly
from aquifer.engine.lane import Lane
from aquifer.engine.lane_pages import most_pages
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.policies import Policies
from aquifer.engine.policies.admission import Admission, AdmissionSnapshot, first_come
from aquifer.engine.policies.requests import Candidate
from aquifer.engine.sequence import Sequence, SequenceGroup
from aquifer.engine.slots import NEVER, SlotTable
from aquifer.errors import InvariantError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.outputs import OutputMaker

_NAME = "model"
_ELEMENT = torch.bfloat16


def shortest_prompt(snapshot: AdmissionSnapshot) -> Candidate | None:
    """The waiting request with the fewest tokens, those that it had generated included.

    How much it will generate is not known. A long one waits as long as shorter ones arrive.
    """
    waiting = [candidate for queue in snapshot.queues.values() for candidate in queue]
    return min(waiting, key=lambda each: (each.num_tokens, each.arrival), default=None)


@dataclass(frozen=True, slots=True)
class Service:
    """How requests are served.

    Args:
        admission: which waiting request is tried next.
        manager: one of `aquifer.cache.KV_CACHES` or `BASELINES`.
        page_bytes: the pool's pages.
    """

    admission: Admission
    manager: str = "paged"
    page_bytes: int = 1 << 16


SERVICES = {
    "in order of arrival": Service(first_come),
    "shortest prompt first": Service(shortest_prompt),
    "contiguous KV, pages of 2 MiB": Service(shortest_prompt, "virtual", 2 << 20),
    "avmp": Service(shortest_prompt, "avmp"),
    "avmp-fixed": Service(shortest_prompt, "avmp-fixed"),
    "avmp-padded": Service(shortest_prompt, "avmp-padded"),
}
"""The scheduler's own order and one that serves many, with the benchmark's pages. With the latter
also pages of a GPU, and the paper's allocators in place of the shared pool."""


@dataclass(slots=True)
class Served:
    """What became of the requests of a cell that may wait.

    Args:
        submitted: requests.
        never_fit: those that need more than all memory.
        in_time: those that ended, with all of their memory, until the tick of the last departure
            where nothing waits.
        completed: those that ended at any time.
        at_most: an upper bound of `in_time` for any order: see `most_in_time`.
        preemptions: how often a request gave its memory back and was computed anew.
        waits: ticks from arrival to first admission, of each request that was admitted.
        last_tick: when the last request ended.
        most_bytes: memory in use and idle at once, at most.
    """

    submitted: int = 0
    never_fit: int = 0
    in_time: int = 0
    completed: int = 0
    at_most: int = 0
    preemptions: int = 0
    waits: list[float] = field(default_factory=list)
    last_tick: int = 0
    most_bytes: int = 0


@dataclass(slots=True, eq=False)
class RowLane(Lane):
    """A lane whose sequences run as many rows in a step as it is told, also of their prompts.

    Attributes:
        step_rows: rows of a step.
    """

    step_rows: int = 1

    def stop(self, sequence: Sequence) -> None:
        """Let a sequence stop after the rows of a step."""
        if sequence.slot is not None:
            computed = self.slots.num_computed[sequence.slot]
            self.slots.stop_at[sequence.slot] = computed + self.step_rows

    def hold(self, most_rows: int) -> int:
        """Let all sequences stop after the next step, and return its rows.

        It is one where a sequence decodes, and else as many as all have left of their prompts: in
        between nothing changes for any of them, so that one step can be many.

        Args:
            most_rows: until something else changes.
        """
        table, slots = self.slots, self.slots.in_order
        computed = table.num_computed[slots]
        left = table.num_given[slots] - computed
        self.step_rows = max(min(int(left.min(initial=most_rows)), most_rows), 1)
        table.stop_at[slots] = computed + self.step_rows
        return self.step_rows


def layouts(sizes: SlotSizes) -> tuple[KVLayout, StateLayout]:
    """The layouts of a row of KV, and of the state of a sequence, with the benchmark's bytes."""
    elements = sizes.kv_page_bytes // _ELEMENT.itemsize // 2
    state = StateTensor("state", (sizes.state_bytes // _ELEMENT.itemsize,), _ELEMENT)
    return (
        KVLayout((LayerKV(1, elements, elements),) * NUM_ATTENTION_LAYERS, _ELEMENT),
        StateLayout(((state,),) * NUM_STATE_LAYERS),
    )


def rows(num_tokens: int) -> int:
    """Rows of some tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def most_in_time(stream: Stream, sizes: SlotSizes, num_bytes: int) -> int:
    """How many requests could end in time in any order, if memory were used to the last byte.

    Each takes some bytes for some ticks. Those that take the least come first, as long as they are
    together no more than all memory in all ticks.
    """
    state_bytes = NUM_STATE_LAYERS * sizes.state_bytes
    row_bytes = NUM_ATTENTION_LAYERS * sizes.kv_page_bytes
    first = -(-stream.prompt // PAGE_TOKENS)
    total = stream.prompt + stream.generated
    # Rows by ticks: those of the prompt all the time, each further one from its first token on.
    byte_ticks = (state_bytes + first * row_bytes) * total
    further = np.maximum(-(-total // PAGE_TOKENS) - first, 0)
    since_first = total - first * PAGE_TOKENS - 1
    byte_ticks += row_bytes * (further * since_first - PAGE_TOKENS * (further * (further - 1) // 2))
    peak = state_bytes + -(-(total - 1) // PAGE_TOKENS) * row_bytes
    needed = np.cumsum(np.sort(byte_ticks[peak <= num_bytes]))
    ticks = last_departure(stream) - int(stream.arrival.min())
    return int(np.searchsorted(needed, num_bytes * ticks, side="right"))


def last_departure(stream: Stream) -> int:
    """The tick at which the last request departs where nothing waits."""
    return int((stream.arrival + stream.prompt + stream.generated).max())


def serve(stream: Stream, sizes: SlotSizes, num_bytes: int, service: Service) -> Served:
    """Serve the requests of a stream, until all that fit have ended.

    Args:
        stream: the requests.
        sizes: of the model.
        num_bytes: of all memory.
        service: how they are served.

    Raises:
        InvariantError: there was more memory than the budget, or requests are left.
    """
    with ExitStack() as resources:
        cell = _Cell(stream, sizes, num_bytes, service, resources)
        cell.run()
        return cell.result


class _Cell:
    """The state of `serve`."""

    def __init__(
        self,
        stream: Stream,
        sizes: SlotSizes,
        num_bytes: int,
        service: Service,
        resources: ExitStack,
    ) -> None:
        self._tick = 0
        self._arrivals: list[int] = stream.arrival.tolist()
        self._end_tick = last_departure(stream)
        num = len(self._arrivals)
        self.result = Served(num, at_most=most_in_time(stream, sizes, num_bytes))
        lengths = zip(stream.prompt.tolist(), stream.generated.tolist(), strict=True)
        # The last token of a sequence is never run.
        self._rows = [(rows(prompt), rows(prompt + more) + 1) for prompt, more in lengths]
        max_rows = max(total for _, total in self._rows)
        driver = ModelledDriver(num_bytes, service.page_bytes)
        self._pool = PagePool(driver, num_bytes, keep_idle_bytes=num_bytes)
        resources.callback(self._pool.close)
        self._scheduler = Assembly(
            self._pool,
            num * max_rows,
            clock_s=lambda: self._tick,
            policies=Policies(admission=service.admission),
        ).scheduler
        kv, state = layouts(sizes)
        make = kv_cache(service.manager, 1, max_rows)
        cache = make(self._pool, Owner(_NAME, Kind.KV), kv, num, max_rows, state)
        resources.callback(cache.close)
        self._lane = RowLane(_NAME, cache, SlotTable(num, max_rows))
        self._scheduler.add_lane(self._lane)
        self._groups: dict[int, SequenceGroup] = {}
        self._next = 0
        self._outputs = OutputMaker(has_beams=False, seed=0)

    def run(self) -> None:
        """Run all steps."""
        scheduler, lane, result = self._scheduler, self._lane, self.result
        has_changed = True
        while True:
            has_changed |= self._arrive()
            num_rows = lane.hold(1 if has_changed and lane.waiting else self._rows_until_arrival)
            num_preemptions = scheduler.num_preemptions
            plan = scheduler.plan()
            num_failed = len(scheduler.take_failed())
            self._fail(num_failed)
            has_changed = num_failed > 0 or scheduler.num_preemptions > num_preemptions
            if plan is None and has_changed:
                continue  # one that ran alone begins anew, or was refused
            if plan is None:
                if not self._has_more:
                    break
                self._tick += self._rows_until_arrival * PAGE_TOKENS
                continue
            self._check()
            self._tick += num_rows * PAGE_TOKENS
            output = self._outputs.output(plan, lane.slots)
            for each in scheduler.commit(plan, output, with_each_token=False):
                if each.finish_reason is not None:
                    self._end(int(each.request_id))
                    has_changed = True
        if scheduler.has_work:
            raise InvariantError("requests are left that are never planned")
        self._pool.check()
        result.preemptions = scheduler.num_preemptions

    @property
    def _has_more(self) -> bool:
        return self._next < len(self._arrivals)

    @property
    def _rows_until_arrival(self) -> int:
        """Steps of a row until a request arrives."""
        if not self._has_more:
            return NEVER
        return -(-(self._arrivals[self._next] - self._tick) // PAGE_TOKENS)

    def _arrive(self) -> bool:
        """Add the requests that have arrived, but for those that never fit; whether any has."""
        first = self._next
        while self._has_more and self._arrivals[self._next] <= self._tick:
            number = self._next
            self._next += 1
            prompt, total = self._rows[number]
            num_bytes = most_pages(self._lane, prompt, total) * self._pool.page_bytes
            if num_bytes > self._pool.budget_bytes:
                self.result.never_fit += 1
                continue
            ids = np.zeros(prompt, np.int32)
            params = SamplingParams(max_tokens=total - prompt, ignore_eos=True)
            asked = Request(str(number), _NAME, ids.tolist(), params, self._arrivals[number])
            group = SequenceGroup.of(asked, number, ids, seed=0, max_total=total)
            self._groups[number] = group
            self._scheduler.add(self._lane, group)
        return self._next > first

    def _fail(self, num_failed: int) -> None:
        """Count requests that found no room alone: they need more than all slots of a store.

        Raises:
            InvariantError: there are such requests in a shared pool, where they were not added.
        """
        if num_failed and not isinstance(self._lane.cache, AvmpCache):
            raise InvariantError(f"{num_failed} requests failed that fit")
        self.result.never_fit += num_failed

    def _check(self) -> None:
        """Verify that physical memory is no more than the budget."""
        created_bytes = self._pool.created_bytes
        self.result.most_bytes = max(self.result.most_bytes, created_bytes)
        if created_bytes > self._pool.budget_bytes:
            raise InvariantError(f"{created_bytes} bytes of {self._pool.budget_bytes}")

    def _end(self, number: int) -> None:
        result, group = self.result, self._groups.pop(number)
        assert group.scheduled_s is not None
        result.waits.append(group.scheduled_s - self._arrivals[number])
        result.completed += 1
        result.in_time += self._tick <= self._end_tick
        result.last_tick = self._tick
