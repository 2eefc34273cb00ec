"""Fault injection for tests: a driver that fails at a chosen call."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from aquifer.errors import DriverError
from aquifer.memory.driver.base import Driver, ExportedPages, Fence, Handle


class FaultyDriver:
    """Driver that forwards every call to `inner`, but raises at call number `fail_at`.

    Only the calls that a real device may refuse are counted: create, export, adopt, reserve, map,
    fill.

    Attributes:
        num_calls: calls counted so far, including failed ones.
        fail_at: index of the call to fail, counting from 0, or None.
        failed_call: name of the call that failed last, or None.
        mapped_pages: pages mapped now, over all addresses.
        live_handles: pages that are not released yet.
        reservations: bytes of each reservation, by its first address.
    """

    def __init__(self, inner: Driver, fail_at: int | None = None) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.failed_call: str | None = None
        self.num_calls = 0
        self.mapped_pages = 0
        self.live_handles: set[Handle] = set()
        self.reservations: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The inner driver's name with the prefix "faulty"."""
        return f"faulty {self.inner.name}"

    @property
    def device(self) -> torch.device:
        """The inner driver's device."""
        return self.inner.device

    @property
    def granularity_bytes(self) -> int:
        """The inner driver's granularity."""
        return self.inner.granularity_bytes

    @property
    def default_page_bytes(self) -> int:
        """The inner driver's default page size."""
        return self.inner.default_page_bytes

    @property
    def large_page_bytes(self) -> int:
        """The inner driver's large page size."""
        return self.inner.large_page_bytes

    @property
    def max_mappings(self) -> int | None:
        """The inner driver's limit."""
        return self.inner.max_mappings

    @property
    def can_export(self) -> bool:
        """Whether the inner driver can."""
        return self.inner.can_export

    @property
    def runs_ahead(self) -> bool:
        """Whether the inner driver runs ahead."""
        return self.inner.runs_ahead

    @property
    def is_unused(self) -> bool:
        """Whether all pages are unmapped and released, and all reservations freed."""
        return not (self.mapped_pages or self.live_handles or self.reservations)

    def available_bytes(self) -> int:
        """The inner driver's figure."""
        return self.inner.available_bytes()

    def total_bytes(self) -> int:
        """The inner driver's figure."""
        return self.inner.total_bytes()

    def overhead_bytes(self, *, asks_system: bool = True) -> int:
        """The inner driver's figure."""
        return self.inner.overhead_bytes(asks_system=asks_system)

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        """Count, maybe fail, pass on."""
        self._count("create")
        handles = self.inner.create(page_bytes, count)
        self.live_handles.update(handles)
        return handles

    def release(self, handles: Sequence[Handle]) -> None:
        """Pass on."""
        self.live_handles.difference_update(handles)  # first: others may get the same ones
        self.inner.release(handles)

    def export(self, handles: Sequence[Handle]) -> ExportedPages:
        """Count, maybe fail, pass on."""
        self._count("export")
        return self.inner.export(handles)

    def adopt(self, pages: ExportedPages) -> list[Handle]:
        """Count, maybe fail, pass on."""
        self._count("adopt")
        handles = self.inner.adopt(pages)
        self.live_handles.update(handles)
        return handles

    def reserve(self, num_bytes: int) -> int:
        """Count, maybe fail, pass on."""
        self._count("reserve")
        address = self.inner.reserve(num_bytes)
        self.reservations[address] = num_bytes
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Pass on."""
        del self.reservations[address]  # first: another thread may get the same address
        self.inner.free(address, num_bytes)

    def map(self, address: int, handles: Sequence[Handle]) -> None:
        """Count, maybe fail, pass on."""
        self._count("map")
        self.inner.map(address, handles)
        with self._lock:
            self.mapped_pages += len(handles)

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        """Pass on."""
        self.inner.unmap(address, page_bytes, count)
        with self._lock:
            self.mapped_pages -= count

    def fill(self, handles: Sequence[Handle], byte: int) -> None:
        """Count, maybe fail, pass on."""
        self._count("fill")
        self.inner.fill(handles, byte)

    def unlike(self, handles: Sequence[Handle], byte: int) -> list[Handle]:
        """Pass on."""
        return self.inner.unlike(handles, byte)

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """Pass on."""
        return self.inner.view(address, num_bytes)

    def fence(self) -> Fence | None:
        """The inner driver's fence."""
        return self.inner.fence()

    def close(self) -> None:
        """Pass on."""
        self.inner.close()

    def _count(self, call: str) -> None:
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
        if number == self.fail_at:
            self.failed_call = call
            raise DriverError("INJECTED", f"call {number} ({call}) fails by request")
