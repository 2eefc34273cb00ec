"""Caches of layers with and without windows: what is kept, in bytes, and that it is intact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cache.guards import in_use_bytes
from tests.cases import tries
from tests.memory.late_driver import LateDriver

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import KVLayout, KVPart, LayerKV, Rows, Spans, StateLayout, StateTensor
from aquifer.cache.prefix import PrefixCache
from aquifer.cache.prefix.cache import Lease
from aquifer.cache.prefix.trie import TokenIds
from aquifer.cache.state import StateCache
from aquifer.cache.swap import SwapSpace
from aquifer.errors import DriverError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.reclaim import Reclaimer

MIB = 1 << 20
KV, PREFIX, STATE = Owner("m", Kind.KV), Owner("m", Kind.PREFIX), Owner("m", Kind.STATE)


# --- bytes ---------------------------------------------------------------------------------------

WINDOW = 1024
GEMMA3_12B = KVLayout(
    tuple(LayerKV(8, 256, 256, None if i % 6 == 5 else WINDOW) for i in range(48)), torch.bfloat16
)
"""The KV of Gemma-3-12B: five layers with a window, then one without."""


@pytest.mark.parametrize("keeps_prefixes", [False, True], ids=["alone", "with prefixes"])
@pytest.mark.parametrize("name", KV_CACHES)
def test_a_long_sequence_takes_what_its_windows_need(name: str, keeps_prefixes: bool) -> None:
    """Within 3 %, with pages of 2 MiB: after its prompt was read, and as it decodes.

    An eighth of the bytes of each token and page, as all of them are written, and the same places.
    """
    num_prompt, num_total, step, page_bytes = 32_768, 34_000, 8192, 2 * MIB // 8
    layout = KVLayout(
        tuple(replace(layer, num_kv_heads=1) for layer in GEMMA3_12B.layers), GEMMA3_12B.dtype
    )
    assert 8 * layout.token_bytes == GEMMA3_12B.token_bytes
    full, sliding = (group.layout.token_bytes for group in layout.groups())
    assert (full, sliding) == (8 * 1024, 40 * 1024)
    with ExitStack() as resources:
        driver = HostDriver()
        resources.callback(driver.close)
        pool = PagePool(driver, 4096 * page_bytes, page_bytes)
        resources.callback(pool.close)
        cache = kv_cache(name, 16, step)(pool, KV, layout, 4, 1 << 17)
        resources.callback(cache.close)
        if keeps_prefixes:
            cache.keep_checkpoints()
        most_bytes = cache.footprint.most(num_prompt, num_total) * page_bytes
        slots, written = np.array([1]), np.zeros(5, np.int64)
        cache.expect(1, num_prompt, num_total)
        assert cache.admit(1, num_prompt)
        for end in (*range(step, num_prompt + 1, step), *range(num_prompt + 1, num_total)):
            cache.advance(slots, written[slots])
            assert cache.reserve(slots, np.array([end]))
            assert pool.usage().in_use_bytes[KV] <= most_bytes
            written[1] = end
            if end <= num_prompt:
                continue
            stats = cache.stats(written)
            needed_bytes = end * full + WINDOW * sliding
            assert stats.mapped_bytes == pool.usage().in_use_bytes[KV]
            assert needed_bytes <= stats.mapped_bytes < 1.03 * needed_bytes
            assert 0 <= stats.wasted_bytes < 0.01 * needed_bytes
            assert stats.mapped_bytes < 0.3 * end * layout.token_bytes
        cache.release(1)
        assert not in_use_bytes(pool)


@pytest.mark.parametrize("name", KV_CACHES)
def test_a_footprint_counts_windows(name: str) -> None:
    """A request of 128k tokens fits where its windows fit, and one in which all layers slide."""
    with ExitStack() as resources:
        driver = HostDriver()
        resources.callback(driver.close)
        pool = PagePool(driver, 16_384 * MIB, 2 * MIB)
        resources.callback(pool.close)
        layouts = {
            "gemma": GEMMA3_12B,
            "mistral": KVLayout((LayerKV(8, 128, 128, 4096),) * 32, torch.bfloat16),
        }
        for layout in layouts.values():
            cache = kv_cache(name, 16, 2048)(pool, KV, layout, 1, 1 << 17)
            footprint = cache.footprint
            most = footprint.most(100_000, 1 << 17)
            assert most == footprint.most(1, 1 << 17) == footprint.pages((1 << 17) - 1)
            assert most * 2 * MIB < 0.25 * (1 << 17) * layout.token_bytes
            longest = footprint.longest(most)
            assert longest >= 1 << 17
            assert footprint.most(1, min(longest, 1 << 30)) <= most
            if longest < 1 << 30:
                assert footprint.most(1, longest + 1) > most
            assert footprint.most(100, 1 << 17, 3) <= 3 * most
            lengths = np.array([10, 100_000])
            assert footprint.growth(np.array([64, 64]), lengths) < footprint.growth(
                np.array([64, 64]), lengths[:1].repeat(2)
            )
            cache.close()


# --- random lives --------------------------------------------------------------------------------

PAGE = 4096
BLOCK_SIZE = 4
MAX_SEQS, MAX_TOKENS, STEP_TOKENS = 4, 64, 12
VOCAB_SIZE = 3
LAYOUTS = {
    # 8 tokens a page; the blocks of both groups are alike
    "aligned": KVLayout((LayerKV(1, 64, 64), LayerKV(1, 64, 64, 10)), torch.float32),
    # pages end within tokens, at other places in each group
    "straddling": KVLayout(
        (LayerKV(3, 40, 24, 9), LayerKV(1, 56, 24), LayerKV(1, 30, 50, 5)), torch.float32
    ),
    # a page of the first group has all tokens of most sequences
    "small": KVLayout((LayerKV(1, 8, 8), LayerKV(4, 96, 96, 7)), torch.float32),
    "sliding": KVLayout((LayerKV(2, 40, 40, 6), LayerKV(1, 64, 32, 6)), torch.float32),
    "window of one": KVLayout((LayerKV(1, 64, 64), LayerKV(1, 64, 64, 1)), torch.float32),
}


STATES = {
    "state": StateLayout(
        (
            (StateTensor("conv", (5, 3), torch.float32), StateTensor("ssm", (9,), torch.float32)),
            (StateTensor("ssm", (2, 40), torch.float32),),
        )
    ),
    "state of pages": StateLayout(((StateTensor("ssm", (2, 1500), torch.float32),),)),
}
"""By name of a layout: four states a page, and one on nearly three pages."""
LAYOUTS["state"] = KVLayout((LayerKV(1, 64, 64), LayerKV(1, 60, 60)), torch.float32)
LAYOUTS["state of pages"] = KVLayout((LayerKV(1, 64, 64), LayerKV(1, 64, 64, 10)), torch.float32)


@dataclass
class Running:
    """A sequence: its tokens, of which some are written, and its lease."""

    tokens: list[int]
    num_written: int
    lease: Lease
    stop: int = 0  # where its state is to be marked


class GroupsMachine(RuleBasedStateMachine):
    """Random lives of sequences over a pool that is short: they begin with cached prefixes, run in
    chunks, fork, move to the host and back, and end. Each call may be refused by the device.

    What is written of a token is a function of all tokens up to it. So a prefix that is found must
    have just this, in each layer as far as that sees.
    """

    name: str

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        is_late=st.booleans(),
        share=st.sampled_from([1, 2]),
    )
    def start(self, layout: str, is_late: bool, share: int):
        self.layout = LAYOUTS[layout]
        self.device = LateDriver() if is_late else HostDriver()
        self.driver = FaultyDriver(self.device)
        self.state = STATES.get(layout)
        num_pages = MAX_SEQS * MAX_TOKENS * self.layout.token_bytes // PAGE // share // 2 + 8
        self.pool = PagePool(self.driver, num_pages * PAGE, PAGE, 4 * PAGE, guards=True)
        make = kv_cache(self.name, BLOCK_SIZE, STEP_TOKENS)
        self.cache = make(self.pool, KV, self.layout, MAX_SEQS, MAX_TOKENS, self.state)
        self.cache.keep_checkpoints()
        self.now_s = 0.0
        self.reclaimer = reclaimer = Reclaimer(lambda: self.now_s)
        self.prefixes = PrefixCache(
            self.cache,
            lambda first, count: count * (1 + first / 100),
            parts=self.cache.parts,
            losses=reclaimer.log.losses_of(PREFIX),
        )
        reclaimer.register(self.prefixes)
        self.pool.on_short = reclaimer.reclaim
        self.space = SwapSpace(1 << 20, torch.device("cpu"))
        self.running: dict[int, Running] = {}

    def free_slots(self) -> list[int]:
        return [slot for slot in range(1, MAX_SEQS + 1) if slot not in self.running]

    def attempt(self, act: Callable[[], bool], fail_in: int | None) -> bool:
        """Whether a call succeeded; if not, the sequences have what they had."""
        before = {slot: self.cache.slot_blocks(slot) for slot in self.running}
        self.driver.fail_at = None if fail_in is None else self.driver.num_calls + fail_in
        try:
            done = act()
        except DriverError:
            done = False
        self.driver.fail_at = None
        if not done:
            assert before == {slot: self.cache.slot_blocks(slot) for slot in before}
        return done

    fails = st.sampled_from([None, None, None, 0, 1, 3])
    prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)

    @precondition(lambda self: self.free_slots())
    @rule(seed=prompts, repeats=st.integers(1, 12), fail_in=fails, end=st.integers(0, 2))
    def begin(self, seed: list[int], repeats: int, fail_in: int | None, end: int):
        """Prompts that repeat a few tokens begin alike, for a while."""
        tokens = [*(seed * repeats)[: MAX_TOKENS - 4], end]
        slot = self.free_slots()[0]
        match = self.prefixes.match(ids(tokens))
        lease = self.prefixes.lock(match)
        self.cache.expect(slot, len(tokens), MAX_TOKENS)

        def bring_in() -> bool:
            if match.num_tokens and not self.cache.resume(
                slot, self.prefixes.kept(match), match.num_tokens
            ):
                return False
            return self.cache.admit(slot, len(tokens))

        if not self.attempt(bring_in, fail_in):
            self.prefixes.unlock(lease)
            self.cache.release(slot)
            return
        self.prefixes.settle(lease)
        self.prefixes.record(lease, self.now_s)
        self.running[slot] = Running(tokens, match.num_tokens, lease)
        if match.num_tokens:
            self.cache.upload()
            self.read_back(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, STEP_TOKENS), fail_in=fails)
    def step(self, data: st.DataObject, count: int, fail_in: int | None):
        """Give back, and write the next tokens of some sequences."""
        chosen = sorted(data.draw(st.sets(st.sampled_from(sorted(self.running)), min_size=1)))
        self.now_s += 1
        slots, starts, counts = np.array(chosen), [], []
        left = STEP_TOKENS
        for slot in chosen:
            if self.running[slot].num_written == self.running[slot].stop > 0:
                self.mark(slot, fail_in)
        for slot in chosen:
            sequence = self.running[slot]
            known = len(sequence.tokens) - sequence.num_written
            if not known and len(sequence.tokens) < MAX_TOKENS:
                sequence.tokens.append(data.draw(st.integers(0, VOCAB_SIZE - 1)))
                known = 1
            starts.append(sequence.num_written)
            stops = self.prefixes.stops(ids(sequence.tokens), None, sequence.num_written)
            if stops and count % 3:
                known = min(known, stops[0] - sequence.num_written)
                sequence.stop = stops[0]
            counts.append(min(known, count, left))
            left -= counts[-1]
        everyone = np.array(sorted(self.running))
        self.cache.advance(
            everyone, np.array([self.running[slot].num_written for slot in everyone.tolist()])
        )
        ends = np.array(starts) + np.array(counts)
        if not self.attempt(lambda: self.cache.reserve(slots, ends), fail_in):
            return
        runs = np.array(counts) > 0
        if runs.any():
            self.write(slots[runs], np.array(starts)[runs], np.array(counts)[runs])
        for slot, end in zip(chosen, ends.tolist(), strict=True):
            self.running[slot].num_written = end
            self.read_back(slot)

    def mark(self, slot: int, fail_in: int | None) -> None:
        """Have the state of a sequence copied for a checkpoint, and perhaps retained at once."""
        stop = self.running[slot].stop

        def copy() -> bool:
            self.cache.mark(slot, stop)
            return True

        if self.attempt(copy, fail_in):
            self.retain(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert(self, data: st.DataObject):
        self.retain(data.draw(st.sampled_from(sorted(self.running))))

    def retain(self, slot: int) -> None:
        one = self.running[slot]
        self.prefixes.insert(one.lease, slot, ids(one.tokens), one.num_written, self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retains=st.booleans())
    def end(self, data: st.DataObject, retains: bool):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        if retains:
            self.retain(slot)
        self.prefixes.unlock(self.running.pop(slot).lease, self.now_s)
        self.cache.release(slot)

    @precondition(lambda self: self.running and self.free_slots())
    @rule(data=st.data(), fail_in=fails, back=st.integers(0, 8))
    def fork(self, data: st.DataObject, fail_in: int | None, back: int):
        parent = data.draw(st.sampled_from(sorted(self.running)))
        one, child = self.running[parent], self.free_slots()[0]
        count = one.num_written - (0 if self.state else back)
        if count < 1 or not self.cache.can_fork(parent, count):
            assert back or count < 1, "a sequence has what its own next row needs"
            return
        if self.attempt(lambda: self.cache.fork(parent, child, count), fail_in):
            lease = self.prefixes.fork(one.lease, count)
            self.running[child] = Running(one.tokens[:count], count, lease)
            self.cache.upload()
            self.read_back(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fail_in=fails)
    def swap(self, data: st.DataObject, fail_in: int | None):
        """Only what is kept moves."""
        chosen = sorted(data.draw(st.sets(st.sampled_from(sorted(self.running)), min_size=1)))
        sequences = [self.running[slot] for slot in chosen]
        swapped = self.space.swap_out(self.cache, chosen, [one.num_written for one in sequences])
        assert swapped is not None
        for slot, one in zip(chosen, sequences, strict=True):
            self.cache.release(slot)
            self.prefixes.unlock(one.lease, self.now_s)
            del self.running[slot]
        behind = int(self.cache.footprint.block_tokens) + 2  # the last checkpoint's window
        for kv, one in zip(swapped, sequences, strict=True):
            assert kv.num_bytes <= sum(
                part.cache.footprint.token_bytes
                * min(one.num_written, (part.window_tokens or MAX_TOKENS) + behind)
                + 2 * max(part.cache.footprint.block_bytes, PAGE)
                for part in self.cache.parts
            )
        slots = self.free_slots()[: len(chosen)]
        if not self.attempt(lambda: self.space.swap_in(self.cache, slots, swapped), fail_in):
            self.space.discard(swapped)
            return
        for slot, one in zip(slots, sequences, strict=True):
            one.lease = self.prefixes.lock(self.prefixes.match(ids(one.tokens)))
            self.prefixes.settle(one.lease)
            self.running[slot] = one
        for slot in slots:
            self.read_back(slot)

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int):
        evictable_bytes = self.prefixes.evictable_bytes
        totals = self.reclaimer.log.totals.get(PREFIX)
        freed_bytes = self.prefixes.evict(num_pages * PAGE, self.now_s)
        if freed_bytes:
            before_bytes = 0 if totals is None else totals.num_bytes
            assert self.reclaimer.log.totals[PREFIX].num_bytes == before_bytes + freed_bytes
        assert all(
            entry.num_restored <= entry.num_items and entry.expected_s >= 0 <= entry.paid_s
            for entry in self.reclaimer.log.latest
        )
        assert freed_bytes >= min(evictable_bytes, num_pages * PAGE)
        assert self.prefixes.evictable_bytes == evictable_bytes - freed_bytes

    @precondition(lambda self: isinstance(self.device, LateDriver))
    @rule(behind=st.integers(0, 3))
    def catch_up(self, behind: int):
        assert isinstance(self.device, LateDriver)
        self.device.finish(max(len(self.device.work) - behind, 0))
        self.pool.retired.collect()

    # What is written, and what is read.

    def write(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        self.cache.upload()
        spans = Spans.make(slots, starts, counts)
        view = self.cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
        marks = torch.cat(
            [
                marks_of(self.running[slot].tokens)[start : start + count]
                for slot, start, count in zip(
                    slots.tolist(), starts.tolist(), counts.tolist(), strict=True
                )
            ]
        )
        for index, layer in enumerate(self.layout.layers):
            for_all = (marks + index)[:, None, None]
            view.write(
                index,
                for_all.expand(-1, layer.num_kv_heads, layer.key_dim),
                (for_all + 0.5).expand(-1, layer.num_kv_heads, layer.value_dim),
            )
        if self.state is not None:
            for slot, end in zip(slots.tolist(), (starts + counts).tolist(), strict=True):
                for tensor, expected in self.states(slot, end):
                    tensor.copy_(expected)
        if isinstance(self.device, LateDriver):
            self.device.launch(self.mapped_addresses())

    def states(self, slot: int, num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A slot's state, and what it is after so many tokens."""
        mark = marks_of(self.running[slot].tokens)[num_tokens - 1]
        state = self.cache.parts[-1].cache
        assert isinstance(state, StateCache)
        for layer in state.tensors.layers:
            for index, tensor in enumerate(layer):
                values = torch.arange(tensor[slot].numel(), dtype=torch.float32) * (index + 1)
                yield tensor[slot], (values + mark).view(tensor[slot].shape)

    def mapped_addresses(self) -> list[int]:
        """Addresses of the pages that are in use."""
        found = []
        for part in self.cache.parts:
            range_ = cast(KVPart | StateCache, part.cache).tensors.range
            retired = self.pool.retired.indices(range_)
            found += [range_.address + i * PAGE for i in set(range_.pages) - retired]
        return found

    def read_back(self, slot: int) -> None:
        """Each layer has what rows to come see of it, and it is what the tokens say."""
        one = self.running[slot]
        marks = marks_of(one.tokens)
        if self.state is not None and one.num_written:
            for tensor, expected in self.states(slot, one.num_written):
                assert torch.equal(tensor, expected)
        for part, group in zip(self.cache.parts, self.layout.groups(), strict=False):
            first = part.first_needed(one.num_written)
            assert part.cache.num_forgotten(slot) <= first
            positions = torch.arange(first, one.num_written)
            tensors = cast(KVPart, part.cache).tensors
            for layer, (keys, values) in zip(group.layers, tensors.layers, strict=True):
                if self.name == "virtual":
                    k, v = (
                        keys[slot, first : one.num_written],
                        values[slot, first : one.num_written],
                    )
                else:
                    blocks = torch.from_numpy(tensors.table[slot])[positions // BLOCK_SIZE].long()
                    k, v = (
                        keys[blocks, positions % BLOCK_SIZE],
                        values[blocks, positions % BLOCK_SIZE],
                    )
                expected = (marks[positions] + layer)[:, None, None]
                assert torch.equal(k, expected.expand_as(k))
                assert torch.equal(v, (expected + 0.5).expand_as(v))

    # What always holds.

    @invariant()
    def books_agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        written = np.zeros(MAX_SEQS + 1, np.int64)
        for slot, one in self.running.items():
            written[slot] = one.num_written
        stats = self.cache.stats(written)
        in_use = in_use_bytes(self.pool)
        assert stats.mapped_bytes == in_use.get(KV, 0)
        if self.state is not None:
            state = self.cache.parts[-1].cache.stats(len(self.running))
            assert state.mapped_bytes <= in_use.get(STATE, 0)  # and what is marked
            assert state.wasted_bytes < (len(self.running) + 1) * PAGE
        assert stats.wasted_bytes >= 0
        held = self.prefixes.stats
        assert 0 <= held.evictable_bytes <= held.held_bytes
        if self.name == "virtual":
            assert in_use.get(PREFIX, 0) <= held.held_bytes
            if not self.running:
                assert in_use.get(PREFIX, 0) == held.held_bytes == held.evictable_bytes
        for slot in self.running:
            self.kept_little(slot)

    def kept_little(self, slot: int) -> None:
        """A part with a window has no more than its footprint says."""
        one = self.running[slot]
        num_pages = sum(
            -(-len(part.cache.slot_blocks(slot)) * part.cache.footprint.block_bytes // PAGE)
            for part in self.cache.parts
        )
        # The virtual cache maps a few tokens ahead where pages are free.
        ahead = sum(part.cache.footprint.stretch_pages(16) + 1 for part in self.cache.parts)
        assert num_pages <= self.cache.footprint.pages(len(one.tokens)) + ahead

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for slot, one in self.running.items():
            self.prefixes.unlock(one.lease, self.now_s)
            self.cache.release(slot)
        self.prefixes.close()
        assert not in_use_bytes(self.pool)
        self.cache.close()
        self.pool.close()
        assert self.driver.is_unused
        self.driver.close()
        self.space.close()


def ids(tokens: list[int]) -> TokenIds:
    return np.array(tokens, np.int32)


def marks_of(tokens: list[int]) -> torch.Tensor:
    """Return a number for each token, computed from that token and all tokens before it."""
    found, state = [], 1
    for token in tokens:
        state = (state * 1103 + token * 7 + 12345) % 65_521
        found.append(state)
    return torch.tensor(found, dtype=torch.float32)


class VirtualGroups(GroupsMachine):
    name = "virtual"


class PagedGroups(GroupsMachine):
    name = "paged"


TestVirtualGroups = VirtualGroups.TestCase
TestPagedGroups = PagedGroups.TestCase
TestVirtualGroups.settings = TestPagedGroups.settings = settings(
    max_examples=tries(50), stateful_step_count=50, deadline=None, database=None, derandomize=True
)
