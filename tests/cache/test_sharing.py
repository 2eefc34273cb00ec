"""Sharing in both cache managers: random lives against a model, and what must hold on the way.

Numbers such as K6 are the invariants of docs/memory.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cache.guards import guards_of, in_use_bytes
from tests.cases import covering, tries
from tests.memory.late_driver import LateDriver
from tests.memory.queued_mapper import QueuedMapper

from aquifer.cache import KV_CACHES, copies, group_cache
from aquifer.cache.base import KVLayout, KVPart, LayerKV, Rows, Spans
from aquifer.cache.prefix import PrefixCache
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.swap import SwapSpace
from aquifer.errors import DriverError, InvariantError
from aquifer.kernels.block_copy import block_copy
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.stripes import StripedResidency

PAGE = 4096
BLOCK_SIZE = 4
MAX_SEQS, MAX_TOKENS = 5, 48
KV, PREFIX, OTHER = Owner("a", Kind.KV), Owner("a", Kind.PREFIX), Owner("b", Kind.KV)

LAYOUTS = {
    # 512 bytes: 8 tokens to a page, 2 blocks to a page
    "aligned": KVLayout((LayerKV(1, 32, 32), LayerKV(1, 48, 16)), torch.float32),
    # 1088 bytes: a page ends within a token, and a block within a page
    "straddling": KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.float32),
    # 5376 bytes: a token is more than a page
    "large": KVLayout((LayerKV(4, 96, 96), LayerKV(2, 128, 160)), torch.float32),
    # 774 bytes of 2 each, so that copies are made in the smallest words
    "odd": KVLayout((LayerKV(3, 43, 86),), torch.bfloat16),
}


EQUAL_LAYOUTS = {  # in place of these, for layer-major KV
    LAYOUTS["aligned"]: KVLayout((LayerKV(1, 32, 32), LayerKV(2, 16, 16)), torch.float32),
    LAYOUTS["straddling"]: KVLayout((LayerKV(3, 40, 40), LayerKV(4, 30, 30)), torch.float32),
    LAYOUTS["large"]: KVLayout((LayerKV(4, 280, 280),), torch.float32),
    LAYOUTS["odd"]: KVLayout((LayerKV(3, 43, 43),), torch.bfloat16),
}


@dataclass
class Retained:
    """Blocks that are held, and the tokens in them."""

    blocks: list[int]
    marks: list[int]


@dataclass
class Harness:
    """A manager, and what each sequence wrote: one mark a token."""

    name: str
    layout: KVLayout
    num_pages: int
    is_late: bool = False
    max_seqs: int = MAX_SEQS
    mapping: MappingOptions | None = None  # None for what `name` says
    is_background: bool = False  # whether pages are mapped ahead by a `QueuedMapper`
    guards: bool = True
    marks: dict[int, list[int]] = field(default_factory=dict)
    next_mark: int = 1

    def __post_init__(self) -> None:
        is_layer_major = "layer-major" in self.name
        if is_layer_major:
            self.layout = EQUAL_LAYOUTS[self.layout]
        self.num_buffers = self.layout.num_buffers if is_layer_major else 1
        self.num_pages *= self.num_buffers
        self.place_bytes = self.num_buffers * PAGE
        self.device = LateDriver() if self.is_late else HostDriver()
        self.driver = FaultyDriver(self.device)
        self.pool = PagePool(self.driver, self.num_pages * PAGE, PAGE, 4 * PAGE, guards=self.guards)
        if self.is_background:
            self.pool.mapper = QueuedMapper(self.pool.pages)
        is_virtual = "paged" not in self.name
        large_bytes = (2 if self.layout.token_bytes < 1000 else 4) * PAGE
        make = group_cache(
            "virtual" if is_virtual else "paged",
            BLOCK_SIZE,
            self.mapping
            or MappingOptions(
                large_bytes if self.name == "large pages" else None, is_layer_major=is_layer_major
            ),
        )
        self.is_virtual = is_virtual
        self.cache: KVPart = make(self.pool, KV, self.layout, self.max_seqs, MAX_TOKENS)
        self.tensors = self.cache.tensors
        self.range = self.tensors.range
        self._watch_copies()

    def _watch_copies(self) -> None:
        """Let the late device know what each launch of copies touches."""
        make_copies = self.tensors.make_copies

        def watched() -> None:
            touched: set[int] = set()
            buffer_pages = self.range.num_pages // self.num_buffers
            for source, destination, num_bytes in self.tensors.pending_copies:
                for begin in (source, destination):
                    first = begin // self.place_bytes
                    last = -(-(begin + num_bytes) // self.place_bytes)
                    for buffer in range(self.num_buffers):
                        start = buffer * buffer_pages
                        touched.update(range(start + first, start + last))
            assert touched <= self.indices_of(self.range.pages)
            self.launch(touched)
            make_copies()

        self.tensors.make_copies = watched  # type: ignore[method-assign]

    def launch(self, pages: set[int]) -> None:
        if isinstance(self.device, LateDriver):
            self.device.launch([self.range.address + page * PAGE for page in pages])

    @property
    def num_pending(self) -> int:
        return self.tensors.num_pending_copies

    def free_slots(self) -> list[int]:
        return [slot for slot in range(self.max_seqs) if slot not in self.marks]

    def blocks(self, slot: int) -> list[int]:
        """All blocks of the slot, including those for tokens to come."""
        return list(self.cache.slot_blocks(slot))

    def num_whole_blocks(self, slot: int) -> int:
        """Number of blocks that the slot will not write to any more."""
        return len(self.marks[slot]) * self.layout.token_bytes // self.cache.footprint.block_bytes

    def reserve(self, counts: dict[int, int]) -> bool:
        """Room for more tokens; a prompt is at first a little longer than what is reserved."""
        slots = np.array(list(counts), np.int64)
        lengths = [len(self.marks.get(slot, ())) + count for slot, count in counts.items()]
        for slot, count in counts.items():
            if slot not in self.marks:
                self.cache.expect(slot, min(count + 6 * (slot % 3), MAX_TOKENS), MAX_TOKENS + 1)
        return self.cache.reserve(slots, np.array(lengths))

    def write(self, counts: dict[int, int]) -> None:
        """A step: write new tokens."""
        self.cache.upload()
        slots = np.array(list(counts), np.int64)
        starts = np.array([len(self.marks.get(slot, ())) for slot in counts])
        spans = Spans.make(slots, starts, np.array(list(counts.values())))
        view = self.cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
        marks = torch.arange(self.next_mark, self.next_mark + spans.num_tokens)
        for index, layer in enumerate(self.layout.layers):
            view.write(
                index,
                self.elements(marks, 2 * index, layer.num_kv_heads * layer.key_dim).view(
                    -1, layer.num_kv_heads, layer.key_dim
                ),
                self.elements(marks, 2 * index + 1, layer.num_kv_heads * layer.value_dim).view(
                    -1, layer.num_kv_heads, layer.value_dim
                ),
            )
        self.launch(set(self.used_pages()))
        for slot, count in counts.items():
            new = range(self.next_mark, self.next_mark + count)
            self.marks.setdefault(slot, []).extend(new)
            self.next_mark += count

    def elements(self, marks: torch.Tensor, salt: int, count: int) -> torch.Tensor:
        """[tokens, count]: numbers that no other mark or layer has as a whole."""
        high, low = marks[:, None] // 64, marks[:, None] % 64
        place = torch.arange(count)
        return torch.where(place % 2 == 0, high + salt, low + place % 61).to(self.layout.dtype)

    def used_pages(self) -> set[int]:
        """Indices of mapped pages that are not retired."""
        places = set(self.range.pages) - self.pool.retired.indices(self.range)
        return self.indices_of(places - guards_of(self.cache))

    def indices_of(self, places: Iterable[int]) -> set[int]:
        """All indices that the pages at some places take."""
        return {
            place + i
            for place in places
            for i in range(self.range.num_places(self.range.page(place)))
        }

    def read_back(self, slot: int) -> None:
        """K6: check that every layer has exactly what the sequence wrote."""
        marks = torch.tensor(self.marks[slot])
        length = len(marks)
        for index, layer in enumerate(self.layout.layers):
            keys, values = self.tensors.layers[index]
            if self.is_virtual:
                keys, values = keys[slot, :length], values[slot, :length]
            else:
                blocks = torch.tensor(self.blocks(slot)[: -(-length // BLOCK_SIZE)])
                keys = keys[blocks].flatten(0, 1)[:length]
                values = values[blocks].flatten(0, 1)[:length]
            for salt, tensor, dim in ((0, keys, layer.key_dim), (1, values, layer.value_dim)):
                expected = self.elements(marks, 2 * index + salt, layer.num_kv_heads * dim)
                assert torch.equal(tensor.flatten(1), expected)

    def release(self, slot: int) -> None:
        self.cache.release(slot)
        self.marks.pop(slot, None)

    def begin(self, slot: int, count: int) -> None:
        assert self.reserve({slot: count})
        self.write({slot: count})

    def end(self, slot: int) -> Retained:
        """End a sequence and hold its blocks, the last one included."""
        marks = self.marks[slot]
        retained = Retained(list(self.cache.blocks(slot, len(marks))), marks)
        self.cache.retain(retained.blocks)
        self.release(slot)
        return retained

    def adopt(self, slot: int, retained: Retained, count: int) -> bool:
        num_blocks = -(-count * self.layout.token_bytes // self.cache.footprint.block_bytes)
        self.cache.expect(slot, min(count + 9, MAX_TOKENS), MAX_TOKENS + 1)
        if not self.cache.adopt(slot, retained.blocks[:num_blocks], count):
            return False
        self.marks[slot] = retained.marks[:count]
        return True

    def fork(self, parent: int, child: int, count: int) -> bool:
        if not self.cache.fork(parent, child, count):
            return False
        self.marks[child] = self.marks[parent][:count]
        return True

    def check(self, retained: Sequence[Retained] = ()) -> None:
        """K1, K2, K6 and K7, but for contents while copies are pending."""
        self.pool.check()
        users = Counter(b for slot in self.marks for b in self.blocks(slot))
        held = {block for each in retained for block in each.blocks}
        for slot in self.marks:
            own = self.blocks(slot)[self.num_whole_blocks(slot) :]
            assert all(users[block] == 1 and block not in held for block in own)
        written_tokens = sum(map(len, self.marks.values()))
        stats = self.cache.stats(written_tokens)
        assert stats.written_bytes == written_tokens * self.layout.token_bytes
        in_use = in_use_bytes(self.pool)
        assert in_use.get(KV, 0) == stats.mapped_bytes
        if self.num_pending:
            return
        for slot in self.marks:
            self.read_back(slot)
        saved = sum(count - 1 for count in users.values())
        assert stats.shared_bytes == saved * self.cache.footprint.block_bytes
        covered = set(users.elements()) if self.is_virtual else self.pages_of(set(users))
        retained_pages = self.units_of(held) if self.is_virtual else self.pages_of(held)
        assert stats.mapped_bytes == len(covered) * self.place_bytes
        assert in_use.get(PREFIX, 0) == len(retained_pages - covered) * self.place_bytes
        assert stats.wasted_bytes >= 0
        num_mapped = len(self.used_pages()) // self.num_buffers
        if self.is_virtual:
            assert num_mapped == users.total()
        else:
            assert num_mapped == len(covered | retained_pages)

    def units_of(self, blocks: set[int]) -> set[int]:
        """All blocks of the pages of a virtual cache in which some of them lie."""
        pages = set(map(self.range.page_of, blocks))
        return {page + i for page in pages for i in range(self.range.num_places(page))}

    def pages_of(self, blocks: set[int]) -> set[int]:
        """Indices of the pages that blocks of a paged cache lie on."""
        size = self.cache.footprint.block_bytes
        return {
            page
            for block in blocks
            for page in range(
                block * size // self.place_bytes, -(-(block + 1) * size // self.place_bytes)
            )
        }

    def state(self) -> object:
        """What a refused call must leave as it was."""
        written_tokens = sum(map(len, self.marks.values()))
        return (
            in_use_bytes(self.pool),
            self.used_pages(),
            {slot: self.blocks(slot) for slot in self.marks},
            self.cache.stats(written_tokens),
        )

    def close(self) -> None:
        self.cache.close()
        assert not in_use_bytes(self.pool)
        assert not self.pool.retired.num_places()
        self.pool.close()
        driver = self.driver
        assert driver.is_unused
        driver.close()


class SharingMachine(RuleBasedStateMachine):
    """Random lives of sequences that fork, retain, adopt, move to the host and back, and end.

    Any call may be refused by the pool, after its hook has dropped held blocks, or by the device.
    """

    name: str

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        is_late=st.booleans(),
        share=st.sampled_from([2, 4, 8]),
        has_hook=st.booleans(),
    )
    def start(self, layout: str, is_late: bool, share: int, has_hook: bool):
        peak_bytes = MAX_SEQS * MAX_TOKENS * LAYOUTS[layout].token_bytes
        num_pages = max(peak_bytes // PAGE // share, 6)
        self.harness = Harness(self.name, LAYOUTS[layout], num_pages, is_late)
        self.retained: list[Retained] = []
        self.num_evicted = 0
        self.space = SwapSpace(peak_bytes // 2, torch.device("cpu"))
        if has_hook:
            self.harness.pool.on_short = self.evict

    def evict(self, missing_bytes: int, asker: Owner) -> bool:
        """The pool's hook: drop what was retained first."""
        if not self.retained:
            return False
        self.num_evicted += 1
        self.harness.cache.unretain(self.retained.pop(0).blocks)
        return True

    def attempt(self, act: Callable[[], bool], fail_in: int | None = None) -> bool:
        """Whether a call succeeded; if not, and nothing was evicted for it, nothing has changed."""
        driver = self.harness.driver
        before, num_evicted = self.harness.state(), self.num_evicted
        driver.fail_at = None if fail_in is None else driver.num_calls + fail_in
        try:
            done = act()
        except DriverError:
            done = False
        driver.fail_at = None
        if not done and self.num_evicted == num_evicted:
            assert self.harness.state() == before
        return done

    fails = st.sampled_from([None, None, None, None, 0, 1, 2])

    @rule(data=st.data(), fail_in=fails)
    def append(self, data: st.DataObject, fail_in: int | None):
        slots = data.draw(st.sets(st.integers(0, MAX_SEQS - 1), min_size=1, max_size=3))
        counts = {slot: data.draw(st.sampled_from([1, 4, 9, 24])) for slot in sorted(slots)}
        harness = self.harness
        for slot, count in list(counts.items()):
            if len(harness.marks.get(slot, ())) + count > MAX_TOKENS:
                del counts[slot]
        if counts and self.attempt(lambda: harness.reserve(counts), fail_in):
            harness.write(counts)

    @precondition(lambda self: self.harness.marks and self.harness.free_slots())
    @rule(
        data=st.data(), fail_in=fails, ends=st.sampled_from(["neither", "parent", "child", "both"])
    )
    def fork(self, data: st.DataObject, fail_in: int | None, ends: str):
        """Fork as beams do: either sequence may end before the next step."""
        harness = self.harness
        parent = data.draw(st.sampled_from(sorted(harness.marks)))
        child = data.draw(st.sampled_from(harness.free_slots()))
        length = len(harness.marks[parent])
        count = data.draw(st.sampled_from([length, length, 1 + length // 2]))
        if not self.attempt(lambda: harness.fork(parent, child, min(count, length)), fail_in):
            return
        if ends in ("parent", "both"):
            harness.release(parent)
        if ends in ("child", "both"):
            harness.release(child)

    @precondition(lambda self: self.harness.marks and not self.harness.num_pending)
    @rule(data=st.data())
    def hold_whole_blocks(self, data: st.DataObject):
        """Hold the whole blocks of a sequence that goes on."""
        harness = self.harness
        slot = data.draw(st.sampled_from(sorted(harness.marks)))
        blocks = harness.blocks(slot)[: harness.num_whole_blocks(slot)]
        harness.cache.retain(blocks)
        num_tokens = harness.cache.tokens_in(len(blocks))
        assert num_tokens <= harness.cache.tokens_touching(len(blocks)) <= MAX_TOKENS
        num_blocks = -(
            -num_tokens * harness.layout.token_bytes // harness.cache.footprint.block_bytes
        )
        assert list(harness.cache.blocks(slot, num_tokens)) == blocks[:num_blocks]
        self.retained.append(Retained(blocks, harness.marks[slot][:num_tokens]))

    @precondition(lambda self: self.harness.marks and not self.harness.num_pending)
    @rule(data=st.data(), fail_in=fails, goes_on=st.booleans())
    def end(self, data: st.DataObject, fail_in: int | None, goes_on: bool):
        """End one sequence, and maybe begin another with its retained blocks."""
        slot = data.draw(st.sampled_from(sorted(self.harness.marks)))
        self.retained.append(self.harness.end(slot))
        if goes_on:
            self._adopt(data, self.retained[-1], fail_in)

    @precondition(lambda self: self.retained and self.harness.free_slots())
    @rule(data=st.data(), fail_in=fails)
    def adopt(self, data: st.DataObject, fail_in: int | None):
        self._adopt(data, data.draw(st.sampled_from(self.retained)), fail_in)

    def _adopt(self, data: st.DataObject, retained: Retained, fail_in: int | None) -> None:
        harness = self.harness
        if not retained.marks:
            return
        length = len(retained.marks)
        count = data.draw(st.sampled_from([length, length, max(length - 1, 1), 1 + length // 2]))
        slot = harness.cache.preferred_slot(retained.blocks, harness.free_slots())
        if slot is None:
            slot = data.draw(st.sampled_from(harness.free_slots()))
        count = min(count, length)
        self.attempt(lambda: harness.adopt(slot, retained, count), fail_in)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def drop(self, data: st.DataObject):
        index = data.draw(st.integers(0, len(self.retained) - 1))
        self.harness.cache.unretain(self.retained.pop(index).blocks)

    @precondition(lambda self: self.harness.marks)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        self.harness.release(data.draw(st.sampled_from(sorted(self.harness.marks))))

    @precondition(lambda self: self.harness.marks)
    @rule(data=st.data())
    def swap(self, data: st.DataObject):
        """Copy to the host and back, in two pieces each way, maybe to another slot."""
        harness = self.harness
        cache, token_bytes = harness.cache, harness.layout.token_bytes
        slot = data.draw(st.sampled_from(sorted(harness.marks)))
        marks = harness.marks[slot]
        middle = data.draw(st.integers(0, len(marks)))
        parts = [range(middle), range(middle, len(marks))]
        copies = [torch.empty(len(part) * token_bytes, dtype=torch.uint8) for part in parts]
        cache.upload()
        for part, copy in zip(parts, copies, strict=True):
            cache.copy_out(slot, part, copy)
        harness.release(slot)
        slot = data.draw(st.sampled_from(harness.free_slots()))
        if not self.attempt(lambda: harness.reserve({slot: len(marks)})):
            return
        cache.upload()
        for part, copy in zip(parts, copies, strict=True):
            cache.copy_in(slot, part, copy)
        harness.marks[slot] = marks

    @precondition(lambda self: self.harness.marks)
    @rule(data=st.data(), fail_in=fails)
    def swap_group(self, data: st.DataObject, fail_in: int | None):
        """Swap several sequences at once; those that shared share again."""
        harness = self.harness
        cache = harness.cache
        chosen = data.draw(st.sets(st.sampled_from(sorted(harness.marks)), min_size=1))
        slots = data.draw(st.permutations(sorted(chosen)))
        marks = [harness.marks[slot] for slot in slots]
        swapped = self.space.swap_out(cache, slots, [len(m) for m in marks])
        if swapped is None:
            return
        saved_bytes = cache.stats(0).shared_bytes
        for slot in slots:
            harness.release(slot)
        saved_bytes -= cache.stats(0).shared_bytes
        free_slots = data.draw(st.permutations(harness.free_slots()))[: len(slots)]
        if not self.attempt(lambda: self.space.swap_in(cache, free_slots, swapped), fail_in):
            self.space.discard(swapped)
            return
        harness.marks.update(zip(free_slots, marks, strict=True))
        if not harness.marks.keys() - free_slots and not self.retained:
            # Large pages are shared as a whole, or not at all.
            same = self.name != "large pages"
            assert not same or cache.stats(0).shared_bytes == saved_bytes

    @rule()
    def upload(self):
        self.harness.cache.upload()

    @precondition(lambda self: self.harness.is_late)
    @rule(behind=st.integers(0, 3))
    def catch_up(self, behind: int):
        device = self.harness.device
        assert isinstance(device, LateDriver)
        device.finish(max(len(device.work) - behind, 0))
        self.harness.pool.retired.collect()

    @invariant()
    def holds(self):
        if hasattr(self, "harness"):
            self.harness.check(self.retained)

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        for slot in sorted(harness.marks):
            harness.release(slot)
        harness.check(self.retained)
        for each in self.retained:
            harness.cache.unretain(each.blocks)
        harness.pool.check()
        assert harness.cache.stats(0).mapped_bytes == harness.cache.stats(0).shared_bytes == 0
        assert not in_use_bytes(harness.pool)
        assert harness.pool.free_bytes == harness.pool.budget_bytes - PAGE  # the guard page
        harness.close()


class VirtualMachine(SharingMachine):
    name = "virtual"


class LargePagesMachine(SharingMachine):
    name = "large pages"


class PagedMachine(SharingMachine):
    name = "paged"


class LayerMajorMachine(SharingMachine):
    name = "layer-major"


class LayerMajorPagedMachine(SharingMachine):
    name = "layer-major paged"


TestVirtualSharing = VirtualMachine.TestCase
TestLargePagesSharing = LargePagesMachine.TestCase
TestPagedSharing = PagedMachine.TestCase
TestLayerMajorSharing = LayerMajorMachine.TestCase
TestLayerMajorPagedSharing = LayerMajorPagedMachine.TestCase
TestVirtualSharing.settings = TestLargePagesSharing.settings = TestPagedSharing.settings = settings(
    max_examples=tries(50), stateful_step_count=60, deadline=None, database=None, derandomize=True
)
TestLayerMajorSharing.settings = TestLayerMajorPagedSharing.settings = settings(
    TestPagedSharing.settings, max_examples=tries(25)
)


@pytest.fixture(params=[*KV_CACHES, "large pages"])  # and layer-major, where that is another case
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_fork_takes_one_block_and_copies_it(name):
    """Section 4.4: whole blocks are shared, and the last one is copied if it is partly filled."""
    harness = Harness(name, LAYOUTS["straddling"], 60)
    harness.begin(0, 21)
    num_whole = harness.num_whole_blocks(0)
    before = harness.cache.stats(21).mapped_bytes
    for child in (1, 2, 3):
        assert harness.fork(0, child, 21)
        assert harness.blocks(child)[:num_whole] == harness.blocks(0)[:num_whole]
        assert len(harness.blocks(child)) == num_whole + 1
    assert harness.num_pending == 3
    harness.write({0: 1, 1: 1, 2: 1, 3: 1})  # each writes to its own copy
    harness.check()
    stats = harness.cache.stats(88)
    assert stats.shared_bytes == 3 * num_whole * harness.cache.footprint.block_bytes
    assert stats.mapped_bytes + stats.shared_bytes == stats.written_bytes + stats.wasted_bytes
    grown_bytes = stats.mapped_bytes - before
    assert grown_bytes <= 3 * (harness.cache.footprint.block_bytes + PAGE)
    harness.close()


def test_at_the_end_of_a_block_nothing_is_copied_or_taken(name):
    harness = Harness(name, LAYOUTS["aligned"], 60)
    harness.begin(0, 32)
    before = harness.pool.usage()
    num_calls = harness.driver.num_calls
    assert harness.fork(0, 1, 32)
    assert (harness.num_pending, harness.pool.usage()) == (0, before)
    if name == "paged":
        assert harness.driver.num_calls == num_calls
    assert harness.reserve({0: 1, 1: 1})
    harness.write({0: 1, 1: 1})
    harness.check()
    harness.close()


def test_copies_between_two_steps_are_one_launch(name, monkeypatch):
    """Section 5.1; also where the parents end before the step, as beams do."""
    launches: list[int] = []

    def count(memory: torch.Tensor, pieces: torch.Tensor, max_count: int) -> None:
        launches.append(pieces.shape[1])
        block_copy(memory, pieces, max_count)

    monkeypatch.setattr(copies, "block_copy", count)
    harness = Harness(name, LAYOUTS["straddling"], 60)
    harness.begin(0, 9)
    harness.begin(1, 14)
    assert harness.fork(0, 2, 9)
    assert harness.fork(1, 3, 14)
    assert harness.fork(1, 4, 6)
    harness.release(0)
    harness.release(1)
    harness.cache.upload()
    harness.cache.upload()
    assert launches == [3]
    harness.check()
    # Copies to a page come before copies from it.
    assert harness.fork(4, 0, 6)
    assert harness.fork(0, 1, 6)
    harness.cache.upload()
    assert launches == [3, 1, 1]
    harness.check()
    harness.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_blocks_depend_on(name, layout):
    """They are the same for any tokens after those that touch them."""
    harness = Harness(name, LAYOUTS[layout], 200)
    cache, token_bytes = harness.cache, LAYOUTS[layout].token_bytes
    for num_blocks in range(12):
        num_bytes = num_blocks * cache.footprint.block_bytes
        inside, touching = cache.tokens_in(num_blocks), cache.tokens_touching(num_blocks)
        assert inside == min(num_bytes // token_bytes, MAX_TOKENS)
        assert touching == min(-(-num_bytes // token_bytes), MAX_TOKENS)
        if 0 < inside < MAX_TOKENS:
            assert harness.reserve({0: inside})
            assert len(cache.blocks(0, inside)) <= num_blocks
            cache.release(0)
    harness.close()


def test_a_retained_prefix_is_accounted_as_such(name):
    """K8 and K9."""
    harness = Harness(name, LAYOUTS["aligned"], 60)
    harness.begin(0, 36)
    retained = harness.end(0)
    assert in_use_bytes(harness.pool) == {PREFIX: 5 * PAGE}
    harness.cache.retain(retained.blocks[:1])
    assert harness.adopt(1, retained, 32)
    assert in_use_bytes(harness.pool) == {KV: 4 * PAGE, PREFIX: PAGE}
    harness.cache.unretain(retained.blocks)
    assert in_use_bytes(harness.pool) == {KV: 4 * PAGE}
    harness.release(1)
    num_pages = 2 if name == "large pages" else 1  # the one block is a half of its page
    assert in_use_bytes(harness.pool) == {PREFIX: num_pages * PAGE}
    harness.cache.unretain(retained.blocks[:1])
    # It comes back to KV with no call to the device, whichever sequence had it last.
    harness.pool.trim(4 * PAGE)
    harness.driver.fail_at = harness.driver.num_calls
    pages = harness.pool.acquire(KV, 4)
    assert pages is not None
    harness.pool.release(pages)
    harness.driver.fail_at = None
    harness.close()


def test_blocks_that_are_adopted_may_be_dropped_to_make_room(name):
    """The pool's hook evicts the very blocks that are about to be shared and copied."""
    harness = Harness(name, LAYOUTS["straddling"], 12)
    harness.begin(0, 14)
    retained = harness.end(0)
    others = harness.pool.acquire(OTHER, harness.pool.free_bytes // PAGE)
    assert others is not None
    asked: list[int] = []

    def evict(missing_bytes: int, asker: Owner) -> bool:
        asked.append(missing_bytes)
        if len(asked) == 1:
            harness.cache.unretain(retained.blocks)
            return True
        harness.pool.release(others)
        others.clear()
        return len(asked) == 2

    harness.pool.on_short = evict
    assert harness.adopt(3, retained, 14)
    assert len(asked) == 2
    harness.cache.upload()
    harness.check()
    assert PREFIX not in in_use_bytes(harness.pool)
    harness.close()


def test_a_refused_adoption_leaves_what_is_retained(name):
    harness = Harness(name, LAYOUTS["straddling"], 12)
    harness.begin(0, 14)
    retained = harness.end(0)
    others = harness.pool.acquire(OTHER, harness.pool.free_bytes // PAGE)
    assert others is not None
    before = harness.state()
    assert not harness.adopt(3, retained, 14)
    assert harness.state() == before
    harness.pool.release(others)
    assert harness.adopt(3, retained, 14)
    harness.cache.upload()
    harness.check([retained])
    harness.cache.unretain(retained.blocks)
    harness.close()


def test_the_pool_is_short_before_blocks_run_out_of_numbers():
    """One slot, and many more retained blocks than it could ever use at once."""
    harness = Harness("paged", LAYOUTS["aligned"], 40, max_seqs=1)
    retained: list[Retained] = []

    def evict(missing_bytes: int, asker: Owner) -> bool:
        harness.cache.unretain(retained.pop(0).blocks)
        return True

    harness.pool.on_short = evict
    for _ in range(20):
        harness.begin(0, MAX_TOKENS)
        retained.append(harness.end(0))
        harness.check(retained)
    assert len(retained) == 6  # of 6 pages each, in 40
    for each in retained:
        harness.cache.unretain(each.blocks)
    harness.close()


def test_what_goes_on_from_a_cached_prefix_maps_nothing():
    """The pages are still mapped in the slot of the last sequence, even in a crowded pool."""
    harness = Harness("virtual", LAYOUTS["aligned"], 40, is_late=True, guards=False)
    harness.begin(2, 40)
    harness.begin(1, 16)
    retained = harness.end(2)
    prefix = Retained(retained.blocks[:3], retained.marks[:24])
    harness.release(1)
    device = harness.device
    assert isinstance(device, LateDriver)
    device.finish()
    while harness.pool.retired.collect():
        pass  # what is not held
    others = harness.pool.acquire(OTHER, harness.pool.free_bytes // PAGE)
    assert others is not None
    num_calls = harness.driver.num_calls
    num_waits = device.num_waits
    for each in (retained, prefix, retained):
        slot = harness.cache.preferred_slot(each.blocks, harness.free_slots())
        assert slot == 2
        assert harness.adopt(2, each, len(each.marks))
        harness.check([retained])
        harness.release(2)
    assert (harness.driver.num_calls, device.num_waits) == (num_calls, num_waits)
    harness.pool.release(others)
    # Another sequence in the slot gets other pages; what is retained is not overwritten.
    harness.begin(2, 20)
    assert harness.cache.preferred_slot(retained.blocks, [0, 1]) is None
    assert harness.adopt(0, retained, 40)
    harness.check([retained])
    harness.cache.unretain(retained.blocks)
    harness.close()


def test_a_page_that_is_copied_again_is_still_in_its_window():
    harness = Harness("virtual", LAYOUTS["aligned"], 40, is_late=True, guards=False)
    harness.begin(2, 40)
    retained = harness.end(2)
    begun = Retained(retained.blocks, retained.marks[:39])  # its last page is copied
    num_calls = []
    for _ in range(3):
        before = harness.driver.num_calls
        assert isinstance(harness.device, LateDriver)
        harness.device.finish()
        assert harness.cache.preferred_slot(begun.blocks, harness.free_slots()) == 2
        assert harness.adopt(2, begun, 39)
        harness.cache.upload()
        harness.check([retained])
        harness.release(2)
        num_calls.append(harness.driver.num_calls - before)
    assert num_calls[0] > 0
    assert num_calls[1:] == [0, 0]
    harness.cache.unretain(retained.blocks)
    harness.close()


def test_slots_with_pages_in_use_elsewhere_are_vacated_before_they_are_needed():
    harness = Harness("virtual", LAYOUTS["aligned"], 60, is_late=True)
    cache, device = harness.cache, harness.device
    assert isinstance(device, LateDriver)
    harness.begin(1, 40)
    retained = harness.end(1)
    harness.begin(2, 40)
    harness.release(2)  # with no page that is held
    assert cache.preferred_slot([], [1, 2, 3]) == 2
    num_waits = device.num_waits
    num_retired = len(harness.pool.retired)  # without those that are held
    assert harness.pool.retired.has_unwanted
    assert not harness.pool.retired.collect(frees_memory=False)  # a step may still read them
    device.finish()
    while harness.pool.retired.collect(frees_memory=False):
        pass
    first_place = harness.tensors.shape.row_bytes // PAGE  # of slot 1
    assert first_place not in harness.range.pages
    assert 0 < len(harness.pool.retired) < num_retired  # those of slot 2 stay where they are
    # What is left to do is to map.
    assert cache.preferred_slot([], [1, 3]) is None
    harness.begin(1, 40)
    assert device.num_waits == num_waits
    harness.check([retained])
    cache.unretain(retained.blocks)
    harness.close()


def test_a_slot_that_is_used_again_is_not_vacated():
    harness = Harness("virtual", LAYOUTS["aligned"], 60, is_late=True)
    cache, device = harness.cache, harness.device
    assert isinstance(device, LateDriver)
    harness.begin(1, 40)
    retained = harness.end(1)
    assert cache.preferred_slot([], [1, 2]) == 2
    assert harness.adopt(1, retained, 40)
    device.finish()
    while harness.pool.retired.collect(frees_memory=False):
        pass  # the place of tokens that never came
    assert not harness.pool.retired.has_unwanted
    harness.check([retained])
    harness.release(1)
    cache.unretain(retained.blocks)
    harness.close()


def test_a_refused_map_leaves_places_that_were_taken_back():
    """Some of the pages are where they were, and the device refuses to map the others."""
    harness = Harness("virtual", LAYOUTS["aligned"], 40, is_late=True, guards=False)
    harness.begin(2, 40)
    retained = harness.end(2)
    beginning = Retained(retained.blocks[:1], retained.marks[:8])
    assert harness.adopt(2, beginning, 8)
    assert harness.reserve({2: 1})  # which vacates a place, and some that are mapped ahead
    harness.write({2: 1})
    harness.release(2)
    before = harness.state()
    harness.driver.fail_at = harness.driver.num_calls
    with pytest.raises(DriverError):
        harness.adopt(2, retained, 40)
    assert harness.state() == before
    harness.check([retained])
    assert harness.adopt(2, retained, 40)
    harness.check([retained])
    harness.cache.unretain(retained.blocks)
    harness.close()


def test_the_slot_where_most_of_a_prefix_is_left():
    harness = Harness("virtual", LAYOUTS["aligned"], 60, is_late=True)
    cache = harness.cache
    harness.begin(0, 16)
    system = harness.end(0)
    for slot in (3, 1):
        assert harness.adopt(slot, system, 16)
        assert harness.reserve({slot: 20})
        harness.write({slot: 20})
    first, second = harness.end(3), harness.end(1)
    assert cache.preferred_slot(first.blocks, [0, 1, 2, 3]) == 3
    assert cache.preferred_slot(second.blocks, [0, 1, 2, 3]) == 1
    assert cache.preferred_slot(system.blocks, [0, 1, 2, 3]) == 0  # which has nothing else
    assert cache.preferred_slot(first.blocks, [0, 1, 2]) == 0  # the beginning, at least
    # Elsewhere, a slot without pages that are held, if there is one.
    assert cache.preferred_slot(first.blocks, [2, 4]) == 2
    assert cache.preferred_slot([], [1, 4]) == 4
    for each in (system, first, second):
        cache.unretain(each.blocks)
    assert cache.preferred_slot(first.blocks, [0, 1, 2, 3]) in (None, 0)  # they cost the same
    harness.close()


def test_moved_to_the_host_and_back_by_runs_of_blocks():
    """A paged sequence with scattered blocks moves by one copy for each run of neighbours."""
    harness = Harness("paged", LAYOUTS["straddling"], 80)
    for _ in range(3):
        for slot in (0, 1):
            assert harness.reserve({slot: 7})
            harness.write({slot: 7})
    runs = np.flatnonzero(np.diff(harness.blocks(0)) != 1)
    assert 0 < len(runs) < len(harness.blocks(0)) - 1
    size = LAYOUTS["straddling"].token_bytes
    copy = torch.empty(16 * size, dtype=torch.uint8)
    harness.cache.copy_out(0, range(3, 19), copy)
    keys, values = harness.tensors.layers[0]
    blocks = harness.cache.blocks(0, 19)
    for position in range(3, 19):
        for part in (keys, values):
            part[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = 255
    harness.cache.copy_in(0, range(3, 19), copy)
    harness.check()
    harness.close()


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=["in order", "mixed"])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_shares_again_after_it_was_swapped(name, layout, is_late, slots):
    """Sequence 1 has forked from 0, 2 from 1 and 3 from 2."""
    harness = Harness(name, LAYOUTS[layout], 600, is_late, max_seqs=5)
    space = SwapSpace(4 * MAX_TOKENS * LAYOUTS[layout].token_bytes, torch.device("cpu"))
    harness.begin(0, 21)
    for child, num_shared in {1: 21, 2: 25, 3: 18}.items():
        assert harness.fork(child - 1, child, num_shared)
        assert harness.reserve({child: 6})
        harness.write({child: 6})
    marks = [harness.marks[slot] for slot in slots]
    shared_bytes = harness.cache.stats(0).shared_bytes
    swapped = space.swap_out(harness.cache, slots, [len(m) for m in marks])
    assert swapped is not None
    for slot in slots:
        harness.release(slot)
    for slot in range(5):  # others write where they were
        harness.begin(slot, 40)
    for slot in range(5):
        harness.release(slot)
    for slot in range(5):
        harness.cache.expect(slot, 1, MAX_TOKENS + 1)
    assert space.swap_in(harness.cache, [4, 2, 3, 1], swapped)
    harness.marks = dict(zip([4, 2, 3, 1], marks, strict=True))
    harness.check()
    # Where the prompt was in large pages, a part of one could not be shared before.
    is_less = name == "large pages"
    assert harness.cache.stats(0).shared_bytes >= shared_bytes
    assert is_less or harness.cache.stats(0).shared_bytes == shared_bytes
    assert space.used_bytes == 0
    harness.close()


def test_a_virtual_sequence_moves_as_one_stretch():
    harness = Harness("virtual", LAYOUTS["straddling"], 80)
    harness.begin(2, 30)
    size = LAYOUTS["straddling"].token_bytes
    copy = torch.empty(30 * size, dtype=torch.uint8)
    harness.cache.copy_out(2, range(30), copy)
    first = harness.range.address + 2 * harness.tensors.shape.row_bytes
    assert torch.equal(copy, harness.driver.view(first, 30 * size))
    harness.close()


def test_misuse(name):
    harness = Harness(name, LAYOUTS["aligned"], 60)
    harness.begin(0, 20)
    blocks = harness.cache.blocks(0, 20)
    with pytest.raises(InvariantError, match="dropped"):
        harness.cache.unretain(blocks)
    harness.close()
    harness = Harness(name, LAYOUTS["aligned"], 60)
    harness.begin(0, 20)
    blocks = list(harness.cache.blocks(0, 20))
    for slot, some in ((0, blocks), (1, blocks[:-1]), (1, blocks * 2)):
        with pytest.raises(InvariantError, match="in a slot of"):
            harness.cache.adopt(slot, some, 20)
    with pytest.raises(InvariantError):
        harness.cache.blocks(0, MAX_TOKENS + 1)
    retained = harness.end(0)
    with pytest.raises(InvariantError, match="still held"):
        harness.cache.close()
    harness.cache.unretain(retained.blocks)
    for act in (harness.cache.retain, partial(harness.cache.adopt, 1, num_tokens=20)):
        with pytest.raises(InvariantError):
            act(blocks)
    harness = Harness(name, LAYOUTS["aligned"], 60)
    harness.begin(0, 9)
    assert harness.fork(0, 1, 9)
    with pytest.raises(AssertionError, match="copies come first"):
        harness.cache.copy_out(1, range(9), torch.empty(9 * 512, dtype=torch.uint8))
    harness.close()


def _lives(harness: Harness, attempt: Callable[..., None]) -> None:
    """A few calls of each kind, in an order that leaves pages retired, held and shared.

    Args:
        harness: the manager.
        attempt: makes a call, given whether the manager does without any one call to the device.
    """
    maps_ahead = harness.is_virtual  # where that is refused, it maps less
    retained: list[Retained] = []

    def check() -> None:
        harness.check(retained)

    attempt(partial(harness.reserve, {0: 10, 1: 21}), has_detour=maps_ahead)
    harness.write({0: 10, 1: 21})
    attempt(lambda: harness.fork(1, 2, 21))
    attempt(lambda: harness.fork(1, 3, 10))
    attempt(lambda: harness.fork(2, 4, 21))
    attempt(partial(harness.reserve, {2: 3, 3: 2}), has_detour=maps_ahead)
    harness.write({2: 3, 3: 2})
    check()
    retained.append(harness.end(1))
    retained.append(harness.end(2))
    attempt(lambda: harness.adopt(2, retained[0], 21))
    attempt(lambda: harness.adopt(1, retained[1], 24))
    harness.cache.upload()
    check()
    harness.release(4)
    harness.cache.unretain(retained.pop(0).blocks)
    attempt(partial(harness.reserve, {0: 9, 1: 5, 2: 1}), has_detour=maps_ahead)
    harness.write({0: 9, 1: 5, 2: 1})
    attempt(lambda: harness.adopt(4, retained[0], 13))
    harness.cache.upload()
    check()
    for slot in range(MAX_SEQS):
        harness.release(slot)
    harness.cache.unretain(retained.pop().blocks)


@pytest.mark.parametrize(
    ("name", "layout", "is_late"),
    covering([*KV_CACHES, "large pages"], LAYOUTS, [False, True], strength=2),
)
def test_every_call_refused_once(name, layout, is_late):
    """M6, for all that shares: what the device refuses has changed nothing, and works again.

    A call that has another way takes it.
    """

    def run(fail_at: int | None) -> tuple[int, int, int]:
        # A guard that is refused is left out, and that is no refusal.
        harness = Harness(name, LAYOUTS[layout], 220, is_late, guards=False)
        first = harness.driver.num_calls
        num_refusals = num_detours = 0

        def attempt(act: Callable[[], bool], *, has_detour: bool = False) -> None:
            nonlocal num_refusals, num_detours
            before, first_call = harness.state(), harness.driver.num_calls
            usage = harness.pool.usage()
            has_other_pages = usage.idle_bytes + usage.retired_bytes > 0
            try:
                assert act()
            except DriverError:
                assert not has_detour
                num_refusals += 1
            else:
                if harness.driver.fail_at in range(first_call, harness.driver.num_calls):
                    assert has_detour or (
                        has_other_pages and harness.driver.failed_call == "create"
                    )
                    num_detours += 1
                return
            assert harness.state() == before
            harness.pool.check()
            assert act()

        harness.driver.fail_at = None if fail_at is None else first + fail_at
        _lives(harness, attempt)
        num_calls = harness.driver.num_calls - first
        harness.close()
        return num_calls, num_refusals, num_detours

    num_calls, *undisturbed = run(None)
    assert (num_calls > 5, undisturbed) == (True, [0, 0])
    for fail_at in range(num_calls):
        assert sum(run(fail_at)[1:]) == 1


@pytest.mark.parametrize(
    ("num_blocks", "is_done", "slot"), [(5, False, 1), (2, False, 2), (2, True, 1)]
)
def test_no_slot_that_a_step_in_flight_uses_where_others_are_to_be_unmapped(
    num_blocks, is_done, slot
):
    """To unmap them would wait for the step; the pages are mapped elsewhere meanwhile."""
    harness = Harness("virtual", LAYOUTS["aligned"], 60, is_late=True, guards=False)
    assert isinstance(harness.device, LateDriver)
    harness.begin(1, 40)
    retained = harness.end(1)
    if is_done:
        harness.device.finish()
    assert harness.cache.preferred_slot(retained.blocks[:num_blocks], [1, 2]) == slot
    harness.cache.unretain(retained.blocks)
    harness.close()


def test_sequences_of_one_prefix_each_find_a_slot_where_it_is_left():
    """What ran beside each other runs beside each other again, and maps nothing."""
    harness = Harness("virtual", LAYOUTS["aligned"], 60, is_late=True, guards=False)
    harness.begin(0, 40)
    retained = harness.end(0)
    for slot in (1, 2):
        assert harness.adopt(slot, retained, 40)
    for slot in (1, 2):
        harness.release(slot)
    num_calls = harness.driver.num_calls
    free = harness.free_slots()
    chosen = []
    for _ in range(3):
        found = harness.cache.preferred_slot(retained.blocks, free)
        assert found is not None
        assert harness.adopt(found, retained, 40)
        free.remove(found)
        chosen.append(found)
    assert sorted(chosen) == [0, 1, 2]
    assert harness.driver.num_calls == num_calls
    harness.check([retained])
    for slot in chosen:
        harness.release(slot)
    harness.cache.unretain(retained.blocks)
    harness.close()


# --- several windows in one call ------------------------------------------------------------------


def test_pages_that_are_copied_in_turns_with_others() -> None:
    """Blocks of one large page, then of another, then of the first: it is read in one window."""
    harness = Harness(
        "virtual",
        LAYOUTS["aligned"],
        200,
        is_late=True,
        mapping=MappingOptions(4 * PAGE),
        guards=False,
    )
    cache, device = harness.cache, harness.device
    assert isinstance(device, LateDriver)
    for slot in (0, 1):
        cache.expect(slot, 33, 49)
        assert cache.reserve(np.array([slot]), np.array([32]))
        harness.write({slot: 32})
    first, second = harness.blocks(0), harness.blocks(1)
    blocks = [first[0], second[1], first[2]]
    cache.retain(blocks)
    for slot in (0, 1):
        harness.release(slot)
    device.finish()
    for _ in range(8):
        cache.expect(2, 33, 49)
        assert cache.adopt(2, blocks, 24)
        cache.upload()
        cache.release(2)
        device.finish()
    cache.unretain(blocks)
    device.finish()
    assert not harness.pool.usage().in_use_bytes
    harness.close()


@pytest.mark.parametrize("layout", ["straddling", "odd", "large"])
def test_a_system_prompt_that_ends_within_a_large_page(layout: str) -> None:
    """Each second turn copies a part of its page, and a part of another one: many times."""
    harness = Harness(
        "virtual",
        LAYOUTS[layout],
        3000,
        is_late=True,
        mapping=MappingOptions(4 * PAGE),
        guards=False,
    )
    cache, device = harness.cache, harness.device
    assert isinstance(device, LateDriver)
    generator, now_s = np.random.default_rng(0), 0.0
    prefixes = PrefixCache(cache, lambda first, count: count * 1e-3)

    def run(tokens: list[int]) -> None:
        nonlocal now_s
        now_s += 1.0
        known = np.array(tokens, np.int32)
        match = prefixes.match(known)
        lease = prefixes.lock(match)
        cache.expect(1, len(known), 49)
        if match.num_tokens:
            assert cache.adopt(1, match.blocks, match.num_tokens)
        assert cache.reserve(np.array([1]), np.array([len(known)]))
        cache.upload()
        harness.launch(set())
        prefixes.settle(lease)
        prefixes.record(lease, now_s)
        prefixes.insert(lease, 1, known, len(known), now_s)
        prefixes.unlock(lease, now_s)
        cache.release(1)
        device.finish()

    def more(count: int) -> list[int]:
        return [int(token) for token in generator.integers(100, 1 << 30, count)]

    system = list(range(1, 9))
    run(system + more(24))
    for _ in range(20):
        turn = system + more(14)
        run(turn)
        run(turn + more(14))


def test_stripes_that_are_gone_are_forgotten() -> None:
    """Page numbers are never used again, so there is a new one for each stripe that was created."""
    harness = Harness("virtual layer-major", LAYOUTS["aligned"], 40, guards=False)
    cache, residency = harness.cache, harness.tensors.residency
    assert isinstance(residency, StripedResidency)
    cache.expect(0, 48, 49)
    assert cache.reserve(np.array([0]), np.array([48]))
    harness.write({0: 48})
    kept = harness.blocks(0)
    cache.retain(kept)
    harness.release(0)
    for _ in range(200):
        for slot in (1, 2, 3):
            cache.expect(slot, 48, 49)
            assert cache.reserve(np.array([slot]), np.array([48]))
        for slot in (1, 2, 3):
            cache.release(slot)
    assert residency.num_known < 600
    cache.expect(1, 48, 49)
    assert cache.adopt(1, kept, 48)
    cache.release(1)
    cache.unretain(kept)
    harness.close()
