"""Sharing between clients: one with many requests beside others with few."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest
from tests.engine.books import LAYOUTS, MAX_SEQS, MAX_TOKENS, PAGE_BYTES, SchedulerWorld, Tracked

from aquifer.engine.express_time import ExpressTime
from aquifer.engine.policies import Policies, first_come


def open_world(resources: ExitStack, budget_bytes: int = 400 * PAGE_BYTES, **options):
    return SchedulerWorld(
        Random(0),
        "virtual",
        resources,
        names=("small",),
        budget_bytes=budget_bytes,
        clients=("a", "b"),
        **options,
    )


def add(world: SchedulerWorld, client: str, num_outputs: int, num_prompt: int = 4) -> Tracked:
    """A request that has exactly this many output tokens."""
    (lane,) = world.scheduler.lanes.values()
    prompt = [world.random.randrange(8, 40) for _ in range(num_prompt)]
    return world.add_prompt(lane, prompt, num_prompt + num_outputs, client, min_tokens=num_outputs)


def steps_until(world: SchedulerWorld, tracked: Tracked, num_outputs: int) -> int:
    """Steps until a request has this many tokens."""
    for number in range(1, 1000):
        world.step()
        if len(tracked.received.get(0, ())) >= num_outputs:
            return number
    raise AssertionError("it never got them")


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_client_with_one_request_gets_in_at_once(num_ahead: int) -> None:
    def wait(policies: Policies | None) -> int:
        with ExitStack() as resources:
            world = open_world(resources, num_ahead=num_ahead, policies=policies)
            many = [add(world, "a", MAX_TOKENS - 4) for _ in range(3 * MAX_SEQS)]
            for _ in range(10):
                world.step()
            num_steps = steps_until(world, add(world, "b", 1), 1)
            world.finish()
            assert {tracked.ending for tracked in many} == {"done"}
            return num_steps

    assert wait(None) <= 3 + num_ahead
    assert wait(Policies(admission=first_come)) > 2 * (MAX_TOKENS - 10), "in order of arrival"


def test_it_gets_in_at_once_where_memory_is_short() -> None:
    with ExitStack() as resources:
        token_bytes = LAYOUTS["small"].token_bytes
        world = open_world(resources, budget_bytes=3 * MAX_TOKENS * token_bytes)
        many = [add(world, "a", 20, num_prompt=MAX_TOKENS - 20) for _ in range(10)]
        for _ in range(10):
            world.step()
        (lane,) = world.scheduler.lanes.values()
        assert lane.waiting
        assert lane.slots.num_free
        one = add(world, "b", 4, num_prompt=MAX_TOKENS - 20)
        assert steps_until(world, one, 4) <= 12
        assert one.group.num_preemptions == 0
        world.finish()
        assert {tracked.ending for tracked in many} == {"done"}


def test_the_requests_of_one_client_keep_their_order() -> None:
    with ExitStack() as resources:
        world = open_world(resources)
        requests = [add(world, "ab"[i % 3 == 0], 20) for i in range(4 * MAX_SEQS)]
        world.finish()
        for client in "ab":
            of_client = [
                tracked.group.arrival
                for tracked in requests
                if tracked.group.request.client == client
            ]
            assert [arrival for arrival in world.admitted if arrival in of_client] == of_client


def test_clients_with_work_waiting_are_served_alike() -> None:
    """Neither is ahead by more than a batch, although one sends four times as many requests."""
    with ExitStack() as resources:
        world = open_world(resources)
        requests = [add(world, "b" if i % 5 == 0 else "a", 20) for i in range(100)]
        given = {"a": 0, "b": 0}
        while len([t for t in requests if t.ending is None and t.group.request.client == "b"]) > 6:
            world.step()
            for client in given:
                given[client] = sum(
                    len(tracked.received.get(0, ()))
                    for tracked in requests
                    if tracked.group.request.client == client
                )
            # A batch of one client's requests may run to their ends while the other's wait.
            assert abs(given["a"] - given["b"]) <= MAX_SEQS * (20 + 4)
        assert given["b"] > 200
        world.finish()


def test_a_client_cannot_save_up_turns() -> None:
    """It was idle while another one was served; it comes first, but not for as long as that."""
    with ExitStack() as resources:
        world = open_world(resources)
        for _ in range(10 * MAX_SEQS):
            add(world, "a", 20)
        add(world, "b", 1)
        while len(world.live) > 4 * MAX_SEQS:
            world.step()
        late = [add(world, "b", 20) for _ in range(5 * MAX_SEQS)]
        rest = [t for t in world.live if t.group.request.client == "a"]
        for _ in range(3 * 25):
            world.step()
        assert any(tracked.ending for tracked in rest), "a is served, too"
        assert any(tracked.ending for tracked in late)
        world.finish()


def test_steps_of_their_own() -> None:
    """While there is time for it, a step has the sequences of the small client only."""
    with ExitStack() as resources:
        world = open_world(resources, express_share=0.25)
        for _ in range(5 * MAX_SEQS):
            add(world, "a", MAX_TOKENS - 4)
        world.step()
        one = add(world, "b", 30)
        kinds = []
        while one.ending is None:
            plan = world.scheduler.plan()
            assert plan is not None
            clients = {world.scheduler.lanes["small"].slots.sequences[s] for s in plan.spans.slots}
            kinds.append(plan.is_express)
            assert {s.request.client for s in clients if s} == (
                {"b"} if plan.is_express else {"a", "b"}
            )
            world.in_flight.append((plan, world.run(plan)))
            world.now_s += 1
            for output in world.commit_first():
                world.receive(output)
        assert kinds[0], "its first step is one of its own"
        assert 0.15 < sum(kinds) / len(kinds) < 0.35
        world.finish()


def test_express_time_is_a_share_of_all_time() -> None:
    now_s = 0.0
    time = ExpressTime(0.1, lambda: now_s)
    assert time.is_left(), "for the first request"
    time.take(0.75)
    assert not time.is_left()
    now_s = 2.4
    assert not time.is_left()
    now_s = 2.6
    assert time.is_left()
    now_s = 1000.0
    for _ in range(2):
        assert time.is_left(), "saved up, but no more than half a second"
        time.take(0.25)
    assert not time.is_left()
    assert not ExpressTime(0.0, lambda: now_s).is_left()
