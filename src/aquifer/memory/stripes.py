"""Pages at equal places of several buffers, handled as one: the stripes of layer-major KV.

A range is cut into buffers of the same size, one after the other. The pages at one index of all
buffers are a stripe, which is mapped, shared and given up as a whole. It has the index and the
number of its page in the first buffer. So a tenant counts stripes where it would count pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from aquifer.memory.pages import Page
from aquifer.memory.pool import Owner
from aquifer.memory.residency import PendingPages, Residency

_FEW_STRIPES = 256


class StripedResidency:
    """A `Residency` of stripes. What happens is recorded for each buffer by the one below.

    Args:
        pages: the pages of all buffers.
        num_buffers: buffers that the range is cut into; it divides the range.

    Attributes:
        range: the range.
        place_bytes: size of a stripe.
    """

    def __init__(self, pages: Residency, num_buffers: int) -> None:
        self.range = pages.range
        self.place_bytes = num_buffers * pages.place_bytes
        self._pages = pages
        buffer_pages = self.range.num_pages // num_buffers
        self._starts = [buffer * buffer_pages for buffer in range(num_buffers)]
        # The pages of each stripe in all buffers, by the first one. Those of stripes that are not
        # in use any more are never asked for, and are dropped when there are many.
        self._stripes: dict[Page, tuple[Page, ...]] = {}
        self._drop_at = _FEW_STRIPES

    @property
    def num_places(self) -> int:
        """Stripes that the range has room for."""
        return self.range.num_pages // len(self._starts)

    @property
    def num_known(self) -> int:
        """Stripes of which the pages are known, those that are not in use any more included."""
        return len(self._stripes)

    @property
    def defers(self) -> bool:
        """See `Residency.defers`."""
        return self._pages.defers

    def populate(
        self,
        stretches: Sequence[range],
        *,
        units: int | Sequence[int] = 1,
        may_reclaim: bool = True,
        is_overwritten: bool = False,
    ) -> bool:
        """See `Residency.populate`; `units` is 1."""
        assert units == 1
        if not self._pages.populate(
            self._stretches(stretches), may_reclaim=may_reclaim, is_overwritten=is_overwritten
        ):
            return False
        self._name(stretches)
        return True

    def populate_later(self, stretches: Sequence[range]) -> PendingPages | None:
        """See `Residency.populate_later`."""
        return self._pages.populate_later(self._stretches(stretches), self._name_pending(stretches))

    def settle(self, pending: PendingPages) -> bool:
        """See `Residency.settle`."""
        return self._pages.settle(pending)

    def alias(self, index: int, stripes: Sequence[Page]) -> None:
        """See `Residency.alias`."""
        parts = list(zip(*(self._stripes[stripe] for stripe in stripes), strict=True))
        with ExitStack() as undo:
            for start, pages in zip(self._starts, parts, strict=False):
                self._pages.alias(start + index, pages)
                # The reference that was the place's is the caller's again.
                undo.callback(self._take_back, range(start + index, start + index + len(pages)))
            undo.pop_all()

    def places(self, index: int, stripes: Sequence[Page]) -> Sequence[int]:
        """See `Residency.places`."""
        return range(index, index + len(stripes))

    def give_up(self, indices: Sequence[int], *, is_untouched: bool = False) -> None:
        """See `Residency.give_up`."""
        self._pages.give_up(self._everywhere(indices), is_untouched=is_untouched)

    def share(self, stripes: Sequence[Page]) -> None:
        """See `Residency.share`."""
        self._pages.share(self._all_of(stripes))

    def release(self, stripes: Sequence[Page]) -> None:
        """See `Residency.release`."""
        self._pages.release(self._all_of(stripes))

    def transfer(self, stripes: Sequence[Page], owner: Owner) -> None:
        """See `Residency.transfer`."""
        self._pages.transfer(self._all_of(stripes), owner)

    def left_at(self, indices: range) -> dict[int, int]:
        """See `Residency.left_at`: stripes of which any page is left."""
        found: dict[int, int] = {}
        for start in self._starts:
            left = self._pages.left_at(range(start + indices.start, start + indices.stop))
            found |= dict.fromkeys((index - start for index in left), 1)
        return found

    def left_with(self, stripe: Page, *, is_passed: bool = False) -> list[int]:
        """See `Residency.left_with`: by the stripe's first page."""
        return self._pages.left_with(stripe, is_passed=is_passed)

    def vacate_soon(self, indices: Sequence[int]) -> None:
        """See `Residency.vacate_soon`."""
        self._pages.vacate_soon(self._everywhere(indices))

    def _stretches(self, stretches: Sequence[range]) -> list[range]:
        """The places of these stripes in all buffers."""
        return [
            range(start + each.start, start + each.stop)
            for start in self._starts
            for each in stretches
        ]

    def _everywhere(self, indices: Sequence[int]) -> list[int]:
        return [start + index for start in self._starts for index in indices]

    def _all_of(self, stripes: Sequence[Page]) -> list[Page]:
        return [page for stripe in stripes for page in self._stripes[stripe]]

    def _name(self, stretches: Sequence[range]) -> None:
        """Note the pages of stripes that were mapped."""
        for each in stretches:
            parts = [
                self.range.pages_at(range(start + each.start, start + each.stop))
                for start in self._starts
            ]
            self._stripes.update((stripe[0], stripe) for stripe in zip(*parts, strict=True))
        if len(self._stripes) > self._drop_at:
            self._stripes = {
                first: stripe
                for first, stripe in self._stripes.items()
                if self._pages.is_in_use(first)
            }
            self._drop_at = 2 * len(self._stripes) + _FEW_STRIPES

    def _name_pending(self, stretches: Sequence[range]) -> Callable[[], None]:
        return lambda: self._name(stretches)

    def _take_back(self, indices: range) -> None:
        self._pages.share(self.range.pages_at(indices))
        self._pages.give_up(indices)
