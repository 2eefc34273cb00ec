"""Weights in pages: placement, pages of two sizes, eviction, and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import OUR_DECODER, TRANSFORMERS
from tests.checkpoints import tiny_llama
from tests.memory.late_driver import LateDriver

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import ConfigError, DriverError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights.parameters import Parameter, ParameterGroup, Placement
from aquifer.weights.store import WeightStore

PAGE, LARGE = 4096, 4 * 4096
OWNER = Owner("a", Kind.WEIGHTS)


class LargePageDriver(HostDriver):
    """A host on which large pages pay."""

    default_page_bytes = PAGE
    large_page_bytes = LARGE


def _parameters(*sizes: int) -> list[Parameter]:
    return [Parameter(str(i), (n,), torch.uint8, ()) for i, n in enumerate(sizes)]


def test_placement():
    """Large parameters begin at a page; small ones follow, packed; none overlap."""
    sizes = [100, 3 * PAGE + 1, 7, PAGE, PAGE - 1, 1]
    placement = Placement.plan(_parameters(*sizes), PAGE)
    ends = [0]
    for name, offset in sorted(placement.offsets_bytes.items(), key=lambda item: item[1]):
        size = sizes[int(name)]
        assert offset >= ends[-1]
        assert offset % (PAGE if size >= PAGE else 256) == 0
        ends.append(offset + size)
    assert [placement.offsets_bytes[str(i)] for i in (1, 3)] == [0, 4 * PAGE]
    assert placement.num_bytes == placement.num_pages * PAGE
    assert placement.num_bytes - PAGE < ends[-1] <= placement.num_bytes


def test_pages_are_as_large_as_they_are_full():
    sizes = [9 * PAGE, 100, PAGE, 4 * PAGE, 8 * PAGE + 1, 3 * PAGE, *[PAGE // 2] * 9]
    driver = FaultyDriver(LargePageDriver())
    pool = PagePool(driver, 40 * PAGE)
    store = WeightStore(pool, OWNER, _parameters(*sizes))
    placement = store.placement
    assert store.populate()
    assert placement == Placement.plan(store.parameters, PAGE)
    assert pool.usage().in_use_bytes == {OWNER: placement.num_pages * PAGE}
    # Six are large, one of which has small parameters, and one takes what is left of a group.
    assert pool.created_bytes == placement.num_pages * PAGE
    sizes_of_pages = [
        size for g in store.groups for size, pages in g.stretches for _ in pages[::size]
    ]
    assert (sizes_of_pages.count(4), sizes_of_pages.count(3)) == (6, 1)
    assert len(pool.pages) == len(sizes_of_pages) == placement.num_pages - 6 * 3 - 2
    for value, (name, tensor) in enumerate(store.tensors.items()):
        assert tensor.shape == (sizes[int(name)],)
        tensor.fill_(value)
    for value, tensor in enumerate(store.tensors.values()):
        assert (tensor == value).all()
    store.close()
    pool.close()
    assert driver.is_unused


def test_a_budget_that_is_exactly_enough():
    parameters = _parameters(9 * PAGE, 5 * PAGE, 3 * PAGE)
    pool = PagePool(LargePageDriver(), 17 * PAGE)
    store = WeightStore(pool, OWNER, parameters)
    assert store.populate()
    store.close()
    pool.close()
    driver = FaultyDriver(LargePageDriver())
    pool = PagePool(driver, 16 * PAGE)
    store = WeightStore(pool, OWNER, parameters)
    assert not store.populate()
    assert (driver.mapped_pages, pool.usage().in_use_bytes, store.resident_bytes) == (0, {}, 0)
    store.close()
    assert not driver.reservations
    pool.close()
    assert not driver.live_handles


def test_a_chosen_page_size_is_kept():
    driver = FaultyDriver(LargePageDriver())
    pool = PagePool(driver, 40 * PAGE, 2 * PAGE)
    store = WeightStore(pool, OWNER, _parameters(16 * PAGE))
    assert store.populate()
    assert len(driver.live_handles) == 8
    store.close()
    pool.close()


def test_evicted_and_back_at_the_same_addresses():
    """Wholly, then group by group; what is resident keeps its contents."""
    sizes = [9 * PAGE, 100, PAGE, 4 * PAGE, 200, 8 * PAGE + 1]
    driver = FaultyDriver(LargePageDriver())
    pool = PagePool(driver, 40 * PAGE)
    store = WeightStore(pool, OWNER, _parameters(*sizes))
    assert (len(pool.pages), store.resident_bytes, store.is_resident) == (0, 0, False)
    assert [group.names for group in store.groups] == [("0",), ("2",), ("3",), ("5",), ("1", "4")]
    assert store.populate()
    assert store.populate()  # is no change
    assert store.is_resident
    assert store.resident_bytes == store.placement.num_bytes == pool.usage().in_use_bytes[OWNER]
    addresses = {name: tensor.data_ptr() for name, tensor in store.tensors.items()}
    store.evict()
    assert (store.resident_bytes, pool.usage().in_use_bytes, driver.mapped_pages) == (0, {}, 0)
    others = pool.acquire(Owner("b", Kind.WEIGHTS), 40)
    assert others is not None
    assert not store.populate()
    assert (store.resident, pool.free_bytes) == (frozenset(), 0)
    pool.release(others)
    assert store.populate()
    for value, tensor in enumerate(store.tensors.values()):
        tensor.fill_(value + 1)
    gone = [store.groups[0], store.groups[4]]
    store.evict(gone)
    assert store.resident == frozenset(store.groups[1:4])
    assert store.resident_bytes == (1 + 4 + 9) * PAGE == pool.usage().in_use_bytes[OWNER]
    others = pool.acquire(Owner("b", Kind.WEIGHTS), 40 - 14 - 9)  # a page too few is left
    assert others is not None
    before = driver.mapped_pages
    assert not store.populate()
    assert (store.resident, driver.mapped_pages) == (frozenset(store.groups[1:4]), before)
    pool.release(others)
    for fail_at in range(2):
        pool.trim()  # idle pages could take the place of those that the device refuses to create
        driver.fail_at = driver.num_calls + fail_at
        with pytest.raises(DriverError):
            store.populate(gone)
        assert store.resident == frozenset(store.groups[1:4])
        assert pool.usage().in_use_bytes == {OWNER: store.resident_bytes}
    driver.fail_at = None
    assert store.populate(gone)
    assert {name: tensor.data_ptr() for name, tensor in store.tensors.items()} == addresses
    for value, (name, tensor) in enumerate(store.tensors.items()):
        tensor[:] = tensor  # every byte is there
        assert name in ("0", "1", "4") or (tensor == value + 1).all()
    pool.check()
    store.close()
    pool.close()
    assert driver.is_unused


def test_random_weights():
    parameters = [
        Parameter("embed", (300, 200), torch.bfloat16, ()),
        Parameter("layers.0.norm1", (200,), torch.bfloat16, ()),
        Parameter("layers.0.qkv.bias", (200,), torch.bfloat16, ()),
        Parameter("layers.0.qkv.weight", (200, 200), torch.float32, ()),
    ]
    drawn = []
    for seed in (0, 0, 1):
        pool = PagePool(HostDriver(), 1 << 20, PAGE)
        store = WeightStore(pool, OWNER, parameters)
        assert store.populate()
        store.fill_random(seed)
        embed, norm, bias, weight = (tensor.float().clone() for tensor in store.tensors.values())
        assert (norm == 1).all()
        assert (bias == 0).all()
        for matrix in (embed, weight):
            assert abs(matrix.mean()) < 1e-3
            assert abs(matrix.std() - 0.02) < 1e-3
        drawn.append(weight)
        store.close()
        pool.close()
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_random_weights_of_one_group_are_those_of_all():
    """So a model is the same after a part of it was evicted."""
    pool = PagePool(HostDriver(), 1 << 20, PAGE)
    store = WeightStore(pool, OWNER, [Parameter(n, (64, 64), torch.float32, ()) for n in "abc"])
    assert store.populate()
    store.fill_random(3)
    before = {name: tensor.clone() for name, tensor in store.tensors.items()}
    assert not torch.equal(before["a"], before["b"])
    gone = [store.groups[1]]
    store.evict(gone)
    assert store.missing == tuple(gone)
    assert store.missing_pages == gone[0].num_pages
    assert store.populate(gone)
    store.fill_random(3, gone)
    assert all(torch.equal(tensor, before[name]) for name, tensor in store.tensors.items())
    store.close()
    pool.close()


def _generate(folder: Path, **options: Any) -> list[int]:
    config = EngineConfig(
        (ModelSpec("a", folder),),
        load_format="dummy",
        memory_bytes=32 << 20,
        max_num_seqs=2,
        **options,
    )
    engine = Engine.open(config)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine.add(Request("r", "a", [1, 2, 3], params, 0.0))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    engine.close()
    return tokens


def test_an_engine_needs_no_more_than_a_configuration(tmp_path):
    whole = tiny_llama(tmp_path / "whole")
    bare = tmp_path / "bare"
    bare.mkdir()
    config = json.loads((whole / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config))
    tokens = _generate(bare)
    assert len(tokens) == 4
    assert tokens == _generate(whole)  # the files are not looked at
    del config["torch_dtype"]
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="names no dtype; give --dtype"):
        _generate(bare)
    assert len(_generate(bare, dtype="bfloat16")) == 4


@pytest.mark.parametrize("name", [*OUR_DECODER, *TRANSFORMERS])
def test_any_architecture(name, tmp_path):
    config = (OUR_DECODER | TRANSFORMERS)[name]()
    config.dtype = "float32"
    config.save_pretrained(tmp_path)
    assert len(_generate(tmp_path)) == 4


class Filled:
    """Notes the groups that it is to fill, and how many pages were mapped when it was stopped."""

    def __init__(self, driver: FaultyDriver) -> None:
        self.groups: list[ParameterGroup] = []
        self.mapped_when_cancelled: int | None = None
        self._driver = driver

    def begin(self, group: ParameterGroup) -> None:
        self.groups.append(group)

    def cancel(self) -> None:
        self.mapped_when_cancelled = self._driver.mapped_pages


def test_groups_are_filled_while_others_get_their_pages():
    driver = FaultyDriver(LargePageDriver())
    pool = PagePool(driver, 40 * PAGE)
    store = WeightStore(pool, OWNER, _parameters(9 * PAGE, 100, PAGE, 4 * PAGE))
    filled = Filled(driver)
    assert store.populate(filling=filled)
    ordered = [store.groups[index] for index in (2, 0, 1, 3)]  # by the size of their pages
    assert (filled.groups, filled.mapped_when_cancelled) == (ordered, None)
    store.evict(store.groups[2:])
    filled = Filled(driver)
    assert store.populate(filling=filled)
    assert (filled.groups, filled.mapped_when_cancelled) == (list(store.groups[2:]), None)
    store.evict()
    pool.trim()
    filled = Filled(driver)
    driver.fail_at = driver.num_calls + 3  # after the pages of the first group
    with pytest.raises(DriverError):
        store.populate(filling=filled)
    assert filled.groups == ordered[:1]
    assert filled.mapped_when_cancelled  # it is stopped before they lose their pages
    assert (driver.mapped_pages, store.resident) == (0, frozenset())
    driver.fail_at = None
    others = pool.acquire(Owner("b", Kind.WEIGHTS), 40 - 13)
    assert others is not None
    filled = Filled(driver)
    assert not store.populate(filling=filled)
    assert filled.mapped_when_cancelled == 1 + (2 + 1)  # of two groups: large, ordinary
    pool.release(others)
    store.close()
    pool.close()


class LateLargePageDriver(LateDriver):
    """Likewise, on a device."""

    default_page_bytes = PAGE
    large_page_bytes = LARGE


def test_room_for_all_groups_is_made_at_once():
    """Where pages that are given up stay for a while; else more would go than is to stay idle."""
    pool = PagePool(LateLargePageDriver(), 40 * PAGE)
    other = Owner("b", Kind.WEIGHTS)
    held = pool.acquire(other, 40)
    assert held is not None
    asked: list[int] = []

    def give_up(num_bytes: int, owner: Owner) -> bool:
        assert owner == OWNER
        asked.append(num_bytes)
        gone = held[: -(-num_bytes // PAGE)]
        del held[: len(gone)]
        pool.release(gone)
        return bool(gone)

    pool.on_short = give_up
    store = WeightStore(pool, OWNER, _parameters(9 * PAGE, 100, PAGE, 4 * PAGE))
    assert store.populate()
    assert asked == [store.placement.num_bytes]
    store.evict()
    pool.release(held)
    store.close()
    pool.close()
