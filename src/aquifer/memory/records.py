"""Records of pages: the state of each, as a value that all pages in the same state share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from aquifer.memory.pages import Page

R = TypeVar("R")

_NONE_YET = object()


class Records(dict[Page, R], Generic[R]):
    """The record of each page that has one.

    Hundreds of pages come at once, in stretches whose records are equal. So what happens to a page
    is written once for each stretch, and only the pages' records one by one.
    """

    def change(
        self, pages: Sequence[Page], change: Callable[[Page, R | None], R | None]
    ) -> Iterator[tuple[R | None, R | None, Sequence[Page]]]:
        """Replace the records of pages, stretch by stretch: to be iterated to its end.

        A page may be named twice; the second time it has the new record.

        Args:
            pages: the pages.
            change: returns the new record, given the first page of a stretch and the old record of
                all its pages; None stands for none. If it raises an error, the stretches before it
                are changed, and no others.

        Yields: (old record, new record, pages) of each stretch.
        """
        get = self.get
        before: Any = _NONE_YET
        after: R | None = None
        start = end = 0
        for page in pages:
            record = get(page)
            if record is not before and record != before:
                if end > start:
                    yield before, after, pages[start:end]
                start, before = end, record
                after = change(page, record)
            if after is not None:
                self[page] = after
            elif record is not None:
                del self[page]
            end += 1
        if end > start:
            yield before, after, pages[start:end]
