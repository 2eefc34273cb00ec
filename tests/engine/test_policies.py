"""Policies other than the default ones, written as functions in a test."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

import pytest
from tests.engine.books import LAYOUTS, MAX_TOKENS, PAGE_BYTES, SchedulerWorld

from aquifer.engine.policies import (
    Admission,
    AdmissionSnapshot,
    Candidate,
    ClientState,
    DisplacementSnapshot,
    ModelState,
    Policies,
    RunningRequest,
    first_come,
    first_with_region,
    latest_arrival,
    latest_of_busiest,
    least_served,
    place_for_each_client,
    restore_by_copy,
    round_robin,
    smallest_clients,
)
from aquifer.engine.policies.admission import static_batches

# --- other policies ------------------------------------------------------------------------------


def shortest_prompt(snapshot: AdmissionSnapshot) -> Candidate | None:
    """Preempted requests first, then the shortest prompt that has slots."""
    fitting = [
        request
        for queue in snapshot.queues.values()
        for request in queue
        if request.num_sequences <= snapshot.num_free_slots
    ]
    return min(fitting, key=lambda r: (-r.num_preemptions, r.num_prompt_tokens), default=None)


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
    *arrivals: int,
    served: tuple[tuple[float, int], tuple[float, int]] = ((0, 0), (0, 0)),
    blocked: tuple[int, ...] | None = None,
) -> AdmissionSnapshot:
    """The queues of two clients, 0 and 1, with requests of these arrivals in turns."""
    waiting = [Candidate(arrival, 10, 10, 2, 0, client=i % 2) for i, arrival in enumerate(arrivals)]
    queues = {client: [w for w in waiting if w.client == client] for client in (0, 1)}
    queues = {client: queue for client, queue in queues.items() if queue}
    return AdmissionSnapshot(
        queues,
        {0: ClientState(*served[0]), 1: ClientState(*served[1])},
        {client: [True] * len(queue) for client, queue in queues.items()},
        1,
        4,
        None if blocked is None else Candidate(*blocked),
    )


def chosen(candidate: Candidate | None) -> int | None:
    return None if candidate is None else candidate.arrival


@pytest.mark.parametrize("policy", [first_come, least_served])
def test_first_come_first_served(policy: Admission) -> None:
    only = snapshot(5)._replace(clients={0: ClientState()})
    assert policy(only._replace(queues={})) is None
    assert chosen(policy(only)) == 5
    # A request of some model waits for memory: nothing later may overtake it.
    for arrival, expected in ((4, None), (5, 5), (6, 5)):
        blocked = Candidate(arrival, 10, 10, 2, 0)
        assert chosen(policy(only._replace(blocked=blocked))) == expected
    assert static_batches(only) is None
    assert chosen(static_batches(only._replace(num_running=0))) == 5


def test_the_client_that_was_served_least_is_next() -> None:
    assert chosen(first_come(snapshot(5, 6))) == 5
    assert chosen(least_served(snapshot(5, 6))) == 5
    assert chosen(least_served(snapshot(5, 6, served=((9, 0), (8, 3))))) == 6
    assert chosen(least_served(snapshot(5, 6, served=((8, 3), (8, 2))))) == 6
    assert chosen(least_served(snapshot(5, 6, 7, 8, served=((9, 0), (8, 0))))) == 6
    assert least_served(snapshot()) is None
    # A request that waits for memory is overtaken by a client that was served less, and no other.
    for blocked, expected in (((1, 1, 1, 1, 0, 0), 6), ((1, 1, 1, 1, 0, 1), None)):
        served = ((9.0, 0), (8.0, 0))
        assert chosen(least_served(snapshot(5, 6, served=served, blocked=blocked))) == expected


def test_one_with_a_region_overtakes_a_few() -> None:
    only = snapshot(5)._replace(clients={0: ClientState()})

    def first(arrivals: list[int], regions: list[bool]) -> int | None:
        queue = [Candidate(arrival, 10, 10, 2, 0) for arrival in arrivals]
        return chosen(first_with_region(only._replace(queues={0: queue}, regions={0: regions})))

    assert first([5, 6, 7], [True, True, True]) == 5
    assert first([5, 6, 7], [False, False, True]) == 7
    assert first([5, 6, 7], [False, False, False]) == 5
    assert first([5, 36], [False, True]) == 36
    assert first([5, 37], [False, True]) == 5, "it has been overtaken by enough"
    blocked = Candidate(4, 10, 10, 2, 0)
    assert first_with_region(only._replace(blocked=blocked)) is None


def place(
    *running: tuple[int, int, int], waiting: tuple[int, int] = (1, 10), lacks_slots: bool = True
) -> int | None:
    """Who gives way to client 9's request of (sequences, tokens) among (client, seqs, tokens)."""
    held = [RunningRequest("m", i, tokens, n, 0, c) for i, (c, n, tokens) in enumerate(running)]
    num_sequences, num_tokens = waiting
    request = Candidate(99, num_tokens, num_tokens, num_sequences, 0, client=9)
    return place_for_each_client(DisplacementSnapshot(request, lacks_slots, held))


def test_a_client_with_nothing_running_takes_a_place() -> None:
    assert place() is None
    assert place((1, 1, 50), (1, 1, 50), (2, 1, 50)) == 1
    assert place((1, 1, 50), (1, 1, 50), (9, 1, 50)) is None, "it has one already"
    assert place((1, 1, 50), (2, 1, 50)) is None, "each has just one"
    assert place((1, 4, 50)) is None, "a client's only request stays"
    # As long as the other client holds more than the request asks for.
    assert place((1, 1, 50), (1, 1, 50), waiting=(2, 10)) is None
    assert place((1, 2, 50), (1, 1, 50), waiting=(2, 10)) == 1
    assert place((1, 1, 50), (1, 1, 50), waiting=(1, 100), lacks_slots=False) is None
    assert place((1, 1, 50), (1, 1, 51), waiting=(5, 100), lacks_slots=False) == 1


def test_the_smallest_clients_run_alone() -> None:
    assert smallest_clients({0: 200, 1: 1}) == {1}
    assert smallest_clients({0: 200, 1: 1, 2: 20, 3: 10}) == {1, 3}
    assert smallest_clients({0: 7, 1: 1}) == {1}
    assert smallest_clients({0: 6, 1: 1}) == frozenset()


def test_the_latest_arrival_is_the_victim() -> None:
    running = [RunningRequest("m", arrival, 10, 1, 0) for arrival in (3, 9, 4)]
    assert latest_arrival(running) == 1
    assert latest_of_busiest(running) == 1


def test_the_victim_is_of_the_client_with_the_most_requests() -> None:
    pairs = ((3, 0), (9, 1), (4, 0), (5, 2))
    running = [RunningRequest("m", arrival, 10, 1, 0, client) for arrival, client in pairs]
    assert latest_of_busiest(running) == 2
    assert latest_of_busiest(running[1:]) == 0


def test_models_take_turns() -> None:
    turns = [ModelState(name, 1, 1, turn) for name, turn in (("a", 7), ("b", -1), ("c", 3))]
    assert list(round_robin(turns)) == [1, 2, 0]


def test_the_cheaper_way_back() -> None:
    assert restore_by_copy("auto", swap_s=1, recompute_s=2)
    assert not restore_by_copy("auto", swap_s=2, recompute_s=1)
    assert restore_by_copy("swap", swap_s=2, recompute_s=1)
    assert not restore_by_copy("recompute", swap_s=1, recompute_s=2)
