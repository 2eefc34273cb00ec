"""The `Driver` protocol: the whole boundary to a device's virtual memory.

It follows CUDA's virtual memory management (cuMemCreate, cuMemAddressReserve, cuMemMap,
cuMemSetAccess), the more restrictive of the two implementations:

- A handle is one physical page and is mapped as a whole; a part of a handle cannot be mapped.
- Costs are per handle, not per byte. Calls therefore take many handles, and a driver may merge
  neighbours into one system call where the system allows it.
- A handle may be mapped at several addresses at once; all see the same bytes.

Error convention: a call that raises `DriverError` has changed nothing. `release`, `free` and
`unmap` raise only for arguments that were never valid, or when the device is lost, so teardown
always completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol

if TYPE_CHECKING:
    import torch

Handle = NewType("Handle", int)
"""One physical page. Unique among the driver's live pages; its size is fixed at creation."""


class ExportedPages(NamedTuple):
    """Pages of one size for another process, which opens them with `Driver.adopt`.

    Attributes:
        page_bytes: their size.
        files: open file descriptors, to be closed by the caller.
        places: of each page, the index of its file and the offset there, in bytes.
    """

    page_bytes: int
    files: Sequence[int]
    places: Sequence[tuple[int, int]]


class Fence(Protocol):
    """A point in the device's work: everything submitted before the fence was made."""

    def passed(self) -> bool:
        """Whether all of that work is done; does not wait."""

    def wait(self) -> None:
        """Wait until all of that work is done."""


class Driver(Protocol):
    """Creator of physical pages, which it maps at reserved addresses."""

    @property
    def name(self) -> str:
        """Name of the driver in errors and in `aquifer info`."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors made by `view`."""

    @property
    def granularity_bytes(self) -> int:
        """Every page size and every address is a multiple of this."""

    @property
    def default_page_bytes(self) -> int:
        """The page size to use unless one is configured."""

    @property
    def large_page_bytes(self) -> int:
        """The page size for large data that moves as a whole, such as a weight matrix.

        Costs are per page, so it is large where the device has large pages; else the default.
        """

    @property
    def max_mappings(self) -> int | None:
        """Maximum number of pages mapped at once, or None if the device sets no limit."""

    @property
    def can_export(self) -> bool:
        """Whether other processes can map its pages."""

    @property
    def runs_ahead(self) -> bool:
        """Whether work may still be running when the call that hands it to the device returns."""

    def available_bytes(self) -> int:
        """Free physical memory that this process could allocate, in bytes."""

    def total_bytes(self) -> int:
        """Physical memory of the device for all processes together, in bytes."""

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        """Device memory that this process holds outside the driver's pages, in bytes.

        0 where the pool does not account for it. Other processes' allocations do not change it.

        Args:
            asks_system: whether all of it is measured. That may keep the device and all calls of
                the driver waiting, the longer the more pages there are. If not, what only the
                system knows is as it was when it was asked last.
        """

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """Create `count` pages of `page_bytes` zeroed bytes each, all or none."""

    def release(self, handles: Sequence[Handle]) -> None:
        """Return pages to the system. Pre-condition: none of them is mapped."""

    def export(self, handles: Sequence[Handle]) -> ExportedPages:
        """Open pages of one size for another process.

        They must not be released while it reads them. Pre-condition: `can_export`.
        """

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        """Open pages that another process has exported, all or none.

        They are mapped, unmapped and released like others; releasing one leaves the page to its
        process. The descriptors stay open.
        """

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses without physical memory; return the first address."""

    def free(self, address: int, num_bytes: int) -> None:
        """Free a whole reservation. Pre-condition: nothing in it is mapped."""

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """Map pages of one size at consecutive addresses from `address` on, all or none.

        Pre-condition: the addresses are reserved and nothing is mapped there.
        """

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """Unmap `count` pages from `address` on; the addresses stay reserved."""

    def fill(self, handles: Sequence[Handle], byte: int) -> None:
        """Overwrite all bytes of pages of one size with the same value, mapped or not."""

    def unlike(self, handles: Sequence[Handle], byte: int) -> list[Handle]:
        """Those of some pages of one size in which any byte has another value, mapped or not.

        It reads all of them, so it is for tests and debug modes. On a device that runs ahead it
        does not wait for kernels that may write to the pages.
        """

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor over reserved addresses, mapped or not.

        The tensor does not keep the reservation alive. Accessing an unmapped address through it
        is a fault.
        """

    def fence(self) -> Fence | None:
        """Return a fence for the work submitted so far to this thread's current stream.

        None if the device is synchronous: work is done when the call that does it returns.
        """

    def close(self) -> None:
        """Return all pages and reservations to the system."""
