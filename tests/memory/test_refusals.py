"""A device that refuses a call, whichever: nothing is leaked, and everything works afterwards.

Each scenario runs once for every call that it makes to the device, and that call is refused. The
step that made it must raise, leave everything as it was (M6), and succeed when tried again. A step
that has another way must take it instead, and succeed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
import torch

from aquifer.cache import KV_CACHES, kv_cache
from aquifer.cache.base import AttentionOptions, KVLayout, LayerKV, Rows, Spans
from aquifer.errors import DriverError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, Page, PagePool
from aquifer.memory.range import VirtualRange
from aquifer.memory.stock import PageStocker
from aquifer.weights.parameters import Parameter
from aquifer.weights.store import WeightStore

PAGE = 4096
NUM_PAGES = 16
A, B = Owner("a", Kind.KV), Owner("b", Kind.KV)

T = TypeVar("T")


@dataclass
class Device:
    """A driver and a pool, and how often a step was refused, or found another way."""

    driver: FaultyDriver
    pool: PagePool
    num_refusals: int = 0
    num_detours: int = 0

    def attempt(self, step: Callable[[], T], *, has_detour: bool = False) -> T:
        """Do a step, again if it is refused; a refusal must change nothing.

        Args:
            step: what to do.
            has_detour: whether the step does without any one call to the device.
        """
        before, has_idle = self.state(), self.pool.usage().idle_bytes > 0
        first_call = self.driver.num_calls
        try:
            done = step()
        except DriverError as error:
            if error.name != "INJECTED":
                raise
            assert not has_detour
            self.num_refusals += 1
        else:
            if self.driver.fail_at in range(first_call, self.driver.num_calls):
                # Idle pages of any owner or size take the place of pages that cannot be created.
                assert has_detour or (has_idle and self.driver.failed_call == "create")
                self.num_detours += 1
            return done
        assert self.state() == before
        self.check()
        return step()

    def acquire(self, owner: Owner, count: int, page_bytes: int = PAGE) -> list[Page]:
        handles = self.attempt(lambda: self.pool.acquire(owner, count, page_bytes))
        assert handles is not None
        return handles

    def state(self) -> object:
        """All that a refused step must leave alone. Idle pages may have gone back meanwhile."""
        usage = self.pool.usage()
        references = {page: self.pool.num_references(page) for page in self.pool.pages.numbers}
        return (
            usage.in_use_bytes,
            {page: count for page, count in references.items() if count},
            self.driver.mapped_pages,
            dict(self.driver.reservations),
        )

    def check(self) -> None:
        """The books agree with what the driver holds (M4)."""
        self.pool.check()
        assert isinstance(self.driver.inner, HostDriver)
        assert self.driver.inner.resident_bytes() == self.pool.created_bytes


def pages(device: Device) -> None:
    """Acquire, map, alias, unmap, release; again for another owner, and in another size."""
    pool = device.pool
    window = device.attempt(lambda: VirtualRange(pool.pages, 8 * PAGE, PAGE))
    other = device.attempt(lambda: VirtualRange(pool.pages, 8 * PAGE, PAGE))
    handles = device.acquire(A, 6)
    device.attempt(lambda: window.map(0, handles[:2]))
    device.attempt(lambda: window.map(2, [handles[5], handles[3], handles[2], handles[4]]))
    pool.share(window.pages_at(range(1, 3)))
    device.attempt(lambda: other.map(4, window.pages_at(range(1, 3))))
    window.tensor((6, PAGE), torch.uint8).fill_(3)
    assert other.tensor((2 * PAGE,), torch.uint8, 4 * PAGE).unique().tolist() == [3]
    pool.release(window.unmap(range(2)))
    pool.release(other.unmap(sorted(other.pages)))
    pool.release(window.unmap(sorted(window.pages)))
    # All there is: some pages hold bytes of A, some are in stock, the others do not exist yet.
    pool.trim(2 * PAGE)
    while device.attempt(lambda: pool.stock(2 * PAGE)):
        pass
    assert pool.usage().idle_bytes == 4 * PAGE
    foreign = device.acquire(B, NUM_PAGES)
    device.attempt(lambda: window.map(0, foreign[:8]))
    assert not window.tensor((8, PAGE), torch.uint8).any()
    window.unmap(sorted(window.pages))
    pool.release(foreign)
    large = device.acquire(A, 2, 6 * PAGE)  # which takes idle small pages
    mixed = device.acquire(A, 4)
    pool.release(large + mixed)
    window.close()
    other.close()


def weights(device: Device) -> None:
    """A store of some parameters with pages of their own, and some that share one."""
    parameters = [
        Parameter("large", (3, PAGE // 4), torch.float32, ()),
        Parameter("small", (7,), torch.float32, ()),
        Parameter("larger", (PAGE,), torch.float32, ()),
        Parameter("smaller", (5,), torch.bfloat16, ()),
    ]
    dirty = device.acquire(A, 12)
    device.pool.release(dirty)
    for _ in range(2):
        store = device.attempt(lambda: WeightStore(device.pool, B, parameters))
        assert device.attempt(store.populate)
        for i, tensor in enumerate(store.tensors.values()):
            assert tensor.shape == parameters[i].shape
            tensor.fill_(i)
        assert all((t == i).all() for i, t in enumerate(store.tensors.values()))
        store.close()


def sequences(device: Device, name: str) -> None:
    """Sequences that grow together, one that ends, and others that take its room."""
    maps_ahead = name == "virtual"  # if that is refused, it maps no more than it needs
    layout = KVLayout((LayerKV(1, 24, 24), LayerKV(2, 8, 16)), torch.float32)
    make = partial(kv_cache(name, block_size=4), device.pool, A, layout, 4, 64)
    cache = device.attempt(make)
    for lengths in ([1, 9, 3], [10, 9, 20], [25, 12, 21]):
        arrays = np.arange(3), np.array(lengths)
        assert device.attempt(partial(cache.reserve, *arrays), has_detour=maps_ahead)
    cache.release(1)
    device.pool.release(device.acquire(B, 2))
    more = partial(cache.reserve, np.array([3, 1]), np.array([16, 8]))
    assert device.attempt(more, has_detour=maps_ahead)
    spans = Spans.make(np.array([3]), np.array([0]), np.array([16]))
    ones = torch.ones(16, 1, 24)
    view = cache.tensors.view(Rows.of(spans, 0, torch.device("cpu")))
    view.write(0, ones, ones)
    assert (view.attend(0, ones, AttentionOptions(1.0)) == 1).all()
    others = device.acquire(B, min(device.pool.free_bytes // PAGE, 4))
    assert not device.attempt(lambda: cache.reserve(np.array([0, 2]), np.array([64, 64])))
    device.pool.release(others)
    cache.close()


SCENARIOS: dict[str, Callable[[Device], None]] = {
    "pages": pages,
    "weights": weights,
    **{name: partial(sequences, name=name) for name in KV_CACHES},
}


def _run(scenario: Callable[[Device], None], fail_at: int | None) -> Device:
    driver = FaultyDriver(HostDriver(), fail_at)
    # Idle pages are kept as far as four, so that some are reused and some given back.
    device = Device(driver, PagePool(driver, NUM_PAGES * PAGE, PAGE, 4 * PAGE))
    scenario(device)
    device.check()
    assert not device.pool.usage().in_use_bytes
    num_calls = driver.num_calls
    whole = device.pool.acquire(B, NUM_PAGES)
    assert whole is not None
    device.pool.release(whole)
    device.pool.close()
    assert driver.is_unused
    driver.close()
    driver.num_calls = num_calls
    return device


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_refused_once(name):
    scenario = SCENARIOS[name]
    undisturbed = _run(scenario, None)
    assert undisturbed.num_refusals == 0
    num_calls = undisturbed.driver.num_calls
    assert num_calls >= 7
    for fail_at in range(num_calls):
        device = _run(scenario, fail_at)
        assert device.num_refusals + device.num_detours == 1, fail_at


def test_a_page_half_zeroed_is_zeroed_again():
    """M5: after a refused `zero` the contents of the pages count as unknown."""
    driver = FaultyDriver(HostDriver())
    pool = PagePool(driver, 4 * PAGE, PAGE, 4 * PAGE)
    window = VirtualRange(pool.pages, 4 * PAGE, PAGE)
    handles = pool.acquire(A, 4)
    assert handles is not None
    window.map(0, handles)
    window.tensor((4 * PAGE,), torch.uint8).fill_(1)
    pool.release(window.unmap(sorted(window.pages)))
    driver.fail_at = driver.num_calls
    with pytest.raises(DriverError):
        pool.acquire(B, 3)
    pool.check()
    again = pool.acquire(A, 4)
    assert again is not None
    window.map(0, again)
    bytes_seen = window.tensor((4, PAGE), torch.uint8)[:, 0].tolist()
    assert sorted(bytes_seen) == [0, 0, 0, 1]  # only what the refused call did not touch is A's
    pool.release(window.unmap(sorted(window.pages)))
    window.close()
    pool.close()


def test_stock_refused_changes_nothing():
    driver = FaultyDriver(HostDriver(), fail_at=1)
    pool = PagePool(driver, NUM_PAGES * PAGE, PAGE, 8 * PAGE)
    assert pool.num_to_stock(8 * PAGE) == 8
    assert pool.stock(8 * PAGE, 3)
    assert pool.num_to_stock(8 * PAGE) == 5
    assert pool.num_to_stock(2 * PAGE) == 0
    with pytest.raises(DriverError):
        pool.stock(8 * PAGE, 3)
    assert pool.usage().idle_bytes == 3 * PAGE == len(driver.live_handles) * PAGE
    pool.check()
    while pool.stock(8 * PAGE, 3):
        pass
    assert pool.usage().idle_bytes == 8 * PAGE
    assert pool.num_to_stock(9 * PAGE) == 0  # beyond the watermark
    pool.close()
    assert not driver.live_handles


def test_the_stocker_beside_the_loop():
    """Two threads at one pool: the equations hold at every moment, and nothing is left behind."""
    driver = FaultyDriver(HostDriver(), fail_at=5)  # once; it may hit either thread
    pool = PagePool(driver, NUM_PAGES * PAGE, PAGE, 8 * PAGE)
    stocker = PageStocker(pool, 4)
    stocker.start()
    rng = np.random.default_rng(0)
    held: list[list[Page]] = []
    prefix = Owner("a", Kind.PREFIX)
    for _ in range(1500):
        stocker.wake()
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.integers(len(held))))
        else:
            try:
                handles = pool.acquire([A, B][rng.integers(2)], int(rng.integers(1, 6)))
            except DriverError:
                continue
            if handles is not None:
                held.append(handles)
                if pool.usage().in_use_bytes.get(B) is None:
                    pool.transfer(handles, prefix)
        pool.check()
        usage = pool.usage()
        assert usage.free_bytes + sum(usage.in_use_bytes.values()) == NUM_PAGES * PAGE
    stocker.close()
    assert driver.num_calls > 5
    for handles in held:
        pool.release(handles)
    assert pool.usage().idle_bytes <= 8 * PAGE
    pool.close()
    assert not driver.live_handles
