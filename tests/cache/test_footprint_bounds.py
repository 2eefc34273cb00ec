"""Footprints are upper bounds of what managers really take, in any combination of their options.

The pages are those of the pool's own accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.cache.guards import in_use_bytes
from tests.cases import tries

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, LayerKV, SequenceCache, StateLayout, StateTensor
from aquifer.cache.prefix import PrefixCache
from aquifer.cache.slot_pages import MappingOptions
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE = 4096
MAX_SEQS, MAX_TOKENS = 5, 300
OWNER = Owner("m", Kind.KV)


@dataclass(frozen=True)
class Case:
    """A model and the options of its cache."""

    name: str
    layout: KVLayout
    state: StateLayout | None
    block_size: int
    step_tokens: int
    mapping: MappingOptions
    keeps_checkpoints: bool

    @classmethod
    def random(cls, name: str, windows: str, rng: np.random.Generator) -> Case:
        """A case: `windows` says which layers have one."""
        is_layer_major = bool(rng.integers(2))
        num_layers = int(rng.integers(1, 4))
        width = int(rng.choice([8, 24, 32, 40, 96, 300]))
        window = int(rng.integers(2, 60))
        every = {"none": 0, "all": 1, "some": 2}[windows]
        has_state = bool(rng.integers(3) == 0)
        return cls(
            name,
            KVLayout(
                tuple(
                    LayerKV(1, width, width, window if every and i % every == 0 else None)
                    for i in range(num_layers)
                ),
                torch.float32,
            ),
            StateLayout(((StateTensor("h", (int(rng.integers(1, 4000)),), torch.float32),),))
            if has_state
            else None,
            int(rng.integers(1, 40)),
            int(rng.integers(MAX_SEQS, 120)),
            MappingOptions(
                prompt_page_bytes=int(rng.choice([1, 2, 4])) * PAGE,
                ahead_tokens=None if rng.integers(2) else 0,
                is_layer_major=is_layer_major,
            ),
            bool(rng.integers(2)),
        )

    def make(self, pool: PagePool) -> SequenceCache:
        make = kv_cache(self.name, self.block_size, self.step_tokens, self.mapping)
        cache = make(pool, OWNER, self.layout, MAX_SEQS, MAX_TOKENS, self.state)
        if self.keeps_checkpoints:
            cache.keep_checkpoints()
        return cache


class World:
    """A pool, and a cache in it."""

    def __init__(self, case: Case, num_pages: int, rng: np.random.Generator) -> None:
        self.case = case
        self.rng = rng
        self.driver = HostDriver()
        self.pool = PagePool(self.driver, num_pages * PAGE, PAGE)
        self.cache = case.make(self.pool)

    @property
    def num_pages(self) -> int:
        """Pages in use."""
        return sum(in_use_bytes(self.pool).values()) // PAGE

    def close(self) -> None:
        self.cache.close()
        assert not in_use_bytes(self.pool)
        self.pool.check()
        self.pool.close()
        self.driver.close()

    def run(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Run tokens [start, end) of sequences in steps, as the engine does."""
        at, left = np.array(starts), np.array(ends)
        names = np.array(slots)
        while (at < left).any():
            budget = self.case.step_tokens
            counts = np.zeros(len(names), np.int64)
            for i in self.rng.permutation(len(names)):
                most = int(self.rng.integers(1, self.case.step_tokens + 1))
                counts[i] = min(int(left[i] - at[i]), budget, most)
                budget -= counts[i]
            chosen = counts > 0
            self.cache.advance(names, at)
            assert self.cache.reserve(names[chosen], (at + counts)[chosen])
            self.cache.upload()
            at = at + counts


@pytest.mark.parametrize("windows", ["none", "all", "some"])
@pytest.mark.parametrize("name", KV_CACHES)
@pytest.mark.parametrize("seed", range(tries(40)))
def test_a_request_fits_in_the_pages_that_it_takes_at_most(name: str, windows: str, seed: int):
    """In a pool of just as many, alone: all its sequences run to their ends."""
    rng = np.random.default_rng([seed, len(windows)])
    case = Case.random(name, windows, rng)
    num_sequences = int(rng.integers(1, MAX_SEQS + 1))
    num_prompt = int(rng.integers(1, MAX_TOKENS - 1))
    num_total = int(rng.integers(num_prompt + 1, MAX_TOKENS + 1))
    probe = World(case, 10_000, rng)
    most = probe.cache.footprint.most(num_prompt, num_total, num_sequences)
    probe.close()
    world = World(case, most, rng)
    cache = world.cache
    for slot in range(1, num_sequences + 1):
        cache.expect(slot, num_prompt, num_total)
    assert cache.admit(1, num_prompt)
    if num_sequences > 1:
        world.run([1], [0], [num_prompt - 1])
        for slot in range(2, num_sequences + 1):
            if num_prompt > 1:
                cache.advance(np.array([1]), np.array([num_prompt - 1]))
                assert cache.fork(1, slot, num_prompt - 1)
        starts = [num_prompt - 1] * num_sequences
    else:
        starts = [0]
    # Some have tokens already, as those of a request that was preempted.
    slots = list(range(1, num_sequences + 1))
    done = rng.integers(num_prompt, num_total, num_sequences)
    world.run(slots, starts, done.tolist())
    at = done
    while (at < num_total - 1).any():
        growing = np.flatnonzero(at < num_total - 1)
        cache.advance(growing + 1, at[growing])
        assert cache.reserve(growing + 1, at[growing] + 1)
        at[growing] += 1
    assert world.num_pages <= most
    world.close()


@pytest.mark.parametrize("windows", ["none", "all", "some"])
@pytest.mark.parametrize("name", KV_CACHES)
@pytest.mark.parametrize("seed", range(tries(40)))
def test_an_admission_takes_no_more_than_it_needs(name: str, windows: str, seed: int):
    """With a prefix that is kept, and beside other sequences, of which some have ended."""
    rng = np.random.default_rng([seed, len(windows), 1])
    case = Case.random(name, windows, rng)
    # What is mapped ahead is taken only where it is free, and of large pages more is copied.
    mapping = replace(case.mapping, ahead_tokens=0, prompt_page_bytes=None)
    world = World(replace(case, mapping=mapping, keeps_checkpoints=True), 20_000, rng)
    cache = world.cache
    prefixes = PrefixCache(cache, lambda first, count: count, parts=cache.parts)
    shared = rng.integers(0, 1000, MAX_TOKENS).astype(np.int32)
    leases = {}
    for slot in range(1, MAX_SEQS + 1):
        tokens = shared[: int(rng.integers(1, MAX_TOKENS))].copy()
        tokens[int(rng.integers(len(tokens))) :] += slot
        match = prefixes.match(tokens)
        leases[slot] = lease = prefixes.lock(match)
        cache.expect(slot, len(tokens), MAX_TOKENS)
        before, needed = world.num_pages, cache.footprint.needed(len(tokens), match.num_tokens)
        if match.num_tokens:
            assert cache.resume(slot, prefixes.kept(match), match.num_tokens)
        assert cache.admit(slot, len(tokens))
        assert world.num_pages - before <= needed
        cache.upload()
        prefixes.settle(lease)
        start = match.num_tokens
        for stop in (*prefixes.stops(tokens, None, start), len(tokens)):
            world.run([slot], [start], [stop])
            if stop < len(tokens):
                cache.mark(slot, stop)
            start = stop
        prefixes.insert(lease, slot, tokens, start, 0.0)
        if rng.integers(2):
            ended = int(rng.choice(list(leases)))
            prefixes.unlock(leases.pop(ended), 0.0)
            cache.release(ended)
    for slot, lease in leases.items():
        prefixes.unlock(lease, 0.0)
        cache.release(slot)
    prefixes.close()
    world.close()
