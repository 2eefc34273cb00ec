"""The scheduler over real caches and a tiny pool, with a runner that makes tokens up.

Random arrivals of all decoding methods, with prompts that begin alike, lengths, aborts and refusals
of the device, with up to one step in flight; after every step the rules that the scheduler promises
are checked, and that every sequence reads its own tokens through its cache after blocks were
shared, forked, retained, evicted, swapped or computed again.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, LayerKV, Rows
from aquifer.cache.swap import SwapSpace
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import TokenLogprobs, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.planning import chunk_tokens
from aquifer.engine.policies import Policies
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE_BYTES = 4096
MAX_TOKENS = 64
MAX_SEQS = 6
STOP_ID = 7
VOCAB_SIZE = 40
PROMPTS = np.random.default_rng(1).integers(VOCAB_SIZE, size=(3, MAX_TOKENS))
"""What prompts begin with."""
LAYOUTS = {
    "small": KVLayout((LayerKV(2, 32, 32),) * 2, torch.float32),  # four tokens a page
    "large": KVLayout((LayerKV(4, 96, 96),) * 2, torch.float32),  # a page and a half a token
}


@dataclass
class Tracked:
    """A request and its outputs so far."""

    lane: Lane
    group: SequenceGroup
    given: dict[int, list[int]] = field(default_factory=dict)  # by completion, from the runner
    received: dict[int, list[int]] = field(default_factory=dict)  # by completion, from outputs
    endings: dict[int, str] = field(default_factory=dict)
    ending: str | None = None  # finish reason of the whole request


class World:
    """One or two models in one pool, with events chosen by `random`."""

    def __init__(
        self,
        random: Random,
        cache: str,
        resources: ExitStack,
        *,
        names: tuple[str, ...],
        budget_bytes: int,
        max_batched_tokens: int = 200,
        faulty: bool = False,
        num_ahead: int = 0,
        keeps_prefixes: bool = False,
        preemption_mode: str = "recompute",
        block_size: int | None = None,
        policies: Policies | None = None,
    ) -> None:
        self.random = random
        self.is_in_order = policies is None
        self.num_ahead = num_ahead
        self.in_flight: deque[tuple[StepInput, StepOutput]] = deque()
        self.faulty = faulty
        self.driver = FaultyDriver(open_driver("cpu"))
        resources.callback(self.driver.close)
        self.pool = PagePool(self.driver, budget_bytes, PAGE_BYTES)
        resources.callback(self.pool.close)
        self.max_batched_tokens = max_batched_tokens
        self.now_s = 0.0
        self.space = SwapSpace(3 * budget_bytes // 4, self.driver.device)
        resources.callback(self.space.close)
        assembly = Assembly(
            self.pool,
            max_batched_tokens,
            swap_space=self.space,
            restore_mode=preemption_mode,  # type: ignore[arg-type]
            clock_s=lambda: self.now_s,
            policies=policies,
        )
        self.scheduler = assembly.scheduler
        factory = kv_cache(cache, block_size=block_size or random.choice((1, 3, 4, 16)))
        for name in names:
            lane = assembly.open_lane(
                LaneSpec(name, LAYOUTS[name], MAX_SEQS, MAX_TOKENS, factory, keeps_prefixes)
            )
            resources.callback(assembly.close_lane, lane)
        # The device's state: all tokens of each slot, those in flight included.
        self.known = {name: np.zeros((MAX_SEQS + 1, MAX_TOKENS), np.int64) for name in names}
        self.requests: dict[str, Tracked] = {}
        self.admitted: list[int] = []  # arrivals, in the order in which they ran first

    @classmethod
    def crowded(cls, seed: int, cache: str, resources: ExitStack, *, faulty: bool) -> World:
        random = Random(seed)
        names = random.choice((("small",), ("small", "large")))
        # The longest sequences do not fit, or hardly, or two of them do.
        needed_bytes = MAX_TOKENS * LAYOUTS[names[-1]].token_bytes
        return cls(
            random,
            cache,
            resources,
            names=names,
            budget_bytes=int(needed_bytes * random.uniform(0.7, 2)),
            max_batched_tokens=random.choice((1, 5, 16, 200)),
            faulty=faulty,
            num_ahead=random.choice((0, 1)),
            keeps_prefixes=random.choice((False, True, True)),
            preemption_mode=random.choice(("recompute", "swap", "auto")),
        )

    @property
    def live(self) -> list[Tracked]:
        return [tracked for tracked in self.requests.values() if tracked.ending is None]

    def arrive(self) -> None:
        """A request; refused at once, as the engine does it, if it would not fit alone."""
        lane = self.random.choice(list(self.scheduler.lanes.values()))
        num_prompt = self.random.choice((1, self.random.randrange(1, MAX_TOKENS)))
        max_total = self.random.randrange(num_prompt + 1, MAX_TOKENS + 1)
        options: dict[str, Any] = self.random.choice(
            ({}, {}, {"n": 2}, {"best_of": 3}, {"n": 2, "best_of": 3, "use_beam_search": True})
        )
        count = SamplingParams(**options).num_sequences
        # Blocks of a group may be spread over one page more for each sequence.
        needed_pages = lane.cache.footprint.most(num_prompt, max_total, count) + count - 1
        if needed_pages * self.pool.page_bytes <= self.pool.budget_bytes:
            if not options and self.random.random() < 0.3:
                options = {"min_tokens": 3}
            self.add(lane, num_prompt, max_total, **options)

    def add(self, lane: Lane, num_prompt: int, max_total: int, **options) -> Tracked:
        # Many prompts begin alike.
        prompt = self.random.choice(PROMPTS)[:num_prompt].tolist()
        for i in range(self.random.randrange(num_prompt + 1), num_prompt):
            prompt[i] = self.random.randrange(VOCAB_SIZE)
        return self.add_prompt(lane, prompt, max_total, **options)

    def add_prompt(self, lane: Lane, prompt: list[int], max_total: int, **options) -> Tracked:
        number = len(self.requests)
        params = SamplingParams(max_tokens=None, **options)
        group = SequenceGroup.of(
            Request(str(number), lane.name, prompt, params, 0.0),
            number,
            np.array(prompt, np.int32),
            seed=0,
            max_total=max_total,
            stop_ids=frozenset({STOP_ID}),
        )
        self.requests[str(number)] = tracked = Tracked(lane, group)
        self.scheduler.add(lane, group)
        return tracked

    def abort(self) -> None:
        tracked = self.random.choice(self.live)
        group = tracked.group
        if group.beams is None and len(group.sequences) > 1 and self.random.random() < 0.5:
            sequence = self.random.choice(group.sequences)
            self.scheduler.abort(tracked.lane, group, sequence.index)
            tracked.endings[sequence.index] = "abort"
            assert sequence.slot is None
            return
        sequences = list(group.sequences)
        self.scheduler.abort(tracked.lane, group)
        tracked.ending = "abort"
        assert all(sequence.slot is None for sequence in sequences)

    def step(self) -> None:
        self.now_s += 1
        if self.faulty and self.driver.num_calls > (self.driver.fail_at or -1):
            self.driver.fail_at = self.driver.num_calls + self.random.randrange(25)
        earliest = min(self.live, key=lambda t: t.group.arrival, default=None)
        was_running = earliest is not None and earliest.group in earliest.lane.running
        num_running = sum(len(lane.running) for lane in self.scheduler.lanes.values())
        plan = self.scheduler.plan()
        outputs = self.scheduler.take_failed()
        assert all(output.finish_reason == "error" for output in outputs)
        assert self.faulty or not outputs
        if earliest is not None and was_running and not outputs:
            # But a request that runs alone with scattered blocks begins again.
            stays = earliest.group in earliest.lane.running
            if self.is_in_order:
                assert stays or num_running == 1, "the earliest arrival was preempted"
        if plan is not None:
            self.check_plan(plan)
            self.in_flight.append((plan, self.run(plan)))
        if len(self.in_flight) > (0 if plan is None else self.num_ahead):
            outputs += self.scheduler.commit(*self.in_flight.popleft())
        for output in outputs:
            self.receive(output)
        self.check()

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def check_plan(self, plan: StepInput) -> None:
        spans, table = plan.spans, self.scheduler.lanes[plan.model].slots
        assert 0 < spans.num_tokens <= self.max_batched_tokens
        assert len(set(spans.slots.tolist())) == len(spans.slots)
        assert (spans.counts > 0).all()
        ends = spans.starts + spans.counts
        np.testing.assert_array_equal(ends, table.num_computed[spans.slots])
        assert (ends <= table.num_tokens[spans.slots]).all()
        assert (ends < table.max_total[spans.slots]).all()
        is_beam = table.most_new[spans.slots] == 0
        known = np.where(is_beam, table.num_tokens[spans.slots], table.num_given[spans.slots])
        np.testing.assert_array_equal(plan.sampled, np.flatnonzero(ends >= known))
        decodes = spans.starts >= table.num_given[spans.slots]
        np.testing.assert_array_equal(np.flatnonzero(decodes), np.arange(plan.num_decodes))
        assert plan.num_decodes <= plan.num_single
        assert (spans.counts[: plan.num_single] == 1).all()
        assert (spans.counts[plan.num_single :] > 1).all()
        for slot in spans.slots[np.argsort(table.serial[spans.slots])]:
            sequence = table.sequences[slot]
            assert sequence is not None
            assert sequence.parent is None
            if sequence.group.arrival not in self.admitted:
                self.admitted.append(sequence.group.arrival)

    def run(self, plan: StepInput) -> StepOutput:
        """Write each token's id as its KV, and find the mean of all ids so far by attention."""
        lane = self.scheduler.lanes[plan.model]
        table, cache = lane.slots, lane.cache
        known = self.known[plan.model]
        slots, positions = plan.spans.rows()
        is_told = plan.token_ids >= 0
        known[slots[is_told], positions[is_told]] = plan.token_ids[is_told]
        for assigned in plan.assigned:  # tokens that are cached, forked or copied back
            known[assigned.slot] = table.token_ids[assigned.slot]
        cache.upload()
        view = cache.tensors.view(Rows.of(plan.spans, plan.num_single, torch.device("cpu")))
        ids = torch.from_numpy(known[slots, positions]).float()
        sums = np.cumsum(known, axis=1)
        expected = torch.from_numpy(sums[slots, positions] / (positions + 1)).float()
        for index, layer in enumerate(cache.tensors.shape.layout.layers):
            key = ids[:, None, None].expand(-1, layer.num_kv_heads, layer.key_dim)
            view.write(index, key, key + index)
            means = view.attend(index, torch.zeros(key.shape), scale=1.0)
            torch.testing.assert_close(
                means, (expected + index)[:, None, None].expand_as(means), rtol=1e-4, atol=1e-4
            )
        tokens = [self.random.randrange(VOCAB_SIZE) for _ in plan.sampled]
        reports = {}
        for row, (index, token) in enumerate(zip(plan.sampled.tolist(), tokens, strict=True)):
            slot = plan.spans.slots[index]
            sequence = table.sequences[slot]
            assert sequence is not None
            tracked = self.requests[sequence.request.request_id]
            beams = sequence.group.beams
            if beams is None:
                known[slot, plan.spans.starts[index] + plan.spans.counts[index]] = token
                tracked.given.setdefault(sequence.index, []).append(token)
            else:
                count = beams.search.num_candidates
                best = [token, *self.random.sample(range(VOCAB_SIZE), count)]
                logprobs = [0.0, *sorted(-self.random.random() for _ in range(count))[::-1]]
                reports[row] = [TokenLogprobs(best, logprobs, [])]
        return StepOutput(np.array(tokens, np.int64)[:, None], plan.most_new, reports)

    def receive(self, output: TokenOutput) -> None:
        tracked = self.requests[output.request_id]
        group = tracked.group
        assert tracked.ending is None, "an output after the last one"
        if output.finish_reason == "error":
            tracked.ending = "error"
            return
        assert output.index not in tracked.endings, "an output after the last one"
        received = tracked.received.setdefault(output.index, [])
        received += output.token_ids
        if output.finish_reason is not None:
            tracked.endings[output.index] = output.finish_reason
        is_full = group.num_prompt_tokens + len(received) == group.max_total
        if group.beams is not None:
            assert output.finish_reason == ("stop" if received[-1] == STOP_ID else "length")
            assert is_full or output.finish_reason == "stop"
        else:
            given = tracked.given[output.index]
            # At most what is in flight is not known yet.
            assert 0 <= len(given) - len(received) <= self.num_ahead
            assert received == given[: len(received)]
            may_stop = len(received) > group.request.params.min_tokens
            stops = received[-1] == STOP_ID and may_stop
            assert output.finish_reason == ("stop" if stops else "length" if is_full else None)
        if len(tracked.endings) == group.request.params.num_completions:
            tracked.ending = "done"
            assert not group.sequences

    def check(self) -> None:
        self.pool.check()
        in_use = self.pool.usage().in_use_bytes
        arrivals: list[int] = []
        for name, lane in self.scheduler.lanes.items():
            for queue in (lane.running, lane.waiting):
                order = [group.arrival for group in queue]
                assert order == sorted(order) or not self.is_in_order
                arrivals += order
            running = [s for group in lane.running for s in group.sequences]
            waiting = [s for group in lane.waiting for s in group.sequences]
            assert all(s.slot is not None for s in running)
            assert all(s.slot is None and s.lease is None for s in waiting)
            assert lane.slots.num_free == MAX_SEQS - len(running)
            assert lane.slots.num_pending == sum(s.parent is not None for s in running)
            stats = lane.cache.stats(lane.written_tokens)
            assert stats.mapped_bytes == in_use.get(Owner(name, Kind.KV), 0)
            assert stats.wasted_bytes >= 0
            admitted = [a for a in self.admitted if self.requests[str(a)].lane is lane]
            assert admitted == sorted(admitted) or not self.is_in_order
        assert sorted(arrivals) == [tracked.group.arrival for tracked in self.live]

    def check_empty(self) -> None:
        """Only retained prefixes are left, and all of them can be evicted."""
        assert self.space.used_bytes == 0
        for lane in self.scheduler.lanes.values():
            if lane.prefixes is not None:
                lane.prefixes.close()
        assert not self.pool.usage().in_use_bytes


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.parametrize("seed", range(7))
def test_every_request_ends(seed: int, cache: str, faulty: bool) -> None:
    with ExitStack() as resources:
        world = World.crowded(seed, cache, resources, faulty=faulty)
        rate = world.random.choice((0.05, 0.3, 1.0))
        while len(world.requests) < 30:
            if world.random.random() < rate:
                world.arrive()
            if world.live and world.random.random() < 0.02:
                world.abort()
            world.step()
        # The most steps possible: all requests run alone and start again for each token.
        steps_left = 3 * 30 * MAX_TOKENS * (1 + MAX_TOKENS // world.max_batched_tokens)
        while world.scheduler.has_work:
            world.step()
            steps_left -= 1
            assert steps_left, "no end"
        assert not world.live
        world.check_empty()
        assert {t.ending for t in world.requests.values()} <= {"done", "abort", "error"}


@pytest.mark.parametrize(
    ("start", "count", "room", "expected"),
    [
        (0, 100, 200, 100),  # all of it
        (300, 700, 700, 700),
        (0, 1000, 700, 512),  # cut at a multiple of 256
        (300, 1000, 700, 468),  # to 768
        (300, 1000, 100, 100),  # none is within reach
        (512, 1000, 256, 256),
    ],
)
def test_prompts_are_cut_at_round_places(start: int, count: int, room: int, expected: int) -> None:
    assert chunk_tokens(start, count, room) == expected


def test_the_worlds_are_crowded() -> None:
    """The test above means nothing unless pools run short and devices refuse."""
    num_preemptions = num_errors = num_swaps = num_hits = 0
    for seed in range(6):
        with ExitStack() as resources:
            world = World.crowded(seed, "virtual", resources, faulty=True)
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
        world = World(Random(0), "virtual", resources, names=names, budget_bytes=budget_bytes)
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
        world = World(
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
