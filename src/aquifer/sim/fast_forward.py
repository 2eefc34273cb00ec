"""Fast forward of a replay: steps in which only decoding goes on, done all at once.

In each of these steps the scheduler would plan the same sequences with one token each. So it is
enough to ask the cache manager for room step by step, as the scheduler does, and to do the rest for
all of the steps together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import IntArray
from aquifer.cache.contiguous import ContiguousCache
from aquifer.engine.committing import skip_steps
from aquifer.engine.lane import Lane
from aquifer.engine.repetition import repeats
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.step_input import StepInput
from aquifer.sim.clock import Arrivals, Clock
from aquifer.sim.device import StepModel
from aquifer.sim.occupancy import Occupancy
from aquifer.sim.outputs import made_up_tokens
from aquifer.sim.trace import TraceRequest

_MOST_STEPS = 4096  # maximum number of steps done at once


@dataclass(frozen=True, slots=True)
class Skipped:
    """Steps that were done at once.

    Attributes:
        seconds: [n], how long each took.
        values: [n, len(COLUMNS)], the occupancy in each.
    """

    seconds: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]


class FastForward:
    """Does the steps after a committed one in which all sequences decode and none ends.

    Args:
        scheduler: of the replay.
        steps: how long steps take, by model.
        clock: the time, which advances with the steps.
        arrivals: of the requests to come.
        occupancy: measures the occupancy after the steps.
        is_refused: tells whether a request to come will wait for nothing; None if there are several
            models, of which a request may be for another one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Mapping[str, StepModel],
        clock: Clock,
        arrivals: Arrivals,
        occupancy: Occupancy,
        is_refused: Callable[[Lane, TraceRequest], bool] | None,
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._clock = clock
        self._arrivals = arrivals
        self._occupancy = occupancy
        self._is_refused = is_refused

    def run(self, plan: StepInput, until_s: float, *, has_freed: bool) -> Skipped | None:
        """Do as many steps as go on like the last one; None if there are none.

        Whether steps repeat is found by `aquifer.engine.repetition`. They do so until a sequence
        ends, a request arrives for which there might be room, or the manager has no room.

        Args:
            plan: the last step's, committed.
            until_s: no step begins at this time or later.
            has_freed: whether a sequence has ended in it or been preempted for it.
        """
        lane = self._scheduler.lanes[plan.model]
        # Windows give back memory in some of these steps.
        if lane.has_windows or not repeats(self._scheduler, plan, has_freed=has_freed):
            return None
        table = lane.slots
        slots = table.in_order
        known_tokens = table.num_tokens[slots]
        most_steps = int((table.max_total[slots] - known_tokens).min()) - 1
        most_steps = min(most_steps, _MOST_STEPS)
        if most_steps < 1:
            return None
        num_seqs = len(slots)
        kv_tokens = int(table.num_computed[slots].sum()) + num_seqs * np.arange(1, most_steps + 1)
        seconds = self._steps[lane.name].decode_seconds(num_seqs, kv_tokens)
        # Accumulated one after the other, as in single steps: [i] is when step i begins.
        begins_s = np.add.accumulate(np.concatenate(([self._clock.now_s], seconds)))
        most_steps = int(begins_s[:most_steps].searchsorted(until_s))
        may_join = not lane.waiting or self._is_refused is None
        if may_join and (arrival_s := self._arrivals.next_s) is not None:
            most_steps = int(begins_s[:most_steps].searchsorted(arrival_s))
        parts = self._reserve(lane, slots, begins_s[:most_steps].tolist())
        count = len(parts[0])
        if not count:
            return None
        skip_steps(lane, slots, count, made_up_tokens(table.serial[slots]))
        lane.cache.upload()
        num_untaken = self._num_waiting(lane, self._arrivals.num_untaken(begins_s[:count]))
        values = self._occupancy.values_of_decodes(lane, num_untaken, *parts)
        self._clock.now_s = float(begins_s[count])
        return Skipped(seconds[:count], values)

    def _num_waiting(self, lane: Lane, num_untaken: IntArray) -> IntArray:
        """Return how many of the requests that have arrived by each step will wait: [n].

        Args:
            lane: the model that they are for.
            num_untaken: [n], how many have arrived, those included that are refused.
        """
        most = int(num_untaken[-1])
        if not most or self._is_refused is None:
            return num_untaken
        first = self._arrivals.num_taken
        waits = [
            not self._is_refused(lane, self._arrivals[first + number]) for number in range(most)
        ]
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(waits)))[num_untaken]

    def _reserve(
        self, lane: Lane, slots: IntArray, begins_s: list[float]
    ) -> tuple[list[int], list[int], list[int]]:
        """Ask for room as the scheduler does, until a step is refused or takes longer.

        A sequence that outgrows its region is copied, which takes time in that step.

        Returns: free bytes, retained bytes and bytes of weights that come and go, after each step
            before that one.
        """
        needed_tokens = lane.slots.num_computed[slots] + 1
        free_bytes: list[int] = []
        retained_bytes: list[int] = []
        weight_bytes: list[int] = []
        clock, occupancy, reserve = self._clock, self._occupancy, lane.cache.reserve
        copied_bytes = copied_bytes_of(lane)
        for begin_s in begins_s:
            clock.now_s = begin_s
            if not reserve(slots, needed_tokens) or copied_bytes_of(lane) != copied_bytes:
                break
            needed_tokens += 1
            free_bytes.append(occupancy.free_bytes)
            retained_bytes.append(occupancy.retained_bytes)
            weight_bytes.append(occupancy.weight_bytes)
        return free_bytes, retained_bytes, weight_bytes


def copied_bytes_of(lane: Lane) -> int:
    """Bytes that the manager of a model's KV has copied on the device so far."""
    return lane.cache.copied_bytes if isinstance(lane.cache, ContiguousCache) else 0
