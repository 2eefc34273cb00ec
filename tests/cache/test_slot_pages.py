"""Which pages a prompt gets: sizes that are halves of each other, and pages that were left."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.memory.late_driver import LateDriver

from aquifer.cache.base import KVLayout, LayerKV
from aquifer.cache.slot_pages import MappingOptions
from aquifer.cache.virtual import VirtualCache
from aquifer.memory.pool import Kind, Owner, PagePool

PAGE = 4096
KV = Owner("a", Kind.KV)
LAYOUT = KVLayout((LayerKV(1, 64, 64),), torch.float32)
PAGE_TOKENS = PAGE // LAYOUT.token_bytes
SLOT_PAGES = 64
UNITS = 16


class Slots:
    """A cache with large pages of up to 16 units, and the calls of the driver."""

    def __init__(self, num_pages: int) -> None:
        self.driver = LateDriver()
        self.pool = PagePool(self.driver, num_pages * PAGE, PAGE, num_pages * PAGE)
        self.cache = VirtualCache(
            self.pool,
            KV,
            LAYOUT,
            3,
            SLOT_PAGES * PAGE_TOKENS,
            MappingOptions(UNITS * PAGE, ahead_tokens=0),
        )
        assert self.cache.tensors.open()
        self.table = self.cache.tensors.range

    def begin(self, slot: int, filled_pages: int, chunk_tokens: int | None = None) -> bool:
        """A prompt that fills so many pages, with its last token behind them."""
        num_tokens = filled_pages * PAGE_TOKENS + 1
        self.cache.expect(slot, num_tokens, num_tokens)
        for end in range(chunk_tokens or num_tokens, num_tokens, chunk_tokens or num_tokens):
            assert self.reserve(slot, end)
        return self.reserve(slot, num_tokens)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        return self.cache.reserve(np.array([slot]), np.array([num_tokens]))

    def sizes(self, slot: int) -> list[int]:
        """The sizes of a slot's pages, in units, which must begin at multiples of them."""
        first = slot * SLOT_PAGES
        found = self.table.sizes_at(range(first, first + int(self.cache.ends(np.array([slot]))[0])))
        end = first
        for place in sorted(found):
            assert place == end
            assert (place - first) % found[place] == 0
            end += found[place]
        return [found[place] for place in sorted(found)]

    def close(self) -> None:
        self.cache.close()
        self.pool.check()
        self.pool.close()
        self.driver.close()


@pytest.fixture
def slots() -> Iterator[Slots]:
    found = Slots(256)
    yield found
    found.close()


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5 * PAGE_TOKENS])
@pytest.mark.parametrize(
    ("filled_pages", "sizes"),
    [
        (0, [1]),
        (1, [1, 1]),
        (3, [2, 1, 1]),
        (16, [16, 1]),
        (29, [16, 8, 4, 1, 1]),
        (63, [16, 16, 16, 8, 4, 2, 1, 1]),
    ],
)
def test_what_a_prompt_fills_takes_few_pages(slots, filled_pages, sizes, chunk_tokens):
    assert slots.begin(1, filled_pages, chunk_tokens)
    assert slots.sizes(1) == sizes


def test_the_rest_of_a_prompt_behind_pages_that_are_shared(slots):
    """From page 5 on, the sizes are those that begin at multiples of themselves."""
    assert slots.begin(1, 29)
    num_tokens = 5 * PAGE_TOKENS
    blocks = list(slots.cache.blocks(1, num_tokens))
    slots.cache.expect(2, 40 * PAGE_TOKENS + 1, 40 * PAGE_TOKENS + 1)
    assert slots.cache.adopt(2, blocks, num_tokens)  # a part of the page of 16: it is copied
    assert slots.sizes(2) == [1] * 5
    assert slots.reserve(2, 40 * PAGE_TOKENS + 1)
    assert slots.sizes(2) == [1] * 6 + [2, 8, 16, 8, 1]
    slots.cache.upload()


def test_pages_that_were_left_stay_where_the_prompt_fills_them(slots):
    assert slots.begin(1, 29)
    slots.cache.release(1)
    calls = slots.pool.pages.num_foreground_calls
    assert slots.begin(1, 29)
    assert slots.pool.pages.num_foreground_calls == calls
    slots.cache.release(1)
    assert slots.begin(1, 45)
    assert slots.sizes(1) == [16, 8, 4, 1, 1, 2, 8, 4, 1, 1]
    slots.cache.release(1)
    slots.driver.finish()
    assert slots.begin(1, 10)  # the first of them is too large
    assert slots.sizes(1) == [8, 2, 1]
    slots.cache.release(1)
    slots.driver.finish()
    assert slots.begin(1, 60)  # large ones that the last prompts left come behind small ones
    assert slots.sizes(1)[:3] == [8, 2, 1]
    assert sum(slots.sizes(1)) == 61


def test_room_for_large_pages_is_made_as_for_small_ones():
    slots = Slots(40)
    assert slots.begin(1, 22)  # 23 pages, and the anchor
    assert slots.begin(2, 14)
    assert slots.sizes(2) == [8, 4, 2, 1]
    assert not slots.begin(3, 4)
    slots.cache.release(1)
    assert slots.begin(3, 22)
    assert slots.sizes(3) == [16, 4, 2, 1]
    slots.close()


def test_where_there_is_no_room_for_large_pages_small_ones_are_mapped():
    slots = Slots(40)
    assert slots.begin(1, 29)  # 30 pages, and the anchor
    slots.cache.expect(2, 22 * PAGE_TOKENS, 22 * PAGE_TOKENS)
    assert slots.reserve(2, 5 * PAGE_TOKENS)
    assert slots.sizes(2) == [1] * 5
    slots.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_prompts(seed):
    """Every place has a page, whatever was left; in an empty slot these are as few as can be."""
    slots = Slots(220)
    chance = random.Random(seed)
    taken: set[int] = set()
    begun: set[int] = set()
    num_refused = 0
    for _ in range(300):
        slot = chance.randint(1, 3)
        if slot in taken:
            slots.cache.release(slot)
            taken.remove(slot)
        else:
            pages = chance.choice([chance.randint(0, SLOT_PAGES - 1), chance.randint(0, 5)])
            if slots.begin(slot, pages, chance.choice([None, 7])):
                taken.add(slot)
                sizes = slots.sizes(slot)
                assert sum(sizes) == pages + 1
                if slot not in begun:
                    assert len(sizes) == pages // UNITS + (pages % UNITS).bit_count() + 1
                begun.add(slot)
            else:
                num_refused += 1
                slots.cache.release(slot)
        if chance.random() < 0.3:
            slots.driver.finish()
            slots.pool.retired.collect()
        slots.pool.check()
    slots.driver.finish()
    for slot in taken:
        slots.cache.release(slot)
    slots.close()
