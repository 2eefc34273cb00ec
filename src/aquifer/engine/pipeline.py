"""The steps in flight: launched, then committed in the same order, or dropped if one fails.

An exception in a step fails the requests of that step, not the engine: they end with an error, and
others go on. That includes a device that has no memory left for a step's activations. Three kinds
of exception are raised to the caller:

- `InvariantError`: a bug in Aquifer.
- `GroupError`: a rank of a tensor-parallel group is lost.
- Ctrl-C and the like, which ask the whole process to stop.
- The exception of a lost device, to which every later call would fail too.

Whatever else is raised, the scheduler's books are right afterwards: no plan is left that counts as
done and was not run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from aquifer.engine.costs import PrefillCost
from aquifer.engine.in_flight import InFlight
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.step_input import StepInput
from aquifer.errors import GroupError, InvariantError
from aquifer.memory.driver.base import Driver

_log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What launches the steps of one model; `aquifer.engine.runner.Runner` does."""

    def launch(self, step: StepInput) -> InFlight:
        """Launch a step."""


class _Step(NamedTuple):
    """A step in flight."""

    plan: StepInput
    launched: InFlight
    cost: PrefillCost  # of its model


class Pipeline:
    """The steps in flight, in the order of their launches.

    Args:
        scheduler: plans and commits them.
        require_devices: raises the error of a lost device, if one is lost.
        clock_s: returns the time in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        require_devices: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._require_devices = require_devices
        self._clock_s = clock_s
        self._in_flight: deque[_Step] = deque()
        self._begun_s = 0.0  # when the earliest step in flight began: not before the last commit

    def __len__(self) -> int:
        """Number of steps in flight."""
        return len(self._in_flight)

    @property
    def are_done(self) -> bool:
        """Whether the device is done with all steps in flight."""
        if not self._in_flight:
            return True
        fence = self._in_flight[-1].launched.fence
        return fence is None or fence.passed()

    def launch(self, plan: StepInput, runner: StepRunner, cost: PrefillCost) -> None:
        """Launch the step that was planned last; it is dropped if that fails.

        Args:
            plan: the step.
            runner: the runner of its model.
            cost: prefill cost of its model; updated when the step is committed.
        """
        begun_s = self._clock_s()
        if not self._in_flight:  # the device was idle
            self._begun_s = begun_s
        # Otherwise the launch may wait for the device, which takes a limited number of them.
        is_timed = plan.num_decodes < plan.spans.num_tokens and self.are_done
        try:
            self._in_flight.append(_Step(plan, runner.launch(plan), cost))
        except BaseException as error:
            self._drop([plan], error)
            if not _is_of_the_step(error):
                raise
            return
        if is_timed:
            budget = self._scheduler.budget
            self._scheduler.budget = budget.with_launch(self._clock_s() - begun_s)

    def commit_first(self) -> list[TokenOutput]:
        """Wait for the earliest step, and commit it.

        If it fails, it is dropped with all later ones, which count on what it should have written.
        If the wait is interrupted, nothing changes.
        """
        step = self._in_flight[0]
        try:
            result = step.launched.wait()
        except Exception as error:
            self._drop([step.plan for step in self._in_flight], error)
            self._in_flight.clear()
            if not _is_of_the_step(error):
                raise
            return []
        self._in_flight.popleft()
        outputs = self._scheduler.commit(step.plan, result)
        self._observe(step)
        return outputs

    def _observe(self, step: _Step) -> None:
        """Learn how long a step took: the prefill cost, if it did little else than prefill."""
        now_s = self._clock_s()
        seconds, self._begun_s = now_s - self._begun_s, now_s
        self._scheduler.observe(step.plan, seconds)
        num_decodes, spans = step.plan.num_decodes, step.plan.spans
        num_prompt = spans.num_tokens - num_decodes
        if num_prompt > 10 * num_decodes:
            # Each token counts, and a span's tokens begin where it does.
            starts, counts = spans.starts[num_decodes:], spans.counts[num_decodes:]
            step.cost.observe(float(starts @ counts) / num_prompt, num_prompt, seconds)

    def _drop(self, plans: list[StepInput], error: BaseException) -> None:
        """Drop the latest plans, because the first of them failed.

        Raises: the device's error if it is lost; then nothing has changed.
        """
        first = plans[0]
        if _is_of_the_step(error):
            self._require_devices()
            _log.error(
                "a step of %d sequences of %s failed; their requests end with an error",
                len(first.spans.slots),
                first.model,
                exc_info=error,
            )
        message = str(error).partition("\n")[0]
        kind = type(error).__name__
        reason = f"{kind}: {message}" if message else kind
        for plan in reversed(plans):
            self._scheduler.drop(plan, f"the step that ran this request failed: {reason}")


def require_device(driver: Driver) -> None:
    """Raise the device's error if it is lost, that is if every call to it fails from now on.

    To be called after a failure. It waits for the work in flight.
    """
    fence = driver.fence()
    if fence is not None:
        fence.wait()


def _is_of_the_step(error: BaseException) -> bool:
    """Whether an exception is a failure of the step that it comes from, and of nothing else."""
    return isinstance(error, Exception) and not isinstance(error, InvariantError | GroupError)
