"""The scheduler over real caches and a tiny pool, with a runner that makes tokens up.

Random arrivals, lengths, aborts and refusals of the device, with up to one step in flight; after
every step the rules that the scheduler promises are checked, and that the KV read through the
caches is what was written.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, LayerKV, Rows
from aquifer.engine.request import Request, SamplingParams, TokenOutput
from aquifer.engine.scheduler import Lane, Plan, Sampled, Scheduler, chunk_tokens
from aquifer.engine.slots import Sequence, SlotTable
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE_BYTES = 4096
MAX_TOKENS = 64
MAX_SEQS = 5
STOP_ID = 7
VOCAB_SIZE = 40
LAYOUTS = {
    "small": KVLayout((LayerKV(2, 32, 32),) * 2, torch.float32),  # four tokens a page
    "large": KVLayout((LayerKV(4, 96, 96),) * 2, torch.float32),  # a page and a half a token
}


@dataclass
class Tracked:
    """A request, and what became of it."""

    lane: Lane
    sequence: Sequence
    given: list[int] = field(default_factory=list)  # by the runner
    received: list[int] = field(default_factory=list)  # through outputs
    ending: str | None = None


class World:
    """One model or two in one pool; what happens is decided by `random`."""

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
    ) -> None:
        self.random = random
        self.num_ahead = num_ahead
        self.in_flight: deque[tuple[Plan, Sampled]] = deque()
        self.faulty = faulty
        self.driver = FaultyDriver(open_driver("cpu"))
        resources.callback(self.driver.close)
        self.pool = PagePool(self.driver, budget_bytes, PAGE_BYTES)
        resources.callback(self.pool.close)
        self.max_batched_tokens = max_batched_tokens
        self.scheduler = Scheduler(self.pool, max_batched_tokens)
        factory = kv_cache(cache, block_size=random.choice((1, 3, 4, 16)))
        for name in names:
            manager = factory(self.pool, Owner(name, Kind.KV), LAYOUTS[name], MAX_SEQS, MAX_TOKENS)
            resources.callback(manager.close)
            self.scheduler.add_lane(Lane(name, manager, SlotTable(MAX_SEQS, MAX_TOKENS)))
        # What the device knows: all tokens of each slot, those in flight included.
        self.known = {name: np.zeros((MAX_SEQS, MAX_TOKENS), np.int64) for name in names}
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
        )

    @property
    def live(self) -> list[Tracked]:
        return [tracked for tracked in self.requests.values() if tracked.ending is None]

    def arrive(self) -> None:
        """A request; refused at once, as the engine does it, if it would not fit alone."""
        lane = self.random.choice(list(self.scheduler.lanes.values()))
        num_prompt = self.random.choice((1, self.random.randrange(1, MAX_TOKENS)))
        max_total = self.random.randrange(num_prompt + 1, MAX_TOKENS + 1)
        if lane.cache.bytes_needed(max_total - 1) <= self.pool.budget_bytes:
            self.add(lane, num_prompt, max_total, min_tokens=self.random.choice((0, 0, 3)))

    def add(self, lane: Lane, num_prompt: int, max_total: int, min_tokens: int = 0) -> None:
        number = len(self.requests)
        prompt = [self.random.randrange(VOCAB_SIZE) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=None, min_tokens=min_tokens)
        sequence = Sequence(
            request=Request(str(number), lane.name, prompt, params, 0.0),
            arrival=number,
            seed=0,
            max_total=max_total,
            stop_ids=frozenset({STOP_ID}),
            eos_ids=frozenset(),
            token_ids=np.array(prompt, np.int32),
        )
        self.requests[str(number)] = Tracked(lane, sequence)
        self.scheduler.add(lane, sequence)

    def abort(self) -> None:
        tracked = self.random.choice(self.live)
        self.scheduler.abort(tracked.lane, tracked.sequence)
        tracked.ending = "abort"
        assert tracked.sequence.slot is None

    def step(self) -> None:
        if self.faulty and self.driver.num_calls > (self.driver.fail_at or -1):
            self.driver.fail_at = self.driver.num_calls + self.random.randrange(25)
        earliest = min(self.live, key=lambda t: t.sequence.arrival, default=None)
        was_running = earliest is not None and earliest.sequence.slot is not None
        plan = self.scheduler.plan()
        outputs = self.scheduler.take_failed()
        assert all(output.finish_reason == "error" for output in outputs)
        assert self.faulty or not outputs
        if earliest is not None and was_running and not outputs:
            assert earliest.sequence.slot is not None, "the earliest arrival was preempted"
        if plan is not None:
            self.check_plan(plan)
            self.in_flight.append((plan, self.run(plan)))
        if len(self.in_flight) > (0 if plan is None else self.num_ahead):
            outputs += self.scheduler.commit(*self.in_flight.popleft())
        for output in outputs:
            self.receive(output)
        self.check()

    def check_plan(self, plan: Plan) -> None:
        spans, table = plan.spans, plan.lane.slots
        assert 0 < spans.num_tokens <= self.max_batched_tokens
        assert len(set(spans.slots.tolist())) == len(spans.slots)
        assert (spans.counts > 0).all()
        ends = spans.starts + spans.counts
        np.testing.assert_array_equal(ends, table.num_computed[spans.slots])
        assert (ends <= table.num_tokens[spans.slots]).all()
        assert (ends < table.max_total[spans.slots]).all()
        np.testing.assert_array_equal(
            plan.sampled, np.flatnonzero(ends >= table.num_seated[spans.slots])
        )
        decodes = spans.starts >= table.num_seated[spans.slots]
        np.testing.assert_array_equal(np.flatnonzero(decodes), np.arange(plan.num_decodes))
        assert (spans.counts[: plan.num_decodes] == 1).all()
        admitted = np.flatnonzero(spans.starts == 0)
        np.testing.assert_array_equal(np.sort(plan.admitted), np.sort(spans.slots[admitted]))
        for slot in spans.slots:
            sequence = table.sequences[slot]
            assert sequence is not None
            if sequence.arrival not in self.admitted:
                self.admitted.append(sequence.arrival)

    def run(self, plan: Plan) -> Sampled:
        """Write each token's id as its KV, and find the mean of all ids so far by attention."""
        table, cache = plan.lane.slots, plan.lane.cache
        known = self.known[plan.lane.name]
        known[plan.admitted] = table.token_ids[plan.admitted]
        cache.upload()
        view = cache.view(Rows.of(plan.spans, plan.num_decodes, torch.device("cpu")))
        slots, positions = plan.spans.rows()
        ids = torch.from_numpy(known[slots, positions]).float()
        sums = np.cumsum(known, axis=1)
        expected = torch.from_numpy(sums[slots, positions] / (positions + 1)).float()
        for index, layer in enumerate(cache.layout.layers):
            key = ids[:, None, None].expand(-1, layer.num_kv_heads, layer.key_dim)
            view.write(index, key, key + index)
            means = view.attend(index, torch.zeros(key.shape), scale=1.0)
            torch.testing.assert_close(
                means, (expected + index)[:, None, None].expand_as(means), rtol=1e-4, atol=1e-4
            )
        tokens = [self.random.randrange(VOCAB_SIZE) for _ in plan.sampled]
        for index, token in zip(plan.sampled.tolist(), tokens, strict=True):
            slot = plan.spans.slots[index]
            known[slot, plan.spans.starts[index] + plan.spans.counts[index]] = token
            sequence = table.sequences[slot]
            assert sequence is not None
            self.requests[sequence.request.request_id].given.append(token)
        return Sampled(np.array(tokens, np.int64), {}, {})

    def receive(self, output: TokenOutput) -> None:
        tracked = self.requests[output.request_id]
        assert tracked.ending is None, "an output after the last one"
        tracked.received += output.token_ids
        # At most what is in flight is not known yet.
        assert 0 <= len(tracked.given) - len(tracked.received) <= self.num_ahead
        assert tracked.received == tracked.given[: len(tracked.received)]
        tracked.ending = output.finish_reason
        sequence = tracked.sequence
        num_output = len(tracked.received)
        if output.finish_reason != "error":
            stops = (
                tracked.received[-1] == STOP_ID and num_output > sequence.request.params.min_tokens
            )
            full = sequence.num_prompt_tokens + num_output == sequence.max_total
            assert output.finish_reason == ("stop" if stops else "length" if full else None)

    def check(self) -> None:
        self.pool.check()
        in_use = self.pool.usage().in_use_bytes
        arrivals: list[int] = []
        for name, lane in self.scheduler.lanes.items():
            for queue in (lane.running, lane.waiting):
                order = [sequence.arrival for sequence in queue]
                assert order == sorted(order)
                arrivals += order
            assert all(s.slot is not None for s in lane.running)
            assert all(s.slot is None for s in lane.waiting)
            assert lane.slots.num_free == MAX_SEQS - len(lane.running)
            stats = lane.cache.stats(lane.written_tokens)
            assert stats.mapped_bytes == in_use.get(Owner(name, Kind.KV), 0)
            assert stats.wasted_bytes >= 0
            admitted = [a for a in self.admitted if self.requests[str(a)].lane is lane]
            assert admitted == sorted(admitted)
        assert sorted(arrivals) == [tracked.sequence.arrival for tracked in self.live]


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("cache", KV_CACHES)
@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends(seed: int, cache: str, faulty: bool) -> None:
    with ExitStack() as resources:
        world = World.crowded(seed, cache, resources, faulty=faulty)
        rate = world.random.choice((0.05, 0.3, 1.0))
        while len(world.requests) < 40:
            if world.random.random() < rate:
                world.arrive()
            if world.live and world.random.random() < 0.02:
                world.abort()
            world.step()
        # Even if all run alone and start anew for each token, that is the most steps there are.
        steps_left = 40 * MAX_TOKENS * (1 + MAX_TOKENS // world.max_batched_tokens)
        while world.scheduler.has_work:
            world.step()
            steps_left -= 1
            assert steps_left, "no end"
        assert not world.live
        assert not world.pool.usage().in_use_bytes
        assert {t.ending for t in world.requests.values()} <= {"stop", "length", "abort", "error"}


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
    num_preemptions = num_errors = 0
    for seed in range(6):
        with ExitStack() as resources:
            world = World.crowded(seed, "virtual", resources, faulty=True)
            for _ in range(20):
                world.arrive()
            while world.scheduler.has_work:
                world.step()
            num_preemptions += world.scheduler.num_preemptions
            num_errors += sum(t.ending == "error" for t in world.requests.values())
    assert num_preemptions > 10
    assert num_errors > 0


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
        while world.scheduler.has_work:
            world.step()
        assert world.admitted == [0, 1, 2]
