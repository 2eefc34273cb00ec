"""Driver of a device without virtual memory: its addresses are memory, from torch's allocator.

A reservation takes the memory of all of its addresses at once, and keeps it until it is freed.
Pages are counted and have no bytes of their own: what is read and written is the memory at the
addresses where a page is mapped. So

- a page is at one place at most: nothing can be shared;
- mapping and unmapping cost no call of the device;
- a page that is mapped at a place finds the bytes which were left there, zeros at first. They are
  of the tenant whose addresses these are, so pages that change their owner need no zeroing.

Tenants that reserve more addresses than they ever use at once, as most do, cannot have it. The
bucketed cache with an arena of a fixed size can.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from aquifer.errors import DriverError, InvariantError
from aquifer.memory.driver.base import Driver, ExportedPages, Fence, Handle


class PlainDriver:
    """The `Driver` of ordinary memory of a device.

    Args:
        inner: driver of the same device. It makes tensors over addresses, fences and figures, and
            none of its pages is used.
    """

    max_mappings = None

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self._numbers = count()
        self._page_bytes: dict[Handle, int] = {}  # live pages -> size
        self._places: dict[Handle, int] = {}  # mapped pages -> address
        self._mapped: dict[int, Handle] = {}  # the opposite
        # address -> what was asked for, and the memory, which begins up to a page before that
        self._reservations: dict[int, tuple[int, torch.Tensor]] = {}

    @property
    def name(self) -> str:
        """The inner driver's name with the prefix "plain"."""
        return f"plain {self._inner.name}"

    @property
    def device(self) -> torch.device:
        """The inner driver's device."""
        return self._inner.device

    @property
    def granularity_bytes(self) -> int:
        """The inner driver's granularity."""
        return self._inner.granularity_bytes

    @property
    def default_page_bytes(self) -> int:
        """The inner driver's default page size."""
        return self._inner.default_page_bytes

    @property
    def large_page_bytes(self) -> int:
        """The inner driver's large page size."""
        return self._inner.large_page_bytes

    @property
    def runs_ahead(self) -> bool:
        """Whether the inner driver runs ahead."""
        return self._inner.runs_ahead

    @property
    def can_export(self) -> bool:
        """No: a page is a part of a reservation."""
        return False

    @property
    def reserved_bytes(self) -> int:
        """Memory of all reservations."""
        return sum(memory.nbytes for _, memory in self._reservations.values())

    def available_bytes(self) -> int:
        """The inner driver's figure."""
        return self._inner.available_bytes()

    def total_bytes(self) -> int:
        """The inner driver's figure."""
        return self._inner.total_bytes()

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        """The inner driver's figure, which counts the reservations, without these."""
        found_bytes = self._inner.overhead_bytes(asks_system=asks_system)
        return max(found_bytes - self.reserved_bytes, 0)

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """Number pages.

        Raises:
            DriverError: their size is no multiple of the granularity.
        """
        if page_bytes <= 0 or page_bytes % self.granularity_bytes:
            raise DriverError(
                "INVALID_VALUE",
                f"page size {page_bytes} is not a positive multiple of {self.granularity_bytes}",
            )
        handles = [Handle(next(self._numbers)) for _ in range(count)]
        self._page_bytes.update(dict.fromkeys(handles, page_bytes))
        return handles

    def export(self, handles: Sequence[Handle]) -> ExportedPages:
        """Never called: see `can_export`."""
        raise InvariantError("pages without virtual memory are not exported")

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        """Never called, likewise."""
        raise InvariantError("pages are not mapped without virtual memory")

    def release(self, handles: Sequence[Handle]) -> None:
        """Forget pages."""
        for handle in handles:
            if handle in self._places or handle not in self._page_bytes:
                raise InvariantError(f"page {handle} is mapped, or was released or never created")
        for handle in handles:
            del self._page_bytes[handle]

    def reserve(self, num_bytes: int) -> int:
        """Take memory, and fill it with zeros.

        Raises:
            DriverError: the device has not so much.
        """
        try:
            memory = torch.zeros(
                num_bytes + self.granularity_bytes, dtype=torch.uint8, device=self.device
            )
        except RuntimeError as error:  # torch.cuda.OutOfMemoryError, or of the host
            raise DriverError(
                "OUT_OF_MEMORY", f"no {num_bytes} bytes of {self.device} are free"
            ) from error
        address = -(-memory.data_ptr() // self.granularity_bytes) * self.granularity_bytes
        self._reservations[address] = num_bytes, memory
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Give the memory back to torch."""
        if self._reservations.get(address, (None,))[0] != num_bytes:
            raise InvariantError(f"{num_bytes} bytes at {address:#x} were never reserved")
        del self._reservations[address]

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """Note where the pages are.

        Raises:
            DriverError: a page is mapped elsewhere.
        """
        for handle in handles:
            if handle in self._places:
                raise DriverError(
                    "NOT_SUPPORTED", "a page of plain memory cannot be at several addresses"
                )
        for handle in handles:
            self._places[handle] = address
            self._mapped[address] = handle
            address += self._page_bytes[handle]

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """The opposite of `map`."""
        for place in range(address, address + count * page_bytes, page_bytes):
            handle = self._mapped.get(place)
            if handle is None or self._page_bytes[handle] != page_bytes:
                raise InvariantError(f"no page of {page_bytes} bytes is mapped at {place:#x}")
            del self._mapped[place], self._places[handle]

    def fill(self, handles: Sequence[Handle], byte: int) -> None:
        """Fill the memory of mapped pages; others have none."""
        for handle in handles:
            if handle in self._places:
                self._memory_of(handle).fill_(byte)

    def unlike(self, handles: Sequence[Handle], byte: int) -> list[Handle]:
        """Look at the memory of mapped pages; others have none."""
        return [
            handle
            for handle in handles
            if handle in self._places and bool((self._memory_of(handle) != byte).any())
        ]

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """The inner driver's tensor over these addresses."""
        return self._inner.view(address, num_bytes)

    def fence(self) -> Fence | None:
        """The inner driver's fence."""
        return self._inner.fence()

    def close(self) -> None:
        """Give all memory back, and close the inner driver, which waits for the device."""
        self._page_bytes.clear()
        self._places.clear()
        self._mapped.clear()
        fence = self.fence()
        if fence is not None:
            fence.wait()
        self._reservations.clear()
        self._inner.close()

    def _memory_of(self, handle: Handle) -> torch.Tensor:
        return self.view(self._places[handle], self._page_bytes[handle])


_: type[Driver] = PlainDriver
