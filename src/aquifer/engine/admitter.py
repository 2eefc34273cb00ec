"""Admitter: brings waiting requests into the batch, in the order that the policy gives."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.engine import entry
from aquifer.engine.clients import Clients
from aquifer.engine.headroom import Headroom
from aquifer.engine.lane import Lane
from aquifer.engine.policies import Policies
from aquifer.engine.preemption import Preemption
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.snapshots import admission_snapshot
from aquifer.errors import DriverError

OnRefusal = Callable[[SequenceGroup, DriverError | None], None]
"""Called with a request that would find no room even alone, and the device's error if it gave one.
It no longer waits."""


class Held(Protocol):
    """Memory that no request uses, and that can be had soon without anything done."""

    def mark(self) -> tuple[int, int]:
        """The present moment."""

    def was_any(self, mark: tuple[int, int]) -> bool:
        """Whether there is any, or was at a mark or after it."""


class _NothingHeld:
    def mark(self) -> tuple[int, int]:
        return 0, 0

    def was_any(self, mark: tuple[int, int]) -> bool:
        return False


class Admitter:
    """Admits waiting requests as long as there is room.

    Args:
        lanes: the lanes of all models.
        headroom: checks that running sequences keep room to grow.
        preemption: brings KV back that was moved to the host; None if none ever is.
        clients: who the requests are for.
        policies: `admission` says which request is next.
        clock_s: returns the time in seconds.
        on_refusal: see `OnRefusal`.

    Attributes:
        blocked: the request that was refused memory last, or was preempted for it, and is still
            waiting.
        held: memory that a request rather waits for than fails; nothing by default.
    """

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        headroom: Headroom,
        preemption: Preemption | None,
        clients: Clients,
        policies: Policies,
        clock_s: Callable[[], float],
        on_refusal: OnRefusal,
    ) -> None:
        self.blocked: SequenceGroup | None = None
        self.held: Held = _NothingHeld()
        self._lanes = lanes
        self._headroom = headroom
        self._preemption = preemption
        self._clients = clients
        self._policies = policies
        self._clock_s = clock_s
        self._on_refusal = on_refusal

    def next(self, lane: Lane, num_running: int | None = None) -> SequenceGroup | None:
        """The waiting request of a model that is tried next, or None if none is to be.

        Args:
            lane: the model's lane.
            num_running: requests that ran before this step; None for those that run now.
        """
        snapshot = admission_snapshot(
            lane, self._lanes.values(), self._clients, self.blocked, num_running
        )
        chosen = self._policies.admission(snapshot)
        return None if chosen is None else lane.waiting.find(chosen.client, chosen.arrival)

    def admit(
        self,
        lane: Lane,
        budget_tokens: int,
        only: Collection[int] | None,
        *,
        enough_tokens: int | None = None,
    ) -> tuple[IntArray, IntArray]:
        """Admit requests as long as there is room.

        Args:
            lane: the model's lane.
            budget_tokens: tokens that they may run in this step.
            only: clients that the step is for; None for all.
            enough_tokens: tokens with which the step need not wait until more requests are
                admitted; None to admit all that there is room for.

        Returns: (slots, counts) of the tokens that they run in this step.
        """
        slots: list[int] = []
        counts: list[int] = []
        num_running = len(lane.running)
        least_budget = 0 if enough_tokens is None else max(budget_tokens - enough_tokens, 0)
        while lane.waiting and budget_tokens > least_budget and not self._is_any_beginning_anew():
            group = self.next(lane, num_running)
            if group is None or len(group.sequences) > lane.slots.num_free:
                break
            if only is not None and group.client not in only:
                break
            is_alone, mark = not self.is_any_running(), self.held.mark()
            was_swapped = group.is_swapped
            has_room, refusal = self._bring_in(lane, group, is_alone=is_alone)
            if not has_room and is_alone and refusal is None and self.held.was_any(mark):
                is_alone = False  # it waits for what is held
            if not has_room and is_alone and refusal is None:
                # What it had on the host, or retained, may take more pages than it needs.
                entry.discard_swapped(group, self._preemption)
                was_swapped = False
                group.begins_anew = True
                has_room, refusal = self._bring_in(lane, group, is_alone=True)
            if not has_room:
                if is_alone:
                    self.forget(lane, group)
                    self._on_refusal(group, refusal)
                    continue
                self.blocked = group
                break
            self.unblock(group)
            lane.waiting.remove(group)
            insort(lane.running, group, key=lambda g: g.arrival)
            lane.note_progress(group)
            if group.scheduled_s is None:
                group.scheduled_s = self._clock_s()
            if was_swapped:
                continue  # its next tokens run in the next step
            for slot in [s.slot for s in group.sequences if s.slot is not None]:
                start = int(lane.slots.num_computed[slot])
                end = min(int(lane.slots.num_tokens[slot]), int(lane.slots.stop_at[slot]))
                count = end - start
                if count > 0 and budget_tokens > 0:
                    slots.append(slot)
                    counts.append(min(count, budget_tokens))
                    budget_tokens -= counts[-1]
        return np.array(slots, np.int64), np.array(counts, np.int64)

    def forget(self, lane: Lane, group: SequenceGroup) -> None:
        """Take a waiting request out of its queue, with what it has on the host."""
        lane.waiting.remove(group)
        entry.discard_swapped(group, self._preemption)
        self.unblock(group)

    def block(self, group: SequenceGroup) -> None:
        """A request waits for memory, having been preempted: no later one is to take it first."""
        if self.blocked is None or group.arrival < self.blocked.arrival:
            self.blocked = group

    def unblock(self, group: SequenceGroup) -> None:
        """The request no longer waits for memory, so it does not block others."""
        if self.blocked is group:
            self.blocked = None

    def is_any_running(self) -> bool:
        """Whether a request of any model runs, or a step of one is in flight."""
        return any(lane.running or lane.in_flight for lane in self._lanes.values())

    def _is_any_beginning_anew(self) -> bool:
        """Whether a request has the pool to itself, until its next token."""
        return any(
            lane.is_beginning_anew(group)
            for lane in self._lanes.values()
            for group in lane.running[:1]
        )

    def _bring_in(
        self, lane: Lane, group: SequenceGroup, *, is_alone: bool
    ) -> tuple[bool, DriverError | None]:
        """Try to admit a request; whether it got slots and memory, and the device's error."""
        if group.begins_anew:
            if not is_alone:
                return False, None
            lane.evict_retained(self._clock_s())
        try:
            if group.is_swapped:
                assert self._preemption is not None
                return entry.bring_back(lane, group, self._headroom, self._preemption), None
            return entry.bring_in(lane, group, self._headroom, self._clock_s()), None
        except DriverError as error:
            return False, error
