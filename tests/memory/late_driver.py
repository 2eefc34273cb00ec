"""A device that is late: its work is done when a test says so, or when a fence is waited for.

Unmapping what unfinished work touches fails the test on the spot.
"""

from __future__ import annotations

from collections.abc import Sequence

from aquifer.memory.driver.host import HostDriver


class LateFence:
    """Passes when the device has done so many pieces of work."""

    def __init__(self, device: LateDriver, count: int) -> None:
        self._device = device
        self._count = count

    def passed(self) -> bool:
        return self._device.num_done >= self._count

    def wait(self) -> None:
        self._device.num_waits += not self.passed()
        self._device.finish(self._count)


class LateDriver(HostDriver):
    """Host pages under a device that runs behind."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.work: list[frozenset[int]] = []  # addresses of the pages that each piece touches
        self.num_done = 0
        self.num_waits = 0

    def launch(self, addresses: Sequence[int]) -> None:
        self.work.append(frozenset(addresses))

    def finish(self, count: int | None = None) -> None:
        self.num_done = max(self.num_done, len(self.work) if count is None else count)

    def fence(self) -> LateFence:  # type: ignore[override]  # the host has none
        return LateFence(self, len(self.work))

    def unmap(self, address: int, page_bytes: int, count: int) -> None:
        places = range(address, address + count * page_bytes, self.granularity_bytes)
        for touched in self.work[self.num_done :]:
            assert not touched.intersection(places), "unmapped under work in flight"
        super().unmap(address, page_bytes, count)
