"""The scheduler's books without a model: assemblies over a small pool, and random requests.

Requests of all decoding methods, with prompts that begin alike, arrive and are aborted, with up to
one step in flight; a runner makes the tokens up. After every step the rules that the scheduler
promises are checked, and that every sequence reads its own tokens through its cache, as they are
computed for a sequence of its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import (
    AttentionOptions,
    IntArray,
    KVLayout,
    LayerKV,
    Rows,
    SequenceCache,
    Spans,
)
from aquifer.cache.swap import SwapSpace
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.lane_pages import most_pages
from aquifer.engine.outputs import TokenLogprobs, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.policies import Policies
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.base import Driver
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE_BYTES = 4096
MAX_TOKENS = 64
MAX_SEQS = 6
STOP_ID = 7
VOCAB_SIZE = 40
PROMPTS = np.random.default_rng(1).integers(VOCAB_SIZE, size=(3, MAX_TOKENS))
"""What prompts begin with."""
KV_LIMITS = (20, 41)
"""Limits beyond which KV changes, in models that have any."""
KV_OFFSET = 64
"""What is added to KV with each limit that its sequence has outgrown."""
LAYOUTS = {
    "small": KVLayout((LayerKV(2, 32, 32),) * 2, torch.float32),  # four tokens a page
    "large": KVLayout((LayerKV(4, 96, 96),) * 2, torch.float32),  # a page and a half a token
    "narrow": KVLayout((LayerKV(1, 16, 16),) * 5, torch.float32),  # six tokens a page and a bit
    # Four tokens a page of either group, and a window that begins anywhere in a page.
    "windows": KVLayout(
        (LayerKV(2, 64, 64), LayerKV(2, 32, 32, 9), LayerKV(2, 32, 32, 5)), torch.float32
    ),
    # A page holds several windows of one group, and a few tokens of the other.
    "wide": KVLayout(
        (LayerKV(4, 32, 32, 7), LayerKV(1, 4, 4), LayerKV(4, 32, 32, 7)), torch.float32
    ),
    # Windows of a page and a half in one group, and of less than a page in the other.
    "uneven": KVLayout((LayerKV(2, 16, 16, 6), LayerKV(3, 16, 16, 9)), torch.float32),
    "sliding": KVLayout((LayerKV(2, 48, 48, 6),) * 2, torch.float32),  # no layer sees all
}


def open_assembly(
    resources: ExitStack,
    driver: Driver,
    budget_bytes: int,
    max_batched_tokens: int,
    swap_space: SwapSpace,
    **options: Any,
) -> Assembly:
    """An assembly over a pool of the driver's pages; `resources` closes driver, pool and space.

    Args:
        options: further arguments of `Assembly`.
    """
    resources.callback(driver.close)
    pool = PagePool(driver, budget_bytes, PAGE_BYTES)
    resources.callback(pool.close)
    resources.callback(swap_space.close)
    return Assembly(pool, max_batched_tokens, swap_space=swap_space, **options)


def open_lane(resources: ExitStack, assembly: Assembly, spec: LaneSpec) -> Lane:
    """A lane of the assembly, closed by `resources`."""
    lane = assembly.open_lane(spec)
    resources.callback(assembly.close_lane, lane)
    return lane


def check_means(
    cache: SequenceCache,
    layout: KVLayout,
    spans: Spans,
    known: IntArray,
    offsets: IntArray | int = 0,
) -> None:
    """Write each token's id as its KV; attention must return the mean of its sequence's ids.

    Args:
        cache: manager of the KV.
        layout: its layout.
        spans: spans of the step.
        known: [slots, tokens], ids of all tokens of each slot's sequence up to those of the step.
        offsets: [tokens], added to the ids of a token's sequence.
    """
    cache.upload()
    view = cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
    slots, positions = spans.rows()
    ids = torch.from_numpy(known[slots, positions] + offsets).float()
    sums = np.pad(np.cumsum(known, axis=1), ((0, 0), (1, 0)))
    for index, layer in enumerate(layout.layers):
        key = ids[:, None, None].expand(-1, layer.num_kv_heads, layer.key_dim)
        view.write(index, key, key + index)
        how = AttentionOptions(1.0, layer.window_tokens)
        means = view.attend(index, torch.zeros(key.shape), how)
        seen = np.minimum(positions + 1, layer.window_tokens or MAX_TOKENS)
        totals = sums[slots, positions + 1] - sums[slots, positions + 1 - seen]
        expected = torch.from_numpy(totals / seen + offsets).float() + index
        torch.testing.assert_close(
            means, expected[:, None, None].expand_as(means), rtol=1e-4, atol=1e-4
        )


def fewest_sequences(num_sequences: Mapping[int, int]) -> frozenset[int]:
    """The client with the fewest sequences; batches here are too small for the default policy."""
    return frozenset({min(num_sequences, key=lambda client: (num_sequences[client], client))})


@dataclass
class Tracked:
    """A request and its outputs so far."""

    lane: Lane
    group: SequenceGroup
    given: dict[int, list[int]] = field(default_factory=dict)  # by completion, from the runner
    received: dict[int, list[int]] = field(default_factory=dict)  # by completion, from outputs
    endings: dict[int, str] = field(default_factory=dict)
    ending: str | None = None  # finish reason of the whole request


class SchedulerWorld:
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
        failure_rate: float = 0.0,
        clients: tuple[str, ...] = ("",),
        express_share: float = 0.0,
        kv_limits: tuple[int, ...] = (),
    ) -> None:
        self.random = random
        self.kv_limits = kv_limits
        self.clients = clients
        self.failure_rate = failure_rate
        self.is_in_order = policies is None
        if policies is None:
            policies = Policies(express=fewest_sequences)
        self.num_ahead = num_ahead
        self.in_flight: deque[tuple[StepInput, StepOutput | None]] = deque()  # None: it fails
        self.faulty = faulty
        self.driver = FaultyDriver(open_driver("cpu"))
        self.max_batched_tokens = max_batched_tokens
        self.now_s = 0.0
        self.space = SwapSpace(3 * budget_bytes // 4, self.driver.device)
        assembly = open_assembly(
            resources,
            self.driver,
            budget_bytes,
            max_batched_tokens,
            self.space,
            restore_mode=preemption_mode,
            clock_s=lambda: self.now_s,
            policies=policies,
            express_share=express_share,
        )
        self.pool, self.scheduler = assembly.pool, assembly.scheduler
        block_size = block_size or random.choice((1, 3, 4, 16))
        factory = kv_cache(cache, block_size, max_batched_tokens)
        for name in names:
            spec = LaneSpec(name, LAYOUTS[name], MAX_SEQS, MAX_TOKENS, factory, keeps_prefixes)
            open_lane(resources, assembly, replace(spec, kv_limits=kv_limits))
        # The device's state: all tokens of each slot, those in flight included.
        self.known = {name: np.zeros((MAX_SEQS + 1, MAX_TOKENS), np.int64) for name in names}
        self.least_context = {name: np.zeros(MAX_SEQS + 1, np.int64) for name in names}
        self.requests: dict[str, Tracked] = {}
        self.admitted: list[int] = []  # arrivals, in the order in which they ran first

    @classmethod
    def crowded(
        cls,
        seed: int,
        cache: str,
        resources: ExitStack,
        *,
        faulty: bool,
        failure_rate: float = 0.0,
        windows: bool = False,
    ) -> SchedulerWorld:
        random = Random(seed)
        if windows:
            names = random.choice((("windows",), ("wide",), ("sliding",), ("sliding", "windows")))
            max_batched_tokens = random.choice((1, 5, 16))
            tokens = max_batched_tokens + 20  # that layers with windows keep at most, about
        else:
            names = random.choice((("small",), ("small", "large")))
            max_batched_tokens = random.choice((1, 5, 16, 200))
            tokens = MAX_TOKENS
        # The longest sequences do not fit, or hardly, or two of them do.
        needed_bytes = sum(
            group.layout.token_bytes * (tokens if group.window_tokens else MAX_TOKENS)
            for group in LAYOUTS[names[-1]].groups()
        )
        return cls(
            random,
            cache,
            resources,
            names=names,
            budget_bytes=int(needed_bytes * random.uniform(0.7, 2)),
            max_batched_tokens=max_batched_tokens,
            faulty=faulty,
            num_ahead=random.choice((0, 1)),
            keeps_prefixes=random.choice((False, True, True)),
            preemption_mode=random.choice(("recompute", "swap", "auto")),
            failure_rate=failure_rate,
            clients=random.choice((("",), ("", "a", "b"))),
            express_share=random.choice((0.0, 0.4)),
            kv_limits=random.choice(((), KV_LIMITS)),
        )

    def is_of(self, arrival: int, lane: Lane, client: str) -> bool:
        """Whether a request is of this model and this client."""
        tracked = self.requests[str(arrival)]
        return tracked.lane is lane and tracked.group.request.client == client

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
        needed_pages = most_pages(lane, num_prompt, max_total, count)
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

    def add_prompt(
        self, lane: Lane, prompt: list[int], max_total: int, client: str | None = None, **options
    ) -> Tracked:
        number = len(self.requests)
        if client is None:
            client = self.random.choice(self.clients)
        params = SamplingParams(max_tokens=None, **options)
        group = SequenceGroup.of(
            Request(str(number), lane.name, prompt, params, 0.0, client=client),
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
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.plan()
        outputs = self.scheduler.take_failed()
        assert all(output.finish_reason == "error" for output in outputs)
        assert self.faulty or not outputs
        if plan is None and self.scheduler.has_work and not (self.in_flight or self.faulty):
            assert self.scheduler.num_preemptions > num_preemptions, "requests are not planned"
        if earliest is not None and was_running and not outputs:
            # But a request that runs alone with scattered blocks begins again.
            stays = earliest.group in earliest.lane.running
            if self.is_in_order:
                assert stays or num_running == 1, "the earliest arrival was preempted"
        if plan is not None:
            self.check_plan(plan)
            if self.fails():
                self.scheduler.drop(plan, "its launch fails")
            else:
                # Whatever comes after a step that fails reads what that one did not write.
                fails = self.fails() or any(result is None for _, result in self.in_flight)
                self.in_flight.append((plan, None if fails else self.run(plan)))
        if len(self.in_flight) > (0 if plan is None else self.num_ahead):
            outputs += self.commit_first()
        outputs += self.scheduler.take_failed()
        for output in outputs:
            self.receive(output)
        self.check()

    def fails(self) -> bool:
        return self.failure_rate > 0 and self.random.random() < self.failure_rate

    def commit_first(self) -> list[TokenOutput]:
        plan, result = self.in_flight.popleft()
        if result is not None:
            outputs = self.scheduler.commit(plan, result)
            self.scheduler.observe(plan, seconds=1)
            return outputs
        while self.in_flight:
            self.scheduler.drop(self.in_flight.pop()[0], "the step before it failed")
        self.scheduler.drop(plan, "it fails")
        return []

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
        if plan.is_express:
            absent = set(table.in_order.tolist()) - set(spans.slots.tolist())
            assert absent or self.scheduler.num_waiting, "an express step is for some of many"
        for slot in spans.slots[np.argsort(table.serial[spans.slots])]:
            sequence = table.sequences[slot]
            assert sequence is not None
            assert sequence.parent is None
            if sequence.group.arrival not in self.admitted:
                self.admitted.append(sequence.group.arrival)

    def run(self, plan: StepInput) -> StepOutput:
        """Write each token's id as its KV, and find the mean of all ids so far by attention."""
        lane = self.scheduler.lanes[plan.model]
        table = lane.slots
        known = self.known[plan.model]
        slots, positions = plan.spans.rows()
        is_told = plan.token_ids >= 0
        known[slots[is_told], positions[is_told]] = plan.token_ids[is_told]
        for assigned in plan.assigned:  # tokens that are cached, forked or copied back
            known[assigned.slot] = table.token_ids[assigned.slot]
            self.least_context[plan.model][assigned.slot] = assigned.least_context_tokens
        contexts = np.maximum(self.least_context[plan.model][slots], positions + 1)
        offsets = KV_OFFSET * np.searchsorted(self.kv_limits, contexts)
        lengths = table.num_tokens[plan.spans.slots]
        lengths[plan.sampled] -= plan.most_new  # when the step was planned
        lengths = np.repeat(lengths, plan.spans.counts)
        assert (offsets == KV_OFFSET * np.searchsorted(self.kv_limits, lengths)).all()
        check_means(lane.cache, LAYOUTS[plan.model], plan.spans, known, offsets)
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
            for queue in (lane.running, *map(lane.waiting.of, lane.waiting.clients)):
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
            for client in self.clients:
                admitted = [a for a in self.admitted if self.is_of(a, lane, client)]
                assert admitted == sorted(admitted) or not self.is_in_order
        assert sorted(arrivals) == [tracked.group.arrival for tracked in self.live]

    def check_empty(self) -> None:
        """Only retained prefixes are left, and all of them can be evicted."""
        assert self.space.used_bytes == 0
        for lane in self.scheduler.lanes.values():
            if lane.prefixes is not None:
                lane.prefixes.close()
        assert not self.pool.usage().in_use_bytes
