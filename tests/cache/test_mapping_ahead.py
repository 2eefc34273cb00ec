"""Pages mapped ahead of need by another thread: for the next step, and for the next sequence."""

from __future__ import annotations

import random
from contextlib import closing

import numpy as np
import pytest
import torch
from tests.cache.guards import in_use_bytes
from tests.cache.test_sharing import LAYOUTS, MAX_TOKENS, PAGE, Harness
from tests.memory.queued_mapper import QueuedMapper

from aquifer.cache.slot_pages import MappingOptions
from aquifer.errors import DriverError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.mapper import BackgroundMapper
from aquifer.memory.pages import PageTable
from aquifer.memory.pool import Kind, Owner
from aquifer.memory.range import VirtualRange

KV = Owner("a", Kind.KV)


def _harness(
    num_pages: int = 60, *, is_late: bool = False, large: int = 0, eager: int = 0, guards=True
):
    """8 tokens to a page; all of the pool's pages are ready, as the stocker makes them."""
    harness = Harness(
        "virtual",
        LAYOUTS["aligned"],
        num_pages,
        is_late,
        mapping=MappingOptions(large * PAGE or None, 3, eager),
        is_background=True,
        guards=guards,
    )
    harness.pool.keep_idle_bytes = num_pages * PAGE
    while harness.pool.stock(num_pages * PAGE):
        pass
    return harness


def _mapper(harness: Harness) -> QueuedMapper:
    assert isinstance(harness.pool.mapper, QueuedMapper)
    return harness.pool.mapper


def _decode(harness: Harness, num_steps: int, *, keeps_up: bool = True) -> int:
    """Decode with all sequences; returns the driver's calls in the steps' own path."""
    num_calls = 0
    for _ in range(num_steps):
        before = harness.pool.pages.num_foreground_calls
        counts = dict.fromkeys(harness.marks, 1)
        assert harness.reserve(counts)
        num_calls += harness.pool.pages.num_foreground_calls - before
        harness.write(counts)
        if keeps_up:
            _mapper(harness).catch_up()
    return num_calls


def test_no_call_of_the_driver_in_a_step_where_the_thread_keeps_up():
    harness = _harness(guards=False)  # which are moved in the step
    harness.begin(0, 9)
    harness.begin(1, 12)
    assert _decode(harness, 30) == 0
    assert len(_mapper(harness).work) >= 6
    harness.check()
    harness.close()


def test_a_step_waits_for_pages_that_it_needs():
    """Without any help, each page is mapped when it is asked for: the oracle of the contents."""
    harness = _harness()
    harness.begin(0, 9)
    harness.begin(1, 12)
    assert _decode(harness, 30, keeps_up=False) >= 6
    assert all(work.done() for work in _mapper(harness).work[:-2])
    harness.check()
    harness.close()


def test_what_the_device_refuses_is_mapped_in_the_step():
    harness = _harness()
    harness.begin(0, 9)
    before = in_use_bytes(harness.pool)[KV]
    assert harness.reserve({0: 7})  # up to the end of its pages: the next one is begun
    assert len(_mapper(harness).work) == 1
    assert in_use_bytes(harness.pool)[KV] == before + PAGE
    harness.driver.fail_at = harness.driver.num_calls
    _mapper(harness).catch_up()
    harness.driver.fail_at = None
    harness.write({0: 7})
    assert harness.reserve({0: 1})
    assert len(_mapper(harness).work) == 1
    harness.write({0: 1})
    harness.check()
    assert in_use_bytes(harness.pool)[KV] == before + PAGE
    harness.close()


@pytest.mark.parametrize("act", ["release", "fork", "shrink", "forget", "close"])
def test_a_sequence_that_changes_while_pages_are_on_their_way(act):
    harness = _harness()
    harness.begin(0, 9)
    assert harness.reserve({0: 7})
    harness.write({0: 7})
    assert not _mapper(harness).work[0].done()
    slot = np.array([0])
    if act == "release":
        harness.release(0)
    elif act == "fork":
        assert harness.fork(0, 1, 16)
        assert harness.reserve({0: 1, 1: 1})
        harness.write({0: 1, 1: 1})
    elif act == "shrink":
        harness.cache.shrink(slot, np.array([2]))
        assert list(harness.cache.ends(slot)) == [2]
    elif act == "forget":
        harness.cache.forget(slot, np.array([8]))
        assert list(harness.cache.ends(slot)) == [3]
        harness.cache.release(0)
        harness.marks.clear()
    if act != "close":
        harness.check()
    harness.close()


def test_a_slot_that_was_given_out_is_not_prepared():
    """Another slot may be given out than the one before that which was to be prepared."""
    harness = _harness(eager=2, is_late=True)
    assert harness.cache.preferred_slot((), [1, 2, 3]) is None
    harness.begin(2, 9)
    harness.cache.upload()
    assert not _mapper(harness).work
    harness.check()
    harness.close()


def test_the_next_sequence_finds_pages():
    """Eager allocation (section 5.4.2): nothing is mapped when a short prompt begins."""
    harness = _harness(eager=2, is_late=True)
    first = harness.cache.preferred_slot((), [1, 2, 3])
    assert first is None  # the first of all
    assert not _mapper(harness).work
    harness.cache.upload()  # at the end of the step's planning
    _mapper(harness).catch_up()
    harness.begin(1, 9)  # it was not prepared
    before = harness.pool.pages.num_foreground_calls
    assert harness.cache.preferred_slot((), [2, 3]) == 2  # 3 is prepared
    harness.cache.upload()
    assert harness.reserve({2: 9})
    assert harness.pool.pages.num_foreground_calls == before
    harness.write({2: 9})
    assert harness.reserve({3: 9})  # before the thread had the time
    harness.write({3: 9})
    harness.check()
    assert in_use_bytes(harness.pool)[KV] == 6 * PAGE
    harness.close()


def test_a_slot_that_is_still_being_prepared_is_left_to_others():
    harness = _harness(eager=2, is_late=True)
    harness.begin(0, 9)
    harness.cache.preferred_slot((), [1, 2, 3])
    harness.cache.upload()
    (work,) = _mapper(harness).work  # for slot 2
    assert harness.cache.preferred_slot((), [2, 3]) == 3
    assert harness.cache.preferred_slot((), [2]) == 2  # there is no other one
    harness.begin(1, 9)
    retained = harness.end(1)
    assert harness.adopt(3, retained, 9)
    assert not work.done()  # nothing has waited for it
    assert harness.adopt(2, retained, 9)
    assert work.done()
    harness.check([retained])
    harness.cache.unretain(retained.blocks)
    harness.close()


def test_pages_for_the_next_sequence_are_free_until_it_comes():
    harness = _harness(num_pages=8, eager=2, is_late=True)
    harness.cache.preferred_slot((), [0, 1])
    harness.cache.upload()
    _mapper(harness).catch_up()
    harness.begin(0, 9)
    assert harness.pool.free_bytes == 6 * PAGE
    assert harness.reserve({0: MAX_TOKENS - 9})  # the whole sequence, and no less is left
    harness.write({0: MAX_TOKENS - 9})
    harness.check()
    harness.close()


@pytest.mark.parametrize("large", [0, 2])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(seed, is_late, large):
    """Sequences grow, fork and end while the thread is behind by chance."""
    harness = _harness(14, is_late=is_late, large=large, eager=2)
    chance = random.Random(seed)
    num_refused = 0
    for _ in range(300):
        free = harness.free_slots()
        act = chance.choice(["decode"] * 6 + ["begin", "begin", "fork", "end"])
        if act == "begin" and free:
            slot = harness.cache.preferred_slot((), free)
            slot = min(free) if slot is None else slot
            counts = {slot: chance.randint(1, 30)}
        elif act == "decode":
            counts = {slot: 1 for slot, marks in harness.marks.items() if len(marks) < MAX_TOKENS}
        elif act == "fork" and free and harness.marks:
            parent = chance.choice(sorted(harness.marks))
            harness.fork(parent, free[0], chance.randint(1, len(harness.marks[parent])))
            counts = {}
        else:
            counts = {}
            if act == "end" and harness.marks:
                harness.release(chance.choice(sorted(harness.marks)))
        if counts and harness.reserve(counts):
            harness.write(counts)
        elif counts:
            num_refused += 1
            harness.release(chance.choice(sorted(harness.marks)))
        harness.pool.check()
        for slot in harness.marks if not harness.num_pending else ():
            harness.read_back(slot)
        if chance.random() < 0.5:
            _mapper(harness).catch_up(chance.randint(0, 2))
        if is_late and chance.random() < 0.3:
            harness.device.finish()
            harness.pool.retired.collect()
    assert num_refused > 5
    for slot in sorted(harness.marks):
        harness.release(slot)
    harness.close()


def test_a_thread_maps_all_pieces_or_none():
    with closing(HostDriver()) as driver:
        table = PageTable(driver, PAGE)
        pages = table.create(PAGE, 4)
        range_ = VirtualRange(table, 8 * PAGE, PAGE)
        address = range_.address
        before = table.num_foreground_calls
        with closing(BackgroundMapper(table)) as mapper:
            mapped = mapper.submit([(address, pages[:2]), (address + 4 * PAGE, pages[2:])])
            assert table.num_background_calls == 0  # it waits for `begin`
            mapper.begin()
            mapped.result()
            range_.note(0, pages[:2])
            range_.note(4, pages[2:])
            range_.tensor((8 * PAGE,), torch.uint8)[: 2 * PAGE].fill_(1)
            assert list(range_.unmap([0, 1, 4, 5])) == pages
            faulty = FaultyDriver(driver)
            faulty.fail_at = 1
            table.driver = faulty
            refused = mapper.submit([(address, pages[:2]), (address + 4 * PAGE, pages[2:])])
            mapper.begin()
            with pytest.raises(DriverError):
                refused.result()
            assert faulty.mapped_pages == 0  # the first piece is unmapped again
        assert table.num_background_calls == 5
        assert table.num_foreground_calls == before + 2  # those of `unmap`, in two runs
        table.driver = driver
        table.release(pages)
        range_.close()
