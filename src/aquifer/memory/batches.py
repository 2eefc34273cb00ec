"""Places of a range that were given up together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aquifer.memory.driver.base import Fence
from aquifer.memory.pages import Page
from aquifer.memory.range import VirtualRange
from aquifer.memory.runs import shift


class _Passed:
    """The `Fence` of a device that does not run ahead."""

    def passed(self) -> bool:
        """True: its work is done when the call that does it returns."""
        return True

    def wait(self) -> None:
        """Return at once."""


PASSED: Fence = _Passed()


@dataclass(slots=True, eq=False)
class Batch:
    """Places of one range that were retired together, and are all parked or all waiting.

    A place belongs to the batch that its record names: it may have left this one.
    """

    range: VirtualRange
    fence: Fence  # of the moment when they were given up
    indices: Sequence[int]  # in the order in which they are unmapped
    pages: Sequence[Page] | None  # if they are parked: those in use; none is there twice
    num_left: int = 0  # places that still belong to it

    @property
    def is_parked(self) -> bool:
        """Whether the pages are in use elsewhere."""
        return self.pages is not None

    def indices_of(self, pages: Sequence[Page]) -> Sequence[int]:
        """The indices of some of its pages."""
        assert self.pages is not None
        if isinstance(self.indices, range) and isinstance(self.pages, range):
            return shift(pages, self.indices[0] - self.pages[0])
        if pages == self.pages:
            return self.indices
        if len(pages) == 1:
            return [self.indices[self.pages.index(pages[0])]]
        found = dict(zip(self.pages, self.indices, strict=True))
        return [found[page] for page in pages]


def without(
    gone: Batch, _page: Page, batches: tuple[Batch, ...] | None
) -> tuple[Batch, ...] | None:
    """The batches but for one; None if there is no other."""
    assert batches is not None
    return tuple(batch for batch in batches if batch is not gone) or None


def past_fences(batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """The batches that have passed their fences; where one has, all that were given up before have.

    Args:
        batches: in the order in which they were given up.
    """
    for count in range(len(batches), 0, -1):
        if batches[count - 1].fence.passed():
            return batches[:count]
    return ()
