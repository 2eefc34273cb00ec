"""Parameters of a model: the stored tensors that they are made of, and their places.

Each large parameter starts on a page of its own, so that it can be evicted and brought back by
itself; small ones share the pages at the end of the model's range. These are the groups of a model:
one for each large parameter, one for all small ones.

Where the device has large pages, a group takes as many full large pages as fit in it, and one page
of the rest's size: mapping costs by the page, and no more bytes are taken than with ordinary pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from aquifer.errors import ConfigError
from aquifer.weights.checkpoint import Checkpoint, StoredTensor
from aquifer.weights.forms import Form, RowFactors, RowOrder, Target
from aquifer.weights.shards import Shard, rows_of

_ALIGNMENT_BYTES = 256  # alignment of small parameters within the shared pages


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and the part of a parameter that it fills.

    `parameter[index]` must be contiguous; its form says how the stored tensor fills it.

    Weights that are stored as [..., in, out] become [..., out, in], as the kernels read them, and
    numbers of four bits become those of the parameter's dtype. Rows may have constant factors, or
    another order. All that is done while they are loaded, also after an eviction: the copies to the
    device take longer.
    """

    name: str
    index: tuple[int | slice, ...] = ()
    form: Form = Form.PLAIN
    factors: RowFactors = ()
    order: RowOrder | None = None

    @classmethod
    def of(
        cls,
        name: str,
        factors: Sequence[tuple[int, float]],
        index: tuple[int | slice, ...] = (),
    ) -> Source:
        """A tensor whose rows are multiplied by factors, which may all be 1; see `RowFactors`."""
        is_scaled = any(factor != 1.0 for _, factor in factors)
        return cls(name, index, factors=tuple(factors) if is_scaled else ())

    def jobs(
        self, stored: StoredTensor, parameter: Parameter, tensor: torch.Tensor
    ) -> Iterator[tuple[StoredTensor, Target]]:
        """What is to be read of the stored tensor, and what that fills.

        Args:
            stored: the whole stored tensor.
            parameter: the parameter, or a rank's shard of it.
            tensor: its memory.
        """
        if parameter.shard is None:
            yield stored, Target(tensor[self.index], self.form, self.factors, self.order)
            return
        shard, dim = parameter.shard, parameter.shard.dim
        index = (*self.index, *[slice(None)] * (len(parameter.shape) - len(self.index)))
        at = index[dim]
        if isinstance(at, int):
            for own in shard.own_indices(at):
                place = (*index[:dim], own, *index[dim + 1 :])
                yield stored, Target(tensor[place], self.form, self.factors, self.order)
            return
        begin, end, _ = at.indices(shard.whole_size)
        num_dims = sum(isinstance(each, slice) for each in index)
        part_dim = sum(isinstance(each, slice) for each in index[:dim])
        for start, stop, first in shard.overlaps(begin, end):
            # [start, stop) of the dimension of what this source fills
            rows = rows_of(start - begin, stop - begin, self.factors, self.order)
            if part_dim:
                rows = iter([(start - begin, stop - begin, start - begin, self.factors)])
            for row, row_end, stored_row, factors in rows:
                own_start = first + begin + row - start
                place = (
                    *index[:dim],
                    slice(own_start, own_start + row_end - row),
                    *index[dim + 1 :],
                )
                stored_end = stored_row + row_end - row
                span = self.form.stored_range(num_dims, part_dim, stored_row, stored_end)
                order = self.order if part_dim else None
                yield stored.narrow(*span), Target(tensor[place], self.form, factors, order)

    def stored_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape that the stored tensor must have; takes no memory."""
        part = torch.empty(parameter.whole_shape, device="meta")[self.index]
        return self.form.stored_shape(part.shape)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the model needs it: possibly several stored tensors in one.

    `used_share` is the share of it that one token needs: less than 1 for the experts of a mixture.
    Of a rank's shard, `shape` is what the rank has, and `sources` are those of the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[Source, ...]
    used_share: float = 1.0
    shard: Shard | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        if self.shard is None:
            return self.shape
        dim = self.shard.dim
        return (*self.shape[:dim], self.shard.whole_size, *self.shape[dim + 1 :])

    def sharded(self, shard: Shard) -> Parameter:
        """A rank's shard of this parameter, which is whole."""
        shape = (*self.shape[: shard.dim], shard.size, *self.shape[shard.dim + 1 :])
        return replace(self, shape=shape, shard=shard)

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
        """Place large parameters page-aligned, in the order given; then small ones, packed."""
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

    def groups(
        self, parameters: Sequence[Parameter], large_page_bytes: int
    ) -> tuple[ParameterGroup, ...]:
        """Group parameters that have pages in common, and choose the sizes of pages to take.

        Args:
            parameters: as given to `plan`.
            large_page_bytes: a multiple of `page_bytes`; equal to it for ordinary pages only.
        """
        groups: list[ParameterGroup] = []
        end = 0
        for parameter in parameters:
            if parameter.num_bytes >= self.page_bytes:
                first = self.offsets_bytes[parameter.name] // self.page_bytes
                end = first + -(-parameter.num_bytes // self.page_bytes)
                groups.append(self._group((parameter.name,), range(first, end), large_page_bytes))
        if end < self.num_pages:
            small = tuple(p.name for p in parameters if p.num_bytes < self.page_bytes)
            groups.append(self._group(small, range(end, self.num_pages), large_page_bytes))
        return tuple(groups)

    def _group(self, names: tuple[str, ...], pages: range, large_page_bytes: int) -> ParameterGroup:
        """Parameters at these pages: large ones as far as they fit, then one for the rest."""
        size = max(large_page_bytes // self.page_bytes, 1)
        end = pages.start + len(pages) // size * size
        large, rest = range(pages.start, end), range(end, pages.stop)
        stretches = [(size, large)] * bool(large) + [(len(rest), rest)] * bool(rest)
        return ParameterGroup(names, tuple(stretches))


def placed_bytes(models: Iterable[Sequence[Parameter]], page_bytes: int) -> list[int]:
    """Bytes of all pages under the parameters of each of several models."""
    return [Placement.plan(parameters, page_bytes).num_bytes for parameters in models]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroup:
    """Parameters that become resident and are evicted together, and their pages.

    The pages are stretches of the placement that follow each other: (size of a page in ordinary
    ones, indices of the ordinary pages in its place). What a page costs does not depend on its
    size, so they are as large as the stretch allows, without any padding.

    Each group is of one store, and equal to itself alone: groups are looked up far too often to
    compare names.
    """

    names: tuple[str, ...]
    stretches: tuple[tuple[int, range], ...]
    num_pages: int = field(init=False)  # its size in ordinary pages

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_pages", sum(len(pages) for _, pages in self.stretches))

    @property
    def mean_page_units(self) -> float:
        """Mean size of its pages, in ordinary ones."""
        return self.num_pages / sum(len(pages) // size for size, pages in self.stretches)

    @property
    def first_page(self) -> int:
        """Index of its first ordinary page in the placement."""
        return self.stretches[0][1].start


def check_sources(checkpoint: Checkpoint, parameters: Iterable[Parameter]) -> None:
    """Check that a checkpoint has the tensors that parameters are made of; takes no memory.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is quantised in a way that its
            source does not expect.
    """
    for parameter in parameters:
        for source in parameter.sources:
            _check(checkpoint, source, source.stored_shape(parameter))


def _check(checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> None:
    name = source.name
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise ConfigError(
            f"{checkpoint.path} lacks the tensor {name!r}, which its config calls for"
        )
    if stored.shape != shape:
        raise ConfigError(
            f"{checkpoint.path}: tensor {name!r} has shape {list(stored.shape)}, its config calls "
            f"for {list(shape)}"
        )
    if not source.form.accepts(stored.dtype):
        reason = (
            "MXFP4 is stored as torch.uint8"
            if source.form.is_mxfp4
            else "quantised checkpoints are not supported, except GPT-OSS in MXFP4"
        )
        raise ConfigError(
            f"{checkpoint.path}: tensor {name!r} is stored as {stored.dtype}; {reason}"
        )
