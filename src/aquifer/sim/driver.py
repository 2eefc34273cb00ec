"""Memory of a modelled device: every call is answered, and nothing is held."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.base import Driver, ExportedPages, Fence, Handle

PAGE_BYTES = 2 << 20
"""The smallest page of CUDA."""


class ModelledDriver:
    """A `Driver` that keeps books only.

    It refuses what a real device would refuse: more pages than there is memory, a page mapped where
    one is mapped already or where nothing is reserved, an unmapping of nothing. It knows mapped
    addresses only, and not which page is at each, so that a replay spends no time on it.

    Args:
        total_bytes: the device's memory.
        page_bytes: the size of a page, and the granularity.

    Attributes:
        held_bytes: memory that counts as the process's, outside of pages.
    """

    def __init__(self, total_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        self._total_bytes = total_bytes
        self._page_bytes = page_bytes
        self.held_bytes = 0
        self._created_bytes = 0
        self._page_sizes: dict[Handle, int] = {}
        self._num_handles = 0
        self._end_address = page_bytes  # so that no address is 0
        # First address of each reservation, ascending, and whether something is mapped at each of
        # its pages. Untouched parts of a fresh array of zeros take no memory.
        self._starts: list[int] = []
        self._mapped: list[npt.NDArray[np.bool_]] = []

    @property
    def name(self) -> str:
        """See `Driver`."""
        return "modelled"

    @property
    def device(self) -> torch.device:
        """The host: tables and the like are real, and only what `view` returns holds nothing."""
        return torch.device("cpu")

    @property
    def granularity_bytes(self) -> int:
        """See `Driver`."""
        return self._page_bytes

    @property
    def default_page_bytes(self) -> int:
        """See `Driver`."""
        return self._page_bytes

    @property
    def large_page_bytes(self) -> int:
        """See `Driver`."""
        return self._page_bytes

    @property
    def max_mappings(self) -> int | None:
        """No limit, as on a GPU."""
        return None

    @property
    def can_export(self) -> bool:
        """No: there are no bytes to read."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether work outlives the call that starts it: a step is done when its time is over."""
        return False

    def available_bytes(self) -> int:
        """See `Driver`."""
        return self._total_bytes - self._created_bytes

    def total_bytes(self) -> int:
        """See `Driver`."""
        return self._total_bytes

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        """`held_bytes`: the budget of a replay leaves out what a real process takes."""
        return self.held_bytes

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """See `Driver`.

        Raises:
            DriverError: there is not so much memory.
        """
        if self._created_bytes + count * page_bytes > self._total_bytes:
            raise DriverError("OUT_OF_MEMORY", f"{count} pages of {page_bytes} bytes")
        first = self._num_handles
        self._num_handles += count
        self._created_bytes += count * page_bytes
        handles = [Handle(number) for number in range(first, first + count)]
        self._page_sizes.update(dict.fromkeys(handles, page_bytes))
        return handles

    def release(self, handles: Sequence[Handle]) -> None:
        """See `Driver`."""
        self._created_bytes -= sum(map(self._page_sizes.pop, handles))

    def export(self, handles: Sequence[Handle]) -> ExportedPages:
        """Never called: see `can_export`."""
        raise InvariantError("a modelled device has no bytes")

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        """Never called, likewise."""
        raise InvariantError("a modelled device has no bytes")

    def reserve(self, num_bytes: int) -> int:
        """See `Driver`."""
        address = self._end_address
        self._end_address += num_bytes
        self._starts.append(address)
        self._mapped.append(np.zeros(-(-num_bytes // self._page_bytes), np.bool_))
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """See `Driver`. The addresses are not used again: there are enough."""
        index = self._starts.index(address)
        del self._starts[index], self._mapped[index]

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """See `Driver`.

        Raises:
            DriverError: something is mapped there, or nothing is reserved.
        """
        if not handles:
            return
        num_bytes = len(handles) * self._page_sizes[handles[0]]
        places = self._places(address, num_bytes)
        if np.count_nonzero(places):
            raise DriverError("INVALID_VALUE", f"a page is mapped in {num_bytes} from {address}")
        places[:] = True

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """See `Driver`.

        Raises:
            DriverError: nothing is mapped there.
        """
        num_bytes = count * page_bytes
        places = self._places(address, num_bytes)
        if np.count_nonzero(places) < len(places):
            raise DriverError(
                "INVALID_VALUE", f"no page is mapped somewhere in {num_bytes} from {address}"
            )
        places[:] = False

    def fill(self, handles: Sequence[Handle], byte: int) -> None:
        """Nothing: there are no bytes."""

    def unlike(self, handles: Sequence[Handle], byte: int) -> list[Handle]:
        """None: there are no bytes."""
        return []

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """A tensor of torch's "meta" device: shapes and strides, and no memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def fence(self) -> Fence | None:
        """None, as `runs_ahead` is False."""
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _places(self, address: int, num_bytes: int) -> npt.NDArray[np.bool_]:
        """Whether something is mapped at each page of a stretch: a view of the books."""
        index = bisect_right(self._starts, address) - 1
        first, rest = divmod(address - self._starts[index], self._page_bytes)
        end = first + num_bytes // self._page_bytes
        if index < 0 or rest or end > len(self._mapped[index]):
            raise DriverError("INVALID_VALUE", f"{num_bytes} from {address} are not reserved")
        return self._mapped[index][first:end]


_: type[Driver] = ModelledDriver
