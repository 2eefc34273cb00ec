"""The scheduler over real caches and a tiny pool, with a runner that makes tokens up.

Blocks are shared, forked, retained, evicted, swapped and computed again, and the device refuses now
and then. `SchedulerWorld` checks each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from tests.cases import EVERY_CASE, covering, tries
from tests.engine.books import KV_LIMITS, MAX_TOKENS, PAGE_BYTES, SchedulerWorld

from aquifer.cache import KV_CACHES
from aquifer.cache.spans import IntArray
from aquifer.engine.lane_pages import longest, most_pages
from aquifer.engine.params import SamplingParams
from aquifer.engine.policies import ModelState, Policies
from aquifer.memory.pool import Kind, Owner

NUM_REQUESTS = 30 if EVERY_CASE else 18
"""Requests to each random world."""


@pytest.mark.parametrize(
    ("seed", "cache", "faulty", "windows"),
    covering(range(tries(8)), KV_CACHES, (False, True), (False, True), strength=2),
)
def test_every_request_ends(seed: int, cache: str, faulty: bool, windows: bool) -> None:
    with ExitStack() as resources:
        world = SchedulerWorld.crowded(seed, cache, resources, faulty=faulty, windows=windows)
        rate = world.random.choice((0.05, 0.3, 1.0))
        while len(world.requests) < NUM_REQUESTS:
            if world.random.random() < rate:
                world.arrive()
            if world.live and world.random.random() < 0.02:
                world.abort()
            world.step()
        # The most steps possible: all requests run alone and start again for each token.
        steps_left = 3 * NUM_REQUESTS * MAX_TOKENS * (1 + MAX_TOKENS // world.max_batched_tokens)
        while world.scheduler.has_work:
            world.step()
            steps_left -= 1
            assert steps_left, "no end"
        assert not world.live
        world.check_empty()
        assert {t.ending for t in world.requests.values()} <= {"done", "abort", "error"}


@pytest.mark.parametrize(
    ("seed", "cache", "windows"), covering(range(4), KV_CACHES, (False, True), strength=2)
)
def test_steps_fail_at_random(seed: int, cache: str, windows: bool) -> None:
    """No request finds what a failed step should have written, and all memory comes back."""
    with ExitStack() as resources:
        world = SchedulerWorld.crowded(
            seed, cache, resources, faulty=False, failure_rate=0.03, windows=windows
        )
        while len(world.requests) < NUM_REQUESTS:
            world.arrive()
            if world.live and world.random.random() < 0.05:
                world.abort()
            world.step()
        world.finish()
        world.check_empty()
        endings = {tracked.ending for tracked in world.requests.values()}
        assert endings >= {"done", "error"}


def test_a_model_that_is_evicted_before_its_turn_is_not_planned() -> None:
    """Planning one model may evict the weights of another that has waiting requests."""

    def evict_before(models: Sequence[ModelState]) -> Sequence[int]:
        lane.is_resident = False
        return range(len(models))

    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(0),
            "paged",
            resources,
            names=("narrow",),
            budget_bytes=128 * PAGE_BYTES,
            policies=Policies(turns=evict_before),
        )
        (lane,) = world.scheduler.lanes.values()
        tracked = world.add(lane, 3, 6)
        assert world.scheduler.plan() is None
        assert tracked.group in lane.waiting
        world.scheduler.abort(lane, tracked.group)
        world.check_empty()


@pytest.mark.parametrize("cache", KV_CACHES)
def test_samples_that_outgrow_their_kv_share_nothing(cache: str) -> None:
    """The room that a request needs is known before, and suffices."""
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(0),
            cache,
            resources,
            names=("large",),
            budget_bytes=128 * PAGE_BYTES,
            kv_limits=KV_LIMITS,
            block_size=1,
        )
        (lane,) = world.scheduler.lanes.values()
        limit = KV_LIMITS[0]
        shared = most_pages(lane, limit - 3, limit + 1, 3)
        num_pages = most_pages(lane, limit - 3, limit + 2, 3)
        assert num_pages == 3 * most_pages(lane, limit - 3, limit + 2) > 2 * shared
        assert longest(lane, num_pages - 1, limit - 3, 3) == limit + 1
        assert longest(lane, num_pages, limit - 3, 3) == limit + 2
        others = world.pool.acquire(Owner("others", Kind.WEIGHTS), 128 - num_pages)
        assert others is not None
        tracked = world.add(lane, limit - 3, limit + 2, n=3, min_tokens=5)
        world.finish()
        assert tracked.ending == "done"
        world.pool.release(others)
        world.check_empty()


@pytest.mark.parametrize(
    ("named", "cache", "num_together"),
    covering(
        [
            *((("narrow", "large"), seed) for seed in (0, 73, 110)),
            *((("windows", "wide", "uneven"), seed) for seed in (19, 45, 56, 136)),
        ],
        KV_CACHES,
        [1, 2],
        strength=2,
    ),
)
def test_what_fits_alone_is_served(
    named: tuple[tuple[str, ...], int], cache: str, num_together: int
) -> None:
    """Whatever ran or was retained before, and where it leaves not a page to spare.

    `SchedulerWorld.step` fails when a request does. In these cases blocks are scattered over more
    pages than they need.
    """
    names, seed = named
    random = Random(seed)
    with ExitStack() as resources:
        world = SchedulerWorld(
            random,
            cache,
            resources,
            names=(random.choice(names),),
            budget_bytes=1 << 20,
            max_batched_tokens=random.choice((1, 7, 512)),
            num_ahead=random.choice((0, 1)),
            keeps_prefixes=random.random() < 0.7,
            preemption_mode=random.choice(("recompute", "swap", "auto")),
            kv_limits=random.choice(((), KV_LIMITS)),
        )
        (lane,) = world.scheduler.lanes.values()
        options: dict[str, Any] = random.choice(
            ({}, {}, {"n": 3}, {"n": 2, "use_beam_search": True})
        )
        count = SamplingParams(**options).num_sequences
        num_prompt = random.randint(1, 20)
        num_total = num_prompt + random.randint(1, 28)
        most = most_pages(lane, num_prompt, num_total, count)
        num_pages = most + random.choice((0, 0, 1, 3))
        others = world.pool.acquire(
            Owner("others", Kind.WEIGHTS), world.pool.budget_bytes // PAGE_BYTES - num_pages
        )
        assert others is not None
        for _ in range(4):
            for _ in range(num_together):
                world.add(lane, num_prompt, random.randint(num_prompt + 1, num_total), **options)
            world.finish()
        world.pool.release(others)
        world.check_empty()


def test_the_worlds_are_crowded() -> None:
    """The test above means nothing unless pools run short and devices refuse."""
    num_preemptions = num_errors = num_swaps = num_hits = 0
    for seed in range(6):
        with ExitStack() as resources:
            world = SchedulerWorld.crowded(seed, "virtual", resources, faulty=True)
            for _ in range(20):
                world.arrive()
            world.finish()
            num_preemptions += world.scheduler.num_preemptions
            num_errors += sum(t.ending == "error" for t in world.requests.values())
            for lane in world.scheduler.lanes.values():
                num_swaps += lane.num_swaps
                num_hits += 0 if lane.prefixes is None else lane.prefixes.stats.hit_tokens
    assert num_preemptions > 10
    assert num_errors > 0
    assert num_swaps > 3
    assert num_hits > 10


def test_who_waits_for_memory_is_not_overtaken_by_another_model() -> None:
    with ExitStack() as resources:
        names, budget_bytes = ("small", "large"), 100 * PAGE_BYTES
        world = SchedulerWorld(
            Random(0), "virtual", resources, names=names, budget_bytes=budget_bytes
        )
        small, large = (world.scheduler.lanes[name] for name in ("small", "large"))
        world.add(large, 40, 60)
        world.step()
        world.add(large, 40, 60)  # the pool is short of room for it
        world.step()
        world.add(small, 4, 20)  # it would fit
        world.finish()
        assert world.admitted == [0, 1, 2]


@pytest.mark.parametrize("num_prompt", [7, 8], ids=["while it runs", "when it comes in"])
def test_a_request_alone_is_not_held_up_by_what_is_retained(num_prompt: int) -> None:
    """Its retained prefix is scattered over so many pages that the rest has no room."""
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(0),
            "paged",
            resources,
            names=("large",),
            budget_bytes=40 * PAGE_BYTES,
            keeps_prefixes=True,
            block_size=1,  # a page and a half
        )
        (lane,) = world.scheduler.lanes.values()
        # Two of them take turns at the blocks, and those of one are retained.
        retained = world.add_prompt(lane, [1], 6, min_tokens=5)
        world.add_prompt(lane, [2], 6, min_tokens=5, prompt_logprobs=0)
        world.finish()
        pages = world.pool.usage().in_use_bytes[Owner("large", Kind.PREFIX)] // PAGE_BYTES
        assert pages == 10  # for five tokens
        # Another owner leaves 12 pages, which have room for 8 tokens.
        others = world.pool.acquire(
            Owner("others", Kind.WEIGHTS), world.pool.free_bytes // PAGE_BYTES - 2
        )
        assert others is not None
        prompt = [1, *retained.received[0], *range(10, 12)][:num_prompt]
        tracked = world.add_prompt(lane, prompt, 9, min_tokens=8)
        world.finish()
        assert tracked.ending == "done"
        world.pool.release(others)
        world.check_empty()


def test_who_finds_no_place_in_one_piece_waits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the latest request, the memory of which would not help it."""
    with ExitStack() as resources:
        world = SchedulerWorld(
            Random(0), "virtual", resources, names=("small",), budget_bytes=100 * PAGE_BYTES
        )
        (lane,) = world.scheduler.lanes.values()
        for _ in range(3):
            world.add(lane, 4, 20)
        world.step()
        groups = list(lane.running)
        cache, reserve = lane.cache, lane.cache.reserve
        stuck_slot = groups[1].sequences[0].slot

        def reserve_unless_stuck(slots: IntArray, num_tokens: IntArray) -> bool:
            is_stuck = stuck_slot in slots.tolist()
            monkeypatch.setattr(cache, "stuck_slot", stuck_slot if is_stuck else None)
            return not is_stuck and reserve(slots, num_tokens)

        monkeypatch.setattr(cache, "reserve", reserve_unless_stuck)
        world.step()
        assert [group in lane.running for group in groups] == [True, False, True]
        monkeypatch.setattr(cache, "reserve", reserve)
        monkeypatch.setattr(cache, "stuck_slot", None)
        world.finish()
