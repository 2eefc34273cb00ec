"""Policies other than the default ones, written as functions in a test."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

from tests.engine.books import LAYOUTS, MAX_TOKENS, PAGE_BYTES, SchedulerWorld

from aquifer.engine.policies import (
    AdmissionSnapshot,
    ModelState,
    Policies,
    RunningRequest,
    first_come,
    latest_arrival,
    restore_by_copy,
    round_robin,
)
from aquifer.engine.policies.admission import Candidate, static_batches

# --- other policies ------------------------------------------------------------------------------


def shortest_prompt(snapshot: AdmissionSnapshot) -> int | None:
    """Preempted requests first, then the shortest prompt that has slots."""
    fitting = [
        (-request.num_preemptions, request.num_prompt_tokens, index)
        for index, request in enumerate(snapshot.waiting)
        if request.num_sequences <= snapshot.num_free_slots
    ]
    return min(fitting)[-1] if fitting else None


def fewest_tokens(running: Sequence[RunningRequest]) -> int:
    """The request with the fewest tokens, but never the earliest one."""
    earliest = min(request.arrival for request in running)
    others = [i for i, request in enumerate(running) if request.arrival > earliest]
    return min(others or [0], key=lambda i: (running[i].num_tokens, running[i].arrival))


def busiest_first(models: Sequence[ModelState]) -> Sequence[int]:
    """The model with the most requests runs until another one has more."""
    return sorted(range(len(models)), key=lambda i: -models[i].num_waiting - models[i].num_running)


def test_the_shortest_prompt_comes_first() -> None:
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(0),
            "virtual",
            resources,
            names=("small",),
            budget_bytes=100 * PAGE_BYTES,
            max_batched_tokens=10,
            policies=Policies(admission=shortest_prompt),
        )
        (lane,) = world.scheduler.lanes.values()
        for num_prompt in (60, 10, 40, 30, 20):
            world.add(lane, num_prompt, num_prompt + 2)
        world.finish()
        assert world.admitted == [1, 4, 3, 2, 0]


def test_another_victim_is_preempted() -> None:
    def preempted(policies: Policies) -> list[int]:
        with ExitStack() as resources:
            budget_bytes = 2 * MAX_TOKENS * LAYOUTS["small"].token_bytes
            world = SchedulerWorld(
                Random(0),
                "virtual",
                resources,
                names=("small",),
                budget_bytes=budget_bytes,
                policies=policies,
            )
            (lane,) = world.scheduler.lanes.values()
            tracked = [
                world.add(lane, num_prompt, MAX_TOKENS, min_tokens=MAX_TOKENS - num_prompt)
                for num_prompt in (20, 4, 30)
            ]
            world.finish()
            assert {t.ending for t in tracked} == {"done"}
            return [t.group.arrival for t in tracked if t.group.num_preemptions]

    assert preempted(Policies()) == [2]
    assert preempted(Policies(victims=fewest_tokens)) == [1]


def test_another_order_of_models() -> None:
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(0),
            "virtual",
            resources,
            names=("small", "large"),
            budget_bytes=400 * PAGE_BYTES,
            policies=Policies(turns=busiest_first),
        )
        small, large = (world.scheduler.lanes[name] for name in ("small", "large"))
        world.add(small, 4, 20)
        for _ in range(2):
            world.add(large, 4, 20)
        world.finish()
        assert world.admitted[:2] == [1, 2]


# --- the default ones ----------------------------------------------------------------------------


def snapshot(
    *arrivals: int, num_free_slots: int = 4, blocked: int | None = None
) -> AdmissionSnapshot:
    waiting = [Candidate(arrival, 10, 10, 2, 0) for arrival in arrivals]
    return AdmissionSnapshot(waiting, 1, num_free_slots, blocked)


def test_first_come_first_served() -> None:
    assert first_come(snapshot()) is None
    assert first_come(snapshot(5, 6)) == 0
    assert first_come(snapshot(5, num_free_slots=1)) is None
    # A request of some model waits for memory: nothing later may overtake it.
    assert first_come(snapshot(5, blocked=4)) is None
    assert first_come(snapshot(5, blocked=5)) == 0
    assert first_come(snapshot(5, blocked=6)) == 0
    assert static_batches(snapshot(5)) is None


def test_the_latest_arrival_is_the_victim() -> None:
    running = [RunningRequest("m", arrival, 10, 1, 0) for arrival in (3, 9, 4)]
    assert latest_arrival(running) == 1


def test_models_take_turns() -> None:
    turns = [ModelState(name, 1, 1, turn) for name, turn in (("a", 7), ("b", -1), ("c", 3))]
    assert list(round_robin(turns)) == [1, 2, 0]


def test_the_cheaper_way_back() -> None:
    assert restore_by_copy("auto", swap_s=1, recompute_s=2)
    assert not restore_by_copy("auto", swap_s=2, recompute_s=1)
    assert restore_by_copy("swap", swap_s=2, recompute_s=1)
    assert not restore_by_copy("recompute", swap_s=1, recompute_s=2)
