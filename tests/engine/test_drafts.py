"""Steps that bring several tokens of a sequence, as speculation does, change no output.

A device is simulated that continues each sequence by a fixed function of its tokens, from none to
four tokens a step, and keeps the true lengths to itself until a step is committed. It writes the
tokens' ids as KV and reads their mean by attention, so every page must be where it believes.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from tests.cases import covering, tries
from tests.engine.books import (
    LAYOUTS,
    MAX_SEQS,
    MAX_TOKENS,
    PAGE_BYTES,
    check_means,
    open_assembly,
    open_lane,
)

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, Spans
from aquifer.cache.swap import SwapSpace
from aquifer.engine.assembly import LaneSpec
from aquifer.engine.lane import Lane
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.sequence import SequenceGroup
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.memory.driver import open_driver

NUM_REQUESTS = 12
VOCAB_SIZE = 200
STOP_IDS = frozenset({7})
MANY_STOP_IDS = frozenset(range(7, 27))  # more than a slot has room for


def next_token(tokens: list[int], index: int) -> int:
    """The token after these, in the completion of that index."""
    return crc32(bytes([index, *tokens])) % VOCAB_SIZE


@dataclass
class Outcome:
    """Results of all requests: the tokens and the finish reason of each (request, completion)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    endings: dict[tuple[str, int], tuple[Any, Any]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_swaps: int = 0
    num_hits: int = 0
    most_at_once: int = 0

    def receive(self, output: TokenOutput) -> None:
        key = (output.request_id, output.index)
        assert key not in self.endings, "an output after the last one"
        assert output.token_ids, "an output without tokens"
        self.tokens.setdefault(key, []).extend(output.token_ids)
        self.most_at_once = max(self.most_at_once, len(output.token_ids))
        if output.finish_reason is not None:
            self.endings[key] = (output.finish_reason, output.stop_reason)


class Device:
    """Runs steps, up to `most_new` tokens of a sequence each."""

    def __init__(self, lane: Lane, layout: KVLayout, random: Random) -> None:
        self._lane = lane
        self._layout = layout
        self._random = random
        self._tokens: dict[int, list[int]] = {}  # by slot: all tokens on the device
        self._index: dict[int, int] = {}

    def run(self, step: StepInput) -> StepOutput:
        lane, spans = self._lane, step.spans
        for assigned in step.assigned:
            sequence = lane.slots.sequences[assigned.slot]
            assert sequence is not None
            self._index[assigned.slot] = sequence.index
            self._tokens[assigned.slot] = lane.slots.tokens(sequence).tolist()
        starts, new, written = spans.starts.copy(), [], []
        most_new = dict(zip(step.sampled.tolist(), step.most_new.tolist(), strict=True))
        for i, slot in enumerate(spans.slots.tolist()):
            tokens, index = self._tokens[slot], self._index[slot]
            count = int(spans.counts[i])
            told = step.token_ids[spans.offsets[i] : spans.offsets[i + 1]]
            if i < step.num_decodes:
                assert (told == -1).all()
                assert len(tokens) - 1 <= starts[i], "the host's bound is too low"
                starts[i] = len(tokens) - 1
            else:
                known = tokens[starts[i] : starts[i] + count]
                assert told[: len(known)].tolist() == known
                assert (told[len(known) :] == -1).all()
            num_new = most_new.get(i, 0)
            if lane.slots.drafts:
                num_new = self._random.randint(0, num_new)
            for _ in range(num_new):
                tokens.append(next_token(tokens, index))
            new.append(tokens[len(tokens) - num_new :])
            ids = tokens[starts[i] : starts[i] + count]
            written += [*ids, *[VOCAB_SIZE] * (count - len(ids))]  # rejected drafts
        self._write(Spans.make(spans.slots, starts, spans.counts), written)
        out = np.zeros((len(step.sampled), 4), np.int64)
        counts = np.array([len(new[i]) for i in step.sampled], np.int64)
        for row, i in enumerate(step.sampled.tolist()):
            out[row, : len(new[i])] = new[i]
        return StepOutput(out, counts)

    def _write(self, spans: Spans, written: list[int]) -> None:
        """Write ids as KV, and compare what attention reads with the tokens of each sequence."""
        known = np.zeros((MAX_SEQS + 1, MAX_TOKENS), np.int64)
        for i, slot in enumerate(spans.slots.tolist()):
            start, count = int(spans.starts[i]), int(spans.counts[i])
            row = int(spans.offsets[i])
            history = [*self._tokens[slot][:start], *written[row : row + count]]
            known[slot, : len(history)] = history
        check_means(self._lane.cache, self._layout, spans, known)


def serve(
    cache: str, seed: int, most_new: int, *, num_ahead: int, pages: int, name: str = "small"
) -> Outcome:
    """Serve the same requests for any `most_new`, all to their end."""
    random, outcome = Random(seed), Outcome()
    with ExitStack() as resources:
        driver = open_driver("cpu")
        steps = 0
        block_size = random.choice((3, 4, 16))
        assembly = open_assembly(
            resources,
            driver,
            pages * PAGE_BYTES,
            random.choice((7, 40, 200)),
            SwapSpace(1 << 20, driver.device),
            restore_mode="recompute" if seed % 2 else "swap",
            clock_s=lambda: float(steps),
        )
        factory = kv_cache(cache, block_size=block_size)
        layout = LAYOUTS[name]
        spec = LaneSpec("m", layout, MAX_SEQS, MAX_TOKENS, factory, True, most_new=most_new)
        lane = open_lane(resources, assembly, spec)
        scheduler = assembly.scheduler
        for number in range(NUM_REQUESTS):
            num_prompt = random.randrange(1, 16)
            prompt = [random.randrange(3)] * num_prompt
            params = SamplingParams(
                n=random.choice((1, 1, 2)),
                max_tokens=None,
                min_tokens=random.choice((0, 0, 4)),
            )
            group = SequenceGroup.of(
                Request(str(number), "m", prompt, params, 0.0),
                number,
                np.array(prompt, np.int32),
                seed=0,
                max_total=random.randrange(30, MAX_TOKENS + 1),
                stop_ids=random.choice((STOP_IDS, STOP_IDS, STOP_IDS, MANY_STOP_IDS)),
            )
            scheduler.add(lane, group)
        device = Device(lane, layout, Random(seed + 1))
        in_flight: deque[tuple[StepInput, StepOutput]] = deque()
        while scheduler.has_work:
            plan = scheduler.plan()
            if plan is not None:
                in_flight.append((plan, device.run(plan)))
            if len(in_flight) > (0 if plan is None else num_ahead):
                for output in scheduler.commit(*in_flight.popleft()):
                    outcome.receive(output)
            assert not scheduler.take_failed()
            assembly.pool.check()
            steps += 1
            assert steps < 10_000, "no end"
        outcome.num_preemptions, outcome.num_swaps = lane.num_preemptions, lane.num_swaps
        if lane.prefixes is not None:
            outcome.num_hits = lane.prefixes.stats.hit_tokens
    return outcome


@pytest.mark.parametrize(
    ("seed", "cache", "num_ahead"), covering(range(tries(4)), KV_CACHES, (0, 1), strength=2)
)
def test_the_same_outputs_as_one_token_at_a_time(seed: int, cache: str, num_ahead: int) -> None:
    # Room for the longest request, and not much more.
    one = serve(cache, seed, 1, num_ahead=num_ahead, pages=34)
    four = serve(cache, seed, 4, num_ahead=num_ahead, pages=34)
    check_equal(one, four)


@pytest.mark.parametrize(("seed", "cache"), covering(range(tries(4)), KV_CACHES, strength=1))
def test_windows_begin_where_the_true_length_says(seed: int, cache: str) -> None:
    """What a plan counts with may be more than the step brings: nothing is given back too early."""
    one = serve(cache, seed, 1, num_ahead=1, pages=40, name="windows")
    check_equal(one, serve(cache, seed, 4, num_ahead=1, pages=40, name="windows"))


def check_equal(one: Outcome, four: Outcome) -> None:
    assert len(one.endings) == len(one.tokens) >= NUM_REQUESTS
    assert four.tokens == one.tokens
    assert four.endings == one.endings
    assert (one.most_at_once, four.most_at_once) == (1, 4)
    assert {reason for reason, _ in one.endings.values()} == {"stop", "length"}


def test_there_is_preemption_in_both_ways() -> None:
    """The test above means nothing unless requests are preempted, swapped and begin alike."""
    outcomes = [serve("virtual", seed, 4, num_ahead=1, pages=34) for seed in range(4)]
    num_swaps = sum(outcome.num_swaps for outcome in outcomes)
    assert num_swaps > 3
    assert sum(outcome.num_preemptions for outcome in outcomes) - num_swaps > 3
    assert sum(outcome.num_hits for outcome in outcomes) > 10
