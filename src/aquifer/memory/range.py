"""Reserved addresses, mapped page by page, and tensors over them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
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
    """A stretch of addresses in which pages come and go.

    The range knows which page is at which index; owners and references are the pool's business, so
    mapping takes pages that the caller has acquired, and unmapping returns them to the caller.

    An index is a place for a page of one size. A page of several units (`PageTable`), where a unit
    is of that size, lies at as many indices, and its place is the first of them.

    Args:
        pages: the device's pages.
        num_bytes: how much to reserve; rounded up to whole pages.
        page_bytes: distance of the places: the size of the pages to be mapped, or of their units.
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
        self._has_units = page_bytes == pages.unit_bytes
        self._has_large = False  # whether pages of several units were mapped so far
        # The number of the page or unit at each index, less the index: equal where both ascend
        # together.
        self._offsets: Records[int] = Records()
        # The units of the page at each index, where it has several.
        self._units: Records[int] = Records()
        # The threads that map and unmap change both at the same time, at places of their own.
        self._writing = threading.Lock()

    @property
    def pages(self) -> Mapping[int, Page]:
        """The pages that are mapped now, by their place; time in proportion to them."""
        found = {index: Page(index + offset) for index, offset in self._offsets.items()}
        if self._has_large:
            found = {i: page for i, page in found.items() if self._table.page_of(page) == page}
        return found

    @property
    def num_mapped_pages(self) -> int:
        """Pages mapped now, those of several units counted by unit."""
        return len(self._offsets)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped now."""
        return len(self._offsets) * self.page_bytes

    def map(self, index: int, pages: Sequence[Page]) -> None:
        """Map pages of one size one after the other from an index on, all or none.

        Raises:
            DriverError: the device refused; nothing was mapped.
        """
        address = self.address_for(index, pages)
        self._table.map(address, pages)
        self.note(index, pages)

    def address_for(self, index: int, pages: Sequence[Page]) -> int:
        """Where pages of one size are to be mapped, to be at the places from an index on.

        Raises:
            InvariantError: they leave the range, or a page is noted at one of these.
        """
        size = self.num_places(pages[0]) if pages else 1
        end = index + len(pages) * size
        if index < 0 or end > self.num_pages:
            raise InvariantError(f"pages [{index}, {end}) leave the range")
        if end - index == 1:  # shorter, for growing sequences
            is_free = index not in self._offsets
        else:
            is_free = self._offsets.values_of(range(index, end)).count(None) == end - index
        if not is_free:
            raise InvariantError(f"a page of [{index}, {end}) is mapped already")
        return self._address(index)

    def note(self, index: int, pages: Sequence[Page]) -> None:
        """Note that pages of one size were mapped at the places from an index on."""
        size = self.num_places(pages[0]) if pages else 1
        with self._writing:
            if len(pages) == 1 and size == 1:
                self._offsets.put(index, pages[0] - index)
            elif size > 1:
                self._has_large = True
                self._units.fill(range(index, index + len(pages) * size), size)
                for first, page in zip(range(index, self.num_pages, size), pages, strict=False):
                    self._offsets.fill(range(first, first + size), page - first)
            elif isinstance(pages, range):
                indices = range(index, index + len(pages))
                self._offsets.fill(indices, pages.start - index if pages else None)
            else:
                indices = range(index, index + len(pages))
                self._offsets.assign(indices, list(map(sub, pages, indices)))

    def num_places(self, page: Page) -> int:
        """Indices that a page takes."""
        return self._table.num_units(page) if self._has_units else 1

    def sizes(self, pages: Sequence[Page]) -> list[int]:
        """Indices that each page takes."""
        return self._table.all_units(pages) if self._has_units else [1] * len(pages)

    def places(self, indices: range) -> Sequence[int]:
        """The places of the pages at these indices, where pages may take several.

        Pre-condition: each of these indices has a page, which lies at no others.
        """
        if not self._has_large:
            return indices
        found: list[int] = []
        for units, run in self._units.stretches(indices):
            found += run[:: units or 1]
        return found if len(found) < len(indices) else indices

    def sizes_at(self, indices: range) -> dict[int, int]:
        """The places of the pages that lie at any of these indices, which may have none, and how
        many indices each takes."""
        if len(indices) == 1 and indices[0] not in self._units:  # a shorter way
            return {indices[0]: 1} if indices[0] in self._offsets else {}
        found: dict[int, int] = {}
        for units, run in self._units.stretches(indices):
            if units is None:
                found.update(dict.fromkeys(self._offsets.present(run), 1))
            else:  # the first of these pages may begin before
                first = run[0] - self.page(run[0]) % units
                found.update(dict.fromkeys(range(first, run[-1] + 1, units), units))
        return found

    def page(self, index: int) -> Page:
        """The page at a place, or the number of the unit at an index.

        Raises:
            InvariantError: nothing is mapped there.
        """
        offset = self._offsets.get(index)
        if offset is None:
            raise InvariantError(f"page {index} of a range is not mapped")
        return Page(index + offset)

    def pages_at(self, indices: Sequence[int]) -> Sequence[Page]:
        """The pages at these places; mapping them elsewhere too aliases these.

        At other indices, the numbers of the units there. It is a `range` if the indices are one,
        and the numbers ascend with them.

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
        """Unmap the pages at these places, in ascending order; returns them.

        The caller still holds its references to them. Neighbours are unmapped by one call.
        """
        pages = self.pages_at(indices)
        if not self._has_large:
            self._unmap(indices, 1)
            return pages
        for units, run in list(self._units.stretches(indices)):
            self._unmap(run, units or 1)
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
        import torch

        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            elements = self._flat.view(dtype)
            return elements.as_strided(list(shape), list(stride), offset_bytes // dtype.itemsize)

    def close(self) -> None:
        """Give back the range's own addresses. Pre-condition: nothing is mapped."""
        if self._offsets:
            raise InvariantError(f"{len(self._offsets)} pages are still mapped in this range")
        if self._is_own:
            self._driver.free(self.address, self.num_bytes)

    @property
    def has_large(self) -> bool:
        """Whether pages that take several indices were ever mapped here."""
        return self._has_large

    def pieces(self, numbers: Sequence[int]) -> Iterator[tuple[Page, int, int, int]]:
        """The pages that have units of these numbers, one for each stretch of neighbours in a page.

        Yields: (page, offset of the first of the units in it, start and end of the stretch), in
            order; a page of which all units are named in order is one stretch.
        """
        num_places = self.num_places
        for start, last in runs(numbers):
            page = self.page_of(numbers[start])
            offset = numbers[start] - page
            while start < last:
                size = num_places(page)
                end = start + size - offset
                yield page, offset, start, end if end < last else last
                # A number behind the last unit of a page is that of another page.
                page, offset, start = Page(page + size), 0, end

    def page_of(self, number: int) -> Page:
        """The page that has a unit of this number."""
        return self._table.page_of(number) if self._has_large else Page(number)

    def _address(self, index: int) -> int:
        return self.address + index * self.page_bytes

    def _unmap(self, places: Sequence[int], size: int) -> None:
        """Unmap the pages at these places, each of which takes `size` indices."""
        for start, end in runs(places, size):
            count, address = end - start, self._address(places[start])
            self._table.unmap_places(address, size * self.page_bytes, count)
            indices = range(places[start], places[start] + count * size)
            with self._writing:
                self._offsets.fill(indices, None)
                if size > 1:
                    self._units.fill(indices, None)

    @cached_property
    def _flat(self) -> torch.Tensor:
        """[num_bytes] uint8, the whole range."""
        return self._driver.view(self.address, self.num_bytes)
