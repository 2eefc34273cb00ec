"""Reserved addresses, mapped page by page, and tensors over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import add, sub
from typing import TYPE_CHECKING, cast

from aquifer.errors import InvariantError
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.records import Records
from aquifer.memory.runs import runs, shift

if TYPE_CHECKING:
    import torch  # the web process does without it


class VirtualRange:
    """A stretch of addresses in which pages of one size come and go.

    The range knows which page is at which index; owners and references are the pool's business, so
    mapping takes pages that the caller has acquired, and unmapping returns them to the caller.

    Args:
        pages: the device's pages.
        num_bytes: how much to reserve; rounded up to whole pages.
        page_bytes: size of the pages to be mapped.
        address: the start of a stretch of another reservation, which outlives this range; by
            default the range reserves its own.

    Raises:
        DriverError: the addresses could not be reserved.
    """

    def __init__(
        self, pages: PageTable, num_bytes: int, page_bytes: int, address: int | None = None
    ) -> None:
        self.page_bytes = page_bytes
        self.num_pages = max(-(-num_bytes // page_bytes), 1)
        self.num_bytes = self.num_pages * page_bytes
        self._table = pages
        self._driver = pages.driver
        self._is_own = address is None
        self.address = self._driver.reserve(self.num_bytes) if address is None else address
        # The number of the page at each index, less the index: equal where both ascend together.
        self._offsets: Records[int] = Records()

    @property
    def pages(self) -> Mapping[int, Page]:
        """The pages that are mapped now, by their index in the range; time in their proportion."""
        return {index: Page(index + offset) for index, offset in self._offsets.items()}

    @property
    def num_mapped_pages(self) -> int:
        """Pages mapped now."""
        return len(self._offsets)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped now."""
        return len(self._offsets) * self.page_bytes

    def map(self, index: int, pages: Sequence[Page]) -> None:
        """Map pages at [index, index + len(pages)), all or none.

        Raises:
            DriverError: the device refused; nothing was mapped.
        """
        if index < 0 or index + len(pages) > self.num_pages:
            raise InvariantError(f"pages [{index}, {index + len(pages)}) leave the range")
        if len(pages) == 1 and index not in self._offsets:  # a shorter way, for growing sequences
            self._table.map(self.address + index * self.page_bytes, pages)
            self._offsets.put(index, pages[0] - index)
            return
        indices = range(index, index + len(pages))
        if self._offsets.values_of(indices).count(None) < len(pages):
            raise InvariantError(f"a page of [{index}, {index + len(pages)}) is mapped already")
        self._table.map(self.address + index * self.page_bytes, pages)
        if isinstance(pages, range):
            self._offsets.fill(indices, pages.start - index if pages else None)
        else:
            self._offsets.assign(indices, list(map(sub, pages, indices)))

    def page(self, index: int) -> Page:
        """The page at an index.

        Raises:
            InvariantError: nothing is mapped there.
        """
        offset = self._offsets.get(index)
        if offset is None:
            raise InvariantError(f"page {index} of a range is not mapped")
        return Page(index + offset)

    def pages_at(self, indices: Sequence[int]) -> Sequence[Page]:
        """The pages at these indices; mapping them elsewhere too aliases these places.

        It is a `range` if the indices are one, and the pages' numbers ascend with them.

        Raises:
            InvariantError: nothing is mapped at one of them.
        """
        found = self._offsets.values_of(indices)
        if None in found:
            raise InvariantError(f"page {indices[found.index(None)]} of a range is not mapped")
        offsets = cast(list[int], found)
        if isinstance(indices, range) and offsets and offsets.count(offsets[0]) == len(offsets):
            return cast(Sequence[Page], shift(indices, offsets[0]))
        return cast(list[Page], list(map(add, indices, offsets)))

    def unmap(self, indices: Sequence[int]) -> Sequence[Page]:
        """Unmap the pages at these indices, in ascending order; returns them.

        The caller still holds its references to them. Neighbours are unmapped by one call.
        """
        pages = self.pages_at(indices)
        for start, end in runs(indices):
            address = self.address + indices[start] * self.page_bytes
            self._driver.unmap(address, self.page_bytes, end - start)
            self._offsets.fill(indices[start:end], None)
        return pages

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        offset_bytes: int = 0,
        stride: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor over the range's addresses, mapped or not; `stride` is in elements.

        The tensor is a window: it keeps nothing mapped, and touching an unmapped page through it
        is a fault. It must not outlive the range.
        """
        if stride is None:
            stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if shape else 0
        if offset_bytes < 0 or offset_bytes + (last + 1) * dtype.itemsize > self.num_bytes:
            raise InvariantError(f"a tensor of {list(shape)} {dtype} leaves the range")
        if offset_bytes % dtype.itemsize:
            raise InvariantError(f"{offset_bytes} bytes are no whole number of {dtype}")
        elements = self._flat.view(dtype)
        return elements.as_strided(list(shape), list(stride), offset_bytes // dtype.itemsize)

    def close(self) -> None:
        """Give back the range's own addresses. Pre-condition: nothing is mapped."""
        if self._offsets:
            raise InvariantError(f"{len(self._offsets)} pages are still mapped in this range")
        if self._is_own:
            self._driver.free(self.address, self.num_bytes)

    @cached_property
    def _flat(self) -> torch.Tensor:
        """[num_bytes] uint8, the whole range."""
        import torch

        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            return self._driver.view(self.address, self.num_bytes)
