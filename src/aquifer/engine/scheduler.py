"""Who runs in the next step: first come, first served, under one budget of memory.

The scheduler knows tokens, and asks each model's cache manager for room. It alone writes a
sequence's progress. Rules, in this order:

1. Models take turns, a step each.
2. Running sequences go first: those that decode, then those still reading their prompt, each in
   order of arrival, until the step's token budget is used up.
3. When the pool is short, the latest arrival among all running requests, of whatever model, is
   preempted with all of its sequences (PagedAttention, section 4.5): its KV is swapped to the host
   or computed again later (`aquifer.engine.preemption`). It may be the very one that asked.
4. Then waiting requests are admitted in order of arrival, if there is room for all tokens that
   they have, and a little more for each running sequence to grow by. One that was preempted is in
   front of the queue, so nobody new is admitted before it is back; and it comes back only when
   there is room for it and all that run to go on for `_RUN_TOKENS` tokens.

The earliest arrival is never preempted, and a request that would not fit alone is refused when it
arrives; so the earliest always ends, and with it all others in turn: no deadlock, no starvation.

A request with several sequences computes its prompt once: in the first of them. The others have
their slots from the start, and fork from it (`Sequence.parent`) when all of the prompt but the last
token is computed; that token they run themselves, each with its own random numbers. Sequences that
come back together do likewise with what they share. The beams of a search fork whenever two go on
from the same one.

Planning runs ahead of what is known: a step may be planned while the one before it is in flight, so
a plan counts as done at once, and `commit` fills in the tokens later. Two things follow:

- A sequence that turns out to have ended may have been planned once more. Whoever has its slot by
  then has another serial number; what was computed for the old one is dropped.
- Before anyone is preempted, the steps in flight are waited for: they may end sequences, and
  whoever is preempted must know all of its tokens.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from aquifer.cache.base import IntArray, SequenceCache, Spans
from aquifer.cache.prefix import PrefixCache
from aquifer.engine.costs import PrefillCost
from aquifer.engine.preemption import Preemption
from aquifer.engine.request import FinishReason, RequestTiming, TokenLogprobs, TokenOutput
from aquifer.engine.sequence import Beams, Sequence, SequenceGroup, TokenIds
from aquifer.engine.slots import STOP_IDS_PER_SLOT, SlotTable
from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool

_CHUNK_MULTIPLE_TOKENS = 256
"""Where a prompt is cut, it is cut at a multiple of this: attention has a faster kernel for chunks
of few different shapes (`aquifer.kernels.prefill_attention`)."""

_RUN_TOKENS = 64
"""How far everybody must be able to go on after a preempted request has come back.

Coming back costs a prefill or two copies, about as much as some dozen steps of a batch. A request
that is preempted again before it has run for that long has cost more than it has brought, and so
would the next one: the batch thrashes. Whoever ends sooner counts with what is left."""


def chunk_tokens(start: int, count: int, room: int) -> int:
    """How many of the `count` tokens from `start` on to run, where there is room for that many."""
    if count <= room:
        return count
    end = start + room
    round_end = end - end % _CHUNK_MULTIPLE_TOKENS
    return round_end - start if round_end > start else room


def group_bytes(cache: SequenceCache, num_prompt: int, num_total: int, num_sequences: int) -> int:
    """Pool bytes that a request takes at most, if its sequences share the prompt and no more.

    Args:
        cache: where it will be.
        num_prompt: tokens of its prompt.
        num_total: tokens of each sequence in the end, prompt included.
        num_sequences: that run for it.
    """
    # The last token is never run, so it needs no KV.
    needed_bytes = cache.bytes_needed(num_total - 1)
    shared_bytes = 0
    if cache.can_share:
        shared_bytes = (num_prompt - 1) * cache.layout.token_bytes
        shared_bytes -= shared_bytes % cache.block_bytes
    return needed_bytes + (num_sequences - 1) * (needed_bytes - shared_bytes)


@dataclass(slots=True)
class Lane:
    """One model's requests: waiting, then running, both in order of arrival.

    Attributes:
        prefixes: the KV of earlier requests; None if it is not kept.
        recompute_s: seconds to compute a stretch of KV, given its first position and its length.
        admits_while_running: False for static batching: a batch is admitted when the one before it
            has ended as a whole.
    """

    name: str
    cache: SequenceCache
    slots: SlotTable
    prefixes: PrefixCache | None = None
    recompute_s: Callable[[float, float], float] = PrefillCost().seconds
    admits_while_running: bool = True
    waiting: deque[SequenceGroup] = field(default_factory=deque)
    running: list[SequenceGroup] = field(default_factory=list)
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that swapped

    @property
    def written_tokens(self) -> int:
        """Tokens of all running sequences that are in the cache; shared ones count for each."""
        return int(self.slots.num_computed[self.slots.in_order].sum())


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of one model."""

    lane: Lane
    spans: Spans
    serials: IntArray  # [num_seqs], whose each span is
    # So many of the first spans are one token each, the last one that was sampled, which the device
    # knows already.
    num_decodes: int
    num_single: int  # so many of the first spans are one token each, those included
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
        preemption: what becomes of the KV of whoever is preempted; None to compute it again.
        clock_s: tells the time in seconds.
    """

    def __init__(
        self,
        pool: PagePool,
        max_batched_tokens: int,
        preemption: Preemption | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lanes: dict[str, Lane] = {}
        self._pool = pool
        self._max_batched_tokens = max_batched_tokens
        self._preemption = preemption
        self._clock_s = clock_s
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

    def add(self, lane: Lane, group: SequenceGroup) -> None:
        """Put a new request at the end of its model's queue."""
        lane.waiting.append(group)

    def abort(self, lane: Lane, group: SequenceGroup, index: int | None = None) -> None:
        """Forget a request, or one completion of it; if it runs, its pages are free at once."""
        if index is not None and any(s.index != index for s in group.sequences):
            self._discard_swapped(group)  # the copies of several refer to each other
            for sequence in [s for s in group.sequences if s.index == index]:
                self._end(lane, sequence)
        elif group in lane.waiting:
            lane.waiting.remove(group)
            self._discard_swapped(group)
            self._unblock(group)
        elif group in lane.running:
            self._end_all(lane, group)

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

    def commit(
        self, plan: Plan, sampled: Sampled, *, with_each_token: bool = True
    ) -> list[TokenOutput]:
        """Fill in the tokens of the earliest plan in flight, end sequences that are done.

        Args:
            plan: that was run.
            sampled: what came of it.
            with_each_token: False to report only first and last tokens of sequences, and what else
                is more than a token, to somebody who makes the tokens up and need not be told.

        Returns: what each sequence that still runs got.
        """
        self._num_in_flight -= 1
        lane, spans = plan.lane, plan.spans
        table = lane.slots
        runs_still = table.serial[spans.slots] == plan.serials
        for (index, position), entry in sampled.prompt_logprobs.items():
            sequence = table.sequences[spans.slots[index]] if runs_still[index] else None
            if sequence is not None:
                assert sequence.prompt_logprobs is not None
                sequence.prompt_logprobs[position] = entry
        kept = np.flatnonzero(runs_still[plan.sampled])
        rows = plan.sampled[kept]
        slots = spans.slots[rows]
        outputs: list[TokenOutput] = []
        is_beam = table.is_beam[slots]
        if is_beam.any():
            beams = [table.sequences[slot] for slot in slots[is_beam].tolist()]
            reports = [sampled.logprobs[row] for row in kept[is_beam].tolist()]
            outputs += self._commit_beams(lane, beams, reports)
            kept, rows, slots = kept[~is_beam], rows[~is_beam], slots[~is_beam]
        tokens = sampled.token_ids[kept]
        lengths = spans.starts[rows] + spans.counts[rows] + 1  # the new token included
        table.token_ids[slots, lengths - 1] = tokens
        may_stop = lengths > table.min_total[slots]
        stops = (table.stop_ids[slots] == tokens[:, None]).any(1) & may_stop
        ends = stops | (lengths >= table.max_total[slots])
        first = lengths == table.num_prompt[slots] + 1
        special = ends | first | table.needs_care[slots]
        reported = np.arange(len(rows)) if with_each_token else np.flatnonzero(special)
        now_s = self._clock_s()
        for i, slot, token, is_special in zip(
            reported.tolist(),
            slots[reported].tolist(),
            tokens[reported].tolist(),
            special[reported].tolist(),
            strict=True,
        ):
            sequence = table.sequences[slot]
            assert sequence is not None
            output = TokenOutput(sequence.group.request.request_id, [token], sequence.index)
            outputs.append(output)
            if is_special:
                row = int(kept[i])
                output.logprobs = [sampled.logprobs[row]] if row in sampled.logprobs else None
                stopped = bool(stops[i]) or self._stops_late(sequence, token, bool(may_stop[i]))
                self._finish(lane, sequence, output, stopped, bool(ends[i]), now_s)
        return outputs

    # --- planning ----------------------------------------------------------------------------

    def _plan(self, lane: Lane) -> Plan | None:
        num_preemptions = self.num_preemptions
        grown = self._grow(lane)
        if grown is None:
            return None
        slots, counts = grown
        # If anyone was preempted, it would come back at once.
        if lane.waiting and self.num_preemptions == num_preemptions:
            budget = self._max_batched_tokens - int(counts.sum())
            admitted_slots, admitted_counts = self._admit(lane, budget)
            slots = np.append(slots, admitted_slots)
            counts = np.append(counts, admitted_counts)
        if not len(slots):
            return None
        table = lane.slots
        starts = table.num_computed[slots]
        decodes = starts >= table.num_given[slots]
        num_decodes = num_single = int(np.count_nonzero(decodes))
        if num_decodes < len(slots):
            kinds = np.where(decodes, 0, np.where(counts == 1, 1, 2))
            num_single = int(np.count_nonzero(kinds <= 1))
            order = np.argsort(kinds, kind="stable")
            slots, counts, starts = slots[order], counts[order], starts[order]
        ends = starts + counts
        sampled = np.flatnonzero(ends == table.num_tokens[slots])
        table.num_computed[slots] = ends
        get_token = slots[sampled]
        table.num_tokens[get_token] += ~table.is_beam[get_token]
        admitted = slots[table.is_new[slots]]
        table.is_new[admitted] = False
        return Plan(
            lane=lane,
            spans=Spans.make(slots, starts, counts),
            serials=table.serial[slots],
            num_decodes=num_decodes,
            num_single=num_single,
            sampled=sampled,
            admitted=admitted,
        )

    def _grow(self, lane: Lane) -> tuple[IntArray, IntArray] | None:
        """Running sequences that go on, as (slots, counts), with room for their next tokens.

        None if the pool is short, and steps in flight have to be committed first.
        """
        table = lane.slots
        while True:
            refusal: DriverError | None = None
            try:
                if self._fork_waiting(lane):
                    slots, counts = self._next_tokens(table)
                    if lane.cache.reserve(slots, table.num_computed[slots] + counts):
                        return slots, counts
            except DriverError as error:
                refusal = error
            if self._num_in_flight:
                return None
            self._preempt_latest(refusal)

    def _next_tokens(self, table: SlotTable) -> tuple[IntArray, IntArray]:
        """What running sequences have to run, as (slots, counts), cut to the token budget."""
        slots = table.in_order
        # The very last token is never run.
        known = np.minimum(table.num_tokens[slots], table.max_total[slots] - 1)
        missing = known - table.num_computed[slots]
        if missing.sum() <= self._max_batched_tokens:
            runs = missing > 0
            return slots[runs], missing[runs]
        is_reading = table.num_computed[slots] < table.num_given[slots]
        order = np.argsort(is_reading & (missing > 1), kind="stable")
        slots, missing = slots[order], missing[order]
        before = np.cumsum(missing) - missing
        counts = np.clip(self._max_batched_tokens - before, 0, missing)
        slots, missing, counts = (part[counts > 0] for part in (slots, missing, counts))
        start = int(table.num_computed[slots[-1]])  # the last one may be cut
        counts[-1] = chunk_tokens(start, int(missing[-1]), int(counts[-1]))
        return slots, counts

    def _fork_waiting(self, lane: Lane) -> bool:
        """Let sequences begin whose parents have computed what they share.

        Returns: False if the pool is short; some of them may have begun.
        """
        if lane.slots.num_pending == 0:
            return True
        for group in lane.running:
            for sequence in group.sequences:
                if not self._try_fork(lane, sequence):
                    return False
        return True

    def _try_fork(self, lane: Lane, sequence: Sequence) -> bool:
        """Fork a sequence if it waits for that and its parent is ready; False if there is no room.

        The parent's progress is that of the plans so far: copies come after them on the device.
        """
        table, parent = lane.slots, sequence.parent
        if parent is None or parent.slot is None or sequence.slot is None:
            return True
        if parent.parent is not None or table.num_computed[parent.slot] < sequence.fork_tokens:
            return True
        if sequence.fork_tokens and not lane.cache.fork(
            parent.slot, sequence.slot, sequence.fork_tokens
        ):
            return False
        table.set_parent(sequence, None)
        table.begin(sequence, sequence.fork_tokens)
        if lane.prefixes is not None and parent.lease is not None:
            sequence.lease = lane.prefixes.fork(parent.lease)
        return True

    def _preempt_latest(self, refusal: DriverError | None) -> None:
        """Take the memory of the latest arrival among all running requests.

        If that is the only one, what it holds may be in pieces: blocks that are scattered over more
        pages than they need. When it begins again, they are not. But if the device itself refused,
        or the request has got nowhere since it began, as the process holds more memory than when it
        was taken in, then it fails, since trying again would not end.
        """
        lane, group = max(
            ((lane, group) for lane in self.lanes.values() for group in lane.running[-1:]),
            key=lambda pair: pair[1].arrival,
        )
        num_running = sum(len(lane.running) for lane in self.lanes.values())
        if num_running == 1 and self._forget_leases(lane, group):
            return
        got_nowhere = lane.slots.count_tokens(group) <= group.num_begun_with
        if num_running == 1 and (refusal is not None or got_nowhere):
            self._end_all(lane, group)
            self._fail(group, refusal)
            return
        if self._preemption is not None and self._swap_out(lane, self._preemption, group):
            lane.num_swaps += 1
        for sequence in group.sequences:
            self._unseat(lane, sequence)
        lane.running.remove(group)
        lane.num_preemptions += 1
        group.num_preemptions += 1
        lane.waiting.appendleft(group)

    def _forget_leases(self, lane: Lane, group: SequenceGroup) -> bool:
        """Let retained blocks be evicted that have the same KV as a group, beside its own."""
        leased = [s for s in group.sequences if s.lease is not None]
        for sequence in leased:
            assert lane.prefixes is not None
            assert sequence.lease is not None
            lane.prefixes.unlock(sequence.lease)
            sequence.lease = None
        return bool(leased)

    def _swap_out(self, lane: Lane, preemption: Preemption, group: SequenceGroup) -> bool:
        """Move the KV of a group to the host, if that is the cheaper way."""
        table = lane.slots
        movable = [s for s in group.live if s.slot is not None and s.parent is None]
        if len(movable) < len(group.live):
            return False  # it has hardly begun
        slots = [s.slot for s in movable if s.slot is not None]
        num_tokens = table.num_computed[slots].tolist()
        swapped = preemption.swap_out(lane.cache, slots, num_tokens, lane.recompute_s)
        if swapped is None:
            return False
        for sequence, kv in zip(movable, swapped, strict=True):
            sequence.swapped = kv
        return True

    # --- admission ---------------------------------------------------------------------------

    def _admit(self, lane: Lane, budget_tokens: int) -> tuple[IntArray, IntArray]:
        """Seat waiting requests as long as there is room.

        Returns: (slots, counts) of what they run in this step.
        """
        slots: list[int] = []
        counts: list[int] = []
        if not lane.admits_while_running and lane.running:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        while lane.waiting and budget_tokens > 0:
            group = lane.waiting[0]
            if self._first_blocked is not None and group.arrival > self._first_blocked:
                break
            if len(group.sequences) > lane.slots.num_free:
                break
            was_swapped = group.is_swapped
            has_room, refusal = self._try_bring_in(lane, group)
            is_alone = not self._any_running() and not self._num_in_flight
            if not has_room and is_alone and refusal is None:
                # Retained blocks may lie scattered over more pages than there are.
                self._discard_swapped(group)
                was_swapped = False
                has_room, refusal = self._try_bring_in(lane, group, may_match=False)
            if not has_room:
                if is_alone:
                    lane.waiting.popleft()
                    self._discard_swapped(group)
                    self._unblock(group)
                    self._fail(group, refusal)
                    continue
                self._first_blocked = group.arrival
                break
            self._unblock(group)
            lane.waiting.popleft()
            insort(lane.running, group, key=lambda g: g.arrival)
            group.num_begun_with = lane.slots.count_tokens(group)
            if group.scheduled_s is None:
                group.scheduled_s = self._clock_s()
            if was_swapped:
                continue  # room for its next tokens is a matter of the next plan
            for slot in [s.slot for s in group.sequences if s.slot is not None]:
                start = int(lane.slots.num_computed[slot])
                count = int(lane.slots.num_tokens[slot]) - start
                if count > 0 and budget_tokens > 0:
                    slots.append(slot)
                    counts.append(chunk_tokens(start, count, budget_tokens))
                    budget_tokens -= counts[-1]
        return np.array(slots, np.int64), np.array(counts, np.int64)

    def _try_bring_in(
        self, lane: Lane, group: SequenceGroup, *, may_match: bool = True
    ) -> tuple[bool, DriverError | None]:
        """`_bring_in`, and why the device refused if it did."""
        try:
            return self._bring_in(lane, group, may_match=may_match), None
        except DriverError as error:
            return False, error

    def _bring_in(self, lane: Lane, group: SequenceGroup, *, may_match: bool) -> bool:
        """Give a waiting request its slots and room for its tokens; if False, nothing changed.

        Args:
            lane: the model's.
            group: the request.
            may_match: whether to begin with what is retained, where the request allows that.
        """
        if group.is_swapped:
            return self._bring_back(lane, group)
        table, cache = lane.slots, lane.cache
        first, *others = group.live
        with ExitStack() as undo:
            match = None
            if lane.prefixes is not None and group.reads_prefixes and may_match:
                match = lane.prefixes.match(first.token_ids, group.request.cache_salt)
                first.lease = lane.prefixes.lock(match)
                undo.callback(self._unlock, lane, first, None)
            num_cached = 0 if match is None else match.num_tokens
            if not self._has_headroom(lane, group, num_cached):
                return False
            slot = None
            if match is not None and num_cached:
                slot = cache.preferred_slot(match.blocks, table.free)
            slot = self._seat(lane, first, slot)
            undo.callback(table.unseat, first)
            undo.callback(cache.release, slot)
            if match is not None and num_cached and not cache.adopt(slot, match.blocks, num_cached):
                return False
            if not cache.reserve(np.array([slot]), np.array([len(first.token_ids)])):
                return False
            for sequence in [] if cache.can_share else others:  # room for a copy of their own
                slot = self._seat(lane, sequence)
                undo.callback(table.unseat, sequence)
                undo.callback(cache.release, slot)
                if not cache.reserve(np.array([slot]), np.ones(1, np.int64)):
                    return False
            undo.pop_all()
        table.begin(first, num_cached)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
            if lane.prefixes is not None and first.lease is not None:
                lane.prefixes.record(first.lease, self._clock_s())
        self._seat_rest(lane, group)
        for sequence in others:
            # Its last token it runs itself, and samples what comes after.
            shared = _num_equal(first.token_ids, sequence.token_ids)
            sequence.fork_tokens = min(shared, len(sequence.token_ids) - 1)
            table.set_parent(sequence, first)
        return True

    def _bring_back(self, lane: Lane, group: SequenceGroup) -> bool:
        """The same for a request whose KV is on the host."""
        table = lane.slots
        assert self._preemption is not None
        if not self._has_headroom(lane, group, 0):
            return False
        swapped = [s.swapped for s in group.live if s.swapped is not None]
        with ExitStack() as undo:
            slots = []
            for sequence in group.live:
                slots.append(self._seat(lane, sequence))
                undo.callback(table.unseat, sequence)
            if not self._preemption.swap_in(lane.cache, slots, swapped):
                return False
            undo.pop_all()
        for sequence in group.live:
            assert sequence.swapped is not None
            table.begin(sequence, sequence.swapped.num_tokens)
            sequence.swapped = None
            if lane.prefixes is not None and group.reads_prefixes:
                match = lane.prefixes.match(sequence.token_ids, group.request.cache_salt)
                sequence.lease = lane.prefixes.lock(match)
        self._seat_rest(lane, group)
        return True

    def _seat(self, lane: Lane, sequence: Sequence, slot: int | None = None) -> int:
        slot = lane.slots.seat(sequence, slot)
        group = sequence.group
        lane.cache.expect(slot, group.num_prompt_tokens, group.max_total)
        return slot

    def _seat_rest(self, lane: Lane, group: SequenceGroup) -> None:
        """Slots for sequences that begin later; there are enough."""
        for sequence in group.sequences:
            if sequence.slot is None:
                self._seat(lane, sequence)

    def _has_headroom(self, lane: Lane, group: SequenceGroup, num_cached: int) -> bool:
        """Whether admitting leaves room for running sequences to grow.

        Without that, a request just admitted would be preempted a few steps later, and its prompt
        computed for nothing.
        """
        num_running = sum(other.slots.num_taken for other in self.lanes.values())
        if not num_running or not lane.cache.can_share:  # what is reserved at once does not grow
            return True
        needed_bytes = lane.cache.bytes_needed(len(group.live[0].token_ids) + 1)
        needed_bytes -= num_cached * lane.cache.layout.token_bytes
        for sequence in group.live[1:]:
            shared = _num_equal(group.live[0].token_ids, sequence.token_ids)
            needed_bytes += lane.cache.bytes_needed(len(sequence.token_ids) + 1 - shared)
        run_tokens = _RUN_TOKENS if group.num_preemptions else 1
        for other in self.lanes.values():
            table, cache = other.slots, other.cache
            slots = table.in_order
            left = (table.max_total[slots] - table.num_tokens[slots]).clip(0, run_tokens)
            if other is lane and group.num_preemptions:
                left = np.append(left, np.full(len(group.live), run_tokens))
            page_bytes = max(self._pool.page_bytes, cache.layout.token_bytes)
            growth = np.maximum(left * cache.layout.token_bytes, (left > 0) * page_bytes)
            needed_bytes += int(growth.sum())
        free_bytes = self._pool.free_bytes
        if free_bytes >= needed_bytes:
            return True
        return free_bytes + self._evictable_bytes >= needed_bytes

    @property
    def _evictable_bytes(self) -> int:
        """What retained prefixes would give up."""
        return sum(
            lane.prefixes.evictable_bytes
            for lane in self.lanes.values()
            if lane.prefixes is not None
        )

    def _unblock(self, group: SequenceGroup) -> None:
        """The request waits for memory no longer, so it holds up nobody else."""
        if self._first_blocked == group.arrival:
            self._first_blocked = None

    def _any_running(self) -> bool:
        return any(lane.running for lane in self.lanes.values())

    # --- endings -----------------------------------------------------------------------------

    def _unseat(self, lane: Lane, sequence: Sequence) -> None:
        """Take a sequence's slot and memory; what others could use of its KV stays."""
        if sequence.slot is None:
            return
        self._unlock(lane, sequence, self._clock_s())
        lane.cache.release(sequence.slot)
        lane.slots.unseat(sequence)

    def _unlock(self, lane: Lane, sequence: Sequence, now_s: float | None) -> None:
        """End a sequence's lease of retained prefixes, after adding its own KV to them."""
        if lane.prefixes is None or sequence.lease is None:
            return
        if now_s is not None:
            self._retain(lane, sequence, now_s)
        lane.prefixes.unlock(sequence.lease, now_s)
        sequence.lease = None

    def _retain(self, lane: Lane, sequence: Sequence, now_s: float) -> None:
        """Keep what a sequence has computed, for others and for later."""
        if lane.prefixes is None or sequence.lease is None or sequence.parent is not None:
            return
        assert sequence.slot is not None
        tokens = lane.slots.tokens(sequence)
        # Of a token that is not known yet, nobody can ask for the KV.
        num_known = len(tokens) - 1
        num_computed = min(int(lane.slots.num_computed[sequence.slot]), num_known)
        lane.prefixes.insert(sequence.lease, sequence.slot, tokens, num_computed, now_s)

    def _end(self, lane: Lane, sequence: Sequence) -> None:
        """A sequence has ended. Whoever is to fork from it does so now, or computes for itself."""
        group, table = sequence.group, lane.slots
        heir: Sequence | None = None  # who computes in its place what others wait for
        for other in [s for s in group.sequences if s.parent is sequence]:
            if heir is not None:
                other.fork_tokens = min(
                    other.fork_tokens, _num_equal(heir.token_ids, other.token_ids)
                )
                table.set_parent(other, heir)
                continue
            with suppress(DriverError):  # without sharing it will do as well
                self._try_fork(lane, other)
            if other.parent is not None:
                heir = other
                table.set_parent(other, None)
                table.begin(other)
        self._unseat(lane, sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            lane.running.remove(group)

    def _end_all(self, lane: Lane, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            self._unseat(lane, sequence)
        group.sequences.clear()
        lane.running.remove(group)

    def _discard_swapped(self, group: SequenceGroup) -> None:
        swapped = [s.swapped for s in group.sequences if s.swapped is not None]
        if swapped:
            assert self._preemption is not None
            self._preemption.discard(swapped)
        for sequence in group.sequences:
            sequence.swapped = None

    def _fail(self, group: SequenceGroup, refusal: DriverError | None) -> None:
        group.sequences.clear()
        output = TokenOutput(group.request.request_id, finish_reason="error")
        reason = refusal or "beside weights and overhead the pool has no room for this request"
        output.error = f"the device is out of memory: {reason}"
        output.timing = _timing(group, self._clock_s())
        self._failed.append(output)

    def _stops_late(self, sequence: Sequence, token: int, may_stop: bool) -> bool:
        """Stop tokens beyond those that the array has room for."""
        stop_ids = sequence.group.stop_ids
        return may_stop and len(stop_ids) > STOP_IDS_PER_SLOT and token in stop_ids

    def _finish(
        self,
        lane: Lane,
        sequence: Sequence,
        output: TokenOutput,
        stopped: bool,
        ended: bool,
        now_s: float,
    ) -> None:
        """The uncommon part of a step's output: the first token, and the last."""
        group = sequence.group
        if not sequence.has_output:
            sequence.has_output = True
            output.prompt_logprobs = sequence.prompt_logprobs
            self._note_first(lane, sequence, output, now_s)
        if stopped or ended:
            reason: FinishReason = "stop" if stopped else "length"
            output.finish_reason = reason
            if stopped and output.token_ids[0] not in group.eos_ids:
                output.stop_reason = output.token_ids[0]
            output.timing = _timing(group, now_s)
            self._end(lane, sequence)

    def _note_first(
        self, lane: Lane, sequence: Sequence, output: TokenOutput | None, now_s: float
    ) -> None:
        """A sequence has computed its prompt."""
        group = sequence.group
        self._retain(lane, sequence, now_s)
        if group.first_token_s is None:
            group.first_token_s = now_s
            if output is not None:
                output.num_cached_tokens = group.num_cached_tokens or 0

    # --- beams -------------------------------------------------------------------------------

    def _commit_beams(
        self, lane: Lane, sequences: Iterable[Sequence | None], reports: list[TokenLogprobs]
    ) -> list[TokenOutput]:
        """Note what may follow each beam; a search of which all beams are known goes on."""
        groups: dict[int, SequenceGroup] = {}
        for sequence, report in zip(sequences, reports, strict=True):
            assert sequence is not None
            assert sequence.group.beams is not None
            sequence.group.beams.candidates[sequence] = report
            groups[sequence.group.arrival] = sequence.group
        outputs: list[TokenOutput] = []
        for group in groups.values():
            beams = group.beams
            if beams is not None and len(beams.candidates) == len(beams.live):
                if group.first_token_s is None:
                    self._note_first(lane, beams.live[0], None, self._clock_s())
                self._advance(lane, group, beams)
                if beams.search.finished:
                    outputs += self._results(group, beams)
                    self._end_all(lane, group)
        return outputs

    def _advance(self, lane: Lane, group: SequenceGroup, beams: Beams) -> None:
        """Go on with the best continuations of all beams.

        The first one of each beam stays in its slot. The others take slots of beams that have no
        continuation, and fork before the next step.
        """
        table = lane.slots
        parents = beams.live
        reports = [beams.candidates[parent] for parent in parents]
        beams.candidates.clear()
        # The first entry of each is the token that was sampled, which has no meaning here.
        chosen = beams.search.advance(
            np.array([report.token_ids[1:] for report in reports], np.int64),
            np.array([report.logprobs[1:] for report in reports], np.float32),
        )
        if not chosen:
            return
        children: list[Sequence] = []
        going_on = {parents[index] for index, _ in chosen}
        idle = [s for s in group.sequences if s not in going_on]
        for sequence in idle:
            if sequence in parents:
                self._clear(lane, sequence)
        tokens = [table.tokens(parent).copy() for parent in parents]
        in_place: set[Sequence] = set()
        for index, token in chosen:
            parent = parents[index]
            known = np.append(tokens[index], np.int32(token))
            if parent not in in_place:
                in_place.add(parent)
                slot = parent.slot
                assert slot is not None
                table.token_ids[slot, len(known) - 1] = token
                table.num_tokens[slot] = len(known)
                children.append(parent)
            else:
                child = idle.pop()
                child.token_ids = known
                child.fork_tokens = len(known) - 1
                table.set_parent(child, parent)
                children.append(child)
        beams.live = children

    def _clear(self, lane: Lane, sequence: Sequence) -> None:
        """Give back the memory of a beam that does not go on; it keeps its slot for another."""
        slot = sequence.slot
        assert slot is not None
        if lane.prefixes is not None and sequence.lease is not None:
            lane.prefixes.unlock(sequence.lease, self._clock_s())
            sequence.lease = None
        lane.cache.release(slot)
        lane.slots.num_tokens[slot] = lane.slots.num_computed[slot] = 0

    def _results(self, group: SequenceGroup, beams: Beams) -> list[TokenOutput]:
        now_s = self._clock_s()
        outputs = []
        for index, found in enumerate(beams.search.results()):
            output = TokenOutput(group.request.request_id, found.token_ids, index)
            output.finish_reason = found.finish_reason
            output.cumulative_logprob = found.cumulative_logprob
            last = found.token_ids[-1]
            if found.finish_reason == "stop" and last not in group.eos_ids:
                output.stop_reason = last
            output.timing = _timing(group, now_s)
            output.num_cached_tokens = (group.num_cached_tokens or 0) if index == 0 else 0
            outputs.append(output)
        return outputs


def _num_equal(left: TokenIds, right: TokenIds) -> int:
    """How many of the first tokens are the same."""
    count = min(len(left), len(right))
    differs = np.flatnonzero(left[:count] != right[:count])
    return int(differs[0]) if len(differs) else count


def _timing(group: SequenceGroup, now_s: float) -> RequestTiming:
    return RequestTiming(group.request.arrival_s, group.scheduled_s, group.first_token_s, now_s)
