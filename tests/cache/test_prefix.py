"""Prefix caching against a dictionary of token prefixes, over a cache that only keeps books."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cases import tries

from aquifer.cache import KV_CACHES, group_cache
from aquifer.cache.base import KVLayout, LayerKV
from aquifer.cache.footprint import Footprint
from aquifer.cache.prefix import Lease, Match, PrefixCache
from aquifer.cache.slot_pages import MappingOptions
from aquifer.errors import InvariantError
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.eviction_log import EvictionLog, EvictionTotals
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer, ReuseModel, regret_per_byte

SQRT2 = 2**0.5 * (1 + 1e-9)

Key = tuple[Hashable, tuple[int, ...], int]
"""(extra, all tokens that touch the blocks so far, index of the block)."""


def restore_s(first_token: float, num_tokens: float) -> float:
    return 1e-3 * num_tokens * (1 + first_token / 8)


def summed_s(first_token: float, num_tokens: float) -> float:
    """What tokens cost is the sum of what each costs."""
    return 1e-3 * num_tokens * (1 + (first_token + num_tokens / 2) / 8)


def flat_s(first_token: float, num_tokens: float) -> float:
    return 1e-3


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


class FakeCache:
    """A manager of blocks without bytes: each records the tokens that were written to it."""

    def __init__(self, block_bytes: int, token_bytes: int, max_tokens: int = 1000):
        self.block_bytes = block_bytes
        self.footprint = Footprint(token_bytes, block_bytes, 64)
        self.token_bytes = token_bytes
        self.max_tokens = max_tokens
        self.slots: dict[int, list[int]] = {}
        self.holds: Counter[int] = Counter()
        self.drops: list[int] = []  # all blocks ever dropped, in order
        self.contents: dict[int, tuple[int, ...]] = {}  # the sequence's tokens up to its end
        self.numbers = itertools.count()

    def tokens_in(self, num_blocks: int) -> int:
        return min(num_blocks * self.block_bytes // self.token_bytes, self.max_tokens)

    def tokens_touching(self, num_blocks: int) -> int:
        return min(-(-num_blocks * self.block_bytes // self.token_bytes), self.max_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens * self.token_bytes // self.block_bytes)

    def blocks(self, slot: int, num_tokens: int) -> list[int]:
        return self.slots[slot][: self.num_blocks(num_tokens)]

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holds[block] += 1

    def unretain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.holds[block] > 0
            self.holds[block] -= 1
        self.drops += blocks

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int) -> None:
        """Share blocks, and copy the one that the next token goes to."""
        assert slot not in self.slots
        shared = list(blocks[: num_tokens * self.token_bytes // self.block_bytes])
        self.slots[slot] = shared
        for block in blocks[len(shared) :]:
            copy = next(self.numbers)
            shared.append(copy)
            self.contents[copy] = self.contents[block]

    def write(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Compute tokens [start, len(tokens)) of a sequence."""
        blocks = self.slots[slot]
        while len(blocks) < self.num_blocks(len(tokens)):
            blocks.append(next(self.numbers))
        for index in range(start * self.token_bytes // self.block_bytes, len(blocks)):
            assert not self.holds[blocks[index]], "a block is written to that is held"
            users = sum(blocks[index] in other for other in self.slots.values())
            assert users == 1, "a block is written to that two have"
            self.contents[blocks[index]] = tuple(tokens[: self.tokens_touching(index + 1)])

    def release(self, slot: int) -> None:
        del self.slots[slot]


def compute(
    prefixes: PrefixCache,
    cache: FakeCache,
    tokens: Sequence[int],
    now_s: float,
    extra: Hashable = None,
) -> int:
    """Serve a request to its end. Returns the tokens that were cached."""
    match = prefixes.match(ids(tokens), extra)
    lease = prefixes.lock(match)
    cache.adopt(0, match.blocks, match.num_tokens)
    prefixes.record(lease, now_s)
    cache.write(0, tokens, match.num_tokens)
    prefixes.insert(lease, 0, ids(tokens), len(tokens), now_s)
    prefixes.unlock(lease, now_s)
    cache.release(0)
    return match.num_tokens


@dataclass
class Entry:
    """The oracle's record of a block that is held."""

    block: int
    last_used_s: float
    reuses: int = 0


@dataclass
class Running:
    """The oracle's record of a running sequence."""

    extra: Hashable
    tokens: list[int]
    lease: Lease
    num_guarded: int  # blocks of its path that its lease guards


class PrefixMachine(RuleBasedStateMachine):
    """All verbs in any order; the oracle updates times and reuses of each block at once."""

    @initialize(geometry=st.sampled_from([(4, 1), (5, 2), (2, 5), (7, 7)]), is_flat=st.booleans())
    def start(self, geometry: tuple[int, int], is_flat: bool):
        # Where all blocks cost the same, the least regret is found exactly.
        self.restore_s, self.tolerance = (flat_s, 1 + 1e-9) if is_flat else (restore_s, SQRT2)
        self.cache = FakeCache(*geometry)
        self.model = ReuseModel()
        self.prefixes = PrefixCache(self.cache, self.restore_s, self.model)
        self.entries: dict[Key, Entry] = {}
        self.running: dict[int, Running] = {}
        self.pinned: set[tuple[Hashable, tuple[int, ...]]] = set()
        self.earlier: list[tuple[Hashable, list[int], Match]] = []  # matches that may be resumed
        self.slots = itertools.count()
        self.now_s = 0.0
        self.queried = self.hit = self.evicted = 0

    # The oracle.

    def keys(self, extra: Hashable, tokens: Sequence[int]) -> list[Key]:
        """Keys of all whole blocks of these tokens."""
        found: list[Key] = []
        while (end := self.cache.tokens_touching(len(found) + 1)) <= len(tokens):
            found.append((extra, tuple(tokens[:end]), len(found)))
        return found

    def known(self, extra: Hashable, tokens: Sequence[int]) -> list[Key]:
        return list(itertools.takewhile(self.entries.__contains__, self.keys(extra, tokens)))

    def guarded(self) -> set[Key]:
        keys = {key for extra, tokens in self.pinned for key in self.known(extra, tokens)}
        for seq in self.running.values():
            keys.update(self.keys(seq.extra, seq.tokens)[: seq.num_guarded])
        return keys

    def parents(self) -> set[Key]:
        cut = self.cache.tokens_touching
        return {(extra, tokens[: cut(index)], index - 1) for extra, tokens, index in self.entries}

    def regret(self, key: Key) -> float:
        entry = self.entries[key]
        block_tokens = self.cache.block_bytes / self.cache.token_bytes
        return regret_per_byte(
            self.model.probability(self.now_s - entry.last_used_s, entry.reuses),
            self.restore_s(key[2] * block_tokens, block_tokens),
            self.cache.block_bytes,
        )

    def keys_below(self, limit: float) -> set[Key]:
        """Keys of all blocks that could go, one after the other, at less regret than the limit."""
        found = {key for key in self.entries.keys() - self.guarded() if self.regret(key) < limit}
        cut = self.cache.tokens_touching
        # Longest first: a block that stays keeps the one before it.
        for extra, tokens, index in sorted(self.entries, key=lambda key: -key[2]):
            if (extra, tokens, index) not in found:
                found.discard((extra, tokens[: cut(index)], index - 1))
        return found

    def leaf_regrets(self) -> dict[Key, float]:
        """Regrets of all blocks that may be the next victim."""
        leaves = self.entries.keys() - self.parents() - self.guarded()
        return {key: self.regret(key) for key in leaves}

    def take_drops(self) -> list[float]:
        """Follow what was evicted, one by one. Returns the regrets."""
        keys = {entry.block: key for key, entry in self.entries.items()}
        regrets = []
        for block in self.cache.drops:
            offers = self.leaf_regrets()
            assert keys[block] in offers, "evicted, but guarded or not a leaf"
            assert offers[keys[block]] <= self.tolerance * min(offers.values())
            regrets.append(offers[keys[block]])
            del self.entries[keys[block]]
        self.cache.drops.clear()
        self.evicted += len(regrets)
        return regrets

    # What may happen.

    # Mostly alike at first, so that paths are shared and part.
    tokens = st.builds(
        lambda count, tail: [0] * count + tail,
        st.integers(0, 12),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
    )
    extras = st.sampled_from([None, None, None, 1])

    @rule(tokens=tokens, extra=extras, gives_up=st.booleans())
    def arrive(self, tokens: list[int], extra: Hashable, gives_up: bool):
        self.begin(tokens, extra, gives_up)

    def begin(self, tokens: list[int], extra: Hashable, gives_up: bool):
        match = self.prefixes.match(ids(tokens), extra)
        known = self.known(extra, tokens)
        num_tokens = min(self.cache.tokens_in(len(known)), len(tokens) - 1)
        known = known[: self.cache.num_blocks(num_tokens)]
        assert match.num_tokens == num_tokens
        assert match.blocks == [self.entries[key].block for key in known]
        assert [self.cache.contents[block] for block in match.blocks] == [key[1] for key in known]
        self.earlier.append((extra, tokens, match))
        num_pages = self.prefixes.evictable_pages(match)
        num_unguarded = len(set(known) - self.guarded())
        assert num_pages == self.cache.footprint.blocks_pages(num_unguarded)
        evictable_bytes = self.prefixes.evictable_bytes
        lease = self.prefixes.lock(match)
        guarded_bytes = evictable_bytes - self.prefixes.evictable_bytes
        assert guarded_bytes == num_unguarded * self.cache.block_bytes
        if gives_up:
            self.prefixes.unlock(lease)
            return
        slot = next(self.slots)
        self.cache.adopt(slot, match.blocks, match.num_tokens)
        self.prefixes.record(lease, self.now_s)
        self.queried += len(tokens)
        self.hit += num_tokens
        for key in known:
            self.entries[key].last_used_s = self.now_s
            self.entries[key].reuses += 1
        self.cache.write(slot, tokens, num_tokens)
        self.running[slot] = Running(extra, tokens, lease, len(known))

    @precondition(lambda self: self.earlier)
    @rule(data=st.data(), more=st.just([]) | tokens)
    def resume(self, data: st.DataObject, more: list[int]):
        """A match that is resumed is a fresh one, for these tokens or for more of them."""
        index = data.draw(st.integers(0, len(self.earlier) - 1))
        extra, tokens, known = self.earlier[index]
        tokens = tokens + more
        match = self.prefixes.match(ids(tokens), extra, known)
        assert match == self.prefixes.match(ids(tokens), extra)
        self.earlier[index] = extra, tokens, match

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=tokens)
    def grow(self, data: st.DataObject, tokens: list[int]):
        slot = data.draw(st.sampled_from(list(self.running)))
        seq = self.running[slot]
        seq.tokens = seq.tokens + tokens
        self.cache.write(slot, seq.tokens, len(seq.tokens) - len(tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), unwritten=tokens)
    def insert(self, data: st.DataObject, unwritten: list[int]):
        slot = data.draw(st.sampled_from(list(self.running)))
        self.retain(slot, data.draw(st.integers(0, len(self.running[slot].tokens))), unwritten)

    def retain(self, slot: int, num_computed: int, unwritten: Sequence[int] = ()):
        seq = self.running[slot]
        self.prefixes.insert(
            seq.lease, slot, ids([*seq.tokens, *unwritten]), num_computed, self.now_s
        )
        keys = self.keys(seq.extra, seq.tokens[:num_computed])
        for key, block in zip(keys, self.cache.blocks(slot, num_computed), strict=False):
            self.entries.setdefault(key, Entry(block, self.now_s))
        seq.num_guarded = max(seq.num_guarded, len(keys))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject):
        parent = data.draw(st.sampled_from(list(self.running)))
        seq = self.running[parent]
        slot = next(self.slots)
        self.cache.adopt(slot, self.cache.blocks(parent, len(seq.tokens)), len(seq.tokens))
        lease = self.prefixes.fork(seq.lease, len(seq.tokens))
        self.running[slot] = Running(seq.extra, seq.tokens, lease, seq.num_guarded)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject):
        self.finish(data.draw(st.sampled_from(list(self.running))))

    def finish(self, slot: int):
        seq = self.running.pop(slot)
        self.prefixes.unlock(seq.lease, self.now_s)
        for key in self.keys(seq.extra, seq.tokens)[: seq.num_guarded]:
            self.entries[key].last_used_s = self.now_s
        self.cache.release(slot)

    @rule(tokens=tokens, seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def serve(self, tokens: list[int], seconds: float):
        """A request from its beginning to its end."""
        self.begin(tokens, None, False)
        slot, seq = next(reversed(self.running.items()))
        self.retain(slot, len(seq.tokens))
        self.now_s += seconds
        self.finish(slot)

    @rule(tokens=tokens, extra=extras)
    def pin(self, tokens: list[int], extra: Hashable):
        before_bytes = self.prefixes.promised_bytes
        more_bytes = self.prefixes.pin_bytes(ids(tokens), extra)
        self.prefixes.pin(ids(tokens), extra)
        self.pinned.add((extra, tuple(tokens)))
        assert self.prefixes.promised_bytes == before_bytes + more_bytes
        assert self.prefixes.pin_bytes(ids(tokens), extra) == 0

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject):
        extra, tokens = data.draw(st.sampled_from(sorted(self.pinned, key=repr)))
        assert self.prefixes.unpin(ids(tokens), extra)
        assert not self.prefixes.unpin(ids(tokens), extra)
        self.pinned.remove((extra, tokens))

    @rule(num_blocks=st.integers(0, 3), limit=st.sampled_from([0.0, 1e-4, 3e-4, 1e-3, np.inf]))
    def evict(self, num_blocks: int, limit: float):
        block_bytes = self.cache.block_bytes
        evictable = len(self.entries.keys() - self.guarded())
        num_bytes = self.prefixes.evict(num_blocks * block_bytes, self.now_s, limit)
        assert num_bytes == len(self.cache.drops) * block_bytes
        regrets = self.take_drops()
        assert all(regret <= limit for regret in regrets[1:])
        if len(regrets) < min(num_blocks, evictable):
            assert regrets, "at least one victim goes"
            assert min(self.leaf_regrets().values()) * self.tolerance > limit

    @rule(wanted=st.integers(0, 6), limit=st.sampled_from([0.0, 1e-4, 3e-4, 1e-3, 1.0]))
    def count_below(self, wanted: int, limit: float):
        block_bytes = self.cache.block_bytes
        num_bytes = self.prefixes.evictable_below(wanted * block_bytes, self.now_s, limit)
        count, rest = divmod(num_bytes, block_bytes)
        assert rest == 0
        assert count <= min(len(self.keys_below(limit)), wanted)
        assert count >= min(len(self.keys_below(limit / self.tolerance)), wanted)

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def clear(self, really: bool):
        if not really:  # too often, and nothing would ever become old
            return
        keys = {key for seq in self.running.values() for key in self.keys_of(seq)}
        self.prefixes.clear()
        self.entries = {key: entry for key, entry in self.entries.items() if key in keys}
        self.cache.drops.clear()

    def keys_of(self, seq: Running) -> list[Key]:
        return self.keys(seq.extra, seq.tokens)[: seq.num_guarded]

    @rule(seconds=st.sampled_from([1.0, 60.0, 1000.0]))
    def wait(self, seconds: float):
        self.now_s += seconds

    # What always holds.

    @invariant()
    def books_agree(self):
        blocks = Counter(entry.block for entry in self.entries.values())
        assert +self.cache.holds == blocks
        assert set(blocks.values()) <= {1}
        block_bytes = self.cache.block_bytes
        pinned = {key for extra, tokens in self.pinned for key in self.known(extra, tokens)}
        stats = self.prefixes.stats
        assert stats.held_blocks == len(self.entries)
        assert stats.held_bytes == len(self.entries) * block_bytes
        assert stats.pinned_bytes == self.prefixes.pinned_bytes == len(pinned) * block_bytes
        num_missing = sum(
            len(self.keys(extra, tokens)) - len(self.known(extra, tokens))
            for extra, tokens in self.pinned
        )
        assert self.prefixes.promised_bytes == (len(pinned) + num_missing) * block_bytes
        assert stats.evictable_bytes == len(self.entries.keys() - self.guarded()) * block_bytes
        assert (stats.queried_tokens, stats.hit_tokens) == (self.queried, self.hit)
        assert stats.evicted_blocks == self.evicted

    @invariant()
    def the_cheapest_is_a_leaf_of_least_regret(self):
        offers = self.leaf_regrets().values()
        cheapest = self.prefixes.cheapest(self.now_s)
        assert (cheapest is None) == (not offers)
        if cheapest is not None:
            assert min(offers) <= cheapest * (1 + 1e-9)
            assert cheapest <= self.tolerance * min(offers)

    def teardown(self):
        if hasattr(self, "prefixes"):
            for slot, seq in self.running.items():
                self.prefixes.unlock(seq.lease, self.now_s)
                self.cache.release(slot)
            self.prefixes.close()
            assert not +self.cache.holds
            assert self.prefixes.stats.held_blocks == 0


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(
    max_examples=tries(120), stateful_step_count=60, deadline=None, database=None, derandomize=True
)


def test_an_unbounded_cache_finds_all_there_is_to_find():
    """The hit rate of brute force: the longest prefix shared with any earlier request."""
    rng = random.Random(0)
    cache = FakeCache(5, 2)  # 2.5 tokens to a block
    prefixes = PrefixCache(cache, restore_s)
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for _ in range(300):
        tokens = [0] * rng.randrange(20) + [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        num_blocks = 0
        # A block is whole when all tokens that touch it are there.
        while (end := cache.tokens_touching(num_blocks + 1)) <= len(tokens) and (
            tuple(tokens[:end]) in seen
        ):
            num_blocks += 1
        expected = min(cache.tokens_in(num_blocks), len(tokens) - 1)
        assert compute(prefixes, cache, tokens, 0.0) == expected
        hits += expected
        seen |= {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}
    assert prefixes.stats.hit_tokens == hits > 1000


class Colliding:
    """Salts that differ, but have the same hash."""

    def __hash__(self) -> int:
        return 0


def test_equal_hashes_are_not_equal_prefixes():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    one, two = Colliding(), Colliding()
    tokens = list(range(9))
    assert compute(prefixes, cache, tokens, 0.0, one) == 0
    assert compute(prefixes, cache, tokens, 0.0, two) == 0
    assert compute(prefixes, cache, tokens, 0.0, one) == 8
    assert compute(prefixes, cache, tokens, 0.0, 1) == 0


def test_a_salt_is_never_taken_for_a_node():
    """Parents are numbers and salts may be numbers, and keys keep them apart."""
    cache = FakeCache(1, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, [5, 6], 0.0)
    for extra in range(-3, 4):
        assert prefixes.match(ids([6, 0]), extra).num_tokens == 0
        assert prefixes.match(ids([5, 6, 0]), extra).num_tokens == 0


def test_the_last_token_is_always_run():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    tokens = list(range(8))
    compute(prefixes, cache, tokens, 0.0)
    again = prefixes.match(ids(tokens))
    assert (len(again.blocks), again.num_tokens) == (2, 7)
    assert prefixes.match(ids(tokens[:5])).num_tokens == 4
    first = prefixes.match(ids(tokens[:1]))
    assert (first.blocks, first.num_tokens) == ([], 0)


def evicted_first(prefixes: PrefixCache, cache: FakeCache, now_s: float) -> int:
    cache.drops.clear()
    assert prefixes.evict(1, now_s) == cache.block_bytes
    (block,) = cache.drops
    return block


def leaf_of(prefixes: PrefixCache, tokens: Sequence[int]) -> int:
    return prefixes.match(ids([*tokens, -1])).blocks[-1]


def test_among_equals_the_older_goes_first():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    for now_s, first in enumerate((2, 0, 1)):
        compute(prefixes, cache, [first] * 4, now_s)
    order = [leaf_of(prefixes, [first] * 4) for first in (2, 0, 1)]
    assert [evicted_first(prefixes, cache, 9.0) for _ in order] == order


def test_what_was_used_more_often_stays():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    for now_s in range(3):
        compute(prefixes, cache, [7, 7, 7, 7, 0], now_s)  # popular, and older
    compute(prefixes, cache, [8, 8, 8, 8, 0], 10.0)
    newer = leaf_of(prefixes, [8] * 4)
    assert evicted_first(prefixes, cache, 11.0) == newer


def test_popularity_passes_away_with_age():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    for now_s in range(3):
        compute(prefixes, cache, [7, 7, 7, 7, 0], now_s)
    compute(prefixes, cache, [8, 8, 8, 8, 0], 100_000.0)
    popular = leaf_of(prefixes, [7] * 4)
    assert evicted_first(prefixes, cache, 100_001.0) == popular


def test_what_costs_more_to_restore_stays():
    """The last block of a long prefix stays, though it is older: it attends to all before it."""
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, [7] * 8, 0.0)  # its second block costs half as much again
    compute(prefixes, cache, [8] * 4, 0.5)
    short = leaf_of(prefixes, [8] * 4)
    assert evicted_first(prefixes, cache, 1.0) == short


@pytest.mark.parametrize(
    "uses",
    [
        pytest.param([(1, 0.0), (1, 0.0), (2, 0.0), (2, 0.0)], id="reuses"),
        pytest.param([(1, 0.0), (2, 0.0), (1, 300.0)], id="last-use"),
    ],
)
def test_a_block_counts_with_the_uses_of_those_below(uses: list[tuple[int, float]]):
    """A block with two children has a larger regret than either, once both are evicted."""

    def used() -> PrefixCache:
        cache = FakeCache(4, 1)
        prefixes = PrefixCache(cache, flat_s)
        for last, now_s in uses:
            compute(prefixes, cache, [7, 7, 7, 7, *([last] * 4), 0], now_s)
        return prefixes

    now_s = 310.0
    evicted = used()
    regrets = []
    while (regret := evicted.cheapest(now_s)) is not None:
        regrets.append(regret)
        evicted.evict(1, now_s)
    assert len(regrets) == 3
    assert regrets[2] > max(regrets[:2])
    prefixes = used()
    for limit in (min(regrets), max(regrets[:2]) * (1 + 1e-9), regrets[2], regrets[2] * (1 + 1e-9)):
        count = sum(regret < limit for regret in regrets)
        assert prefixes.evictable_below(1000, now_s, limit) == count * 4
    assert prefixes.stats.held_blocks == 3, "nothing was evicted"


def test_a_model_whose_delays_matter_more_asks_a_higher_price():
    prices = []
    for sensitivity in (1.0, 3.0):
        cache = FakeCache(4, 1)
        prefixes = PrefixCache(cache, restore_s, sensitivity=sensitivity)
        compute(prefixes, cache, [7] * 4, 0.0)
        prices.append(prefixes.cheapest(5.0) or 0.0)
    assert prices[0] > 0
    assert prices[1] == pytest.approx(3 * prices[0])


def test_waiting_requests_may_ask_often():
    """Lookups and failed admissions change neither counts nor the order of eviction."""
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, [7] * 4, 0.0)
    compute(prefixes, cache, [8] * 4, 1.0)
    before = prefixes.stats
    for _ in range(3000):
        prefixes.unlock(prefixes.lock(prefixes.match(ids([7] * 5))))
    assert prefixes.stats == before
    older = leaf_of(prefixes, [7] * 4)
    assert evicted_first(prefixes, cache, 5.0) == older


def test_what_a_sequence_runs_with_stays():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, [7] * 12, 0.0)
    lease = prefixes.lock(prefixes.match(ids([7] * 9)))
    assert prefixes.evictable_bytes == 4
    assert prefixes.evict(1000, 1.0) == 4
    assert prefixes.cheapest(1.0) is None
    with pytest.raises(InvariantError, match="leases are open"):
        prefixes.close()
    prefixes.unlock(lease, 1.0)
    assert prefixes.evict(1000, 1.0) == 8


def test_computing_again_what_was_evicted_is_logged():
    """Block by block, whatever else was computed; a block that was not lost costs nothing."""
    cache, log = FakeCache(4, 1), EvictionLog()
    owner = Owner("a", Kind.PREFIX)
    prefixes = PrefixCache(cache, summed_s, losses=log.losses_of(owner))
    compute(prefixes, cache, [7] * 16, 0.0)
    log.begin(Owner("b", Kind.KV), 1.0)
    regret = prefixes.cheapest(1.0)
    assert regret is not None
    assert prefixes.evict(4, 1.0) == 4
    assert log.totals[owner] == EvictionTotals(1, 4, 4 * regret)
    assert prefixes.evict(8, 1.0) == 8
    compute(prefixes, cache, [8] * 16, 2.0)
    compute(prefixes, cache, [7] * 16, 2.0, extra="salt")
    compute(prefixes, cache, [7] * 4 + [8] * 8, 2.0)
    assert log.totals[owner].paid_s == 0.0, "other tokens"
    compute(prefixes, cache, [7] * 8 + [8] * 4, 3.0)
    assert log.totals[owner].paid_s == pytest.approx(summed_s(4, 4))
    compute(prefixes, cache, [7] * 17, 4.0)
    paid_s = sum(summed_s(first, 4) for first in (4, 8, 12))
    assert log.totals[owner].paid_s == pytest.approx(paid_s)
    compute(prefixes, cache, [7] * 17, 5.0)
    assert log.totals[owner].paid_s == pytest.approx(paid_s), "it is paid once"
    (entry,) = log.latest
    assert (entry.num_items, entry.num_restored) == (3, 3)


def test_a_prefix_that_was_evicted_whole_is_known_again():
    cache, log = FakeCache(4, 1), EvictionLog()
    owner = Owner("a", Kind.PREFIX)
    prefixes = PrefixCache(cache, summed_s, losses=log.losses_of(owner))
    compute(prefixes, cache, [7] * 16, 0.0, extra="salt")
    prefixes.evict(1000, 1.0)
    compute(prefixes, cache, [7] * 16, 2.0, extra="salt")
    paid_s = sum(summed_s(first, 4) for first in (0, 4, 8, 12))
    assert log.totals[owner].paid_s == pytest.approx(paid_s)
    prefixes.evict(1000, 3.0)
    prefixes.clear()
    compute(prefixes, cache, [7] * 16, 4.0, extra="salt")
    assert log.totals[owner].paid_s == pytest.approx(paid_s), "what was cleared is not counted"


def test_a_match_that_was_evicted_cannot_be_locked():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, [7] * 4, 0.0)
    match = prefixes.match(ids([7] * 5))
    prefixes.evict(1000, 1.0)
    compute(prefixes, cache, [7] * 4, 1.0)  # the same tokens, but in another block
    with pytest.raises(InvariantError, match="evicted since"):
        prefixes.lock(match)


def test_a_prefix_loses_its_end_first():
    """What is left matches. A match of what has gone is not complete again with other blocks."""
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    tokens = ids(range(41))
    compute(prefixes, cache, range(40), 0.0)
    whole = prefixes.match(tokens)
    inner = prefixes.match(tokens[:25])
    assert prefixes.evict(3 * 4, 1.0) == 3 * 4
    assert cache.drops == whole.blocks[:6:-1]
    left = prefixes.match(tokens, None, whole)
    assert (left.num_tokens, left.blocks) == (28, whole.blocks[:7])
    prefixes.unlock(prefixes.lock(inner))  # its end is inside of what was computed together
    assert prefixes.evict(1, 1.0) == 4
    assert prefixes.match(tokens, None, left).blocks == whole.blocks[:6]
    compute(prefixes, cache, range(40), 2.0)
    again = prefixes.match(tokens, None, whole)
    assert (again.num_tokens, again.blocks[:6]) == (40, whole.blocks[:6])
    assert set(again.blocks[6:]).isdisjoint(whole.blocks)
    for gone in (whole, left):
        with pytest.raises(InvariantError, match="evicted since"):
            prefixes.lock(gone)
    prefixes.unlock(prefixes.lock(inner))
    prefixes.close()
    assert not +cache.holds


def test_a_match_is_resumed_where_it_ended():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    tokens = ids(range(40))
    nothing = prefixes.match(tokens)
    assert prefixes.match(tokens, None, nothing) is nothing
    compute(prefixes, cache, range(12), 0.0)
    some = prefixes.match(tokens, None, nothing)
    assert some.num_tokens == 12
    compute(prefixes, cache, range(20), 1.0)
    more = prefixes.match(tokens, None, some)
    assert more.num_tokens == 20
    assert more.blocks[:3] == some.blocks
    prefixes.evict(3 * 4, 2.0)
    assert prefixes.match(tokens, None, more).num_tokens == 8
    prefixes.clear()
    assert prefixes.match(tokens, None, more).blocks == []


def test_a_match_of_other_tokens_cannot_be_resumed():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, range(8), 0.0)
    known = prefixes.match(ids(range(9)))
    for tokens, extra in (([0, 1, 2, 3, 9, 5, 6, 7, 8], None), (range(9), 1), (range(7), None)):
        with pytest.raises(InvariantError, match="other tokens"):
            prefixes.match(ids(tokens), extra, known)


def test_a_fork_shares_no_more_than_its_tokens():
    """What it computes itself is found after its own tokens, and not after its parent's."""
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    shared, of_parent, of_child = [1] * 8, [2] * 8, [3] * 8
    cache.slots[1] = []
    cache.write(1, [*shared, *of_parent], 0)
    lease = prefixes.lock(prefixes.match(ids([*shared, *of_parent])))
    prefixes.insert(lease, 1, ids([*shared, *of_parent]), 16, 0.0)
    cache.adopt(2, cache.blocks(1, 8), 8)
    fork = prefixes.fork(lease, 8)
    cache.write(2, [*shared, *of_child], 8)
    prefixes.insert(fork, 2, ids([*shared, *of_child]), 16, 0.0)
    for slot, tokens in ((1, of_parent), (2, of_child)):
        match = prefixes.match(ids([*shared, *tokens, 9]))
        assert match.num_tokens == 16
        assert match.blocks == cache.blocks(slot, 16)
    assert prefixes.match(ids([*shared, *of_parent, *of_child])).num_tokens == 16


def test_a_lease_ends_once():
    prefixes = PrefixCache(FakeCache(4, 1), restore_s)
    lease = prefixes.lock(prefixes.match(ids([1])))
    prefixes.unlock(lease)
    for verb in (prefixes.unlock, lambda ended: prefixes.fork(ended, 1)):
        with pytest.raises(InvariantError, match="after it ended"):
            verb(lease)


def test_tokens_of_another_width_are_refused():
    """Their bytes would read as other tokens."""
    prefixes = PrefixCache(FakeCache(4, 1), restore_s)
    with pytest.raises(InvariantError, match="int64"):
        prefixes.match(np.array([1, 2]))


@pytest.mark.parametrize("geometry", [(4, 1), (5, 2), (2, 5)])
def test_the_longest_sequence_there_is(geometry: tuple[int, int]):
    """Its last block is never full, and is cached all the same."""
    cache = FakeCache(*geometry, max_tokens=11)
    prefixes = PrefixCache(cache, restore_s)
    prefixes.pin(ids(range(30)))
    compute(prefixes, cache, range(11), 0.0)
    assert prefixes.stats.held_blocks == cache.num_blocks(11)
    assert prefixes.evictable_bytes == 0
    assert prefixes.match(ids(range(11))).num_tokens == 10


def test_blocks_that_pins_have_in_common_count_once():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    compute(prefixes, cache, [7] * 8 + [1] * 4, 0.0)
    compute(prefixes, cache, [7] * 8 + [2] * 8, 0.0)
    prefixes.pin(ids([7] * 8 + [1] * 4))
    prefixes.pin(ids([7] * 8 + [2] * 8))
    prefixes.pin(ids([7] * 4))
    assert prefixes.pinned_bytes == (2 + 1 + 2) * 4
    prefixes.unpin(ids([7] * 8 + [2] * 8))
    assert prefixes.pinned_bytes == (2 + 1) * 4
    prefixes.unpin(ids([7] * 8 + [1] * 4))
    assert prefixes.pinned_bytes == 4
    assert prefixes.evict(1000, 1.0) == 4 * 4
    prefixes.clear()
    assert prefixes.pinned_bytes == 0
    prefixes.close()


@pytest.mark.parametrize("block_bytes", [0, 64])
def test_of_a_model_without_kv_nothing_is_kept(block_bytes: int):
    """Its manager cannot tell how many tokens lie in a block, and need not."""
    cache = FakeCache(block_bytes, 0)
    prefixes = PrefixCache(cache, restore_s)
    prefixes.pin(ids([7] * 8))
    for now_s in (0.0, 1.0):
        match = prefixes.match(ids([7] * 100))
        assert (match.blocks, match.num_tokens) == ([], 0)
        assert prefixes.evictable_pages(match) == 0
        lease = prefixes.lock(match)
        prefixes.record(lease, now_s)
        prefixes.insert(lease, 0, ids([7] * 100), 100, now_s)
        prefixes.unlock(lease, now_s)
        assert prefixes.match(ids([7] * 100), None, match) == match
    assert prefixes.evict(1000, 2.0) == 0
    assert prefixes.evictable_below(1000, 2.0, 1.0) == 0
    assert prefixes.cheapest(2.0) is None
    stats = prefixes.stats
    assert (stats.held_bytes, stats.pinned_bytes, stats.evictable_bytes) == (0, 0, 0)
    assert (stats.queried_tokens, stats.hit_tokens) == (200, 0)
    assert prefixes.unpin(ids([7] * 8))
    prefixes.close()


def test_a_pin_waits_for_its_prefix():
    cache = FakeCache(4, 1)
    prefixes = PrefixCache(cache, restore_s)
    prefixes.pin(ids([7] * 10))
    assert prefixes.stats.pinned_bytes == 0
    compute(prefixes, cache, [7] * 5, 0.0)
    assert prefixes.stats.pinned_bytes == 4
    compute(prefixes, cache, [7] * 16, 0.0)
    assert prefixes.stats.pinned_bytes == 8, "whole blocks of ten tokens"
    assert prefixes.evict(1000, 1.0) == 8
    prefixes.clear()
    assert prefixes.stats.held_bytes == 0
    compute(prefixes, cache, [7] * 16, 0.0)
    assert prefixes.evict(1000, 1.0) == 8, "pinned again"
    assert prefixes.unpin(ids([7] * 10))
    assert prefixes.evict(1000, 1.0) == 8


def test_reuse_and_cost_beat_recency_alone():
    """System prompts of three applications among many prompts that never come again."""

    def hit_tokens(prefixes: PrefixCache, cache: FakeCache, capacity_bytes: int) -> int:
        rng = random.Random(1)
        for step in range(1500):
            if step % 20 == 0:
                tokens = [step // 20 % 3] * 32 + [rng.randrange(100) for _ in range(8)]
            else:
                tokens = [1000 + step, *(rng.randrange(100) for _ in range(15))]
            compute(prefixes, cache, tokens, float(step))
            prefixes.evict(prefixes.stats.held_bytes - capacity_bytes, float(step))
        return prefixes.stats.hit_tokens

    results = []
    for cost_s, model in (
        (restore_s, ReuseModel()),
        (lambda _first, _count: 1.0, ReuseModel(reuse_shape=0.0)),  # least recently used
    ):
        cache = FakeCache(4, 1)
        results.append(hit_tokens(PrefixCache(cache, cost_s, model), cache, 200))
    by_regret, by_recency = results
    assert by_regret > 2 * by_recency


PAGE = 4096


def kv_of(tokens: Sequence[int], layout: KVLayout) -> torch.Tensor:
    """Made-up KV of each token, which depends on all tokens up to it."""
    rows = []
    state = 1
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 31)
        row = np.random.default_rng(state).integers(0, 256, layout.token_bytes, np.uint8)
        rows.append(torch.from_numpy(row))
    return torch.cat(rows)


@pytest.mark.parametrize("name", [*KV_CACHES, "large pages"])
@pytest.mark.parametrize("width", [64, 136, 1100], ids=["aligned", "straddling", "large"])
def test_real_blocks_have_the_kv_of_just_these_tokens(name: str, width: int):
    """Sequences share, copy and write in a pool that is short all the time."""
    layout = KVLayout((LayerKV(1, width, width),), torch.float32)  # 8, 3.8 and 0.5 to a page
    num_pages = -(-layout.token_bytes * 75 // PAGE)
    pool = PagePool(HostDriver(), num_pages * PAGE, PAGE)
    has_large = name == "large pages"
    make = group_cache("virtual" if has_large else name, 4, MappingOptions(2 * PAGE * has_large))
    cache = make(pool, Owner("a", Kind.KV), layout, 4, 48)
    prefixes = PrefixCache(cache, restore_s)
    reclaimer = Reclaimer(lambda: now_s)
    reclaimer.register(prefixes)
    pool.on_short = reclaimer.reclaim
    rng = random.Random(2)
    running: dict[int, tuple[list[int], Lease]] = {}
    now_s = 0.0
    num_refused = 0

    def end(slot: int) -> None:
        tokens, lease = running.pop(slot)
        kv = torch.empty(len(tokens) * layout.token_bytes, dtype=torch.uint8)
        cache.upload()
        cache.copy_out(slot, range(len(tokens)), kv)
        assert torch.equal(kv, kv_of(tokens, layout))
        prefixes.insert(lease, slot, ids(tokens), len(tokens), now_s)
        prefixes.unlock(lease, now_s)
        cache.release(slot)

    for step in range(150):
        now_s = float(step)
        tokens = [0] * rng.randrange(30) + [rng.randrange(3) for _ in range(rng.randrange(1, 18))]
        slot = next(slot for slot in range(4) if slot not in running)
        match = prefixes.match(ids(tokens))
        lease = prefixes.lock(match)
        cache.expect(slot, len(tokens), 49)
        if (match.num_tokens and not cache.adopt(slot, match.blocks, match.num_tokens)) or (
            not cache.reserve(np.array([slot]), np.array([len(tokens)]))
        ):
            num_refused += 1
            cache.release(slot)
            prefixes.unlock(lease)
            end(rng.choice(sorted(running)))
            continue
        prefixes.record(lease, now_s)
        cache.upload()
        new = kv_of(tokens, layout)[match.num_tokens * layout.token_bytes :]
        cache.copy_in(slot, range(match.num_tokens, len(tokens)), new)
        running[slot] = tokens, lease
        if rng.random() < 0.5:
            prefixes.insert(lease, slot, ids(tokens), len(tokens), now_s)
        if len(running) == 4 or rng.random() < 0.5:
            end(rng.choice(sorted(running)))
        pool.check()
    stats = prefixes.stats
    assert stats.hit_tokens > 500
    assert stats.evicted_blocks > 20
    assert num_refused > 0
    for slot in list(running):
        end(slot)
    prefixes.close()
    cache.close()
    assert pool.usage().in_use_bytes == {}
    pool.close()
    pool.driver.close()
