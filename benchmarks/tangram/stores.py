"""Weights of several models and KV in one memory: in regions, and in pages under virtual memory.

Both keep tensors of models that are not in use, as Tangram's Reuse Store does (section 3.1), and
evict them where there is no room. They keep books only: no bytes are copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from benchmarks.tangram.workload import Shape

from aquifer.memory.merging import Pack, Plan, Weighing, eviction_costs_s, execute, plan
from aquifer.memory.owners import Kind, Owner
from aquifer.memory.pages import Page
from aquifer.memory.pool import PagePool
from aquifer.memory.reclaim import ReuseModel
from aquifer.memory.regions import RegionList
from aquifer.sim.driver import PAGE_BYTES, ModelledDriver

LOAD_BYTES_PER_S = 25e9
"""Bandwidth of loading: PCIe 4.0 x16, as an L40 has it, at about four fifths of its peak."""

COPY_BYTES_PER_S = 350e9
"""Bandwidth of a copy within an L40: 864 GB/s for reading and writing, about four fifths of it."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Load:
    """What it took to make a model resident. `plan_s` is CPU time."""

    loaded_bytes: int
    merged_bytes: int = 0
    num_moves: int = 0
    num_regions: int = 0
    plan_s: float = 0.0


class Catalogue:
    """The tensors of all models, by number, and when each model was used.

    Attributes:
        sizes: bytes of each tensor, [n].
        models: model of each tensor, [n].
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        sizes = [shape.tensor_bytes() for shape in shapes]
        counts = [len(of) for of in sizes]
        self.sizes = np.array([size for of in sizes for size in of])
        self.models = np.repeat(np.arange(len(shapes)), counts)
        self.block_bytes = [shape.block_bytes for shape in shapes]
        self.used_s = np.full(len(shapes), -np.inf)
        self._num_uses = np.zeros(len(shapes), int)
        self._reuse = ReuseModel(horizon_s=600.0, scale_s=100.0)

    def use(self, model: int, now_s: float) -> None:
        """Mark a use of a model."""
        self.used_s[model] = now_s
        self._num_uses[model] += 1

    def probabilities(self, now_s: float) -> npt.NDArray[np.float64]:
        """Probability that each model is used again soon, by the pool's `ReuseModel`."""
        ages_s, uses = (now_s - self.used_s).tolist(), self._num_uses.tolist()
        return np.array(
            [
                self._reuse.probability(age_s, count - 1) if count else 0.0
                for age_s, count in zip(ages_s, uses, strict=True)
            ]
        )

    def costs_s(self, ids: Ids, now_s: float) -> npt.NDArray[np.float64]:
        """Cost of evicting each of some tensors (equation 2)."""
        probabilities = self.probabilities(now_s)[self.models[ids]]
        return eviction_costs_s(probabilities, self.sizes[ids], LOAD_BYTES_PER_S)


class Order(Protocol):
    """An order of eviction."""

    def __call__(self, catalogue: Catalogue, ids: Ids, now_s: float) -> Ids:
        """Tensors in the order in which they are to be evicted, given in the order of addresses."""


def at_random(seed: int) -> Order:
    """Any order."""
    random = np.random.default_rng(seed)
    return lambda catalogue, ids, now_s: random.permutation(ids)


def by_use(catalogue: Catalogue, ids: Ids, now_s: float) -> Ids:
    """Least recently used model first, its tensors in the order of addresses."""
    return ids[np.argsort(catalogue.used_s[catalogue.models[ids]], kind="stable")]


def by_cost(catalogue: Catalogue, ids: Ids, now_s: float) -> Ids:
    """Least cost of equation 2 first."""
    return ids[np.argsort(catalogue.costs_s(ids, now_s), kind="stable")]


def by_regret(catalogue: Catalogue, ids: Ids, now_s: float) -> Ids:
    """Least cost for each byte first, which is the rule of the pool (`regret_per_byte`).

    All models load at the same bandwidth here, so this is the order of the probabilities; tensors
    of one model go in the order of addresses.
    """
    probabilities = catalogue.probabilities(now_s)[catalogue.models[ids]]
    return ids[np.argsort(probabilities, kind="stable")]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How room is made: the order of eviction, and how free regions are merged.

    `pack` is None under virtual memory. `weighs` says whether evictions are weighed against moves.
    """

    order: Order
    pack: Pack | None
    weighs: bool = False


class RegionStore:
    """Tensors and KV blocks as regions of one list.

    Args:
        num_bytes: size of the memory.
        catalogue: all tensors.
        strategy: how room is made.
    """

    def __init__(self, num_bytes: int, catalogue: Catalogue, strategy: Strategy) -> None:
        self.regions = RegionList(num_bytes)
        self._catalogue = catalogue
        self._strategy = strategy
        self._starts = np.full(len(catalogue.sizes), -1, np.int64)
        self._in_use: dict[int, list[int]] = {}  # starts of KV blocks, by model

    def load(self, model: int, now_s: float) -> Load | None:
        """Make a model resident and in use; None if there is no room beside those in use.

        Other models in use are pinned: their tensors and KV blocks stay where they are. The tensors
        that the model has already are not evicted, but they may be moved, as it does not run yet.
        """
        absent = self._absent(model)
        made: Plan | None = None
        load = Load(0)
        if len(absent):
            made, plan_s = self.planned(model, now_s, self._strategy)
            if made is None:
                return None
            loaded_bytes = int(self._catalogue.sizes[absent].sum())
            num_regions = len(self.regions)
            load = Load(loaded_bytes, made.merged_bytes, len(made.moves), num_regions, plan_s)
            self._carry_out(made, absent)
        self._in_use[model] = []
        for start in self._starts[self._catalogue.models == model].tolist():
            self.regions.pin(start)
        return load

    def planned(self, model: int, now_s: float, strategy: Strategy) -> tuple[Plan | None, float]:
        """What a strategy would do to load a model, and the CPU time to plan it; changes nothing.

        The time is that of all that depends on the state: the snapshot of the regions, the order of
        eviction, and the plan.
        """
        assert strategy.pack is not None
        sizes = self._catalogue.sizes[self._absent(model)].tolist()
        begin_s = time.thread_time()
        layout = self.regions.layout()
        victims = self._victims(model, now_s, strategy.order)
        weighing = None
        if strategy.weighs:
            weighing = Weighing(self._catalogue.costs_s(victims, now_s), COPY_BYTES_PER_S)
        made = plan(layout, sizes, self._starts[victims], strategy.pack, weighing)
        return made, time.thread_time() - begin_s

    def grow(self, model: int, num_blocks: int, now_s: float) -> int:
        """Take KV blocks of a model that is in use; returns the number that there was room for.

        Where no free region holds a block, tensors are evicted until one does; nothing is moved.
        """
        size = self._catalogue.block_bytes[model]
        victims: list[int] | None = None
        for i in range(num_blocks):
            while (start := self.regions.acquire(size, -1, is_pinned=True)) is None:
                if victims is None:
                    victims = self._victims(model, now_s, self._strategy.order).tolist()[::-1]
                if not victims:
                    return i
                self._evict(victims.pop())
            self._in_use[model].append(start)
        return num_blocks

    def finish(self, model: int) -> None:
        """End an instance: its KV blocks are released together, its tensors stay."""
        for start in self._in_use.pop(model):
            self.regions.release(start)
        for start in self._starts[self._catalogue.models == model].tolist():
            self.regions.unpin(start)

    def num_absent(self, model: int) -> int:
        """Number of tensors of a model that are not resident."""
        return len(self._absent(model))

    def resident_bytes(self) -> int:
        """Bytes of all tensors that are resident."""
        return int(self._catalogue.sizes[self._starts >= 0].sum())

    def _absent(self, model: int) -> Ids:
        return np.flatnonzero((self._catalogue.models == model) & (self._starts < 0))

    def _victims(self, model: int, now_s: float, order: Order) -> Ids:
        """Tensors that may be evicted, in the order of eviction."""
        is_idle = self._starts >= 0
        for used in (model, *self._in_use):
            is_idle &= self._catalogue.models != used
        idle = np.flatnonzero(is_idle)
        return order(self._catalogue, idle[np.argsort(self._starts[idle])], now_s)

    def _evict(self, tensor: int) -> None:
        self.regions.release(int(self._starts[tensor]))
        self._starts[tensor] = -1

    def _carry_out(self, made: Plan, absent: Ids) -> None:
        tensor_at = {int(self._starts[i]): int(i) for i in np.flatnonzero(self._starts >= 0)}
        for start in made.evictions:
            self._starts[tensor_at[start]] = -1
        execute(made, self.regions, absent.tolist())
        for start, target, _ in made.moves:
            self._starts[tensor_at[start]] = target
        self._starts[absent] = made.starts


class PageStore:
    """The same in pages of 2 MiB of the real pool, over a modelled device.

    A tensor takes whole pages, which can be anywhere, and so does a model's KV.

    Args:
        num_bytes: size of the memory.
        catalogue: all tensors.
        strategy: how room is made; it has no `pack`.
    """

    def __init__(self, num_bytes: int, catalogue: Catalogue, strategy: Strategy) -> None:
        self._pool = PagePool(ModelledDriver(num_bytes), num_bytes, keep_idle_bytes=num_bytes)
        self._catalogue = catalogue
        self._order = strategy.order
        self._pages: dict[int, list[Page]] = {}  # by tensor
        self._in_use: dict[int, list[Page]] = {}  # pages of KV, by model
        self._kv_bytes: dict[int, int] = {}

    def load(self, model: int, now_s: float) -> Load | None:
        """See `RegionStore.load`."""
        catalogue = self._catalogue
        absent = [
            i for i in np.flatnonzero(catalogue.models == model).tolist() if i not in self._pages
        ]
        sizes = catalogue.sizes[absent].tolist()
        counts = [-(-size // PAGE_BYTES) for size in sizes]
        begin_s = time.thread_time()
        missing = sum(counts) - self._pool.free_bytes // PAGE_BYTES
        evicted = []
        if missing > 0:
            for tensor in self._victims(model, now_s).tolist():
                evicted.append(tensor)
                missing -= len(self._pages[tensor])
                if missing <= 0:
                    break
            else:
                return None
        plan_s = time.thread_time() - begin_s
        for tensor in evicted:
            self._pool.release(self._pages.pop(tensor))
        for tensor, count in zip(absent, counts, strict=True):
            self._pages[tensor] = self._acquire(model, Kind.WEIGHTS, count)
        self._in_use[model], self._kv_bytes[model] = [], 0
        return Load(sum(sizes), plan_s=plan_s)

    def grow(self, model: int, num_blocks: int, now_s: float) -> int:
        """See `RegionStore.grow`."""
        for i in range(num_blocks):
            kv_bytes = self._kv_bytes[model] + self._catalogue.block_bytes[model]
            count = -(-kv_bytes // PAGE_BYTES) - len(self._in_use[model])
            while self._pool.free_bytes < count * PAGE_BYTES:
                victims = self._victims(model, now_s)
                if not len(victims):
                    return i
                self._pool.release(self._pages.pop(int(victims[0])))
            self._in_use[model] += self._acquire(model, Kind.KV, count)
            self._kv_bytes[model] = kv_bytes
        return num_blocks

    def finish(self, model: int) -> None:
        """See `RegionStore.finish`."""
        self._pool.release(self._in_use.pop(model))

    def resident_bytes(self) -> int:
        """See `RegionStore.resident_bytes`."""
        return int(self._catalogue.sizes[list(self._pages)].sum())

    def _acquire(self, model: int, kind: Kind, count: int) -> list[Page]:
        pages = self._pool.acquire(Owner(str(model), kind), count)
        assert pages is not None
        return pages

    def _victims(self, model: int, now_s: float) -> Ids:
        models = self._catalogue.models
        idle = [i for i in self._pages if models[i] != model and models[i] not in self._in_use]
        return self._order(self._catalogue, np.array(sorted(idle), np.int64), now_s)
