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

By default requests of one client are admitted in order of arrival, a preempted one before all
others, and the latest arrival is the victim. So the earliest arrival always ends, and with it all
others in turn: no deadlock, no starvation. A request that would not fit alone is refused when it
arrives.

Clients, that is API keys, share fairly. The one that was served the fewest tokens comes first; one
that has nothing running takes a place from the one that holds the most; and for a small share of
the time, clients with few sequences run in steps of their own, so that they need not wait at each
token for another one's hundreds. With one client, none of this changes anything.

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
from collections.abc import Callable

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.engine import entry
from aquifer.engine.admitter import Admitter
from aquifer.engine.clients import Clients
from aquifer.engine.committing import commit_beams, commit_tokens, timing
from aquifer.engine.express_time import ExpressTime
from aquifer.engine.headroom import Headroom
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.planning import StepBudget, make_step, next_tokens
from aquifer.engine.policies import DisplacementSnapshot, ModelState, Policies
from aquifer.engine.preemption import Preemption
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.snapshots import (
    active_clients,
    asked,
    candidate,
    is_stuck,
    running_request,
    running_sequences,
)
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.errors import DriverError
from aquifer.memory.room import Room


class Scheduler:
    """Plans steps and commits their results.

    Args:
        room: room of the pool that all lanes share.
        budget: tokens of a step.
        preemption: moves the KV of preempted requests; None to compute it again always.
        clock_s: returns the time in seconds.
        policies: the decisions; None for the default ones.
        express_share: the most of the time that express steps may take, from 0 to 1.
        plans_by_forecasts: whether admission counts with forecasts of lengths, where there are any.

    Attributes:
        lanes: by the names of their models.
        budget: as given.
        admitter: brings waiting requests into the batch.
    """

    def __init__(
        self,
        room: Room,
        budget: StepBudget,
        preemption: Preemption | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        policies: Policies | None = None,
        express_share: float = 0.0,
        *,
        plans_by_forecasts: bool = True,
    ) -> None:
        self.lanes: dict[str, Lane] = {}
        self.budget = budget
        self._preemption = preemption
        self._clock_s = clock_s
        self._policies = policies or Policies()
        self._clients = Clients()
        self._express_time = ExpressTime(express_share, clock_s)
        self.admitter = Admitter(
            self.lanes,
            Headroom(room, self.lanes, plans_by_forecasts=plans_by_forecasts),
            preemption,
            self._clients,
            self._policies,
            clock_s,
            self._refuse,
        )
        self._num_turns = 0
        self._awaits_commits = False  # whether a plan has failed only for steps in flight
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

    def num_waiting_of(self, client: str) -> int:
        """Waiting requests of a client, of all models."""
        number = self._clients.number(client)
        return sum(len(lane.waiting.of(number)) for lane in self.lanes.values())

    def add(self, lane: Lane, group: SequenceGroup) -> None:
        """Put a new request at the end of its client's queue."""
        group.client = self._clients.number(group.request.client)
        if lane.forecaster is not None:
            group.outlook = lane.forecaster.arrive(asked(group))
        if len(self._clients) > 1:
            active = active_clients(self.lanes.values(), self._clients)
            if group.client not in active:
                self._clients.arrive(group.client, active)
        lane.waiting.append(group)

    def abort(self, lane: Lane, group: SequenceGroup, index: int | None = None) -> None:
        """End a request, or one completion of it; if it runs, its pages are free at once."""
        if index is not None and any(s.index != index for s in group.sequences):
            entry.discard_swapped(group, self._preemption)  # copies of several refer to each other
            group.match = None  # it may be of the tokens of the completion that ends
            for sequence in [s for s in group.sequences if s.index == index]:
                lane.end(sequence, self._clock_s())
        elif group in lane.waiting:
            self.admitter.forget(lane, group)
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

        None if nothing can run, or if steps in flight have to be committed first. Without any it
        may be None only after a preemption; then another call has a plan.
        """
        lanes = [lane for lane in self.lanes.values() if lane.is_resident]
        states = [
            ModelState(lane.name, len(lane.waiting), len(lane.running), lane.last_turn)
            for lane in lanes
        ]
        for index in self._policies.turns(states):
            lane = lanes[index]
            last_turn, lane.last_turn = lane.last_turn, self._num_turns
            self._num_turns += 1
            self._awaits_commits = False
            with lane.being_planned():
                # Planning those before it may have evicted its weights.
                plan = self._plan(lane) if lane.is_resident else None
            if plan is not None:
                lane.in_flight.append(plan)
                return plan
            if self._awaits_commits:  # as it would be again, if another model had its turn
                lane.last_turn = last_turn
                break
        return None

    def _plan(self, lane: Lane) -> StepInput | None:
        """Plan the next step of a model, if it has one."""
        if len(self._clients) > 1:
            if not self._make_place(lane):
                return None
            chosen = self._express_clients(lane)
            step = self._plan_for(lane, chosen) if chosen else None
            if step is not None:
                return step
        return self._plan_for(lane, None)

    def _plan_for(self, lane: Lane, clients: frozenset[int] | None) -> StepInput | None:
        """Plan a step of the sequences of some clients, or of all."""
        num_preemptions = self.num_preemptions
        most = self.budget.tokens(lane.slots, lane.recompute_s, lane.captured_sizes, lane.waiting)
        grown = self._grow(lane, clients, most)
        if grown is None:
            return None
        slots, counts = grown
        num_running = len(lane.running)
        if lane.waiting and self.num_preemptions == num_preemptions:
            num_tokens = int(counts.sum())
            enough = None
            if not self._has_in_flight():
                enough = self.budget.enough_tokens(lane.recompute_s)
            admitted_slots, admitted_counts = self.admitter.admit(
                lane,
                most - num_tokens,
                clients,
                enough_tokens=None if enough is None else enough - num_tokens,
            )
            if len(admitted_slots):
                slots = np.concatenate((slots, admitted_slots))
                counts = np.concatenate((counts, admitted_counts))
        if not len(slots):
            if len(lane.running) > num_running:  # all were copied back from the host
                return self._plan_for(lane, clients)
            return None
        lane.cache.upload()
        journal = lane.take_journal()
        step = make_step(lane.name, lane.slots, slots, counts, journal, is_express=bool(clients))
        self._clients.charge(step, lane.slots.client)
        return step

    def _grow(
        self, lane: Lane, clients: frozenset[int] | None, most_tokens: int
    ) -> tuple[IntArray, IntArray] | None:
        """Running sequences of the next step as (slots, counts), with room for these tokens; None
        if the pool is short, and steps in flight have to be committed first."""
        table = lane.slots
        while True:
            refusal: DriverError | None = None
            mark = self.admitter.held.mark()
            try:
                running = lane.runnable(self._clock_s())
                if running is not None:
                    lane.give_back(self._clock_s())
                    if clients is not None:
                        running = running[np.isin(table.client[running], list(clients))]
                    slots, counts = next_tokens(table, running, most_tokens)
                    if lane.cache.reserve(slots, table.num_computed[slots] + counts):
                        return slots, counts
            except DriverError as error:
                refusal = error
            if self._has_in_flight():
                self._awaits_commits = True
                return None
            self._preempt(refusal, is_held=self.admitter.held.was_any(mark))

    def _preempt(self, refusal: DriverError | None, *, is_held: bool) -> None:
        """Preempt a running request: the one that no others could make place for, or a victim.

        If it runs alone, it begins anew (`SequenceGroup.begins_anew`). But it fails if the device
        refused, or if it has just begun anew and nothing is held, because the process holds more
        memory by now.
        """
        running = [(lane, group) for lane in self.lanes.values() for group in lane.running]
        chosen = next((number for number, pair in enumerate(running) if is_stuck(*pair)), None)
        if chosen is None:
            chosen = self._policies.victims([running_request(*pair) for pair in running])
        lane, group = running[chosen]
        if len(running) == 1:
            if lane.forget_leases(group):
                return
            if refusal is not None or (lane.is_beginning_anew(group) and not is_held):
                lane.end_all(group, self._clock_s())
                self._fail(group, _out_of_memory(refusal))
                return
        self._make_wait(lane, group, begins_anew=len(running) == 1)
        self.admitter.block(group)

    def preempt_all(self, lane: Lane) -> None:
        """Preempt all running requests of a model. Pre-condition: no step of it is in flight."""
        for group in reversed(list(lane.running)):
            self._make_wait(lane, group)

    def unblock(self, lane: Lane) -> None:
        """Let requests of a model hold up no others: they wait for its weights now."""
        for group in lane.waiting:
            self.admitter.unblock(group)

    def _make_wait(self, lane: Lane, group: SequenceGroup, *, begins_anew: bool = False) -> None:
        """Take slots and memory of a running request, and put it at the head of the queue."""
        group.begins_anew = begins_anew
        if self._preemption is not None and entry.swap_out(lane, group, self._preemption):
            lane.num_swaps += 1
        for sequence in group.sequences:
            lane.release_slot(sequence, self._clock_s())
        lane.running.remove(group)
        lane.num_preemptions += 1
        group.num_preemptions += 1
        lane.waiting.put_back(group)

    # --- sharing between clients ---------------------------------------------------------------

    def observe(self, step: StepInput, seconds: float) -> None:
        """Learn how long a step took."""
        if step.is_express:
            self._express_time.take(seconds)

    def _make_place(self, lane: Lane) -> bool:
        """Preempt a request so that the next one gets in, if the policy says so.

        Returns: False if steps in flight have to be committed first.
        """
        group = self.admitter.next(lane) if lane.waiting else None
        if group is None:
            return True
        lacks_slots = len(group.sequences) > lane.slots.num_free
        if not lacks_slots and group is not self.admitter.blocked:
            return True
        lanes = [lane] if lacks_slots else list(self.lanes.values())
        running = [(other, holder) for other in lanes for holder in other.running]
        index = self._policies.displacement(
            DisplacementSnapshot(
                candidate(group), lacks_slots, [running_request(*pair) for pair in running]
            )
        )
        if index is None:
            return True
        if self._has_in_flight():
            self._awaits_commits = True
            return False
        self._make_wait(*running[index])
        return True

    def _express_clients(self, lane: Lane) -> frozenset[int]:
        """The clients that run in the next step of a model alone; none if all run in it."""
        if not self._express_time.is_left():
            return frozenset()
        num_sequences = running_sequences(lane, self._clients)
        blocked = self.admitter.blocked
        for client in lane.waiting.clients:
            if num_sequences[client] == 0 and (blocked is None or blocked.client != client):
                num_sequences[client] = len(lane.waiting.of(client)[0].sequences)
        present = num_sequences.nonzero()[0].tolist()
        if len(present) < 2:
            return frozenset()
        return self._policies.express({client: int(num_sequences[client]) for client in present})

    def _refuse(self, group: SequenceGroup, refusal: DriverError | None) -> None:
        self._fail(group, _out_of_memory(refusal))

    def _has_in_flight(self) -> bool:
        return any(lane.in_flight for lane in self.lanes.values())

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
