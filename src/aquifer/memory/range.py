"""Reserved addresses, mapped page by page, and tensors over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from aquifer.errors import InvariantError
from aquifer.memory.pages import Page, PageTable
from aquifer.memory.runs import runs

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
        self._mapped: dict[int, Page] = {}

    @property
    def pages(self) -> Mapping[int, Page]:
        """The pages that are mapped now, by their index in the range."""
        return MappingProxyType(self._mapped)

    @property
    def num_mapped_pages(self) -> int:
        """Pages mapped now."""
        return len(self._mapped)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped now."""
        return len(self._mapped) * self.page_bytes

    def map(self, index: int, pages: Sequence[Page]) -> None:
        """Map pages at [index, index + len(pages)), all or none.

        Raises:
            DriverError: the device refused; nothing was mapped.
        """
        if index < 0 or index + len(pages) > self.num_pages:
            raise InvariantError(f"pages [{index}, {index + len(pages)}) leave the range")
        indices = range(index, index + len(pages))
        if not self._mapped.keys().isdisjoint(indices):
            raise InvariantError(f"a page of [{index}, {index + len(pages)}) is mapped already")
        self._table.map(self.address + index * self.page_bytes, pages)
        for place, page in zip(indices, pages, strict=True):
            self._mapped[place] = page

    def addresses(self, indices: Iterable[int]) -> list[int]:
        """The addresses of the pages at these indices."""
        first, page_bytes = self.address, self.page_bytes
        return [first + index * page_bytes for index in indices]

    def index_at(self, address: int) -> int:
        """The index of the page at an address."""
        return (address - self.address) // self.page_bytes

    def page(self, index: int) -> Page:
        """The page at an index.

        Raises:
            InvariantError: nothing is mapped there.
        """
        page = self._mapped.get(index)
        if page is None:
            raise InvariantError(f"page {index} of a range is not mapped")
        return page

    def pages_at(self, indices: Iterable[int]) -> list[Page]:
        """The pages at these indices; mapping them elsewhere too aliases these places.

        Raises:
            InvariantError: nothing is mapped at one of them.
        """
        try:
            return list(map(self._mapped.__getitem__, indices))
        except KeyError as error:
            raise InvariantError(f"page {error} of a range is not mapped") from None

    def unmap(self, indices: Sequence[int]) -> list[Page]:
        """Unmap the pages at these indices, in ascending order; returns them.

        The caller still holds its references to them. Neighbours are unmapped by one call.
        """
        pages = self.pages_at(indices)
        for start, end in _stretches(indices):
            address = self.address + indices[start] * self.page_bytes
            self._driver.unmap(address, self.page_bytes, end - start)
            for index in indices[start:end]:
                del self._mapped[index]
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
        if self._mapped:
            raise InvariantError(f"{len(self._mapped)} pages are still mapped in this range")
        if self._is_own:
            self._driver.free(self.address, self.num_bytes)

    @cached_property
    def _flat(self) -> torch.Tensor:
        """[num_bytes] uint8, the whole range."""
        import torch

        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            return self._driver.view(self.address, self.num_bytes)


def _stretches(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Positions [start, end) of stretches of neighbours; mostly there is one."""
    if indices and indices[-1] - indices[0] == len(indices) - 1:
        return [(0, len(indices))]
    return runs(indices)
