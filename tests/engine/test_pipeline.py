"""The time of each step in flight, from which the cost of prompts is learnt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.costs import PrefillCost
from aquifer.engine.in_flight import InFlight
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.pipeline import Pipeline
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput
from aquifer.memory.driver import open_driver
from aquifer.memory.pool import PagePool

NUM_TOKENS = 1000
STEP_S = 2.0


@dataclass
class Clock:
    now_s: float = 100.0


class LateFence:
    """A step is done `STEP_S` after the later of its launch and the end of the step before."""

    def __init__(self, clock: Clock, done_s: float) -> None:
        self._clock = clock
        self._done_s = done_s

    def passed(self) -> bool:
        return self._clock.now_s >= self._done_s

    def wait(self) -> None:
        self._clock.now_s = max(self._clock.now_s, self._done_s)


class TimedRunner:
    """Takes `STEP_S` for each step, one after the other, and the host so long for a launch."""

    def __init__(self, clock: Clock, launch_s: float = 0.0) -> None:
        self._clock = clock
        self._done_s = 0.0
        self.launch_s = launch_s

    def launch(self, step: StepInput) -> InFlight:
        self._clock.now_s += self.launch_s
        self._done_s = max(self._done_s, self._clock.now_s) + STEP_S
        tokens = torch.zeros(len(step.sampled), dtype=torch.int64)
        fence = LateFence(self._clock, self._done_s)
        return InFlight(step.most_new, tokens, fence, np.zeros(0, np.int64))


@pytest.fixture
def assembly() -> Iterator[Assembly]:
    with ExitStack() as resources:
        driver = open_driver("cpu")
        resources.callback(driver.close)
        pool = PagePool(driver, 64 << 20)
        resources.callback(pool.close)
        assembly = Assembly(pool, NUM_TOKENS)
        layout = KVLayout((LayerKV(1, 8, 8),), torch.float32)
        spec = LaneSpec("m", layout, 8, NUM_TOKENS + 2, kv_cache("virtual"))
        resources.callback(assembly.close_lane, assembly.open_lane(spec))
        yield assembly


def add(assembly: Assembly, number: int) -> None:
    """A prompt that is a whole step."""
    prompt = [1] * NUM_TOKENS
    group = SequenceGroup.of(
        Request(str(number), "m", prompt, SamplingParams(), 0.0),
        number,
        np.array(prompt, np.int32),
        seed=0,
        max_total=NUM_TOKENS + 1,
    )
    assembly.scheduler.add(assembly.scheduler.lanes["m"], group)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("idle_s", [0.0, 50.0])
def test_a_step_takes_no_idle_time(assembly: Assembly, idle_s: float, num_ahead: int) -> None:
    """Nor the time that it waits for the step before, where one is planned ahead."""
    clock, cost = Clock(), PrefillCost()
    pipeline = Pipeline(assembly.scheduler, lambda: None, lambda: clock.now_s)
    runner = TimedRunner(clock)
    for first in (0, 4, 8):
        clock.now_s += idle_s
        for number in range(first, first + 4):
            add(assembly, number)
        while assembly.scheduler.has_work or pipeline:
            plan = assembly.scheduler.plan()
            if plan is not None:
                pipeline.launch(plan, runner, cost)
            if len(pipeline) > (0 if plan is None else num_ahead):
                pipeline.commit_first()
            assert cost.seconds(0, NUM_TOKENS) in (pytest.approx(0.1), pytest.approx(STEP_S))
    assert cost.seconds(0, NUM_TOKENS) == pytest.approx(STEP_S)


def test_a_step_is_done_with_its_fence(assembly: Assembly) -> None:
    clock, cost = Clock(), PrefillCost()
    pipeline = Pipeline(assembly.scheduler, lambda: None, lambda: clock.now_s)
    runner = TimedRunner(clock)
    done = [pipeline.are_done]
    for number in range(2):
        add(assembly, number)
        plan = assembly.scheduler.plan()
        assert plan is not None
        pipeline.launch(plan, runner, cost)
    for passed_s in (1.5 * STEP_S, STEP_S):
        clock.now_s += passed_s
        done.append(pipeline.are_done)
    while pipeline:
        pipeline.commit_first()
    assert [*done, pipeline.are_done] == [True, False, True, True]


def test_a_launch_is_timed_where_it_does_not_wait_for_the_device(assembly: Assembly) -> None:
    clock, cost = Clock(), PrefillCost()
    pipeline = Pipeline(assembly.scheduler, lambda: None, lambda: clock.now_s)
    runner = TimedRunner(clock)
    seen_s = []
    for number, launch_s in enumerate((0.5, 1.0)):
        runner.launch_s = launch_s
        add(assembly, number)
        plan = assembly.scheduler.plan()
        assert plan is not None
        pipeline.launch(plan, runner, cost)  # the second one while the first step runs
        seen_s.append(assembly.scheduler.budget.launch_s)
    while pipeline:
        pipeline.commit_first()
    assert seen_s == [0.5, 0.5]
