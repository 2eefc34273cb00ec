"""Parameters in pool pages: where each one lies, and how it gets there.

Each large parameter starts on a page of its own, so that it can be given up and brought back by
itself; small ones share the pages at the end of the model's range. Addresses stay for as long as
the model is registered, whatever happens to the pages behind them.

Where the device has large pages, a parameter's pages are large ones as far as they are full, and
then ordinary ones: mapping costs by the page, and no byte more is taken than with ordinary pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from aquifer.errors import ConfigError
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.virtual import VirtualRange
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.loader import load_tensors

_ALIGNMENT_BYTES = 256  # of a small parameter within the shared pages
_RANDOM_STD = 0.02  # what most models are initialised with


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and the part of a parameter that it fills.

    `parameter[index]` must be contiguous and of the stored tensor's shape.
    """

    name: str
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the model wants it: possibly several stored tensors in one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[Source, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets of all parameters in one range of addresses."""

    offsets_bytes: Mapping[str, int]
    num_pages: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages together."""
        return self.num_pages * self.page_bytes

    @classmethod
    def plan(cls, parameters: Sequence[Parameter], page_bytes: int) -> Placement:
        """Large parameters page-aligned, in the order given; then small ones packed."""
        offsets: dict[str, int] = {}
        end = 0
        for parameter in parameters:
            if parameter.num_bytes >= page_bytes:
                offsets[parameter.name] = end
                end += -(-parameter.num_bytes // page_bytes) * page_bytes
        for parameter in parameters:
            if parameter.num_bytes < page_bytes:
                end = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                offsets[parameter.name] = end
                end += parameter.num_bytes
        return cls(offsets, -(-end // page_bytes), page_bytes)

    def split(
        self, parameters: Sequence[Parameter], large_page_bytes: int
    ) -> tuple[list[_Run], list[_Run]]:
        """Which pages to take as large ones: (large runs, ordinary runs), both in order.

        A large run is a whole number of large pages within one parameter.
        """
        ratio = large_page_bytes // self.page_bytes
        large: list[_Run] = []
        ordinary: list[_Run] = []
        done = 0  # [0, done) is in one of the two
        for parameter in parameters:
            num_large = -(-parameter.num_bytes // self.page_bytes) // ratio
            if ratio > 1 and num_large:
                first = self.offsets_bytes[parameter.name] // self.page_bytes
                if first > done:
                    ordinary.append(_Run(done, first - done))
                large.append(_Run(first, num_large * ratio))
                done = first + num_large * ratio
        if self.num_pages > done:
            ordinary.append(_Run(done, self.num_pages - done))
        return large, ordinary


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages [first, first + count) of a placement, counted in ordinary pages."""

    first: int
    count: int


class WeightStore:
    """The parameters of one model in pages of the pool.

    Args:
        pool: where the pages come from.
        owner: whose they are.
        parameters: what to hold.

    Raises:
        ConfigError: the pool cannot hold them.
    """

    def __init__(self, pool: PagePool, owner: Owner, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.placement = placement = Placement.plan(parameters, pool.page_bytes)
        self._pool = pool
        driver = pool.driver
        is_default = pool.page_bytes == driver.default_page_bytes  # else somebody chose the size
        large_page_bytes = driver.large_page_bytes if is_default else pool.page_bytes
        large, ordinary = placement.split(parameters, large_page_bytes)
        with ExitStack() as undo:
            self._range = VirtualRange(driver, placement.num_bytes, placement.page_bytes)
            undo.callback(self._range.close)
            # Where pages are mapped: (range, index in it, number of pages).
            self._mapped: list[tuple[VirtualRange, int, int]] = []
            for run in large:
                address = self._range.address + run.first * placement.page_bytes
                num_bytes = run.count * placement.page_bytes
                part = VirtualRange(driver, num_bytes, large_page_bytes, address)
                self._mapped.append((part, 0, part.num_pages))
            self._mapped += [(self._range, run.first, run.count) for run in ordinary]
            free_bytes = pool.usage().free_bytes
            # Large pages first: what they leave of the budget is whole ordinary pages.
            sizes = {part.page_bytes for part, _, _ in self._mapped}
            for page_bytes in sorted(sizes, reverse=True):
                parts = [entry for entry in self._mapped if entry[0].page_bytes == page_bytes]
                pages = pool.acquire(owner, sum(count for _, _, count in parts), page_bytes)
                if pages is None:
                    raise ConfigError(
                        f"the weights of {owner.model} take {placement.num_bytes / 2**30:.2f} GiB "
                        f"and the pool has {free_bytes / 2**30:.2f} GiB left; raise --memory"
                    )
                undo.callback(pool.release, pages)
                for part, index, count in parts:
                    part.map(index, pages[:count])
                    undo.callback(part.unmap, index, count)
                    pages = pages[count:]
            undo.pop_all()
        self.tensors = {
            p.name: self._range.tensor(p.shape, p.dtype, self.placement.offsets_bytes[p.name])
            for p in self.parameters
        }

    def load(
        self, checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read every parameter from disk, in file order; `on_bytes` is told of each stretch read.

        Raises:
            ConfigError: a tensor is missing or has another shape; found before anything is read.
        """
        jobs: list[tuple[str, torch.Tensor]] = []
        for parameter in self.parameters:
            for source in parameter.sources:
                part = self.tensors[parameter.name][source.index]
                _check(checkpoint, source.name, part)
                jobs.append((source.name, part))
        stored = checkpoint.tensors
        jobs.sort(key=lambda job: (stored[job[0]].file, stored[job[0]].offset_bytes))
        load_tensors(checkpoint, jobs, on_bytes)

    def fill_random(self, seed: int) -> None:
        """Make weights up where they lie: vectors are 1 (norms) or 0 (biases), the rest normal.

        With these, activations keep their size from layer to layer, as in a real model.
        """
        generator: torch.Generator | None = None
        for parameter in self.parameters:
            tensor = self.tensors[parameter.name]
            if tensor.dim() < 2:
                tensor.fill_(0 if parameter.name.endswith("bias") else 1)
                continue
            if generator is None:
                generator = torch.Generator(tensor.device).manual_seed(seed)
            tensor.normal_(0, _RANDOM_STD, generator=generator)

    def close(self) -> None:
        """Give pages and addresses back. The tensors must not be used any more."""
        self.tensors = {}
        for part, index, count in self._mapped:
            self._pool.retired.retire(part, range(index, index + count))
        self._pool.retired.settle()
        for part, _, _ in self._mapped:
            if part is not self._range:
                part.close()
        self._range.close()


def _check(checkpoint: Checkpoint, name: str, part: torch.Tensor) -> None:
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise ConfigError(
            f"{checkpoint.path} lacks the tensor {name!r}, which its config calls for"
        )
    if stored.shape != tuple(part.shape):
        raise ConfigError(
            f"{checkpoint.path}: tensor {name!r} has shape {list(stored.shape)}, its config calls "
            f"for {list(part.shape)}"
        )
    if not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
        raise ConfigError(
            f"{checkpoint.path}: tensor {name!r} is stored as {stored.dtype}; quantised "
            "checkpoints are not supported"
        )
