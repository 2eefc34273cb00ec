"""Whether the steps to come are like the last one, for a replay, which then does them at once."""

from __future__ import annotations

from aquifer.engine.lane import Lane
from aquifer.engine.planning import all_decode
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.step_input import StepInput


def repeats(scheduler: Scheduler, plan: StepInput, *, has_freed: bool) -> bool:
    """Whether the next steps have the same sequences as a committed one, with a token each.

    That is so until a sequence ends, a request arrives, or the pool is short. For these steps there
    is `aquifer.engine.committing.skip_steps`.

    Args:
        scheduler: planned the step.
        plan: the latest step, committed.
        has_freed: whether a sequence has ended in it or was preempted for it.
    """
    lane = scheduler.lanes[plan.model]
    others = [other for other in scheduler.lanes.values() if other is not lane]
    if any(other.has_work for other in others) or not all_decode(lane.slots):
        return False
    return not lane.waiting or (not has_freed and _is_queue_stuck(scheduler, lane, plan))


def _is_queue_stuck(scheduler: Scheduler, lane: Lane, plan: StepInput) -> bool:
    """Whether the first waiting request was refused, and will be until a sequence ends.

    Neither memory nor slots come free before that. So it was refused if the plan had tokens left
    for it. That changes with prefixes that were added since, which it could use. And a request that
    was preempted may find room later: what must be left for all others (`aquifer.engine.headroom`)
    shrinks as they approach their ends; where lengths are forecast, so may any other.
    """
    if lane.forecaster is not None:
        return False
    budget = scheduler.budget
    most = budget.tokens(lane.slots, lane.recompute_s, lane.captured_sizes, lane.waiting)
    was_tried = plan.spans.num_tokens < most
    adds_prefixes = lane.prefixes is not None and plan.num_decodes < len(plan.spans.slots)
    first = next(iter(lane.waiting))
    return was_tried and not adds_prefixes and first.num_preemptions == 0
