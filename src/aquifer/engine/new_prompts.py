"""The prompts that were added since the last step, and whether they are enough for the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aquifer.engine.entry import look_up
from aquifer.engine.lane import Lane
from aquifer.engine.planning import StepBudget
from aquifer.engine.sequence import SequenceGroup


@dataclass(slots=True)
class NewPrompts:
    """The prompts that were added since the last step, without what is retained of them."""

    num_tokens: int = 0
    work_s: float = 0.0  # time to compute them

    def add(self, lane: Lane, group: SequenceGroup, budget: StepBudget) -> None:
        """Add the prompt of a request.

        What is retained of it is not looked up where those before it fill the next step.
        """
        num_tokens = len(group.live[0].token_ids)
        is_full = self.num_tokens >= budget.max_batched_tokens
        match = None if is_full else look_up(lane, group)
        num_found = 0 if match is None else match.num_tokens
        self.num_tokens += num_tokens - num_found
        self.work_s += lane.recompute_s(num_found, num_tokens - num_found)

    def are_enough(self, budget: StepBudget, is_idle: Callable[[], bool]) -> bool:
        """Whether a step should be launched before more are added: they fill it, or the device
        idles and they are enough work for it.

        Args:
            budget: of the step.
            is_idle: whether the device is done with all steps; a question to the driver.
        """
        enough_s = budget.enough_s
        if enough_s is None:
            return False
        is_full = self.num_tokens >= budget.max_batched_tokens
        return is_full or (self.work_s >= enough_s and is_idle())
