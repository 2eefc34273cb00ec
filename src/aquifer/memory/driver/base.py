"""Protocol of a device's virtual memory: all that Aquifer asks of it.

The shape follows CUDA's virtual memory management (cuMemCreate, cuMemAddressReserve, cuMemMap,
cuMemSetAccess), which is the narrower of the two implementations:

- A handle is one physical page and maps whole; there are no parts of a handle.
- Costs are per handle, not per byte, so calls take many handles at once and a driver may merge
  neighbours into one system call where the system allows it.
- A handle may be mapped at several addresses at once; all see the same bytes.

Error convention: a call that raises `DriverError` has changed nothing. `release`, `free` and
`unmap` raise only for arguments that were never valid, or when the device itself is lost, so
teardown cannot get stuck half-way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    import torch

Handle = NewType("Handle", int)
"""One physical page. Unique among the driver's live pages; its size is fixed at creation."""


class Fence(Protocol):
    """A moment in the device's work: everything that was handed to it before this was made."""

    def passed(self) -> bool:
        """Whether all of that work is done; does not wait."""

    def wait(self) -> None:
        """Return when all of that work is done."""


class Driver(Protocol):
    """Creates physical pages, reserves addresses, and maps pages at addresses."""

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
        """The page size to use where none was chosen."""

    @property
    def large_page_bytes(self) -> int:
        """The page size for much data that moves together, such as a weight matrix.

        Costs are per page, so it is large where the device has large pages; else the default.
        """

    @property
    def max_mappings(self) -> int | None:
        """How many pages may be mapped at once, or None where the device sets no limit."""

    @property
    def runs_ahead(self) -> bool:
        """Whether work may still be running when the call that hands it to the device returns."""

    def available_bytes(self) -> int:
        """Physical memory that this process could still take, in bytes."""

    def total_bytes(self) -> int:
        """Physical memory that there is for all processes together, in bytes."""

    def overhead_bytes(self) -> int:
        """Device memory that this process holds beside the driver's pages, in bytes.

        0 where the pool does not account for it. It is this process's own figure, whatever other
        processes take or give back meanwhile, and quick enough to be asked once a second.
        """

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """Create `count` pages of `page_bytes` zeroed bytes each, all or none."""

    def release(self, handles: Sequence[Handle]) -> None:
        """Give pages back to the system. Pre-condition: none of them is mapped."""

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses with nothing behind them; return the first."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give a whole reservation back. Pre-condition: nothing in it is mapped."""

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """Map pages of one size one after the other from `address` on, all or none.

        Pre-condition: the addresses are reserved and nothing is mapped there.
        """

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """Unmap `count` pages from `address` on; the addresses stay reserved."""

    def zero(self, handles: Sequence[Handle]) -> None:
        """Overwrite pages with zeros, mapped or not."""

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor over reserved addresses, whether or not anything is mapped there yet.

        The tensor does not keep the reservation alive. Touching an unmapped address through it
        is a fault.
        """

    def fence(self) -> Fence | None:
        """Mark the work handed to the device so far, by this thread's current stream.

        None where the device does not run ahead, so that there is nothing to wait for.
        """

    def close(self) -> None:
        """Give everything back to the system."""
