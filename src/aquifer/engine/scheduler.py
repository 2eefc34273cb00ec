"""Who runs in the next step: first come, first served, under one budget of memory.

The scheduler knows tokens, and asks each model's cache manager for room. It alone writes a
sequence's progress. Rules, in this order:

1. Models take turns, a step each.
2. Running sequences go first: those that decode, then those still reading their prompt, each in
   order of arrival, until the step's token budget is used up.
3. When the pool is short, the latest arrival among all running sequences, of whatever model, is
   preempted whole and recomputed later. It may be the very sequence that asked.
4. Then waiting sequences are admitted in order of arrival, if there is room for all tokens that
   they have, and a little more for each running one to grow by.

The earliest arrival is never preempted, and a request that would not fit alone is refused when it
arrives; so the earliest always ends, and with it all others in turn: no deadlock, no starvation.

Planning runs ahead of what is known: a step may be planned while the one before it is in flight, so
a plan counts as done at once, and `commit` fills in the tokens later. Two things follow:

- A sequence that turns out to have ended may have been planned once more. Whoever has its slot by
  then is another arrival; what was computed for the old one is dropped.
- Before anyone is preempted, the steps in flight are waited for: they may end sequences, and
  whoever is preempted must know all of its tokens.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from aquifer.cache.base import IntArray, SequenceCache, Spans
from aquifer.engine.request import FinishReason, RequestTiming, TokenLogprobs, TokenOutput
from aquifer.engine.slots import STOP_IDS_PER_SLOT, Sequence, SlotTable
from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool

_CHUNK_MULTIPLE_TOKENS = 256
"""Where a prompt is cut, it is cut at a multiple of this: attention has a faster kernel for chunks
of few different shapes (`aquifer.kernels.prefill_attention`)."""


def chunk_tokens(start: int, count: int, room: int) -> int:
    """How many of the `count` tokens from `start` on to run, where there is room for that many."""
    if count <= room:
        return count
    end = start + room
    round_end = end - end % _CHUNK_MULTIPLE_TOKENS
    return round_end - start if round_end > start else room


@dataclass(slots=True)
class Lane:
    """One model's sequences: waiting, then running, both in order of arrival."""

    name: str
    cache: SequenceCache
    slots: SlotTable
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def written_tokens(self) -> int:
        """Tokens of all running sequences that are in the cache."""
        return int(sum(self.slots.num_computed[s.slot] for s in self.running))


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of one model."""

    lane: Lane
    spans: Spans
    arrivals: IntArray  # [num_seqs], whose each span is
    # So many of the first spans are one token each, the last one that was sampled.
    num_decodes: int
    # Sequences of `spans` whose last token is run: each gets a new one. [num_sampled]
    sampled: IntArray
    admitted: IntArray  # slots whose sequences run for the first time since they have them


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step computed."""

    token_ids: IntArray  # [num_sampled], in the order of `Plan.sampled`
    logprobs: Mapping[int, TokenLogprobs]  # by index into `token_ids`, for those that asked
    # For those that asked: (index into the plan's spans, position) -> that prompt token's.
    prompt_logprobs: Mapping[tuple[int, int], TokenLogprobs]


class Scheduler:
    """Plans steps, and writes down what came of them.

    Args:
        pool: the memory of all lanes.
        max_batched_tokens: tokens of one step.
    """

    def __init__(self, pool: PagePool, max_batched_tokens: int) -> None:
        self.lanes: dict[str, Lane] = {}
        self._pool = pool
        self._max_batched_tokens = max_batched_tokens
        self._turns: deque[str] = deque()
        # The earliest arrival that waits for memory: nobody later may be admitted before it.
        self._first_blocked: int | None = None
        self._num_in_flight = 0  # plans that are not committed yet
        self._failed: list[TokenOutput] = []

    def add_lane(self, lane: Lane) -> None:
        """Begin to serve a model."""
        self.lanes[lane.name] = lane
        self._turns.append(lane.name)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return any(lane.waiting or lane.running for lane in self.lanes.values())

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all models so far."""
        return sum(lane.num_preemptions for lane in self.lanes.values())

    @property
    def num_waiting(self) -> int:
        """Waiting requests of all models."""
        return sum(len(lane.waiting) for lane in self.lanes.values())

    def add(self, lane: Lane, sequence: Sequence) -> None:
        """Put a new request at the end of its model's queue."""
        lane.waiting.append(sequence)

    def abort(self, lane: Lane, sequence: Sequence) -> None:
        """Forget a request; if it runs, its pages are free at once."""
        if sequence.slot is None:
            lane.waiting.remove(sequence)
            self._unblock(sequence)
        else:
            self._stop(lane, sequence)

    def plan(self) -> Plan | None:
        """The next step of the next model that has one, which must then be run and committed.

        None if nothing can run; maybe because the pool is short and what is in flight has to be
        committed first.
        """
        for _ in range(len(self._turns)):
            lane = self.lanes[self._turns[0]]
            self._turns.rotate(-1)
            plan = self._plan(lane)
            if plan is not None:
                self._num_in_flight += 1
                return plan
        return None

    def take_failed(self) -> list[TokenOutput]:
        """Last outputs of requests that the device refused memory for, since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def commit(self, plan: Plan, sampled: Sampled) -> list[TokenOutput]:
        """Fill in the tokens of the earliest plan in flight, end sequences that are done.

        Returns: what each sequence that still runs got.
        """
        self._num_in_flight -= 1
        lane, spans = plan.lane, plan.spans
        table = lane.slots
        runs_still = table.arrival[spans.slots] == plan.arrivals
        for (index, position), entry in sampled.prompt_logprobs.items():
            sequence = table.sequences[spans.slots[index]] if runs_still[index] else None
            if sequence is not None:
                assert sequence.prompt_logprobs is not None
                sequence.prompt_logprobs[position] = entry
        kept = np.flatnonzero(runs_still[plan.sampled])
        rows = plan.sampled[kept]
        slots = spans.slots[rows]
        tokens = sampled.token_ids[kept]
        lengths = spans.starts[rows] + spans.counts[rows] + 1  # the new token included
        table.token_ids[slots, lengths - 1] = tokens
        may_stop = lengths > table.min_total[slots]
        stops = (table.stop_ids[slots] == tokens[:, None]).any(1) & may_stop
        ends = stops | (lengths >= table.max_total[slots])
        first = lengths == table.num_prompt[slots] + 1
        special = ends | first | table.needs_care[slots]
        now = time.monotonic()
        outputs = []
        for i, (row, slot, token, is_special) in enumerate(
            zip(kept.tolist(), slots.tolist(), tokens.tolist(), special.tolist(), strict=True)
        ):
            sequence = table.sequences[slot]
            assert sequence is not None
            output = TokenOutput(sequence.request.request_id, [token])
            outputs.append(output)
            if is_special:
                output.logprobs = [sampled.logprobs[row]] if row in sampled.logprobs else None
                stopped = bool(stops[i]) or self._stops_late(sequence, token, bool(may_stop[i]))
                self._finish(lane, sequence, output, stopped, bool(ends[i]), now)
        return outputs

    def _plan(self, lane: Lane) -> Plan | None:
        num_preemptions = self.num_preemptions
        grown = self._grow(lane)
        if grown is None:
            return None
        slots, counts = grown
        admitted_slots = np.zeros(0, np.int64)
        if self.num_preemptions == num_preemptions:  # else whoever left would come back at once
            budget = self._max_batched_tokens - int(counts.sum())
            admitted_slots, admitted_counts = self._admit(lane, budget)
            slots = np.append(slots, admitted_slots)
            counts = np.append(counts, admitted_counts)
        if not len(slots):
            return None
        table = lane.slots
        starts = table.num_computed[slots]
        ends = starts + counts
        sampled = np.flatnonzero(ends == table.num_tokens[slots])
        table.num_computed[slots] = ends
        table.num_tokens[slots[sampled]] += 1
        return Plan(
            lane=lane,
            spans=Spans.make(slots, starts, counts),
            arrivals=table.arrival[slots],
            num_decodes=int((starts >= table.num_seated[slots]).sum()),
            sampled=sampled,
            admitted=admitted_slots,
        )

    def _grow(self, lane: Lane) -> tuple[IntArray, IntArray] | None:
        """Running sequences that go on, as (slots, counts), with room for their next tokens.

        None if the pool is short, and steps in flight have to be committed first.
        """
        table = lane.slots
        while True:
            slots = np.array([s.slot for s in lane.running], np.int64)
            # The very last token is never run.
            known = np.minimum(table.num_tokens[slots], table.max_total[slots] - 1)
            waiting = known - table.num_computed[slots]
            is_reading = table.num_computed[slots] < table.num_seated[slots]
            order = np.argsort(is_reading, kind="stable")
            slots, waiting = slots[order], waiting[order]
            before = np.cumsum(waiting) - waiting
            counts = np.clip(self._max_batched_tokens - before, 0, waiting)
            slots, waiting, counts = (part[counts > 0] for part in (slots, waiting, counts))
            if len(slots):  # the last one may be cut
                start = int(table.num_computed[slots[-1]])
                counts[-1] = chunk_tokens(start, int(waiting[-1]), int(counts[-1]))
            try:
                if lane.cache.reserve(slots, table.num_computed[slots] + counts):
                    return slots, counts
                refusal = None
            except DriverError as error:
                refusal = error
            if self._num_in_flight:
                return None
            self._preempt_latest(refusal)

    def _preempt_latest(self, refusal: DriverError | None) -> None:
        """Take the memory of the latest arrival among all running sequences.

        If that is the only one, the device itself is out of memory, or the process holds more of it
        than when the request was taken in: then the request fails, since trying again would not
        end.
        """
        lane, sequence = max(
            ((lane, s) for lane in self.lanes.values() for s in lane.running[-1:]),
            key=lambda pair: pair[1].arrival,
        )
        num_running = sum(len(lane.running) for lane in self.lanes.values())
        self._stop(lane, sequence)
        if num_running == 1:
            self._fail(sequence, refusal)
            return
        lane.num_preemptions += 1
        lane.waiting.appendleft(sequence)

    def _admit(self, lane: Lane, budget_tokens: int) -> tuple[IntArray, IntArray]:
        """Seat waiting sequences as long as there is room; returns (slots, counts)."""
        slots: list[int] = []
        counts: list[int] = []
        while lane.waiting and budget_tokens > 0 and lane.slots.num_free:
            sequence = lane.waiting[0]
            if self._first_blocked is not None and sequence.arrival > self._first_blocked:
                break
            if not self._has_headroom(lane, sequence):
                self._first_blocked = sequence.arrival
                break
            slot = lane.slots.seat(sequence)
            num_tokens = len(sequence.token_ids)
            refusal = None
            try:
                has_room = lane.cache.reserve(np.array([slot]), np.array([num_tokens]))
            except DriverError as error:
                has_room, refusal = False, error
            if not has_room:
                lane.slots.unseat(sequence)
                if not self._any_running() and not self._num_in_flight:
                    lane.waiting.popleft()
                    self._unblock(sequence)
                    self._fail(sequence, refusal)
                    continue
                self._first_blocked = sequence.arrival
                break
            self._unblock(sequence)
            lane.waiting.popleft()
            insort(lane.running, sequence, key=lambda s: s.arrival)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = time.monotonic()
            slots.append(slot)
            counts.append(chunk_tokens(0, num_tokens, budget_tokens))
            budget_tokens -= counts[-1]
        return np.array(slots, np.int64), np.array(counts, np.int64)

    def _has_headroom(self, lane: Lane, sequence: Sequence) -> bool:
        """Whether admitting leaves a page for each running sequence to grow into.

        Without that, a sequence just admitted would be preempted a few steps later, and its
        prompt computed for nothing.
        """
        num_running = sum(len(other.running) for other in self.lanes.values())
        if not num_running:
            return True
        growth_bytes = max(self._pool.page_bytes, lane.cache.layout.token_bytes)
        needed_bytes = lane.cache.bytes_needed(len(sequence.token_ids) + 1)
        return self._pool.free_bytes >= needed_bytes + num_running * growth_bytes

    def _unblock(self, sequence: Sequence) -> None:
        """The sequence waits for memory no longer, so it holds up nobody else."""
        if self._first_blocked == sequence.arrival:
            self._first_blocked = None

    def _any_running(self) -> bool:
        return any(lane.running for lane in self.lanes.values())

    def _stop(self, lane: Lane, sequence: Sequence) -> None:
        assert sequence.slot is not None
        lane.running.remove(sequence)
        lane.cache.release(sequence.slot)
        lane.slots.unseat(sequence)

    def _fail(self, sequence: Sequence, refusal: DriverError | None) -> None:
        output = TokenOutput(sequence.request.request_id, finish_reason="error")
        reason = refusal or "beside weights and overhead the pool has no room for this request"
        output.error = f"the device is out of memory: {reason}"
        output.timing = _timing(sequence, time.monotonic())
        self._failed.append(output)

    def _stops_late(self, sequence: Sequence, token: int, may_stop: bool) -> bool:
        """Stop tokens beyond those that the array has room for."""
        return (
            may_stop and len(sequence.stop_ids) > STOP_IDS_PER_SLOT and token in sequence.stop_ids
        )

    def _finish(
        self,
        lane: Lane,
        sequence: Sequence,
        output: TokenOutput,
        stopped: bool,
        ended: bool,
        now: float,
    ) -> None:
        """The uncommon part of a step's output: the first token, and the last."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            output.prompt_logprobs = sequence.prompt_logprobs
        if stopped or ended:
            reason: FinishReason = "stop" if stopped else "length"
            output.finish_reason = reason
            if stopped and output.token_ids[0] not in sequence.eos_ids:
                output.stop_reason = output.token_ids[0]
            output.timing = _timing(sequence, now)
            self._stop(lane, sequence)


def _timing(sequence: Sequence, now: float) -> RequestTiming:
    return RequestTiming(
        sequence.request.arrival_s, sequence.scheduled_s, sequence.first_token_s, now
    )
