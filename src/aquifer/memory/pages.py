"""Logical page numbers: names of physical pages that do not depend on a device's handles."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NewType

from aquifer.errors import InvariantError
from aquifer.memory.driver.base import Driver, Handle

Page = NewType("Page", int)
"""Number of one physical page. It is given at creation and never used again for another page."""


class PageTable:
    """Creates, maps and releases a driver's pages by their numbers.

    A driver's handles say nothing outside of one process: on CUDA they are pointers. Everything
    above this class names pages by number, so that block numbers and plans can be sent to another
    process, which has handles of its own. Numbers ascend in the order of creation; as drivers
    create neighbours in order, sorting pages by number keeps neighbours together.

    Calls may come from several threads.

    Args:
        driver: the device's.

    Attributes:
        driver: as given.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._handles: dict[Page, Handle] = {}
        self._num_created = 0
        self._numbering = threading.Lock()

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
        handles = self.driver.create(page_bytes, count)
        with self._numbering:
            first = self._num_created
            self._num_created += count
        pages = [Page(number) for number in range(first, first + count)]
        self._handles.update(zip(pages, handles, strict=True))
        return pages

    def release(self, pages: Sequence[Page]) -> None:
        """Give pages back to the system. Pre-condition: none of them is mapped."""
        if pages:
            self.driver.release(self._handles_of(pages))
            for page in pages:
                del self._handles[page]

    def map(self, address: int, pages: Sequence[Page]) -> None:
        """Map pages of one size one after the other from `address` on, all or none.

        Raises:
            DriverError: the device refused; nothing was mapped.
        """
        self.driver.map(address, self._handles_of(pages))

    def zero(self, pages: Sequence[Page]) -> None:
        """Overwrite pages of one size with zeros, mapped or not.

        Raises:
            DriverError: the device refused; what is in the pages is unknown.
        """
        self.driver.zero(self._handles_of(pages))

    def _handles_of(self, pages: Sequence[Page]) -> list[Handle]:
        try:
            return list(map(self._handles.__getitem__, pages))
        except KeyError as error:
            raise InvariantError(f"page {error} does not exist") from None
