"""Logical page numbers: names of physical pages that do not depend on a device's handles."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat
from typing import NewType

from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Driver, ExportedPages, Handle

Page = NewType("Page", int)
"""Number of one physical page. It is given at creation and never used again for another page."""


class PageTable:
    """Creates, maps and releases a driver's pages by their numbers.

    A driver's handles say nothing outside of one process: on CUDA they are pointers. Everything
    above this class names pages by number, so that block numbers and plans can be sent to another
    process, which has handles of its own. Numbers ascend in the order of creation; as drivers
    create neighbours in order, sorting pages by number keeps neighbours together.

    A page of several units takes as many numbers, from a multiple of their count on, and has the
    first of them. The others name its units: parts of its bytes that a cache tells apart.

    Calls may come from several threads.

    Args:
        driver: the device's.
        unit_bytes: size of a unit, which is that of most pages.

    Attributes:
        driver: as given.
        unit_bytes: as given.
        num_foreground_calls: calls of the driver by threads that somebody may wait for.
        num_background_calls: calls of the driver by others (`enter_background`).
    """

    def __init__(self, driver: Driver, unit_bytes: int) -> None:
        self.driver = driver
        self.unit_bytes = unit_bytes
        self._handles: dict[Page, Handle] = {}
        self._units: dict[Page, int] = {}  # of the pages with several
        self._unit_counts: set[int] = set()  # that pages had so far
        self._next_number = 0
        self._numbering = threading.Lock()
        self.num_foreground_calls = 0
        self.num_background_calls = 0
        self._background: set[int] = set()  # threads

    def __len__(self) -> int:
        """Pages that exist."""
        return len(self._handles)

    @property
    def numbers(self) -> list[Page]:
        """Numbers of all pages that exist, oldest first."""
        return list(self._handles)

    def create(self, page_bytes: int, count: int) -> list[Page]:
        """Create `count` pages of zeroed bytes, all or none; their numbers ascend.

        Raises:
            DriverError: the device refused; nothing has changed.
        """
        self._count_call()
        handles = self.driver.create(page_bytes, count)
        units = page_bytes // self.unit_bytes if page_bytes % self.unit_bytes == 0 else 1
        with self._numbering:
            first = -(-self._next_number // units) * units
            self._next_number = first + count * units
        pages = [Page(number) for number in range(first, self._next_number, units)]
        if units > 1:
            self._unit_counts.add(units)
            self._units.update(dict.fromkeys(pages, units))
        self._handles.update(zip(pages, handles, strict=True))
        return pages

    @property
    def has_large(self) -> bool:
        """Whether there is a page of several units."""
        return bool(self._units)

    def num_units(self, page: Page) -> int:
        """Units of a page: numbers from its own on."""
        return self._units.get(page, 1)

    def all_units(self, pages: Sequence[Page]) -> list[int]:
        """`num_units` of each page."""
        return list(map(self._units.get, pages, repeat(1)))

    def page_of(self, number: int) -> Page:
        """The page that has a unit of this number."""
        page = Page(number)
        if page not in self._handles:
            for units in self._unit_counts:
                page = Page(number // units * units)
                if number - page < self._units.get(page, 0):
                    break
            else:
                raise InvariantError(f"page {number} does not exist")
        return page

    def release(self, pages: Sequence[Page]) -> None:
        """Give pages back to the system. Pre-condition: none of them is mapped."""
        if pages:
            self._count_call()
            self.driver.release(self._handles_of(pages))
            for page in pages:
                del self._handles[page]
                self._units.pop(page, None)

    def map(self, address: int, pages: Sequence[Page]) -> None:
        """Map pages of one size one after the other from `address` on, all or none.

        Raises:
            DriverError: the device refused; nothing was mapped.
        """
        self._count_call()
        self.driver.map(address, self._handles_of(pages))

    def unmap(self, address: int, pages: Sequence[Page]) -> None:
        """Unmap pages of one size that lie one after the other from `address` on."""
        self.unmap_places(address, self.num_units(pages[0]) * self.unit_bytes, len(pages))

    def unmap_places(self, address: int, page_bytes: int, count: int) -> None:
        """Unmap `count` pages of one size from `address` on."""
        self._count_call()
        self.driver.unmap(address, page_bytes, count)

    def enter_background(self) -> None:
        """Count the driver calls of this thread, from now on, as those that nobody waits for."""
        self._background.add(threading.get_ident())

    def fill(self, pages: Sequence[Page], byte: int) -> None:
        """Overwrite all bytes of pages of one size with the same value, mapped or not.

        Raises:
            DriverError: the device refused; what is in the pages is unknown.
        """
        self._count_call()
        self.driver.fill(self._handles_of(pages), byte)

    def export(self, pages: Sequence[Page]) -> ExportedPages:
        """Open pages of one size for another process. Pre-condition: they are in use meanwhile.

        Raises:
            DriverError: the device refused.
        """
        return self.driver.export(self._handles_of(pages))

    def _count_call(self) -> None:
        if threading.get_ident() in self._background:
            self.num_background_calls += 1
        else:
            self.num_foreground_calls += 1

    def _handles_of(self, pages: Sequence[Page]) -> list[Handle]:
        try:
            return list(map(self._handles.__getitem__, pages))
        except KeyError as error:
            raise InvariantError(f"page {error} does not exist") from None
