"""Forms in which checkpoints store parts of parameters, and how elements get into their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import torch

from aquifer.weights import mxfp4

RowFactors: TypeAlias = tuple[tuple[int, float], ...]
"""(number of rows, factor on their elements) of stretches that make up a stored tensor, in order,
where a row is an index of its first dimension. None for a tensor that is left as it is."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Order of a stored tensor whose rows, indices of its first dimension, are stored by groups.

    Stored are, for each group in turn, the rows of several parts. What it fills has all rows of one
    part, by groups, then all rows of another. For example, each head may have stored its query and
    its gate.

    Args:
        num_groups: number of groups.
        part_rows: rows of each part in a group, as they are stored.
        order: the parts, in the order in which what is filled has them; as stored if left out.
    """

    num_groups: int
    part_rows: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return self.num_groups * sum(self.part_rows)

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """(row that is filled, first stored row, count) of all stretches, in the order filled."""
        row = 0
        for part in self.order or range(len(self.part_rows)):
            count = self.part_rows[part]
            for group in range(self.num_groups):
                yield row, group * sum(self.part_rows) + sum(self.part_rows[:part]), count
                row += count


class Form(Enum):
    """How a stored tensor relates to the part of a parameter that it fills, [..., out, in].

    A part may have several stored tensors. Those of a form that `changes` the part come after the
    one that fills it.
    """

    PLAIN = auto()  # the part itself, of any shape
    TRANSPOSED = auto()  # [..., in, out]
    MXFP4_BLOCKS = auto()  # [..., out, in / 32, 16] uint8: numbers, two in a byte, without scales
    MXFP4_SCALES = auto()  # [..., out, in / 32] uint8: the exponents of the scales of 32 numbers

    @property
    def is_mxfp4(self) -> bool:
        """Whether the stored tensor is one of the two of MXFP4; see `aquifer.weights.mxfp4`."""
        return self in (Form.MXFP4_BLOCKS, Form.MXFP4_SCALES)

    @property
    def changes(self) -> bool:
        """Whether elements change what other tensors have filled in."""
        return self is Form.MXFP4_SCALES

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the stored tensor for a part of this shape.

        Of MXFP4, the last dimension of the part is a multiple of 32.
        """
        if self is Form.TRANSPOSED:
            return (*shape[:-2], shape[-1], shape[-2])
        if self.is_mxfp4:
            blocks = (*shape[:-1], shape[-1] // mxfp4.BLOCK_VALUES)
            return blocks if self is Form.MXFP4_SCALES else (*blocks, mxfp4.BLOCK_BYTES)
        return tuple(shape)

    def stored_range(self, num_dims: int, dim: int, start: int, stop: int) -> tuple[int, int, int]:
        """Where the indices [start, stop) of one dimension of a part are stored.

        Args:
            num_dims: dimensions of the part.
            dim: the dimension.
            start: first index.
            stop: end of the indices; of the last dimension of MXFP4, both are multiples of 32.

        Returns: dimension of the stored tensor, and [start, stop) in it.
        """
        is_last = dim == num_dims - 1
        if self is Form.TRANSPOSED and dim >= num_dims - 2:
            return (num_dims - 2 if is_last else num_dims - 1), start, stop
        if self.is_mxfp4 and is_last:
            assert start % mxfp4.BLOCK_VALUES == stop % mxfp4.BLOCK_VALUES == 0
            return dim, start // mxfp4.BLOCK_VALUES, stop // mxfp4.BLOCK_VALUES
        return dim, start, stop

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a part of this dtype is stored without a conversion of floats."""
        return torch.uint8 if self.is_mxfp4 else dtype

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether a stored tensor may have this dtype."""
        if self.is_mxfp4:
            return dtype == torch.uint8
        return dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a parameter that a stored tensor fills, and the form in which it is stored.

    Args:
        part: contiguous, or of a plain form without factors and order, neighbouring columns of a
            contiguous tensor.
        form: the form; `form.stored_shape(part.shape)` is the stored tensor's shape.
        factors: constant factors on rows; only of a plain form.
        order: the order of the stored rows, if it is another one; only of a plain form without
            factors.
    """

    part: torch.Tensor
    form: Form = Form.PLAIN
    factors: RowFactors = ()
    order: RowOrder | None = None

    def __post_init__(self) -> None:
        if not self.part.is_contiguous():
            assert self.form is Form.PLAIN
            assert not self.factors
            assert self.order is None
        if self.factors:
            assert self.form is Form.PLAIN
            assert sum(rows for rows, _ in self.factors) == len(self.part)
        if self.order is not None:
            assert self.form is Form.PLAIN
            assert not self.factors
            assert self.order.num_rows == len(self.part)

    def is_copy(self, dtype: torch.dtype) -> bool:
        """Whether the bytes of a tensor stored in this dtype are the bytes of the part."""
        is_plain = self.form is Form.PLAIN and not self.factors and self.order is None
        return is_plain and self.part.is_contiguous() and self.part.dtype == dtype

    def write(self, elements: torch.Tensor, first: int) -> None:
        """Write stored elements to their places: converted, transposed, decoded, scaled or moved.

        A product with a factor is computed in float32 and rounded once.

        Args:
            elements: [n], contiguous, of a dtype that the form accepts: [first, first + n) of the
                stored tensor's elements, in row-major order; on the host or on the part's device.
            first: number of the first element.
        """
        if not self.part.is_contiguous():
            _copy_rows(elements, self.part, first)
            return
        values = self.part.view(-1)
        if self.form is Form.MXFP4_BLOCKS:
            mxfp4.write_numbers(elements, values, first)
        elif self.form is Form.MXFP4_SCALES:
            mxfp4.multiply_by_scales(elements, values, first)
        elif self.form is Form.TRANSPOSED:
            _copy_rows(elements, self.part.mT, first)
        elif self.factors:
            self._write_scaled(elements, first)
        elif self.order is not None:
            self._write_moved(elements, first, self.order)
        else:
            values[first : first + len(elements)].copy_(elements)

    def _write_scaled(self, elements: torch.Tensor, first: int) -> None:
        """`write` where rows have factors."""
        values = self.part.view(-1)
        width = len(values) // len(self.part)
        end = 0
        for num_rows, factor in self.factors:  # [begin, end) of the part has this factor
            begin, end = end, end + num_rows * width
            since, until = max(begin, first), min(end, first + len(elements))
            if since < until:
                stretch = elements[since - first : until - first]
                values[since:until].copy_(stretch.float() * factor)

    def _write_moved(self, elements: torch.Tensor, first: int, order: RowOrder) -> None:
        """`write` where rows are stored in another order."""
        values = self.part.view(-1)
        width = len(values) // len(self.part)
        for row, stored_row, count in order.stretches():
            begin, end = stored_row * width, (stored_row + count) * width
            since, until = max(begin, first), min(end, first + len(elements))
            if since < until:
                moved = (row - stored_row) * width
                stretch = elements[since - first : until - first]
                values[since + moved : until + moved].copy_(stretch)


def _copy_rows(elements: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Copy elements to [first, first + n) of matrices, counted in row-major order of their indices.

    Args:
        elements: [n], contiguous, of any dtype.
        out: matrices [..., rows, columns], transposed or some columns of wider ones.
        first: number of the first element.
    """
    num_rows, width = out.shape[-2:]
    matrices = out.view(-1, num_rows, width)
    done = 0
    while done < len(elements):
        row, column = divmod(first + done, width)
        index, row = divmod(row, num_rows)
        whole_rows = min((len(elements) - done) // width, num_rows - row)
        if column or not whole_rows:  # a part of a row
            count = min(len(elements) - done, width - column)
            matrices[index, row, column : column + count].copy_(elements[done : done + count])
        else:
            count = whole_rows * width
            part = elements[done : done + count].view(whole_rows, width)
            matrices[index, row : row + whole_rows].copy_(part)
        done += count
