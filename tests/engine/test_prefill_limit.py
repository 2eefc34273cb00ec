"""How many prompt tokens a step has while other sequences decode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from tests.engine.books import LAYOUTS, open_assembly, open_lane

from aquifer.cache import kv_cache
from aquifer.cache.swap import SwapSpace
from aquifer.engine import planning
from aquifer.engine.assembly import LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.planning import StepBudget
from aquifer.engine.scheduler import Scheduler
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepOutput
from aquifer.memory.driver import open_driver

MOST_TOKENS = 1000
TOKEN_S = 1e-4  # of a prompt


class World:
    """A scheduler whose steps take no time, and count their tokens."""

    def __init__(
        self, resources: ExitStack, max_prefill_s: float | None, most_tokens: int = MOST_TOKENS
    ) -> None:
        driver = open_driver("cpu")
        space = SwapSpace(0, driver.device)
        assembly = open_assembly(
            resources, driver, 64 << 20, most_tokens, space, max_prefill_s=max_prefill_s
        )
        self.scheduler: Scheduler = assembly.scheduler
        spec = LaneSpec(
            "m",
            LAYOUTS["small"],
            8,
            4000,
            kv_cache("virtual"),
            recompute_s=lambda first, count: count * TOKEN_S * (1 + first / 1000),
        )
        self.lane: Lane = open_lane(resources, assembly, spec)
        self.num_requests = 0

    def send(self, num_tokens: int, max_tokens: int = 500) -> None:
        prompt = np.ones(num_tokens, np.int32)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        number = self.num_requests
        self.num_requests += 1
        group = SequenceGroup.of(
            Request(str(number), "m", prompt.tolist(), params, time.monotonic()),
            number,
            prompt,
            seed=0,
            max_total=num_tokens + max_tokens,
            stop_ids=frozenset(),
            eos_ids=frozenset(),
        )
        self.scheduler.add(self.lane, group)

    def step(self) -> list[int]:
        """Run a step: tokens of each of its sequences."""
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.commit(plan, StepOutput.of_single(np.ones(len(plan.sampled), np.int64)))
        return [int(count) for count in plan.spans.counts]


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


def test_prompts_take_no_longer_than_the_limit_beside_a_decode(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=0.02)  # 200 tokens at the start of a prompt
    world.send(1500)
    assert world.step() == [1000]  # nothing decodes
    assert world.step() == [500]
    world.send(500)
    assert world.step() == [1, 200]
    assert world.step() == [1, 166]  # 200 / 1.2
    assert world.step() == [1, 134]
    assert world.step() == [1, 1]


def test_a_prompt_fills_its_steps_while_nothing_decodes(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=0.02, most_tokens=3000)
    world.send(3400)
    assert world.step() == [3000]
    assert world.step() == [400]


def test_what_a_prompt_leaves_of_a_step_is_filled(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=0.02)
    world.send(10)
    world.step()
    world.send(150)
    world.send(300)
    assert world.step() == [1, 150, 50]


def test_a_sequence_with_its_last_token_in_flight_does_not_decode(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=0.02)
    for _ in range(3):
        world.send(900, max_tokens=1)
    plans = [world.scheduler.plan() for _ in range(3)]
    assert [plan.spans.num_tokens for plan in plans if plan is not None] == [1000, 1000, 700]


def test_a_step_always_reads_some_of_a_prompt(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=1e-9)
    world.send(10)
    world.step()
    world.send(100)
    assert world.step() == [1, 64]
    assert world.step() == [1, 36]


def test_without_a_limit_prompts_fill_the_step(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=None)
    world.send(10)
    world.step()
    world.send(2000)
    assert world.step() == [1, 999]


def test_beside_a_decode_that_outlasts_them_prompts_are_read_in_small_steps(
    resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_LEAST_TOKENS_BESIDE", 100)
    world = World(resources, max_prefill_s=None)
    world.scheduler.budget = replace(world.scheduler.budget, beside_s=0.02)
    world.send(900, max_tokens=50)
    assert world.step() == [900]  # nothing decodes
    world.send(300, max_tokens=40)
    world.send(200, max_tokens=30)
    assert [world.step() for _ in range(3)] == [[1, 200], [1, 100, 66], [1, 1, 134]]
    world.send(700, max_tokens=44)
    assert [world.step() for _ in range(2)] == [[1, 1, 1, 200], [1, 1, 1, 166]]
    assert world.step() == [1, 1, 1, 334]  # the first one has no more than 44 left


def test_such_steps_have_some_tokens_however_long_they_take(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=None, most_tokens=3000)
    world.scheduler.budget = replace(world.scheduler.budget, beside_s=0.02)
    world.send(900, max_tokens=50)
    world.step()
    world.send(2500, max_tokens=40)
    assert [world.step() for _ in range(3)] == [[1, 1024], [1, 1024], [1, 452]]


def test_sequences_of_one_length_are_read_in_full_steps(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=None)
    world.scheduler.budget = replace(world.scheduler.budget, beside_s=0.02)
    for _ in range(3):
        world.send(600, max_tokens=50)
    assert [world.step() for _ in range(2)] == [[600, 400], [1, 200, 600]]


@pytest.mark.parametrize(
    ("captured_sizes", "num_tokens"),
    [
        ((128, 192, 256), 191),  # the next smaller of 201
        ((128,), 200),  # too far below
        ((128, 256), 200),  # likewise
        ((256, 512), 200),  # all are larger
        ((201, 256), 200),
    ],
)
def test_a_step_beside_a_decode_ends_at_a_captured_size(
    resources: ExitStack, captured_sizes: tuple[int, ...], num_tokens: int
) -> None:
    world = World(resources, max_prefill_s=0.02)
    world.lane.captured_sizes = captured_sizes
    world.send(10)
    world.step()
    world.send(500)
    assert world.step() == [1, num_tokens]


def test_an_idle_device_gets_a_step_with_enough_work(resources: ExitStack) -> None:
    """The other requests are admitted while it runs."""
    world = World(resources, max_prefill_s=None)
    world.scheduler.budget = replace(world.scheduler.budget, least_enough_s=0.02)
    for _ in range(5):
        world.send(150)
    plans = [world.scheduler.plan() for _ in range(2)]
    assert [plan.spans.num_tokens for plan in plans if plan is not None] == [300, 2 + 450]


def test_no_more_than_a_step_is_enough(resources: ExitStack) -> None:
    world = World(resources, max_prefill_s=None)
    budget = replace(world.scheduler.budget, least_enough_s=1.0)
    assert budget.enough_tokens(world.lane.recompute_s) == MOST_TOKENS
    assert replace(budget, least_enough_s=0.02).enough_tokens(lambda _, count: count / 5000) == 100
    assert replace(budget, least_enough_s=None).enough_tokens(world.lane.recompute_s) is None


def test_work_is_enough_only_if_it_takes_longer_than_its_launch() -> None:
    budget = StepBudget(8192, least_enough_s=0.01)
    assert budget.with_launch(0.004).enough_s == 0.01
    slow = budget.with_launch(0.03)
    assert slow.enough_s == pytest.approx(0.06)
    assert slow.with_launch(0.005).enough_s == pytest.approx(0.05)  # a fifth of the way
    assert StepBudget(8192).with_launch(0.03).enough_s is None
