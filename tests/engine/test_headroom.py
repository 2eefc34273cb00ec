"""Headroom: how much must be free before a request is admitted, to the page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aquifer.cache import kv_cache
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.headroom import Headroom
from aquifer.engine.lane import Lane
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.sequence import SequenceGroup
from aquifer.memory.pages import Page
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.sim.driver import ModelledDriver

LAYOUT = KVLayout((LayerKV(1, 8, 8),), torch.float16)
PAGE_BYTES = LAYOUT.token_bytes  # so that pages are tokens
NUM_PAGES = 1000


class World:
    """A model in a pool whose pages each hold a token."""

    def __init__(self) -> None:
        budget_bytes = NUM_PAGES * PAGE_BYTES
        self.pool = PagePool(ModelledDriver(budget_bytes, PAGE_BYTES), budget_bytes, PAGE_BYTES)
        self.assembly = Assembly(self.pool, 64)
        spec = LaneSpec("m", LAYOUT, 8, 512, kv_cache("paged", 1))
        self.lane: Lane = self.assembly.open_lane(spec)
        self.headroom = Headroom(self.assembly.room, {"m": self.lane})
        self.num_groups = 0

    def group(self, num_tokens: int, max_total: int, num_sequences: int = 1) -> SequenceGroup:
        params = SamplingParams(n=num_sequences, max_tokens=200)
        prompt = np.arange(num_tokens, dtype=np.int32)
        self.num_groups += 1
        request = Request(str(self.num_groups), "m", prompt.tolist(), params, 0.0)
        return SequenceGroup.of(request, self.num_groups, prompt, seed=0, max_total=max_total)

    def run(self, num_tokens: int, max_total: int) -> None:
        """Let a sequence run, with room for the tokens that it has."""
        (sequence,) = self.group(num_tokens, max_total).sequences
        slot = self.lane.assign_slot(sequence)
        self.lane.slots.begin(sequence)
        assert self.lane.cache.reserve(np.array([slot]), np.array([num_tokens]))

    def needed_pages(self, group: SequenceGroup) -> int:
        """The fewest free pages with which the group is let in."""
        pages: list[Page] = []
        for num_free in range(self.pool.free_bytes // PAGE_BYTES, -1, -1):
            if not self.headroom.has_room(self.lane, group, None):
                self.pool.release(pages)
                return num_free + 1
            pages += self.pool.acquire(Owner("other", Kind.WEIGHTS), 1) or []
        self.pool.release(pages)
        return 0


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.assembly.close_lane(world.lane)
    world.pool.close()


def test_a_new_request_leaves_each_running_sequence_a_page(world: World):
    world.run(30, 200)
    world.run(50, 60)
    world.run(70, 70)  # at its end
    assert world.needed_pages(world.group(20, 90)) == 20 + 1 + 2


def test_a_preempted_request_comes_back_to_run_for_64_tokens(world: World):
    """All sequences must have room for so many tokens, or to their ends."""
    world.run(30, 200)
    world.run(50, 60)
    group = world.group(20, 200)
    group.num_preemptions = 1
    assert world.needed_pages(group) == 20 + 1 + 64 + 64 + 10


def test_samples_share_the_prompt(world: World):
    """Each but the first needs no more than its next token, and the last of the prompt again."""
    world.run(30, 200)
    assert world.needed_pages(world.group(20, 90, num_sequences=3)) == 20 + 1 + 2 + 1


def test_nothing_runs_so_nothing_is_kept_free(world: World):
    assert world.needed_pages(world.group(20, 90)) == 0
