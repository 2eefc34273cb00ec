"""Models that do not fit into the pool together: evicted tensor by tensor, and loaded again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from tests.cases import EVERY_CASE
from tests.engine.life import PAGE_BYTES, Case, Open, World, each_kv_cache
from tests.engine.test_loading import make_short

from aquifer.engine.policies import Policies
from aquifer.engine.policies.relief import Holder, ReliefSnapshot, fewest_running
from aquifer.engine.policies.residents import Resident, ResidentsSnapshot, longest_resident
from aquifer.engine.reports import ModelState
from aquifer.memory.owners import Kind, Owner

NUM_MIXED = 1000
"""Requests of each of the two mixed workloads that always run."""
NAMES = ("a", "b", "c", "d")
CHECKPOINTS = {"a": "llama", "b": "llama-tied", "c": "sparse-kv", "d": "windows"}


def often_give_way() -> Policies:
    """A model gives way each eighth time that another one is refused, whatever the time."""
    calls = count(1)

    def choose(_: object) -> int | None:
        return 0 if next(calls) % 8 == 0 else None

    return Policies(residents=choose, relief=choose)


def states(world: World) -> dict[str, ModelState]:
    return {name: status.state for name, status in world.engine.statuses.items()}


# --- one model for another -----------------------------------------------------------------------


@each_kv_cache
def test_an_idle_model_loses_no_more_than_is_needed(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]], kv_cache: str
) -> None:
    """What is left of it stays, and only the rest is read again."""
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] - 5 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, kv_cache=kv_cache)
    world.add_model("b", "llama-tied", load=False)
    first = world.finished(world.send("a", cases["llama"][0]))
    assert states(world) == {"a": ModelState.RESIDENT, "b": ModelState.REGISTERED}
    world.finished(world.send("b", make_short(cases["llama-tied"])))
    status = world.engine.statuses["a"]
    assert status.state == ModelState.PARTIAL
    assert 0 < status.resident_bytes < status.weight_bytes
    again = world.finished(world.send("a", cases["llama"][0]))
    assert again.token_ids == first.token_ids
    assert states(world) == {"a": ModelState.RESIDENT, "b": ModelState.PARTIAL}


def test_logits_are_equal_bit_for_bit_after_an_eviction(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] - 5 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, enable_prefix_caching=False)
    world.add_model("b", "llama-tied", load=False)
    (case,) = [case for case in cases["llama"] if case.logprobs][:1]
    before = world.finished(world.send("a", case))
    for _ in range(2):
        world.finished(world.send("b", make_short(cases["llama-tied"])))
        assert not world.is_loaded("a")
        assert world.finished(world.send("a", case)).logprobs == before.logprobs


def test_the_log_tells_who_lost_what_to_whom(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """And what it took to load it again, in the report and in its sums."""
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] - 5 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, enable_prefix_caching=False)
    world.add_model("b", "llama-tied", load=False)
    world.finished(world.send("a", cases["llama"][0]))
    world.finished(world.send("b", make_short(cases["llama-tied"])))
    loser = Owner("a", Kind.WEIGHTS)
    lost_bytes = sizes["llama"][0] - world.engine.statuses["a"].resident_bytes
    report = world.engine.memory()
    assert {entry.loser for entry in report.evictions} == {loser}
    assert {entry.asker for entry in report.evictions} <= {Owner("b", kind) for kind in Kind}
    assert Owner("b", Kind.WEIGHTS) in {entry.asker for entry in report.evictions}
    assert report.eviction_totals[loser].num_bytes == lost_bytes
    assert report.eviction_totals[loser].expected_s > 0
    assert report.eviction_totals[loser].paid_s == 0
    world.finished(world.send("a", cases["llama"][0]))
    report = world.engine.memory()
    of_a = [entry for entry in report.evictions if entry.loser == loser]
    assert all(entry.num_restored == entry.num_items and entry.paid_s > 0 for entry in of_a)
    assert sum(entry.paid_s for entry in of_a) == pytest.approx(
        report.eviction_totals[loser].paid_s
    )
    assert Owner("b", Kind.WEIGHTS) in {entry.loser for entry in report.evictions}


def test_loading_what_an_operator_unloaded_is_no_regret(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    memory_bytes = sizes["llama"][0] + sizes["llama-tied"][0] - 5 * PAGE_BYTES
    world = open_world(memory_bytes, models={"a": "llama"}, enable_prefix_caching=False)
    world.add_model("b", "llama-tied", load=False)
    world.finished(world.send("b", make_short(cases["llama-tied"])))
    world.engine.unload_model("a")
    world.finished(world.send("a", cases["llama"][0]))
    assert world.engine.memory().eviction_totals[Owner("a", Kind.WEIGHTS)].paid_s == 0


def test_all_that_fit_are_loaded_at_the_start(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """Those that do not are loaded when they are asked for."""
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 10 * PAGE_BYTES
    models = {"a": "llama", "b": "llama-tied", "c": "sparse-kv"}
    world = open_world(memory_bytes, models=models)
    assert states(world) == {
        "a": ModelState.RESIDENT,
        "b": ModelState.REGISTERED,
        "c": ModelState.RESIDENT,
    }
    world.finished(world.send("b", make_short(cases["llama-tied"])))
    world.finished(world.send("a", make_short(cases["llama"])))


# --- turns ---------------------------------------------------------------------------------------


def test_the_longest_resident_gives_way_after_a_least_time():
    def chosen(load_s: float, *residents: tuple[float, float]) -> int | None:
        return longest_resident(
            ResidentsSnapshot(load_s, [Resident(*resident) for resident in residents])
        )

    assert chosen(0.01, (0.3, 0.0), (0.49, 0.0)) is None
    assert chosen(0.01, (0.3, 0.0), (0.5, 0.0)) == 1
    assert chosen(2.0, (7.9, 0.0), (3.0, 0.0)) is None
    assert chosen(2.0, (8.0, 0.0), (9.0, 0.0)) == 1
    # Copies of its KV count too.
    assert chosen(1.0, (5.9, 0.5)) is None
    assert chosen(1.0, (6.0, 0.5)) == 0
    assert chosen(1.0, (6.0, 0.5), (9.0, 2.0)) == 0


def test_turns_depend_on_who_waits_for_a_first_token():
    def chosen(ran_s: float, *, has_streamed: bool, **waits: bool) -> bool:
        resident = Resident(ran_s, 0.5, has_streamed)
        return longest_resident(ResidentsSnapshot(1.5, [resident], **waits)) is not None

    def run_s(*, has_streamed: bool, **waits: bool) -> float:
        """How long it runs before it gives way, in halves of a second."""
        times_s = (0.5 * number for number in count())
        return next(s for s in times_s if chosen(s, has_streamed=has_streamed, **waits))

    # A change takes two seconds.
    assert run_s(has_streamed=True) == run_s(has_streamed=False) == 8.0
    assert run_s(has_streamed=True, has_new=True) == 2.0
    assert run_s(has_streamed=False, has_new=True) == 8.0
    assert run_s(has_streamed=True, can_wait=True) == 32.0
    assert run_s(has_streamed=False, can_wait=True) == 32.0
    quick = [Resident(0.4, 0.0, True), Resident(0.5, 0.0, True), Resident(0.6, 0.0, False)]
    assert longest_resident(ResidentsSnapshot(0.1, quick, has_new=True)) == 2
    assert longest_resident(ResidentsSnapshot(0.2, quick, has_new=True)) == 1


def test_the_one_with_the_fewest_requests_for_its_bytes_relieves_others():
    many, few = Holder(9.0, 0.1, 100, 8), Holder(9.0, 0.1, 100, 2)
    assert fewest_running(ReliefSnapshot(0.5, [many, few])) == 1
    assert fewest_running(ReliefSnapshot(0.5, [few, few._replace(num_bytes=900)])) == 1
    # Neither before it has run for a turn, nor before the request has waited for one.
    assert fewest_running(ReliefSnapshot(0.49, [many, few])) is None
    assert fewest_running(ReliefSnapshot(0.5, [many, few._replace(ran_s=0.4)])) == 0
    slow = few._replace(load_s=1.0)
    assert fewest_running(ReliefSnapshot(3.9, [slow])) is None
    assert fewest_running(ReliefSnapshot(4.0, [slow])) == 0
    # A request that waits for its first token waits less, for a model that has none such.
    streams = slow._replace(has_streamed=True)
    assert fewest_running(ReliefSnapshot(3.9, [streams])) is None
    assert fewest_running(ReliefSnapshot(3.9, [slow], is_new=True)) is None
    assert fewest_running(ReliefSnapshot(1.0, [slow, streams], is_new=True)) == 1
    assert fewest_running(ReliefSnapshot(0.9, [streams], is_new=True)) is None
    assert fewest_running(ReliefSnapshot(9.0, [streams._replace(ran_s=0.9)], is_new=True)) is None


@each_kv_cache
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_model_gives_way_to_requests_that_wait_for_kv(
    open_world: Open,
    cases: dict[str, list[Case]],
    sizes: dict[str, tuple[int, int]],
    kv_cache: str,
    num_ahead: int,
) -> None:
    """Both models are there, and leave next to nothing for KV."""
    seen: list[ReliefSnapshot] = []

    def relief(snapshot: ReliefSnapshot) -> int | None:
        seen.append(snapshot)
        return 0 if len(seen) % 2 == 0 else None

    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 18 * PAGE_BYTES
    world = open_world(
        memory_bytes,
        models={"a": "llama", "b": "sparse-kv"},
        kv_cache=kv_cache,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
        policies=replace(often_give_way(), relief=relief),
    )
    for i in range(8):
        world.send("a", cases["llama"][i])
        world.send("b", cases["sparse-kv"][i])
    world.finish()
    assert all(sent.error is None for sent in world.sent.values())
    gave_way = len(seen) // 2
    assert gave_way > 0
    assert sum(world.engine.stats().num_preemptions.values()) >= gave_way
    for snapshot in seen:
        (holder,) = snapshot.holders
        assert holder.num_bytes > 0
        assert holder.num_running >= 0
        assert holder.ran_s >= 0


@each_kv_cache
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_models_take_turns(
    open_world: Open,
    cases: dict[str, list[Case]],
    sizes: dict[str, tuple[int, int]],
    kv_cache: str,
    num_ahead: int,
) -> None:
    """Neither waits until the other has no more requests, and no request is lost."""
    memory_bytes = sizes["llama"][0] + 30 * PAGE_BYTES
    world = open_world(
        memory_bytes,
        kv_cache=kv_cache,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
        policies=often_give_way(),
    )
    world.add_model("a", "llama")
    world.add_model("b", "sparse-kv", load=False)
    ends: list[str] = []
    for i in range(6):
        world.send("a", cases["llama"][i])
        world.send("b", cases["sparse-kv"][i])
    while world.engine.has_work:
        before = set(world.open_requests)
        world.step()
        ends += [world.sent[request_id].model for request_id in before - {*world.open_requests}]
    assert Counter(ends) == {"a": 6, "b": 6}
    assert all(sent.error is None for sent in world.sent.values())
    assert sum(world.engine.stats().num_preemptions.values()) > 0


@pytest.mark.parametrize(
    ("kv_cache", "num_ahead", "preemption_mode"),
    [
        ("virtual", 1, "swap"),
        ("paged", 0, "recompute"),
        *([("virtual", 0, "recompute"), ("paged", 0, "swap")] if EVERY_CASE else ()),
    ],
)
def test_four_models_in_room_for_two_and_a_half(
    open_world: Open,
    cases: dict[str, list[Case]],
    sizes: dict[str, tuple[int, int]],
    kv_cache: str,
    num_ahead: int,
    preemption_mode: str,
) -> None:
    """Requests of which mostly several of one model are in a row: each answer is right."""
    mean_bytes = sum(sizes[checkpoint][0] for checkpoint in CHECKPOINTS.values()) / 4
    world = open_world(
        int(2.5 * mean_bytes) + 20 * PAGE_BYTES,
        models=CHECKPOINTS,
        kv_cache=kv_cache,
        num_ahead=num_ahead,
        is_behind=num_ahead > 0,
        preemption_mode=preemption_mode,
    )
    random = Random(num_ahead)
    name, num_loads, num_sent = "a", 0, 0
    while num_sent < NUM_MIXED or world.engine.has_work:
        while num_sent < NUM_MIXED and len(world.open_requests) < 24:
            name = random.choice(NAMES) if random.random() < 0.2 else name
            of_model = cases[CHECKPOINTS[name]]
            is_short = random.random() < 0.7
            world.send(name, make_short(of_model) if is_short else random.choice(of_model))
            num_sent += 1
        before = states(world)
        for output in world.engine.step():
            world.sent[output.request_id].receive(output)
        after = states(world)
        num_loads += sum(
            before[name] == ModelState.LOADING and after[name] == ModelState.RESIDENT
            for name in NAMES
        )
        if num_sent % 10 == 0:
            world.check()
        for request_id in world.sent.keys() - {*world.open_requests}:
            del world.sent[request_id]
    assert not world.open_requests
    assert num_loads > 20
    world.check()


def test_all_are_prepared_at_the_start_where_that_takes_long(
    open_world: Open, cases: dict[str, list[Case]], sizes: dict[str, tuple[int, int]]
) -> None:
    """The first one of the configuration comes last, and stays."""
    memory_bytes = sizes["llama"][0] + sizes["sparse-kv"][0] + 10 * PAGE_BYTES
    models = {"a": "llama", "c": "sparse-kv", "b": "llama-tied"}
    world = open_world(memory_bytes, models=models, num_ahead=1, is_behind=True)
    assert all(status.num_loads == 1 for status in world.engine.statuses.values())
    assert states(world)["a"] == ModelState.RESIDENT
    assert not world.is_loaded("b") or not world.is_loaded("c")
    world.finished(world.send("b", make_short(cases["llama-tied"])))
