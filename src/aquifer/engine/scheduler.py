"""Scheduler: continuous batching under one budget of memory.

The scheduler keeps the books: it plans steps, commits their results, and is the only writer of a
sequence's progress. It counts tokens, and asks each model's cache manager for room. Its decisions
are in `aquifer.engine.policies`. Its own rules, in this order:

1. Models take turns, a step each.
2. Running sequences go first: those that decode, then those still reading their prompt, each in
   order of arrival, until the step's token budget is used up.
3. When the pool is short, a victim among all running requests of all models is preempted with all
   of its sequences (PagedAttention, section 4.5): its KV is swapped to the host or computed again
   later. It may be the request that asked for room.
4. Then waiting requests are admitted, if there is room for all tokens that they have, and a little
   more for each running sequence to grow by (`aquifer.engine.headroom`). None is admitted in the
   step of a preemption, or the victim would come back at once.

By default requests are admitted in order of arrival, a preempted one before all others, and the
latest arrival is the victim. So the earliest arrival always ends, and with it all others in turn:
no deadlock, no starvation. A request that would not fit alone is refused when it arrives.

A request with several sequences computes its prompt once: in the first of them. The others have
their slots from the start, and fork from it (`Sequence.parent`) when all of the prompt but the last
token is computed; that token they run themselves, each with its own random numbers. Sequences that
come back together share in the same way. The beams of a search fork when two continue the same one.

A step may be planned while the one before it is in flight. So a plan counts as done at once, with
the most tokens that it may bring; `commit` fills in the tokens later and subtracts the missing
ones. Two things follow:

- A sequence that turns out to have ended may have been planned once more. The next sequence in its
  slot has another serial number, and what was computed for the old one is dropped.
- Before a request is preempted, the steps in flight are committed: they may end sequences, and the
  victim must know all of its tokens.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.engine import entry
from aquifer.engine.committing import commit_beams, commit_tokens, timing
from aquifer.engine.headroom import Headroom
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.planning import all_decode, chunk_tokens, make_step, next_tokens
from aquifer.engine.policies import AdmissionSnapshot, ModelState, Policies
from aquifer.engine.preemption import Preemption
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.snapshots import Candidates, running_request
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.errors import DriverError
from aquifer.memory.room import Room


class Scheduler:
    """Plans steps and commits their results.

    Args:
        room: room of the pool that all lanes share.
        max_batched_tokens: most tokens of one step.
        preemption: moves the KV of preempted requests; None to compute it again always.
        clock_s: returns the time in seconds.
        policies: the decisions; None for the default ones.
    """

    def __init__(
        self,
        room: Room,
        max_batched_tokens: int,
        preemption: Preemption | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        policies: Policies | None = None,
    ) -> None:
        self.lanes: dict[str, Lane] = {}
        self._max_batched_tokens = max_batched_tokens
        self._preemption = preemption
        self._clock_s = clock_s
        self._policies = policies or Policies()
        self._headroom = Headroom(room, self.lanes)
        self._num_turns = 0
        # Arrival of the request that was last refused memory and is still waiting.
        self._blocked_arrival: int | None = None
        self._failed: list[TokenOutput] = []

    # --- requests ----------------------------------------------------------------------------

    def add_lane(self, lane: Lane) -> None:
        """Begin to serve a model."""
        self.lanes[lane.name] = lane

    def remove_lane(self, name: str) -> None:
        """Stop serving a model.

        Pre-condition: none of its requests waits or runs, and no step of it is in flight.
        """
        del self.lanes[name]

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return any(lane.has_work for lane in self.lanes.values())

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
        """End a request, or one completion of it; if it runs, its pages are free at once."""
        if index is not None and any(s.index != index for s in group.sequences):
            self._discard_swapped(group)  # the copies of several refer to each other
            for sequence in [s for s in group.sequences if s.index == index]:
                lane.end(sequence, self._clock_s())
        elif group in lane.waiting:
            lane.waiting.remove(group)
            self._discard_swapped(group)
            self._unblock(group)
            group.sequences.clear()
        elif group in lane.running:
            lane.end_all(group, self._clock_s())

    def take_failed(self) -> list[TokenOutput]:
        """Last outputs of requests that failed since the last call: for lack of memory, or with a
        step that was dropped."""
        failed, self._failed = self._failed, []
        return failed

    # --- planning ----------------------------------------------------------------------------

    def plan(self) -> StepInput | None:
        """Plan the next step of the next model that has one; to be run, and committed or dropped.

        None if nothing can run, for example because the pool is short and the steps in flight have
        to be committed first.
        """
        lanes = list(self.lanes.values())
        states = [
            ModelState(lane.name, len(lane.waiting), len(lane.running), lane.last_turn)
            for lane in lanes
        ]
        for index in self._policies.turns(states):
            lane = lanes[index]
            if not lane.is_resident:
                continue
            lane.last_turn = self._num_turns
            self._num_turns += 1
            plan = self._plan(lane)
            if plan is not None:
                lane.in_flight.append(plan)
                return plan
        return None

    def _plan(self, lane: Lane) -> StepInput | None:
        num_preemptions = self.num_preemptions
        grown = self._grow(lane)
        if grown is None:
            return None
        slots, counts = grown
        if lane.waiting and self.num_preemptions == num_preemptions:
            budget = self._max_batched_tokens - int(counts.sum())
            admitted_slots, admitted_counts = self._admit(lane, budget)
            if len(admitted_slots):
                slots = np.append(slots, admitted_slots)
                counts = np.append(counts, admitted_counts)
        if not len(slots):
            return None
        lane.cache.upload()
        return make_step(lane.name, lane.slots, slots, counts, lane.take_journal())

    def _grow(self, lane: Lane) -> tuple[IntArray, IntArray] | None:
        """Running sequences of the next step as (slots, counts), with room for these tokens.

        None if the pool is short, and steps in flight have to be committed first.
        """
        table = lane.slots
        while True:
            refusal: DriverError | None = None
            try:
                if lane.fork_waiting():
                    slots, counts = next_tokens(table, self._max_batched_tokens)
                    if lane.cache.reserve(slots, table.num_computed[slots] + counts):
                        return slots, counts
            except DriverError as error:
                refusal = error
            if self._has_in_flight():
                return None
            self._preempt(refusal)

    def _preempt(self, refusal: DriverError | None) -> None:
        """Preempt a running request.

        If it runs alone, its blocks may be scattered over more pages than they need; when it begins
        again, they are not. But it fails if the device refused, or if it got no further since it
        was admitted, because the process holds more memory by now: to try again would not end.
        """
        running = [(lane, group) for lane in self.lanes.values() for group in lane.running]
        lane, group = running[self._policies.victims([running_request(*pair) for pair in running])]
        if len(running) == 1:
            if lane.forget_leases(group):
                return
            if refusal is not None or not lane.has_progressed(group):
                lane.end_all(group, self._clock_s())
                self._fail(group, _out_of_memory(refusal))
                return
        self._make_wait(lane, group)

    def preempt_all(self, lane: Lane) -> None:
        """Preempt all running requests of a model. Pre-condition: no step of it is in flight.

        Its requests then wait for more than room for their KV, so they hold up no others.
        """
        for group in reversed(list(lane.running)):
            self._make_wait(lane, group)
        for group in lane.waiting:
            self._unblock(group)

    def _make_wait(self, lane: Lane, group: SequenceGroup) -> None:
        """Take slots and memory of a running request, and put it at the head of the queue."""
        if self._preemption is not None and entry.swap_out(lane, group, self._preemption):
            lane.num_swaps += 1
        for sequence in group.sequences:
            lane.release_slot(sequence, self._clock_s())
        lane.running.remove(group)
        lane.num_preemptions += 1
        group.num_preemptions += 1
        lane.waiting.insert(0, group)

    # --- steps that repeat -------------------------------------------------------------------

    def repeats(self, plan: StepInput, *, has_freed: bool) -> bool:
        """Whether the next steps are like a committed one: the same sequences, a token each.

        That is so until a sequence ends, a request arrives, or the pool is short. For a replay,
        which then does these steps at once (`aquifer.engine.committing.skip_steps`).

        Args:
            plan: the latest step, committed.
            has_freed: whether a sequence has ended in it or was preempted for it.
        """
        lane = self.lanes[plan.model]
        others = [other for other in self.lanes.values() if other is not lane]
        if any(other.has_work for other in others) or not all_decode(lane.slots):
            return False
        return not lane.waiting or (not has_freed and self._is_queue_stuck(lane, plan))

    def _is_queue_stuck(self, lane: Lane, plan: StepInput) -> bool:
        """Whether the first waiting request was refused, and will be until a sequence ends.

        Neither memory nor slots come free before that. So it was refused if the plan had tokens
        left for it. That changes with prefixes that were added since, which it could use. And a
        request that was preempted may find room later: what must be left for all others
        (`aquifer.engine.headroom`) shrinks as they approach their ends.
        """
        was_tried = plan.spans.num_tokens < self._max_batched_tokens
        adds_prefixes = lane.prefixes is not None and plan.num_decodes < len(plan.spans.slots)
        return was_tried and not adds_prefixes and lane.waiting[0].num_preemptions == 0

    # --- admission ---------------------------------------------------------------------------

    def _admit(self, lane: Lane, budget_tokens: int) -> tuple[IntArray, IntArray]:
        """Admit waiting requests as long as there is room.

        Returns: (slots, counts) of the tokens that they run in this step.
        """
        slots: list[int] = []
        counts: list[int] = []
        num_running = len(lane.running)
        while lane.waiting and budget_tokens > 0:
            index = self._policies.admission(
                AdmissionSnapshot(
                    waiting=Candidates(lane.waiting),
                    num_running=num_running,
                    num_free_slots=lane.slots.num_free,
                    blocked_arrival=self._blocked_arrival,
                )
            )
            if index is None or len(lane.waiting[index].sequences) > lane.slots.num_free:
                break
            group = lane.waiting[index]
            was_swapped = group.is_swapped
            has_room, refusal = self._bring_in(lane, group)
            is_alone = not self._any_running() and not self._has_in_flight()
            if not has_room and is_alone and refusal is None:
                # Retained blocks may be scattered over more pages than there are.
                self._discard_swapped(group)
                was_swapped = False
                has_room, refusal = self._bring_in(lane, group, may_match=False)
            if not has_room:
                if is_alone:
                    del lane.waiting[index]
                    self._discard_swapped(group)
                    self._unblock(group)
                    self._fail(group, _out_of_memory(refusal))
                    continue
                self._blocked_arrival = group.arrival
                break
            self._unblock(group)
            del lane.waiting[index]
            insort(lane.running, group, key=lambda g: g.arrival)
            lane.note_progress(group)
            if group.scheduled_s is None:
                group.scheduled_s = self._clock_s()
            if was_swapped:
                continue  # its next tokens run in the next step
            for slot in [s.slot for s in group.sequences if s.slot is not None]:
                start = int(lane.slots.num_computed[slot])
                count = int(lane.slots.num_tokens[slot]) - start
                if count > 0 and budget_tokens > 0:
                    slots.append(slot)
                    counts.append(chunk_tokens(start, count, budget_tokens))
                    budget_tokens -= counts[-1]
        return np.array(slots, np.int64), np.array(counts, np.int64)

    def _bring_in(
        self, lane: Lane, group: SequenceGroup, *, may_match: bool = True
    ) -> tuple[bool, DriverError | None]:
        """Try to admit a request; whether it got slots and memory, and the device's error."""
        try:
            if group.is_swapped:
                assert self._preemption is not None
                return entry.bring_back(lane, group, self._headroom, self._preemption), None
            now_s = self._clock_s()
            return (
                entry.bring_in(lane, group, self._headroom, now_s, may_match=may_match),
                None,
            )
        except DriverError as error:
            return False, error

    def _unblock(self, group: SequenceGroup) -> None:
        """The request no longer waits for memory, so it does not block others."""
        if self._blocked_arrival == group.arrival:
            self._blocked_arrival = None

    def _any_running(self) -> bool:
        return any(lane.running for lane in self.lanes.values())

    def _has_in_flight(self) -> bool:
        return any(lane.in_flight for lane in self.lanes.values())

    def _discard_swapped(self, group: SequenceGroup) -> None:
        swapped = [s.swapped for s in group.sequences if s.swapped is not None]
        if swapped:
            assert self._preemption is not None
            self._preemption.discard(swapped)
        for sequence in group.sequences:
            sequence.swapped = None

    def _fail(self, group: SequenceGroup, error: str) -> None:
        group.sequences.clear()
        output = TokenOutput(group.request.request_id, finish_reason="error", error=error)
        output.timing = timing(group, self._clock_s())
        self._failed.append(output)

    # --- committing --------------------------------------------------------------------------

    def commit(
        self, plan: StepInput, result: StepOutput, *, with_each_token: bool = True
    ) -> list[TokenOutput]:
        """Commit the earliest plan in flight: fill in its tokens, and end sequences that are done.

        Args:
            plan: the step that was run.
            result: its results.
            with_each_token: False to report only first and last tokens of sequences and outputs
                with extras, to a caller that makes up the tokens itself.

        Returns: an output for each sequence that got tokens and was not ended before.
        """
        lane = self.lanes[plan.model]
        lane.in_flight.popleft()
        spans, table = plan.spans, lane.slots
        runs_still = table.serial[spans.slots] == plan.serials
        for (index, position), report in result.prompt_logprobs.items():
            sequence = table.sequences[spans.slots[index]] if runs_still[index] else None
            if sequence is not None:
                assert sequence.prompt_logprobs is not None
                sequence.prompt_logprobs[position] = report
        kept = runs_still[plan.sampled].nonzero()[0]
        slots = spans.slots[plan.sampled[kept]]
        outputs: list[TokenOutput] = []
        now_s = self._clock_s()
        is_chosen_here = table.most_new[slots] == 0
        if np.count_nonzero(is_chosen_here):
            rows = kept[is_chosen_here].tolist()
            beams = slots[is_chosen_here].tolist()
            outputs += commit_beams(lane, beams, rows, result, now_s)
            kept, slots = kept[~is_chosen_here], slots[~is_chosen_here]
        return outputs + commit_tokens(lane, plan, result, kept, slots, with_each_token, now_s)

    def drop(self, plan: StepInput, error: str) -> None:
        """Take back the latest plan in flight of a model: it was not run, or not to its end.

        Its requests that still run end with an error, which `take_failed` returns, and nothing of
        their KV is retained. If plans before it are in flight too, they can still be committed. If
        a journal is kept, the follower must still execute the plan's `kv_ops`.

        Args:
            plan: the plan.
            error: why; for the clients of its requests.
        """
        lane = self.lanes[plan.model]
        lane.in_flight.pop()
        slots, table = plan.spans.slots, lane.slots
        running = [table.sequences[slot] for slot in slots[table.serial[slots] == plan.serials]]
        groups = {s.group.arrival: s.group for s in running if s is not None}
        for group in groups.values():
            lane.end_all(group, None)
            self._fail(group, error)


def _out_of_memory(refusal: DriverError | None) -> str:
    """The error of a request that found no room; `refusal` is the device's, if there was one."""
    reason = refusal or "beside weights and overhead the pool has no room for this request"
    return f"the device is out of memory: {reason}"
