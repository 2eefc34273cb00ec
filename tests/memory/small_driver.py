"""A device that has less memory than a pool's budget says."""

from __future__ import annotations

from aquifer.errors import DriverError
from aquifer.memory.driver.base import Handle
from aquifer.memory.driver.host import HostDriver


class SmallDriver(HostDriver):
    """Host pages, up to `max_bytes` at once."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.num_refusals = 0

    def create(self, page_bytes: int, count: int) -> list[Handle]:
        if self.resident_bytes() + count * page_bytes > self.max_bytes:
            self.num_refusals += 1
            raise DriverError("FULL", f"{self.max_bytes} bytes are all there is")
        return super().create(page_bytes, count)
