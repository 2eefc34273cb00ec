"""Guard pages of caches: what no sequence has written reads as NaN, and what reads it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from tests.memory.late_driver import LateDriver
from tests.memory.queued_mapper import QueuedMapper

from aquifer.cache import KV_CACHES, group_cache
from aquifer.cache.base import KVLayout, KVPart
from aquifer.cache.layout import LayerKV, StateLayout, StateTensor
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.spans import Rows, Spans
from aquifer.cache.state import StateCache
from aquifer.cache.tensors import KVTensors
from aquifer.cache.view import AttentionOptions
from aquifer.errors import InvariantError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.owners import GUARD
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE = 4096
BLOCK_SIZE = 8
MAX_SEQS, MAX_TOKENS = 5, 96
CPU = torch.device("cpu")
KV = Owner("a", Kind.KV)
ALIGNED = KVLayout((LayerKV(1, 32, 32), LayerKV(1, 48, 16)), torch.float32)  # 8 tokens to a page
STRADDLING = KVLayout((LayerKV(3, 40, 24), LayerKV(1, 56, 24)), torch.bfloat16)  # 544 bytes


class Cache:
    """A manager with a pool, and steps that may be told wrong lengths."""

    def __init__(
        self,
        name: str,
        layout: KVLayout = ALIGNED,
        *,
        guards: bool = True,
        device: HostDriver | None = None,
        mapping: MappingOptions | None = None,
        is_background: bool = False,
    ) -> None:
        self.driver = FaultyDriver(device or HostDriver())
        self.pool = PagePool(self.driver, 64 * PAGE, PAGE, 64 * PAGE, guards=guards)
        self.mapper = QueuedMapper(self.pool.pages)
        if is_background:
            self.pool.mapper = self.mapper
            while self.pool.stock(64 * PAGE):
                pass
        make = group_cache(name, BLOCK_SIZE, mapping or MappingOptions(ahead_tokens=0))
        self.layout = layout
        self.part: KVPart = make(self.pool, KV, layout, MAX_SEQS, MAX_TOKENS)
        self.generator = torch.Generator().manual_seed(0)

    @property
    def tensors(self) -> KVTensors:
        return self.part.tensors

    @property
    def guards(self) -> list[int]:
        assert self.tensors.guard is not None
        return sorted(self.tensors.guard.guards)

    def reserve(self, slot: int, num_tokens: int) -> None:
        assert self.part.reserve(np.array([slot]), np.array([num_tokens]))

    def step(self, slot: int, start: int, count: int) -> list[torch.Tensor]:
        """Write tokens [start, start + count) of a slot, and attend to all before them."""
        self.part.upload()
        spans = Spans.make(np.array([slot]), np.array([start]), np.array([count]))
        view = self.tensors.view(Rows.of(spans, 0, CPU))
        results = []
        for index, layer in enumerate(self.layout.layers):
            query, key, value = (
                torch.randn(count, heads, dim, generator=self.generator).to(self.layout.dtype)
                for heads, dim in (
                    (2 * layer.num_kv_heads, layer.key_dim),
                    (layer.num_kv_heads, layer.key_dim),
                    (layer.num_kv_heads, layer.value_dim),
                )
            )
            view.write(index, key, value)
            results.append(view.attend(index, query, AttentionOptions(0.2)))
        return results

    def bytes_at(self, place: int) -> set[int]:
        """The bytes of a page's worth of addresses."""
        return set(self.tensors.range.tensor((PAGE,), torch.uint8, place * PAGE).tolist())

    def close(self) -> None:
        self.part.close()
        self.pool.close()
        assert self.driver.is_unused
        self.driver.close()


def _has_nan(results: list[torch.Tensor]) -> list[bool]:
    return [bool(each.isnan().any()) for each in results]


@pytest.fixture(params=KV_CACHES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[ALIGNED, STRADDLING], ids=["aligned", "straddling"])
def layout(request: pytest.FixtureRequest) -> KVLayout:
    found = request.param
    assert isinstance(found, KVLayout)
    return found


@pytest.fixture
def cache(name: str, layout: KVLayout) -> Iterator[Cache]:
    cache = Cache(name, layout)
    yield cache
    cache.close()


# --- errors that show ------------------------------------------------------------------------


@pytest.mark.parametrize("guards", [False, True])
def test_a_wrong_length_shows(name, guards):
    """A step that is told of one token more than was written. Without guards it reads zeros."""
    cache = Cache(name, guards=guards)
    cache.reserve(1, 7)
    assert not any(_has_nan(cache.step(1, 0, 5)))
    assert _has_nan(cache.step(1, 6, 1)) == [guards] * 2  # token 5 is missing
    cache.part.release(1)
    cache.close()


@pytest.mark.parametrize("guards", [False, True])
def test_an_old_sequence_does_not_show_through(name, guards):
    """The same where the slot and its pages, or the blocks, had another sequence before."""
    device = LateDriver()
    cache = Cache(name, guards=guards, device=device)
    cache.reserve(1, 40)
    assert not any(_has_nan(cache.step(1, 0, 40)))
    cache.part.release(1)
    if name == "virtual":
        assert cache.pool.retired.num_places() == 5  # still mapped
    cache.reserve(1, 21)
    assert _has_nan(cache.step(1, 20, 1)) == [guards] * 2
    cache.part.release(1)
    device.finish()
    cache.close()


def test_a_block_that_is_given_out_while_its_page_stays(layout):
    """Several blocks of `paged` may be on one page, of which another one is in use."""
    cache = Cache("paged", layout)
    for slot in (1, 2, 3):
        cache.reserve(slot, BLOCK_SIZE)
        cache.step(slot, 0, BLOCK_SIZE)
    cache.part.release(2)
    cache.reserve(4, BLOCK_SIZE)
    assert cache.step(4, 7, 1)[0].isnan().any()
    for slot in (1, 3):
        assert not any(_has_nan(cache.step(slot, 7, 1)))
    for slot in (1, 3, 4):
        cache.part.release(slot)
    cache.close()


def test_what_lies_behind_the_end_is_nan(cache):
    """A kernel that reads further than the pages of a sequence finds the guard page."""
    for slot, length in ((1, 5), (3, 30), (4, 41)):
        cache.reserve(slot, length)
        assert not any(_has_nan(cache.step(slot, 0, length)))
    cache.part.upload()
    keys, values = cache.tensors.layers[0]
    token_bytes = cache.layout.token_bytes
    for slot, length in ((1, 5), (3, 30), (4, 41)):
        if cache.tensors.shape.table_shape is None:
            end = -(-length * token_bytes // PAGE) * PAGE  # and the guard page is behind
            found = slice(length, min((end + PAGE) // token_bytes, MAX_TOKENS))
            assert found.stop > found.start + 1
            rows = [keys[slot, found], values[slot, found]]
        else:
            table = torch.from_numpy(cache.tensors.table[slot]).long()
            places = torch.arange(length, MAX_TOKENS)
            blocks = table[places // BLOCK_SIZE]
            rows = [each[blocks, places % BLOCK_SIZE] for each in (keys, values)]
        assert all(each.isnan().all() for each in rows)
    for slot in (1, 3, 4):
        cache.part.release(slot)


def test_a_write_behind_the_end_is_found(name):
    """The step writes its token where the sequence has no page, and the pool knows."""
    cache = Cache(name)
    cache.reserve(1, 5)
    cache.step(1, 0, 5)
    cache.pool.check()
    cache.step(1, 8, 1)
    with pytest.raises(InvariantError, match="the guard page was written to"):
        cache.pool.check()
    cache.driver.close()


# --- where the guard page is -----------------------------------------------------------------


def test_the_guard_follows_the_end_of_a_sequence():
    cache = Cache("virtual")
    slot_pages = cache.tensors.shape.row_bytes // PAGE
    assert (slot_pages, cache.guards) == (12, [])

    def guards_after(act: Callable[[], object]) -> list[int]:
        act()
        cache.part.upload()
        assert all(cache.bytes_at(place) == {0xFF} for place in cache.guards)
        cache.pool.check()
        return [place - slot_pages for place in cache.guards]

    one = np.array([1])
    assert guards_after(partial(cache.reserve, 1, 5)) == [1]
    assert guards_after(partial(cache.reserve, 1, 8)) == [1]
    assert guards_after(partial(cache.reserve, 1, 33)) == [5]
    assert guards_after(partial(cache.part.shrink, one, np.array([2]))) == [2]
    assert guards_after(partial(cache.reserve, 2, 9)) == [2, slot_pages + 2]
    assert guards_after(partial(cache.part.forget, one, np.array([9]))) == [2, slot_pages + 2]
    assert guards_after(partial(cache.part.release, 1)) == [slot_pages + 2]
    # Slot 2 to its very end, behind which the next slot begins.
    assert guards_after(partial(cache.reserve, 2, MAX_TOKENS)) == []
    assert guards_after(partial(cache.part.release, 2)) == []
    assert cache.pool.usage().in_use_bytes == {GUARD: PAGE}
    cache.close()


def test_a_sequence_that_begins_where_a_guard_was_left():
    """The slot is given out again before the next step; with pages of its own, or shared ones."""
    for is_shared in (False, True):
        cache = Cache("virtual")
        cache.reserve(1, 20)
        cache.step(1, 0, 20)
        cache.reserve(2, 9)
        cache.step(2, 0, 9)
        assert len(cache.guards) == 2
        cache.part.release(2)
        if is_shared:
            assert cache.part.fork(1, 2, 19)
        else:
            cache.reserve(2, 19)
            cache.step(2, 0, 19)
        assert not any(_has_nan(cache.step(2, 19, 1)))
        assert [place % 12 for place in cache.guards] == [3, 3]
        cache.part.release(1)
        cache.part.release(2)
        cache.close()


def test_guards_are_moved_after_the_work_in_flight():
    """`LateDriver` fails where a page is unmapped that unfinished work may touch."""
    device = LateDriver()
    cache = Cache("virtual", device=device)
    cache.reserve(1, 5)
    cache.step(1, 0, 5)
    (guard,) = cache.guards
    device.launch([cache.tensors.range.address + guard * PAGE])
    cache.reserve(1, 9)
    assert device.num_done == 1
    cache.step(1, 5, 4)
    assert cache.guards == [guard + 1]
    cache.part.release(1)
    device.finish()
    cache.close()


def test_guards_beside_pages_that_are_mapped_in_the_background():
    device = LateDriver()
    cache = Cache("virtual", device=device, mapping=MappingOptions(None, 3, 2), is_background=True)
    cache.reserve(1, 7)
    assert not any(_has_nan(cache.step(1, 0, 7)))
    for length in range(8, 40):
        cache.reserve(1, length)
        assert not any(_has_nan(cache.step(1, length - 1, 1)))
        (guard,) = cache.guards
        assert guard % 12 >= -(-length // 8)  # behind what is on its way too
        cache.mapper.catch_up()
    assert len(cache.mapper.work) >= 3
    cache.reserve(1, 42)
    assert all(_has_nan(cache.step(1, 41, 1)))  # pages from the background are NaN too
    cache.part.release(1)
    device.finish()
    cache.close()


def test_guards_behind_large_pages():
    cache = Cache("virtual", mapping=MappingOptions(2 * PAGE, 0))
    cache.part.expect(1, 40, 60)
    cache.reserve(1, 40)
    assert not any(_has_nan(cache.step(1, 0, 40)))
    assert cache.tensors.range.has_large
    assert cache.guards == [12 + 5]
    cache.reserve(1, 50)
    assert all(_has_nan(cache.step(1, 41, 1)))
    assert cache.guards == [12 + 7]
    cache.part.release(1)
    cache.close()


def test_places_are_left_alone_where_the_device_refuses_the_guard():
    cache = Cache("virtual")
    cache.reserve(1, 5)
    cache.driver.fail_at = cache.driver.num_calls
    cache.part.upload()
    assert (cache.driver.failed_call, cache.guards) == ("map", [])
    cache.step(1, 0, 5)  # and the next step tries again
    assert cache.guards == [13]
    assert cache.pool.guards is not None
    assert cache.pool.num_references(cache.pool.guards.guard) == 2
    cache.part.release(1)
    cache.close()


def test_unused_entries_of_tables_point_to_the_guard_row(layout):
    cache = Cache("paged", layout)
    table, row = cache.tensors.table, cache.tensors.shape.guard_row
    assert row is not None
    assert (table == row).all()
    assert row >= cache.tensors.shape.num_rows
    cache.reserve(1, 20)
    cache.reserve(2, 70)
    cache.part.upload()
    used = (table != row).sum(axis=1).tolist()
    assert used == [0, 3, 9, 0, 0, 0]
    cache.part.shrink(np.array([2]), np.array([4]))
    cache.part.release(1)
    cache.part.upload()
    assert (table != row).sum(axis=1).tolist() == [0, 0, 4, 0, 0, 0]
    for place in cache.tensors.shape.guard_places:
        assert cache.bytes_at(place) == {0xFF}
    cache.part.release(2)
    cache.close()


def test_without_guards_nothing_of_it_is_there(name):
    cache = Cache(name, guards=False)
    cache.reserve(1, 20)
    cache.step(1, 0, 20)
    assert cache.tensors.guard is None
    assert cache.tensors.shape.guard_row is None
    assert cache.driver.mapped_pages == 3
    assert cache.pool.usage().in_use_bytes == {KV: 3 * PAGE}
    cache.part.release(1)
    cache.close()


# --- recurrent state -------------------------------------------------------------------------


@pytest.mark.parametrize("guards", [False, True])
def test_a_state_that_was_not_written_is_nan(guards):
    """Also where its page holds the state of another slot, or held that of an earlier sequence."""
    layout = StateLayout(
        ((StateTensor("a", (5, 20), torch.float32), StateTensor("b", (40,), torch.float16)),)
    )
    assert layout.num_bytes < PAGE // 4
    driver = FaultyDriver(HostDriver())
    pool = PagePool(driver, 16 * PAGE, PAGE, guards=guards)
    cache = StateCache(pool, KV, layout, MAX_SEQS, MAX_TOKENS)

    def reserve(slot: int) -> None:
        assert cache.reserve(np.array([slot]), np.array([1]))

    (states,) = cache.tensors.layers
    for slot in (1, 2, 3):
        reserve(slot)
        assert [bool(each[slot].isnan().all()) for each in states] == [guards] * 2
        for each in states:
            each[slot] = slot
    cache.release(2)
    reserve(2)
    assert [bool(each[2].isnan().all()) for each in states] == [guards] * 2
    for slot in (1, 3):
        assert all((each[slot] == slot).all() for each in states)
    assert cache.fork(3, 4, 1)
    cache.upload()
    assert all((each[4] == 3).all() for each in states)
    for slot in (1, 2, 3, 4):
        cache.release(slot)
    cache.close()
    pool.close()
    assert driver.is_unused
    driver.close()
