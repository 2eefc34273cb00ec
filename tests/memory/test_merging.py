"""Plans that make room in a list of regions, carried out on real bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aquifer.errors import InvariantError
from aquifer.memory.merging import (
    Pack,
    Plan,
    Weighing,
    copy_down,
    eviction_costs_s,
    execute,
    plan,
)
from aquifer.memory.packing import global_merge, partitioned_gain_packing
from aquifer.memory.reclaim import regret_per_byte
from aquifer.memory.regions import Region, RegionList

ALIGN = 4
PACKS = (partitioned_gain_packing, global_merge)


def regions_of(rows: Sequence[tuple[int, Hashable]], num_bytes: int) -> RegionList:
    """Regions of (size, owner) from address 0, with a gap where the owner is None; KV is pinned."""
    regions = RegionList(num_bytes, ALIGN)
    start = 0
    for size, owner in rows:
        if owner is not None:
            regions.acquire_at(start, size, owner, is_pinned=owner == "kv")
        start += regions.aligned_bytes(size)
    return regions


@st.composite
def memories(draw: st.DrawFn) -> tuple[RegionList, list[int], list[int]]:
    """A list of regions, starts of victims in any order, and sizes of new tensors."""
    kinds = st.sampled_from(["idle", "idle", "used", None, None, "kv"])
    rows = draw(st.lists(st.tuples(st.integers(1, 40), kinds), max_size=24))
    num_bytes = sum(-(-size // ALIGN) * ALIGN for size, _ in rows) + draw(st.integers(0, 60))
    regions = regions_of(rows, num_bytes)
    idle = [region.start for region in regions if region.owner == "idle"]
    sizes = draw(st.lists(st.sampled_from([3, 8, 15, 24, 33, 60]), max_size=10))
    return regions, draw(st.permutations(idle)), sizes


def contents(regions: RegionList, memory: torch.Tensor) -> list[tuple[Region, bytes]]:
    return [
        (region, memory[region.start : region.start + region.num_bytes].numpy().tobytes())
        for region in regions
        if not region.is_free
    ]


@given(memories(), st.sampled_from(PACKS), st.booleans(), st.sampled_from([7, 1 << 20]))
def test_what_stays_keeps_its_bytes(
    case: tuple[RegionList, list[int], list[int]], pack: Pack, weighs: bool, scratch_bytes: int
) -> None:
    regions, victims, sizes = case
    memory = torch.from_numpy(np.random.default_rng(0).integers(0, 256, regions.num_bytes, "uint8"))
    before = contents(regions, memory)
    weighing = Weighing(np.full(len(victims), 0.1), 50.0) if weighs else None
    made = plan(regions.layout(), sizes, victims, pack, weighing)
    needed = sum(map(regions.aligned_bytes, sizes))
    if made is None:
        # There is too little, or pinned regions divide it.
        released = sum(regions.region(start).num_bytes for start in victims)
        is_divided = any(region.is_pinned for region, _ in before)
        assert is_divided or regions.free_bytes + released < needed
        return
    assert list(made.evictions) == victims[: len(made.evictions)]
    execute(made, regions, [f"new {i}" for i in range(len(sizes))], memory, scratch_bytes)
    regions.check()  # no two overlap, and the sums hold
    targets = {start: target for start, target, _ in made.moves}
    after = {region.start: (region, held) for region, held in contents(regions, memory)}
    for region, held in before:
        if region.start in made.evictions:
            continue
        start = targets.get(region.start, region.start)
        assert start == region.start or not region.is_pinned
        assert after.pop(start) == (region._replace(start=start), held)
    assert {region.owner: region.num_bytes for region, _ in after.values()} == {
        f"new {i}": regions.aligned_bytes(size) for i, size in enumerate(sizes)
    }
    assert [regions.region(start).owner for start in made.starts] == [
        f"new {i}" for i in range(len(sizes))
    ]


@given(memories(), st.sampled_from(PACKS))
def test_no_copy_where_best_fit_has_room(
    case: tuple[RegionList, list[int], list[int]], pack: Pack
) -> None:
    regions, _, sizes = case
    made = plan(regions.layout(), sizes, [], pack)
    copies = RegionList(regions.num_bytes, ALIGN)
    for region in regions:
        if not region.is_free:
            copies.acquire_at(region.start, region.num_bytes)
    if all(copies.acquire(size) is not None for size in sorted(sizes, reverse=True)):
        assert made is not None
        assert not made.moves


def test_pinned_regions_are_split_at() -> None:
    """Free regions on both sides of KV are not merged, though less would be moved."""
    rows = [(8, None), (4, "kv"), (8, None), (20, "used"), (8, None)]
    regions = regions_of(rows, 48)
    made = plan(regions.layout(), [16], [])
    assert made == Plan((), ((20, 12, 20),), (32,), (16,))
    assert plan(regions.layout(), [20], []) is None


def test_more_is_evicted_where_pinned_regions_divide_the_memory() -> None:
    """Two victims would give enough bytes, but only the fourth gives a region of 16."""
    rows = [(8, "idle"), (4, "kv"), (8, "idle"), (4, "kv"), (8, "idle"), (4, "kv"), (16, "idle")]
    regions = regions_of(rows, 52)
    made = plan(regions.layout(), [16], [0, 12, 24, 36])
    assert made == Plan((0, 12, 24, 36), (), (36,), (16,))
    assert plan(regions.layout(), [16], [0, 12, 24]) is None


def test_tensors_and_kv_blocks_in_one_list() -> None:
    """Fig. 7: KV blocks are behind the tensors; they are neither evicted nor moved for a load."""
    regions = RegionList(64, ALIGN)
    for owner, size in (("a", 16), ("b", 16), ("c", 16)):
        regions.acquire(size, owner)
    blocks = [regions.acquire(4, "kv", is_pinned=True) for _ in range(2)]
    assert blocks == [48, 52]
    made = plan(regions.layout(), [24], [16, 0])
    # Without "b" 24 bytes are free, but 8 of them are behind the blocks.
    assert made == Plan((16, 0), (), (0,), (24,))
    execute(made, regions, ["d"])
    assert [region.owner for region in regions] == ["d", None, "c", "kv", "kv", None]


def test_a_little_more_is_evicted_instead_of_moving_much() -> None:
    regions = regions_of([(8, None), (400, "used"), (4, None), (8, "idle")], 420)
    for costs, expected in (
        (None, Plan((), ((8, 0, 400),), (400,), (12,))),
        ([0.1], Plan((412,), (), (408,), (12,))),
        ([0.5], Plan((), ((8, 0, 400),), (400,), (12,))),
    ):
        weighing = None if costs is None else Weighing(np.array(costs), 1000.0)
        assert plan(regions.layout(), [12], [412], weighing=weighing) == expected


def test_weighing_never_costs_more() -> None:
    random = np.random.default_rng(1)
    saved = 0.0
    for _ in range(60):
        rows = [
            (int(size), kind)
            for size, kind in zip(
                random.integers(1, 40, 30), random.choice(["idle", "used", ""], 30), strict=True
            )
        ]
        num_bytes = sum(-(-size // ALIGN) * ALIGN for size, _ in rows)
        regions = regions_of([(size, kind or None) for size, kind in rows], num_bytes)
        idle = [region.start for region in regions if region.owner == "idle"]
        most = regions.free_bytes + sum(regions.region(start).num_bytes for start in idle)
        sizes = [most // 16 // ALIGN * ALIGN] * 8 + [ALIGN] * 4
        costs = random.uniform(0.0, 2.0, len(idle))
        totals = []
        for weighing in (None, Weighing(costs, 30.0)):
            made = plan(regions.layout(), sizes, idle, weighing=weighing)
            assert made is not None
            totals.append(costs[: len(made.evictions)].sum() + made.merged_bytes / 30.0)
        assert totals[1] <= totals[0]
        saved += totals[0] - totals[1]
    assert saved > 0


def test_copies_onto_themselves() -> None:
    """Bytes that overlap are copied in parts of the distance, or through scratch memory."""
    for scratch_bytes in (1, 5, 64):
        for distance in (1, 3, 20, 50):
            memory = torch.arange(100, dtype=torch.uint8)
            moves = [(50, 50 - distance, 20), (70, 70 - distance, 30)]
            copy_down(memory, moves, scratch_bytes)
            assert memory[50 - distance : 100 - distance].tolist() == list(range(50, 100))
            assert memory[: 50 - distance].tolist() == list(range(50 - distance))
    with pytest.raises(InvariantError):
        copy_down(torch.zeros(10, dtype=torch.uint8), [(0, 4, 4)])


def test_victims_that_cannot_be_evicted() -> None:
    regions = regions_of([(8, "idle"), (8, "kv"), (8, "idle")], 24)
    for victims in ([8], [4], [0, 24]):
        with pytest.raises(InvariantError):
            plan(regions.layout(), [8], victims)
    assert plan(regions.layout(), [20], [0, 16]) is None
    assert plan(regions.layout(), [], []) == Plan((), (), (), ())


def test_equation_2_is_the_regret_of_all_bytes() -> None:
    probabilities, num_bytes = np.array([0.5, 0.1, 0.0]), np.array([4000, 100, 7])
    sensitivities = np.array([1.0, 0.5, 2.0])
    costs = eviction_costs_s(probabilities, num_bytes, 1e3, sensitivities)
    assert costs.tolist() == pytest.approx([2.0, 0.005, 0.0])
    for p, size, alpha, cost in zip(
        probabilities, num_bytes.tolist(), sensitivities, costs, strict=True
    ):
        assert cost == pytest.approx(regret_per_byte(p, size / 1e3, size, alpha) * size)
