"""Guard pages, a debug mode of memory: what must not be read is NaN, and writes to it are found.

The bytes of a page that becomes idle are all set to 0xFF, which is NaN in every floating-point type
of KV, and -1 as an integer. Where such a page is handed out or given back, its bytes are compared:
any other value was written after the page was freed.

One page more than the budget, the guard page, holds 0xFF for good. Caches map it where no sequence
has a page (`aquifer.cache.guard`). What is written there is found by `PagePool.check` and `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.base import Driver
from aquifer.memory.pages import Page, PageTable

POISON = 0xFF
"""The value of every byte that must not be read: NaN in bfloat16, float16, float32 and float8."""


class GuardedPages(PageTable):
    """A `PageTable` that poisons idle pages and checks them.

    Args:
        driver: the device's.
        unit_bytes: size of a unit, and of the guard page.

    Attributes:
        guard: the guard page, which is read and never written.

    Raises:
        DriverError: the device refused the guard page.
    """

    def __init__(self, driver: Driver, unit_bytes: int) -> None:
        super().__init__(driver, unit_bytes)
        self._sizes: dict[Page, int] = {}
        self._poisoned: set[Page] = set()
        self._error: InvariantError | None = None  # the first that was found
        (self.guard,) = self.create(unit_bytes, 1)
        self.fill([self.guard], POISON)

    def create(self, page_bytes: int, count: int) -> list[Page]:
        """See `PageTable.create`."""
        pages = super().create(page_bytes, count)
        self._sizes.update(dict.fromkeys(pages, page_bytes))
        return pages

    def release(self, pages: Sequence[Page]) -> None:
        """See `PageTable.release`.

        Raises:
            InvariantError: as `take`.
        """
        self._compare(pages)
        super().release(pages)
        for page in pages:
            del self._sizes[page]

    def poison(self, pages: Sequence[Page]) -> None:
        """Set all bytes of idle pages to 0xFF; pages that do not exist are left out.

        Pages that the device does not let it fill are not checked later.
        """
        left = sorted({page for page in pages if page in self._sizes}, key=self._size)
        for _, group in groupby(left, self._size):
            same_size = list(group)
            with suppress(DriverError):
                self.fill(same_size, POISON)
                self._poisoned.update(same_size)

    def take(self, pages: Sequence[Page]) -> None:
        """Check that idle pages, which are idle no longer, have the bytes that `poison` wrote.

        Raises:
            InvariantError: one was written to since it was freed, or another one was that the
                stocker's thread has given back, where the error ended that thread alone.
        """
        if self._error is not None:
            raise self._error
        self._compare(pages)

    def check(self) -> None:
        """Check that the guard page has the bytes that it should have.

        Raises:
            InvariantError: it was written to.
        """
        if self.driver.unlike(self._handles_of([self.guard]), POISON):
            raise InvariantError(
                "the guard page was written to: a kernel writes behind the end of a sequence"
            )

    def _compare(self, pages: Sequence[Page]) -> None:
        """`take`, for pages that are handed out or given back."""
        found = [page for page in pages if page in self._poisoned]
        if not found:
            return
        self._poisoned.difference_update(found)
        handles = self._handles_of(found)
        written = set(self.driver.unlike(handles, POISON))
        if written:
            names = [page for page, handle in zip(found, handles, strict=True) if handle in written]
            self._error = InvariantError(
                f"freed page was written to: {', '.join(map(str, names))}; something used it after "
                "its last reference was released"
            )
            raise self._error

    def _size(self, page: Page) -> int:
        return self._sizes[page]
