"""Parameters in pool pages: where each one lies, and how it gets there.

Each large parameter starts on a page of its own, so that it can be given up and brought back by
itself; small ones share the pages at the end of the model's range. Addresses stay for as long as
the model is registered, whatever happens to the pages behind them.
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

_ALIGNMENT_BYTES = 256  # of a small parameter within the shared pages


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
        self.placement = Placement.plan(parameters, pool.page_bytes)
        self._pool = pool
        with ExitStack() as undo:
            self._range = VirtualRange(
                pool.driver, self.placement.num_bytes, self.placement.page_bytes
            )
            undo.callback(self._range.close)
            pages = pool.acquire(owner, self.placement.num_pages)
            if pages is None:
                raise ConfigError(
                    f"the weights of {owner.model} take {self.placement.num_bytes / 2**30:.2f} GiB "
                    f"and the pool has {pool.usage().free_bytes / 2**30:.2f} GiB left; "
                    "raise --memory"
                )
            undo.callback(pool.release, pages)
            self._range.map(0, pages)
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
        for name, part in jobs:
            checkpoint.read_into(name, part)
            on_bytes(stored[name].num_bytes)

    def close(self) -> None:
        """Give pages and addresses back. The tensors must not be used any more."""
        self.tensors = {}
        self._pool.release(self._range.unmap_all())
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
